#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: uninstall
short_description: Removes a host's installation, or only its unneeded releases
description:
  - Removes the whole installation, except downloaded models and the operator's own files. An installation folder that does not contain the mark
    C(.llamacpp.cluster) is kept, too. RV(notes) lists what is kept.
  - With O(unneeded), removes unfinished builds with their logs, and old releases. Two releases of each planned backend and one of any other backend
    stay, and so does any release that is running, planned, or in a kept plan.
extends_documentation_fragment: llamacpp.cluster.attributes.changes
options:
  host:
    description: This host's part of the empty plan; with O(unneeded), its part of the plan.
    type: dict
    required: true
  unneeded:
    description: Whether to remove only releases that the host no longer needs.
    type: bool
    default: false
  account:
    description: Account that compiled releases. Root becomes the owner of the account's files in the cache, so that the account can be removed.
    type: str
  host_name:
    description: Name of the host for messages.
    type: str
    default: this host
"""

EXAMPLES = r"""
- name: Remove the installation
  llamacpp.cluster.uninstall:
    host: "{{ __llama_host_plan }}"
    account: llamacpp-build
    host_name: "{{ inventory_hostname }}"
"""

RETURN = r"""
removed:
  description: Paths that were removed; with O(unneeded), IDs of the removed releases.
  returned: success
  type: list
  elements: str
unfinished_builds:
  description: IDs of unfinished builds whose files were removed.
  returned: success
  type: list
  elements: str
notes:
  description: Sentences about files, folders and packages that were kept.
  returned: success
  type: list
  elements: str
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, files, locks, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import removal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan


def result_of(removals, unfinished_builds, notes=(), old_owners=(), new_owners=()):
    old_lines = [*removals, *(f"builds/{build_id}" for build_id in unfinished_builds), *old_owners]
    diff = {"before": "".join(f"{line}\n" for line in old_lines), "after": "".join(f"{line}\n" for line in new_owners)}
    changes = {"removed": removals, "notes": list(notes), "unfinished_builds": unfinished_builds, "diff": diff}
    return {"changed": bool(old_lines), **changes}


def uninstall(paths, account, host_name, check_mode):
    """Remove the installation, and its mark last, so that the next run can complete a killed run."""
    cache = paths.cache
    if files.is_locked(store.lock_path(cache)):
        raise Refusal(
            f"A build of a killed run is still running on {host_name} ({locks.holders_text(store.lock_path(cache))}): stop it, then run the playbook again"
        )
    chowned_paths = removal.give_to_root(account, cache, check_mode) if account else []
    unfinished_builds = store.unfinished_build_ids(cache, set()) if files.is_marked(Path(paths.prefix)) else []
    if not check_mode:
        for build_id in unfinished_builds:
            store.clear_build(cache, build_id)
    removals, notes = removal.remove_installation(paths, host_name, check_mode)
    old_owners = [f"{path}: {account}" for path in chowned_paths]
    new_owners = [f"{path}: root" for path in chowned_paths]
    return result_of(removals, unfinished_builds, notes, old_owners, new_owners)


def prune(host, check_mode):
    """Remove releases that the host no longer needs, and unfinished builds."""
    unneeded_releases = state.unneeded_releases(host)
    installed_names = {path.name for path in Path(host.prefix, "releases").glob("*")}
    unfinished_builds = store.unfinished_build_ids(host.cache, installed_names | {build.id for build in host.builds})
    if not check_mode:
        for build in host.builds:  # makes the serving releases count as newer than unused builds
            os.utime(Path(host.prefix, "releases", build.id).resolve(strict=True))
        for build_id in unneeded_releases:
            store.remove_release(host.prefix, host.cache, build_id)
        for build_id in unfinished_builds:
            store.clear_build(host.cache, build_id)
    return result_of(unneeded_releases, unfinished_builds)


def main():
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "dict", "required": True},
            "unneeded": {"type": "bool", "default": False},
            "account": {"type": "str"},
            "host_name": {"type": "str", "default": "this host"},
        },
        supports_check_mode=True,
        no_log=True,
    )
    params = module.params
    with errors.report_errors(module):
        if params["unneeded"]:
            result = prune(typed_json.parse(HostPlan, params["host"]), module.check_mode)
        else:
            paths = typed_json.parse(InstallationPaths, params["host"])
            result = uninstall(paths, params["account"], params["host_name"], module.check_mode)
    module.exit_json(**result)


if __name__ == "__main__":
    main()

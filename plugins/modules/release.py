#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: release
short_description: Builds a release of llama.cpp and installs it
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Fetches the source to the controller, checks it, and on the host unpacks, configures, compiles and installs it.
  - What one host has built is packed, kept on the controller, and installed on the other hosts of its kind.
  - For a distribution's package that is installed already, it makes only links and the manifest. Programs that were compiled elsewhere
    are unpacked with their libraries.
  - Before a release is installed, its programs are tried on the host's processor. Where one does not work, no running service is touched.
  - An installed release whose files are intact is left alone.
  - An action plugin of the same name shows the progress of a build every few seconds.
extends_documentation_fragment:
  - llamacpp.cluster.attributes
attributes:
  check_mode:
    support: full
    details: Reports whether the release would be built, and which ones would be removed once the planned services run.
  diff_mode:
    support: full
    details: Shows the release that would be added, or those that would be removed.
  idempotent:
    support: full
options:
  state:
    description:
      - V(fetched) only brings the source archive to the cache of the controller. It returns C(path).
      - V(present) builds and installs.
      - V(packed) packs the installed release for other hosts. It returns C(path).
      - V(pruned) removes releases that O(host) keeps no longer, with the logs and leftovers of their builds. One that is planned, that a
        service's definition names or that a process runs is never removed. Builds that never ended go too, unless they are planned, installed or run.
      - V(removed) removes the whole installation of O(host), except fetched models and the operator's own. A folder without C(.llamacpp.cluster), and
        anything others put beside the installation, stays; C(left) lists it.
    type: str
    choices: [fetched, packed, present, pruned, removed]
    default: present
  release:
    description: The release as the plan holds it. Needed unless O(state=pruned) or O(state=removed).
    type: dict
  build:
    description: This host's build as the plan holds it.
    type: dict
  prefix:
    description: Folder of the installation.
    type: path
  cache:
    description: Folder for sources and builds, kept from run to run.
    type: path
  host:
    description: This host's part of the plan. Needed for O(state=pruned) and O(state=removed).
    type: dict
  brought:
    description: What the action plugin has fetched and copied to the host. That is C(archive), its C(sha256), C(commit) and C(patches).
    type: dict
  received:
    description: A release that another host of its kind has packed. That is its C(path) on the host, where the action plugin copies it, and its C(sha256).
    type: dict
  recorded:
    description:
      - What the controller recorded of this build when it was built, C(sha256) of each file. An installed release with other files is installed again.
    type: dict
    default: {}
  unwanted:
    description:
      - C(sha256) of each file of a release that this host got from another one, and has to compile itself now. A release with precisely these files counts
        as missing.
    type: dict
    default: {}
  share:
    description: Whether other hosts are to get this host's release. It is then packed and kept in the controller's cache.
    type: bool
    default: false
  cluster:
    description: Name of the cluster. The controller keeps built releases for each cluster by itself. Needed for O(state=present).
    type: str
  account:
    description:
      - Account that builds. Without it the connecting user builds.
      - With O(state=removed), what that account still runs is ended first, and what it has in the cache becomes root's. Teardown needs that before it
        removes the account.
    type: str
  services:
    description:
      - The host's services as planned. With O(state=present) their command lines are compared with what the installed programs list in their
        help. An option that a program does not know ends the run, before any running service is touched.
    type: list
    elements: dict
    default: []
  host_name:
    description: Name of the host in messages.
    type: str
    default: this host
seealso:
  - module: llamacpp.cluster.plan
  - module: llamacpp.cluster.release_proof
  - module: llamacpp.cluster.clean
"""

EXAMPLES = r"""
- name: Build the planned release
  llamacpp.cluster.release:
    release: "{{ __llama_plan.release }}"
    build: "{{ __llama_host_plan.builds[0] }}"
    prefix: "{{ __llama_host_plan.prefix }}"
    cache: "{{ __llama_host_plan.cache }}"
    services: "{{ __llama_host_plan.services }}"
    host_name: "{{ inventory_hostname }}"

- name: Remove releases that are no longer needed
  llamacpp.cluster.release:
    state: pruned
    host: "{{ __llama_host_plan }}"
"""

RETURN = r"""
manifest:
  description: What was installed, with a hash for each file. The options that its programs list stand in C(manifest.json) only.
  returned: when the release is installed
  type: dict
  sample: {"id": "pypi-0.3.36-cpu-1f2e3d4c", "seconds": 262, "files": {"bin/llama-server": "8f1c..."}}
path:
  description: The archive in the controller's cache, or the packed release on the host.
  returned: when O(state=fetched) or O(state=packed)
  type: str
  sample: /home/user/.cache/llamacpp/sources/832db0699007f1be.tar.gz
removed:
  description: Ids of the releases that were removed, or paths with O(state=removed).
  returned: when O(state=pruned) or O(state=removed)
  type: list
  elements: str
  sample: ["pypi-0.3.20-cpu-1f2e3d4c"]
abandoned:
  description: Ids of builds that never ended and whose leftovers were removed.
  returned: when O(state=pruned) or O(state=removed)
  type: list
  elements: str
  sample: ["b8600-hip-5a6b7c8d"]
left:
  description: What stays under our names, a sentence each.
  returned: when O(state=removed)
  type: list
  elements: str
  sample: ["/opt/llamacpp on head stays: it has no .llamacpp.cluster, so it is not an installation of this collection."]
"""

import os
import subprocess
import tarfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, files
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import firewall, ownership
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import building, store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state


def install(params):
    """The manifest of what was installed, or None where the controller still has to copy what is needed."""
    build, release = params["build"], params["release"]
    installer = building.Installer(params["prefix"], build, params["account"])
    if release["source"] == "package":
        return installer.link({key: release[key] for key in ("source", "version")})
    if params["received"]:
        return installer.receive(params["received"]["path"], params["received"]["sha256"], params["recorded"])
    if not params["brought"]:
        return None
    source = {**params["brought"], "number": release["build"]}
    if release["source"] == "binary":
        return installer.unpack({key: source[key] for key in ("archive", "sha256", "commit", "number")})
    source["member"] = release["member"]
    builder = building.Builder(params["prefix"], params["cache"], build, source, params["account"])
    return builder.install(params["recorded"], params["unwanted"])


def report(module, manifest, **result):
    """Ends the module with the manifest, or with the planned options that the programs do not know."""
    params, build = module.params, module.params["build"]
    installer = building.Installer(params["prefix"], build, params["account"])
    compared = building.compare(installer, manifest, params["services"], params["release"], params["host_name"])
    for warning in compared.warnings:
        module.warn(warning)
    if manifest["options_ignored"]:
        module.warn(
            f"cmake ignored {', '.join(manifest['options_ignored'])} when {build['id']} was built, since its tree has no such option: remove it from "
            "llama_build_cmake_options, or set llama_release to a build that has it"
        )
    if compared.errors:
        module.fail_json(msg=f"{'. '.join(compared.errors)}. No running service was touched.", **result)
    shown = {key: value for key, value in manifest.items() if key != "options"}
    module.exit_json(manifest=shown, **result)


def prune(module):
    """Removes what is not needed any more. The time of a release's folder is set to now, so that what served until now is kept before what was built later."""
    host = module.params["host"]
    unneeded = state.unneeded_releases(host, applied=module.check_mode)
    installed = {path.name for path in Path(host["prefix"], "releases").glob("*")}
    abandoned = store.unfinished_builds(host["cache"], installed | {build["id"] for build in host["builds"]})
    try:
        if not module.check_mode:
            for build in host["builds"]:
                os.utime(Path(host["prefix"]) / "releases" / build["id"])
            for identity in unneeded:
                store.remove_release(host["prefix"], host["cache"], identity)
            abandoned = [identity for identity in abandoned if store.clear_build(host["cache"], identity)]
    except OSError as error:
        module.fail_json(msg=f"{', '.join(unneeded) or 'Old releases'} could not be removed: {errors.sentence(error)}")
    gone = [*unneeded, *(f"builds/{identity}" for identity in abandoned)]
    diff = {"before": "".join(name + "\n" for name in gone), "after": ""}
    module.exit_json(changed=bool(gone), removed=unneeded, abandoned=abandoned, diff=diff)


def remove(module):
    """Removes the installation, its mark last: until then a run that is killed is completed by the next one."""
    host, account, check = module.params["host"], module.params["account"], module.check_mode
    cache = host["cache"]
    if account and not check:
        building.end_builds(account, cache)
    given = ownership.give_back(account, cache, check) if account else []
    abandoned = store.unfinished_builds(cache, set()) if files.is_marked(Path(host["prefix"])) else []
    if not check:
        abandoned = [identity for identity in abandoned if store.clear_build(cache, identity)]
    removed, left = ownership.remove(host, module.params["host_name"], check)
    before = [*removed, *(f"builds/{identity}" for identity in abandoned), *(f"{path}: {account}" for path in given)]
    diff = {"before": "".join(f"{line}\n" for line in before), "after": "".join(f"{path}: root\n" for path in given)}
    module.exit_json(changed=bool(before), removed=removed, left=left, abandoned=abandoned, diff=diff)


BY_HOST = {"pruned": prune, "removed": remove}
"""State → what brings a host there, given its part of the plan."""


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["fetched", "packed", "present", *BY_HOST], "default": "present"},
            "release": {"type": "dict"},
            "build": {"type": "dict"},
            "prefix": {"type": "path"},
            "cache": {"type": "path"},
            "host": {"type": "dict"},
            "brought": {"type": "dict"},
            "received": {"type": "dict"},
            "recorded": {"type": "dict", "default": {}},
            "unwanted": {"type": "dict", "default": {}},
            "share": {"type": "bool", "default": False},
            "cluster": {"type": "str"},
            "account": {"type": "str"},
            "services": {"type": "list", "elements": "dict", "default": []},
            "host_name": {"type": "str", "default": "this host"},
        },
        required_if=[
            *(("state", kind, ("release", "build", "prefix", "cache")) for kind in ("present", "packed")),
            ("state", "fetched", ("release",)),
            *(("state", kind, ("host",)) for kind in BY_HOST),
        ],
        supports_check_mode=True,
        no_log=True,
    )
    params = module.params
    build = params["build"]
    os.umask(0o022)
    if params["state"] == "fetched":
        module.fail_json(msg="state: fetched runs on the controller, in the action plugin llamacpp.cluster.release.")
    if params["state"] in BY_HOST:
        with errors.reported(module, building.BuildError, firewall.FirewallError):
            BY_HOST[params["state"]](module)
    release = Path(params["prefix"]) / "releases" / build["id"]
    manifest = store.installed(release, build["targets"], params["recorded"], params["unwanted"])
    diff = {"before": "", "after": build["id"] + "\n"}
    is_compiled = params["release"]["source"] not in ("package", "binary")
    try:
        if params["state"] == "packed":
            module.exit_json(changed=False, path=building.pack(params["prefix"], params["cache"], build))
        if manifest:
            report(module, manifest, changed=False)
        if not module.check_mode:
            manifest = install(params)
        if manifest:
            report(module, manifest, changed=True, diff=diff)
    except (building.BuildError, KeyError, tarfile.TarError, subprocess.SubprocessError) as error:
        module.fail_json(msg=f"Installing {build['id']}: {error}")
    except OSError as error:
        said = errors.sentence(error, params["prefix"], params["cache"])
        goes_on = " The build continues where it stopped." if params["brought"] and is_compiled else ""
        module.fail_json(msg=f"Installing {build['id']}: {said}{goes_on}")
    module.exit_json(changed=True, diff=diff)


if __name__ == "__main__":
    main()

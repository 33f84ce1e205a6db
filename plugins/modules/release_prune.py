#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: release_prune
short_description: Removes releases of llama.cpp that a host keeps no longer
description:
  - Removes releases of O(host) beyond two of each backend, with the logs and leftovers of their builds. One that is planned, that a service's
    definition names or that a process runs is never removed.
  - Builds that never ended go too, unless they are planned, installed or run.
extends_documentation_fragment: [llamacpp.cluster.attributes.changes, llamacpp.cluster.attributes.host]
attributes:
  check_mode:
    details: Reports which releases would be removed once the planned services run.
seealso:
  - module: llamacpp.cluster.release
"""

EXAMPLES = r"""
- name: Remove releases that are no longer needed
  llamacpp.cluster.release_prune:
    host: "{{ __llama_host_plan }}"
"""

RETURN = r"""
removed:
  description: Ids of the releases that were removed.
  returned: success
  type: list
  elements: str
abandoned:
  description: Ids of builds that never ended and whose leftovers were removed.
  returned: success
  type: list
  elements: str
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan


def main():
    module = AnsibleModule(
        argument_spec={"host": {"type": "dict", "required": True}}, supports_check_mode=True, no_log=True
    )
    host, check = typed_json.parse(HostPlan, module.params["host"]), module.check_mode
    with errors.reported(module):
        unneeded = state.unneeded_releases(host)
        installed = {path.name for path in Path(host.prefix, "releases").glob("*")}
        abandoned = store.unfinished_builds(host.cache, installed | {build.id for build in host.builds})
    try:
        if not check:
            for build in host.builds:  # so that what served until now is kept before what was built later
                os.utime(Path(host.prefix, "releases", build.id))
            for identity in unneeded:
                store.remove_release(host.prefix, host.cache, identity)
            for identity in abandoned:
                store.clear_build(host.cache, identity)
    except OSError as error:
        module.fail_json(msg=f"{', '.join(unneeded) or 'Old releases'} could not be removed: {errors.sentence(error)}")
    gone = [*unneeded, *(f"builds/{identity}" for identity in abandoned)]
    diff = {"before": "".join(name + "\n" for name in gone), "after": ""}
    module.exit_json(changed=bool(gone), removed=unneeded, abandoned=abandoned, diff=diff)


if __name__ == "__main__":
    main()

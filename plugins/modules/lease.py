#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: lease
short_description: Lets one run at a time change a cluster
description:
  - Keeps a file C(lease.json) in the installation of the head, which names the run that may change hosts. A second run fails at once and says who that is.
  - A lease belongs to nobody any more when its run was one of the same controller and has ended, or when it was not renewed for two hours of the head's clock.
    The next run takes it over then, and any time with O(take_over).
  - Where the head cannot be reached, there is a warning and no lease.
  - An action plugin adds what the controller knows of the run. Others renew the lease while they wait for a build, a download or a load on the head.
extends_documentation_fragment: [llamacpp.cluster.attributes, llamacpp.cluster.attributes.installation]
options:
  prefix:
    description: The installation of the head. All states but V(located) need it.
    type: path
  create:
    description:
      - Whether to create O(prefix) where it is missing, and to mark it as this collection's. Without it there is no lease in a folder without that mark.
    type: bool
    default: false
  state:
    description:
      - V(acquired) gives the lease to this run, or renews it.
      - V(renewed) renews it, and fails if this run does not hold it any more.
      - V(released) gives it back.
      - V(located) finds out where the installation of the head is, as P(llamacpp.cluster.host_info#module) does, by O(cluster) and O(scope). The action
        plugin does it.
    type: str
    choices: [acquired, renewed, released, located]
    default: acquired
  take_over:
    description: Whether V(acquired) takes the lease from any run that holds it.
    type: bool
    default: false
  run:
    description: This run. The action plugin gives it.
    type: dict
  ended:
    description: A run that has ended, as the controller knows. The action plugin gives it.
    type: str
    default: ''
seealso:
  - module: llamacpp.cluster.plan_history
"""

EXAMPLES = r"""
- name: Let no other run change this cluster meanwhile
  llamacpp.cluster.lease:
    prefix: /opt/llamacpp
"""

RETURN = r"""
facts:
  description: Facts of the head.
  returned: when O(state=located)
  type: dict
  sample: {"prefix": "/opt/llamacpp", "scope": "system"}
taken_from:
  description: The run whose lease was taken over. Empty where nobody had it.
  returned: success
  type: str
  sample: site.yml of anna on laptop7 (process 4711) since 2026-11-22 12:03:10 UTC
holder:
  description: The run that holds the lease.
  returned: when another run holds it
  type: dict
  sample: {"user": "anna", "controller": "laptop7", "process": 4711}
"""

import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, files, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import lease
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LeaseArguments


def main():
    module = AnsibleModule(
        argument_spec=typed_json.specification(LeaseArguments),
        required_if=[("state", state, ["prefix", "run"]) for state in ("acquired", "renewed", "released")],
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, taken_from="")
    wanted = module.params
    prefix = Path(wanted["prefix"])
    with errors.reported(module):
        if wanted["create"]:
            prefix.mkdir(mode=0o755, parents=True, exist_ok=True)
            (prefix / names.FOLDER_MARK).mkdir(mode=0o755, exist_ok=True)
        if not files.is_marked(prefix):
            module.exit_json(changed=False, taken_from="")
        taken_from = ""
        try:
            if wanted["state"] == "acquired":
                run = typed_json.parse(lease.Holder, {**wanted["run"], "since": int(time.time())})
                taken_from = lease.acquire(prefix, run, wanted["ended"], wanted["take_over"])
            elif wanted["state"] == "renewed":
                lease.renew(prefix, wanted["run"]["run"])
            else:
                lease.release(prefix, wanted["run"]["run"])
        except lease.HeldError as error:
            module.fail_json(msg=str(error), holder=typed_json.dump(error.holder or {}))
    module.exit_json(changed=False, taken_from=taken_from)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: plan_history
short_description: Records the plans of a host
description:
  - Writes the host's own part of a plan below the installation before services change, and records afterwards that it served.
  - At most five records stay. The newest two that served are never removed, and neither are their builds.
extends_documentation_fragment: llamacpp.cluster.attributes
options:
  state:
    description:
      - V(recorded) records the host's part of O(plan) as one that is applied now, unless it is the one that served last.
      - V(served) records that the plan O(id) serves.
    type: str
    choices: [recorded, served]
    required: true
  prefix:
    description: Folder of the installation.
    type: path
    required: true
  plan:
    description: The whole plan, for V(recorded). An action plugin takes the host's part of it.
    type: dict
  record:
    description: What is recorded. The action plugin makes it from O(plan).
    type: dict
  id:
    description: Id of the plan that serves.
    type: str
seealso:
  - module: llamacpp.cluster.plan_history_info
  - module: llamacpp.cluster.rollback
"""

EXAMPLES = r"""
- name: Record the plan on each host
  llamacpp.cluster.plan_history:
    state: recorded
    prefix: /opt/llamacpp
    plan: "{{ plan }}"
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import plan_history
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["recorded", "served"], "required": True},
            "prefix": {"type": "path", "required": True},
            "plan": {"type": "dict"},
            "record": {"type": "dict"},
            "id": {"type": "str"},
        },
        required_if=[("state", "recorded", ("record",)), ("state", "served", ("id",))],
        supports_check_mode=True,
        no_log=True,
    )
    prefix = module.params["prefix"]
    with errors.reported(module):
        if module.params["state"] == "recorded":
            record = typed_json.parse(history.PlanRecord, module.params["record"])
            changed = plan_history.record(prefix, record, module.check_mode)
        else:
            changed = plan_history.mark_served(prefix, module.params["id"], module.check_mode)
    module.exit_json(changed=changed)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: kept_plan
short_description: Keeps a host's part of a plan for a rollback
description:
  - Keeps the host's part of the current plan, of the previous plan and, while services change, of the new plan in the installation folder.
extends_documentation_fragment: llamacpp.cluster.attributes
options:
  prefix:
    description: Installation folder.
    type: path
    required: true
  plan:
    description: The whole plan that is being applied. The action plugin selects the host's part.
    type: dict
  begun_record:
    description: The host's part of O(plan), as it is kept. The action plugin sets it.
    type: dict
  served_plan_id:
    description: ID of a kept plan that serves now, and so becomes the current plan.
    type: str
"""

EXAMPLES = r"""
- name: Keep the plan on each host
  llamacpp.cluster.kept_plan:
    prefix: /opt/llamacpp
    plan: "{{ plan }}"
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import kept_plans
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import KeptPlan


def main():
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "path", "required": True},
            "plan": {"type": "dict"},
            "begun_record": {"type": "dict"},
            "served_plan_id": {"type": "str"},
        },
        required_one_of=[("begun_record", "served_plan_id")],
        supports_check_mode=True,
        no_log=True,
    )
    prefix, record = module.params["prefix"], module.params["begun_record"]
    with errors.report_errors(module):
        if record:
            is_changed = kept_plans.keep_plan(prefix, typed_json.parse(KeptPlan, record), module.check_mode)
        else:
            is_changed = kept_plans.mark_served(prefix, module.params["served_plan_id"], module.check_mode)
    module.exit_json(changed=is_changed)


if __name__ == "__main__":
    main()

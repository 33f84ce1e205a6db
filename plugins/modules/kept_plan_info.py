#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kept_plan_info
short_description: Reads the plans that a host keeps, and compares the host with each
description:
  - Reads what M(llamacpp.cluster.kept_plan) keeps.
extends_documentation_fragment: llamacpp.cluster.attributes.info
options:
  prefix:
    description: Folder of the installation.
    type: path
    required: true
seealso:
  - module: llamacpp.cluster.kept_plan
  - module: llamacpp.cluster.rollback
"""

EXAMPLES = r"""
- name: Read the plans of the host
  llamacpp.cluster.kept_plan_info:
    prefix: /opt/llamacpp
"""

RETURN = r"""
kept:
  description: V(next) while a plan is applied, V(now) and V(before), each with the plan, how the host differs from it, and what its services miss.
  returned: success
  type: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import kept_plans
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state


def compared(plan):
    """A kept plan, how the host differs from it, and files that its services read and that are missing."""
    wanted = {path for service in plan.host.services for path in service.reads}
    made = {file.path for file in plan.host.files if file.content is None}
    drift = state.drift(plan.host._replace(knocks=()))
    missing = {path for path in wanted if not os.path.isfile(path)} | made.intersection(drift.changed_files)
    missing.update(drift.changed_models)
    return {"plan": typed_json.dump(plan), "drift": typed_json.dump(drift), "missing": sorted(missing)}


def main():
    module = AnsibleModule(
        argument_spec={"prefix": {"type": "path", "required": True}}, supports_check_mode=True, no_log=True
    )
    with errors.reported(module):
        plans = {place: kept_plans.read(module.params["prefix"], place) for place in kept_plans.PLACES}
        found = {place: compared(plan) if plan else None for place, plan in plans.items()}
    module.exit_json(changed=False, kept=found)


if __name__ == "__main__":
    main()

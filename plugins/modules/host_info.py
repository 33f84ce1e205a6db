#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: host_info
short_description: Reports the facts of a host and its differences from the plan
description:
  - Probes system, processor, memory, accelerators, toolchain and service manager in one call.
  - If O(plan) is set, reports the host's differences from the plan, and fails if the host has a folder, service or firewall table with a planned
    name that this collection did not create.
extends_documentation_fragment: [llamacpp.cluster.attributes.info, llamacpp.cluster.attributes.installation]
options:
  packages:
    description: Names of llama.cpp packages by distribution family. The module reports which of them are installed.
    type: dict
    default: {}
  plan:
    description: The host's part of the plan. If set, only RV(drift) is returned.
    type: dict
  only_kept_plans:
    description: Whether to return only RV(kept_plans).
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Probe the host
  llamacpp.cluster.host_info:
  register: __llama_facts
"""

RETURN = r"""
facts:
  description: Facts for planning. Sizes are in MiB.
  returned: when O(plan) is not set
  type: dict
drift:
  description: The host's differences from the plan, and the state of each planned service.
  returned: when O(plan) is set
  type: dict
kept_plans:
  description: The plans that M(llamacpp.cluster.kept_plan) keeps, C(next) (while it is being applied), C(now) and C(before), each with the host's
    differences from this plan, and the missing files of its services.
  returned: when O(only_kept_plans) is true
  type: dict
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import detect_paths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import kept_plans, ownership
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, Scope


class HostInfoArguments(NamedTuple):
    scope: Scope = "auto"
    packages: Mapping[str, Any] = {}
    plan: Optional[HostPlan] = None
    only_kept_plans: bool = False


def compare_kept_plan(plan):
    """Return a kept plan with the host's differences from it, and missing files that its services read."""
    needed_paths = {path for service in plan.host.services for path in service.reads}
    generated_paths = {file.path for file in plan.host.files if file.content is None}
    drift = state.compare_host(plan.host._replace(port_probes=()))
    missing_paths = {path for path in needed_paths if not os.path.isfile(path)} | generated_paths.intersection(
        drift.changed_files
    )
    missing_paths.update(drift.model_files)
    return {"plan": typed_json.dump(plan), "drift": typed_json.dump(drift), "missing": sorted(missing_paths)}


def report_host(arguments):
    if arguments.only_kept_plans:
        prefix = detect_paths(arguments.scope).prefix
        plans = {slot: kept_plans.read_plan(prefix, slot) for slot in kept_plans.SLOTS}
        return {"kept_plans": {slot: compare_kept_plan(plan) if plan else None for slot, plan in plans.items()}}
    host_plan = arguments.plan
    if host_plan is None:
        return {"facts": host.facts(arguments.scope, arguments.packages)}
    ownership.check_ownership(host_plan)
    drift = state.compare_host(host_plan)
    result = {"drift": typed_json.dump(drift)}
    port_problem = state.port_problem(host_plan.services, drift.services)
    return {**result, "msg": port_problem} if port_problem else result


def main():
    module = AnsibleModule(
        argument_spec=typed_json.specification(HostInfoArguments), supports_check_mode=True, no_log=True
    )
    with errors.report_errors(module):
        result = report_host(typed_json.parse(HostInfoArguments, module.params))
    if "msg" in result:
        module.fail_json(**result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()

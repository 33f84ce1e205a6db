# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sends each host its part of a plan to keep."""

from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.action import files
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import SCHEMA, KeptPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class KeptPlanArguments(NamedTuple):
    prefix: str
    plan: Plan | None = None
    served_plan_id: str | None = None


class ActionModule(Action):
    ARGUMENTS = KeptPlanArguments

    def perform(self, arguments: KeptPlanArguments) -> dict:
        record, plan = None, arguments.plan
        if plan:
            variables = inventory.changed_variables(self.variables, self.host, plan.release)
            record = typed_json.dump(kept_plan_of(plan, self.host)._replace(variables=variables))
        return self.run_module(prefix=arguments.prefix, served_plan_id=arguments.served_plan_id, begun_record=record)


def kept_plan_of(plan: Plan, name: str) -> KeptPlan:
    """Return the plan that a host keeps, with the texts of files instead of their paths on the controller."""
    host = plan.hosts[name]
    return KeptPlan(
        schema=SCHEMA,
        id=plan.id or "",
        cluster=plan.cluster,
        hosts=tuple(plan.hosts),
        release=plan.release.ref,
        declared=release_request.release_json(plan.release),
        model=typed_json.dump(plan.model),
        host=host._replace(files=tuple(map(files.embed_text, host.files))),
        head=typed_json.dump(plan.head) if name == plan.head.host else None,
    )

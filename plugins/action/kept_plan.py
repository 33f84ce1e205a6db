# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hands each host its own part of a plan to keep."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.kept_plan import SCHEMA, KeptPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class Arguments(NamedTuple):
    prefix: str
    plan: Plan | None = None
    served: str | None = None


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        begun, plan = None, arguments.plan
        if plan:
            variables = inventory.set_variables(self.variables, self.host, plan.release)
            begun = typed_json.dump(kept_plan(plan, self.host)._replace(variables=variables))
        return self.module(prefix=arguments.prefix, served=arguments.served, begun=begun)


def kept_plan(plan: Plan, name: str) -> KeptPlan:
    """What a host keeps of a plan, with the text of files in place of their path on the controller."""
    host = plan.hosts[name]
    files = tuple(file._replace(source=None, content=_text(file)) if file.source else file for file in host.files)
    return KeptPlan(
        schema=SCHEMA,
        id=plan.id or "",
        cluster=plan.cluster,
        hosts=tuple(plan.hosts),
        release=plan.release.ref,
        declared=release_request.declaration(plan.release),
        model=typed_json.dump(plan.model),
        host=host._replace(files=files),
        head=typed_json.dump(plan.head) if name == plan.head.host else None,
    )


def _text(file: FilePlan) -> str | None:
    """Of a file of the controller; None of a program, whose path on the host is that of this version alone."""
    return None if file.mode == "0755" else Path(str(file.source)).read_text()

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides what an apply has to do, and shows it. Everything that it takes is an argument of the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.filter.missing_collection import missing_collection
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text


class Tools(NamedTuple):
    """Of a host's facts, what is there to compile with."""

    tools: tuple[str, ...] = ()


class Arguments(NamedTuple):
    plan: Plan
    answers: Mapping[str, Any] = {}
    facts: Mapping[str, Any] = {}
    parts: tuple[str, ...] = ()
    page: bool = False
    report: ControllerPath | None = None


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        plan = arguments.plan
        answers = changes.read(plan.hosts, arguments.answers)
        tools = {
            name: typed_json.reported(name, "its tools", Tools, found["facts"]).tools
            for name, found in arguments.facts.items()
            if found.get("facts")
        }
        drifts = changes.compared(answers)
        decided = changes.decide(plan, drifts)
        changes.check_parts(plan.cluster, decided, arguments.parts)
        for name, kinds in decided.kinds.items() if "services" in arguments.parts else ():
            manager = plan.hosts[name].firewall_manager
            if "firewall" in kinds and (needed := missing_collection(manager)):
                raise Refusal(
                    f"{name} has {manager}, which the collection {needed} drives: run ansible-galaxy collection install {needed}, and the playbook again"
                )
        lacking = changes.missing_tools(plan, tools, decided.builders)
        if arguments.page:
            unasked = {name: answer.why for name, answer in answers.items() if answer.why}
            changed = plan_text.changes_of(plan, decided.restarts, drifts, unasked, lacking if decided.behind else {})
            output.show_plan(plan, changed, arguments.report)
        return {"changed": False, **typed_json.dump(decided), "lacking": lacking}

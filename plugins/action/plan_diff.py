# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides what site.yml has to change, and shows the changes. All input is in the task's arguments."""

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


class ToolFacts(NamedTuple):
    """The part of a host's facts about tools for compiling."""

    tools: tuple[str, ...] = ()


class PlanDiffArguments(NamedTuple):
    plan: Plan
    answers: Mapping[str, Any] = {}
    facts: Mapping[str, Any] = {}
    parts: tuple[str, ...] = ()
    page: bool = False
    report: ControllerPath | None = None


class ActionModule(Action):
    ARGUMENTS = PlanDiffArguments

    def perform(self, arguments: PlanDiffArguments) -> dict:
        plan = arguments.plan
        answers = changes.parse_answers(plan.hosts, arguments.answers)
        tools = {
            name: typed_json.parse_report(name, "its tools", ToolFacts, answer["facts"]).tools
            for name, answer in arguments.facts.items()
            if answer.get("facts")
        }
        drifts = changes.comparable_drifts(answers)
        decision = changes.decide(plan, drifts)
        changes.check_parts(plan.cluster, decision, arguments.parts)
        for name, kinds in decision.kinds.items() if "services" in arguments.parts else ():
            manager = plan.hosts[name].firewall_manager
            if "firewall" in kinds and (collection := missing_collection(manager)):
                raise Refusal(
                    f"{name} uses {manager}, which needs the collection {collection}: run ansible-galaxy collection install {collection}, then this playbook"
                )
        missing_packages = changes.missing_tools(plan, tools, decision.builders)
        if arguments.page:
            skipped_hosts = {name: answer.reason for name, answer in answers.items() if answer.reason}
            lines = plan_text.change_lines(
                plan, decision.restarts, drifts, skipped_hosts, missing_packages if decision.outdated_hosts else {}
            )
            output.show_plan(plan, lines, arguments.report)
        return {"changed": False, **typed_json.dump(decision), "missing_packages": missing_packages}

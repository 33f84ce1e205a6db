# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides what an apply has to do, and shows it. Everything that it takes is an argument of the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath

TOOLS = {"tools": validation.Maybe([validation.Text()])}


def _tools(facts):
    """Host → tools that it has, of those whose facts are known."""
    return {
        name: validation.reported(name, "its tools", found["facts"], TOOLS)["tools"] or []
        for name, found in facts.items()
        if found.get("facts")
    }


class Arguments(NamedTuple):
    plan: Plan
    answers: Mapping[str, Any] = {}
    facts: Mapping[str, Any] = {}
    page: bool = False
    report: ControllerPath | None = None


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        plan = arguments.plan
        answers = changes.read(plan.hosts, arguments.answers)
        tools = _tools(arguments.facts)
        drifts = changes.compared(answers)
        decided = changes.decide(plan, drifts)
        if arguments.page:
            unasked = {name: answer.why for name, answer in answers.items() if answer.why}
            changed = plan_text.changes_of(plan, decided.restarts, drifts, unasked)
            output.show_plan(plan, changed, arguments.report)
        return {
            "changed": False,
            **decided._asdict(),
            "lacking": changes.missing_tools(plan, tools, decided.builders),
        }

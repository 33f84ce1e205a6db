# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shows how a cluster is. What hosts report is compared with its form before it counts; one that reports something else is shown as such."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes, rollback
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import cluster_status, status_text, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.status.cluster_status import StatusAnswer
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath

display = Display()


def _last(answer: Any, facts: Any) -> Any:
    """What a host returned last: of one that could not be asked for its facts, that is all there is."""
    asked = isinstance(answer, Mapping) and any(answer.get(key) for key in ("condition", "msg"))
    return answer if asked else facts


def _read(plan: Plan | None, name: str, answer: Any) -> StatusAnswer:
    """What a host said. Where it has another form than host_status gives it, that is all it said."""
    if not isinstance(answer, Mapping) or not answer.get("condition") or answer.get("failed"):
        found = answer if isinstance(answer, Mapping) else {}
        words = " ".join(str(found.get("msg") or "").split()).removeprefix("Task failed: ")
        said = validation.printable(words, changes.ERROR_LENGTH) or "it was not asked"
        return StatusAnswer(said=said, reachable=not found.get("unreachable"))
    try:
        condition = typed_json.reported(name, "its condition", types.Condition, answer["condition"])
        return StatusAnswer(condition, changes.read({name: plan.hosts[name]}, {name: answer})[name].drift if plan else None)
    except Refusal as refusal:
        return StatusAnswer(said=str(refusal))


class Arguments(NamedTuple):
    plan: Mapping[str, Any]
    heads: tuple[str, ...]
    answers: Mapping[str, Any]
    facts: Mapping[str, Any] = {}
    path: ControllerPath | None = None
    fail: bool = True


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        given = arguments.plan
        plan = None if given["refused"] else typed_json.parse(Plan, given)
        unplanned = " ".join(given["reasons"]) if given["refused"] else ""
        answers = {
            name: _read(plan, name, _last(answer, arguments.facts.get(name)))
            for name, answer in arguments.answers.items()
        }
        drifts = {name: answer.drift for name, answer in answers.items() if answer.drift}
        other = plan and rollback.other_plan(
            plan, drifts, lambda name: inventory.set_variables(self.variables, name, plan.release)
        )
        found = cluster_status.make_status(given["cluster"], arguments.heads, plan, answers, unplanned, other or "")
        shown = typed_json.dump(found)
        if arguments.path:
            output.write("llama_status_path", arguments.path, json.dumps(shown, indent=2) + "\n")
        display.display(status_text.text_of(found))
        if found.problems and arguments.fail:
            why = "; ".join(found.problems)
            return {"failed": True, "msg": f"{given['cluster']} is not healthy: {why}."}
        return {"changed": False, "status": shown}

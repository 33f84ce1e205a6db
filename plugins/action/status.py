# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Shows the status of a cluster. For a host whose report is invalid, shows the error instead."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes, rollback
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import cluster_status, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.status.cluster_status import StatusAnswer
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import status_text

display = Display()


def _last_answer(answer: Any, facts: Any) -> Any:
    """Return the last answer of a host: its facts if it gave no other answer."""
    has_answer = isinstance(answer, Mapping) and any(answer.get(key) for key in ("condition", "msg"))
    return answer if has_answer else facts


def _read_answer(plan: Plan | None, name: str, answer: Any) -> StatusAnswer:
    """Return the answer of a host. An invalid answer is replaced by its error."""
    if not isinstance(answer, Mapping) or not answer.get("condition") or answer.get("failed"):
        result = answer if isinstance(answer, Mapping) else {}
        message = " ".join(str(result.get("msg") or "").split()).removeprefix("Task failed: ")
        reason = validation.printable(message, changes.MAX_ERROR_LENGTH) or "the run did not contact it"
        return StatusAnswer(reason=reason, reachable=not result.get("unreachable"))
    try:
        condition = typed_json.parse_report(name, "its status", types.Condition, answer["condition"])
        return StatusAnswer(
            condition, changes.parse_answers({name: plan.hosts[name]}, {name: answer})[name].drift if plan else None
        )
    except Refusal as refusal:
        return StatusAnswer(reason=str(refusal))


class StatusArguments(NamedTuple):
    plan: Mapping[str, Any]
    heads: tuple[str, ...]
    answers: Mapping[str, Any]
    facts: Mapping[str, Any] = {}
    path: ControllerPath | None = None
    fail: bool = True
    balancer: str | None = None


class ActionModule(Action):
    ARGUMENTS = StatusArguments

    def perform(self, arguments: StatusArguments) -> dict:
        plan_json = arguments.plan
        plan = None if plan_json["refused"] else typed_json.parse(Plan, plan_json)
        refusal = " ".join(plan_json["reasons"]) if plan_json["refused"] else ""
        answers = {
            name: _read_answer(plan, name, _last_answer(answer, arguments.facts.get(name)))
            for name, answer in arguments.answers.items()
        }
        drifts = {name: answer.drift for name, answer in answers.items() if answer.drift}
        plan_warning = plan and rollback.other_plan_note(
            plan, drifts, lambda name: inventory.changed_variables(self.variables, name, plan.release)
        )
        status = cluster_status.make_status(
            plan_json["cluster"], arguments.heads, plan, answers, refusal, plan_warning or "", arguments.balancer
        )
        status_json = typed_json.dump(status)
        if arguments.path:
            output.write("llama_status_path", arguments.path, json.dumps(status_json, indent=2) + "\n")
        display.display(status_text.text_of(status))
        if status.problems and arguments.fail:
            problem_text = "; ".join(status.problems)
            return {"failed": True, "msg": f"{plan_json['cluster']} is not healthy: {problem_text}."}
        return {"changed": False, "status": status_json}

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides on the controller what a rollback does on each host, and reports how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import rollback, rollback_report
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle.rollback import Place, Target
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action

display = Display()


class Arguments(NamedTuple):
    state: Annotated[str, ("chosen", "accepted", "served", "failed")]
    cluster: str = ""
    answers: Mapping[str, Any] = {}
    heads: tuple[str, ...] = ()
    wanted: str = ""
    id: str = ""
    lost: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    target: Target | None = None
    facts: Mapping[str, Any] = {}
    release: str = ""
    reasons: Mapping[str, str] = {}
    why_not: str = ""


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        target, reasons, lost = arguments.target, arguments.reasons, arguments.lost
        if arguments.state == "chosen":
            return {"changed": False, "target": _choose(arguments)._asdict()}
        if arguments.state == "failed" and arguments.id:
            failure = rollback_report.Failure(arguments.id, arguments.release, reasons, lost, target, arguments.why_not)
            return {"failed": True, "msg": rollback_report.failed_change(failure)}
        if arguments.state == "failed":
            return {"failed": True, "msg": rollback_report.failed_rollback(target, reasons, lost)}
        if target is None:
            return {"failed": True, "msg": f"state {arguments.state} needs a target"}
        if arguments.state == "accepted":
            return {"changed": False, **_accept(arguments, target)}
        display.warning(rollback_report.served(target, arguments.release, self.check_mode))
        return {"changed": False}


def _choose(arguments: Arguments) -> Target:
    return rollback.choose(
        arguments.cluster,
        arguments.heads,
        rollback.histories(_answers(arguments, rollback.History._fields)),
        arguments.wanted,
        arguments.id,
        arguments.lost,
        arguments.away,
    )


def _accept(arguments: Arguments, target: Target) -> dict[str, Any]:
    answers = _answers(arguments, rollback.Recorded._fields)
    facts = {name: (arguments.facts.get(name) or {}).get("facts", {}) for name in answers}
    places = {name: Place(known.get("prefix"), known.get("units")) for name, known in facts.items()}
    return rollback.accept(target, arguments.cluster, answers, places)


def _answers(arguments: Arguments, keys: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What the hosts report that answered and did not fail, without what Ansible adds to it.

    :param keys: the first one is always there.
    """
    return {
        name: {key: answer[key] for key in keys if key in answer}
        for name, answer in arguments.answers.items()
        if isinstance(answer, Mapping) and keys[0] in answer
    }

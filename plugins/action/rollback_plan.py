# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Chooses the plan that a cluster goes back to, and decides what is done on each host. Everything that it takes is an argument of the task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import rollback
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class ActionModule(Action):
    SPEC = {
        "state": {"type": "str", "choices": ["chosen", "accepted"], "required": True},
        "cluster": {"type": "str", "required": True},
        "answers": {"type": "dict", "required": True},
        **{key: {"type": "str", "default": ""} for key in ("wanted", "failed")},
        **{key: {"type": "list", "elements": "str", "default": []} for key in ("heads", "lost", "away")},
        "target": {"type": "dict"},
        "facts": {"type": "dict", "default": {}},
    }
    REQUIRED_IF = [("state", "accepted", ("target",))]

    def perform(self, arguments: dict) -> dict:
        return {"changed": False, **(_choose if arguments["state"] == "chosen" else _accept)(arguments)}


def _choose(arguments: dict) -> dict:
    answers = _answers(arguments, rollback.HISTORY, "plans")
    names = ("wanted", "failed", "lost", "away")
    target = rollback.choose(
        arguments["cluster"], arguments["heads"], answers, **{name: arguments[name] for name in names}
    )
    return {"target": target._asdict()}


def _accept(arguments: dict) -> dict:
    answers = _answers(arguments, ("record", *rollback.COMPARED), "record")
    for name, answer in answers.items():
        facts = (arguments["facts"].get(name) or {}).get("facts", {})
        answer["place"] = {key: facts.get(key) for key in ("prefix", "units")}
    return rollback.accept(arguments["target"], arguments["cluster"], answers)


def _answers(arguments: dict, keys: Iterable[str], needed: str) -> dict[str, dict[str, Any]]:
    """What the hosts report that answered and did not fail, without what Ansible adds to it."""
    return {
        name: {key: answer[key] for key in keys if key in answer}
        for name, answer in arguments["answers"].items()
        if isinstance(answer, Mapping) and needed in answer
    }

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hands each host its own part of a plan to keep, and decides from what all of them report how the cluster goes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import rollback
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.history import ON_THE_CONTROLLER

display = Display()


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        if arguments.get("state") not in ON_THE_CONTROLLER:
            if "plan" in arguments:
                arguments["record"] = _record(arguments.pop("plan"), task_vars["inventory_hostname"])
            return self._execute_module(module_args=arguments, task_vars=task_vars)
        texts = {"type": "str", "default": ""}
        _checked, given = self.validate_argument_spec(
            argument_spec={
                "state": {"type": "str", "choices": list(ON_THE_CONTROLLER)},
                "cluster": texts,
                "heads": {"type": "list", "elements": "str", "default": []},
                **{key: {"type": "dict", "default": {}} for key in ("answers", "places", "reasons")},
                "target": {"type": "dict"},
                **{key: {"type": "list", "elements": "str", "default": []} for key in ("lost", "away")},
                **dict.fromkeys(("wanted", "failed", "why_not", "id"), texts),
            }
        )
        try:
            return {"changed": False, **_decide(given, bool(self._task.check_mode))}
        except Refusal as refusal:
            raise AnsibleActionFail(str(refusal)) from None


def _record(plan: dict, name: str) -> dict:
    sources = [file["source"] for file in plan["hosts"][name]["files"] if "source" in file]
    return rollback.record(plan, name, {path: Path(path).read_text() for path in sources})


def _decide(given: dict, check: bool) -> dict:
    if given["state"] == "chosen":
        answers = {name: _of(answer, ("plans", "unreadable")) for name, answer in given["answers"].items()}
        target = rollback.choose(
            given["cluster"], given["heads"], answers, given["wanted"], given["failed"], given["lost"], given["away"]
        )
        return {"target": target._asdict()}
    if given["state"] == "accepted":
        answers = {
            name: {
                **_of(answer, ("record", "drift", "missing")),
                "place": _of(given["places"][name], ("prefix", "units")),
            }
            for name, answer in given["answers"].items()
        }
        return rollback.accept(given["target"], given["cluster"], answers)
    if given["state"] == "returned":
        display.warning(rollback.returned(given["target"], given["wanted"], check))
        return {}
    if not given["id"]:
        return {"failed": True, "msg": rollback.unfinished(given["target"] or {}, given["reasons"], given["lost"])}
    failure = rollback.Failure(
        given["id"], given["wanted"], given["reasons"], given["lost"], given["target"] or None, given["why_not"]
    )
    return {"failed": True, "msg": rollback.sentence(failure)}


def _of(answer: Any, keys: tuple[str, ...]) -> dict:
    """What a host reports, without what Ansible adds to it; it may be anything."""
    return {key: answer[key] for key in keys if key in answer} if isinstance(answer, Mapping) else {}

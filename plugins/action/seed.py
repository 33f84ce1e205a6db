# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fills caches in steps of ten seconds, and shows after each what is left. A cache that cannot be filled is no error: the head sends what is missing."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload

display = Display()

STEP_SECONDS = 10.0
LONGEST_NAME = 256
TENSOR = {
    "name": validation.Text(longest=LONGEST_NAME),
    "bytes": validation.Number(1, rpc_upload.MOST_BYTES),
    "fingerprint": validation.Text("[0-9a-f]{32}", 32),
}
ANSWER = {
    "changed": validation.Maybe(bool),
    "why": validation.Maybe([validation.Text(longest=4096)]),
    **dict.fromkeys(
        ("linked_mib", "copied_mib", "left_mib"), validation.Maybe(validation.Number(0, rpc_upload.MOST_BYTES))
    ),
}
"""What the module says beside tensors and their names; a host that was taken over may say anything."""


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _checked, arguments = self.validate_argument_spec(
            argument_spec={
                "state": {"choices": ["described", "filled", "decided", "sent"], "required": True},
                "plan": {"type": "dict", "required": True},
                "tensors": {"type": "list", "elements": "dict", "default": []},
                "local": {"type": "bool", "default": True},
                "answers": {"type": "dict", "default": {}},
                "staging": {"type": "dict", "default": {}},
                "defined": {"type": "list", "elements": "str", "default": []},
            }
        )
        self.variables, self.host = task_vars, task_vars["inventory_hostname"]
        plan, state = arguments["plan"], arguments["state"]
        if state == "decided":
            return {"changed": False, "sends": sends(plan, arguments["answers"], arguments["defined"])}
        if state == "described":
            return self._ask(plan, plan["head"]["host"], state=state, names=_names(plan))
        self.bytes = {tensor["name"]: int(tensor["bytes"]) for tensor in arguments["tensors"]}
        if state == "filled":
            return self._fill(plan, arguments["tensors"], arguments["local"])
        return self._send(plan, arguments)

    def _ask(self, plan: dict, host: str, **more: Any) -> dict:
        """What the module says; where it fails, why, as one reason more."""
        account = plan["hosts"][host]["account"]
        given = {"path": plan["model"]["path"], "account": account, "seconds": STEP_SECONDS, **more}
        answer = self._execute_module(module_name="llamacpp.cluster.seed", module_args=given, task_vars=self.variables)
        strange = _strange(answer)
        if strange or answer.get("failed"):
            why = validation.not_possible(host, strange) if strange else str(answer.get("msg", "the module failed"))
            return {"changed": False, "tensors": [], "missing": {}, "given": {}, "why": [validation.printable(why)]}
        return answer

    def _fill(self, plan: dict, tensors: list[dict], local: bool) -> dict:
        """Fills the caches of this host's workers from what the host has."""
        workers = [
            {**{key: worker[key] for key in ("name", "environment", "seed")}, "names": list(names)}
            for worker in plan["hosts"][self.host]["workers"]
            if worker["seed"] and (names := cache_prefill.names_of(worker["seed"]["tensors"]))
        ]
        started, changed, copied, before = time.monotonic(), False, 0, rpc_upload.MOST_BYTES
        while True:
            answer = self._ask(plan, self.host, state="filled", workers=workers, tensors=tensors, local=local)
            changed |= bool(answer.get("changed"))
            copied += int(answer.get("copied_mib") or 0)
            left = int(answer.get("left_mib") or 0)
            if not left or answer.get("why") or not answer.get("changed") or left >= before:
                break
            before = left
            self._show(copied, left, time.monotonic() - started, "from its own copy of the model")
        if copied or answer.get("linked_mib"):
            got = units.amount((copied + int(answer.get("linked_mib") or 0)) * MIB)
            self._say(f"its workers' caches got {got} from the host itself")
        why = answer.get("why") or []
        for sentence in why:
            self._say(sentence)
        return {"changed": changed, "missing": answer.get("missing") or {}, "why": why}

    def _send(self, plan: dict, arguments: dict) -> dict:
        """Sends what is missing to all workers at once."""
        targets = _targets(plan, arguments["staging"], arguments["answers"], self.bytes)
        total = sum(self.bytes.get(name, 0) for target in targets for name in target["names"]) // MIB
        started, changed, why = time.monotonic(), False, []
        while targets:
            answer = self._ask(plan, plan["head"]["host"], state="sent", targets=targets, tensors=arguments["tensors"])
            changed |= bool(answer.get("changed"))
            why += answer.get("why") or []
            targets = _left(targets, answer.get("given") or {})
            left = sum(self.bytes.get(name, 0) for target in targets for name in target["names"]) // MIB
            self._show(total - left, left, time.monotonic() - started, "from the head")
        for sentence in why:
            self._say(sentence)
        return {"changed": changed, "why": why}

    def _show(self, done: int, left: int, seconds: float, source: str) -> None:
        """:param done: MiB, as ``left``."""
        rate = max(done / max(seconds, 0.1), 0.1)
        counted = f"{units.amount(done * MIB)} of {units.amount((done + left) * MIB)}"
        speed = f"{units.amount(rate * MIB)}/s, {units.duration(left / rate)} left"
        self._say(f"caches of workers get their tensors {source}: {counted}, {speed}")

    def _say(self, sentence: str) -> None:
        display.display(f"  [{self.host}] {validation.printable(sentence)}")


def sends(plan: dict, answers: dict, defined: list[str]) -> bool:
    """Whether the head sends before it loads. A load sends too, to one worker after the other: so it does where something serves meanwhile, or
    where several workers lack something.

    :param answers: host → what the state ``filled`` returned.
    :param defined: services of the head's host.
    """
    lacking = sum(
        bool(names)
        for answer in answers.values()
        if isinstance(missing := (answer or {}).get("missing"), dict)
        for names in missing.values()
    )
    serves = plan["hosts"][plan["head"]["host"]]["names"]["server"] in defined
    return lacking > (0 if serves else 1)


def _strange(answer: dict) -> str | None:
    """What of the answer of a host the module does not return; None where nothing is wrong."""
    tensors = answer.get("tensors") or []
    if not isinstance(tensors, list):
        return "tensors is not a list"
    for key in ("missing", "given"):
        lists = answer.get(key) or {}
        if not isinstance(lists, dict) or not all(isinstance(names, list) for names in lists.values()):
            return f"{key} is not a mapping of lists"
        if not all(_is_name(name) for names in lists.values() for name in names):
            return f"{key} has something that is not the name of a tensor"
    problems = (validation.mismatch(f"tensors[{number}]", tensor, TENSOR) for number, tensor in enumerate(tensors))
    read = {key: answer.get(key) for key in (*ANSWER, "tensors", "missing", "given")}
    problem = (
        validation.problem("", read) or validation.mismatch("", read, ANSWER) or next(filter(None, problems), None)
    )
    return f"{problem.where.lstrip('.')} {problem.why}" if problem else None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME


def _names(plan: dict) -> dict[str, int]:
    """Tensors that some worker of the plan keeps, and their bytes."""
    return {
        name: size
        for host in plan["hosts"].values()
        for worker in host["workers"]
        if worker["seed"]
        for name, size in cache_prefill.names_of(worker["seed"]["tensors"]).items()
    }


def _left(targets: list[dict], given: dict[str, list[str]]) -> list[dict]:
    """The targets that got some of their tensors, and not all, with the rest."""
    left = []
    for target in targets:
        got = set(given.get(target["endpoint"]) or ())
        names = [name for name in target["names"] if name not in got]
        if 0 < len(names) < len(target["names"]):
            left.append({**target, "names": names})
    return left


def _targets(plan: dict, staging: dict, answers: dict, known: Collection[str]) -> list[dict]:
    """The workers whose caches lack something, where they are on their staging ports.

    :param known: names of the tensors that the head has.
    """
    staged = {
        (name, worker["name"]): worker["endpoint"]
        for name, host in staging["hosts"].items()
        for worker in host["workers"]
    }
    return [
        {"endpoint": staged[host, worker["name"]], "fork": worker["seed"]["fork"], "names": names}
        for host, answer in answers.items()
        if (missing := answer.get("missing"))
        for worker in plan["hosts"][host]["workers"]
        if worker["seed"] and (host, worker["name"]) in staged
        if (names := [name for name in missing.get(worker["name"]) or () if name in known])
    ]

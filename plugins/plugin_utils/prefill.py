# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the action plugins that fill caches of workers have in common: one step on a host, its answer, and how far they are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Maybe, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import WorkerPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action

display = Display()


class Tensor(NamedTuple):
    """A tensor that caches of workers have to have."""

    path: str
    """Of its model."""
    name: str
    bytes: int
    fingerprint: str


NAME = Text(longest=256)
TENSOR = {
    "name": NAME,
    "bytes": Number(1, rpc_upload.MOST_BYTES),
    "fingerprint": Text("[0-9a-f]{32}", 32),
}
ANSWER = {
    "changed": Maybe(bool),
    "why": Maybe([Text(longest=4096)]),
    **dict.fromkeys(("linked_mib", "copied_mib", "left_mib"), Maybe(Number(0, rpc_upload.MOST_BYTES))),
    **dict.fromkeys(("missing", "given"), Maybe(validation.Each(Any))),
    "tensors": Maybe(Any),
}
"""What a step returns. Lists of tensors and of their names may be long, and are looked at one by one."""


class Answer(NamedTuple):
    """What a step returned."""

    changed: bool = False
    why: Sequence[str] = ()
    """Why caches stay as they are, a sentence each."""
    linked_mib: int = 0
    copied_mib: int = 0
    left_mib: int = 0
    missing: Mapping[str, Sequence[str]] = {}
    """Worker → names of tensors that its cache lacks."""
    given: Mapping[str, Sequence[str]] = {}
    """Endpoint of a worker → names of tensors that it got."""
    tensors: Sequence[Any] = ()


def paths(plan: Plan) -> list[str]:
    """Of the models, each once."""
    return list(dict.fromkeys(one.model.path for one in plan.each()))


def names_of(plan: Plan, worker: WorkerPlan, path: str) -> dict[str, int]:
    """Names of a model's tensors that the cache of a worker has to have, and their bytes."""
    rows = worker.seed.tensors if worker.seed else ()
    return cache_prefill.names_of(row for row in rows if (row.model or plan.model.path) == path)


def ask(action: Action, plan: Plan, host: str, path: str, **more: Any) -> Answer:
    """What the action's module returns on a host of a model; where it fails, the reason is one of ``why``."""
    answer = action.module(path=path, account=plan.hosts[host].account, **more)
    try:
        if answer.get("failed"):
            raise Refusal(str(answer.get("msg", "the module failed")))
        return checked(host, answer)
    except Refusal as refusal:
        return Answer(why=[validation.printable(refusal)])


def checked(host: str, answer: Any) -> Answer:
    """:raises Refusal: a host reports what no module returns."""
    small = validation.reported(host, "the caches of its workers", {key: answer.get(key) for key in ANSWER}, ANSWER)
    lists: list[tuple[str, Any, Any]] = [("it.tensors", small["tensors"] or [], TENSOR)]
    for key in ("missing", "given"):
        lists += [(f"it.{key}.{name}", names, NAME) for name, names in (small[key] or {}).items()]
    for where, values, shape in lists:
        parts = enumerate(values) if isinstance(values, list) else [(0, values)]
        problems = (validation.mismatch(f"{where}[{number}]", value, shape) for number, value in parts)
        problem = next(filter(None, problems), None)
        if not problem and not isinstance(values, list):
            problem = validation.Problem(where, "is not a list")
        if problem:
            raise validation.another_form(host, "the caches of its workers", problem)
    return Answer(**{key: value for key, value in small.items() if value is not None})


class Progress:
    """Shows how far it is.

    :param source: of the tensors, for the line.
    """

    def __init__(self, host: str, source: str) -> None:
        self._host, self._source, self._started = host, source, time.monotonic()

    def show(self, done: int, left: int) -> None:
        """:param done: MiB, as ``left``."""
        rate = max(done / max(time.monotonic() - self._started, 0.1), 0.1)
        counted = f"{units.amount(done * MIB)} of {units.amount((done + left) * MIB)}"
        speed = f"{units.amount(rate * MIB)}/s, {units.duration(left / rate)} left"
        say(self._host, f"caches of workers get their tensors {self._source}: {counted}, {speed}")


def say(host: str, sentence: str) -> None:
    display.display(f"  [{host}] {validation.printable(sentence)}")

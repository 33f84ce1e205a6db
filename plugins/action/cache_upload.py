# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sends tensors to the caches of workers in steps of ten seconds, and shows after each what is left. A cache that cannot be filled is no error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.cache_prefill import Tensor
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import prefill
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, Lease


class Arguments(NamedTuple):
    plan: Mapping[str, Any]
    staging: Mapping[str, Any]
    answers: Mapping[str, Any]
    tensors: tuple[Tensor, ...]


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        plan, tensors = arguments.plan, typed_json.dump(arguments.tensors)
        head = plan["head"]["host"]
        size_of = {tensor.name: tensor.bytes for tensor in arguments.tensors}
        targets = _targets(plan, arguments.staging, arguments.answers, size_of)

        def mib(targets: list[dict]) -> int:
            return sum(size_of[name] for target in targets for name in target["names"]) // MIB

        total, changed, why = mib(targets), False, []
        progress = prefill.Progress(self.host, "from the head")
        lease = Lease(self, plan["hosts"][head]["prefix"])
        while targets:
            answer = prefill.ask(self, plan, head, targets=targets, tensors=tensors)
            changed |= bool(answer.get("changed"))
            why += answer.get("why") or []
            targets = _left(targets, answer.get("given") or {})
            progress.show(total - mib(targets), mib(targets))
            lease.renew_in_time()
        for sentence in why:
            prefill.say(self.host, sentence)
        return {"changed": changed, "why": why}


def _left(targets: list[dict], given: dict[str, list[str]]) -> list[dict]:
    """The targets that got some of their tensors, and not all, with the rest."""
    left = []
    for target in targets:
        got = set(given.get(target["endpoint"]) or ())
        names = [name for name in target["names"] if name not in got]
        if 0 < len(names) < len(target["names"]):
            left.append({**target, "names": names})
    return left


def _targets(
    plan: Mapping[str, Any], staging: Mapping[str, Any], answers: Mapping[str, Any], known: Collection[str]
) -> list[dict]:
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

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sends tensors to the caches of workers in steps of ten seconds, and shows after each what is left. A cache that cannot be filled is no error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import prefill
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, Lease


class Arguments(NamedTuple):
    plan: Plan
    staging: Plan
    answers: Mapping[str, Any]
    tensors: tuple[prefill.Tensor, ...]


class Target(NamedTuple):
    """A worker on its staging port."""

    endpoint: str
    fork: str
    names: list[str]
    """Of the tensors that its cache lacks."""


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        done = [self._send(arguments, path) for path in prefill.paths(arguments.plan)]
        return {
            "changed": any(changed for changed, _why in done),
            "why": [text for _changed, why in done for text in why],
        }

    def _send(self, arguments: Arguments, path: str) -> tuple[bool, list[str]]:
        """Sends tensors of one model; returns whether some arrived, and why others did not."""
        plan, head = arguments.plan, arguments.plan.head.host
        own = tuple(tensor for tensor in arguments.tensors if tensor.path == path)
        size_of = {tensor.name: tensor.bytes for tensor in own}
        answers = {host: answer.get("missing") or {} for host, answer in arguments.answers.items()}
        missing = {host: found[path] for host, found in answers.items() if path in found}
        targets = _targets(plan, arguments.staging, missing, size_of)

        def mib(targets: Sequence[Target]) -> int:
            return sum(size_of[name] for target in targets for name in target.names) // MIB

        total, changed = mib(targets), False
        why: list[str] = []
        ends, keys = services.ends_on_head(arguments.staging), f"{plan.hosts[head].prefix}/{names.KEYS}"
        progress = prefill.Progress(self.host, "from the head")
        lease = Lease(self, plan.hosts[head].prefix)
        while targets:
            asked = [target._asdict() for target in targets]
            answer = prefill.ask(
                self, plan, head, path, targets=asked, tensors=typed_json.dump(own), tunnels=ends, keys=keys
            )
            changed |= answer.changed
            why += answer.why
            targets = _left(targets, answer.given)
            progress.show(total - mib(targets), mib(targets))
            lease.renew_in_time()
        for sentence in why:
            prefill.say(self.host, sentence)
        return changed, why


def _left(targets: Sequence[Target], given: Mapping[str, Sequence[str]]) -> list[Target]:
    """The targets that got some of their tensors, and not all, with the rest."""
    left = []
    for target in targets:
        got = set(given.get(target.endpoint) or ())
        names = [name for name in target.names if name not in got]
        if 0 < len(names) < len(target.names):
            left.append(target._replace(names=names))
    return left


def _targets(
    plan: Plan, staging: Plan, missing: Mapping[str, Mapping[str, Sequence[str]]], known: Collection[str]
) -> list[Target]:
    """The workers whose caches lack something, where they are on their staging ports.

    :param missing: host → worker → names of tensors.
    :param known: names of the tensors that the head has.
    """
    staged = {(name, worker.name): worker.endpoint for name, host in staging.hosts.items() for worker in host.workers}
    return [
        Target(staged[host, worker.name], worker.seed.fork, names)
        for host, lacking in missing.items()
        for worker in plan.hosts[host].workers
        if worker.seed and (host, worker.name) in staged
        if (names := [name for name in lacking.get(worker.name) or () if name in known])
    ]

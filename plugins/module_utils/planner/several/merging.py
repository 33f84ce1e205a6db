# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of several models, from the plans of each as if it were alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    SCHEMA,
    AdvisoryPlan,
    HeadPlan,
    Plan,
    Refused,
    ServedModel,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import cache_prefill, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import presets
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Turn

HUB_CACHE = "LLAMA_CACHE"
"""Folder whose models the router offers too, as whoever runs llama-server may have some, and nobody planned them."""


def merged(cluster: Cluster, plans: Sequence[Plan | Refused]) -> Plan | Refused:
    """The plan of all.

    :param plans: of each of ``cluster.turns``. They differ in what their models need, and in nothing else.
    """
    called, given = [turn.name for turn in cluster.turns], {name for turn in cluster.turns for name in turn.given}
    reasons = tuple(_sentence(of, text) for text, of in _once(called, [plan.reasons for plan in plans], given))
    whole = [plan for plan in plans if isinstance(plan, Plan)]
    if len(whole) < len(plans):
        return Refused(SCHEMA, validation.printable(cluster.name), True, False, reasons)
    first = whole[0]
    try:
        plan = first._replace(
            refused=any(one.refused for one in whole),
            reasons=reasons,
            fits=all(one.fits for one in whole),
            head=_head(whole, tuple(map(_model, cluster.turns, whole))),
            advisories=_advisories(called, whole, given),
            external_workers=tuple(
                worker._replace(used=any(one.external_workers[index].used for one in whole))
                for index, worker in enumerate(first.external_workers)
            ),
            hosts={name: _host(name, whole) for name in first.hosts},
        )
    except Refusal as refusal:
        return Refused(SCHEMA, validation.printable(cluster.name), True, False, (str(refusal),))
    hosts = {name: host._replace(services=services.of_host(plan, name)) for name, host in plan.hosts.items()}
    return plan._replace(hosts=hosts)


def _host(name: str, plans: Sequence[Plan]) -> HostPlan:
    """A host whose workers serve whichever model uses them."""
    host = plans[0].hosts[name]
    each = zip(*(plan.hosts[name].workers for plan in plans))
    workers = tuple(
        own[0]._replace(
            used=any(worker.used for worker in own),
            prefill=cache_prefill.of_several([worker.prefill for worker in own]),
        )
        for own in each
    )
    return host._replace(workers=workers)


Said = TypeVar("Said", str, AdvisoryPlan)


def _once(called: Sequence[str], said: Sequence[Sequence[Said]], given: Collection[str]) -> list[tuple[Said, str]]:
    """Return each text once with the names of its models, first the texts about all models, without names.

    :param own_variables: variables in entries: texts about them always have names.
    """
    models: dict[Said, list[str]] = {}
    for name, own in zip(called, said):
        for one in own:
            models.setdefault(one, []).append(name)

    def is_of_all(one: Said, of: Sequence[str]) -> bool:
        text = one if isinstance(one, str) else one.message
        return len(of) == len(called) and not any(name in text for name in given)

    found = [(one, "" if is_of_all(one, of) else remedies.listed(of)) for one, of in models.items()]
    return sorted(found, key=lambda pair: bool(pair[1]))


def _sentence(of: str, text: str) -> str:
    return turns.sentence(of, text) if of else text


def _advisories(called: Sequence[str], plans: Sequence[Plan], given: Collection[str] = ()) -> tuple[AdvisoryPlan, ...]:
    return tuple(
        one._replace(message=_sentence(of, one.message), remedy=turns.own_words(one.remedy) if of else one.remedy)
        for one, of in _once(called, [plan.advisories for plan in plans], given)
    )


def _model(turn: Turn, plan: Plan) -> ServedModel:
    argv = presets.model_argv(plan.head.argv)
    known = {**plan._asdict(), **plan.head._asdict(), **turn._asdict(), "model": plan.model, "argv": argv}
    return ServedModel(**{field: known[field] for field in ServedModel._fields})


def _head(plans: Sequence[Plan], models: tuple[ServedModel, ...]) -> HeadPlan:
    """:raises Refusal: models cannot be served together."""
    head = plans[0].head
    presets.check(plans[0].release)
    presets.presets(models)
    own = dict.fromkeys(endpoint for endpoint, word in zip(head.launcher[1:], head.launcher) if word == "--worker")
    used = dict.fromkeys(entry.endpoint for plan in plans for entry in plan.placement if entry.endpoint)
    further = [word for endpoint in used if endpoint not in own for word in ("--worker", endpoint)]
    prefix = plans[0].hosts[head.host].prefix
    return head._replace(
        argv=presets.router_argv(plans[0], f"{prefix}/{names.PRESETS}"),
        launcher=(*head.launcher, *further, "--router"),
        environment={**_environment(plans), HUB_CACHE: f"{prefix}/{names.MODELS}/none"},
        start_timeout=max(plan.head.start_timeout for plan in plans),
        devices=tuple(dict.fromkeys(device for plan in plans for device in plan.head.devices)),
        backends=tuple(sorted({backend for plan in plans for backend in plan.head.backends})),
        models=models,
    )


def _environment(plans: Sequence[Plan]) -> Mapping[str, str]:
    """The router's, which its children have too: what hides devices of the head from a model that uses none would hide them from others.

    :raises Refusal: models need different values.
    """
    found: dict[str, str] = {}
    for plan in [plan for plan in plans if plan.head.backends] or plans[:1]:
        for name, value in plan.head.environment.items():
            if found.setdefault(name, value) != value:
                raise Refusal(
                    f"models of {turns.VARIABLE} need {name}={found[name]} and {name}={value}, and have one environment: give one of them a cluster of its own"
                )
    return found

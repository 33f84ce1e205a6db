# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator can do about an advisory or a model that does not fit. Planning tries each remedy, and shows those that help.

A change takes the cluster as the inventory and the facts describe it, and returns it as it is once the operator has acted.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import (
    AdvisoryContext,
    Change,
    Finding,
    Fix,
    Remedy,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices, workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Cluster,
    Endpoint,
    Host,
    Quantisation,
    ReleaseRequest,
)

Attempt = Callable[[Cluster], Optional[Plan]]
"""The plan of a changed cluster, without remedies; None where its input is refused."""

LEAST_CONTEXT = 1024
"""Tokens of a slot below which a shorter context is no remedy."""


def listed(words: Iterable[str], last: str = "and") -> str:
    """``a, b and c``."""
    *before, end = [*words] or [""]
    return f"{', '.join(before)} {last} {end}" if before else end


def as_list(words: Sequence[str]) -> str:
    """As an inventory has it: one word, or a list."""
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def sentence(clauses: Sequence[str]) -> str:
    """One sentence of clauses of which any one is enough."""
    text = ", or ".join(clauses)
    return text[:1].upper() + text[1:] + "."


def _errors(plan: Plan) -> set[str]:
    return {entry.id for entry in plan.advisories if entry.severity == "error" and not entry.accepted}


def _is_met(plan: Plan, finding: Finding) -> bool:
    met = [entry for entry in plan.advisories if entry.id == finding.advisory.id and not entry.accepted]
    return any(not finding.hosts or not entry.hosts or set(finding.hosts) & set(entry.hosts) for entry in met)


class Effect(enum.IntEnum):
    """What a fix does to the advisory that it is for."""

    NONE = 0
    LIFTS = 1
    """The advisory is gone, whatever else is in the way."""
    HELPS = 2
    """The advisory is gone, the model fits and nothing new refuses the plan."""


class Trial(NamedTuple):
    """Tries changes on a cluster whose plan needs remedies."""

    cluster: Cluster
    plan: Plan
    """Of the cluster as it is, with advisories."""
    attempt: Attempt

    def effect(self, fix: Fix, finding: Finding) -> Effect:
        """What all changes of a fix have in common."""
        if fix.accepts:
            return Effect.HELPS if self.plan.fits else Effect.LIFTS
        before, effect = _errors(self.plan), Effect.HELPS
        for change in fix.changes:
            plan = self.attempt(change(self.cluster))
            if plan is None or _is_met(plan, finding):
                return Effect.NONE
            if not plan.fits or not _errors(plan) <= before:
                effect = Effect.LIFTS
        return effect

    def fits(self, change: Change) -> bool:
        plan = self.attempt(change(self.cluster))
        return plan is not None and plan.fits and _errors(plan) <= _errors(self.plan)


def chosen(context: AdvisoryContext, finding: Finding, trial: Trial) -> list[str]:
    """The clauses of those remedies that help; where none does, of those that lift the advisory; else of all that there are."""
    best: list[tuple[Effect, Remedy, Fix]] = []
    for remedy in finding.advisory.remedies:
        tried: tuple[Effect, Fix] | None = None
        for fix in remedy.fixes(context, finding):
            effect = trial.effect(fix, finding)
            if tried is None or effect > tried[0]:
                tried = effect, fix
            if effect == Effect.HELPS:
                break
        if tried:
            best.append((tried[0], remedy, tried[1]))
    most = max((effect for effect, _remedy, _fix in best), default=Effect.NONE)
    return [
        remedy.text.format(**{**finding.values, "hosts": listed(finding.hosts), **fix.values})
        for effect, remedy, fix in best
        if effect == most
    ]


def shorter_contexts(context: int, parallel: int) -> Iterator[int]:
    """Tokens of shorter contexts, the longest first.

    :param parallel: slots that share them.
    """
    while context // 2 >= LEAST_CONTEXT * parallel:
        context //= 2
        yield context


def for_more_room(trial: Trial) -> list[str]:
    """Clauses that say how a model that does not fit does: each was tried."""
    cluster, clauses = trial.cluster, []
    shorter = shorter_contexts(min(cluster.server.context, trial.plan.head.context), cluster.server.parallel)
    tokens = next((tokens for tokens in shorter if trial.fits(serving(context=tokens))), None)
    if tokens:
        clauses.append(f"set llama_server_context to {tokens}")
    bounded = [name for name, host in cluster.hosts.items() if any(entry.memory_mib for entry in host.endpoints)]
    if bounded and trial.fits(on_hosts(bounded, _without_bounds)):
        clauses.append(f"remove memory_mib from llama_worker_endpoints of {listed(bounded)}")
    limits = [f"llama_server_{name}" for name in ("memory_mib", "reserve_mib") if getattr(cluster.server, name)]
    if limits and trial.fits(serving(memory_mib={}, reserve_mib=None)):
        clauses.append(f"remove {listed(limits)}")
    lazy = ("--lazy-mode", "on")
    if trial.fits(serving(extra_args=(*cluster.server.extra_args, *lazy))):
        clauses.append(f"add {' '.join(lazy)} to llama_server_extra_args")
    more, change = _with_half_the_reserve(trial)
    if more and trial.fits(change):
        clauses.append(f"leave half as much to the system, with {listed(more)}")
    unset = {"tensor_split": (), "override_tensor": (), "gpu_layers": None, "prompt_cache_mib": None}
    own = [name for name, none in unset.items() if getattr(cluster.server, name) != none]
    clauses += [f"remove llama_server_{name}" for name in own if trial.fits(serving(**{name: unset[name]}))]
    beside = [role for role in (download_record.MMPROJ, download_record.DRAFT) if getattr(cluster.model, role)]
    removed = [f"remove llama_model_{role}" for role in beside if trial.fits(serving_without([role]))]
    if len(beside) > 1 and not removed and trial.fits(serving_without(beside)):
        removed = [f"remove {listed(f'llama_model_{role}' for role in beside)}"]
    clauses += removed
    layers = _layers_beside_the_processor(trial)
    if layers is not None and trial.fits(serving(gpu_layers=layers)):
        clauses.append(f"set llama_server_gpu_layers to {layers}")
    return clauses


def smaller_quantisation(trial: Trial, offered: Sequence[Quantisation]) -> list[str]:
    """A clause with the largest quantisation of the model's repository that fits, if one does. Its layers are counted in proportion to its size.

    :param offered: those of the repository, the smallest first.
    """
    source = trial.cluster.model.source
    smaller = [one for one in offered if one.bytes < _bytes(trial.plan)]
    count, most = 0, len(smaller) if source else 0
    while count < most:
        middle = (count + most + 1) // 2
        if trial.fits(holding(smaller[middle - 1].bytes)):
            count = middle
        else:
            most = middle - 1
    if not source or not count:
        return []
    found = smaller[count - 1]
    named = source.huggingface and source.huggingface.files
    return [
        f"set quantisation in {source.variable} to {found.name}{' and remove files from it' if named else ''}, the largest of its repository that fits "
        f"({found.bytes / (1024 * MIB):.2f} GiB; its layers are assumed to be those of this file in proportion)"
    ]


def _bytes(plan: Plan) -> int:
    return sum(file.bytes or 0 for file in plan.model.files if file.role == download_record.MODEL)


def _layers_beside_the_processor(trial: Trial) -> int | None:
    """``llama_server_gpu_layers`` with which a head without workers holds the model, or with workers may hold it; None where it does not."""
    best, entries = trial.plan.estimate.best_single_host, trial.plan.placement
    if any(entry.endpoint for entry in entries):
        held = [entry.weights_mib + entry.kv_mib for entry in entries]
        missing = [max(0, mib - entry.capacity_mib) for mib, entry in zip(held, entries)]
        layers = sum(entry.layers for entry in entries)
        return max(0, layers + 1 - sum(math.ceil(mib * layers / max(1, sum(held))) for mib in missing))
    return None if best.host != trial.cluster.head else best.gpu_layers


def _with_half_the_reserve(trial: Trial) -> tuple[list[str], Change]:
    """Variables with which devices hold half of what is kept of their memory for the system, where nothing else limits them."""
    workers_of: dict[str, dict[str, int]] = {}
    own: dict[str, int] = {}
    for entry in trial.plan.placement:
        planned = trial.plan.hosts.get(entry.host)
        if not planned:
            continue
        lent = next((worker.device for worker in planned.workers if worker.endpoint == entry.endpoint), None)
        facts = trial.cluster.hosts[entry.host].facts
        accelerator = devices.accelerator_of(facts, lent or entry.device)
        size, shared = (accelerator.memory_mib, accelerator.unified) if accelerator else (facts.memory_mib, True)
        if entry.capacity_mib == workers.usable_by_device(size, shared, facts.memory_mib) < size:
            of_host = workers_of.setdefault(entry.host, {}) if lent else own
            of_host[lent or entry.device] = (size + int(entry.capacity_mib)) // 2
    hosts_of: dict[str, list[str]] = {}
    for name, sizes in workers_of.items():
        hosts_of.setdefault(listed(f"{mib} of {device}" for device, mib in sizes.items()), []).append(name)
    more = [f"memory_mib {sizes} in llama_worker_endpoints of {listed(hosts)}" for sizes, hosts in hosts_of.items()]
    more += [f"llama_server_memory_mib {{{', '.join(f'{name}: {mib}' for name, mib in own.items())}}}"] if own else []

    def lends(host: Host) -> Host:
        declared = trial.plan.hosts[host.name].workers
        endpoints = host.endpoints or [Endpoint(device=worker.device) for worker in declared]
        wider = [
            entry._replace(memory_mib=workers_of[host.name].get(worker.device, entry.memory_mib))
            for entry, worker in zip(endpoints, declared)
        ]
        return host._replace(endpoints=tuple(wider))

    def change(cluster: Cluster) -> Cluster:
        return serving(memory_mib={**cluster.server.memory_mib, **own})(on_hosts(workers_of, lends)(cluster))

    return more, change


def _without_bounds(host: Host) -> Host:
    return host._replace(endpoints=tuple(entry._replace(memory_mib=None) for entry in host.endpoints))


# Changes


def serving(**fields: Any) -> Change:
    return lambda cluster: cluster._replace(server=cluster.server._replace(**fields))


def holding(size: int) -> Change:
    """The same model in files of so many bytes."""
    return lambda cluster: cluster._replace(model=cluster.model._replace(instead_bytes=size))


def serving_without(roles: Sequence[str]) -> Change:
    none: dict[str, Any] = dict.fromkeys(roles)
    return lambda cluster: cluster._replace(model=cluster.model._replace(**none))


def placing(mode: str) -> Change:
    return lambda cluster: cluster._replace(placement=mode)


def on_hosts(hosts: Collection[str], change: Callable[[Host], Host]) -> Change:
    return lambda cluster: cluster._replace(
        hosts={name: change(host) if name in hosts else host for name, host in cluster.hosts.items()}
    )


def with_facts(hosts: Collection[str], change: Callable[[Facts], Facts]) -> Change:
    return on_hosts(hosts, lambda host: host._replace(facts=change(host.facts)))


def building(hosts: Collection[str], wanted: Sequence[str]) -> Change:
    return on_hosts(hosts, lambda host: host._replace(backends=tuple(wanted)))


def releasing(variables: Iterable[str], request: ReleaseRequest) -> Change:
    """Another release, for the whole group."""

    def change(cluster: Cluster) -> Cluster:
        own = cluster.releases["llama_release"]
        requests = dict.fromkeys(variables, request._replace(fast_load=bool(own and own.fast_load)))
        hosts = {name: host._replace(releases={**host.releases, **requests}) for name, host in cluster.hosts.items()}
        return cluster._replace(releases={**cluster.releases, **requests}, hosts=hosts)

    return change


def with_environment(host: Host, workers: int, environment: Mapping[str, str]) -> Host:
    endpoints = host.endpoints or (Endpoint(),) * workers
    return host._replace(
        endpoints=tuple(entry._replace(environment={**entry.environment, **environment}) for entry in endpoints)
    )


def with_root(facts: Facts) -> Facts:
    """As ``llama_host_scope: system`` finds a host with systemd."""
    manager = service_managers.possible(facts.system, "system")[0]
    places = names.places("system", manager, {"HOME": "/root"})
    return facts._replace(scope="system", service_manager=manager, units_filter=True, **places)


# Releases


def newest_known() -> int:
    return max(capabilities.PACKAGED_TREES.values())


def other_backends(cluster: Cluster, hosts: Sequence[str], wanted: Sequence[str]) -> list[Fix]:
    """Fixes: another ``llama_backend`` that has devices on each of these hosts; of cpu, every host has one."""
    return [
        Fix({"backend": backend}, (building(hosts, [backend]),))
        for backend in wanted
        if all(name in cluster.hosts for name in hosts)
        and all(backend == backends.CPU.name or cluster.hosts[name].facts.of_backend(backend) for name in hosts)
    ]

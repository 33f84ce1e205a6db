# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From inventory and facts to the plan: the whole intended state as data. Reads and writes nothing.

The plan depends on the inventory and on facts that stay the same from run to run; its form is described in docs/plan.md.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    AccountPlan,
    BuildPlan,
    FirewallRule,
    FolderPlan,
    HostPlan,
    KernelTuning,
    WorkerPlan,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    SCHEMA,
    AdvisoryPlan,
    DevicePlacement,
    ExternalWorkerPlan,
    FallbackHead,
    FallbackPlan,
    HeadPlan,
    Plan,
    Refused,
    UncountedModel,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import (
    cache_prefill,
    kernel_parameters,
    server_settings,
    services,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server as heads
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import memory, remedies, table
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import unused_memory as idle
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import (
    AdvisoryContext,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import automatic, releases, requirements
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator, Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import (
    addresses,
    external_workers,
    model_source,
    rdma,
    release_request,
    same_device,
    turns,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    auxiliary_models,
    device_load,
    devices,
    estimate,
    fallbacks,
    layout,
    prompt_cache,
    prompts,
    speculation,
    workers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import merging
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Catalogue,
    Cluster,
    Device,
    Equipped,
    Host,
    Model,
    Quantisation,
    Release,
    Server,
    Worker,
)

KNOCKING_HOSTS = 2
"""So many other hosts try whether a worker's port is closed to them."""


def refused(cluster: str, refusal: Refusal) -> Refused:
    """In place of the plan of a cluster that has none: the reason."""
    return Refused(SCHEMA, validation.printable(cluster), True, False, (str(refusal),))


def make(
    cluster: Cluster,
    model_found: Mapping[str, Any],
    catalogue: Catalogue,
    runtime_id: str,
    compared: bool = False,
) -> Plan | Refused:
    """The plan, or the reasons why there is none.

    :param model_found: what the modules model or gguf_info report of the model: ``summary``, ``closed``, and of model_source.FOUND; empty when
        nothing is known. Of several models ``models``: name → that of each.
    :param compared: without fallbacks and remedies: one of many plans.
    :returns: the plan; when ``refused`` is true, ``reasons`` says why and nothing may be applied.
    """
    if cluster.turns:
        if not compared:
            return _in_turn(cluster, model_found, catalogue, runtime_id)
        model_found = turns.found_of(model_found, cluster.turns[0].name)
    cluster = cluster._replace(elsewhere=external_workers.hosts_of(cluster.external))
    cluster = automatic.settled(cluster, catalogue)
    report = model_source.report_of(model_found)

    def attempt(given: Cluster, trial: bool = True) -> Planned:
        served = model_source.summary_of(given.model, report)
        hosts = {name: kernel_parameters.after_reboot(host) for name, host in given.hosts.items()}
        changed = given._replace(hosts=hosts, served=served)
        return _plan(_prepare(changed, report, catalogue), runtime_id, not (trial or given.alternates))

    try:
        planned = attempt(cluster, trial=compared)
    except Refusal as refusal:
        return refused(cluster.name, refusal)
    if compared:
        return _judge(planned.plan, cluster.accepted)
    return _judge(_with_remedies(planned, cluster, attempt), cluster.accepted)


def _in_turn(cluster: Cluster, found: Mapping[str, Any], catalogue: Catalogue, runtime_id: str) -> Plan | Refused:
    """The plan of several models: each planned as if it were alone, with workers' caches for all of them."""
    own = {turn.name: turns.found_of(found, turn.name) for turn in cluster.turns}
    known = {
        turn.name: model_source.summary_of(turn.model, model_source.report_of(own[turn.name])) for turn in cluster.turns
    }
    plans = []
    for turn in cluster.turns:
        beside = tuple(summary for name, summary in known.items() if summary and name != turn.name)
        alone = cluster._replace(
            server=turn.server,
            model=turn.model,
            turns=(),
            alternates=True,
            beside=beside,
        )
        plans.append(make(alone, own[turn.name], catalogue, runtime_id))
    return merging.merged(cluster, plans)


class Planned(NamedTuple):
    """A plan before remedies were tried, and what these are chosen from."""

    plan: Plan
    idle: Sequence[idle.UnusedMemory]
    offered: Sequence[Quantisation]
    """That the repository of the model has."""


def _with_remedies(planned: Planned, cluster: Cluster, attempt: Callable[[Cluster], Planned]) -> Plan:
    """The plan with what helps, when it is tried, a model that does not fit or whose compute buffers may not."""
    plan = planned.plan

    def judged(changed: Cluster) -> Plan | None:
        try:
            return _judge(attempt(changed).plan, changed.accepted)
        except Refusal:
            return None

    trial = remedies.Trial(cluster, _judge(plan, cluster.accepted), judged)
    if not plan.fits:
        room = [*remedies.for_more_room(trial), *remedies.smaller_quantisation(trial, planned.offered)]
        fitting = [f"it fits this way: {', or '.join(room)}"] if room else []
        return plan._replace(reasons=(*plan.reasons, *idle.sentence(planned.idle), *fitting))
    if all(one.id != remedies.OVER_CAPACITY for one in plan.advisories):
        return plan
    smaller = remedies.for_smaller_buffers(trial)
    advisories = [
        one._replace(remedy=remedies.sentence(smaller)) if smaller and one.id == remedies.OVER_CAPACITY else one
        for one in plan.advisories
    ]
    return plan._replace(advisories=tuple(advisories))


def _judge(plan: Plan, accepted: frozenset[str]) -> Plan:
    """The plan with ``accepted``, ``reasons`` and ``refused``, which follow from its advisories."""
    met = tuple(advisory._replace(accepted=advisory.id in accepted) for advisory in plan.advisories)
    refusing: dict[str, list[AdvisoryPlan]] = {}
    for advisory in met:
        if advisory.severity == "error" and not advisory.accepted:
            refusing.setdefault(advisory.id, []).append(advisory)
    reasons = list(plan.reasons)
    for identifier, alike in refusing.items():
        sentences = [*(advisory.message for advisory in alike), *(advisory.remedy for advisory in alike)]
        reasons.append(
            f"{' '.join(dict.fromkeys(sentences))} To run it anyway, add {identifier} to llama_accept_advisories."
        )
    return plan._replace(advisories=met, reasons=tuple(reasons), refused=bool(reasons))


class Prepared(NamedTuple):
    """All decisions from which the plan is written."""

    cluster: Cluster
    equipped: Mapping[str, Equipped]
    wanted: Mapping[str, Release]
    """Backend → release."""
    builds: Mapping[str, Mapping[str, BuildPlan]]
    """Host → backend → build."""
    serves: str
    """The backend whose llama-server runs."""
    case: layout.Case
    """What was placed; its devices are all that could be used."""
    placed: device_load.Placed
    idle: Sequence[idle.UnusedMemory]
    """What could hold layers of a model that does not fit."""
    requested: Server
    """With pieces of prompts as the operator asks for them."""

    @property
    def head(self) -> Equipped:
        return self.equipped[self.cluster.head]

    @property
    def model(self) -> Model:
        return self.case.model

    @property
    def release(self) -> Release:
        return self.wanted[self.serves]


class Lending(NamedTuple):
    """Who drives the devices of each host: its workers, or on the head llama-server itself."""

    declared: Mapping[str, Sequence[workers.Declared]]
    """Host → its endpoints."""
    driven: Sequence[tuple[str, Accelerator]]
    """The head's own devices, with their names."""
    shares: Mapping[str, Mapping[str, int]]
    """Host → workers.shares_of_memory."""
    limits: Mapping[str, int]
    """The head's own device → what the operator lets it hold."""


def _lending(cluster: Cluster, built: Mapping[str, tuple[str, ...]], serves: str, bounded: bool) -> Lending:
    """:param bounded: whether devices hold no more than their drivers show as their own."""
    head = cluster.hosts[cluster.head]
    declared = {
        name: [
            _with_cache(cluster, name, entry)
            for entry in workers.declare(host, built[name], serves if host.is_head else None)
        ]
        if host.is_worker
        else []
        for name, host in cluster.hosts.items()
    }
    lends = [entry.device.device for entry in declared[head.name]]
    driven = devices.driven_by_head(head.facts, lends, serves)
    names_of_driven = [name for name, _device in driven]
    limits = devices.limits_of_head(driven, cluster.server)
    shares = {}
    for name, host in cluster.hosts.items():
        own = names_of_driven if host.is_head else []
        endpoints = {entry.device.device: entry.endpoint.environment for entry in declared[name]}
        environments = devices.environments(host.facts, endpoints, own, cluster.server.environment)
        shown = devices.shown_by_drivers(host.facts, environments) if bounded else {}
        shares[name] = workers.shares_of_memory(host, declared[name], own, shown, limits if host.is_head else {})
    return Lending(declared, driven, shares, limits)


def _with_cache(cluster: Cluster, name: str, entry: workers.Declared) -> workers.Declared:
    """An endpoint of a host, of which is decided whether it has a cache."""
    facts = cluster.hosts[name].facts
    models = [*([cluster.served] if cluster.served else []), *cluster.beside]
    return entry._replace(endpoint=cache_prefill.with_cache(entry.endpoint, facts, models))


def _prepare(cluster: Cluster, report: model_source.ModelReport, catalogue: Catalogue) -> Prepared:
    cluster = workers.with_transport(rdma.with_rdma(cluster))
    built = automatic.backends_of_hosts(cluster, catalogue)
    wanted = _releases(cluster, built)
    built = {name: _supported(cluster.hosts[name], own, wanted) for name, own in built.items()}
    head = cluster.hosts[cluster.head]
    serves = server_settings.backend_of(
        cluster.server, built[head.name], {name for names in built.values() for name in names}
    )
    release = wanted[serves]
    secured = serves if cluster.server.tls else None
    bounded = memory.VULKAN_MEMORY not in cluster.accepted
    lending = _lending(cluster, built, serves, bounded)
    equipped = {
        name: _equip(
            host,
            built[name],
            catalogue,
            wanted,
            workers.workers_of(host, lending.declared[name], cluster.head, lending.shares[name]),
            secured,
        )
        for name, host in cluster.hosts.items()
    }
    for backend, needed in wanted.items():
        builders = [host for name, host in cluster.hosts.items() if backend in built[name]]
        releases.check(backend, needed, {host.name: host.facts.architecture for host in builders})
    own = devices.of_head(
        head, lending.driven, lending.shares[head.name], lending.limits, cluster.server.environment, bounded
    )
    fitting = {backend for backend in wanted if releases.same_source(wanted[backend], release)}
    driven = {head.name: [name for name, _device in lending.driven]}
    serving = _within(cluster, _serving(equipped, cluster.server.backend or serves, fitting, driven))
    external_workers.check_protocol(cluster.external, release)
    others = _within(cluster, external_workers.workers_of(cluster.external))
    running = [worker for entry in equipped.values() for worker in entry.workers]
    _check_tunnels([*running, *others], cluster.server)
    _check_endpoints([*running, *others])
    external_workers.check_addresses(cluster.external, cluster.hosts)
    _check_names_of_the_head(head, equipped)
    builds = releases.builds(equipped, wanted, cluster.server, catalogue, secured, cluster.measures)
    cluster = cluster._replace(model=speculation.request_of(cluster.model, cluster.server))
    model = model_source.model_of(cluster.model, report, head.facts, names.ROOT)
    server_settings.check_auxiliary(cluster.server, cluster.model)
    server_settings.check(head.name, cluster.server, equipped[head.name].workers, release)
    speculation.check(cluster.server, model, release)
    model = speculation.with_predicting_layers(model, cluster.server)
    server_settings.check_types(model.path, model.summary, release, releases.variable_of(serves, cluster.releases))
    if running and not serving and cluster.within is None:
        raise Refusal(_no_worker_of_its_release(cluster, serves, equipped[head.name].backends, running))
    lent = devices.of_workers([*serving, *others], cluster.places, bounded)
    case = layout.Case(
        cluster.server,
        cluster.placement,
        model,
        release,
        (*lent, *own),
        head.name,
        cluster.places,
    )
    placed = layout.lay_out(case)
    unused = idle.devices_of(equipped, case.devices, placed) if placed.reasons else []
    return _with_batches(Prepared(cluster, equipped, wanted, builds, serves, case, placed, unused, cluster.server))


def _with_batches(prepared: Prepared) -> Prepared:
    """The same with pieces of prompts that suit the placement, where it stays that of the same devices with them. The known-answer model is there to
    try workers, however fast."""
    if prepared.placed.reasons or prepared.model.known_answer is not None:
        return prepared
    server, case = prepared.cluster.server, _case(prepared)
    chosen = prompts.batches_of(case, server, estimate.works_of(case))
    server = server._replace(batch=chosen.batch, micro_batch=chosen.micro_batch)
    laid = prepared.case._replace(server=server)
    placed = layout.lay_out(laid)
    if placed.reasons or placed.devices != prepared.placed.devices:
        return prepared
    return prepared._replace(cluster=prepared.cluster._replace(server=server), case=laid, placed=placed)


def _without_batches(prepared: Prepared) -> Prepared:
    """The same for fallbacks: planned pieces suit devices with more room than those that are left may have."""
    server = prepared.requested
    return prepared._replace(
        cluster=prepared.cluster._replace(server=server), case=prepared.case._replace(server=server)
    )


class Laid(NamedTuple):
    """A placement as the plan has it, and what its devices hold."""

    placed: device_load.Placed
    entries: tuple[DevicePlacement, ...]
    holders: Sequence[devices.Holder]


def _lay(prepared: Prepared, placed: device_load.Placed) -> Laid:
    cluster = prepared.cluster
    uncounted = auxiliary_models.uncounted(prepared.model, cluster.server, prepared.release)
    drafts = any(one.role == download_record.DRAFT for one in placed.auxiliary)
    sizes = [server_settings.size_of_auxiliary(prepared.model, role) for role in uncounted]
    sizes += speculation.uncounted(prepared.model, cluster.server, prepared.release)
    as_planned = server_settings.as_planned(cluster.server, drafts) and not sizes
    without = [*sizes, *server_settings.uncounted(cluster.server, drafts)]
    exact = as_planned and prepared.release.mainline
    entries = layout.as_plan(placed, exact, cluster.server.load_mode, without)
    holders = [
        devices.holder(device, cluster.places[device.host].facts, entry.weights_mib, entry.kv_mib + entry.further_mib)
        for device, entry in zip(placed.devices, entries)
    ]
    return Laid(placed, entries, holders)


def _fallback(prepared: Prepared, loss: fallbacks.Loss, laid: Laid, runtime_id: str) -> FallbackPlan:
    case = _case(prepared._replace(placed=laid.placed))
    speeds = estimate.speeds_of(case, estimate.works_of(case))
    return FallbackPlan(
        without=loss.name,
        endpoint=loss.workers[0].endpoint,
        placement=laid.entries,
        head=FallbackHead(heads.argv_of(_serving_head(prepared, laid, runtime_id))),
        workers=tuple(worker.endpoint for worker in laid.placed.lent()),
        generation_tokens_per_s=speeds.generation,
        generation_range=speeds.generation_range,
    )


def _plan(prepared: Prepared, runtime_id: str, with_fallbacks: bool) -> Planned:
    """The plan with its advisories, before ``_with_remedies`` and ``_judge``."""
    laid = _lay(prepared, prepared.placed)
    fits = not prepared.placed.reasons
    spare = _without_batches(prepared)
    lost = fallbacks.of_plan(spare.case, prepared.placed) if with_fallbacks and fits else []
    plan = _write(prepared, laid, lost, runtime_id)
    judged = _judge_fallbacks(spare, plan, laid, lost, runtime_id)
    if judged != lost:
        plan = _write(prepared, laid, judged, runtime_id)
    plan = services.with_tunnels(plan)
    hosts = {name: host._replace(services=services.of_host(plan, name)) for name, host in plan.hosts.items()}
    findings = table.evaluate(_context(prepared, plan, laid))
    plan = plan._replace(hosts=hosts, advisories=tuple(map(table.as_plan, findings)))
    return Planned(plan, prepared.idle, prepared.model.offered)


def _context(prepared: Prepared, plan: Plan, laid: Laid) -> AdvisoryContext:
    return AdvisoryContext(plan, prepared.cluster, prepared.release, prepared.model.summary, laid.holders)


def _judge_fallbacks(
    prepared: Prepared, plan: Plan, laid: Laid, lost: list[fallbacks.Fallback], runtime_id: str
) -> list[fallbacks.Fallback]:
    """The fallbacks without those that meet an error which the plan itself does not meet, and which is not accepted."""
    known = {one.advisory.id for one in table.evaluate(_context(prepared, plan, laid))} if lost else set()
    judged = []
    for entry in lost:
        errors = []
        if entry.placed:
            other = _lay(prepared, entry.placed)
            serving = _serving_head(prepared, other, runtime_id)
            head = heads.plan_of(serving, plan.head.environment, plan.head.backends, plan.estimate.load_s)
            served = plan._replace(head=head, placement=other.entries)
            met = table.evaluate(_context(prepared, served, other))
            errors = [
                one.message
                for one in met
                if one.advisory.severity == "error" and one.advisory.id not in known | prepared.cluster.accepted
            ]
        judged.append(fallbacks.Fallback(entry.loss, None, reason=errors[0].rstrip(".")) if errors else entry)
    return judged


def _write(prepared: Prepared, laid: Laid, lost: Sequence[fallbacks.Fallback], runtime_id: str) -> Plan:
    """The plan without services and advisories."""
    cluster, placed, model, release = prepared.cluster, prepared.placed, prepared.model, prepared.release
    spare = [(entry.loss, _lay(prepared, entry.placed)) for entry in lost if entry.placed]
    case = _case(prepared)
    predicted = estimate.of_plan(case, bool(cluster.server.override_tensor), layout.alone(prepared.case, case))
    predicted = predicted._replace(conversation_s=round(prompt_cache.move_s(case, cluster.server), 2))
    if case.fits:
        works = estimate.works_of(case)
        predicted = predicted._replace(
            prompt=prompts.of_plan(case, cluster.server, works),
            at_context=prompts.speeds_at_context(case, cluster.server, works),
            speculation=speculation.of_plan(case, model, works),
        )
    return Plan(
        schema=SCHEMA,
        cluster=cluster.name,
        refused=False,
        reasons=tuple(placed.reasons),
        fits=not placed.reasons,
        release=release.as_plan(),
        releases={
            prepared.wanted[backend].id: prepared.wanted[backend].as_plan()
            for entry in prepared.equipped.values()
            for backend in entry.backends
        },
        model=model_source.as_plan(model, cache_prefill.large_sizes(model.summary)),
        hosts={name: _host(prepared, entry, runtime_id) for name, entry in prepared.equipped.items()},
        head=_head(prepared, [laid, *(other for _loss, other in spare)], runtime_id, predicted.load_s),
        external_workers=_external(prepared),
        placement=laid.entries,
        further=auxiliary_models.as_plan(placed.auxiliary, model, cluster.head),
        further_uncounted=tuple(
            UncountedModel(role, why)
            for role, why in auxiliary_models.uncounted(model, cluster.server, release).items()
        ),
        links=tuple(
            name
            for name, entry in prepared.equipped.items()
            if entry.host.links and name != cluster.head and any(worker.open_at for worker in entry.workers)
        ),
        fallbacks=tuple(_fallback(_without_batches(prepared), loss, other, runtime_id) for loss, other in spare),
        no_fallback=tuple(entry.as_plan() for entry in lost if not entry.placed),
        estimate=predicted,
        advisories=(),
    )


def _case(prepared: Prepared) -> estimate.Case:
    cluster, placed = prepared.cluster, prepared.placed
    known = {backend for entry in prepared.equipped.values() for backend in entry.backends}
    return estimate.Case(
        release=prepared.release,
        placed=placed,
        summary=prepared.model.summary,
        head=cluster.head,
        hosts=cluster.hosts,
        places=cluster.places,
        fits=not placed.reasons,
        backend_of={
            name: server_settings.backend_of(cluster.server, entry.backends, known)
            for name, entry in prepared.equipped.items()
        },
        server=cluster.server,
    )


def _supported(host: Host, chosen: tuple[str, ...], wanted: Mapping[str, Release]) -> tuple[str, ...]:
    """The backends of a host without those that ``auto`` added and that their release does not have."""
    if host.backends != ("auto",):
        return chosen
    return (chosen[0], *(backend for backend in chosen[1:] if releases.supports(backend, wanted[backend])))


def _backends_in_use(built: Mapping[str, Sequence[str]]) -> list[str]:
    return [backend for backend in backends.BACKENDS if any(backend in own for own in built.values())]


def _releases(cluster: Cluster, built: Mapping[str, Sequence[str]]) -> dict[str, Release]:
    facts = {name: host.facts for name, host in cluster.hosts.items()}
    return releases.of_backends(cluster.releases, facts, _backends_in_use(built))


def release_variables(cluster: Cluster, catalogue: Catalogue) -> list[str]:
    """The variables of the head that give a release of which some host has a build: what the controller has to look up.

    :raises Refusal: hosts give different releases, or a release has no valid form.
    """
    _check_same_release(cluster)
    used = _backends_in_use(automatic.backends_of_hosts(cluster, catalogue))
    return list(dict.fromkeys(releases.variable_of(backend, cluster.releases) for backend in used))


def _check_same_release(cluster: Cluster) -> None:
    """All hosts must give the same releases as the head."""
    for name, host in cluster.hosts.items():
        for variable, request in host.releases.items():
            own = cluster.releases[variable]
            if request and own and request.fast_load != own.fast_load:
                raise Refusal(
                    f"llama_build_fast_load of {name} differs from that of the head {cluster.head}, and head and workers need the same patch: set "
                    "it for the whole group"
                )
            if request != own:
                raise Refusal(
                    f"{variable} of {name} differs from that of the head {cluster.head}, and head and workers need the same release: set it "
                    "for the whole group, or llama_release_<backend> where backends differ"
                )


def _equip(
    host: Host,
    built: tuple[str, ...],
    catalogue: Catalogue,
    wanted: Mapping[str, Release],
    declared: Sequence[Worker],
    secured: str | None,
) -> Equipped:
    """The host with its workers and the tools that it needs.

    :param secured: backend of the llama-server that speaks TLS.
    """
    facts = host.facts
    homes = {names.ROOT: facts.prefix, names.BUILD_ACCOUNT: names.BUILD_HOME}
    for account, home in facts.accounts.items():
        if facts.scope == "system" and home != homes.get(account, home):
            raise Refusal(
                f"{host.name} already has an account {account}, with the home {home}: services run as {account}, so rename that account"
            )
    manager = service_managers.MANAGERS[facts.service_manager]
    if not manager.host_settings and any(link.manage for link in host.links):
        raise Refusal(
            f"llama_links of {host.name} has manage: true, which needs systemd and root: configure the interface yourself, and "
            "set manage: false"
        )
    return Equipped(
        host=host,
        backends=built,
        tools=requirements.tools_of(host, built, catalogue, wanted, secured),
        optional_tools=requirements.optional_tools_of(host, catalogue, {wanted[backend].source for backend in built}),
        workers=tuple(devices.with_heap(worker, facts) for worker in declared),
    )


def _serving(
    equipped: Mapping[str, Equipped], backend: str, fitting: set[str], driven: Mapping[str, Sequence[str]]
) -> list[Worker]:
    """The workers that the head may use.

    :param backend: that is preferred where several drive a device.
    :param fitting: backends whose release is of the head's source.
    :param driven: host → names of the devices that llama-server itself drives there.
    """
    return [
        worker
        for name, entry in equipped.items()
        for worker in workers.usable(
            entry.workers,
            (backend, *entry.backends),
            fitting,
            same_device.canonical_device_names(entry.host.facts),
            driven.get(name, ()),
        )
    ]


def _within(cluster: Cluster, lent: list[Worker]) -> list[Worker]:
    """Those of the workers that may hold layers."""
    return [worker for worker in lent if cluster.within is None or worker.host in cluster.within]


def _no_worker_of_its_release(cluster: Cluster, serves: str, built: Sequence[str], running: Sequence[Worker]) -> str:
    theirs = list(dict.fromkeys(worker.build for worker in running))
    variables = dict.fromkeys(releases.variable_of(backend, cluster.releases) for backend in (serves, *theirs))
    common = [backend for backend in theirs if backend in built]
    other = f"llama_server_backend to {' or '.join(common)}, or " if common else ""
    return f"the head serves with {serves}, and no worker has a build of the same release: set {other}{remedies.listed(variables)} to the same release"


def _check_endpoints(declared: Sequence[Worker]) -> None:
    """Refuses two hosts with one endpoint, and two that are one machine, whose memory would count twice."""
    owners: dict[str, str] = {}
    for worker in declared:
        own = None if worker.external else worker.open_at
        for place, what in ((worker.endpoint, "worker"), *([(own, "address")] if own else [])):
            other = owners.setdefault(place, worker.host)
            if other != worker.host:
                once = ", or name that machine once, with all its llama_worker_endpoints" if what == "address" else ""
                raise Refusal(
                    f"{worker.host} and {other} both have the {what} {place}: give each host its own address "
                    f"in ansible_host, llama_links or llama_external_workers{once}"
                )


def _check_tunnels(declared: Sequence[Worker], server: Server) -> None:
    """Refuses a tunnel that ends on a port of the head which something else has."""
    taken = {server.port: "llama_server_port"}
    for worker in declared:
        if worker.address == names.LOOPBACK and not worker.tunnel and not worker.external:
            taken[worker.port] = f"the worker {worker.name} of the head"
    for worker in declared:
        ends = [worker.tunnel.port] if worker.tunnel and not worker.open_at else []
        if worker.external and names.is_loopback(worker.address):
            ends = [worker.port]
        for port in ends:
            if port in taken:
                variable = (
                    "endpoint in llama_external_workers" if worker.external else "tunnel in llama_worker_endpoints"
                )
                raise Refusal(
                    f"the tunnel to the worker {worker.name} of {worker.host} ends on port {port} of the head, which {taken[port]} has: end it on another "
                    f"one, and set {variable} to that"
                )
            taken[port] = f"the tunnel to {worker.name} of {worker.host}"


def _check_names_of_the_head(head: Host, equipped: Mapping[str, Equipped]) -> None:
    """Refuses a head that is in the inventory twice: it would use its devices twice, itself and through workers."""
    for name, entry in equipped.items():
        direct = [worker.open_at for worker in entry.workers if worker.open_at]
        if name == head.name or not direct:
            continue
        address = addresses.address_of(head, name, direct[0])
        if direct[0] == address:
            raise Refusal(
                f"{name} has the address {address}, which is that of the head {head.name}: remove {name} from the inventory, and add "
                f"{head.name} itself to llama_workers if it lends its devices"
            )


def _serving_head(prepared: Prepared, laid: Laid, runtime_id: str) -> heads.Serving:
    """What llama-server's command line is made of, for one placement."""
    server, facts, name = prepared.cluster.server, prepared.head.host.facts, prepared.cluster.head
    load_mode = heads.load_mode_of(server.load_mode, prepared.release, laid.holders, name)
    case = _case(prepared._replace(placed=laid.placed))
    return heads.Serving(
        server=server._replace(load_mode=load_mode),
        host=prepared.head.host,
        release=prepared.release,
        model=prepared.model,
        placed=laid.placed,
        build=prepared.builds[name][prepared.serves].id,
        runtime=_runtime(facts, runtime_id),
        state=_state_folder(facts),
        metrics=prepared.head.host.metrics,
        page=server.page_port,
        service=names.SERVER,
        cache=prompt_cache.of_plan(case, server, estimate.works_of(case) if case.fits else ()),
        beside=auxiliary_models.arguments(laid.placed.auxiliary, prepared.model, server, prepared.release),
    )


def _head(prepared: Prepared, laid: Sequence[Laid], runtime_id: str, load_s: float | None) -> HeadPlan:
    """:param laid: the placement that is planned, and those of fallbacks: one environment serves all that may be run."""
    server, facts = prepared.cluster.server, prepared.head.host.facts
    build = prepared.builds[prepared.cluster.head][prepared.serves]
    run = laid if server.fallback else laid[:1]
    own = devices.environment_of_head(
        facts,
        [worker.device for worker in prepared.head.workers],
        prepared.serves,
        any(_drives(other) for other in run),
        any(other.placed.lent() for other in run),
    )
    own.update(next(filter(None, (auxiliary_models.environment(other.placed.auxiliary) for other in run)), {}))
    own.update(devices.heap_of_head([holder for other in run for holder in other.holders], facts, server.environment))
    environment = {**backends.service_environment(build.backend, build.environment, not build.archives), **own}
    used = sorted({device.backend for other in run for device in _drives(other)})
    return heads.plan_of(_serving_head(prepared, laid[0], runtime_id), environment, used, load_s)


def _drives(laid: Laid) -> list[Device]:
    """The head's own devices that hold something."""
    beside = [one.device for one in laid.placed.auxiliary if one.device]
    return list({device.buffer: device for device in (*laid.placed.own(), *beside)}.values())


def _runtime(facts: Facts, runtime_id: str) -> str:
    return f"{facts.prefix}/runtime/{runtime_id}"


def _state_folder(facts: Facts) -> str:
    return f"{facts.prefix}/state"


def _host(prepared: Prepared, entry: Equipped, runtime_id: str) -> HostPlan:
    host, facts = entry.host, entry.host.facts
    is_head, system = host.name == prepared.cluster.head, facts.scope == "system"
    sources = {prepared.wanted[backend].source for backend in entry.backends}
    needs_runtime = is_head or any(
        worker.keeps_tunnel or services.needs_launcher(facts.service_manager, worker.cache) for worker in entry.workers
    )
    built = prepared.builds[host.name]
    manager = service_managers.MANAGERS[facts.service_manager]
    accounts = _accounts(facts, sources) if system else ()
    keys = _keys(prepared, entry)
    return HostPlan(
        scope=facts.scope,
        prefix=facts.prefix,
        cache=facts.cache,
        state=_state_folder(facts),
        python=facts.python,
        service_manager=facts.service_manager,
        units=facts.units,
        account=names.ROOT if system else None,
        accounts=accounts,
        build_account=accounts[-1].name if accounts else None,
        host_settings=manager.host_settings,
        folders=(
            *_folders(facts, names.ROOT if system else None, sources, host.metrics),
            *([FolderPlan(posixpath.dirname(keys[0]), names.ROOT if system else None, "0700")] if keys else []),
        ),
        tuning=_tuning(host),
        runtime=_runtime(facts, runtime_id) if needs_runtime else None,
        metrics=host.metrics if needs_runtime else None,
        tools=entry.tools,
        optional_tools=entry.optional_tools,
        unused_accelerators=()
        if sources == {"binary"}
        else tuple(requirements.unused_accelerators(host, entry.backends)),
        builds=tuple(build for build in built.values() if build.targets),
        keep_releases=host.keep_releases,
        workers=tuple(_worker(prepared, worker, facts) for worker in entry.workers),
        firewall=_door(prepared.cluster.server) if is_head else _firewall(prepared.head.host, host, entry.workers),
        firewall_manager=facts.firewall if system and manager.host_settings else None,
        unit_closes=_unit_closes(facts),
        knocks=_knocks(prepared, entry),
        links=host.links,
        services=(),
        tunnel_keys=keys or None,
    )


def _worker(prepared: Prepared, worker: Worker, facts: Facts) -> WorkerPlan:
    release = prepared.wanted[worker.build]
    build, folder = prepared.builds[worker.host][worker.build], facts.prefix + "/releases"
    return WorkerPlan(
        name=worker.name,
        used=worker.endpoint in {used.endpoint for used in prepared.placed.lent()},
        endpoint=worker.endpoint,
        listens=worker.listens,
        tunnel=worker.wire if worker.keeps_tunnel else None,
        rdma=worker.rdma or None,
        backend=worker.backend,
        device=worker.device,
        shared=worker.shared,
        cache=worker.cache,
        cache_mib=worker.cache_mib,
        cache_why=worker.cache_why,
        prefill=cache_prefill.of_worker(worker, build, release, folder, prepared.placed, prepared.model.path),
        protocol=release.protocol,
        argv=tuple(workers.argv_of(worker, build, release, folder)),
        environment={
            **backends.service_environment(build.backend, build.environment, not build.archives),
            **worker.environment,
        },
    )


def _external(prepared: Prepared) -> tuple[ExternalWorkerPlan, ...]:
    used = {worker.endpoint for worker in prepared.placed.lent()}
    return tuple(
        ExternalWorkerPlan(
            name=worker.name,
            host=worker.host,
            endpoint=worker.endpoint,
            backend=worker.backend,
            memory_mib=worker.capacity_mib,
            protocol=declared.protocol or prepared.release.protocol,
            used=worker.endpoint in used,
        )
        for worker, declared in zip(external_workers.workers_of(prepared.cluster.external), prepared.cluster.external)
    )


def _firewall(head: Host, host: Host, declared: Sequence[Worker]) -> tuple[FirewallRule, ...]:
    """The port of each worker is open to the head alone, and of a host with links the one at which these are measured."""
    opened = [worker for worker in declared if worker.open_at]
    if not opened:
        return ()
    address = str(opened[0].open_at)
    source = addresses.address_of(head, host.name, address)
    ports = [*(worker.port for worker in opened), *([names.MEASURING_PORT] if host.links else [])]
    return tuple(FirewallRule(port, "tcp", (source,), address) for port in ports)


def _door(server: Server) -> tuple[FirewallRule, ...]:
    """The ports of the server and of its page are open to the networks of its clients; nothing where it listens on loopback, or nobody says whose they are."""
    if not server.allowed or names.is_loopback(server.host):
        return ()
    sources = tuple(network.removesuffix("/32") for network in server.allowed)
    return tuple(FirewallRule(port, "tcp", sources, server.host) for port in (server.port, server.page_port) if port)


def _keys(prepared: Prepared, entry: Equipped) -> tuple[str, ...]:
    """Files of the keys of tunnels that end on a host, each named for the address of the worker's host."""
    ends = prepared.equipped.values() if entry.host.name == prepared.cluster.head else [entry]
    kept = {worker.open_at for end in ends for worker in end.workers if worker.keeps_tunnel}
    return tuple(f"{entry.host.facts.prefix}/{names.KEYS}/{address}" for address in sorted(map(str, kept)))


def _unit_closes(facts: Facts) -> bool:
    """Whether the definition of a service closes its port to those who are not planned to connect."""
    return bool(service_managers.MANAGERS[facts.service_manager].closes_ports_by and facts.units_filter)


def _knocks(prepared: Prepared, entry: Equipped) -> tuple[str, ...]:
    """Endpoints that are closed to this host: its own ones to its other addresses, and those of the hosts after it."""
    name = entry.host.name
    if name == prepared.cluster.head:
        return ()
    names = [other for other in prepared.equipped if other != prepared.cluster.head]
    place = names.index(name)
    following = [prepared.equipped[other] for other in [*names[place + 1 :], *names[:place]][:KNOCKING_HOSTS]]
    closed = [other for other in following if _unit_closes(other.host.facts) or other.host.facts.firewall]
    own = [entry] if _unit_closes(entry.host.facts) else []
    return tuple(worker.wire for other in [*own, *closed] for worker in other.workers if worker.open_at)


def _accounts(facts: Facts, sources: set[str]) -> tuple[AccountPlan, ...]:
    """The account of services, and the one that builds where something is compiled."""
    serves = AccountPlan(names.ROOT, facts.device_groups, facts.prefix)
    builds = AccountPlan(names.BUILD_ACCOUNT, (), names.BUILD_HOME)
    return (serves, *([builds] if sources & set(release_request.COMPILED) else []))


def _tuning(host: Host) -> KernelTuning:
    """Kernel parameters and profile of tuned, if asked for, and whether the run may reboot the host for them."""
    if not host.tuning.wanted:
        return KernelTuning({}, "", False)
    if not service_managers.MANAGERS[host.facts.service_manager].host_settings:
        raise Refusal(f"llama_host_tuning of {host.name} is set, which needs systemd and root: leave it out there")
    drivers = {
        backends.RECORDS[accelerator.backend].kernel_driver
        for accelerator in host.facts.accelerators
        if accelerator.unified
    }
    if kernel_parameters.DRIVER not in drivers:
        raise Refusal(
            f"llama_host_tuning of {host.name} is set, but the host has no AMD graphics with shared memory: leave it out, or declare the device "
            "in llama_hardware"
        )
    try:
        parameters = kernel_parameters.parameters(host.facts.memory_mib, host.tuning.gtt_mib)
    except ValueError as error:
        raise Refusal(f"llama_host_tuning_gtt_mib of {host.name} is not possible: {error}") from None
    return KernelTuning(parameters, host.tuning.profile, host.tuning.reboot)


def _folders(facts: Facts, account: str | None, sources: set[str], metrics: str | None) -> tuple[FolderPlan, ...]:
    """Folders of the installation: path, owner and mode; those of others are only made where they are missing."""
    prefix, root = facts.prefix, "root" if account else None
    paths = [
        (prefix, root, "0755"),
        (f"{prefix}/{names.FOLDER_MARK}", root, "0755"),
        (prefix + "/models", root, "0755"),
        (prefix + "/state", account, "0750"),
        (f"{prefix}/{names.PLANS}", root, "0700"),
        (facts.units, None, None),
        *([(metrics, None, None)] if metrics and account else []),
    ]
    if sources != {"package"}:
        mode = (
            "0755" if account else "0700"
        )  # the controller's own cache, which is private, where it is this account's host
        paths += [(facts.cache, root, mode), (facts.cache + "/sources", root, mode)]
    return tuple(FolderPlan(path, owner, mode) for path, owner, mode in paths)

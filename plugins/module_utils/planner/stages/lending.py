# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who drives which device: a worker that lends it, or on the head llama-server itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases, requirements
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import same_device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices, workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site, site_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import consistency
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Programs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Catalogue,
    Cluster,
    Equipped,
    Host,
    Worker,
)


def equip(cluster: Cluster, programs: Programs, catalogue: Catalogue) -> tuple[dict[str, Equipped], Site]:
    """Return the hosts with their workers, and the site for the model.

    :raises Refusal: a host cannot run what it declares, or workers do not go together.
    """
    head = cluster.hosts[cluster.head]
    # Who accepts the advisory lets devices hold more than their drivers show.
    within_shown_memory = devices.VULKAN_MEMORY not in cluster.accepted
    loan = _lending(cluster, programs, within_shown_memory)
    equipped_hosts = {
        name: _equip_host(
            host,
            programs,
            catalogue,
            workers.workers_of(host, loan.declared[name], cluster.head, loan.capacities[name]),
        )
        for name, host in cluster.hosts.items()
    }
    consistency.check_consistency(cluster, equipped_hosts, programs.release)
    usable_workers = _layer_workers(
        cluster, _usable_workers(cluster, programs, equipped_hosts, [name for name, _device in loan.driven])
    )
    if cluster.layer_hosts is None and not usable_workers:
        _check_some_worker_serves(cluster, programs, equipped_hosts)
    external = _layer_workers(cluster, [external.worker for external in cluster.external])
    worker_devices = devices.lent_devices([*usable_workers, *external], cluster.every_host, within_shown_memory)
    head_devices = devices.head_devices(
        head, loan.driven, loan.capacities[head.name], cluster.server.environment, within_shown_memory
    )
    architecture = cluster.model.summary.architecture if cluster.model.summary else ""
    return equipped_hosts, site_of(
        cluster.head, cluster.every_host, [*worker_devices, *head_devices], architecture, programs.server_backends
    )


class Lending(NamedTuple):
    """Who drives the devices of each host: its workers, or on the head llama-server itself."""

    declared: Mapping[str, Sequence[workers.DeclaredWorker]]
    """Host → its workers."""
    driven: Sequence[tuple[str, Accelerator]]
    """The head's own devices, with their names."""
    capacities: Mapping[str, Mapping[str, int]]
    """Host → device → MiB that it may hold."""


def _lending(cluster: Cluster, programs: Programs, within_shown_memory: bool) -> Lending:
    """:param within_shown_memory: whether devices hold no more than their drivers show as their own."""
    head = cluster.hosts[cluster.head]
    declared_workers = {
        name: [
            _with_cache(cluster, name, entry)
            for entry in workers.declare_workers(
                host, programs.built_backends[name], programs.serving_backend if host.is_head else None
            )
        ]
        if host.is_worker
        else []
        for name, host in cluster.hosts.items()
    }
    lent_names = [entry.device.device for entry in declared_workers[head.name]]
    driven_devices = devices.driven_by_head(head.facts, lent_names, programs.serving_backend)
    names_of_driven = [name for name, _device in driven_devices]
    limits = devices.limits_of_head(driven_devices, cluster.server)
    capacities = {}
    for name, host in cluster.hosts.items():
        driven_names = names_of_driven if host.is_head else []
        environments = {entry.device.device: entry.request.environment for entry in declared_workers[name]}
        if backends.UNIFIED_HEAP in cluster.server.environment:  # else the head's own devices show all they have
            environments.update(dict.fromkeys(driven_names, cluster.server.environment))
        reported_mib = devices.driver_memory(host.facts, environments) if within_shown_memory else {}
        lent = [(entry.device.device, entry.request.memory_mib) for entry in declared_workers[name]]
        capacities[name] = devices.capacities_of(host, lent, driven_names, reported_mib, limits if host.is_head else {})
    return Lending(declared_workers, driven_devices, capacities)


def _with_cache(cluster: Cluster, name: str, entry: workers.DeclaredWorker) -> workers.DeclaredWorker:
    """A worker of a host, of which is decided whether it has a cache."""
    facts = cluster.hosts[name].facts
    models = [*([cluster.model.summary] if cluster.model.summary else []), *cluster.other_summaries]
    return entry._replace(request=cache_prefill.with_cache(entry.request, facts, models))


def _equip_host(host: Host, programs: Programs, catalogue: Catalogue, declared_workers: Sequence[Worker]) -> Equipped:
    """:raises Refusal: it has an account of somebody else with one of our names, or links that need systemd."""
    facts, built_backends, releases_by_backend = host.facts, programs.built_backends[host.name], programs.releases
    homes = {names.ACCOUNT: facts.prefix, names.BUILD_ACCOUNT: names.BUILD_HOME}
    for account, home in facts.accounts.items():
        if facts.scope == "system" and home != homes.get(account, home):
            raise Refusal(
                f"{host.name} already has an account {account} with the home {home}, but services run as {account}: rename the existing account"
            )
    manager = service_managers.MANAGERS[facts.service_manager]
    if not manager.host_settings and any(link.manage for link in host.links):
        raise Refusal(
            f"llama_links for {host.name} has manage: true, which needs systemd and root: configure the interface yourself, and "
            "set manage: false"
        )
    return Equipped(
        host=host,
        backends=built_backends,
        tools=requirements.tools_of(host, built_backends, catalogue, releases_by_backend, programs.tls_backend),
        optional_tools=requirements.optional_tools_of(
            host, catalogue, {releases_by_backend[backend].source for backend in built_backends}
        ),
        workers=tuple(declared_workers),
    )


def _usable_workers(
    cluster: Cluster, programs: Programs, equipped_hosts: Mapping[str, Equipped], driven: Sequence[str]
) -> list[Worker]:
    """The workers that the head may use: those of its own source, and of those that lend the same device one.

    :param driven: names of the head's devices that llama-server itself drives.
    """
    preferred_backend, usable_backends = cluster.server.backend or programs.serving_backend, programs.usable_backends
    return [
        worker
        for name, entry in equipped_hosts.items()
        for worker in workers.head_options(
            entry.workers,
            (preferred_backend, *entry.backends),
            usable_backends,
            same_device.canonical_device_names(entry.host.facts),
            driven if name == cluster.head else (),
        )
    ]


def _layer_workers(cluster: Cluster, candidates: list[Worker]) -> list[Worker]:
    """Return the workers that may hold layers."""
    return [worker for worker in candidates if cluster.layer_hosts is None or worker.host in cluster.layer_hosts]


def _check_some_worker_serves(cluster: Cluster, programs: Programs, equipped_hosts: Mapping[str, Equipped]) -> None:
    """:raises Refusal: there are workers, and none has a build of the head's release."""
    builds = list(dict.fromkeys(worker.build for entry in equipped_hosts.values() for worker in entry.workers))
    if not builds:
        return
    variables = dict.fromkeys(
        releases.variable_of(backend, cluster.releases) for backend in (programs.serving_backend, *builds)
    )
    common_backends = [backend for backend in builds if backend in programs.built_backends[cluster.head]]
    remedy = f"llama_server_backend to {' or '.join(common_backends)}, or " if common_backends else ""
    raise Refusal(
        f"the head serves with {programs.serving_backend}, but no worker has a build of the same release: set {remedy}{remedies.join_names(variables)} to "
        "the same release"
    )

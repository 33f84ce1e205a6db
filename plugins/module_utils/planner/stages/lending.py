# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who drives which device: a worker that lends it, or on the head llama-server itself."""

from __future__ import annotations

from collections.abc import Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases, requirements, toolchains
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices, workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site, site_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import consistency
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Programs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Catalogue,
    Cluster,
    EquippedHost,
    Host,
    Worker,
)


def equip_hosts(cluster: Cluster, programs: Programs, catalogue: Catalogue) -> tuple[dict[str, EquippedHost], Site]:
    """Return the hosts with their workers, and the site for the model.

    :raises Refusal: a host cannot run what it declares, or workers do not go together.
    """
    equipped_hosts = {name: _equip_host(cluster, host, programs, catalogue) for name, host in cluster.hosts.items()}
    consistency.check_consistency(cluster, equipped_hosts, programs.release)
    usable_workers = _layer_workers(cluster, _usable_workers(cluster, programs, equipped_hosts))
    if cluster.layer_hosts is None and not usable_workers:
        _check_common_release(cluster, programs, equipped_hosts)
    usable_workers += _layer_workers(cluster, [external.worker for external in cluster.external])
    site_devices = [devices.lent_device(worker, cluster.all_hosts[worker.host]) for worker in usable_workers]
    site_devices += equipped_hosts[cluster.head].devices
    if cluster.has_memory_limits:
        site_devices = [
            device._replace(capacity_mib=int(min(device.capacity_mib, devices.limit_mib(device))))
            for device in site_devices
        ]
    architecture = cluster.model.summary.architecture if cluster.model.summary else ""
    return equipped_hosts, site_of(
        cluster.head, cluster.all_hosts, site_devices, architecture, programs.server_backends
    )


def _equip_host(cluster: Cluster, host: Host, programs: Programs, catalogue: Catalogue) -> EquippedHost:
    """:raises Refusal: it has an account of somebody else with one of our names, or links that need systemd."""
    facts, sources = host.facts, {programs.releases[name].source for name in programs.built_backends[host.name]}
    homes = {names.ACCOUNT: facts.prefix, names.BUILD_ACCOUNT: names.BUILD_HOME}
    for account, home in facts.accounts.items():
        if facts.scope == "system" and home != homes.get(account, home):
            raise Refusal(
                f"{host.name} already has an account {account} with another home, {home}, but services need this account: rename the existing one"
            )
    manager = service_managers.MANAGERS[facts.service_manager]
    if not manager.host_settings and any(link.manage for link in host.links):
        raise Refusal(
            f"llama_links for {host.name} has manage: true, which needs systemd and root: configure the interface yourself, and "
            "set manage: false"
        )
    build_tools = {
        backend: toolchains.choose_tools(host, backend, programs.releases[backend].fork)
        if programs.releases[backend].source in release_request.COMPILED_SOURCES
        else None
        for backend in programs.built_backends[host.name]
    }
    declared_workers = workers.declare_workers(
        cluster, host, programs.built_backends[host.name], programs.serving_backend
    )
    driven_devices = []
    if host.is_head:
        lent_names = [worker.device for worker in declared_workers]
        driven_devices = devices.driven_devices(facts, lent_names, programs.serving_backend)
    capacities = devices.capacities_of(
        host, declared_workers, driven_devices, cluster.server if host.is_head else None, cluster.has_memory_limits
    )
    return EquippedHost(
        host=host,
        build_tools=build_tools,
        tools=requirements.tools_of(host, build_tools, catalogue, programs.releases, programs.tls_backend),
        optional_tools=requirements.optional_tools_of(host, catalogue, sources),
        workers=tuple(
            worker._replace(capacity_mib=worker.capacity_mib or capacities[worker.device])
            for worker in declared_workers
        ),
        devices=tuple(devices.head_devices(host, driven_devices, capacities, cluster.server.environment)),
    )


def _usable_workers(cluster: Cluster, programs: Programs, equipped_hosts: Mapping[str, EquippedHost]) -> list[Worker]:
    """Return the workers that the head may use: those of its own source, and of those that lend the same device one."""
    preferred_backend = cluster.server.backend or programs.serving_backend
    return [
        worker
        for entry in equipped_hosts.values()
        for worker in workers.head_options(entry, (preferred_backend, *entry.backends), programs.usable_backends)
    ]


def _layer_workers(cluster: Cluster, candidates: list[Worker]) -> list[Worker]:
    """Return the workers that may hold layers."""
    return [worker for worker in candidates if cluster.layer_hosts is None or worker.host in cluster.layer_hosts]


def _check_common_release(cluster: Cluster, programs: Programs, equipped_hosts: Mapping[str, EquippedHost]) -> None:
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

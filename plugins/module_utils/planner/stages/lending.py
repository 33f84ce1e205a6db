# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The equipment of hosts, and what drives each device: a worker that lends it or, on the head, llama-server itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases, requirements, toolchains
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import (
    addresses,
    external_workers,
    release_request,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices, workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site, site_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Catalogue,
    Cluster,
    Device,
    EquippedHost,
    Host,
    Programs,
    Server,
    Worker,
)


def equip_hosts(cluster: Cluster, programs: Programs, catalogue: Catalogue) -> tuple[dict[str, EquippedHost], Site]:
    """Return the hosts with their tools, workers and builds, and the site for the model.

    :raises Refusal: a host cannot run what it declares, or its workers conflict with others.
    """
    equipped_hosts = {name: _equip_host(cluster, host, programs, catalogue) for name, host in cluster.hosts.items()}
    usable_workers = [
        worker for entry in equipped_hosts.values() for worker in _usable_workers(cluster, entry, programs)
    ]
    if cluster.layer_hosts is None and not usable_workers:
        _check_common_release(cluster, programs, equipped_hosts)
    usable_workers += [entry.worker for entry in cluster.external_workers]
    site_devices = [
        _lent_device(worker, cluster.all_hosts[worker.host])
        for worker in usable_workers
        if cluster.layer_hosts is None or worker.host in cluster.layer_hosts
    ]
    site_devices += equipped_hosts[cluster.head].driven_devices
    if cluster.has_driver_limits:
        site_devices = [
            device._replace(capacity_mib=int(min(device.capacity_mib, devices.limit_mib(device))))
            for device in site_devices
        ]
    _check_consistency(cluster, equipped_hosts, programs.release)
    architecture = cluster.model.summary.architecture if cluster.model.summary else ""
    site = site_of(cluster.head, cluster.all_hosts, site_devices, architecture, programs.server_backends)
    return releases.with_builds(cluster, equipped_hosts, programs, catalogue), site


def _equip_host(cluster: Cluster, host: Host, programs: Programs, catalogue: Catalogue) -> EquippedHost:
    """Return a host with its equipment. Refuse a foreign account with the name of an account of services, and managed links without systemd."""
    facts = host.facts
    homes = {names.ACCOUNT: facts.prefix, names.BUILD_ACCOUNT: names.BUILD_HOME}
    for account, home in facts.accounts.items():
        if facts.scope == "system" and home != homes.get(account, home):
            raise Refusal(
                f"{host.name} already has an account {account} with another home directory ({home}), but services need this name: rename the account"
            )
    manager = service_managers.MANAGERS[facts.service_manager]
    if not manager.host_settings and any(link.manage for link in host.links):
        raise Refusal(
            f"llama_links for {host.name} has manage: true, which needs systemd and root: configure the interface yourself and set manage: false"
        )
    build_tools = {
        backend: toolchains.choose_tools(host, backend, programs.releases[backend].fork)
        if programs.releases[backend].source in release_request.COMPILED_SOURCES
        else None
        for backend in programs.built_backends[host.name]
    }
    declared_workers = workers.declare_workers(cluster, host, programs)
    driven_devices = []
    if host.is_head:
        driven_devices = devices.driven_devices(
            host, declared_workers, programs.serving_backend, cluster.server.environment
        )
    capacities = devices.capacities_of(
        host, declared_workers, driven_devices, cluster.server if host.is_head else None, cluster.has_driver_limits
    )
    return EquippedHost(
        host=host,
        build_tools=build_tools,
        tools=requirements.tools_of(host, build_tools, catalogue, programs),
        optional_tools=requirements.optional_tools_of(host, build_tools, catalogue),
        workers=tuple(
            worker._replace(capacity_mib=worker.capacity_mib or capacities[worker.device])
            for worker in declared_workers
        ),
        driven_devices=tuple(device._replace(capacity_mib=capacities[device.name]) for device in driven_devices),
    )


def _usable_workers(cluster: Cluster, entry: EquippedHost, programs: Programs) -> list[Worker]:
    """Return the workers of a host that the head may use: those whose release is compatible with the head's, and only one for each device."""
    backend_order = (cluster.server.backend or programs.serving_backend, *entry.backends)
    canonical_names = entry.host.facts.canonical_names
    used_names = {canonical_names[device.name] for device in entry.driven_devices}
    chosen_names = set()
    usable_workers = [worker for worker in entry.workers if worker.build_backend in programs.usable_backends]
    for worker in sorted(usable_workers, key=lambda worker: backend_order.index(worker.build_backend)):
        device = canonical_names.get(worker.device)
        if device is None or device not in used_names:
            chosen_names.add(worker.name)
            used_names |= {device} if device else set()
    return [worker for worker in entry.workers if worker.name in chosen_names]


def _lent_device(worker: Worker, host: Host) -> Device:
    """Return the device that a worker lends."""
    return Device(
        host=worker.host,
        backend=worker.backend,
        name=worker.device,
        buffer=capabilities.BUFFER_TEMPLATE.format(endpoint=worker.endpoint),
        capacity_mib=worker.capacity_mib,
        environment=worker.environment,
        worker=worker,
        accelerator=host.facts.accelerator_of(worker.device),
    )


def _check_common_release(cluster: Cluster, programs: Programs, equipped_hosts: Mapping[str, EquippedHost]) -> None:
    """Refuse workers if none of them has a build of the head's release."""
    builds = list(dict.fromkeys(worker.build_backend for entry in equipped_hosts.values() for worker in entry.workers))
    if not builds:
        return
    variables = dict.fromkeys(
        releases.variable_of(backend, cluster.release_requests) for backend in (programs.serving_backend, *builds)
    )
    common_backends = [backend for backend in builds if backend in programs.built_backends[cluster.head]]
    remedy = f"llama_server_backend to {' or '.join(common_backends)}, or " if common_backends else ""
    raise Refusal(
        f"the head serves with {programs.serving_backend}, but no worker has a build of the same release: set {remedy}{remedies.join_names(variables)} to "
        "the same release"
    )


def _check_consistency(cluster: Cluster, equipped_hosts: Mapping[str, EquippedHost], release: ReleasePlan) -> None:
    """Refuse duplicate ports and addresses, and external workers that the head cannot use.

    :param release: release of the head.
    """
    declared_workers = [worker for host in equipped_hosts.values() for worker in host.workers]
    declared_workers += [entry.worker for entry in cluster.external_workers]
    _check_tunnels(declared_workers, cluster.server)
    _check_endpoints(declared_workers)
    _check_head_address(cluster.hosts[cluster.head], equipped_hosts)
    external_workers.check_workers(cluster.external_workers, cluster.hosts, release)


def _check_endpoints(declared_workers: Sequence[Worker]) -> None:
    """Refuse two hosts with the same endpoint or address: the memory of that machine would count twice."""
    owners: dict[str, str] = {}
    for worker in declared_workers:
        open_endpoint = None if worker.is_external else worker.open_endpoint
        open_addresses = [(names.address_of(open_endpoint), "address")] if open_endpoint else []
        for address, kind in ((worker.endpoint, "worker"), *open_addresses):
            owner = owners.setdefault(address, worker.host)
            if owner != worker.host:
                remedy = (
                    ", or list that machine once, with all of its llama_worker_endpoints" if kind == "address" else ""
                )
                raise Refusal(
                    f"{worker.host} and {owner} both have the {kind} {address}: give each host its own address "
                    f"in ansible_host, llama_links or llama_external_workers{remedy}"
                )


def _check_tunnels(declared_workers: Sequence[Worker], server: Server) -> None:
    """Refuse a tunnel that ends on a port of the head which is already in use."""
    port_users = {server.port: "llama_server_port"}
    for worker in declared_workers:
        if worker.open_endpoint == worker.listens and names.is_loopback(worker.listens) and not worker.is_external:
            port_users[names.port_of(worker.listens)] = f"the head's worker {worker.name}"
    for worker in declared_workers:
        if not worker.open_endpoint or (worker.is_external and names.is_loopback(worker.endpoint)):
            port = names.port_of(worker.endpoint)
            if port in port_users:
                variable = (
                    "endpoint in llama_external_workers" if worker.is_external else "tunnel in llama_worker_endpoints"
                )
                raise Refusal(
                    f"the tunnel to the worker {worker.name} on {worker.host} listens on port {port} of the head, which {port_users[port]} already uses: let "
                    f"the tunnel listen on another port and change {variable} accordingly"
                )
            port_users[port] = f"the tunnel to {worker.name} on {worker.host}"


def _check_head_address(head: Host, equipped_hosts: Mapping[str, EquippedHost]) -> None:
    """Refuse a head that is in the inventory twice: it would use its devices twice, directly and through workers."""
    for name, entry in equipped_hosts.items():
        direct_addresses = [names.address_of(worker.open_endpoint) for worker in entry.workers if worker.open_endpoint]
        if name == head.name or not direct_addresses:
            continue
        address = addresses.address_for_peer(head, name, direct_addresses[0])
        if direct_addresses[0] == address:
            raise Refusal(
                f"{name} has the same address as the head {head.name} ({address}): remove {name} from the inventory, and add {head.name} to llama_workers "
                "if the head should lend its devices"
            )

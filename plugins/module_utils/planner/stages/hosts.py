# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of each host: what it builds, runs, opens and holds."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    options,
    rpc_upload,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ExternalWorkerPlan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import kernel_parameters, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import requirements
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import addresses, release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.device_load import Layout, LoadedTensor
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import EquippedHost, Host, Server, Worker

PROBED_HOST_COUNT = 2
"""Number of other hosts whose workers' ports each host tries to reach."""


def plan_of_host(installation: Installation, entry: EquippedHost, candidate: Candidate) -> host_types.HostPlan:
    host, facts = entry.host, entry.host.facts
    is_head, account = host.name == installation.cluster.head, names.ACCOUNT if facts.scope == "system" else None
    sources = {installation.programs.releases[backend].source for backend in entry.backends}
    needs_runtime = is_head or any(
        worker.tunnel or services.needs_launcher(facts.service_manager, worker.cache) for worker in entry.workers
    )
    manager = service_managers.MANAGERS[facts.service_manager]
    accounts = _accounts(facts, sources) if account else ()
    keys = _tunnel_key_paths(installation, entry)
    return host_types.HostPlan(
        scope=facts.scope,
        prefix=facts.prefix,
        cache=facts.cache,
        state=f"{facts.prefix}/state",
        python=facts.python,
        service_manager=facts.service_manager,
        units=facts.units,
        account=account,
        accounts=accounts,
        build_account=accounts[-1].name if accounts else None,
        host_settings=manager.host_settings,
        folders=(
            *_folders(facts, account, sources, host.metrics),
            *([host_types.FolderPlan(posixpath.dirname(keys[0]), "root" if account else None, "0755")] if keys else []),
        ),
        tuning=_kernel_tuning(host),
        runtime=installation.runtime_folder(facts.prefix) if needs_runtime else None,
        metrics=host.metrics if needs_runtime else None,
        tools=entry.tools,
        optional_tools=entry.optional_tools,
        unused_accelerators=()
        if sources == {"binary"}
        else tuple(requirements.unused_accelerators(host, entry.backends)),
        builds=tuple(build for build in entry.builds.values() if build.targets),
        workers=tuple(_worker_plan(installation, entry, candidate, worker) for worker in entry.workers),
        firewall=_server_rules(installation.cluster.server)
        if is_head
        else _worker_rules(installation.head.host, host, entry.workers),
        firewall_manager=_firewall_manager(facts),
        unit_closes=_unit_filters_ports(facts),
        port_probes=_port_probes(installation, entry),
        links=host.links,
        services=(),
        tunnel_keys=keys or None,
    )


def _worker_plan(
    installation: Installation, entry: EquippedHost, candidate: Candidate, worker: Worker
) -> host_types.WorkerPlan:
    release, build = installation.programs.releases[worker.build_backend], entry.builds[worker.build_backend]
    folder = entry.host.facts.prefix + "/releases"
    return host_types.WorkerPlan(
        name=worker.name,
        used=worker.endpoint in candidate.layout.endpoints,
        endpoint=worker.endpoint,
        listens=worker.listens,
        tunnel=worker.tunnel,
        rdma=worker.uses_rdma or None,
        backend=worker.backend,
        device=worker.device,
        shared=worker.shares_host_memory,
        cache=worker.cache,
        cache_mib=worker.cache_mib,
        cache_why=worker.cache_why,
        prefill=_worker_prefill(worker, build, release, folder, candidate),
        protocol=release.protocol,
        argv=tuple(workers.argv_of(worker, build, release, folder)),
        environment={
            **backends.service_environment(build.backend, build.environment, not build.archives),
            **worker.environment,
        },
    )


def _worker_prefill(
    worker: Worker, build: host_types.BuildPlan, release: ReleasePlan, folder: str, candidate: Candidate
) -> host_types.CachePrefill | None:
    """Return how a worker's cache is filled; None if there is nothing to fill, or a fork has another protocol."""
    tensors = _prefill_tensors(_worker_tensors(candidate.layout, worker.endpoint), candidate.workload.model.path)
    if not worker.cache or not tensors or not release.mainline:
        return None
    fork, processor = release.fork, backends.CPU.device
    return host_types.CachePrefill(
        tensors=tuple(tensors),
        argv=(
            f"{folder}/{build.id}/bin/{capabilities.WORKER_BINARIES[release.fork]}",
            *options.render_option("address", names.LOOPBACK, fork),
            *options.render_option("worker-device", processor, fork),
            *options.render_option("processor", processor, fork),
            *options.render_option("tensor-cache", "on", fork),
            options.render_option("worker-port", "0", fork)[0],
        ),
    )


def _worker_tensors(layout: Layout, endpoint: str) -> list[LoadedTensor]:
    """Return the tensors on the device of a worker; none if the worker is not used."""
    for index, device in enumerate(layout.devices):
        if device.endpoint == endpoint:
            units = set(layout.units_of(index))
            return [tensor for tensor in layout.load.tensors if tensor.unit in units or tensor.buffer == device.buffer]
    return []


def _prefill_tensors(tensors: Sequence[LoadedTensor], path: str) -> list[host_types.PrefillTensor]:
    layers_by_tensor: dict[tuple[str, int], list[int] | None] = {}
    for tensor in tensors:
        if tensor.name and tensor.bytes > rpc_upload.CACHE_THRESHOLD:
            match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name, re.DOTALL)
            key = (f"blk.*.{match[2]}" if match else tensor.name, tensor.bytes)
            layers = layers_by_tensor.setdefault(key, [] if match else None)
            if match and layers is not None:
                layers.append(int(match[1]))
    return [
        host_types.PrefillTensor(name, size, None if layers is None else tuple(layers), path)
        for (name, size), layers in layers_by_tensor.items()
    ]


def _worker_rules(head: Host, host: Host, declared_workers: Sequence[Worker]) -> tuple[host_types.FirewallRule, ...]:
    """Return rules that open the port of each worker only to the head and, on a host with links, the port at which they are measured."""
    opened_endpoints = [worker.open_endpoint for worker in declared_workers if worker.open_endpoint]
    if not opened_endpoints:
        return ()
    address = names.address_of(opened_endpoints[0])
    source = addresses.address_for_peer(head, host.name, address)
    ports = [*map(names.port_of, opened_endpoints), *([names.IPERF_PORT] if host.links else [])]
    return tuple(host_types.FirewallRule(port, (source,), address) for port in ports)


def _server_rules(server: Server) -> tuple[host_types.FirewallRule, ...]:
    """Return rules that open the ports of the server and its page to its clients; none if it listens on loopback, or if its clients are unknown."""
    if not server.allowed or names.is_loopback(server.host):
        return ()
    sources = tuple(network.removesuffix("/32") for network in server.allowed)
    return tuple(
        host_types.FirewallRule(port, sources, server.host) for port in (server.port, server.page_port) if port
    )


def _tunnel_key_paths(installation: Installation, entry: EquippedHost) -> tuple[str, ...]:
    """Return the paths of the keys of tunnels that end on a host. Each file is named after the address of the worker's host."""
    hosts = installation.equipped_hosts.values() if entry.host.name == installation.cluster.head else [entry]
    worker_addresses = {names.address_of(worker.tunnel) for end in hosts for worker in end.workers if worker.tunnel}
    return tuple(f"{entry.host.facts.prefix}/{names.KEYS_FOLDER}/{address}" for address in sorted(worker_addresses))


def _firewall_manager(facts: Facts) -> str | None:
    can_change_firewall = facts.scope == "system" and service_managers.MANAGERS[facts.service_manager].host_settings
    return facts.firewall if can_change_firewall else None


def without_exposed_workers(installation: Installation, candidate: Candidate) -> tuple[Installation, Candidate]:
    """Return installation and candidate without unused workers that would listen on a network without anything that restricts their ports to the head."""
    exposed_workers = [
        worker
        for entry in installation.equipped_hosts.values()
        if not (_unit_filters_ports(entry.host.facts) or _firewall_manager(entry.host.facts))
        for worker in entry.workers
        if worker.endpoint not in candidate.layout.endpoints and not names.is_loopback(worker.listens)
    ]
    equipped_hosts = {
        name: entry._replace(workers=tuple(worker for worker in entry.workers if worker not in exposed_workers))
        for name, entry in installation.equipped_hosts.items()
    }
    site = candidate.site.without_workers(exposed_workers)
    return (
        installation._replace(equipped_hosts=equipped_hosts),
        candidate._replace(site=site, idle_workers=tuple(exposed_workers)),
    )


def _unit_filters_ports(facts: Facts) -> bool:
    """Return whether the definition of a service closes its port to everyone who is not planned to connect."""
    return bool(service_managers.MANAGERS[facts.service_manager].port_filter and facts.has_unit_filter)


def _port_probes(installation: Installation, entry: EquippedHost) -> tuple[str, ...]:
    """Return the endpoints that should be closed to this host: those of its own workers, from its other addresses, and those of the hosts after it."""
    name = entry.host.name
    if name == installation.cluster.head:
        return ()
    peers = [peer for peer in installation.equipped_hosts.values() if peer.host.name != installation.cluster.head]
    position = peers.index(entry)
    next_peers = [*peers[position + 1 :], *peers[:position]][:PROBED_HOST_COUNT]
    probed_hosts = [entry] if _unit_filters_ports(entry.host.facts) else []
    probed_hosts += [peer for peer in next_peers if _unit_filters_ports(peer.host.facts) or peer.host.facts.firewall]
    return tuple(endpoint for peer in probed_hosts for worker in peer.workers if (endpoint := worker.open_endpoint))


def _accounts(facts: Facts, sources: set[str]) -> tuple[host_types.AccountPlan, ...]:
    """Return the account of services and, if the host compiles, the account that builds."""
    service_account = host_types.AccountPlan(names.ACCOUNT, facts.device_groups, facts.prefix)
    build_account = host_types.AccountPlan(names.BUILD_ACCOUNT, (), names.BUILD_HOME)
    return (service_account, *([build_account] if sources & set(release_request.COMPILED_SOURCES) else []))


def _kernel_tuning(host: Host) -> host_types.KernelTuning:
    """Return the requested kernel parameters, and whether the run may reboot the host for them."""
    if not host.tuning.enabled:
        return host_types.KernelTuning({}, False)
    if not service_managers.MANAGERS[host.facts.service_manager].host_settings:
        raise Refusal(f"llama_host_tuning is true for {host.name}, but needs systemd and root: set it to false there")
    drivers = {
        backends.BY_NAME[accelerator.backend].kernel_driver
        for accelerator in host.facts.accelerators
        if accelerator.unified
    }
    if kernel_parameters.DRIVER not in drivers:
        raise Refusal(
            f"llama_host_tuning is true for {host.name}, but that host has no AMD GPU with shared memory: set it to false, or declare the GPU in "
            "llama_hardware"
        )
    try:
        parameters = kernel_parameters.graphics_parameters(host.facts.memory_mib, host.tuning.gtt_mib)
    except ValueError as error:
        raise Refusal(f"llama_host_tuning for {host.name} {error}") from None
    return host_types.KernelTuning(parameters, host.tuning.reboot)


def _folders(
    facts: Facts, account: str | None, sources: set[str], metrics: str | None
) -> tuple[host_types.FolderPlan, ...]:
    """Return the folders of the installation. Folders without an owner belong to others, and are created only if they are missing."""
    prefix, root = facts.prefix, "root" if account else None
    folders = [
        (prefix, root, "0755"),
        (f"{prefix}/{names.MARKER_FOLDER}", root, "0755"),
        (prefix + "/models", root, "0755"),
        (prefix + "/state", account, "0750"),
        (f"{prefix}/{names.PLANS_FOLDER}", root, "0700"),
        (facts.units, None, None),
        *([(metrics, None, None)] if metrics and account else []),
    ]
    if sources != {"package"}:
        # Without an account this may be the private cache of the controller itself.
        mode = "0755" if account else "0700"
        folders += [(facts.cache, root, mode), (facts.cache + "/sources", root, mode)]
    return tuple(host_types.FolderPlan(path, owner, mode) for path, owner, mode in folders)


def external_workers_of(installation: Installation, candidate: Candidate) -> tuple[ExternalWorkerPlan, ...]:
    return tuple(
        ExternalWorkerPlan(
            name=entry.worker.name,
            host=entry.worker.host,
            endpoint=entry.worker.endpoint,
            backend=entry.worker.backend,
            memory_mib=entry.worker.capacity_mib,
            protocol=entry.protocol or candidate.release.protocol,
            used=entry.worker.endpoint in candidate.layout.endpoints,
        )
        for entry in installation.cluster.external_workers
    )

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""RDMA between the head and workers (``llama_transport: rdma``): which hosts and builds can have it.

transport.cpp of 0.3.36: after the handshake over TCP each end looks for a device whose port 1 has the connection's own address, locks
6.25 MiB of memory for each connection, and goes on over TCP without a word where something is missing.
"""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import addresses
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Host


def with_rdma(cluster: Cluster) -> Cluster:
    """The cluster whose hosts compile and open what RDMA needs, where a worker's host asks for it.

    :raises Refusal: a host cannot have it.
    """
    hosts, head = dict(cluster.hosts), cluster.head
    for name, host in cluster.hosts.items():
        if not host.is_worker or host.is_head or host.transport != names.RDMA:
            continue
        address = addresses.address_of(host, head)
        _check_rdma(name, host, address)
        _check_rdma(name, hosts[head], addresses.address_of(hosts[head], name, address))
        for end in (name, head):
            options = {**hosts[end].cmake_options, backends.RDMA: "ON"}
            hosts[end] = hosts[end]._replace(rdma=True, cmake_options=options)
    return cluster._replace(hosts=hosts)


def _check_rdma(worker: str, host: Host, address: str) -> None:
    """:param address: of the host, on the network that it shares with the other end."""
    refusal_start, facts = f"llama_transport for {worker} is {names.RDMA}, but", host.facts
    if facts.scope != "system" or not service_managers.MANAGERS[facts.service_manager].port_filter:
        raise Refusal(
            f"{refusal_start} {host.name} has no systemd system units, which RDMA needs to lock memory: set llama_host_scope to system for {host.name}, or "
            f"llama_transport to {names.PLAIN}"
        )
    if facts.rdma is not None and address not in facts.rdma:
        known_text = f"found: {', '.join(facts.rdma)}" if facts.rdma else "/sys/class/infiniband lists no addresses"
        raise Refusal(
            f"{refusal_start} no RDMA device on {host.name} has the host's address {address} ({known_text}): set the device's interface in llama_links, "
            f"or set llama_transport to {names.PLAIN}"
        )
    tunnels = [entry.tunnel for entry in host.worker_requests if entry.tunnel]
    if tunnels:
        raise Refusal(
            f"{refusal_start} llama_worker_endpoints for {host.name} has a tunnel, which RDMA cannot use: remove one of the two"
        )

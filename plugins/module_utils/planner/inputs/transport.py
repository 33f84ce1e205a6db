# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the head connects to workers on other hosts (``llama_transport``): the head's ends of tunnels, and RDMA.

transport.cpp of 0.3.36: after the handshake over TCP, each end looks for an RDMA device whose port 1 has the end's address, locks
6.25 MiB of memory for each connection, and silently continues over TCP if something is missing.
"""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import addresses
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Host


def with_transport(cluster: Cluster) -> Cluster:
    """Return the cluster with the head's ends of tunnels, and with RDMA on both ends, if hosts of workers request them.

    :raises Refusal: a host cannot use its llama_transport.
    """
    cluster = _with_rdma(cluster)
    head = cluster.hosts[cluster.head]
    tunnelled_hosts = [
        name
        for name, host in cluster.hosts.items()
        if host.is_worker and not host.is_head and host.transport == names.STUNNEL
    ]
    if tunnelled_hosts and head.facts.system != service_managers.LINUX:
        raise Refusal(
            f"llama_transport for {', '.join(tunnelled_hosts)} is {names.STUNNEL}, but each tunnel needs its own loopback address on the head, like "
            f"127.128.0.12, and {head.facts.system} has no such addresses: use a Linux head, or set llama_transport to {names.PLAIN_TRANSPORT}"
        )
    transport = names.STUNNEL if tunnelled_hosts else names.PLAIN_TRANSPORT
    return cluster._replace(hosts={**cluster.hosts, head.name: head._replace(transport=transport)})


def _with_rdma(cluster: Cluster) -> Cluster:
    """Return the cluster with RDMA on the hosts of workers that request it, and on the head.

    :raises Refusal: a host cannot use it.
    """
    hosts, head = dict(cluster.hosts), cluster.head
    for name, host in cluster.hosts.items():
        if not host.is_worker or host.is_head or host.transport != names.RDMA:
            continue
        address = addresses.address_for_peer(host, head)
        _check_rdma(name, host, address)
        _check_rdma(name, hosts[head], addresses.address_for_peer(hosts[head], name, address))
        for host_name in (name, head):
            options = {**hosts[host_name].cmake_options, backends.RDMA_OPTION: "ON"}
            hosts[host_name] = hosts[host_name]._replace(uses_rdma=True, cmake_options=options)
    return cluster._replace(hosts=hosts)


def _check_rdma(worker_host: str, host: Host, address: str) -> None:
    """:param address: address of the host on the network that it shares with the other end."""
    subject, facts = f"llama_transport for {worker_host} is {names.RDMA}, but", host.facts
    if facts.scope != "system" or not service_managers.MANAGERS[facts.service_manager].port_filter:
        raise Refusal(
            f"{subject} {host.name} has no systemd system units, which RDMA needs to lock memory: set llama_host_scope to system for {host.name}, or "
            f"llama_transport to {names.PLAIN_TRANSPORT}"
        )
    if facts.rdma is not None and address not in facts.rdma:
        address_text = f"found: {', '.join(facts.rdma)}" if facts.rdma else "/sys/class/infiniband lists no addresses"
        raise Refusal(
            f"{subject} no RDMA device on {host.name} has the host's address {address} ({address_text}): set the device's interface in llama_links, "
            f"or set llama_transport to {names.PLAIN_TRANSPORT}"
        )
    tunnels = [request.tunnel for request in host.worker_requests if request.tunnel]
    if tunnels:
        raise Refusal(
            f"{subject} llama_worker_endpoints for {host.name} has a tunnel, which RDMA cannot use: remove the tunnel or llama_transport"
        )

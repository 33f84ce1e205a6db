# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks that no two workers of a cluster, and no worker and its head, have the same address or port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import addresses, external_workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Cluster,
    EquippedHost,
    Host,
    Server,
    Worker,
)


def check_consistency(cluster: Cluster, equipped_hosts: Mapping[str, EquippedHost], release: ReleasePlan) -> None:
    """Refuse duplicate ports and addresses, and external workers that the head cannot use.

    :param release: release of the head.
    """
    declared_workers = [worker for host in equipped_hosts.values() for worker in host.workers]
    declared_workers += [external.worker for external in cluster.external]
    _check_tunnels(declared_workers, cluster.server)
    _check_endpoints(declared_workers)
    _check_head_address(cluster.hosts[cluster.head], equipped_hosts)
    external_workers.check_workers(cluster.external, cluster.hosts, release)


def _check_endpoints(declared_workers: Sequence[Worker]) -> None:
    """Refuse two hosts with one endpoint, or with the address of one machine, whose memory would count twice."""
    owners: dict[str, str] = {}
    for worker in declared_workers:
        open_addresses = [] if worker.external or not worker.open else [(names.address_of(worker.open), "address")]
        for address, kind in ((worker.endpoint, "worker"), *open_addresses):
            owner = owners.setdefault(address, worker.host)
            if owner != worker.host:
                hint = (
                    ", or list that machine once, with all of its llama_worker_endpoints" if kind == "address" else ""
                )
                raise Refusal(
                    f"{worker.host} and {owner} both have the {kind} {address}: give each host its own address "
                    f"in ansible_host, llama_links or llama_external_workers{hint}"
                )


def _check_tunnels(declared_workers: Sequence[Worker], server: Server) -> None:
    """Refuses a tunnel that ends on a port of the head which something else has."""
    port_users = {server.port: "llama_server_port"}
    for worker in declared_workers:
        if worker.open == worker.listens and names.is_loopback(worker.listens) and not worker.external:
            port_users[names.port_of(worker.listens)] = f"the worker {worker.name} of the head"
    for worker in declared_workers:
        if not worker.open or (worker.external and names.is_loopback(worker.endpoint)):
            port = names.port_of(worker.endpoint)
            if port in port_users:
                variable = (
                    "endpoint in llama_external_workers" if worker.external else "tunnel in llama_worker_endpoints"
                )
                raise Refusal(
                    f"the tunnel to the worker {worker.name} on {worker.host} ends at port {port} on the head, which {port_users[port]} already uses: end the "
                    f"tunnel at another port, and set {variable} to it"
                )
            port_users[port] = f"the tunnel to {worker.name} on {worker.host}"


def _check_head_address(head: Host, equipped_hosts: Mapping[str, EquippedHost]) -> None:
    """Refuses a head that is in the inventory twice: it would use its devices twice, itself and through workers."""
    for name, entry in equipped_hosts.items():
        direct_addresses = [names.address_of(worker.open) for worker in entry.workers if worker.open]
        if name == head.name or not direct_addresses:
            continue
        address = addresses.common_address(head, name, direct_addresses[0])
        if direct_addresses[0] == address:
            raise Refusal(
                f"{name} has the same address as the head {head.name} ({address}): remove {name} from the inventory, and add {head.name} to llama_workers "
                "if it lends its devices"
            )

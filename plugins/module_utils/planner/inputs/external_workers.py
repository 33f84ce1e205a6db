# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Workers that others run: Windows, a container, another person's host. They are planned with and shaken hands with, and never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import is_loopback
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator, facts_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import External, Host, Worker


def check_protocol(workers: Sequence[External], release: ReleasePlan) -> None:
    """Refuses a worker whose protocol the head does not accept. What is not known is judged when they shake hands."""
    for index, worker in enumerate(workers):
        if worker.protocol and release.protocol and not rpc.is_compatible(release.protocol, worker.protocol):
            raise Refusal(
                f"{cluster_inputs.EXTERNAL_WORKERS}[{index}] has the protocol {worker.protocol}, but {release.ref} speaks {release.protocol}: "
                "run that worker with this cluster's release, or set llama_release to the worker's release"
            )


def check_addresses(workers: Sequence[External], hosts: Mapping[str, Host]) -> None:
    """Refuses a worker at an address of a host of the cluster, whose memory is counted already. A tunnel ends on loopback."""
    owners = {address: name for name, host in hosts.items() for address in _addresses(host)}
    for index, worker in enumerate(workers):
        owner = owners.get(worker.address)
        if owner:
            raise Refusal(
                f"{cluster_inputs.EXTERNAL_WORKERS}[{index}] has the endpoint {worker.endpoint}, an address of {owner}, whose memory the plan already "
                f"counts: remove the entry, and put {owner} into llama_workers"
            )


def _addresses(host: Host) -> set[str]:
    addresses = {host.address, *host.facts.addresses, *(link.address.split("/", maxsplit=1)[0] for link in host.links)}
    addresses.update(address for interface in host.facts.interfaces for address in interface.addresses)
    return {address for address in addresses if not is_loopback(address)}


def workers_of(externals: Sequence[External]) -> list[Worker]:
    """Return external workers as workers. Nothing is known of their ports, their cache and their threads."""
    workers = []
    for index, external in enumerate(externals):
        workers.append(
            Worker(
                name=f"external{index}",
                host=external.host,
                listens=external.endpoint,
                endpoint=external.endpoint,
                open=external.endpoint,
                backend=external.backend,
                build="",
                device=_device(externals, index),
                capacity_mib=external.memory_mib,
            )
        )
    return workers


def _device(externals: Sequence[External], index: int) -> str:
    """Return the name for the device of an external worker, as llama.cpp would name it on its host."""
    worker = externals[index]
    similar_workers = [
        entry for entry in externals[:index] if (entry.host, entry.backend) == (worker.host, worker.backend)
    ]
    return backends.device_name(worker.backend, len(similar_workers))


def hosts_of(externals: Sequence[External]) -> dict[str, Host]:
    """Name → what is known of a host on which others run workers: that they have these devices."""
    return {
        name: _host(name, [worker for worker in externals if worker.host == name])
        for name in {worker.host: None for worker in externals}
    }


def _host(name: str, externals: Sequence[External]) -> Host:
    facts = facts_of({**cluster_inputs.DEFAULT_FACTS, "memory_mib": sum(worker.memory_mib for worker in externals)})
    accelerators = tuple(
        Accelerator(worker.backend, worker.device, worker.architecture, worker.memory_mib, False)
        for worker in externals
        if worker.backend != backends.CPU.name
    )
    return Host(
        name=name,
        is_head=False,
        is_worker=True,
        address=externals[0].address,
        facts=facts._replace(accelerators=accelerators),
    )

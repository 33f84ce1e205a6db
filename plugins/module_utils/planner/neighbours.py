# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Other clusters on the same hosts: each cluster leaves a record of its ports and its memory there, and takes nothing that another one has."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import PortPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import DevicePlacement, Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import same_device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Server, Worker

SCHEMA = 1


def ports_of_worker(own: names.Names, worker: Worker) -> list[PortPlan]:
    return [
        PortPlan(own.service(f"worker-{worker.name}"), address, worker.port)
        for address in dict.fromkeys((worker.address, worker.open_at or worker.address))
    ]


def ports_of_server(own: names.Names, server: Server) -> list[PortPlan]:
    return [
        PortPlan(own.server, server.host, server.port),
        *([PortPlan(own.server, server.host, server.page_port)] if server.page_port else []),
    ]


def check(cluster: Cluster, planned: Mapping[str, Sequence[PortPlan]]) -> None:
    """Refuses names and ports that another cluster of a host has.

    :param planned: host → ports of all its services.
    """
    own = names.of(cluster.name)
    for host, entry in cluster.hosts.items():
        for neighbour in entry.facts.neighbours:
            if own.collides(names.of(neighbour.cluster)):
                raise Refusal(
                    f"{host} has the cluster {neighbour.cluster}, and firewalld would take its rules for those of {cluster.name}: give the group "
                    "of one of them another name, and tear that cluster down under its old name before"
                )
    taken = [sentence for host, ports in planned.items() for sentence in _taken(cluster, host, ports)]
    if taken:
        raise Refusal("; ".join(taken))


def _taken(cluster: Cluster, host: str, ports: Sequence[PortPlan]) -> Iterator[str]:
    neighbours = cluster.hosts[host].facts.neighbours
    used = {port.port for port in ports} | {port.port for neighbour in neighbours for port in neighbour.ports}
    for port in ports:
        for neighbour in neighbours:
            theirs = next((other for other in neighbour.ports if _same_place(port, other)), None)
            if theirs:
                free = _free(port.port, used)
                used.add(free)
                variable = names.PORT_VARIABLES[names.is_head(port.service)]
                if names.is_head(port.service) and port.port == cluster.server.page_port:
                    variable = names.PAGE_PORT
                yield (
                    f"port {port.port} of {host} belongs to {theirs.service} of the cluster {neighbour.cluster}, and {port.service} is to listen "
                    f"there: set {variable} of {host} to a port that is free there, like {free}"
                )


def _same_place(one: PortPlan, other: PortPlan) -> bool:
    addresses = {one.address, other.address}
    return one.port == other.port and (len(addresses) == 1 or names.EVERY_ADDRESS in addresses)


def _free(port: int, used: Collection[int]) -> int:
    """The next port that nobody on the host has by plan."""
    after: list[int] = [*range(port + 1, 65536), *range(1024, port)]
    return next(other for other in after if other not in used)


def record(plan: Plan, host: str) -> str:
    """What a cluster leaves on a host for others: its ports, and the MiB that it plans with on each device."""
    memory = {device: math.ceil(total) for device, (total, _capacity) in sorted(memory_of(plan, host).items())}
    return (
        json.dumps(
            {
                "schema": SCHEMA,
                "cluster": plan.cluster,
                "ports": typed_json.dump(plan.hosts[host].ports),
                "memory_mib": memory,
            },
            indent=1,
        )
        + "\n"
    )


def memory_of(plan: Plan, host: str) -> dict[str, tuple[float, float]]:
    """Device of a host → MiB that the plan puts there, of several models the most, and MiB that it may hold."""
    most: dict[str, float] = {}
    capacities: dict[str, float] = {}
    for one in plan.each():
        for device, (total, capacity) in _memory_of_one(one, host).items():
            most[device] = max(most.get(device, 0), total)
            capacities[device] = max(capacities.get(device, 0), capacity)
    return {device: (most[device], capacity) for device, capacity in capacities.items()}


def _memory_of_one(plan: Plan, host: str) -> dict[str, tuple[float, float]]:
    memory: dict[str, tuple[float, float]] = {}
    for entry in plan.placement:
        if entry.host == host:
            device = _device(plan, host, entry)
            total, capacity = memory.get(device, (0, 0))
            memory[device] = total + entry.total_mib, max(capacity, entry.capacity_mib)
    if host == plan.head.host:
        total, capacity = memory.get(backends.CPU.device, (0, 0))
        memory[backends.CPU.device] = total + sum(plan.head.cpu[1:]), capacity
    return memory


def memories(
    facts: Facts, own: Mapping[str, tuple[float, float]], theirs: Iterable[str]
) -> Iterator[tuple[list[str], float]]:
    """Devices that use one memory of a host, and MiB of it that programs can use.

    :param own: of memory_of.
    """
    same, known = same_device.canonical_device_names(facts), dict(same_device.named_accelerators(facts))
    usable = {backends.CPU.device: workers.usable_mib(facts.memory_mib)}
    found: dict[str, list[str]] = {}
    for device in sorted({*own, *theirs}):
        accelerator = known.get(device)
        memory = backends.CPU.device if accelerator and accelerator.unified else same.get(device, device)
        found.setdefault(memory, []).append(device)
        if accelerator:
            size = workers.usable_by_device(accelerator.memory_mib, accelerator.unified, facts.memory_mib)
            usable[memory] = max(usable.get(memory, 0), size)
    for memory, devices in found.items():
        yield devices, max([usable.get(memory, 0), *(own[device][1] for device in devices if device in own)])


def _device(plan: Plan, host: str, entry: DevicePlacement) -> str:
    """Name of a device on its own host; the head has one of its own as llama-server names it."""
    own = [worker for worker in plan.hosts[host].workers if worker.endpoint == entry.endpoint]
    return own[0].device if own else str(entry.device)

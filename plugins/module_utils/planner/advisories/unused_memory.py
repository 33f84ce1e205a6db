# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory of the cluster's hosts that no device of the plan offers to the model, and what would offer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import Change
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import same_device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices, workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.device_load import Placed
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Cluster,
    Device,
    Endpoint,
    Equipped,
    Host,
    ReleaseRequest,
)


class UnusedMemory(NamedTuple):
    """Of a device that is not offered; ``mib`` is what it could hold."""

    host: str
    name: str
    mib: int
    remedy: str
    change: Change


def devices_of(
    equipped: Mapping[str, Equipped], offered: Sequence[Device], placed: Placed, release: ReleaseRequest
) -> list[UnusedMemory]:
    """The devices of the cluster that are not offered.

    :param offered: all devices that the model may be on.
    """
    idle: list[UnusedMemory] = []
    for name, own in equipped.items():
        held = [device for device in offered if device.host == name]
        idle += _accelerators(own, held, release)
        if placed.devices or not own.host.is_head:
            idle += _processor(own, held, placed, release)
    return idle


def sentence(idle: Sequence[UnusedMemory], trial: remedies.Trial) -> list[str]:
    """What would offer more memory to a model that does not fit, and whether it fits then; nothing where all is offered."""
    if not idle:
        return []

    def all_offered(cluster: Cluster) -> Cluster:
        for entry in idle:
            cluster = entry.change(cluster)
        return cluster

    parts = [f"{entry.mib} MiB of {entry.name} of {entry.host} ({entry.remedy})" for entry in idle]
    enough = "" if trial.fits(all_offered) else "; that alone is not enough"
    return [f"memory that could hold layers and is not offered: {', '.join(parts)}{enough}"]


def _accelerators(equipped: Equipped, offered: Sequence[Device], release: ReleaseRequest) -> list[UnusedMemory]:
    """Those of a host with memory of their own, by the backends of their vendors where these drive them."""
    host, same = equipped.host, same_device.canonical_device_names(equipped.host.facts)
    shown = {same[device.name] for device in offered if device.name in same}
    return [
        UnusedMemory(
            host.name,
            f"{accelerator.name} ({name})",
            workers.usable_by_device(accelerator.memory_mib, False, host.facts.memory_mib),
            *_remedy(equipped, accelerator.backend, name, release),
        )
        for name, accelerator in same_device.named_accelerators(host.facts)
        if same[name] == name and name not in shown and accelerator.memory_mib and not accelerator.unified
    ]


def _processor(
    equipped: Equipped, offered: Sequence[Device], placed: Placed, release: ReleaseRequest
) -> list[UnusedMemory]:
    """A host's processor, with what devices in the same memory and llama-server leave of it."""
    host = equipped.host
    if any(device.name == backends.CPU.device for device in offered):
        return []
    kept = placed.on_head()
    own = -(-(kept.weights + kept.kv) // MIB) if host.is_head else 0
    shared = sum(device.capacity_mib for device in offered if _is_shared(host, device))
    room = workers.usable_mib(host.facts.memory_mib) - shared - own
    if room < workers.LEAST_MIB:
        return []
    cpu = backends.CPU
    return [UnusedMemory(host.name, "the processor", room, *_remedy(equipped, cpu.name, cpu.device, release))]


def _is_shared(host: Host, device: Device) -> bool:
    accelerator = devices.accelerator_of(host.facts, device.name)
    return bool(accelerator and accelerator.unified)


def _remedy(equipped: Equipped, backend: str, device: str, release: ReleaseRequest) -> tuple[str, Change]:
    """What has the host lend this device, for people and to be tried."""
    host, steps = equipped.host, []
    builds = backend in equipped.backends or (host.endpoints and backend == backends.CPU.name)
    wanted = [*equipped.backends, *([] if builds else [backend])]
    if not host.is_worker:
        steps.append(f"add {host.name} to llama_workers")
    if not builds:
        steps.append(f"set its llama_backend to {remedies.as_list(wanted)}")
    if host.endpoints:
        steps.append(f"add {{device: {device}}} to its llama_worker_endpoints")
    if not steps:
        variable = f"llama_release_{backend}"
        return f"give {variable} the release of the head", remedies.releasing([variable], release)

    def lends(found: Host) -> Host:
        """The host, also where another device of it is offered already."""
        built = equipped.backends if found.backends == host.backends else found.backends
        return found._replace(
            is_worker=True,
            backends=found.backends if builds or backend in built else (*built, backend),
            endpoints=(*found.endpoints, Endpoint(device=device)) if host.endpoints else (),
        )

    return " and ".join(steps), remedies.on_hosts([host.name], lends)

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
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import same_device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices, workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.device_load import Placed
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device, Equipped, Host


class UnusedMemory(NamedTuple):
    """Of a device that is not offered; ``mib`` is what it could hold."""

    host: str
    name: str
    mib: int
    remedy: str


def devices_of(equipped: Mapping[str, Equipped], offered: Sequence[Device], placed: Placed) -> list[UnusedMemory]:
    """The devices of the cluster that are not offered.

    :param offered: all devices that the model may be on.
    """
    idle: list[UnusedMemory] = []
    for name, own in equipped.items():
        held = [device for device in offered if device.host == name]
        idle += _accelerators(own, held)
        if placed.devices or not own.host.is_head:
            idle += _processor(own, held, placed)
    return idle


def sentence(idle: Sequence[UnusedMemory]) -> list[str]:
    """What would offer more memory to a model that does not fit; nothing where all is offered."""
    parts = [f"{entry.mib} MiB of {entry.name} of {entry.host} ({entry.remedy})" for entry in idle]
    return [f"memory that could hold layers and is not offered: {', '.join(parts)}"] if parts else []


def _accelerators(equipped: Equipped, offered: Sequence[Device]) -> list[UnusedMemory]:
    """Those of a host with memory of their own, by the backends of their vendors where these drive them."""
    host, same = equipped.host, same_device.canonical_device_names(equipped.host.facts)
    shown = {same[device.name] for device in offered if device.name in same}
    return [
        UnusedMemory(
            host.name,
            f"{accelerator.name} ({name})",
            workers.usable_by_device(accelerator.memory_mib, False, host.facts.memory_mib),
            _remedy(equipped, accelerator.backend, name),
        )
        for name, accelerator in same_device.named_accelerators(host.facts)
        if same[name] == name and name not in shown and accelerator.memory_mib and not accelerator.unified
    ]


def _processor(equipped: Equipped, offered: Sequence[Device], placed: Placed) -> list[UnusedMemory]:
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
    return [UnusedMemory(host.name, "the processor", room, _remedy(equipped, cpu.name, cpu.device))]


def _is_shared(host: Host, device: Device) -> bool:
    accelerator = devices.accelerator_of(host.facts, device.name)
    return bool(accelerator and accelerator.unified)


def _remedy(equipped: Equipped, backend: str, device: str) -> str:
    """What has the host lend this device."""
    host, steps = equipped.host, []
    builds = backend in equipped.backends or (host.endpoints and backend == backends.CPU.name)
    if not host.is_worker:
        steps.append(f"add {host.name} to llama_workers")
    if not builds:
        steps.append(f"set its llama_backend to {remedies.as_list([*equipped.backends, backend])}")
    if host.endpoints:
        steps.append(f"add {{device: {device}}} to its llama_worker_endpoints")
    return " and ".join(steps) or f"give llama_release_{backend} the release of the head"

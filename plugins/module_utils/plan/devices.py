# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The devices that may hold a part of the model, and what is known of those that do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import (
    Accelerator,
    Device,
    Facts,
    Host,
    Release,
    Worker,
)

MMAP_LIMIT_MIB = 30 * 1024
"""Of a model's weights on one device that uses the host's memory by HIP: from here on mapped pages were seen to hang (#19745)."""
GB10 = "12.1"
"""Compute capability of NVIDIA's GB10 (DGX Spark)."""
UNIFIED_HEAP = "radv_enable_unified_heap_on_apu"
"""Option of Mesa's driver for AMD, in the environment too, that shows all of the shared memory as the device's own."""
OTHER_DRIVERS = ("Intel", "NVIDIA")
"""How names of devices begin that another Vulkan driver than Mesa's for AMD drives."""


def accelerator_of(facts: Facts, name: str) -> Accelerator | None:
    """The accelerator that llama.cpp calls ``name`` on a host; None for its processor."""
    for backend in backends.BACKENDS[1:]:
        for index, accelerator in enumerate(facts.of_backend(backend)):
            if backends.device_name(backend, index) == name:
                return accelerator
    return None


def visible_mib(backend: str, accelerator: Accelerator, environment: Mapping[str, str]) -> float:
    """How much of a device's memory its driver shows as the device's own; no bound where the size of that memory is not known.

    Mesa's Vulkan driver for AMD shows two thirds of a memory that is the host's too (radv_physical_device_init_mem_types).

    :param environment: of the program that drives the device.
    """
    whole = accelerator.memory_mib
    if not whole:
        return math.inf
    split = backend == "vulkan" and accelerator.unified and not accelerator.name.startswith(OTHER_DRIVERS)
    if not split or environment.get(UNIFIED_HEAP, "").lower() in ("1", "true", "yes"):
        return whole
    return whole * 2 // 3


def _with_visible_memory(device: Device, facts: Facts) -> Device:
    """The device with no more capacity than its driver shows as its own."""
    accelerator = accelerator_of(facts, device.name)
    if not accelerator:
        return device
    visible = visible_mib(device.backend, accelerator, device.environment)
    return device._replace(capacity_mib=int(min(device.capacity_mib, visible)))


def of_workers(used: Iterable[Worker], hosts: Mapping[str, Host], release: Release, bounded: bool) -> list[Device]:
    """The devices that workers lend.

    :param bounded: whether they lend no more than their driver shows as their own.
    """
    devices = [
        Device(
            host=worker.host,
            backend=worker.backend,
            name=worker.device,
            buffer=release.capabilities["buffer_name"].format(endpoint=worker.endpoint),
            capacity_mib=worker.capacity_mib,
            environment=worker.environment,
            worker=worker,
        )
        for worker in used
    ]
    return [_with_visible_memory(device, hosts[device.host].facts) if bounded else device for device in devices]


def _not_lent(facts: Facts, lending: Sequence[Worker], backend: str) -> list[Accelerator]:
    """Accelerators of the backend that a host does not lend: those before the first one that it lends, so that the others can be hidden.
    None where it lends some by another backend, which may be the same ones."""
    accelerators = facts.of_backend(backend)
    lent = {worker.device for worker in lending if worker.backend != backends.CPU.name}
    if not lent:
        return accelerators
    names = [backends.device_name(backend, index) for index, _accelerator in enumerate(accelerators)]
    if not backends.hiding(backend) or not lent <= set(names):
        return []
    return accelerators[: min(map(names.index, lent))]


def of_head(
    head: Host, lending: Sequence[Worker], backend: str, environment: Mapping[str, str], bounded: bool
) -> list[Device]:
    """Accelerators that llama-server itself uses on the head: those of its backend that the host does not lend. Those that share the
    host's memory only where there is no other, as llama.cpp does it, and where the host lends nothing of that memory. One whose memory is
    not known is left out.

    :param lending: the workers of the head.
    :param environment: of llama-server.
    :param bounded: whether they hold no more than their driver shows as their own.
    """
    own: list[Device] = []
    shared: list[Device] = []
    for index, accelerator in enumerate(_not_lent(head.facts, lending, backend)):
        name = backends.device_name(backend, index)
        reserve = workers.reserve_mib(accelerator.memory_mib, accelerator.unified)
        device = Device(head.name, backend, name, name, max(0, accelerator.memory_mib - reserve), environment)
        if accelerator.memory_mib:
            (shared if accelerator.unified else own).append(device)
    chosen = own or ([] if lending else shared[:1])
    return [_with_visible_memory(device, head.facts) for device in chosen] if bounded else chosen


def environment_of_head(
    facts: Facts, lending: Sequence[Worker], backend: str, uses_own: bool, uses_workers: bool
) -> dict[str, str]:
    """What makes llama-server count devices as planned, and take no memory of those that it does not use.

    :param lending: the workers of the head.
    :param uses_own: whether it uses devices of its own.
    :param uses_workers: whether it uses workers.
    """
    accelerators, kept = facts.of_backend(backend), _not_lent(facts, lending, backend)
    bus_order, hiding = backends.RECORDS[backend].bus_order, backends.hiding(backend)
    environment: dict[str, str] = {}
    if uses_own and bus_order and len({accelerator.name for accelerator in accelerators}) > 1:
        environment.update([bus_order])
    if hiding and uses_own and len(kept) < len(accelerators):
        environment[hiding.variable] = hiding.devices.format(",".join(map(str, range(len(kept)))))
    elif hiding and hiding.none is not None and accelerators and uses_workers and not uses_own:
        environment[hiding.variable] = hiding.none
    return environment


class Holder(NamedTuple):
    """A device with layers. ``endpoint`` is None where llama-server drives it itself; sizes are in MiB, ``held_mib`` is weights and KV
    cache."""

    host: str
    name: str
    endpoint: str | None
    backend: str
    architecture: str
    unified: bool
    weights_mib: float
    held_mib: float
    visible_mib: float
    host_memory_mib: int

    @property
    def hangs_on_mmap(self) -> bool:
        """Whether loading from mapped pages was seen to hang or abort with such a share."""
        return self.backend == "hip" and self.unified and self.weights_mib > MMAP_LIMIT_MIB

    @property
    def slow_on_mmap(self) -> bool:
        """Whether loading from mapped pages was seen to take very long with such a share."""
        return self.backend == "hip" and self.unified and self.weights_mib > self.host_memory_mib / 2

    @property
    def is_gb10(self) -> bool:
        """Whether it is of a host on which reading a model from mapped pages was seen to take ten times as long: 224 s against 22 s on a DGX
        Spark (#27742, comment of 26 August 2026)."""
        return self.backend == "cuda" and self.unified and self.architecture == GB10


def holder(device: Device, facts: Facts, weights_mib: float, kv_mib: float) -> Holder:
    """The values of a device with layers that advisories need."""
    accelerator = accelerator_of(facts, device.name)
    backend = accelerator.backend if accelerator else backends.CPU.name
    return Holder(
        host=device.host,
        name=device.name,
        endpoint=device.endpoint,
        backend=backend,
        architecture=accelerator.architecture if accelerator else "",
        unified=bool(accelerator and accelerator.unified),
        weights_mib=weights_mib,
        held_mib=weights_mib + kv_mib,
        visible_mib=visible_mib(backend, accelerator, device.environment) if accelerator else facts.memory_mib,
        host_memory_mib=facts.memory_mib,
    )

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The devices that may hold a part of the model: their capacities, and what llama-server needs to use them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator, Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import auxiliary_models
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.device_load import DeviceShare, Layout

MMAP_LIMIT_MIB = 30 * 1024
"""Size of the weights on one program's HIP devices above which loads from mapped pages were seen to hang (#19745, #5402, #15018)."""
GB10 = "12.1"
"""Compute capability of NVIDIA's GB10 (DGX Spark)."""
MIN_PROCESSOR_MIB = 2048
"""Smallest memory of a worker on the processor if accelerators use the same memory; assumed."""


def visible_mib(accelerator: Accelerator, environment: Mapping[str, str]) -> float:
    """Return how much of a device's memory its driver shows as the device's own; infinite if its size is unknown.

    Mesa's Vulkan driver for AMD shows two thirds of memory that it shares with the host as one heap and the rest as another, or with UNIFIED_HEAP
    all of it as one heap (radv_physical_device_init_mem_types, the same in Mesa 22.3.6, 25.0.7 and 26.1). Programs may allocate more than a heap
    holds unless they ask the driver to refuse that (radv_alloc_memory), but llama.cpp was seen to fail when it did.
    """
    if not accelerator.memory_mib:
        return math.inf
    has_unified_heap = environment.get(backends.UNIFIED_HEAP, "").lstrip() == "true"
    if accelerator.backend != "vulkan" or not accelerator.has_amdgpu_limit or has_unified_heap:
        return accelerator.memory_mib
    return accelerator.memory_mib * 2 // 3


def limit_mib(device: types.Device) -> float:
    """Return the memory that a device may hold because its driver shows no more. The head's own devices have no limit, because environment_of_head makes the
    driver show all of it, unless the operator sets UNIFIED_HEAP."""
    if not device.accelerator or not (device.worker or backends.UNIFIED_HEAP in device.environment):
        return math.inf
    return visible_mib(device.accelerator, device.environment)


def reserve_mib(total_mib: int, shared: bool) -> int:
    """Return the memory for the system: more if the device's memory is the host's own."""
    return max(2048, total_mib // 10) if shared else max(512, total_mib // 20)


def usable_device_mib(size_mib: int, shared: bool, host_mib: int) -> int:
    """Return the memory that a device may use. Memory of the host that a driver's limit leaves to the system counts as reserve.

    :param size_mib: memory of the device; if ``shared``, the part of the host's memory that its driver lends.
    """
    system_mib = max(0, host_mib - size_mib) if shared else 0
    return max(0, size_mib - max(0, reserve_mib(size_mib, shared) - system_mib))


def usable_mib(memory_mib: int) -> int:
    """Return the memory of a host without the reserve for its system."""
    return max(0, memory_mib - reserve_mib(memory_mib, shared=True))


def capacities_of(
    host: types.Host,
    workers: Sequence[types.Worker],
    head_devices: Sequence[types.Device],
    server: types.Server | None,
    has_driver_limits: bool = False,
) -> dict[str, int]:
    """Return the MiB that each device of a host may hold; CPU stands for each worker on the processor.

    Several devices may share the host's memory. Accelerators get it first, since they read it faster; processors get the rest.

    :param workers: its workers, with the capacity that the operator sets.
    :param head_devices: devices that llama-server itself drives, with all of their memory.
    :param server: variables of the server on the head; None for another host.
    :param has_driver_limits: whether devices hold no more than their drivers show as their own.
    """
    canonical_names, memory_mib = host.facts.canonical_names, host.facts.memory_mib
    accelerators = dict(host.facts.named_accelerators)
    limits = {worker.device: worker.capacity_mib for worker in workers if worker.capacity_mib}
    limits.update(_limits_of_head(head_devices, server) if server else {})
    environments = {worker.device: worker.environment for worker in workers}
    environments.update(
        (device.name, device.environment) for device in head_devices if backends.UNIFIED_HEAP in device.environment
    )
    capacities = {
        name: limits.get(name, usable_device_mib(device.memory_mib, device.unified, memory_mib))
        for name, device in accelerators.items()
    }
    shared_mib: dict[str, int] = {}
    for name in [*(device.name for device in head_devices), *(worker.device for worker in workers)]:
        accelerator = accelerators.get(name)
        if accelerator and accelerator.unified:
            shown_mib = math.inf  # drivers show all memory of the head's own devices
            if has_driver_limits and name in environments:
                shown_mib = visible_mib(accelerator, environments[name])
            shared_mib[canonical_names[name]] = max(
                shared_mib.get(canonical_names[name], 0), int(min(capacities[name], shown_mib))
            )
    requested_mib = [worker.capacity_mib for worker in workers if worker.device == backends.CPU.device]
    remaining_mib = usable_mib(memory_mib)
    if len(shared_mib) + len(requested_mib) >= 2:
        cpu_workers = sum(not mib for mib in requested_mib)
        remaining_mib -= sum(requested_mib)
        accelerator_mib, total_mib = max(0, remaining_mib - MIN_PROCESSOR_MIB * cpu_workers), sum(shared_mib.values())
        if total_mib > accelerator_mib:
            shared_mib = {name: size * accelerator_mib // total_mib for name, size in shared_mib.items()}
        remaining_mib = max(0, remaining_mib - sum(shared_mib.values())) // max(1, cpu_workers)
    capacities.update(
        (name, shared_mib[canonical_names[name]])
        for name, device in accelerators.items()
        if device.unified and canonical_names[name] in shared_mib
    )
    return {**capacities, backends.CPU.device: remaining_mib}


def _visible_devices(facts: Facts, workers: Sequence[types.Worker], backend: str) -> dict[str, Accelerator]:
    """Return the accelerators of a backend that llama-server may see and use, by name: those that the host does not lend, through any
    backend. If a variable hides the others, only those before the first lent one."""
    canonical_names = facts.canonical_names
    hidden_names = {canonical_names.get(worker.device) for worker in workers}
    accelerators = [(name, device) for name, device in facts.named_accelerators if device.backend == backend]
    choose = itertools.takewhile if backends.BY_NAME[backend].hiding_variable else filter
    return dict(choose(lambda entry: canonical_names[entry[0]] not in hidden_names, accelerators))


def driven_devices(
    host: types.Host, workers: Sequence[types.Worker], backend: str, environment: Mapping[str, str]
) -> list[types.Device]:
    """Return the devices that llama-server itself drives, with all of their memory. Like llama.cpp, it uses a device that shares the host's memory only if
    there is no other, lent or not. Devices with unknown memory are left out."""
    sized_devices = [
        types.Device(host.name, backend, name, name, accelerator.memory_mib, environment, accelerator=accelerator)
        for name, accelerator in _visible_devices(host.facts, workers, backend).items()
        if accelerator.memory_mib
    ]
    discrete_devices = [device for device in sized_devices if not device.shares_memory]
    lent_accelerators = [host.facts.accelerator_of(worker.device) for worker in workers]
    lends_discrete = any(accelerator and not accelerator.unified for accelerator in lent_accelerators)
    return discrete_devices or ([] if lends_discrete else sized_devices[:1])


def _limits_of_head(head_devices: Sequence[types.Device], server: types.Server) -> dict[str, int]:
    """Return name of a device that llama-server drives → MiB that the operator allows it to hold."""
    sizes = {device.name: device.capacity_mib for device in head_devices}
    for name, mib in server.memory_mib.items():
        if name not in sizes:
            remedy = f"use one of {', '.join(sizes)}" if sizes else "set memory_mib in llama_worker_endpoints instead"
            raise Refusal(f"llama_server_memory_mib has {name}, which llama-server does not drive itself: {remedy}")
        if not 1 <= mib <= sizes[name]:
            raise Refusal(
                f"llama_server_memory_mib sets {name} to {mib}: use 1 to {sizes[name]}, the size of that device's memory"
            )
    if server.reserve_mib is None:
        return dict(server.memory_mib)
    if server.reserve_mib < 0:
        raise Refusal(f"llama_server_reserve_mib is {server.reserve_mib}: use a number of MiB, 0 or more")
    return {**{name: max(0, size - server.reserve_mib) for name, size in sizes.items()}, **server.memory_mib}


def single_host_devices(host: types.Host, backend: str, server: types.Server | None = None) -> list[types.Device]:
    """Return the devices of a backend that would be used if this host served alone.

    :param server: variables of the server on the head, which limit its devices; None for another host.
    """
    devices = driven_devices(host, (), backend, {})
    if server:
        device_names = [device.name for device in devices]
        memory_mib = {name: mib for name, mib in server.memory_mib.items() if name in device_names}
        server = server._replace(memory_mib=memory_mib)
    capacities = capacities_of(host, [], devices, server)
    return [device._replace(capacity_mib=capacities[device.name]) for device in devices]


def environment_of_head(head: types.EquippedHost, backend: str, layouts: Sequence[Layout]) -> dict[str, str]:
    """Return the variables that make llama-server use the devices of these layouts as planned, and take no memory of unused devices."""
    used_names = {device.name for layout in layouts for device in layout.driven_devices()}
    uses_workers = any(layout.endpoints for layout in layouts)
    names = [*_visible_devices(head.host.facts, head.workers, backend)]
    visible_count = max((index + 1 for index, name in enumerate(names) if name in used_names), default=len(names))
    accelerators, backend_type = head.host.facts.accelerators_of(backend), backends.BY_NAME[backend]
    visibility, bus_order_setting = backend_type.hiding_variable, backend_type.bus_order_setting
    environment: dict[str, str] = {}
    if used_names and bus_order_setting and len({accelerator.name for accelerator in accelerators}) > 1:
        environment.update([bus_order_setting])
    if visibility and used_names and visible_count < len(accelerators):
        environment[visibility.name] = visibility.value_template.format(",".join(map(str, range(visible_count))))
    elif visibility and visibility.hide_all_value is not None and accelerators and uses_workers and not used_names:
        environment[visibility.name] = visibility.hide_all_value
    environment.update(next(filter(None, (auxiliary_models.environment(layout.auxiliary) for layout in layouts)), {}))
    environment.update({backends.UNIFIED_HEAP: "true"} if any(map(_needs_unified_heap, layouts)) else {})
    return environment


def _needs_unified_heap(layout: Layout) -> bool:
    """Return whether llama-server drives a device that holds more than Mesa shows without UNIFIED_HEAP."""
    head_shares = [(share, share.device.accelerator) for share in layout.shares() if not share.device.worker]
    return any(
        share.held_mib > visible_mib(accelerator, share.device.environment) < accelerator.memory_mib
        for share, accelerator in head_shares
        if accelerator
    )


def _is_gb10(device: types.Device) -> bool:
    """Return whether a device is a GB10. Reading a model from mapped pages was seen to take ten times as long there: 224 s instead of 22 s on a DGX
    Spark (#27742, comment of 26 August 2026)."""
    return device.backend == "cuda" and device.shares_memory and device.architecture == GB10


def hip_shares_by_program(shares: Iterable[DeviceShare]) -> list[list[DeviceShare]]:
    """Return the shares of HIP devices for each program on the head that copies weights from mapped pages. A worker gets its weights by RPC, so its device
    counts only if it shares the memory of these pages."""
    programs: dict[str | None, list[DeviceShare]] = {}
    for share in shares:
        device = share.device
        if device.backend == backends.HIP.name and (device.shares_memory or not device.worker):
            programs.setdefault(device.endpoint, []).append(share)
    return list(programs.values())


def weights_mib(shares: Iterable[DeviceShare]) -> float:
    return sum(share.weights_mib for share in shares)


def load_mode_of(release: ReleasePlan, shares: Sequence[DeviceShare], head: types.Host) -> str | None:
    """Return the load mode unless the operator sets it: no mmap with HIP or GB10 devices that were seen to hang or slow down with it, or if Metal on
    the head would map nearly the whole file although workers hold layers (ggml-org/llama.cpp#27667). None is llama-server's default.
    """
    head_shares = [share for share in shares if share.device.host == head.name]
    has_workers = any(share.device.worker for share in shares)
    devices = [share.device for share in head_shares if not share.device.worker]
    if has_workers and any(backends.BY_NAME[device.backend].maps_model_file for device in devices):
        return "none"
    if any(_is_gb10(share.device) for share in head_shares):
        return "none"
    limit = min(MMAP_LIMIT_MIB, head.facts.memory_mib / 2)
    return (
        unmapped_mode(release)
        if any(weights_mib(group) > limit for group in hip_shares_by_program(head_shares))
        else None
    )


def unmapped_mode(release: ReleasePlan) -> str:
    """Return the fastest way to read a model without mmap."""
    return "dio" if release.mainline else "none"

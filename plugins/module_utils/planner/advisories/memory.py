# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conditions of advisories about memory: how it is filled, who shares it, and how much there is."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate, attempt
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.estimate import generation_figures
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.prompt_cache import STEP_MIB


def _with_mapped_pages(context: AdvisoryContext) -> list[devices.Holder]:
    """Return the head's devices whose weights come from mapped pages. By default ik_llama.cpp maps the file for all devices, llama.cpp for those with
    their own memory. Workers on other hosts get their tensors by RPC and map nothing."""
    mode, mainline = context.plan.head.load_mode, context.release.mainline
    if mode in ("mmap", "mmap+mlock"):
        return context.on_head
    return [device for device in context.on_head if mode in (None, "auto") and not (mainline and device.unified)]


def mmap_hangs(context: AdvisoryContext) -> Cases:
    values = {"limit": devices.MMAP_LIMIT_MIB, "mode": devices.unmapped_mode(context.release)}
    sizes = [(devices.weights_mib(program), program) for program in devices.hip_uploads(_with_mapped_pages(context))]
    return [
        (
            program[0].host,
            {
                **values,
                "where": f"{round(size)} MiB on {remedies.join_names(device.name for device in program)} of {program[0].host}",
            },
        )
        for size, program in sizes
        if size > devices.MMAP_LIMIT_MIB
    ]


def metal_maps(context: AdvisoryContext) -> Cases:
    """Return a head with Metal and workers on which the operator turned mmap on."""
    workers = any(device.endpoint for device in context.holders)
    return [
        (device.host, {"where": device.host})
        for device in _with_mapped_pages(context)
        if workers and not device.endpoint and device.backend == "metal"
    ]


def torn_cache(context: AdvisoryContext) -> Cases:
    """Return devices whose KV cache llama-server cannot fetch, if the operator turned the prompt cache on."""
    if not context.plan.head.prompt_cache_mib:
        return []
    cache = context.candidate.workload.cache
    torn = [device for device in context.holders if kv_cache.is_torn(context.summary, cache, device.backend)]
    return [(device.host, {"where": f"{device.name} of {device.host}"}) for device in torn]


def displacing_cache(context: AdvisoryContext) -> Cases:
    """Return the head if the operator's prompt cache moves layers from its memory to much slower devices."""
    now, size = context.candidate, context.server.prompt_cache_mib or 0
    if not size or not now.parts or not now.workload.generates:
        return []

    def with_size(mib: int) -> Candidate:
        server = context.server._replace(prompt_cache_mib=mib)
        return attempt(now.workload._replace(server=server), now.site)

    def head_units(planned: Candidate) -> int:
        shares = zip(planned.layout.devices, planned.layout.shares())
        return sum(share.layers + share.output for device, share in shares if device.host == now.site.head)

    without_cache = with_size(0)
    moved_layers = head_units(without_cache) - head_units(now)
    if moved_layers <= 0 or not cost_model.is_likely_faster(without_cache.parts, now.parts):
        return []
    steps = remedies.largest_fitting(
        size // STEP_MIB, lambda number: head_units(with_size(number * STEP_MIB)) == head_units(without_cache)
    )
    ranges = [str(generation_figures(planned)["generation_range"]) for planned in (now, without_cache)]
    values = {"size": size, "moved": moved_layers, "now": ranges[0], "without": ranges[1], "largest": steps * STEP_MIB}
    return [(context.cluster.head, values)]


def vulkan_memory(context: AdvisoryContext) -> Cases:
    """Return devices that get more memory than their driver reports, or could do so if the model does not fit."""
    places: list[tuple[devices.Holder, str]] = []
    for device in context.holders:
        reported = f"{device.visible_mib} MiB reported"
        accelerator = devices.accelerator_of(context.cluster.every_host[device.host].facts, device.name)
        if context.plan.fits and (share := round(device.held_mib)) > device.visible_mib:
            places.append((device, f"{share} MiB planned, {reported}"))
        elif not context.plan.fits and accelerator and device.visible_mib < accelerator.memory_mib:
            places.append((device, f"{accelerator.memory_mib} MiB in total, {reported}"))
    hosts = context.cluster.hosts
    by_hip = {name for name, host in hosts.items() if host.facts.accelerators_of(backends.HIP.name)}
    return [
        (
            device.host,
            {
                "where": f"{device.name} of {device.host} ({sizes})",
                "hip": backends.HIP.name if device.host in by_hip else None,
            },
        )
        for device, sizes in places
    ]


def untuned(context: AdvisoryContext) -> Cases:
    """Return graphics to which the kernel gives less memory than it could, if the model does not fit."""
    cases: Cases = []
    for name, host in context.cluster.hosts.items():
        memory, by_the_run = host.facts.memory_mib, context.plan.hosts[name].host_settings
        for device in host.facts.accelerators if not context.plan.fits else ():
            is_small = device.backend == backends.HIP.name and device.unified and device.memory_mib < memory * 3 // 4
            if is_small and not (host.tuning.enabled and host.tuning.reboot):
                settings = kernel_parameters.parameters(memory)
                parameters = None if by_the_run else " ".join(f"{key}={value}" for key, value in settings.items())
                values = {"where": f"{device.name} of {name}", "mib": device.memory_mib, "memory": memory}
                cases.append((name, {**values, "tuning": "true" if by_the_run else None, "parameters": parameters}))
    return cases


def over_capacity(context: AdvisoryContext) -> Cases:
    """Return devices whose weights, cache and upper bound of the compute buffer exceed their memory."""
    full = [part for part in context.plan.placement if part.total_mib > part.capacity_mib]
    if not full or not context.plan.fits:
        return []
    hosts = {part.host for part in full}
    sizes = [f"{part.device} of {part.host} (≤ {part.total_mib:.0f} of {part.capacity_mib:.0f} MiB)" for part in full]
    values = {"devices": ", ".join(sizes), "compute": round(max(part.compute_mib for part in full))}
    values["flash"] = "on" if context.server.flash_attention == "off" else None
    return [(hosts.pop() if len(hosts) == 1 else None, values)]

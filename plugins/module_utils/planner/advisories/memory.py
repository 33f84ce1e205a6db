# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conditions of advisories about memory: how it is filled, who shares it, and how much there is."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import (
    Candidate,
    attempt_placement,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.estimate import generation_figures
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.prompt_cache import STEP_MIB


def _with_mapped_pages(context: AdvisoryContext) -> list[devices.Holder]:
    """Return the head's devices whose weights come from mapped pages. By default ik_llama.cpp maps the file for all devices, llama.cpp for those with
    their own memory. Workers on other hosts get their tensors by RPC and map nothing."""
    mode, mainline = context.plan.head.load_mode, context.release.mainline
    if mode in ("mmap", "mmap+mlock"):
        return context.on_head
    return [device for device in context.on_head if mode in (None, "auto") and not (mainline and device.is_unified)]


def mmap_hangs(context: AdvisoryContext) -> Cases:
    values = {"limit": devices.MMAP_LIMIT_MIB, "mode": devices.unmapped_mode(context.release)}
    sizes = [(devices.weights_mib(program), program) for program in devices.hip_uploads(_with_mapped_pages(context))]
    return [
        (
            program[0].host,
            {
                **values,
                "where": f"{round(size)} MiB for {remedies.join_names(device.name for device in program)} on {program[0].host}",
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
    torn_backends = context.candidate.layout.load.torn_backends
    torn_devices = [device for device in context.holders if device.backend in torn_backends]
    return [(device.host, {"where": f"{device.name} on {device.host}"}) for device in torn_devices]


def displacing_cache(context: AdvisoryContext) -> Cases:
    """Return the head if the operator's prompt cache moves layers from its memory to much slower devices."""
    plan, size = context.candidate, context.server.prompt_cache_mib or 0
    if not size or not plan.parts or not plan.workload.generates:
        return []

    def with_size(mib: int) -> Candidate:
        server = context.server._replace(prompt_cache_mib=mib)
        return attempt_placement(plan.workload._replace(server=server), plan.site)

    def head_units(variant: Candidate) -> int:
        shares = zip(variant.layout.devices, variant.layout.shares())
        return sum(share.layers + share.output for device, share in shares if device.host == plan.site.head)

    without_cache = with_size(0)
    moved_layers = head_units(without_cache) - head_units(plan)
    if moved_layers <= 0 or not cost_model.is_likely_faster(without_cache.parts, plan.parts):
        return []
    steps = remedies.largest_fitting(
        size // STEP_MIB, lambda number: head_units(with_size(number * STEP_MIB)) == head_units(without_cache)
    )
    ranges = [str(generation_figures(variant)["generation_range"]) for variant in (plan, without_cache)]
    values = {"size": size, "moved": moved_layers, "now": ranges[0], "without": ranges[1], "largest": steps * STEP_MIB}
    return [(context.cluster.head, values)]


def vulkan_memory(context: AdvisoryContext) -> Cases:
    """Return devices that get more memory than their driver reports, or could do so if the model does not fit."""
    places: list[tuple[devices.Holder, str]] = []
    for device in context.holders:
        reported_text = f"{device.visible_mib} MiB reported"
        accelerator = context.cluster.every_host[device.host].facts.accelerator_of(device.name)
        if context.plan.fits and (share := round(device.held_mib)) > device.visible_mib:
            places.append((device, f"{share} MiB planned, {reported_text}"))
        elif not context.plan.fits and accelerator and device.visible_mib < accelerator.memory_mib:
            places.append((device, f"{accelerator.memory_mib} MiB in total, {reported_text}"))
    hosts = context.cluster.hosts
    hosts_with_hip = {name for name, host in hosts.items() if host.facts.accelerators_of(backends.HIP.name)}
    return [
        (
            device.host,
            {
                "where": f"{device.name} on {device.host} ({sizes})",
                "hip": backends.HIP.name if device.host in hosts_with_hip else None,
            },
        )
        for device, sizes in places
    ]


def untuned_graphics(context: AdvisoryContext) -> Cases:
    """Return graphics to which the kernel gives less memory than it could, if the model does not fit."""
    cases: Cases = []
    for name, host in context.cluster.hosts.items():
        memory, can_tune = host.facts.memory_mib, context.plan.hosts[name].host_settings
        for device in host.facts.accelerators if not context.plan.fits else ():
            is_small = device.backend == backends.HIP.name and device.unified and device.memory_mib < memory * 3 // 4
            if is_small and not (host.tuning.enabled and host.tuning.reboot):
                settings = kernel_parameters.parameters(memory)
                parameters = None if can_tune else " ".join(f"{key}={value}" for key, value in settings.items())
                values = {"where": f"{device.name} on {name}", "mib": device.memory_mib, "memory": memory}
                cases.append((name, {**values, "tuning": "true" if can_tune else None, "parameters": parameters}))
    return cases


def over_capacity(context: AdvisoryContext) -> Cases:
    """Return devices whose weights, cache and upper bound of the compute buffer exceed their memory."""
    excess = [part for part in context.plan.placement if part.total_mib > part.capacity_mib]
    if not excess or not context.plan.fits:
        return []
    hosts = {part.host for part in excess}
    sizes = [f"{part.device} on {part.host} (≤ {part.total_mib:.0f} of {part.capacity_mib:.0f} MiB)" for part in excess]
    values = {"devices": ", ".join(sizes), "compute": round(max(part.compute_mib for part in excess))}
    values["flash"] = "on" if context.server.flash_attention == "off" else None
    return [(hosts.pop() if len(hosts) == 1 else None, values)]

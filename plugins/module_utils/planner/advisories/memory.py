# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conditions of advisories about memory: how it is filled, who shares it, and how large it is."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    cost_model,
    devices,
    prompt_cache,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import (
    Candidate,
    attempt_placement,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.device_load import DeviceShare
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.estimate import generation_figures
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device


def _mapped_shares(context: AdvisoryContext) -> list[DeviceShare]:
    """Return the shares of the head's devices whose weights come from mapped pages. By default ik_llama.cpp maps the file for all devices, and llama.cpp for
    devices with their own memory. Workers on other hosts get their tensors by RPC and map nothing."""
    mode, is_mainline = context.candidate.layout.load_mode, context.release.mainline
    shares = [share for share in context.candidate.layout.shares() if share.device.host == context.cluster.head]
    if mode in ("mmap", "mmap+mlock"):
        return shares
    return [share for share in shares if mode in (None, "auto") and not (is_mainline and share.device.shares_memory)]


def mmap_hangs(context: AdvisoryContext) -> Cases:
    values = {"limit": devices.MMAP_LIMIT_MIB, "mode": devices.unmapped_mode(context.release)}
    groups = [(devices.weights_mib(group), group) for group in devices.hip_shares_by_program(_mapped_shares(context))]
    return [
        (
            context.cluster.head,
            {
                **values,
                "where": f"{round(weights_mib)} MiB for {remedies.join_names(share.device.name for share in shares)} on {context.cluster.head}",
            },
        )
        for weights_mib, shares in groups
        if weights_mib > devices.MMAP_LIMIT_MIB
    ]


def metal_mappings(context: AdvisoryContext) -> Cases:
    """Return a head with Metal and workers if the operator turned mmap on."""
    mapped_devices = [share.device for share in _mapped_shares(context)] if context.candidate.layout.endpoints else []
    return [
        (device.host, {"where": device.host})
        for device in mapped_devices
        if not device.worker and device.backend == "metal"
    ]


def split_kv_caches(context: AdvisoryContext) -> Cases:
    """Return devices whose KV cache llama-server cannot save, if the operator turned the prompt cache on."""
    split_cache_backends = context.candidate.layout.load.split_cache_backends
    split_cache_devices = [device for device in context.devices if device.backend in split_cache_backends]
    if not split_cache_devices or not prompt_cache.plan_prompt_cache(context.candidate).mib:
        return []
    return [(device.host, {"where": f"{device.name} on {device.host}"}) for device in split_cache_devices]


def displacing_prompt_cache(context: AdvisoryContext) -> Cases:
    """Return the head if the operator's prompt cache displaces layers from its memory to much slower devices."""
    candidate, cache_mib = context.candidate, context.server.prompt_cache_mib or 0
    if not cache_mib or not candidate.parts or not candidate.workload.generates_text:
        return []

    def place_with_cache(mib: int) -> Candidate:
        server = context.server._replace(prompt_cache_mib=mib)
        return attempt_placement(candidate.workload._replace(server=server), candidate.site)

    def head_units(variant: Candidate) -> int:
        head_shares = [share for share in variant.layout.shares() if share.device.host == candidate.site.head]
        return sum(share.layers + share.has_output for share in head_shares)

    cacheless_candidate = place_with_cache(0)
    moved_layers = head_units(cacheless_candidate) - head_units(candidate)
    if moved_layers <= 0 or not cost_model.is_likely_faster(cacheless_candidate.parts, candidate.parts):
        return []
    step_count = remedies.largest_fitting_count(
        cache_mib // prompt_cache.STEP_MIB,
        lambda count: head_units(place_with_cache(count * prompt_cache.STEP_MIB)) == head_units(cacheless_candidate),
    )
    ranges = [str(generation_figures(variant)["generation_range"]) for variant in (candidate, cacheless_candidate)]
    values = {
        "size": cache_mib,
        "moved": moved_layers,
        "with_cache": ranges[0],
        "without_cache": ranges[1],
        "largest": step_count * prompt_cache.STEP_MIB,
    }
    return [(context.cluster.head, values)]


def underreported_memory(context: AdvisoryContext) -> Cases:
    """Return devices that use more memory than their driver reports, or could use more if the model does not fit."""
    affected_devices: list[tuple[Device, str]] = []
    for share in context.candidate.layout.shares():
        device, limit_mib = share.device, devices.limit_mib(share.device)
        if context.plan.fits and (planned_mib := round(share.held_mib)) > limit_mib:
            affected_devices.append((device, f"{planned_mib} MiB planned, {limit_mib} MiB reported"))
        elif not context.plan.fits and device.accelerator and limit_mib < device.accelerator.memory_mib:
            total_mib = device.accelerator.memory_mib
            affected_devices.append((device, f"{total_mib} MiB in total, {limit_mib} MiB reported"))
    hosts = context.cluster.hosts
    hosts_with_hip = {name for name, host in hosts.items() if host.facts.accelerators_of(backends.HIP.name)}
    return [
        (
            device.host,
            {
                "where": f"{device.name} on {device.host} ({sizes_text})",
                "hip": backends.HIP.name if device.host in hosts_with_hip else None,
            },
        )
        for device, sizes_text in affected_devices
    ]


def untuned_integrated_gpus(context: AdvisoryContext) -> Cases:
    """Return integrated GPUs whose memory limit kernel parameters could raise, if the model does not fit."""
    cases: Cases = []
    for name, host in context.cluster.hosts.items():
        memory_mib, can_tune = host.facts.memory_mib, context.plan.hosts[name].host_settings
        limit_mib = min(memory_mib * 3 // 4, memory_mib - kernel_parameters.DEFAULT_RESERVED_MIB)
        can_raise_limit = limit_mib >= kernel_parameters.MIN_GTT_MIB and not context.plan.fits
        for device in host.facts.accelerators if can_raise_limit else ():
            is_limited = device.backend == backends.HIP.name and device.unified and device.memory_mib < limit_mib
            if is_limited and not (host.tuning.enabled and host.tuning.reboot):
                parameters = kernel_parameters.graphics_parameters(memory_mib)
                parameters_text = None if can_tune else " ".join(f"{key}={value}" for key, value in parameters.items())
                values = {"where": f"{device.name} on {name}", "mib": device.memory_mib, "memory": memory_mib}
                cases.append((name, {**values, "tuning": "true" if can_tune else None, "parameters": parameters_text}))
    return cases


def overfull_devices(context: AdvisoryContext) -> Cases:
    """Return devices whose memory is smaller than weights, KV cache and the upper bound of the compute buffer together."""
    devices_over_capacity = [device for device in context.plan.placement if device.total_mib > device.capacity_mib]
    if not devices_over_capacity or not context.plan.fits:
        return []
    hosts = {device.host for device in devices_over_capacity}
    device_texts = [
        f"{device.device} on {device.host} (≤ {device.total_mib:.0f} MiB, capacity {device.capacity_mib:.0f})"
        for device in devices_over_capacity
    ]
    compute_mib = round(max(device.compute_mib for device in devices_over_capacity))
    flash_attention = "on" if context.server.flash_attention == "off" else None
    values = {"devices": ", ".join(device_texts), "compute": compute_mib, "flash": flash_attention}
    return [(hosts.pop() if len(hosts) == 1 else None, values)]

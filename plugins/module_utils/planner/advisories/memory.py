# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When advisories are met that concern memory: how it is filled, who shares it, and how much there is."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices


def _with_mapped_pages(context: AdvisoryContext) -> list[devices.Holder]:
    """The devices of the head, if llama-server maps the model's file for devices that share memory with the processor. The default of ik_llama.cpp does so.
    Workers on other hosts get their tensors by RPC and map nothing."""
    mode = context.plan.head.load_mode
    maps = mode in ("mmap", "mmap+mlock") or (mode in (None, "auto") and not context.release.mainline)
    return context.on_head if maps else []


def mmap_hangs(context: AdvisoryContext) -> Cases:
    values = {"limit": devices.MMAP_LIMIT_MIB, "mode": devices.unmapped_mode(context.release)}
    return [
        (device.host, {**values, "where": f"{round(device.weights_mib)} MiB on {device.name} of {device.host}"})
        for device in _with_mapped_pages(context)
        if device.hangs_on_mmap
    ]


def metal_maps(context: AdvisoryContext) -> Cases:
    """A head with Metal and workers whose operator has it map the model's file."""
    workers = any(device.endpoint for device in context.used)
    return [
        (device.host, {"where": device.host})
        for device in _with_mapped_pages(context)
        if workers and not device.endpoint and device.backend == "metal"
    ]


def torn_cache(context: AdvisoryContext) -> Cases:
    """Devices of which llama-server cannot fetch KV cache, whose operator has it keep conversations."""
    cache = context.candidate.workload.cache
    torn = [one for one in context.used if kv_cache.is_torn(context.summary, cache, one.backend)]
    return [(one.host, {"where": f"{one.name} of {one.host}"}) for one in torn if context.plan.head.prompt_cache_mib]


def vulkan_memory(context: AdvisoryContext) -> Cases:
    """A share beyond what the driver shows as the device's own, or a model that does not fit within that."""
    places: list[tuple[devices.Holder, str]] = []
    for device in context.used:
        shown = f"{device.visible_mib} MiB are shown"
        accelerator = devices.accelerator_of(context.cluster.every_host[device.host].facts, device.name)
        if context.plan.fits and (share := round(device.held_mib)) > device.visible_mib:
            places.append((device, f"gets {share} MiB, and {shown}"))
        elif not context.plan.fits and accelerator and device.visible_mib < accelerator.memory_mib:
            places.append((device, f"has {accelerator.memory_mib} MiB, and {shown}"))
    return [(device.host, {"where": f"{device.name} of {device.host} {place}"}) for device, place in places]


def untuned(context: AdvisoryContext) -> Cases:
    """Graphics to which the kernel lends less than it could, of a model that does not fit."""
    cases: Cases = []
    for name, host in context.cluster.hosts.items():
        memory, by_the_run = host.facts.memory_mib, context.plan.hosts[name].host_settings
        for one in host.facts.accelerators if not context.plan.fits else ():
            little = one.backend == backends.HIP.name and one.unified and one.memory_mib < memory * 3 // 4
            if little and not (host.tuning.wanted and host.tuning.reboot):
                given = kernel_parameters.parameters(memory)
                parameters = None if by_the_run else " ".join(f"{key}={value}" for key, value in given.items())
                values = {"where": f"{one.name} of {name}", "mib": one.memory_mib, "memory": memory}
                cases.append((name, {**values, "tuning": "true" if by_the_run else None, "parameters": parameters}))
    return cases


def over_capacity(context: AdvisoryContext) -> Cases:
    """Devices whose weights, cache and bound of the compute buffer are more together than they hold."""
    over = [entry for entry in context.plan.placement if entry.total_mib > entry.capacity_mib]
    if not over or not context.plan.fits:
        return []
    hosts = {entry.host for entry in over}
    held = [f"{one.device} of {one.host} (≤ {one.total_mib:.0f} of {one.capacity_mib:.0f} MiB)" for one in over]
    values = {"devices": ", ".join(held), "compute": round(max(entry.compute_mib for entry in over))}
    values["flash"] = "on" if context.server.flash_attention == "off" else None
    return [(hosts.pop() if len(hosts) == 1 else None, values)]

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conditions of advisories about devices, their drivers and their backends."""

from __future__ import annotations

import re

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import versions
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import speculation
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases, toolchains
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request

STRIX_HALO = "gfx1151"
MIN_STRIX_HALO_KERNEL = (6, 18, 4)
GFX_WITHOUT_ROCBLAS = frozenset(("gfx1031", "gfx1032", "gfx1034", "gfx1035", "gfx1036"))
"""Architectures for which no version of ROCm has rocBLAS kernels. Programs for gfx1030 run on them."""
GFX_OVERRIDE_VARIABLE = "HSA_OVERRIDE_GFX_VERSION"
FIRST_ROCM_WITHOUT_GFX906 = (6, 4)
"""First version of ROCm whose rocBLAS has no kernels for gfx906."""


def user_scope_hosts(context: AdvisoryContext) -> Cases:
    hosts = context.cluster.hosts.items()
    return [(name, {}) for name, host in hosts if (host.scope, host.facts.scope) == ("auto", "user")]


def unused_accelerators(context: AdvisoryContext) -> Cases:
    """Return hosts with unused devices. Hosts with the same builds and backends share a finding."""
    cases: Cases = []
    sources = releases.sources_of(context.cluster)
    for name, host in context.plan.hosts.items():
        facts = context.cluster.hosts[name].facts
        unused_devices = [
            accelerator for accelerator in facts.accelerators if accelerator.name in host.unused_accelerators
        ]
        if unused_devices:
            unused_backends = {accelerator.backend for accelerator in unused_devices}
            backend = next(name for name in backends.PREFERRED_ORDER if name in unused_backends)
            toolkit, built_backends = toolkits.TOOLKITS.get(backend), context.backends_of(name)
            gpu_backends = [gpu_backend for gpu_backend in built_backends if gpu_backend != backends.CPU.name]
            needs_toolkit = sources[backend] in release_request.COMPILED_SOURCES and not gpu_backends
            components = [toolkit.title, *toolkits.libraries_of(backend)] if toolkit and needs_toolkit else []
            device_names = ", ".join(sorted({accelerator.name for accelerator in unused_devices}))
            values = {
                "where": f"{device_names} on {name}",
                "built": remedies.yaml_value(built_backends),
                "backend": None
                if facts.distribution.family == "unknown"
                else remedies.yaml_value([*gpu_backends, backend]),
                "toolkit": remedies.join_names(components) or None,
            }
            cases.append((name, values))
    return cases


def _vulkan_alternative(context: AdvisoryContext, name: str) -> str | None:
    """Return the value that selects Vulkan in the host's llama_backend; None for a host with external workers."""
    host = context.cluster.hosts.get(name)
    return toolchains.vulkan_setting(host.facts) if host else None


def broken_drivers(context: AdvisoryContext) -> Cases:
    """Return hosts with ``llama_backend: auto`` on which nvidia-smi fails."""
    hosts = context.cluster.hosts.items()
    auto_hosts = [(name, host.facts) for name, host in hosts if host.backends == ("auto",)]
    return [(name, {"failure": facts.nvidia_smi}) for name, facts in auto_hosts if facts.nvidia_smi]


def gfx906_without_kernels(context: AdvisoryContext) -> Cases:
    cases: Cases = []
    gfx906_devices = [
        device for device in context.devices if (device.backend, device.architecture) == ("hip", "gfx906")
    ]
    for name in dict.fromkeys(device.host for device in gfx906_devices):
        host = context.cluster.hosts.get(name)
        version = host and host.facts.toolchain.get("hipconfig")
        if version and versions.parse(version) >= FIRST_ROCM_WITHOUT_GFX906:
            cases.append((name, {"where": f"{name} (ROCm {version})", "vulkan": _vulkan_alternative(context, name)}))
    return cases


def gpus_without_rocblas(context: AdvisoryContext) -> Cases:
    """Return hosts with GPUs that no rocBLAS supports, unless an environment variable makes ROCm treat them as gfx1030."""
    cases: dict[str, dict[str, str | None]] = {}
    for device in context.candidate.layout.devices:
        host = context.cluster.hosts.get(device.host)
        architecture = device.architecture.partition(":")[0] if host and device.backend == backends.HIP.name else ""
        if architecture in GFX_WITHOUT_ROCBLAS and GFX_OVERRIDE_VARIABLE not in device.environment:
            builds = context.plan.hosts[device.host].builds
            is_compiled = any(build.cmake_options for build in builds if build.backend == device.backend)
            targets_clause = " and GPU_TARGETS to gfx1030 in llama_build_cmake_options" if is_compiled else ""
            values = {
                "where": f"{device.host} ({architecture})",
                "vulkan": _vulkan_alternative(context, device.host),
                "targets": targets_clause,
            }
            cases[device.host] = values
    return list(cases.items())


def sycl_workers(context: AdvisoryContext) -> Cases:
    head = context.cluster.head
    has_other_backends = len(context.backends_of(head)) > 1
    return [
        (
            device.host,
            {
                "where": f"{device.name} on {device.host}",
                "vulkan": _vulkan_alternative(context, device.host),
                "sycl": "sycl" if device.host == head and has_other_backends else None,
            },
        )
        for device in context.devices
        if device.endpoint and device.backend == "sycl"
    ]


def metal_mtp_workers(context: AdvisoryContext) -> Cases:
    """Return hosts of Metal workers if llama-server uses multi-token prediction."""
    metal_devices = [device for device in context.devices if device.endpoint and device.backend == "metal"]
    return [(device.host, {}) for device in metal_devices if speculation.DRAFT_MTP in context.plan.head.argv]


def _strix_halo_hosts(context: AdvisoryContext) -> list[tuple[str, Facts]]:
    """Return names and facts of the hosts whose Strix Halo GPUs get a part of the model."""
    names = dict.fromkeys(device.host for device in context.devices if device.architecture == STRIX_HALO)
    return [(name, context.cluster.hosts[name].facts) for name in names if name in context.cluster.hosts]


def outdated_kernels(context: AdvisoryContext) -> Cases:
    cases: Cases = []
    for name, facts in _strix_halo_hosts(context):
        version = tuple(map(int, re.findall(r"\d+", facts.kernel)[:3]))
        if version and version < MIN_STRIX_HALO_KERNEL:
            first_kernel = ".".join(map(str, MIN_STRIX_HALO_KERNEL))
            cases.append((name, {"where": f"{name} ({facts.kernel})", "first": first_kernel}))
    return cases

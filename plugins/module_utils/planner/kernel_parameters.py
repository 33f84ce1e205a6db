# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parameters of the kernel by which a host lends more of its memory to its graphics."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import AMDGPU
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Tuning

DRIVER = AMDGPU
"""Kernel driver of the devices to which the parameters apply."""
PAGE_KIB = 4
RESERVED_MIB = 4096
"""Default memory that is reserved for the host."""
MIN_RESERVED_MIB = MIN_GTT_MIB = 1024


def graphics_parameters(memory_mib: int, gtt_mib: int | None = None) -> dict[str, str]:
    """Return the parameters that let graphics use ``gtt_mib`` MiB of the host's ``memory_mib`` MiB; by default all but 4 GiB."""
    size = memory_mib - RESERVED_MIB if gtt_mib is None else gtt_mib
    if not MIN_GTT_MIB <= size <= memory_mib - MIN_RESERVED_MIB:
        raise ValueError(
            f"would let the integrated GPU use {size} of {memory_mib} MiB: set llama_host_tuning_gtt_mib to a value from {MIN_GTT_MIB} to "
            f"{memory_mib - MIN_RESERVED_MIB}"
        )
    return {f"{DRIVER}.gttsize": str(size), "ttm.pages_limit": str(size * 1024 // PAGE_KIB)}


def facts_after_reboot(facts: Facts, tuning: Tuning) -> Facts:
    """Return the facts for planning. If the run tunes and reboots the host, its graphics have the memory of the time after the reboot."""
    if not (tuning.enabled and tuning.reboot):
        return facts
    size = tuning.gtt_mib or facts.memory_mib - RESERVED_MIB
    accelerators = (
        device._replace(memory_mib=max(device.memory_mib, size)) if device.has_amdgpu_limit else device
        for device in facts.accelerators
    )
    return facts._replace(accelerators=tuple(accelerators))

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel parameters that let a host's integrated GPU use more of the host's memory."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import AMDGPU
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Tuning

DRIVER = AMDGPU
"""Kernel driver of the devices to which the parameters apply."""
PAGE_KIB = 4
DEFAULT_RESERVED_MIB = 4096
"""Memory that is reserved for the host by default."""
MIN_RESERVED_MIB = MIN_GTT_MIB = 1024


def graphics_parameters(memory_mib: int, gtt_mib: int | None = None) -> dict[str, str]:
    """Return the parameters that let the GPU use ``gtt_mib`` MiB of the host's ``memory_mib`` MiB; by default all but 4 GiB."""
    size_mib = memory_mib - DEFAULT_RESERVED_MIB if gtt_mib is None else gtt_mib
    if not MIN_GTT_MIB <= size_mib <= memory_mib - MIN_RESERVED_MIB:
        raise ValueError(
            f"would let the integrated GPU use {size_mib} of {memory_mib} MiB: set llama_host_tuning_gtt_mib to a value from {MIN_GTT_MIB} to "
            f"{memory_mib - MIN_RESERVED_MIB}"
        )
    return {f"{DRIVER}.gttsize": str(size_mib), "ttm.pages_limit": str(size_mib * 1024 // PAGE_KIB)}


def facts_after_reboot(facts: Facts, tuning: Tuning) -> Facts:
    """Return the facts for planning: if the run tunes and reboots the host, with the GPU memory that it has after the reboot."""
    if not (tuning.enabled and tuning.reboot):
        return facts
    size_mib = tuning.gtt_mib or facts.memory_mib - DEFAULT_RESERVED_MIB
    accelerators = (
        device._replace(memory_mib=max(device.memory_mib, size_mib)) if device.has_amdgpu_limit else device
        for device in facts.accelerators
    )
    return facts._replace(accelerators=tuple(accelerators))

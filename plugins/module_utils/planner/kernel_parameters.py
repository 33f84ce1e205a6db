# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parameters of the kernel by which a host lends more of its memory to its graphics."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import AMDGPU
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Tuning

DRIVER = AMDGPU
"""Kernel driver for whose devices the parameters are."""
PAGE_KIB = 4
KEPT_MIB = 4096
"""Memory that the host keeps by default."""
MIN_KEPT_MIB = 1024
MIN_GTT_MIB = 1024


def parameters(memory_mib: int, gtt_mib: int | None = None) -> dict[str, str]:
    """Return the parameters with which the kernel lends ``gtt_mib`` MiB of ``memory_mib`` MiB; without a size, all but 4 GiB."""
    size = memory_mib - KEPT_MIB if gtt_mib is None else gtt_mib
    if not MIN_GTT_MIB <= size <= memory_mib - MIN_KEPT_MIB:
        raise ValueError(
            f"{size} of {memory_mib} MiB cannot be lent to the graphics: set llama_host_tuning_gtt_mib to a value from {MIN_GTT_MIB} to "
            f"{memory_mib - MIN_KEPT_MIB}."
        )
    return {f"{DRIVER}.gttsize": str(size), "ttm.pages_limit": str(size * 1024 // PAGE_KIB)}


def after_reboot(facts: Facts, tuning: Tuning) -> Facts:
    """Return the facts as planning takes them: if the run tunes and reboots the host, with the memory that its graphics have then."""
    if not (tuning.enabled and tuning.reboot):
        return facts
    size = tuning.gtt_mib or facts.memory_mib - KEPT_MIB
    accelerators = (
        device._replace(memory_mib=max(device.memory_mib, size)) if device.is_lent_by_amdgpu else device
        for device in facts.accelerators
    )
    return facts._replace(accelerators=tuple(accelerators))

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Memory that is free at this moment. It changes with the load, so no plan depends on it."""

from __future__ import annotations

import re
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends


def available(meminfo: str) -> int | None:
    """MiB that Linux says programs can still get, from the text of /proc/meminfo."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(match.group(1)) // 1024 if match else None


def nvidia(listing: str) -> dict[int, int]:
    """Number of a device → MiB, from ``nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits``."""
    return {index: int(line) for index, line in enumerate(listing.splitlines()) if line.strip().isdigit()}


def amd(drm: Path) -> dict[int, int]:
    """Number of a device → MiB of its own memory, in the order of the render nodes."""
    free = {}
    for index, total in enumerate(sorted(drm.glob("renderD*/device/mem_info_vram_total"))):
        used = total.with_name("mem_info_vram_used")
        free[index] = (int(total.read_text()) - int(used.read_text())) // MIB
    return free


def free_mib() -> dict[str, int]:
    """Device, named as workers name it, → MiB. A device whose free memory is not known is left out."""
    free = {}
    meminfo = Path("/proc/meminfo")
    host = available(meminfo.read_text()) if meminfo.exists() else None
    if host is not None:
        free[backends.CPU.device] = host
    cuda = nvidia(output(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]))
    for backend, sizes in ((backends.CUDA, cuda), (backends.HIP, amd(Path("/sys/class/drm")))):
        free.update({backends.device_name(backend.name, index): size for index, size in sizes.items()})
    return free

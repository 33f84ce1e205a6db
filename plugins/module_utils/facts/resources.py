# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Free memory and disk space, from kernel files and a query of nvidia-smi. These values change with the load, so no plan depends on them. An unknown
value is None."""

import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB, parse_count
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import hardware
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

DISK_TIMEOUT_SECONDS = 2.0
"""Time limit for a file system to report its size: a network mount without its server never answers."""
MEMORY_QUERY = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]

Mib = Annotated[Optional[int], Number(maximum=1 << 40)]


class DeviceMemory(NamedTuple):
    """Memory of an accelerator."""

    name: Annotated[str, Text()]
    """name, such as CUDA0, or driver and PCI address"""
    total_mib: Mib
    """dedicated memory"""
    free_mib: Mib
    """free dedicated memory"""
    shared_total_mib: Mib = None
    """memory of the host that the device may use (GTT)"""
    shared_free_mib: Mib = None
    """free memory of the host that the device may use (GTT)"""


class Disk(NamedTuple):
    """A file system of the installation or its cache."""

    path: Annotated[str, Text(max_length=4096)]
    """path of the installation or of the cache on it"""
    total_mib: Mib
    """size; null if it does not answer"""
    free_mib: Mib
    """space for this account; null if it does not answer"""


class Resources(NamedTuple):
    """Free memory and disk space of a host."""

    uptime_s: Annotated[Optional[int], Number()]
    """seconds since the host booted"""
    memory_total_mib: Mib
    """memory of the host"""
    memory_free_mib: Mib
    """memory that programs can still allocate"""
    devices: tuple[DeviceMemory, ...]
    """accelerators that report their memory"""
    disks: tuple[Disk, ...]
    """each file system once"""


def available_memory_mib(meminfo: str) -> Optional[int]:
    """Return the available memory in MiB from the text of /proc/meminfo."""
    match = re.search(r"^MemAvailable:\s+([0-9]{1,18}) kB$", meminfo, re.MULTILINE)
    return int(match.group(1)) // 1024 if match else None


def nvidia_memory(listing: str) -> Iterator[DeviceMemory]:
    """Yield the devices in the output of NVIDIA_QUERY, in the order of CUDA."""
    for index, line in enumerate(line for line in listing.splitlines() if line.count(",") == 1):
        total_mib, free_mib = map(parse_count, line.split(","))
        yield DeviceMemory(backends.device_name(backends.CUDA.name, index), total_mib, free_mib)


def _pool_mib(folder: Path, pool: str) -> tuple[Optional[int], Optional[int]]:
    """Return the total and free MiB of amdgpu's memory, ``vram`` or ``gtt``."""
    total_bytes, used_bytes = (parse_count(text_of(folder / f"mem_info_{pool}_{name}")) for name in ("total", "used"))
    if total_bytes is None or used_bytes is None:
        return None, None
    return total_bytes // MIB, max(0, total_bytes - used_bytes) // MIB


def amd_memory(root: Path = ROOT) -> Iterator[DeviceMemory]:
    """Yield the graphics devices of amdgpu, named by driver and PCI address, in the order of their render nodes."""
    for device in sorted(root.glob("sys/class/drm/renderD*/device")):
        vram_mib, gtt_mib = _pool_mib(device, "vram"), _pool_mib(device, "gtt")
        if vram_mib[0] is not None:
            lines = text_of(device / "uevent").splitlines()
            uevent = dict(line.split("=", 1) for line in lines if "=" in line)
            name = f"{uevent.get('DRIVER', 'graphics')} {uevent.get('PCI_SLOT_NAME', '')}".strip()
            yield DeviceMemory(name, *vram_mib, *gtt_mib)


def uptime_seconds(root: Path = ROOT) -> Optional[int]:
    """Return the seconds since the host booted (Linux)."""
    match = re.match(r"\d{1,10}", text_of(root / "proc/uptime"))
    return int(match.group()) if match else None


def disks_of(paths: Iterable[str]) -> tuple[Disk, ...]:
    """Return the file systems that contain these paths, or would contain them if they existed."""
    disks: dict[str, Disk] = {}
    for path in paths:
        try:
            mount, status = reading.run_within(DISK_TIMEOUT_SECONDS, functools.partial(_mount_and_status, path))
        except (OSError, reading.TooSlowError):
            disks.setdefault(path, Disk(path, None, None))
            continue
        total_mib, free_mib = (blocks * status.f_frsize // MIB for blocks in (status.f_blocks, status.f_bavail))
        disks.setdefault(mount, Disk(path, total_mib, free_mib))
    return tuple(disks.values())


def _mount_and_status(path: str) -> tuple[str, os.statvfs_result]:
    mount = errors.mount_point(path)
    return str(mount), os.statvfs(mount)


def read_resources(paths: Iterable[str], root: Path = ROOT, ask: Ask = output) -> Resources:
    return Resources(
        uptime_s=uptime_seconds(root),
        memory_total_mib=hardware.read_total_memory_mib(),
        memory_free_mib=available_memory_mib(text_of(root / "proc/meminfo")),
        devices=(*nvidia_memory(ask(MEMORY_QUERY)), *amd_memory(root)),
        disks=disks_of(paths),
    )

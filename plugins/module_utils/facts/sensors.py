# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a host is at this moment: memory, temperature, power and room on disks, as far as its kernel and vendors' tools show them. Read from
files and by one query of nvidia-smi; no device and no worker is used for it. What is not shown is None."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import free_memory, hardware
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "fam15h_power")
"""Drivers of the kernel's hwmon that measure the processor (Documentation/hwmon of Linux)."""
POWER_METER = "power_meter"
"""Driver that measures what the whole host takes (ACPI 4.0)."""
CELSIUS, WATTS = (-50.0, 200.0), (0.0, 20_000.0)
"""What a sensor that works can show; others show nonsense, like 0xffff."""
DISK_SECONDS = 2.0
"""So long a file system may take to say how much room it has. A network mount whose server is gone takes for ever."""
NVIDIA_QUERY = [
    "nvidia-smi",
    "--query-gpu=memory.total,memory.free,temperature.gpu,power.draw",
    "--format=csv,noheader,nounits",
]


def _number(text: str, scale: float, bounds: tuple[float, float]) -> float | None:
    try:
        value = float(text) / scale
    except ValueError:
        return None
    return round(value, 1) if bounds[0] <= value <= bounds[1] else None


def _hottest(sensor: Path) -> float | None:
    """The highest temperature that a folder of hwmon shows, in °C."""
    shown = (_number(text_of(path), 1e3, CELSIUS) for path in sensor.glob("temp*_input"))
    return max((value for value in shown if value is not None), default=None)


def _power(sensor: Path) -> float | None:
    """Watts, which hwmon counts in millionths: an average where the driver makes one."""
    shown = (_number(text_of(sensor / name), 1e6, WATTS) for name in ("power1_average", "power1_input"))
    return next((value for value in shown if value is not None), None)


def of_host(root: Path = ROOT) -> dict:
    """``celsius`` of the processor, the hottest of several, and ``watts`` of the whole host."""
    sensors = [(text_of(path / "name").strip(), path) for path in sorted(root.glob("sys/class/hwmon/hwmon*"))]
    degrees = [_hottest(path) for name, path in sensors if name in PROCESSORS]
    powers = [_power(path) for name, path in sensors if name == POWER_METER]
    return {
        "celsius": max((value for value in degrees if value is not None), default=None),
        "watts": next((value for value in powers if value is not None), None),
    }


def nvidia(listing: str) -> Iterator[dict]:
    """Devices from what NVIDIA_QUERY prints, in the order in which CUDA counts them."""
    for index, line in enumerate(line for line in listing.splitlines() if line.count(",") == 3):
        total, free, celsius, watts = (field.strip() for field in line.split(","))
        yield {
            "name": backends.device_name(backends.CUDA.name, index),
            "total_mib": int(total) if total.isdigit() else None,
            "free_mib": int(free) if free.isdigit() else None,
            "shared_total_mib": None,
            "shared_free_mib": None,
            "celsius": _number(celsius, 1, CELSIUS),
            "watts": _number(watts, 1, WATTS),
        }


def _pool(device: Path, kind: str) -> tuple[int | None, int | None]:
    """Total and free MiB of a memory of amdgpu, ``vram`` or ``gtt`` (the host's, that it may use)."""
    total, used = (text_of(device / f"mem_info_{kind}_{part}").strip() for part in ("total", "used"))
    if not (total.isdigit() and used.isdigit()):
        return None, None
    return int(total) // MIB, max(0, int(total) - int(used)) // MIB


def drm(root: Path = ROOT) -> Iterator[dict]:
    """Graphics devices of the kernel's DRM that show memory, temperature or power, by driver and PCI address."""
    for device in sorted(root.glob("sys/class/drm/renderD*/device")):
        lines = text_of(device / "uevent").splitlines()
        told = dict(line.split("=", 1) for line in lines if "=" in line)
        sensors = sorted(device.glob("hwmon/hwmon*"))
        total, free = _pool(device, "vram")
        shared_total, shared_free = _pool(device, "gtt")
        found = {
            "total_mib": total,
            "free_mib": free,
            "shared_total_mib": shared_total,
            "shared_free_mib": shared_free,
            "celsius": next((value for value in map(_hottest, sensors) if value is not None), None),
            "watts": next((value for value in map(_power, sensors) if value is not None), None),
        }
        if any(value is not None for value in found.values()):
            yield {"name": f"{told.get('DRIVER', 'graphics')} {told.get('PCI_SLOT_NAME', '')}".strip(), **found}


def uptime(root: Path = ROOT) -> int | None:
    """Seconds since the host was started (Linux)."""
    words = text_of(root / "proc/uptime").split()
    seconds = _number(words[0], 1, (0.0, 1e10)) if words else None
    return None if seconds is None else int(seconds)


def disks(paths: Iterable[str]) -> list[dict]:
    """File systems that hold these paths, or would: ``path``, the first one there, ``total_mib`` and ``free_mib``, None where it does not say."""
    found: dict[str, dict] = {}
    for path in paths:
        try:
            mount, room = reading.within(DISK_SECONDS, functools.partial(_room, path))
        except (OSError, reading.TooSlowError):
            found.setdefault(path, {"path": path, "total_mib": None, "free_mib": None})
            continue
        total, free = (blocks * room.f_frsize // MIB for blocks in (room.f_blocks, room.f_bavail))
        found.setdefault(mount, {"path": path, "total_mib": total, "free_mib": free})
    return list(found.values())


def _room(path: str) -> tuple[str, os.statvfs_result]:
    mount = errors.file_system(path)
    return str(mount), os.statvfs(mount)


def read(paths: Iterable[str], root: Path = ROOT, ask: Ask = output) -> dict:
    """All of these, with ``memory_total_mib`` and ``memory_free_mib`` of the host.

    :param paths: folders whose disks are shown.
    """
    return {
        "uptime_s": uptime(root),
        "memory_total_mib": hardware.memory_mib(),
        "memory_free_mib": free_memory.available(text_of(root / "proc/meminfo")),
        **of_host(root),
        "devices": [*nvidia(ask(NVIDIA_QUERY)), *drm(root)],
        "disks": disks(paths),
    }

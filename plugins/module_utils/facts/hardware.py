# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processor, memory and accelerators of a host, read on it: from the kernel where that is possible, else from vendors' tools.

An accelerator is ``backend``, ``name`` (for people), ``architecture`` (what to compile for; empty where that is not known or
not needed), ``memory_mib`` (0 where it is not known) and ``unified`` (whether that is the host's own memory).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import amx as tiles
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import words

NVIDIA_QUERY = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
UNKNOWN = {"N/A", "Not Supported"}
"""What nvidia-smi prints, in brackets or without, for what a device does not have: memory of its own, for instance."""

UNIFIED_GFX = {
    "gfx902",
    "gfx909",
    "gfx90c",
    "gfx1013",
    "gfx1033",
    "gfx1035",
    "gfx1036",
    "gfx1103",
    "gfx1150",
    "gfx1151",
    "gfx1152",
    "gfx1153",
}
"""AMD processors whose graphics use the host's memory, for kernels that do not report it in the KFD topology (before 6.10)."""

LOCAL_HEAPS = {"1", "2"}
"""Types of a memory bank in the KFD topology that count as the device's own: visible to the processor, and not."""

INTEL_DRIVERS = {"i915", "xe"}
INTEL_INTEGRATED = "0000:00:02.0"
"""Where graphics inside an Intel processor always are on the PCI bus."""


def _mib(path: Path) -> int | None:
    """Of a file that holds a number of bytes."""
    text = text_of(path).strip()
    return int(text) // MIB if text.isdigit() else None


def _words(path: Path) -> dict[str, str]:
    """Of a file with a name and a value on each line."""
    return dict(line.split(None, 1) for line in text_of(path).splitlines() if len(line.split(None, 1)) == 2)


def glibc() -> str | None:
    """Its version; empty where the system has another C library, None on a Mac."""
    if sys.platform == "darwin":
        return None
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    except (OSError, ValueError):
        return ""


def newest_cuda(load: Callable[[str], Any] = ctypes.CDLL) -> str | None:
    """The newest CUDA that the host's NVIDIA driver runs, as 13.0; None where it does not say."""
    number = ctypes.c_int(0)
    try:
        failed = load("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed or number.value < 1000 else f"{number.value // 1000}.{number.value % 1000 // 10}"


def memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB


INSTRUCTIONS = (
    "mmx|3dnow|sse|pni|ssse|avx|amx|fma|f16c|xop|bmi|tbm|abm|lzcnt|popcnt|movbe|cx16|lahf|aes|vaes|sha|gfni|pclmul|vpclmul|adx"
    "|fp|asimd|sve|sme|i8mm|bf16|atomics|crc32|pmull|lrcpc|fcma|jscvt"
)
"""How flags of /proc/cpuinfo begin that stand for instructions which compilers use. Others come with kernels, microcode and hypervisors."""


ARM_CORES = {
    **{"0x41 0xd03": "Cortex-A53", "0x41 0xd05": "Cortex-A55", "0x41 0xd08": "Cortex-A72", "0x41 0xd0b": "Cortex-A76"},
    **{
        "0x41 0xd0c": "Neoverse-N1",
        "0x41 0xd40": "Neoverse-V1",
        "0x41 0xd49": "Neoverse-N2",
        "0x41 0xd4f": "Neoverse-V2",
    },
    **{
        "0x41 0xd41": "Cortex-A78",
        "0x41 0xd42": "Cortex-A78AE",
        "0x41 0xd80": "Cortex-A520",
        "0x41 0xd81": "Cortex-A720",
    },
    **{"0x41 0xd84": "Neoverse-V3", "0x41 0xd85": "Cortex-X925", "0x41 0xd87": "Cortex-A725"},
    **{"0x51 0x001": "Oryon", "0xc0 0xac3": "AmpereOne", "0xc0 0xac4": "AmpereOne"},
}
"""Implementer and part of a core, as /proc/cpuinfo has them, which names no model of ARM processors → its name."""


def arm_model(cpuinfo: str, board: str) -> str:
    """The board and the kinds of its cores; empty where neither is known.

    :param board: ``model`` of the device tree.
    """
    fields = re.findall(r"^CPU (?:implementer|part)\s*:\s*(\w+)$", cpuinfo, re.MULTILINE)
    kinds = dict.fromkeys(map(" ".join, zip(fields[::2], fields[1::2])))
    names = [board.strip("\0 \n"), *(ARM_CORES[kind] for kind in kinds if kind in ARM_CORES)]
    return ", ".join(filter(None, dict.fromkeys(names)))


def cpu(root: Path = ROOT, ask: Ask = output) -> dict:
    """``cores`` are those that the system schedules on, threads of a core counted each; ``features_id`` is the same for processors
    that run the same programs. ``amx`` is true where programs use AMX; ``unusable`` is ``["amx"]`` where it is announced and they cannot.
    Elsewhere these two are missing. ``avx512`` says whether an x86 processor has AVX-512, and is missing of others."""
    if sys.platform == "darwin":
        model, features, board = ask(["sysctl", "-n", "machdep.cpu.brand_string"]).strip(), "", ""
    else:
        text = text_of(root / "proc/cpuinfo")
        named = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
        flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
        model = named.group(1) if named else platform.machine()
        board = "" if named else arm_model(text, text_of(root / "proc/device-tree/model"))
        features = flags.group(1) if flags else ""
    used = [feature for feature in features.split() if re.match(INSTRUCTIONS, feature)]
    unusable = ["amx"] if tiles.unusable(used, root, ask) else []
    used = [feature for feature in used if not feature.startswith(tuple(unusable))]
    identity = hashlib.sha256(" ".join([model, *sorted(used)]).encode()).hexdigest()[:12]
    facts = {"model": board or model, "cores": os.cpu_count() or 1, "features_id": identity}
    amx = {"amx": True} if set(used) >= tiles.ANNOUNCED else {}
    vectors = {"avx512": "avx512f" in used} if "sse2" in used else {}
    return {**facts, **amx, **vectors, **({"unusable": unusable} if unusable else {})}


def _is_known(field: str) -> bool:
    return field.strip("[]") not in UNKNOWN


def nvidia(listing: str, memory: int) -> list[dict]:
    """From what NVIDIA_QUERY prints. A device without memory of its own (GB10) uses the host's, ``memory`` MiB."""
    devices = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            continue
        name, capability, size = fields
        if (re.fullmatch(r"\d+\.\d+", capability) or not _is_known(capability)) and (
            size.isdigit() or not _is_known(size)
        ):
            devices.append(
                {
                    "backend": words.CUDA,
                    "name": name,
                    "architecture": capability if _is_known(capability) else "",
                    "memory_mib": int(size) if size.isdigit() else memory,
                    "unified": not size.isdigit(),
                }
            )
    return devices


def nvidia_without_tools(root: Path) -> list[dict]:
    """From the driver's files, which contain neither compute capability nor memory."""
    devices = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        model = re.search(r"^Model:\s*(.+)$", text_of(path), re.MULTILINE)
        if model:
            name = model.group(1).strip()
            devices.append({"backend": words.CUDA, "name": name, "architecture": "", "memory_mib": 0, "unified": False})
    return devices


def amd(root: Path) -> dict[str, dict]:
    """Name of the render node → device, in the order of the KFD topology, which is the one in which HIP counts them."""
    devices = {}
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for properties in sorted(nodes.glob("*/properties"), key=lambda path: int(path.parent.name)):
        values = _words(properties)
        version = int(values.get("gfx_target_version", 0))
        if not version:
            continue
        architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        render = f"renderD{values.get('drm_render_minor', '').strip()}"
        banks = [_words(bank) for bank in properties.parent.glob("mem_banks/*/properties")]
        local = sum(int(bank.get("size_in_bytes", 0)) for bank in banks if bank.get("heap_type") in LOCAL_HEAPS) // MIB
        integrated = int(values.get("cpu_cores_count", 0)) > 0 or architecture in UNIFIED_GFX
        memory, unified = _amd_memory(root / "sys/class/drm" / render / "device", local, integrated)
        devices[render] = {
            "backend": words.HIP,
            "name": f"AMD {architecture}",
            "architecture": architecture,
            "memory_mib": memory,
            "unified": unified,
        }
    return devices


def _amd_memory(device: Path, local: int, integrated: bool) -> tuple[int, bool]:
    """Size in MiB, and whether that is the host's memory.

    Of graphics inside a processor, programs get whichever is larger: what the firmware has set aside, or what the kernel may lend
    them (GTT). Kernels from 6.10 on count the latter as the device's own, so that it has more than its video memory.

    :param local: MiB that the KFD topology counts as the device's own; 0 where it has none.
    :param integrated: whether the device is known to be part of a processor.
    """
    own, lent = _mib(device / "mem_info_vram_total"), _mib(device / "mem_info_gtt_total")
    if own is not None and local > own:
        return lent or local, True
    if (integrated or own == 0) and (lent or 0) > (own or 0):
        return lent or 0, True
    return own or local, False


def _drm(root: Path) -> list[tuple[str, str, dict]]:
    """PCI address, name and description of each render node, in the order of the addresses."""
    nodes = []
    for node in root.glob("sys/class/drm/renderD*"):
        lines = text_of(node / "device/uevent").splitlines()
        described = dict(line.split("=", 1) for line in lines if "=" in line)
        nodes.append((described.get("PCI_SLOT_NAME", ""), node.name, described))
    return sorted(nodes, key=lambda entry: entry[:2])


def intel(root: Path, memory: int) -> dict[str, dict]:
    """Name of the render node → device, discrete ones first, as SYCL counts them: the one with the most execution units is the first.
    The kernel does not report the memory of a discrete one; an integrated one lends half of the host's."""
    devices = []
    for slot, name, described in _drm(root):
        if described.get("DRIVER") in INTEL_DRIVERS:
            integrated = slot == INTEL_INTEGRATED
            device = {
                "backend": words.SYCL,
                "name": f"Intel graphics {described.get('PCI_ID', slot).lower()}",
                "architecture": "",
                "memory_mib": memory // 2 if integrated else 0,
                "unified": integrated,
            }
            devices.append((name, device))
    return dict(sorted(devices, key=lambda entry: bool(entry[1]["unified"])))


def vulkan(root: Path, nvidia_devices: list[dict], others: dict[str, dict]) -> list[dict]:
    """Devices with a Vulkan driver, discrete ones first, as the Vulkan loader lists them. Integrated ones are left out beside
    discrete ones, since llama.cpp leaves them out there too, at least in older builds.

    :param others: render node → device of AMD or Intel, as their own backends drive it.
    """
    devices = list(nvidia_devices)
    for slot, name, described in _drm(root):
        if name in others:
            devices.append(others[name])
        elif described.get("DRIVER") == words.AMDGPU:
            size, unified = _amd_memory(root / "sys/class/drm" / name / "device", 0, False)
            label = described.get("PCI_ID", slot).lower()
            devices.append({"name": f"AMD graphics {label}", "memory_mib": size, "unified": unified})
    discrete = [device for device in devices if not device["unified"]]
    return [{**device, "backend": words.VULKAN, "architecture": ""} for device in discrete or devices]


def apple(memory: int, ask: Ask) -> list[dict]:
    """Graphics of Apple's own processors: what the system lets them lock, or else three quarters of the memory."""
    limit = ask(["sysctl", "-n", "iogpu.wired_limit_mb"]).strip()
    return [
        {
            "backend": words.METAL,
            "name": ask(["sysctl", "-n", "machdep.cpu.brand_string"]).strip(),
            "architecture": "apple",
            "memory_mib": int(limit) if limit.isdigit() and int(limit) else memory * 3 // 4,
            "unified": True,
        }
    ]


def accelerators(memory: int, root: Path = ROOT, ask: Ask = output) -> list[dict]:
    """Every device once for each backend that could drive it.

    :param memory: MiB of the host.
    """
    if platform.system() == "Darwin":
        return apple(memory, ask) if platform.machine() == "arm64" else []
    from_nvidia = nvidia(ask(NVIDIA_QUERY), memory) or nvidia_without_tools(root)
    others = {**amd(root), **intel(root, memory)}
    return [*from_nvidia, *others.values(), *vulkan(root, from_nvidia, others)]

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processor, memory and accelerators of this host, from the kernel if possible, else from vendors' tools.

An accelerator has ``backend``, ``name`` (for people), ``architecture`` (target of compilation; empty if unknown or not needed), ``memory_mib``
(0 if unknown) and ``unified`` (whether it uses the host's memory).
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

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB, parse_count
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import amx
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import words

NVIDIA_QUERY = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
MISSING_VALUES = {"N/A", "Not Supported"}
"""Values that nvidia-smi prints, with or without brackets, for a missing property, such as dedicated memory."""

APU_GFX_PATTERN = re.compile("gfx(90[29c]|1013|103[356]|1103|115[0-3])")
"""AMD processors with integrated graphics. Kernels before 6.10 do not report these in the KFD topology."""

LOCAL_HEAPS = {"1", "2"}
"""Heap types of dedicated memory in the KFD topology: visible to the processor, and invisible."""

INTEL_DRIVERS = {"i915", "xe"}
INTEL_INTEGRATED_ADDRESS = "0000:00:02.0"
"""PCI address of the integrated graphics of any Intel processor."""


def _read_mib(path: Path) -> int | None:
    size_bytes = parse_count(text_of(path))
    return None if size_bytes is None else size_bytes // MIB


def _read_properties(path: Path) -> dict[str, str]:
    """Return the values by name from a file whose lines are a name and a value."""
    return dict(line.split(None, 1) for line in text_of(path).splitlines() if len(line.split(None, 1)) == 2)


def glibc_version() -> str | None:
    """Return the version of glibc; empty with another C library, None on a Mac."""
    if sys.platform == "darwin":
        return None
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    except (OSError, ValueError):
        return ""


def newest_cuda(load_library: Callable[[str], Any] = ctypes.CDLL) -> str | None:
    """Return the newest CUDA that the host's NVIDIA driver supports, such as 13.0; None if unknown."""
    version = ctypes.c_int(0)
    try:
        status = load_library("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status or version.value < 1000 else f"{version.value // 1000}.{version.value % 1000 // 10}"


def read_total_memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB


INSTRUCTION_FLAG_PATTERN = (
    "mmx|3dnow|sse|pni|ssse|avx|amx|fma|f16c|xop|bmi|tbm|abm|lzcnt|popcnt|movbe|cx16|lahf|aes|vaes|sha|gfni|pclmul|vpclmul|adx"
    "|fp|asimd|sve|sme|i8mm|bf16|atomics|crc32|pmull|lrcpc|fcma|jscvt"
)
"""Prefixes of the flags in /proc/cpuinfo that name instructions used by compilers. Other flags depend on kernel, microcode and hypervisor."""


ARM_CORES = {
    **{"0x41 0xd03": "Cortex-A53", "0x41 0xd05": "Cortex-A55", "0x41 0xd08": "Cortex-A72", "0x41 0xd0b": "Cortex-A76"},
    **{"0x41 0xd41": "Cortex-A78", "0x41 0xd42": "Cortex-A78AE", "0x41 0xd80": "Cortex-A520"},
    **{"0x41 0xd81": "Cortex-A720", "0x41 0xd85": "Cortex-X925", "0x41 0xd87": "Cortex-A725"},
    **{"0x41 0xd0c": "Neoverse-N1", "0x41 0xd40": "Neoverse-V1", "0x41 0xd49": "Neoverse-N2"},
    **{"0x41 0xd4f": "Neoverse-V2", "0x41 0xd84": "Neoverse-V3"},
    **{"0x51 0x001": "Oryon", "0xc0 0xac3": "AmpereOne", "0xc0 0xac4": "AmpereOne"},
}
"""Implementer and part of an ARM core in /proc/cpuinfo → its name, which /proc/cpuinfo lacks."""


def arm_name_of(cpuinfo: str, device_tree_model: str) -> str:
    """Return the names of the board and its kinds of cores; empty if both are unknown."""
    fields = re.findall(r"^CPU (?:implementer|part)\s*:\s*(\w+)$", cpuinfo, re.MULTILINE)
    kinds = dict.fromkeys(map(" ".join, zip(fields[::2], fields[1::2])))
    names = [device_tree_model.strip("\0 \n"), *(ARM_CORES[kind] for kind in kinds if kind in ARM_CORES)]
    return ", ".join(filter(None, dict.fromkeys(names)))


def read_processor(root: Path = commands.ROOT, ask: commands.Ask = commands.output) -> dict:
    """Return the facts of the processor.

    ``cores`` counts hardware threads. ``features_id`` is equal for processors that run the same programs. ``amx`` is true if programs can use AMX,
    ``unusable_features`` is ``["amx"]`` if it is announced but unusable; otherwise both are absent. ``avx512`` exists for x86 only."""
    if sys.platform == "darwin":
        model, flag_text, arm_name = ask(["sysctl", "-n", "machdep.cpu.brand_string"]).strip(), "", ""
    else:
        text = text_of(root / "proc/cpuinfo")
        model_match = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
        flags_match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
        model = model_match.group(1) if model_match else platform.machine()
        arm_name = "" if model_match else arm_name_of(text, text_of(root / "proc/device-tree/model"))
        flag_text = flags_match.group(1) if flags_match else ""
    instructions = [flag for flag in flag_text.split() if re.match(INSTRUCTION_FLAG_PATTERN, flag)]
    unusable_features = ["amx"] if amx.is_unusable(instructions, root, ask) else []
    instructions = [flag for flag in instructions if not flag.startswith(tuple(unusable_features))]
    features_id = hashlib.sha256(" ".join([model, *sorted(instructions)]).encode()).hexdigest()[:12]
    facts = {"model": arm_name or model, "cores": os.cpu_count() or 1, "features_id": features_id}
    amx_facts = {"amx": True} if set(instructions) >= amx.AMX_FLAGS else {}
    avx512_facts = {"avx512": "avx512f" in instructions} if "sse2" in instructions else {}
    return {**facts, **amx_facts, **avx512_facts, **({"unusable": unusable_features} if unusable_features else {})}


def _accelerator(backend: str, name: str, architecture: str, memory_mib: int, is_unified: bool) -> dict:
    memory = {"memory_mib": memory_mib, "unified": is_unified}
    return {"backend": backend, "name": name, "architecture": architecture, **memory}


def _is_known(field: str) -> bool:
    return field.strip("[]") not in MISSING_VALUES


def find_nvidia(listing: str, host_mib: int) -> list[dict]:
    """Return the devices in the output of NVIDIA_QUERY. A device without dedicated memory (GB10) uses ``host_mib``."""
    devices = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            continue
        name, capability, size_text = fields
        dedicated_mib = parse_count(size_text)
        if (re.fullmatch(r"\d+\.\d+", capability) or not _is_known(capability)) and (
            dedicated_mib is not None or not _is_known(size_text)
        ):
            architecture, is_unified = capability if _is_known(capability) else "", dedicated_mib is None
            device_mib = host_mib if dedicated_mib is None else dedicated_mib
            devices.append(_accelerator(words.CUDA, name, architecture, device_mib, is_unified))
    return devices


def nvidia_failure(devices: list[dict]) -> str | None:
    """Return why nvidia-smi fails, in its own words; None if it is missing or has reported a device."""
    if not commands.find("nvidia-smi") or any(
        device["architecture"] for device in devices if device["backend"] == words.CUDA
    ):
        return None
    try:
        commands.run(NVIDIA_QUERY, commands.COMMAND_TIMEOUT_SECONDS)
    except commands.CommandError as error:
        return "".join(filter(str.isprintable, " ".join(error.reason.split())))[:200]
    return None


def find_nvidia_in_driver_files(root: Path) -> list[dict]:
    """Return the devices in the driver's files, which contain neither compute capability nor memory."""
    devices = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        model_match = re.search(r"^Model:\s*(.+)$", text_of(path), re.MULTILINE)
        if model_match:
            devices.append(_accelerator(words.CUDA, model_match.group(1).strip(), "", 0, False))
    return devices


def find_amd(root: Path) -> dict[str, dict]:
    """Return the device of each render node, in the order of the KFD topology, which HIP uses."""
    devices = {}
    nodes_folder = root / "sys/class/kfd/kfd/topology/nodes"
    for path in sorted(nodes_folder.glob("*/properties"), key=lambda path: parse_count(path.parent.name) or 0):
        values = _read_properties(path)
        version = parse_count(values.get("gfx_target_version", ""))
        if not version:
            continue
        architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        render_node = f"renderD{values.get('drm_render_minor', '').strip()}"
        banks = [_read_properties(bank) for bank in path.parent.glob("mem_banks/*/properties")]
        sizes = [parse_count(bank.get("size_in_bytes", "")) for bank in banks if bank.get("heap_type") in LOCAL_HEAPS]
        kfd_mib = sum(filter(None, sizes)) // MIB
        is_integrated = bool(parse_count(values.get("cpu_cores_count", "")) or APU_GFX_PATTERN.fullmatch(architecture))
        memory = _amd_memory(root / "sys/class/drm" / render_node / "device", kfd_mib, is_integrated)
        devices[render_node] = _accelerator(words.HIP, f"AMD {architecture}", architecture, *memory)
    return devices


def _amd_memory(folder: Path, kfd_mib: int, is_integrated: bool) -> tuple[int, bool]:
    """Return the size of a device's memory in MiB, and whether the device uses the host's memory.

    Integrated graphics can use the larger of the memory that firmware has reserved and the memory that the kernel may share (GTT). Linux 6.10 and
    newer report GTT as dedicated memory, so the device has more than its video memory.

    :param kfd_mib: dedicated memory in the KFD topology, in MiB; 0 without the topology.
    :param is_integrated: whether the device is known to be part of a processor.
    """
    vram_mib, gtt_mib = _read_mib(folder / "mem_info_vram_total"), _read_mib(folder / "mem_info_gtt_total")
    if vram_mib is not None and kfd_mib > vram_mib:
        return gtt_mib or kfd_mib, True
    if (is_integrated or vram_mib == 0) and (gtt_mib or 0) > (vram_mib or 0):
        return gtt_mib or 0, True
    return vram_mib or kfd_mib, False


def _render_nodes(root: Path) -> list[tuple[str, str, dict]]:
    """Return PCI address, name and uevent of each render node, in the order of the addresses."""
    nodes = []
    for node in root.glob("sys/class/drm/renderD*"):
        lines = text_of(node / "device/uevent").splitlines()
        uevent = dict(line.split("=", 1) for line in lines if "=" in line)
        nodes.append((uevent.get("PCI_SLOT_NAME", ""), node.name, uevent))
    return sorted(nodes, key=lambda entry: entry[:2])


def find_intel(root: Path, host_mib: int) -> dict[str, dict]:
    """Return render node → device, discrete devices first, as SYCL orders them by execution units.
    The kernel does not report the memory of a discrete device. An integrated device uses half of the host's memory."""
    devices = []
    for address, node, uevent in _render_nodes(root):
        if uevent.get("DRIVER") in INTEL_DRIVERS:
            is_integrated = address == INTEL_INTEGRATED_ADDRESS
            name = f"Intel graphics {uevent.get('PCI_ID', address).lower()}"
            device_mib = host_mib // 2 if is_integrated else 0
            devices.append((node, _accelerator(words.SYCL, name, "", device_mib, is_integrated)))
    return dict(sorted(devices, key=lambda entry: bool(entry[1]["unified"])))


def find_vulkan(root: Path, nvidia_devices: list[dict], device_by_node: dict[str, dict]) -> list[dict]:
    """Return the devices with a Vulkan driver in the order of the Vulkan loader. Integrated devices are omitted if there are discrete ones, as
    in llama.cpp, at least in older builds.

    :param device_by_node: render node → device of AMD or Intel, as HIP or SYCL drives it.
    """
    devices = list(nvidia_devices)
    for address, node, uevent in _render_nodes(root):
        if node in device_by_node:
            devices.append(device_by_node[node])
        elif uevent.get("DRIVER") == words.AMDGPU:
            memory_mib, is_unified = _amd_memory(root / "sys/class/drm" / node / "device", 0, False)
            pci_id = uevent.get("PCI_ID", address).lower()
            devices.append({"name": f"AMD graphics {pci_id}", "memory_mib": memory_mib, "unified": is_unified})
    discrete_devices = [device for device in devices if not device["unified"]]
    return [{**device, "backend": words.VULKAN, "architecture": ""} for device in discrete_devices or devices]


def find_apple(host_mib: int, ask: commands.Ask) -> list[dict]:
    """Return the GPU of Apple silicon with the memory that macOS lets it wire, by default three quarters of the host's."""
    name, limit = (ask(["sysctl", "-n", key]).strip() for key in ("machdep.cpu.brand_string", "iogpu.wired_limit_mb"))
    device_mib = parse_count(limit) or host_mib * 3 // 4
    return [_accelerator(words.METAL, name, "apple", device_mib, True)]


def find_accelerators(host_mib: int, root: Path = commands.ROOT, ask: commands.Ask = commands.output) -> list[dict]:
    """Return every device once per backend that can drive it."""
    if platform.system() == "Darwin":
        return find_apple(host_mib, ask) if platform.machine() == "arm64" else []
    nvidia_devices = find_nvidia(ask(NVIDIA_QUERY), host_mib) or find_nvidia_in_driver_files(root)
    device_by_node = {**find_amd(root), **find_intel(root, host_mib)}
    return [*nvidia_devices, *device_by_node.values(), *find_vulkan(root, nvidia_devices, device_by_node)]

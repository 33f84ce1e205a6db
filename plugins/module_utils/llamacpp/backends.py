# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is known of each backend of llama.cpp, one record each: how it is built, and how its devices are named, seen and filled.
What compiles for it is in toolkits.py, which every host gets.

Nothing else names a backend, but for what reads the devices of a vendor (facts/hardware.py, memory.py, host.py) and the traps of one
backend (planner/advisories, planner/placement/devices.py). What most of them have alike is a default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Callable, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import (
    AMDGPU,
    BACKENDS,
    IK_LLAMA,
    MAINLINE,
)

COMMON_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_BLAS": "OFF",
    "GGML_RPC": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
}
"""BLAS is off because a worker would offer it as a device, which aborts on most models."""

OFF = (
    "GGML_RPC_RDMA",
    "LLAMA_BUILD_APP",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_UI",
    "LLAMA_OPENSSL",
    "LLAMA_USE_PREBUILT_UI",
)
"""What is switched off in llama.cpp. RDMA follows an installed library unless it is set. The user interface is not in the tree: npm builds it, or it is
downloaded, while everything else is compiled (#23156, #23377)."""

IK_LLAMA_OPTIONS = {
    **COMMON_OPTIONS,
    "GGML_SCHED_MAX_COPIES": "1",
    "LLAMA_BUILD_EXAMPLES": "ON",
    "LLAMA_CURL": "OFF",
}
"""Of ik_llama.cpp: its server and its worker are examples. Only the targets that are asked for are compiled, and of its flash attention
for the processor, which takes longer than everything else, only what the KV cache needs."""

RDMA = "GGML_RPC_RDMA"
"""With which RPC moves from TCP to RDMA after the handshake (#20590)."""
RDMA_DEVICES = ("char-infiniband_verbs",)
"""What a service opens for it, as systemd's DeviceAllow takes it; the kernel lets every account open them."""
TLS_OPTIONS = {MAINLINE: ("LLAMA_OPENSSL",), IK_LLAMA: ("LLAMA_OPENSSL", "LLAMA_SERVER_SSL")}
"""Fork → what has llama-server speak TLS. Of ik_llama.cpp both are set, since its trees of January to March 2026 forget the second one (its #1451)."""

QUANTS_WITH_KERNELS = {"f32", "f16", "bf16", "q8_0", "q4_0"}
"""Types of the KV cache for which flash attention is always compiled, as long as keys and values have the same."""

NEW_TYPES = frozenset({"F8_E4M3"})
"""Types of tensors that are newer than the trees that were read."""
TERNARY = frozenset({"TQ1_0", "TQ2_0"})

MATRIX_ROW_PADDING = 512
"""Some backends' kernels for quantised tensors read rows of a multiple of so many elements: the last row is longer where it is not one."""

AMX_OFF = "-U__AMX_INT8__"
"""Keeps AMX out of a build. All of it stands behind this macro, which -march=native defines whatever the GGML_AMX_… options say; -mno-amx-int8
is no option of compilers before GCC 11 and Clang 11, nor of those for a GPU."""


UNIFIED_HEAP = "radv_enable_unified_heap_on_apu"
"""Option of Mesa's Vulkan driver for AMD, of its configuration and of the environment, that shows all of a memory that is the host's too as the
device's own. It is ``true`` or ``false``; anything else is ignored (parseValue in src/util/xmlconfig.c)."""


class Form(NamedTuple):
    """How the architecture of a device is written, and how cmake receives it."""

    expression: str
    example: str
    title: str
    """What it is called."""
    remedy: str
    """What makes it known where it is missing."""
    option: str
    """Of cmake, that takes it."""
    target: Callable[[str], str]
    """The architecture as the option takes it."""
    since: Mapping[str, str]
    """Architecture → first toolkit that compiles for it."""
    left_out: tuple[tuple[str, str], ...]
    """From which toolkit on, architectures below which one are no longer compiled for."""


class Visible(NamedTuple):
    """The environment variable that hides devices from a program."""

    variable: str
    devices: str
    """Its value, around the numbers of devices with commas."""
    none: str | None
    """Its value for no device; None where no such value is known."""
    counted: bool
    """Whether it may hide devices from llama-server: programs take memory of those that they see and do not use (518 MiB of each, with CUDA),
    and count them as we do."""


class Backend(NamedTuple):
    """Everything that is known of one."""

    name: str
    preference: int
    """``auto`` takes the lowest of those that are possible."""
    device: str
    """Name under which a worker offers its devices, as ``-d`` takes it, around a number."""
    alignment: int = 32
    """Bytes that tensors are aligned to in a buffer."""
    in_ik_llama: bool = True
    """Whether ik_llama.cpp has it in a form that can be linked into programs that stand alone."""
    options: Mapping[str, str] = {}
    """Of cmake, in every build for it."""
    off: tuple[str, ...] = ()
    """What is switched off beside OFF: it follows an installed library, which a host that gets the build may not have, or is a git tag that cmake
    would fetch while it configures."""
    off_in_ik_llama: tuple[str, ...] = ()
    all_quants: str = ""
    """Option that has flash attention compiled for every pair of types of the KV cache; empty where there is none."""
    architecture: Form | None = None
    """None where programs are compiled for all devices alike."""
    any_vendor: bool = False
    """Whether it drives devices that backends of their vendors drive, too."""
    device_files: tuple[str, ...] = ()
    """What systemd must let a service open, as DeviceAllow takes it."""
    kernel_driver: str = ""
    """Of its devices, where that is one; its parameters decide how much memory these lend."""
    visible: Visible | None = None
    bus_order: tuple[str, str] | None = None
    """Variable and value that have it count devices as we do where they differ."""
    environment: Mapping[str, str] = {}
    """Of services."""
    pads_rows: bool = False
    """Whether MATRIX_ROW_PADDING holds for it."""
    no_kernels: frozenset[str] = frozenset()
    """Types of tensors with which it does not multiply, or is not known to: GGML_OP_MUL_MAT in its supports_op, the same in builds 11063 and 11434. A
    worker is not asked: ggml-rpc says that it computes everything."""
    maps_weights: bool = False
    """Whether it keeps weights in mapped pages of the file, in a buffer of another size than that of its tensors."""
    largest_buffer: int = 0
    """Bytes above which it divides what is allocated together; 0 is no limit."""


def cuda_architecture(capability: str) -> str:
    """A compute capability as CMAKE_CUDA_ARCHITECTURES takes it. Blackwell's consumer devices (12.0, 12.1) have instructions
    that are compiled for one of them alone (``a``)."""
    return capability.replace(".", "") + ("a" if capability.startswith("12.") else "") + "-real"


CPU = Backend(name="cpu", preference=9, device="CPU")

VULKAN = Backend(
    name="vulkan",
    preference=5,
    options={"GGML_VULKAN": "ON"},
    device="Vulkan{}",
    any_vendor=True,
    device_files=("char-drm", "char-nvidia*"),
    visible=Visible("GGML_VK_VISIBLE_DEVICES", "{}", "", False),
    no_kernels=NEW_TYPES,
    largest_buffer=1 << 30,
)

HIP = Backend(
    name="hip",
    preference=2,
    in_ik_llama=False,
    options={"GGML_HIP": "ON"},
    all_quants="GGML_CUDA_FA_ALL_QUANTS",
    architecture=Form(
        expression=r"gfx[0-9a-f]+(:[a-z]+[+-])*",
        example="gfx1151",
        title="architecture",
        remedy="load the kernel's driver amdgpu there",
        option="GPU_TARGETS",
        target=str,
        since={},
        left_out=(),
    ),
    device="ROCm{}",
    device_files=("char-drm", "/dev/kfd"),
    kernel_driver=AMDGPU,
    visible=Visible("HIP_VISIBLE_DEVICES", "{}", "-1", True),
    no_kernels=TERNARY | NEW_TYPES,
    alignment=128,
    pads_rows=True,
)

CUDA = Backend(
    name="cuda",
    preference=1,
    options={"GGML_CUDA": "ON"},
    off=("GGML_CUDA_NCCL", "GGML_CUDA_CCCL_VERSION"),
    off_in_ik_llama=("GGML_NCCL",),
    all_quants="GGML_CUDA_FA_ALL_QUANTS",
    architecture=Form(
        expression=r"\d+\.\d",
        example="8.6",
        title="compute capability",
        remedy="install the driver's nvidia-smi there",
        option="CMAKE_CUDA_ARCHITECTURES",
        target=cuda_architecture,
        since={
            "8.0": "11.0",
            "8.6": "11.1",
            "8.7": "11.4",
            "8.9": "11.8",
            "9.0": "11.8",
            "10.0": "12.8",
            "10.3": "12.9",
            "11.0": "13.0",
            "12.0": "12.8",
            "12.1": "12.9",
        },
        left_out=(("13.0", "7.5"), ("12.0", "5.0")),
    ),
    device="CUDA{}",
    device_files=("char-nvidia*",),
    kernel_driver="nvidia",
    visible=Visible("CUDA_VISIBLE_DEVICES", "{}", "-1", True),
    no_kernels=TERNARY | NEW_TYPES,
    bus_order=("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    alignment=128,
    pads_rows=True,
)

METAL = Backend(
    name="metal",
    preference=3,
    options={"GGML_METAL": "ON"},
    device="MTL{}",
    no_kernels=frozenset({"TQ1_0", "NVFP4"}) | NEW_TYPES,
    maps_weights=True,
)

SYCL = Backend(
    name="sycl",
    preference=4,
    in_ik_llama=False,
    options={"GGML_SYCL": "ON"},
    off=("GGML_SYCL_SUPPORT_LEVEL_ZERO_API",),
    device="SYCL{}",
    device_files=("char-drm",),
    visible=Visible("ONEAPI_DEVICE_SELECTOR", "level_zero:{}", None, False),
    no_kernels=TERNARY | NEW_TYPES,
    # Without it a device does not report its free memory.
    environment={"ZES_ENABLE_SYSMAN": "1"},
    alignment=128,
    pads_rows=True,
)
"""Of Intel's graphics, by Level Zero. Read in the tree of build 11063; it has not been run."""

RECORDS: Mapping[str, Backend] = {record.name: record for record in (CPU, VULKAN, HIP, CUDA, METAL, SYCL)}
PREFERRED = tuple(sorted({*BACKENDS} - {CPU.name}, key=lambda name: RECORDS[name].preference))
"""Those with devices, in the order in which ``auto`` takes them."""
IK_LLAMA_BACKENDS = tuple(record.name for record in RECORDS.values() if record.in_ik_llama)


def device_name(backend: str, index: int) -> str:
    """The name under which a worker offers the device, as its ``-d`` takes it."""
    return RECORDS[backend].device.format(index)


def device_files(backend: str) -> list[str]:
    """Devices that a worker of this backend opens, as systemd's DeviceAllow takes them."""
    return list(RECORDS[backend].device_files)


def hiding(backend: str) -> Visible | None:
    """How devices of this backend are hidden from llama-server; None where they need not be."""
    visible = RECORDS[backend].visible
    return visible if visible and visible.counted else None


def service_environment(backend: str, of_build: Mapping[str, str], compiled: bool) -> dict[str, str]:
    """What programs of a build need when they run.

    :param of_build: environment in which they were compiled, or that compiled programs need.
    """
    own = toolkits.TOOLKIT_OF.get(backend)
    inherited = tuple(of_build) if not compiled else own.of_services if own else ()
    return {**RECORDS[backend].environment, **{name: of_build[name] for name in inherited if name in of_build}}


def needs_all_quants(type_k: str, type_v: str, fork: str = MAINLINE) -> bool:
    """Whether flash attention on these types of the KV cache needs kernels that are not compiled unless asked for."""
    compiled = QUANTS_WITH_KERNELS - ({"q4_0"} if fork == IK_LLAMA else set())
    return type_k != type_v or type_k not in compiled


def is_on(value: str) -> bool:
    """Whether cmake takes the value of an option for true."""
    return value.upper() in ("1", "ON", "YES", "TRUE", "Y")


def without(unusable: Collection[str], given: Mapping[str, str]) -> dict[str, str]:
    """Options that leave out of the programs what the host's processor announces and programs cannot use.

    :param unusable: what the facts say of the processor.
    :param given: the operator's own options. Their flags come after ours, so that they win; whoever sets GGML_AMX_INT8 decides alone.
    """
    if "amx" not in unusable or "GGML_AMX_INT8" in given:
        return {}
    return {name: f"{AMX_OFF} {given.get(name, '')}".strip() for name in ("CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS")}


def cmake_options(
    backend: str,
    architectures: list[str],
    all_quants: bool = False,
    fork: str = MAINLINE,
    tls: bool = False,
) -> dict[str, str]:
    """Options for a build.

    :param architectures: of the host's devices for this backend: ``gfx1151``, or a compute capability like ``9.0``.
    :param all_quants: whether flash attention is compiled for every pair of types of the KV cache.
    :param fork: whose tree it is.
    :param tls: whether llama-server speaks TLS.
    """
    record = RECORDS[backend]
    if fork == IK_LLAMA:
        options = {**IK_LLAMA_OPTIONS, "GGML_IQK_FA_ALL_QUANTS": "ON" if all_quants else "OFF"}
        options.update(dict.fromkeys(record.off_in_ik_llama, "OFF"))
    else:
        options = {
            **COMMON_OPTIONS,
            **dict.fromkeys((*OFF, *record.off), "OFF"),
        }
    options.update(record.options)
    options.update(dict.fromkeys(TLS_OPTIONS[fork] if tls else (), "ON"))
    form = record.architecture
    if form:
        options[form.option] = ";".join(form.target(architecture) for architecture in architectures)
    if all_quants and record.all_quants:
        options[record.all_quants] = "ON"
    return options

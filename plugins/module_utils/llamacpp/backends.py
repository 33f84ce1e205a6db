# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Backends of llama.cpp: their build options, names of devices, and properties of device memory.
The toolkits that compile for a backend are in toolkits.py, which is sent to every host.

Other modules name a backend only to read a vendor's devices (facts/hardware.py, memory.py, host.py) or to work around its faults
(planner/advisories, planner/placement/devices.py). Properties that most backends share are defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Callable, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import toolkits, words

COMMON_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_BLAS": "OFF",
    "GGML_RPC": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
}
"""Options of every build of llama.cpp. BLAS is off because a worker would offer it as a device, which aborts with most models."""

DISABLED_OPTIONS = (
    "GGML_RPC_RDMA",
    "LLAMA_BUILD_APP",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_UI",
    "LLAMA_OPENSSL",
    "LLAMA_USE_PREBUILT_UI",
)
"""Options that are off in llama.cpp. RDMA is on by default if its library is installed. The chat page is not in the tree, and hosts neither download it nor
run npm (#23156, #23377): the controller adds it to the sources."""

IK_LLAMA_OPTIONS = {**COMMON_OPTIONS, "GGML_SCHED_MAX_COPIES": "1", "LLAMA_BUILD_EXAMPLES": "ON", "LLAMA_CURL": "OFF"}
"""Options of every build of ik_llama.cpp, whose server and worker are examples. Only the requested targets are compiled. Flash attention for the
processor takes longest to compile, so a build contains only the kernels that the KV cache needs."""

RDMA_OPTION = "GGML_RPC_RDMA"
"""Option that makes RPC switch from TCP to RDMA after the handshake (#20590)."""
RDMA_DEVICE_FILES = ("char-infiniband_verbs",)
"""Devices that a service opens for RDMA, for systemd's DeviceAllow. Every account may open them."""
TLS_OPTIONS = {words.MAINLINE: ("LLAMA_OPENSSL",), words.IK_LLAMA: ("LLAMA_OPENSSL", "LLAMA_SERVER_SSL")}
"""Fork → options that enable TLS in llama-server. ik_llama.cpp of January to March 2026 needs both (its #1451)."""

DEFAULT_FLASH_TYPES = {"f32", "f16", "bf16", "q8_0", "q4_0"}
"""KV cache types for which every build has flash attention, if keys and values have the same type."""

NEW_TYPES = frozenset({"F8_E4M3"})
"""Tensor types that are newer than the reviewed source trees."""
TERNARY_TYPES = frozenset({"TQ1_0", "TQ2_0"})

MATRIX_ROW_PADDING = 512
"""Some backends pad the last row of a quantised tensor to a multiple of this number of elements."""

NO_AMX_FLAG = "-U__AMX_INT8__"
"""Compiler flag that excludes AMX from a build. -march=native defines this macro whatever the GGML_AMX_… options are. Compilers before GCC 11 and
Clang 11, and compilers for GPUs, reject -mno-amx-int8."""
UNIFIED_HEAP = "radv_enable_unified_heap_on_apu"
"""Option of Mesa's Vulkan driver for AMD, in its configuration or the environment, that reports all shared memory as the device's. Only ``true`` and
``false`` have an effect (parseValue in src/util/xmlconfig.c)."""


class ArchitectureFormat(NamedTuple):
    """Format of a device's architecture, and the cmake option for it."""

    pattern: str
    example: str
    title: str
    """Readable name."""
    remedy: str
    """Remedy for an unknown architecture."""
    cmake_option: str
    format_target: Callable[[str], str]
    """Function that formats the architecture for that option."""
    oldest_toolkits: Mapping[str, str]
    """Architecture → oldest toolkit that compiles for it."""
    oldest_architectures: tuple[tuple[str, str], ...]
    """Toolkit version, and the oldest architecture that this and newer versions compile for."""


class VisibilityVariable(NamedTuple):
    """The environment variable that hides devices from a program."""

    name: str
    value_template: str
    """Value of the variable, with a placeholder for the comma-separated numbers of devices."""
    hide_all_value: str | None
    """Value of the variable that hides all devices; None if unknown."""
    may_hide: bool
    """Whether the plan may use it to hide devices from llama-server. Programs allocate memory on visible devices that they do not use (518 MiB each with
    CUDA), and number devices as the plan does."""


class Backend(NamedTuple):
    name: str
    preference_rank: int
    """Rank for ``auto``, which chooses the lowest possible rank."""
    device: str
    """Name of a worker's devices for ``-d``, with a placeholder for their number."""
    alignment: int = 32
    """Alignment of tensors in a buffer in bytes."""
    works_in_ik_llama: bool = True
    """Whether ik_llama.cpp can link the backend statically."""
    options: Mapping[str, str] = {}
    """cmake options of every build for it."""
    disabled_options: tuple[str, ...] = ()
    """Further options that are off, because their default depends on an installed library that another host may lack, or makes cmake fetch a git tag."""
    disabled_ik_llama_options: tuple[str, ...] = ()
    quants_option: str = ""
    """Option that compiles flash attention for every pair of KV cache types; empty without such an option."""
    architecture: ArchitectureFormat | None = None
    """Architecture to compile for; None if programs run on all devices."""
    aliases: tuple[str, ...] = ()
    """Other names of the backend: its vendor or toolkit."""
    is_vendor_neutral: bool = False
    """Whether it drives devices that their vendors' backends also drive."""
    device_files: tuple[str, ...] = ()
    """Devices that a service opens, for systemd's DeviceAllow."""
    kernel_driver: str = ""
    """Kernel driver whose parameters limit the memory of its devices; empty if there are several."""
    visibility_variable: VisibilityVariable | None = None
    bus_order_setting: tuple[str, str] | None = None
    """Variable and value that make the backend number devices in bus order, as the plan does."""
    environment: Mapping[str, str] = {}
    """Environment of services that use it."""
    pads_rows: bool = False
    """Whether it pads the last row of a quantised tensor (MATRIX_ROW_PADDING)."""
    unsupported_types: frozenset[str] = frozenset()
    """Types of tensors that it may not be able to multiply: GGML_OP_MUL_MAT in its supports_op, the same in builds 11063 and 11434. This matters for
    workers because ggml-rpc claims to support every operation."""
    maps_model_file: bool = False
    """Whether it maps weights from the file into a buffer that is larger than the tensors."""
    max_buffer_bytes: int = 0
    """Size in bytes above which it splits an allocation into several buffers; 0 for no limit."""

    @property
    def hiding_variable(self) -> VisibilityVariable | None:
        """Return the variable that hides devices of this backend from llama-server; None if hiding is unnecessary."""
        return self.visibility_variable if self.visibility_variable and self.visibility_variable.may_hide else None


def cuda_architecture(capability: str) -> str:
    """Return CMAKE_CUDA_ARCHITECTURES for a compute capability. Blackwell's consumer devices (12.0, 12.1) have instructions that need the suffix ``a``."""
    return capability.replace(".", "") + ("a" if capability.startswith("12.") else "") + "-real"


CPU = Backend(name="cpu", preference_rank=9, device="CPU")

VULKAN = Backend(
    name="vulkan",
    preference_rank=5,
    options={"GGML_VULKAN": "ON"},
    device="Vulkan{}",
    is_vendor_neutral=True,
    device_files=("char-drm", "char-nvidia*"),
    visibility_variable=VisibilityVariable("GGML_VK_VISIBLE_DEVICES", "{}", "", False),
    unsupported_types=NEW_TYPES,
    max_buffer_bytes=1 << 30,
)

HIP = Backend(
    name="hip",
    aliases=("amd", "rocm"),
    preference_rank=2,
    works_in_ik_llama=False,
    options={"GGML_HIP": "ON"},
    quants_option="GGML_CUDA_FA_ALL_QUANTS",
    architecture=ArchitectureFormat(
        pattern=r"gfx[0-9a-f]+(:[a-z]+[+-])*",
        example="gfx1151",
        title="architecture",
        remedy="load the kernel driver amdgpu on that host",
        cmake_option="GPU_TARGETS",
        format_target=str,
        oldest_toolkits={},
        oldest_architectures=(),
    ),
    device="ROCm{}",
    device_files=("char-drm", "/dev/kfd"),
    kernel_driver=words.AMDGPU,
    visibility_variable=VisibilityVariable("HIP_VISIBLE_DEVICES", "{}", "-1", True),
    unsupported_types=TERNARY_TYPES | NEW_TYPES,
    alignment=128,
    pads_rows=True,
)

CUDA = Backend(
    name="cuda",
    aliases=("nvidia",),
    preference_rank=1,
    options={"GGML_CUDA": "ON"},
    disabled_options=("GGML_CUDA_NCCL", "GGML_CUDA_CCCL_VERSION"),
    disabled_ik_llama_options=("GGML_NCCL",),
    quants_option="GGML_CUDA_FA_ALL_QUANTS",
    architecture=ArchitectureFormat(
        pattern=r"\d+\.\d",
        example="8.6",
        title="compute capability",
        remedy="install the driver's nvidia-smi on that host",
        cmake_option="CMAKE_CUDA_ARCHITECTURES",
        format_target=cuda_architecture,
        oldest_toolkits={
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
        oldest_architectures=(("13.0", "7.5"), ("12.0", "5.0")),
    ),
    device="CUDA{}",
    device_files=("char-nvidia*",),
    kernel_driver="nvidia",
    visibility_variable=VisibilityVariable("CUDA_VISIBLE_DEVICES", "{}", "-1", True),
    unsupported_types=TERNARY_TYPES | NEW_TYPES,
    bus_order_setting=("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    alignment=128,
    pads_rows=True,
)

METAL = Backend(
    name="metal",
    aliases=("apple",),
    preference_rank=3,
    options={"GGML_METAL": "ON"},
    device="MTL{}",
    unsupported_types=frozenset({"TQ1_0", "NVFP4"}) | NEW_TYPES,
    maps_model_file=True,
)

SYCL = Backend(
    name="sycl",
    aliases=("intel", "oneapi"),
    preference_rank=4,
    works_in_ik_llama=False,
    options={"GGML_SYCL": "ON"},
    disabled_options=("GGML_SYCL_SUPPORT_LEVEL_ZERO_API",),
    device="SYCL{}",
    device_files=("char-drm",),
    visibility_variable=VisibilityVariable("ONEAPI_DEVICE_SELECTOR", "level_zero:{}", None, False),
    unsupported_types=TERNARY_TYPES | NEW_TYPES,
    # Required for a device to report its free memory.
    environment={"ZES_ENABLE_SYSMAN": "1"},
    alignment=128,
    pads_rows=True,
)
"""Backend for Intel GPUs over Level Zero. It follows the sources of build 11063 and was never tested."""

BY_NAME: Mapping[str, Backend] = {backend.name: backend for backend in (CPU, VULKAN, HIP, CUDA, METAL, SYCL)}
PREFERRED_ORDER = tuple(sorted({*words.BACKENDS} - {CPU.name}, key=lambda name: BY_NAME[name].preference_rank))
"""Backends with devices, in the order of ``auto``."""
UNIVERSAL = next(backend for backend in BY_NAME.values() if backend.is_vendor_neutral)
"""Backend that supports cards of every vendor."""
NAMES_BY_ALIAS = {name: backend.name for backend in BY_NAME.values() for name in backend.aliases}
IK_LLAMA_BACKENDS = tuple(backend.name for backend in BY_NAME.values() if backend.works_in_ik_llama)


def device_name(backend: str, index: int) -> str:
    """Return the name of a worker's device for ``-d``."""
    return BY_NAME[backend].device.format(index)


def device_files(backend: str) -> list[str]:
    """Return the devices that a worker of this backend opens, for systemd's DeviceAllow."""
    return list(BY_NAME[backend].device_files)


def service_environment(backend: str, build_environment: Mapping[str, str], is_compiled: bool) -> dict[str, str]:
    """Return the environment in which programs of a build run.

    :param build_environment: environment of the compilation if the host compiles the build, otherwise that of its prebuilt programs.
    """
    toolkit = toolkits.TOOLKITS.get(backend)
    variables = tuple(build_environment) if not is_compiled else toolkit.runtime_variables if toolkit else ()
    return {
        **BY_NAME[backend].environment,
        **{name: build_environment[name] for name in variables if name in build_environment},
    }


def needs_all_quants(type_k: str, type_v: str, fork: str = words.MAINLINE) -> bool:
    """Return whether flash attention with these KV cache types needs kernels that are not compiled by default."""
    compiled_types = DEFAULT_FLASH_TYPES - ({"q4_0"} if fork == words.IK_LLAMA else set())
    return type_k != type_v or type_k not in compiled_types


def is_enabled(value: str) -> bool:
    """Return whether cmake treats the value of an option as true."""
    return value.upper() in ("1", "ON", "YES", "TRUE", "Y")


def exclusion_options(unusable_features: Collection[str], cmake_options: Mapping[str, str]) -> dict[str, str]:
    """Return cmake options that exclude instructions that the processor reports but programs cannot use.

    :param unusable_features: unusable instruction sets in the facts of the processor.
    :param cmake_options: the operator's options. Their flags come last and therefore take precedence; if GGML_AMX_INT8 is set, nothing is excluded.
    """
    if "amx" not in unusable_features or "GGML_AMX_INT8" in cmake_options:
        return {}
    return {key: f"{NO_AMX_FLAG} {cmake_options.get(key, '')}".strip() for key in ("CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS")}


def cmake_options(
    backend: str, architectures: list[str], all_quants: bool = False, fork: str = words.MAINLINE, tls: bool = False
) -> dict[str, str]:
    """Return the cmake options of a build.

    :param architectures: architectures of the host's devices for this backend: ``gfx1151``, or a compute capability like ``9.0``.
    :param all_quants: whether flash attention is compiled for every pair of KV cache types.
    :param tls: whether llama-server supports TLS.
    """
    record = BY_NAME[backend]
    if fork == words.IK_LLAMA:
        options = {**IK_LLAMA_OPTIONS, "GGML_IQK_FA_ALL_QUANTS": "ON" if all_quants else "OFF"}
        options.update(dict.fromkeys(record.disabled_ik_llama_options, "OFF"))
    else:
        options = {**COMMON_OPTIONS, **dict.fromkeys((*DISABLED_OPTIONS, *record.disabled_options), "OFF")}
    options.update(record.options)
    options.update(dict.fromkeys(TLS_OPTIONS[fork] if tls else (), "ON"))
    architecture_format = record.architecture
    if architecture_format:
        options[architecture_format.cmake_option] = ";".join(map(architecture_format.format_target, architectures))
    if all_quants and record.quants_option:
        options[record.quants_option] = "ON"
    return options

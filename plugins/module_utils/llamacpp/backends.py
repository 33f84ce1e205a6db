# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How llama.cpp is configured for each kind of device: cmake options, environment, tools, device names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities

COMMON_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_BLAS": "OFF",
    "GGML_RPC": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
}
"""BLAS is off because a worker would offer it as a device, which aborts on most models."""

OFF: dict[str, tuple[int, int | None]] = {
    "GGML_RPC_RDMA": (8802, None),
    "LLAMA_BUILD_APP": (11063, None),
    "LLAMA_BUILD_UI": (9140, None),
    "LLAMA_BUILD_WEBUI": (9140, 11062),
    "LLAMA_CURL": (0, 8071),
    "LLAMA_OPENSSL": (8072, None),
    "LLAMA_USE_PREBUILT_UI": (8644, None),
}
"""What is switched off in some trees: option → first and last build. RDMA follows an installed library unless it is set. Without
libcurl's headers old trees do not configure. From about 9140 on (#22937) the user interface is no longer in the tree: npm builds it, or it is
downloaded, while everything else is compiled (#23156, #23377)."""

OFF_WITH_CUDA: dict[str, tuple[int, int | None]] = {"GGML_CUDA_NCCL": (8644, None)}
"""The same, of CUDA. NCCL too follows an installed library, which a host that gets the build from another one may not have."""

TOOLS_SINCE = 5400
"""A build in which server and worker certainly are tools: before #13249, of May 2025, they are examples."""

IK_LLAMA_OPTIONS = {
    **COMMON_OPTIONS,
    "GGML_SCHED_MAX_COPIES": "1",
    "LLAMA_BUILD_EXAMPLES": "ON",
    "LLAMA_CURL": "OFF",
}
"""Of ik_llama.cpp: its server and its worker are examples. Only the targets that are asked for are compiled, and of its flash attention
for the processor, which takes longer than everything else, only what the KV cache needs."""


IK_LLAMA_BACKENDS = ("cpu", "cuda", "vulkan", "metal")
"""Its ROCm cannot be linked into programs that stand alone."""

IK_LLAMA_MAINTAINED = ("cpu", "cuda")

ROCWMMA = "GGML_HIP_ROCWMMA_FATTN"

OPTION_BUILDS: dict[str, tuple[int, int | None]] = {
    ROCWMMA: (4819, 10114),
    "GGML_CUDA_F16": (0, 8642),
    "GGML_CUDA_NCCL": (8644, None),
    "GGML_HIPBLAS": (0, 6169),
    "GGML_HIP_FORCE_ROCWMMA_FATTN_GFX12": (0, 8642),
    "GGML_HIP_RCCL": (8644, None),
    "GGML_HIP_UMA": (0, 6169),
    "GGML_METAL_USE_BF16": (0, 8642),
    "GGML_NNPA": (0, 8642),
    "GGML_RPC_RDMA": (8802, None),
    "GGML_SCHED_NO_REALLOC": (6171, None),
    "LLAMA_BUILD_APP": (8644, None),
    "LLAMA_BUILD_UI": (8644, None),
    "LLAMA_BUILD_WEBUI": (6171, 11062),
    "LLAMA_CURL": (0, 8071),
    "LLAMA_HIPBLAS": (0, 6169),
    "LLAMA_OPENSSL": (6171, None),
    "LLAMA_SERVER_SSL": (0, 8642),
    "LLAMA_USE_PREBUILT_UI": (8644, None),
}
"""Option → first and last build between which a tree may know it: outside, none does. Where upstream's change is not known to the
build, the bounds are the trees in which it was looked for, 6170, 8643 and 11063. An option that is not here is not judged."""

GPU_TARGETS_SINCE = 7000
"""A build that certainly reads GPU_TARGETS; 6170 reads AMDGPU_TARGETS alone, of which newer ROCm warns."""

ALL_QUANTS = "GGML_CUDA_FA_ALL_QUANTS"
"""Has flash attention compiled for every pair of types of the KV cache."""

SPIRV_HEADERS_SINCE = 8644
"""First build that may need the cmake package of SPIRV-Headers: 8643 does not, 11063 does."""

QUANTS_WITH_KERNELS = {"f32", "f16", "bf16", "q8_0", "q4_0"}
"""Types of the KV cache for which flash attention is always compiled, as long as keys and values have the same."""

TOOLKITS = ("hip", "cuda")
"""Backends whose toolkits are installed side by side, each below a prefix of its own."""

AMX_OFF = "-U__AMX_INT8__"
"""Keeps AMX out of a build. All of it stands behind this macro, which -march=native defines whatever the GGML_AMX_… options say; -mno-amx-int8
is no option of compilers before GCC 11 and Clang 11, nor of those for a GPU."""

BACKENDS = ("cpu", "vulkan", "hip", "cuda", "metal")

_DEVICE_NAMES = {"cpu": "CPU", "vulkan": "Vulkan{}", "hip": "ROCm{}", "cuda": "CUDA{}", "metal": "MTL{}"}

_TOOLKIT = {"vulkan": "glslc", "hip": "hipconfig", "cuda": "nvcc"}

_LIBRARIES = {
    "vulkan": ["vulkan-headers", "vulkan-loader"],
    "hip": ["hip-headers", "hipblas", "rocblas"],
    "cuda": ["cublas"],
}

_DEVICE_FILES = {
    "vulkan": ["char-drm", "char-nvidia*"],
    "hip": ["char-drm", "/dev/kfd"],
    "cuda": ["char-nvidia*"],
}
"""Backend → what systemd must let a service open, as DeviceAllow takes it."""


class Form(NamedTuple):
    """How the architecture of a device is written, and what tells it where it is missing."""

    expression: str
    example: str
    remedy: str


ARCHITECTURES = {
    "cuda": Form(r"\d+\.\d", "8.6", "install the driver's nvidia-smi there"),
    "hip": Form(r"gfx[0-9a-f]+(:[a-z]+[+-])*", "gfx1151", "load the kernel's driver amdgpu there"),
}

MINIMUM_CMAKE = {"cpu": (3, 14), "vulkan": (3, 19), "metal": (3, 14), "cuda": (3, 18), "hip": (3, 21)}

BUILD_TOOLS = ["cmake", "ninja", "c++"]
"""Commands every build needs."""
OPTIONAL_TOOLS = ["ccache"]
"""Commands that make builds faster."""


def device_name(backend: str, index: int) -> str:
    """The name under which a worker offers the device, as its ``-d`` takes it."""
    return _DEVICE_NAMES[backend].format(index)


def device_files(backend: str) -> list[str]:
    """Devices that a worker of this backend opens, as systemd's DeviceAllow takes them."""
    return _DEVICE_FILES.get(backend, [])


def toolkit(backend: str) -> str:
    """The command whose version tells the toolkit's."""
    return _TOOLKIT.get(backend, "c++")


def tools(backend: str) -> list[str]:
    """Commands that a build for this backend needs."""
    return BUILD_TOOLS + [tool for tool in [_TOOLKIT.get(backend)] if tool]


def libraries(backend: str, generation: int = 0, fork: str = capabilities.MAINLINE) -> list[str]:
    """What else it needs, by the names of toolchains.libraries."""
    if fork == capabilities.IK_LLAMA:
        return _LIBRARIES.get(backend, [])
    newer = ["spirv-headers"] if backend == "vulkan" and generation >= SPIRV_HEADERS_SINCE else []
    return _LIBRARIES.get(backend, []) + newer


def cuda_architecture(capability: str) -> str:
    """A compute capability as CMAKE_CUDA_ARCHITECTURES takes it. Blackwell's consumer devices (12.0, 12.1) have instructions
    that are compiled for one of them alone (``a``)."""
    return capability.replace(".", "") + ("a" if capability.startswith("12.") else "") + "-real"


def needs_all_quants(type_k: str, type_v: str, fork: str = capabilities.MAINLINE) -> bool:
    """Whether flash attention on these types of the KV cache needs kernels that are not compiled unless asked for."""
    compiled = QUANTS_WITH_KERNELS - ({"q4_0"} if fork == capabilities.IK_LLAMA else set())
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
    generation: int,
    all_quants: bool = False,
    fork: str = capabilities.MAINLINE,
) -> dict[str, str]:
    """Options for a build.

    :param architectures: of the host's devices for this backend: ``gfx1151``, or a compute capability like ``9.0``.
    :param generation: build number that tells which options the tree knows.
    :param all_quants: whether flash attention is compiled for every pair of types of the KV cache.
    :param fork: whose tree it is; generation does not count for ik_llama.cpp.
    """
    if fork == capabilities.IK_LLAMA:
        options = {**IK_LLAMA_OPTIONS, "GGML_IQK_FA_ALL_QUANTS": "ON" if all_quants else "OFF"}
        options.update({"GGML_NCCL": "OFF"} if backend == "cuda" else {})
    else:
        off = {**OFF, **(OFF_WITH_CUDA if backend == "cuda" else {})}
        options = {
            **COMMON_OPTIONS,
            "LLAMA_BUILD_EXAMPLES": "OFF" if generation >= TOOLS_SINCE else "ON",
            **{name: "OFF" for name, (first, last) in off.items() if first <= generation <= (last or generation)},
        }
    if backend == "vulkan":
        options["GGML_VULKAN"] = "ON"
    elif backend == "hip":
        options.update({"GGML_HIP": "ON", "GPU_TARGETS": ";".join(architectures)})
        if generation < GPU_TARGETS_SINCE:
            options["AMDGPU_TARGETS"] = ";".join(architectures)
    elif backend == "cuda":
        targets = ";".join(cuda_architecture(capability) for capability in architectures)
        options.update({"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": targets})
    elif backend == "metal":
        options["GGML_METAL"] = "ON"
    if all_quants and backend in ("cuda", "hip"):
        options[ALL_QUANTS] = "ON"
    return options


def backend_of(identity: str) -> str | None:
    """The backend that the id of a build names; None of a name that is no such id."""
    found = re.fullmatch(rf".+-({'|'.join(BACKENDS)})-[0-9a-f]{{8}}", identity)
    return found.group(1) if found else None

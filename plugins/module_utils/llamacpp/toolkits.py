# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Toolkit and libraries that each backend needs for a build. Hosts use this module to find them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import CUDA, HIP, MAINLINE, SYCL, VULKAN

BUILD_TOOLS = ["cmake", "ninja", "c++"]
OPTIONAL_TOOLS = ["ccache"]
"""Commands that make builds faster."""


class Library(NamedTuple):
    """Library that builds need; its name is a key in packages.yml."""

    name: str
    header: str = ""
    """Path of a header below the include folder of the system or a toolkit; empty if ``files`` is used."""
    files: tuple[str, ...] = ()
    """Patterns of files, at least one of which exists if the library is installed."""
    repository: str = ""
    """Repository of the library if a distribution lacks it."""
    needed_by_ik_llama: bool = True
    """Whether ik_llama.cpp also needs it."""


class Toolkit(NamedTuple):
    """The compiler of a backend."""

    title: str
    command: str
    """Command that reports the toolkit's version."""
    declared_version: str
    """Version that declared hosts are assumed to have."""
    repository: str = ""
    """Repository of the toolkit if a distribution lacks it."""
    command_patterns: tuple[str, ...] = ()
    """Patterns of the command below the root, for toolkits that are installed side by side under different prefixes; empty for a plain tool."""
    version_file: str = ""
    """File below the prefix with a more exact version than the command prints."""
    compilers: tuple[str, ...] = ()
    """Paths of its compiler below the prefix, the usual path first."""
    compiler_query: str = ""
    """Argument with which the command prints the folder of its compiler."""
    components: Mapping[str, bool] = {}
    """Component with a separate prefix next to the compiler's folder → whether its major version must match that of the compiler."""
    min_version: str = ""
    """Oldest version that compiles llama.cpp; empty if only the architecture matters."""
    environment: Mapping[str, str] = {}
    """Environment of a build, with ``{prefix}``, ``{compiler}``, ``{components}`` (folder of all components), ``{packages}`` and ``{libraries}`` (installed
    paths, joined by colons)."""
    prefix_variables: tuple[str, ...] = ()
    """Variables of ``environment`` that are not set for the distribution's toolkit."""
    host_cxx_variable: str = ""
    """Additional variable that names the C++ compiler of the host."""
    runtime_variables: tuple[str, ...] = ()
    """Variables of ``environment`` that programs also need at run time."""


_AMD_REPO = "AMD's ROCm repository"
_NVIDIA_REPO = "NVIDIA's CUDA repository"
_INTEL_REPO = "Intel's oneAPI repository"

TOOLKITS: Mapping[str, Toolkit] = {
    VULKAN: Toolkit(title="glslc", command="glslc", declared_version="2025.2"),
    HIP: Toolkit(
        title="ROCm",
        command="hipconfig",
        declared_version="7.2",
        repository=_AMD_REPO,
        command_patterns=("opt/rocm*/bin/hipconfig", "opt/rocm/core-*/bin/hipconfig", "usr/bin/hipconfig"),
        version_file=".info/version",
        compilers=("llvm/bin/clang", "lib/llvm/bin/clang"),
        compiler_query="-l",
        min_version="6.1",
        # llama.cpp's cmake looks for libraries in ROCM_PATH. Clang looks there for AMD's device libraries, but a distribution installs
        # them next to clang.
        environment={"HIPCXX": "{compiler}", "HIP_PATH": "{prefix}", "ROCM_PATH": "{prefix}"},
        prefix_variables=("ROCM_PATH",),
    ),
    CUDA: Toolkit(
        title="CUDA",
        command="nvcc",
        declared_version="12.9",
        repository=_NVIDIA_REPO,
        command_patterns=("usr/local/cuda*/bin/nvcc", "opt/cuda*/bin/nvcc", "usr/bin/nvcc"),
        compilers=("bin/nvcc",),
        # C++17, and cuda_bf16.h, which ggml-cuda includes (ggml-org/llama.cpp#21968).
        min_version="11.0",
        environment={"CUDACXX": "{compiler}", "CUDAToolkit_ROOT": "{prefix}"},
        host_cxx_variable="CUDAHOSTCXX",
    ),
    SYCL: Toolkit(
        title="oneAPI",
        command="icx",
        declared_version="2025.3",
        repository=_INTEL_REPO,
        command_patterns=("opt/intel/oneapi/compiler/*/bin/icx",),
        compilers=("bin/icx",),
        components={"mkl": True, "dnnl": True, "tbb": False, "umf": False, "tcm": False},
        min_version="2025.0",
        environment={
            "CC": "{compiler}",
            "CXX": "{prefix}/bin/icpx",
            "ONEAPI_ROOT": "{components}",
            "CMPLR_ROOT": "{prefix}",
            "CMAKE_PREFIX_PATH": "{packages}",
            "LD_LIBRARY_PATH": "{libraries}",
        },
        runtime_variables=("LD_LIBRARY_PATH",),
    ),
}
SIDE_BY_SIDE = {backend: toolkit for backend, toolkit in TOOLKITS.items() if toolkit.command_patterns}
"""Toolkits that a host may have in several versions, under different prefixes."""
BACKEND_LIBRARIES: Mapping[str, tuple[Library, ...]] = {
    VULKAN: (
        Library("vulkan-headers", "vulkan/vulkan.h"),
        Library(
            "vulkan-loader", files=("usr/lib*/libvulkan.so", "usr/lib/*/libvulkan.so", "usr/local/lib*/libvulkan.so")
        ),
        Library(
            "spirv-headers",
            files=tuple(
                f"{folder}/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"
                for folder in ("usr/share", "usr/local/share", "usr/lib*", "usr/lib/*", "usr/local/lib*")
            ),
            needed_by_ik_llama=False,
        ),
    ),
    HIP: (
        Library("hip-headers", "hip/hip_runtime.h", repository=_AMD_REPO),
        Library("hipblas", "hipblas/hipblas.h", repository=_AMD_REPO),
        Library("rocblas", "rocblas/rocblas.h", repository=_AMD_REPO),
    ),
    CUDA: (Library("cublas", "cublas_v2.h", repository=_NVIDIA_REPO),),
    SYCL: (
        Library("mkl", "oneapi/mkl.hpp", repository=_INTEL_REPO),
        Library("dnnl", "dnnl.hpp", repository=_INTEL_REPO),
        Library(
            "level-zero-driver",
            "",
            ("usr/lib*/libze_intel_gpu.so.1", "usr/lib/*/libze_intel_gpu.so.1"),
            "Intel's graphics driver repository",
        ),
    ),
}
OPENSSL = Library(
    "openssl",
    "",
    tuple(
        f"{folder}/include/openssl/ssl.h"
        for folder in ("usr", "usr/local", "opt/homebrew", "opt/homebrew/opt/openssl@3", "usr/local/opt/openssl@3")
    ),
)
"""Library for a llama-server with TLS. On a Mac it comes from Homebrew, which may not link it."""
IBVERBS = Library("ibverbs", "infiniband/verbs.h")
"""Library for RDMA. Its development package includes the runtime library."""
RUNTIME_LIBRARIES = {"libgomp": "", "libssl": "", "libvulkan": VULKAN, "vulkan-driver": VULKAN}
"""Runtime library of prebuilt programs → backend that needs it; empty for all backends. The Vulkan loader needs the driver's file."""
_LIBRARY_PATTERNS = ("usr/lib*/{}", "usr/lib/*/{}", "usr/local/lib*/{}")
_RUNTIME_FILES = {
    **{
        name: tuple(pattern.format(f"{name}.so.{version}") for pattern in _LIBRARY_PATTERNS)
        for name, version in (("libgomp", 1), ("libssl", 3), ("libvulkan", 1))
    },
    "vulkan-driver": ("usr/share/vulkan/icd.d/*.json", "etc/vulkan/icd.d/*.json"),
}
LIBRARIES = {
    **{library.name: library for group in BACKEND_LIBRARIES.values() for library in group},
    OPENSSL.name: OPENSSL,
    IBVERBS.name: IBVERBS,
    **{name: Library(name, files=files) for name, files in _RUNTIME_FILES.items()},
}
DECLARED_VERSIONS = {toolkit.command: toolkit.declared_version for toolkit in TOOLKITS.values()}
"""Version that declared hosts are assumed to have, by command."""


def command_of(backend: str) -> str:
    """Return the command that prints the version of the toolkit, or else of the compiler."""
    toolkit = TOOLKITS.get(backend)
    return toolkit.command if toolkit else "c++"


def libraries_of(backend: str, fork: str = MAINLINE) -> list[str]:
    """Return the libraries that a build for this backend needs."""
    backend_libraries = BACKEND_LIBRARIES.get(backend, ())
    return [library.name for library in backend_libraries if library.needed_by_ik_llama or fork == MAINLINE]

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What builds need of a host beside its compiler: the toolkit and the libraries of each backend. All that a host has to know of backends to look for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import CUDA, HIP, MAINLINE, SYCL, VULKAN

BUILD_TOOLS = ["cmake", "ninja", "c++"]
"""Commands every build needs."""
OPTIONAL_TOOLS = ["ccache"]
"""Commands that make builds faster."""


class Library(NamedTuple):
    """What a build needs beside commands, by the name that packages.yml uses."""

    name: str
    header: str = ""
    """One of its headers, below a folder for headers: the system's or a toolkit's. Empty where ``files`` tell."""
    files: tuple[str, ...] = ()
    """Patterns of which one exists where it is installed."""
    vendor: str = ""
    """Who has it where a distribution does not."""
    of_ik_llama: bool = True
    """Whether ik_llama.cpp needs it, too."""


class Toolkit(NamedTuple):
    """What compiles for a backend beside the host's own compiler."""

    title: str
    command: str
    """Its version is the toolkit's."""
    declared: str
    """Version that is taken for granted of a host which is only declared."""
    vendor: str = ""
    """Who has it where a distribution does not."""
    places: tuple[str, ...] = ()
    """Patterns of the command, below the root, where several are installed side by side, each with a prefix of its own. None of a plain tool."""
    version_file: str = ""
    """File below the prefix that says the version better than the command does."""
    compilers: tuple[str, ...] = ()
    """Where its compiler is below the prefix, the usual place first."""
    compiler_query: str = ""
    """Argument that has the command print the folder of its compiler."""
    components: Mapping[str, bool] = {}
    """Parts beside the compiler's folder, each with a prefix of its own → whether its major version has to be the compiler's."""
    minimum: str = ""
    """First version that compiles llama.cpp; empty where architectures alone decide."""
    environment: Mapping[str, str] = {}
    """Of a build: ``{prefix}``, ``{compiler}``, ``{beside}`` (folder of all components), ``{packages}`` and ``{libraries}`` (paths of what is
    installed, joined by colons)."""
    not_of_system: tuple[str, ...] = ()
    """Variables of these that do not name a toolkit of the distribution."""
    host_compiler: str = ""
    """Further variable that names the compiler of the host."""
    of_services: tuple[str, ...] = ()
    """Variables of these that programs need when they run, too."""


_AMD = "AMD's repository of ROCm"
_NVIDIA = "NVIDIA's repository of CUDA"
_INTEL = "Intel's repository of oneAPI"

TOOLKIT_OF: Mapping[str, Toolkit] = {
    VULKAN: Toolkit(title="glslc", command="glslc", declared="2025.2"),
    HIP: Toolkit(
        title="ROCm",
        command="hipconfig",
        declared="7.2",
        vendor=_AMD,
        places=("opt/rocm*/bin/hipconfig", "opt/rocm/core-*/bin/hipconfig", "usr/bin/hipconfig"),
        version_file=".info/version",
        compilers=("llvm/bin/clang", "lib/llvm/bin/clang"),
        compiler_query="-l",
        minimum="6.1",
        # ROCM_PATH is where llama.cpp's cmake looks for libraries. With a distribution's own, clang would look for AMD's device
        # libraries there, and not beside itself, where the distribution has them.
        environment={"HIPCXX": "{compiler}", "HIP_PATH": "{prefix}", "ROCM_PATH": "{prefix}"},
        not_of_system=("ROCM_PATH",),
    ),
    CUDA: Toolkit(
        title="CUDA",
        command="nvcc",
        declared="12.9",
        vendor=_NVIDIA,
        places=("usr/local/cuda*/bin/nvcc", "opt/cuda*/bin/nvcc", "usr/bin/nvcc"),
        compilers=("bin/nvcc",),
        # C++17, and cuda_bf16.h, which ggml-cuda includes (ggml-org/llama.cpp#21968).
        minimum="11.0",
        environment={"CUDACXX": "{compiler}", "CUDAToolkit_ROOT": "{prefix}"},
        host_compiler="CUDAHOSTCXX",
    ),
    SYCL: Toolkit(
        title="oneAPI",
        command="icx",
        declared="2025.3",
        vendor=_INTEL,
        places=("opt/intel/oneapi/compiler/*/bin/icx",),
        compilers=("bin/icx",),
        components={"mkl": True, "dnnl": True, "tbb": False, "umf": False, "tcm": False},
        minimum="2025.0",
        environment={
            "CC": "{compiler}",
            "CXX": "{prefix}/bin/icpx",
            "ONEAPI_ROOT": "{beside}",
            "CMPLR_ROOT": "{prefix}",
            "CMAKE_PREFIX_PATH": "{packages}",
            "LD_LIBRARY_PATH": "{libraries}",
        },
        of_services=("LD_LIBRARY_PATH",),
    ),
}
"""Backend → what compiles for it."""
SIDE_BY_SIDE = {backend: toolkit for backend, toolkit in TOOLKIT_OF.items() if toolkit.places}
"""Of which a host may have several, each below a prefix of its own."""
LIBRARIES_OF: Mapping[str, tuple[Library, ...]] = {
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
            of_ik_llama=False,
        ),
    ),
    HIP: (
        Library("hip-headers", "hip/hip_runtime.h", vendor=_AMD),
        Library("hipblas", "hipblas/hipblas.h", vendor=_AMD),
        Library("rocblas", "rocblas/rocblas.h", vendor=_AMD),
    ),
    CUDA: (Library("cublas", "cublas_v2.h", vendor=_NVIDIA),),
    SYCL: (
        Library("mkl", "oneapi/mkl.hpp", vendor=_INTEL),
        Library("dnnl", "dnnl.hpp", vendor=_INTEL),
        Library(
            "level-zero-driver",
            "",
            ("usr/lib*/libze_intel_gpu.so.1", "usr/lib/*/libze_intel_gpu.so.1"),
            "Intel's repository of drivers for graphics",
        ),
    ),
}
"""Backend → what its builds need."""
OPENSSL = Library(
    "openssl",
    "",
    tuple(
        f"{folder}/openssl/ssl.h"
        for folder in (
            "usr/include",
            "usr/local/include",
            "opt/homebrew/include",
            "opt/homebrew/opt/openssl@3/include",
            "usr/local/opt/openssl@3/include",
        )
    ),
)
"""What a llama-server with TLS is built with; on a Mac from Homebrew, which may not link it."""
IBVERBS = Library("ibverbs", "infiniband/verbs.h")
"""What RDMA is built with. A package for development brings what programs need of it when they run."""
RUNTIME = {"libgomp": "", "libssl": "", "libvulkan": VULKAN, "vulkan-driver": VULKAN}
"""What programs that others compiled need when they run → their backend, empty for each. The loader of Vulkan needs the driver's file."""
_SHARED = ("usr/lib*/{}", "usr/lib/*/{}", "usr/local/lib*/{}")
_RUNTIME_FILES = {
    **{
        name: tuple(place.format(f"{name}.so.{version}") for place in _SHARED)
        for name, version in (("libgomp", 1), ("libssl", 3), ("libvulkan", 1))
    },
    "vulkan-driver": ("usr/share/vulkan/icd.d/*.json", "etc/vulkan/icd.d/*.json"),
}
LIBRARIES = {
    **{library.name: library for own in LIBRARIES_OF.values() for library in own},
    OPENSSL.name: OPENSSL,
    IBVERBS.name: IBVERBS,
    **{name: Library(name, files=files) for name, files in _RUNTIME_FILES.items()},
}
DECLARED_TOOLS = {toolkit.command: toolkit.declared for toolkit in TOOLKIT_OF.values()}
"""Command of a toolkit → the version that is taken for granted of a host which is only declared."""
VENDORS = {
    **{toolkit.command: toolkit.vendor for toolkit in TOOLKIT_OF.values() if toolkit.vendor},
    **{library.name: library.vendor for library in LIBRARIES.values() if library.vendor},
}
"""Tool or library → who has it where a distribution does not."""


def command(backend: str) -> str:
    """The command whose version is the toolkit's: the compiler's where there is no toolkit."""
    own = TOOLKIT_OF.get(backend)
    return own.command if own else "c++"


def tools(backend: str) -> list[str]:
    """Commands that a build for this backend needs."""
    own = TOOLKIT_OF.get(backend)
    return [*BUILD_TOOLS, *([own.command] if own else [])]


def libraries(backend: str, fork: str = MAINLINE) -> list[str]:
    """What else it needs, by the names of LIBRARIES."""
    own = LIBRARIES_OF.get(backend, ())
    return [library.name for library in own if library.of_ik_llama or fork == MAINLINE]

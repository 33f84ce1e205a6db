# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How llama.cpp is configured for each kind of device: cmake options, environment, tools, device names."""

from __future__ import annotations

COMMON_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_BLAS": "OFF",
    "GGML_RPC": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
}
"""BLAS is off because a worker would offer it as a device, which aborts on most models."""

OPTIONS_SINCE = {
    "GGML_RPC_RDMA": (8802, "OFF"),
    "LLAMA_OPENSSL": (8072, "OFF"),
    "LLAMA_USE_PREBUILT_UI": (11063, "OFF"),
    "LLAMA_BUILD_APP": (11063, "OFF"),
}
"""Options that only newer trees know: option → build in which it was first seen, value. RDMA follows an installed library
unless it is set, and the prebuilt user interface is downloaded while building."""

BACKENDS = ("cpu", "vulkan", "hip", "cuda", "metal")

_DEVICE_NAMES = {"cpu": "CPU", "vulkan": "Vulkan{}", "hip": "ROCm{}", "cuda": "CUDA{}", "metal": "MTL{}"}

_TOOLS = {"vulkan": ["glslc"], "hip": ["hipconfig"], "cuda": ["nvcc"]}

_DEVICE_FILES = {
    "vulkan": ["char-drm", "char-nvidia*"],
    "hip": ["char-drm", "/dev/kfd"],
    "cuda": ["char-nvidia*"],
}
"""Backend → what systemd must let a service open, as DeviceAllow takes it."""

MINIMUM_CMAKE = {"cpu": (3, 14), "vulkan": (3, 14), "metal": (3, 14), "cuda": (3, 18), "hip": (3, 21)}

BUILD_TOOLS = ["cmake", "ninja", "c++"]
"""Commands every build needs."""


def device_name(backend: str, index: int) -> str:
    """The name under which a worker offers the device, as its ``-d`` takes it."""
    return _DEVICE_NAMES[backend].format(index)


def device_files(backend: str) -> list[str]:
    """Devices that a worker of this backend opens, as systemd's DeviceAllow takes them."""
    return _DEVICE_FILES.get(backend, [])


def backend_of_device(device: str) -> str | None:
    """The backend whose devices have names like this one, or None."""
    stem = device.rstrip("0123456789")
    return next((backend for backend, name in _DEVICE_NAMES.items() if name.format("") == stem), None)


def tools(backend: str) -> list[str]:
    """Commands that a build for this backend needs."""
    return BUILD_TOOLS + _TOOLS.get(backend, [])


def cmake_options(backend: str, architectures: list[str], generation: int) -> dict[str, str]:
    """Options for a build.

    :param architectures: of the host's devices for this backend: ``gfx1151``, or a compute capability like ``9.0``.
    :param generation: build number that tells which options the tree knows.
    """
    options = dict(COMMON_OPTIONS)
    options.update({name: value for name, (since, value) in OPTIONS_SINCE.items() if generation >= since})
    if backend == "vulkan":
        options["GGML_VULKAN"] = "ON"
    elif backend == "hip":
        options.update(
            {"GGML_HIP": "ON", "GPU_TARGETS": ";".join(architectures), "AMDGPU_TARGETS": ";".join(architectures)}
        )
    elif backend == "cuda":
        options.update(
            {
                "GGML_CUDA": "ON",
                "CMAKE_CUDA_ARCHITECTURES": ";".join(arch.replace(".", "") + "-real" for arch in architectures),
            }
        )
    elif backend == "metal":
        options["GGML_METAL"] = "ON"
    return options

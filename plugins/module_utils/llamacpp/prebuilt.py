# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Upstream's archives of compiled programs: their names and requirements.

The table follows .github/workflows/release.yml in llama-cpp-python 0.3.36 (1 October 2026). Each archive has the folder ``llama-bN`` with all programs
and their libraries, which are found by ``$ORIGIN`` and include code for each kind of processor.
"""

from __future__ import annotations

from typing import NamedTuple

REPOSITORY = "ggml-org/llama.cpp"
BASE_URL = f"https://github.com/{REPOSITORY}/releases/download"
FIRST_BUILD = 11081
"""First build whose archives have these names. 11070 had other names for CUDA 13 (13.3), and builds before 10995 lack CUDA on Linux."""
AUTO_BUILD = 11669
"""Build for ``llama_release: auto``: the build in Debian's package 0.7.0, with which clusters were tested."""
REMEDY = "compile with source: git, or set another llama_backend for that host"
ROCM_TARGETS = {
    *(f"gfx{name}" for name in ("908", "90a", "942", "950", 1010, 1011, 1012, 1150, 1151, 1152, 1200, 1201)),
    *(f"gfx{name}" for name in (*range(1030, 1037), *range(1100, 1104))),
}
"""Architectures that the archive for ROCm supports."""


class Asset(NamedTuple):
    """A kind of archive."""

    system: str
    architectures: tuple[str, ...]
    backends: tuple[str, ...]
    platform: str
    """Part of the file name between ``llama-bN-bin-`` and the extension."""
    oldest_system: str
    """Oldest supported version of glibc, or of Darwin (22.4 is macOS 13.3)."""
    cuda: str = ""
    """CUDA version that the driver must support. Upstream has a separate archive with CUDA's libraries."""
    min_capability: str = ""
    """Lowest compute capability that it supports."""
    rocm: str = ""
    """Major version of ROCm that the host needs: no archive has its libraries."""


X64, ARM64 = ("x86_64", "amd64"), ("aarch64", "arm64")
ASSETS = (
    Asset("Linux", X64, ("cpu",), "ubuntu-x64", "2.35"),
    Asset("Linux", ARM64, ("cpu",), "ubuntu-arm64", "2.39"),
    Asset("Linux", X64, ("vulkan",), "ubuntu-vulkan-x64", "2.35"),
    Asset("Linux", ARM64, ("vulkan",), "ubuntu-vulkan-arm64", "2.39"),
    Asset("Linux", X64, ("cuda",), "ubuntu-cuda-13.4-x64", "2.39", cuda="13.4", min_capability="7.5"),
    Asset("Linux", X64, ("cuda",), "ubuntu-cuda-12.8-x64", "2.39", cuda="12.8", min_capability="5.0"),
    Asset("Linux", ARM64, ("cuda",), "ubuntu-cuda-13.4-arm64", "2.39", cuda="13.4", min_capability="7.5"),
    Asset("Linux", X64, ("hip",), "ubuntu-rocm-10.0-x64", "2.39", rocm="10"),
    Asset("Darwin", ARM64, ("metal", "cpu"), "macos-arm64", "22.4"),
    Asset("Darwin", X64, ("cpu",), "macos-x64", "22.4"),
)
"""Archives in order of preference. SYCL is omitted because its programs have no worker; the collection has no backends for OpenVINO and Snapdragon."""

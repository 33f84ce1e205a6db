# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Upstream's archives of compiled programs: their names, and which of them runs on a host.

The table is .github/workflows/release.yml as llama-cpp-python 0.3.36 packs it (1 October 2026). Each archive has the folder ``llama-bN`` with all
programs and the libraries that they find by ``$ORIGIN``, a code path for each kind of processor included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import versions
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

REPOSITORY = "ggml-org/llama.cpp"
URL = f"https://github.com/{REPOSITORY}/releases/download"
SINCE = 11081
"""First build whose archives have the names below: 11070 had others for CUDA 13 (13.3), builds before 10995 none for CUDA on Linux."""
TESTED = 11669
"""The build that ``llama_release: auto`` takes: that of Debian's package 0.7.0, with which clusters were tested."""
INSTEAD = "compile it with source: git, or set llama_backend there to another backend"
GFX = {
    *(f"gfx{name}" for name in ("908", "90a", "942", "950", 1010, 1011, 1012, 1150, 1151, 1152, 1200, 1201)),
    *(f"gfx{name}" for name in (*range(1030, 1037), *range(1100, 1104))),
}
"""Devices that the archive for ROCm has code for."""


class Machine(NamedTuple):
    """What decides which archive runs on a host. None where it is not known, as of a host on paper: it is taken to fit."""

    name: str
    system: str
    architecture: str
    system_version: str | None
    """Of glibc, or of a Mac's kernel; empty with another C library."""
    devices: tuple[str, ...] = ()
    """Architectures of its devices for the backend: compute capabilities, or gfx1151."""
    cuda: str | None = None
    """The newest that its NVIDIA driver runs."""
    rocm: str | None = None
    """Version of its ROCm; empty without one."""


class Asset(NamedTuple):
    """One kind of archive."""

    system: str
    architectures: tuple[str, ...]
    backends: tuple[str, ...]
    name: str
    """Between ``llama-bN-bin-`` and the ending."""
    oldest: str
    """Version of glibc, that of the system it is built on, or of Darwin (22.4 is macOS 13.3)."""
    cuda: str = ""
    """That its driver has to run: code for some devices is compiled by the driver. Its libraries are in an archive of their own."""
    capability: str = ""
    """The oldest that it has code for."""
    rocm: str = ""
    """Major version that the host has to have: its libraries are in no archive."""


X64, ARM64 = ("x86_64", "amd64"), ("aarch64", "arm64")
ASSETS = (
    Asset("Linux", X64, ("cpu",), "ubuntu-x64", "2.35"),
    Asset("Linux", ARM64, ("cpu",), "ubuntu-arm64", "2.39"),
    Asset("Linux", X64, ("vulkan",), "ubuntu-vulkan-x64", "2.35"),
    Asset("Linux", ARM64, ("vulkan",), "ubuntu-vulkan-arm64", "2.39"),
    Asset("Linux", X64, ("cuda",), "ubuntu-cuda-13.4-x64", "2.39", cuda="13.4", capability="7.5"),
    Asset("Linux", X64, ("cuda",), "ubuntu-cuda-12.8-x64", "2.39", cuda="12.8", capability="5.0"),
    Asset("Linux", ARM64, ("cuda",), "ubuntu-cuda-13.4-arm64", "2.39", cuda="13.4", capability="7.5"),
    Asset("Linux", X64, ("hip",), "ubuntu-rocm-10.0-x64", "2.39", rocm="10"),
    Asset("Darwin", ARM64, ("metal", "cpu"), "macos-arm64", "22.4"),
    Asset("Darwin", X64, ("cpu",), "macos-x64", "22.4"),
)
"""Of the same kind, the first that runs is taken. Left out: SYCL, whose programs have no worker; OpenVINO and Snapdragon, which are no backends here."""


def needs_rocm(backend: str) -> bool:
    return any(asset.rocm for asset in ASSETS if backend in asset.backends)


def archives_of(machine: Machine, backend: str, build: int) -> tuple[str, ...]:
    """Names of the archives that a host installs: programs, then further libraries.

    :raises Refusal: none runs there.
    """
    if build < SINCE:
        raise Refusal(
            f"llama_release has the build {build}, and the names of upstream's archives are known from {SINCE} on: use a newer build, or source: "
            "binary with url and checksum"
        )
    kinds = [
        asset
        for asset in ASSETS
        if asset.system == machine.system and machine.architecture in asset.architectures and backend in asset.backends
    ]
    if not kinds:
        raise Refusal(
            f"{machine.name} has the backend {backend}, for which upstream has no archive with an RPC worker on {machine.system} {machine.architecture} "
            f"(llama_release, source: prebuilt): {INSTEAD}"
        )
    problems = [next(_problems(machine, asset), None) for asset in kinds]
    if all(problems):
        raise Refusal(f"{machine.name} {problems[-1]}")
    asset = kinds[problems.index(None)]
    programs = f"llama-b{build}-bin-{asset.name}.tar.gz"
    return (programs, f"cudart-{programs}") if asset.cuda else (programs,)


def _problems(machine: Machine, asset: Asset) -> Iterator[str]:
    """Why an archive does not run on a host, after its name, and what to do."""
    archive = f"upstream's archive {asset.name} (llama_release, source: prebuilt)"
    if machine.system_version is not None and versions.numbers(machine.system_version) < versions.numbers(asset.oldest):
        kind = "Darwin" if machine.system == "Darwin" else "glibc"
        found = f"{kind} {machine.system_version}" if machine.system_version else "another C library than glibc"
        yield f"has {found}, and {archive} needs {kind} {asset.oldest}: use a newer distribution there, or compile it with source: git"
    if asset.cuda and machine.cuda is not None and versions.numbers(machine.cuda) < versions.numbers(asset.cuda):
        yield f"has an NVIDIA driver for CUDA {machine.cuda}, and {archive} needs one for {asset.cuda}: update the driver, or {INSTEAD}"
    old = [name for name in machine.devices if name and versions.numbers(name) < versions.numbers(asset.capability)]
    if old:
        yield f"has a device of compute capability {old[0]}, and {archive} has code from {asset.capability} on: {INSTEAD}"
    if asset.rocm and machine.rocm is not None and versions.numbers(machine.rocm)[:1] != versions.numbers(asset.rocm):
        found = f"ROCm {machine.rocm}" if machine.rocm else "no ROCm"
        yield f"has {found}, and {archive} needs the libraries of ROCm {asset.rocm}: install that, or {INSTEAD}"
    unknown = [name for name in machine.devices if asset.rocm and name.partition(":")[0] not in GFX]
    if unknown:
        yield f"has a device {unknown[0]}, for which {archive} has no code: {INSTEAD}"

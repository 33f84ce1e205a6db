# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Toolkits, compilers and libraries: which ones a host has.

A toolchain is ``backend`` (hip, cuda; cpu for a compiler), ``prefix``, ``links`` (other names of the prefix), ``version``,
``compiler`` (path, or None), ``libraries`` (names of those of its backend that lie below the prefix) and ``rocwmma`` (None, or
``version`` and ``architectures`` of its headers).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, versions
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

COMPILERS = (
    "usr/local/bin/g++",
    "opt/gcc*/bin/g++",
    "opt/rh/gcc-toolset-*/root/usr/bin/g++",
    "usr/lib/llvm-*/bin/clang++",
    "opt/llvm*/bin/clang++",
)
"""Where compilers are installed beside the distribution's default."""

HEADERS = {
    "vulkan-headers": "vulkan/vulkan.h",
    "hip-headers": "hip/hip_runtime.h",
    "hipblas": "hipblas/hipblas.h",
    "rocblas": "rocblas/rocblas.h",
    "cublas": "cublas_v2.h",
}
"""Library → one of its headers, below a folder for headers: the system's or a toolkit's."""
OTHER_LIBRARIES = {
    "vulkan-loader": ("usr/lib*/libvulkan.so", "usr/lib/*/libvulkan.so", "usr/local/lib*/libvulkan.so"),
    "spirv-headers": tuple(
        f"{folder}/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"
        for folder in ("usr/share", "usr/local/share", "usr/lib*", "usr/lib/*", "usr/local/lib*")
    ),
}
PRESENT = "present"
"""Stands for the version of a library that was found."""


def _on_host(root: Path, path: Path) -> str:
    """A path below the root as the host names it."""
    return "/" + os.path.relpath(path, os.path.realpath(root))


def _prefixes(root: Path, patterns: tuple[str, ...]) -> dict[Path, list[str]]:
    """Real folder of each installation → other names of it. A link from /usr/bin to another one is none of its own."""
    found: dict[Path, list[str]] = {}
    for program in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        named = program.parent.parent
        real = Path(os.path.realpath(named))
        elsewhere = named == root / "usr" and Path(os.path.realpath(program)).parent != real / "bin"
        if program.exists() and not elsewhere:
            name = "/" + str(named.relative_to(root))
            found.setdefault(real, []).extend([name] if name != _on_host(root, real) else [])
    return found


def rocwmma(include: Path) -> dict | None:
    """Version of the headers, and the architectures that they compile for: they stop the compiler for any other. None of them where the
    internal headers are not there, as in Debian's librocwmma-dev 7.2.4-1~exp1."""
    text = text_of(include / "rocwmma/rocwmma-version.hpp") + text_of(include / "rocwmma/internal/rocwmma-version.hpp")
    if not text:
        return None
    config = text_of(include / "rocwmma/internal/config.hpp")
    parts = [re.search(rf"#define\s+ROCWMMA_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return {
        "version": ".".join(part.group(1) for part in parts if part) or "unknown",
        "architectures": sorted(set(re.findall(r"defined\(__(gfx[0-9a-f]+)__\)", config))),
    }


def _include_folders(prefix: str) -> list[str]:
    """Patterns of the folders for headers of what is installed at a prefix."""
    folders = [f"{prefix}/{place}" for place in ("include", "targets/*/include")]
    return [*folders, "/usr/local/include"] if prefix == names.SYSTEM else folders


def _brought(root: Path, prefix: str, backend: str) -> list[str]:
    """Libraries of a backend whose headers are those of the toolkit at the prefix, not of another one on the same host."""
    return [
        name
        for name in backends.libraries(backend)
        if any(next(root.glob(f"{folder[1:]}/{HEADERS[name]}"), None) for folder in _include_folders(prefix))
    ]


def _rocm(root: Path, ask: Ask) -> list[dict]:
    found = []
    places = ("opt/rocm*/bin/hipconfig", "opt/rocm/core-*/bin/hipconfig", "usr/bin/hipconfig")
    for folder, links in _prefixes(root, places).items():
        prefix = _on_host(root, folder)
        hipconfig = f"{prefix}/bin/hipconfig"
        own = next((path for path in ("llvm/bin", "lib/llvm/bin") if (folder / path / "clang").exists()), None)
        clang = f"{prefix}/{own}" if own else ask([hipconfig, "-l"]).strip()
        found.append(
            {
                "backend": "hip",
                "prefix": prefix,
                "links": links,
                "version": versions.first(text_of(folder / ".info/version") or ask([hipconfig, "--version"])),
                "compiler": f"{clang}/clang" if clang else None,
                "libraries": _brought(root, prefix, "hip"),
                "rocwmma": rocwmma(folder / "include"),
            }
        )
    return found


def _cuda(root: Path, ask: Ask) -> list[dict]:
    found = _prefixes(root, ("usr/local/cuda*/bin/nvcc", "opt/cuda*/bin/nvcc", "usr/bin/nvcc"))
    return [
        {
            "backend": "cuda",
            "prefix": _on_host(root, folder),
            "links": links,
            "version": versions.first(ask([_on_host(root, folder / "bin/nvcc"), "--version"])),
            "compiler": _on_host(root, folder / "bin/nvcc"),
            "libraries": _brought(root, _on_host(root, folder), "cuda"),
            "rocwmma": None,
        }
        for folder, links in found.items()
    ]


def _compilers(root: Path, ask: Ask) -> list[dict]:
    found: list[dict] = []
    for pattern in COMPILERS:
        for path in sorted(root.glob(pattern)):
            program = "/" + str(path.relative_to(root))
            found.append(
                {
                    "backend": "cpu",
                    "prefix": str(Path(program).parent.parent),
                    "links": [],
                    "version": versions.first(ask([program, "-dumpversion"])),
                    "compiler": program,
                    "libraries": [],
                    "rocwmma": None,
                }
            )
    return found


def find(root: Path = ROOT, ask: Ask = output) -> list[dict]:
    """Every ROCm, CUDA and further compiler of the host that works, oldest first."""
    found = [*_rocm(root, ask), *_cuda(root, ask), *_compilers(root, ask)]
    working = [toolchain for toolchain in found if toolchain["version"]]
    return sorted(working, key=lambda entry: (entry["backend"], versions.numbers(entry["version"]), entry["prefix"]))


def libraries(installed: list[dict], root: Path = ROOT) -> dict[str, str | None]:
    """Library → PRESENT, or None where no toolkit of the host has what is needed to build with it."""
    folders = [
        folder
        for prefix in (names.SYSTEM, *(entry["prefix"] for entry in installed))
        for folder in _include_folders(prefix)
    ]
    places = {name: [f"{folder[1:]}/{header}" for folder in folders] for name, header in HEADERS.items()}
    return {
        name: PRESENT if any(next(root.glob(pattern), None) for pattern in patterns) else None
        for name, patterns in {**places, **OTHER_LIBRARIES}.items()
    }

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Toolkits, compilers and libraries: which ones a host has, and which of them builds llama.cpp there.

A toolchain is ``backend`` (hip, cuda; cpu for a compiler), ``prefix``, ``links`` (other names of the prefix), ``version``,
``compiler`` (path, or None), ``libraries`` (names of those of its backend that lie below the prefix) and ``rocwmma`` (None, or
``version`` and ``architectures`` of its headers).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.commands import output
from ansible_collections.llamacpp.cluster.plugins.module_utils.hardware import ROOT, Ask, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.refusal import Refusal

TITLES = {"hip": "ROCm", "cuda": "CUDA", "cpu": "a compiler"}
TOOLKITS = ("hip", "cuda")
"""Backends whose toolkits are installed side by side, each below a prefix of its own."""

SYSTEM = "/usr"
"""Prefix of what the distribution brings."""

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

MINIMUM_ROCM = "6.1"
ROCWMMA_SINCE = {"gfx1151": "7.2"}
"""Architecture → first ROCm whose rocWMMA supports it, where the headers themselves cannot be read."""

CUDA_SINCE = {
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
}
"""Compute capability → first CUDA that compiles for it."""
CUDA_LEFT_OUT = (("13.0", "7.5"), ("12.0", "5.0"))
"""From which CUDA on, capabilities below which one are no longer compiled for."""
MINIMUM_COMPILER = "9"
"""First GCC whose standard library holds std::filesystem, which llama.cpp uses."""


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def first_version(text: str) -> str | None:
    """The first version number in a text, or a line that is only a number."""
    found = re.search(r"\d+(\.\d+)+|^\d+$", text, re.MULTILINE)
    return found.group(0) if found else None


# What is there


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
    return [*folders, "/usr/local/include"] if prefix == SYSTEM else folders


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
                "version": first_version(text_of(folder / ".info/version") or ask([hipconfig, "--version"])),
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
            "version": first_version(ask([_on_host(root, folder / "bin/nvcc"), "--version"])),
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
                    "version": first_version(ask([program, "-dumpversion"])),
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
    return sorted(working, key=lambda entry: (entry["backend"], numbers(entry["version"]), entry["prefix"]))


def libraries(installed: list[dict], root: Path = ROOT) -> dict[str, str | None]:
    """Library → PRESENT, or None where no toolkit of the host has what is needed to build with it."""
    folders = [
        folder for prefix in (SYSTEM, *(entry["prefix"] for entry in installed)) for folder in _include_folders(prefix)
    ]
    places = {name: [f"{folder[1:]}/{header}" for folder in folders] for name, header in HEADERS.items()}
    return {
        name: PRESENT if any(next(root.glob(pattern), None) for pattern in patterns) else None
        for name, patterns in {**places, **OTHER_LIBRARIES}.items()
    }


# What builds llama.cpp


def lacking(toolkit: dict) -> list[str]:
    """Libraries of its backend that a toolkit does not have. Of one that was not looked at, none."""
    if "libraries" not in toolkit:
        return []
    return [name for name in backends.libraries(toolkit["backend"]) if name not in toolkit["libraries"]]


def _unfit(toolchain: dict, architectures: list[str]) -> str | None:
    """Why this one cannot build for these architectures, with what could; None where it can."""
    own = f"{TITLES[toolchain['backend']]} {toolchain['version']}"
    version = numbers(toolchain["version"])
    if toolchain["backend"] == "hip" and version < numbers(MINIMUM_ROCM):
        return f"{own}, too old for llama.cpp: install ROCm {MINIMUM_ROCM} or newer"
    if toolchain["backend"] == "cuda":
        for architecture in architectures:
            since = CUDA_SINCE.get(architecture)
            if since and version < numbers(since):
                return f"{own}, too old for compute capability {architecture}: install CUDA {since} or newer"
            for first, least in CUDA_LEFT_OUT:
                if version >= numbers(first) and numbers(architecture) < numbers(least):
                    return f"{own}, which no longer compiles for compute capability {architecture}: install CUDA older than {first}"
    return None


def _named(
    name: str, backend: str, wanted: str, facts: dict, beside: Collection[str]
) -> tuple[dict | None, dict | None]:
    """Toolkit and compiler at the prefix that the operator names, which may be meant for another backend of the host. Of a host that
    was not asked, the prefix is believed."""
    prefix = wanted.rstrip("/") or "/"
    where = f"llama_build_toolchain of {name} is {wanted}"
    installed = facts.get("toolchains")
    if installed is None:
        return next(iter(_told(backend, facts, prefix)), None), None
    there = [toolchain for toolchain in installed if prefix in (toolchain["prefix"], *toolchain["links"])]
    if not there:
        known = ", ".join(toolchain["prefix"] for toolchain in installed) or "none was found"
        raise Refusal(
            f"{where}, and neither ROCm, CUDA nor a compiler was found there: use the prefix of one that is installed ({known}), "
            "or leave it out"
        )
    by_backend = {toolchain["backend"]: toolchain for toolchain in there}
    toolkit = by_backend.get(backend) if backend in TOOLKITS else None
    if not toolkit and any(other in by_backend for other in beside):
        return None, None
    if not toolkit and "cpu" not in by_backend:
        raise Refusal(
            f"{where}, which is {TITLES[there[0]['backend']]}, and llama.cpp is built there for {backend}: "
            f"name a toolchain for {backend}, or set llama_backend"
        )
    return toolkit, by_backend.get("cpu")


def _told(backend: str, facts: dict, prefix: str | None) -> list[dict]:
    """A toolkit of which the version alone is known, if that; its compiler is where it usually is."""
    version = facts["toolchain"].get(backends.toolkit(backend))
    if backend not in TOOLKITS or not version:
        return []
    compiler = f"{prefix}/{'llvm/bin/clang' if backend == 'hip' else 'bin/nvcc'}" if prefix else None
    return [{"backend": backend, "prefix": prefix, "version": version, "compiler": compiler, "rocwmma": None}]


def _newest(name: str, offered: list[dict], architectures: list[str], wanted: str | None) -> dict | None:
    """The last of these toolkits that fits and has its libraries, or else the distribution's, to which packages bring them; None where
    there is none at all, as before its packages are installed."""
    fitting = [toolkit for toolkit in offered if not _unfit(toolkit, architectures)]
    if offered and not fitting:
        raise Refusal(
            f"{name} has {_unfit(offered[-1], architectures)}"
            + (f" (llama_build_toolchain is {wanted})" if wanted else "")
            + ", or set llama_backend to another one"
        )
    whole = [toolkit for toolkit in fitting if not lacking(toolkit)]
    whole = whole or [toolkit for toolkit in fitting if toolkit["prefix"] == SYSTEM]
    if fitting and not whole:
        title = TITLES[fitting[-1]["backend"]]
        raise Refusal(
            f"{name} has {title} {fitting[-1]['version']} in {fitting[-1]['prefix']} without {', '.join(lacking(fitting[-1]))}"
            + (f" (llama_build_toolchain is {wanted})" if wanted else "")
            + f": install their development packages for that {title}, name one that has them in llama_build_toolchain, or set llama_backend"
            " to another one"
        )
    return whole[-1] if whole else None


def chosen(
    name: str, backend: str, facts: dict, wanted: str | None, architectures: list[str], beside: Collection[str] = ()
) -> dict:
    """What a host builds with: the toolkit that the operator names, or else the newest that fits the devices and has its libraries.

    :param facts: of the host; ``toolchains`` is missing or None where it was not asked.
    :param wanted: ``llama_build_toolchain``.
    :param architectures: of the host's devices for this backend.
    :param beside: the host's other backends.
    :returns: ``toolkit`` (a toolchain, or None), ``version`` of the toolkit and ``compiler`` (versions, None where not known),
        ``environment`` of the build.
    :raises Refusal: none of them fits.
    """
    toolkit, compiler = _named(name, backend, wanted, facts, beside) if wanted else (None, None)
    if backend in TOOLKITS:
        found = [toolchain for toolchain in facts.get("toolchains") or [] if toolchain["backend"] == backend]
        offered = [toolkit] if toolkit else found or _told(backend, facts, None)
        toolkit = _newest(name, offered, architectures, wanted if toolkit else None)
    version = compiler["version"] if compiler else facts["toolchain"].get("c++")
    _recent_enough(name, facts, version)
    return {
        "toolkit": toolkit,
        "version": toolkit["version"] if toolkit else facts["toolchain"].get(backends.toolkit(backend)),
        "compiler": version,
        "environment": {**_compiler_environment(compiler, backend), **_toolkit_environment(toolkit)},
    }


def _recent_enough(name: str, facts: dict, version: str | None) -> None:
    if version and facts["system"] == "Linux" and numbers(version) < numbers(MINIMUM_COMPILER):
        raise Refusal(
            f"{name} has the C++ compiler {version}, too old for llama.cpp: install GCC {MINIMUM_COMPILER} or newer, and name its "
            "prefix in llama_build_toolchain, or use a release that is compiled already, with source: binary or package"
        )


def _compiler_environment(compiler: dict | None, backend: str) -> dict[str, str]:
    if not compiler:
        return {}
    cxx = compiler["compiler"]
    environment = {"CC": cxx.replace("clang++", "clang").replace("g++", "gcc"), "CXX": cxx}
    return {**environment, **({"CUDAHOSTCXX": cxx} if backend == "cuda" else {})}


def _toolkit_environment(toolkit: dict | None) -> dict[str, str]:
    """CUDAToolkit_ROOT and ROCM_PATH are where llama.cpp's cmake looks for the toolkit's libraries. ROCM_PATH does not name a
    distribution's own: clang would then look for AMD's device libraries there, and not beside itself, where the distribution has them."""
    if not toolkit or not toolkit["prefix"]:
        return {}
    variable = {"hip": "HIPCXX", "cuda": "CUDACXX"}[toolkit["backend"]]
    compiler = {variable: toolkit["compiler"]} if toolkit["compiler"] else {}
    if toolkit["backend"] == "cuda":
        return {**compiler, "CUDAToolkit_ROOT": toolkit["prefix"]}
    variables = ["HIP_PATH"] if toolkit["prefix"] == SYSTEM else ["HIP_PATH", "ROCM_PATH"]
    return {**compiler, **dict.fromkeys(variables, toolkit["prefix"])}


def _check_declared_rocwmma(where: str, toolkit: dict | None, architectures: list[str]) -> None:
    """Of a host that was not asked, the declared version of ROCm stands for that of the headers."""
    if not toolkit or not toolkit["version"]:
        return
    for target in architectures:
        since = ROCWMMA_SINCE.get(target.split(":", maxsplit=1)[0])
        if since and numbers(toolkit["version"]) < numbers(since):
            raise Refusal(
                f"{where}, and rocWMMA supports {target} from ROCm {since} on, while ROCm {toolkit['version']} is declared there: install a "
                "newer ROCm with rocWMMA and give its version in llama_hardware.toolchain, or leave it out"
            )


def check_rocwmma(name: str, toolkit: dict | None, generation: int, architectures: list[str]) -> None:
    """Refuses rocWMMA where the tree, the headers or the architecture do not allow it."""
    option = backends.ROCWMMA
    where = f"llama_build_cmake_options of {name} has {option}"
    first, last = backends.OPTION_BUILDS[option]
    if not first <= generation <= (last or generation):
        raise Refusal(f"{where}, which build {generation} does not know (builds {first} to {last} do): leave it out")
    if not toolkit or "links" not in toolkit:
        _check_declared_rocwmma(where, toolkit, architectures)
        return
    headers = toolkit["rocwmma"]
    if not headers:
        raise Refusal(
            f"{where}, and there are no headers of rocWMMA in {toolkit['prefix']}/include: install rocWMMA's development package for "
            f"ROCm {toolkit['version']}, or leave it out"
        )
    if not headers["architectures"]:
        raise Refusal(
            f"{where}, and the headers of rocWMMA {headers['version']} in {toolkit['prefix']}/include are not whole, rocwmma/internal/config.hpp "
            "is missing or names no architecture: install them from AMD's packages, or leave it out"
        )
    lacking = [target for target in architectures if target.split(":")[0] not in headers["architectures"]]
    if lacking:
        raise Refusal(
            f"{where}, and rocWMMA {headers['version']} in {toolkit['prefix']}/include does not support {', '.join(lacking)} (it supports "
            f"{', '.join(headers['architectures'])}): install a newer ROCm with rocWMMA and name it in llama_build_toolchain, or leave it out"
        )

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Upstream's archives that a host installs (``source: prebuilt``), and what their programs need there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import versions
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, prebuilt, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host, Server


def archives_of(host: Host, backend: str, build: int, server: Server) -> tuple[str, ...]:
    """Return the names of the archives that a host installs.

    :raises Refusal: no archive runs there, or the inventory asks for something that needs compiling.
    """
    if host.cmake_options:
        raise Refusal(
            f"llama_build_cmake_options for {host.name} has {', '.join(sorted(host.cmake_options))}, but llama_release has source: prebuilt, which compiles "
            "nothing: remove the options, or use source: git"
        )
    cache_types = server.cache_type_k, server.cache_type_v
    if backends.BY_NAME[backend].quants_option and backends.needs_all_quants(*cache_types):
        raise Refusal(
            f"llama_server_cache_type_k and _v are {' and '.join(cache_types)}, but upstream's {backend} archive for {host.name} has no kernels for them: "
            "use f16, q8_0 or q4_0 for both, or source: git"
        )
    return suitable_archives(host.name, host.facts, backend, build)


def has_archive(facts: Facts, backend: str) -> bool:
    """Return whether an archive for a backend runs on a host."""
    try:
        return bool(suitable_archives("", facts, backend, prebuilt.FIRST_BUILD))
    except Refusal:
        return False


def runtime_libraries(facts: Facts, backend: str) -> list[str]:
    """Return the system libraries that the archives' programs need, as toolkits.RUNTIME_LIBRARIES names them."""
    libraries = toolkits.RUNTIME_LIBRARIES if facts.system == "Linux" else {}
    return [name for name, library_backend in libraries.items() if library_backend in ("", backend)]


def environment(facts: Facts, backend: str) -> Mapping[str, str]:
    """Return the environment in which the archives' programs run."""
    needs_rocm = any(asset.rocm for asset in prebuilt.ASSETS if backend in asset.backends)
    toolkit = facts.newest_toolkit(backend) if needs_rocm else None
    return {"LD_LIBRARY_PATH": f"{toolkit.prefix}/lib"} if toolkit else {}


def suitable_archives(name: str, facts: Facts, backend: str, build: int) -> tuple[str, ...]:
    """Return the names of the archives that suit the facts of a host: programs, then further libraries. Unknown facts are assumed to fit.

    :raises Refusal: no archive runs there.
    """
    if build < prebuilt.FIRST_BUILD:
        raise Refusal(
            f"llama_release sets build to {build}, but source: prebuilt needs build {prebuilt.FIRST_BUILD} or newer: use a newer build, "
            "or source: binary with url and checksum"
        )
    assets = [
        asset
        for asset in prebuilt.ASSETS
        if asset.system == facts.system and facts.architecture in asset.architectures and backend in asset.backends
    ]
    if not assets:
        raise Refusal(
            f"{name} uses the backend {backend}, but upstream has no {backend} archive with an RPC worker for {facts.system} {facts.architecture} "
            f"(llama_release, source: prebuilt): {prebuilt.REMEDY}"
        )
    problems = [next(_problems(facts, backend, asset), None) for asset in assets]
    if all(problems):
        raise Refusal(f"{name} {problems[-1]}")
    asset = assets[problems.index(None)]
    programs = f"llama-b{build}-bin-{asset.platform}.tar.gz"
    return (programs, f"cudart-{programs}") if asset.cuda else (programs,)


def _problems(facts: Facts, backend: str, asset: prebuilt.Asset) -> Iterator[str]:
    """Yield reasons why an archive does not run on a host, each with a remedy. Messages put the host's name in front."""
    archive = f"upstream's archive {asset.platform} (llama_release, source: prebuilt)"
    architectures, toolkit, parse = facts.architectures_of(backend), facts.newest_toolkit(backend), versions.parse
    version, system_library = (facts.kernel or None, "Darwin") if facts.system == "Darwin" else (facts.glibc, "glibc")
    if version is not None and parse(version) < parse(asset.oldest_system):
        library = f"{system_library} {version}" if version else "a C library other than glibc"
        yield f"has {library}, but {archive} needs {system_library} {asset.oldest_system} or newer: install such a system there, or compile with source: git"
    if asset.cuda and facts.newest_cuda is not None and parse(facts.newest_cuda) < parse(asset.cuda):
        yield f"has an NVIDIA driver for CUDA {facts.newest_cuda}, but {archive} needs CUDA {asset.cuda} or newer: update the driver, or {prebuilt.REMEDY}"
    old_architectures = [name for name in architectures if name and parse(name) < parse(asset.min_capability)]
    if old_architectures:
        yield f"has a device with compute capability {old_architectures[0]}, but {archive} needs {asset.min_capability} or higher: {prebuilt.REMEDY}"
    if asset.rocm and facts.toolchains is not None and (not toolkit or parse(toolkit.version)[:1] != parse(asset.rocm)):
        installed_rocm = f"ROCm {toolkit.version}" if toolkit else "no ROCm"
        yield f"has {installed_rocm}, but {archive} needs the ROCm {asset.rocm} libraries: install them, or {prebuilt.REMEDY}"
    unsupported_architectures = [
        name for name in architectures if asset.rocm and name.partition(":")[0] not in prebuilt.ROCM_TARGETS
    ]
    if unsupported_architectures:
        yield f"has the device {unsupported_architectures[0]}, but {archive} has no code for this device: {prebuilt.REMEDY}"

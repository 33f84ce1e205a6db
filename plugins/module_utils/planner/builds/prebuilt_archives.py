# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which of upstream's archives a host installs (``source: prebuilt``), and what their programs need there."""

from __future__ import annotations

from collections.abc import Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import versions
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, prebuilt
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host, Server


def archives_of(host: Host, backend: str, build: int, server: Server) -> tuple[str, ...]:
    """Their names.

    :raises Refusal: none runs there, or something is asked for that only compiling gives.
    """
    if host.cmake_options:
        raise Refusal(
            f"llama_build_cmake_options of {host.name} has {', '.join(sorted(host.cmake_options))}, but llama_release has source: prebuilt, which compiles "
            "nothing: remove it, or use source: git"
        )
    pair = server.cache_type_k, server.cache_type_v
    if backends.RECORDS[backend].all_quants and backends.needs_all_quants(*pair):
        raise Refusal(
            f"llama_server_cache_type_k and _v are {' and '.join(pair)}, for which upstream's archive for {backend} of {host.name} has no code "
            "(llama_release, source: prebuilt): use f16, q8_0 or q4_0 for both, or compile it with source: git"
        )
    return prebuilt.archives_of(_machine(host.name, host.facts, backend), backend, build)


def run(facts: Facts, backend: str) -> bool:
    """Whether an archive for a backend runs on a host."""
    try:
        return bool(prebuilt.archives_of(_machine("", facts, backend), backend, prebuilt.SINCE))
    except Refusal:
        return False


def libraries(facts: Facts, backend: str) -> list[str]:
    """What programs of the archives need of the system, as backends.RUNTIME names it."""
    known = backends.RUNTIME if facts.system == "Linux" else {}
    return [name for name, own in known.items() if own in ("", backend)]


def environment(facts: Facts, backend: str) -> Mapping[str, str]:
    """In which they run."""
    toolkit = _toolkit(facts, backend) if prebuilt.needs_rocm(backend) else None
    return {"LD_LIBRARY_PATH": f"{toolkit[1]}/lib"} if toolkit else {}


def _machine(name: str, facts: Facts, backend: str) -> prebuilt.Machine:
    toolkit = _toolkit(facts, backend)
    return prebuilt.Machine(
        name,
        facts.system,
        facts.architecture,
        (facts.kernel or None) if facts.system == "Darwin" else facts.glibc,
        tuple(facts.architectures(backend)),
        facts.newest_cuda,
        None if facts.toolchains is None else toolkit[0] if toolkit else "",
    )


def _toolkit(facts: Facts, backend: str) -> tuple[str, str] | None:
    """Version and prefix of the newest toolkit of a backend."""
    own = [(str(kit.version), str(kit.prefix)) for kit in facts.toolchains or () if kit.backend == backend]
    return max(own, key=lambda kit: versions.numbers(kit[0]), default=None)

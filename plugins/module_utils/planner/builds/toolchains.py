# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which toolkit and compiler of a host build llama.cpp there. A toolchain is described in facts/toolchains.py."""

from __future__ import annotations

from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.versions import numbers
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts, Toolchain

MINIMUM_COMPILER = "9"
"""First GCC whose standard library holds std::filesystem, which llama.cpp uses."""


def missing_libraries(toolkit: Toolchain) -> list[str]:
    """Missing libraries of a toolkit; empty if its libraries are unknown."""
    if toolkit.libraries is None:
        return []
    return [name for name in toolkits.libraries(toolkit.backend) if name not in toolkit.libraries]


def instead(facts: Facts, backend: str) -> str:
    """The backends that this host could build for in place of this one, for a message."""
    others = [other for other in backends.PREFERRED if other != backend and facts.of_backend(other)]
    *before, last = [*others, backends.CPU.name]
    return f"{', '.join(before)} or {last}" if before else last


def _unfit(toolchain: Toolchain, architectures: list[str]) -> str | None:
    """Why this one cannot build for these architectures, with what could; None where it can."""
    toolkit, form = toolkits.SIDE_BY_SIDE[toolchain.backend], backends.RECORDS[toolchain.backend].architecture
    own = f"{toolkit.title} {toolchain.version}"
    version = numbers(toolchain.version)
    if version < numbers(toolkit.minimum):
        return f"{own}, too old for llama.cpp: install {toolkit.title} {toolkit.minimum} or newer"
    if form is None:
        return None
    for architecture in architectures:
        since = form.since.get(architecture)
        if since and version < numbers(since):
            return f"{own}, too old for {form.title} {architecture}: install {toolkit.title} {since} or newer"
        for first, least in form.left_out:
            if version >= numbers(first) and numbers(architecture) < numbers(least):
                return f"{own}, which no longer compiles for {form.title} {architecture}: install {toolkit.title} older than {first}"
    return None


def _at_prefix(wanted: str, facts: Facts, backend: str) -> dict[str, Toolchain]:
    """Backend → toolkit at the prefix that the operator names; cpu → the compiler there where it is no toolkit. Of a host that was not asked, the
    prefix is believed."""
    prefix = wanted.rstrip("/") or "/"
    if facts.toolchains is None:
        return {toolkit.backend: toolkit for toolkit in _declared_toolkit(backend, facts, prefix)}
    found = {
        toolchain.backend: toolchain for toolchain in facts.toolchains if prefix in (toolchain.prefix, *toolchain.links)
    }
    compiler = f"{prefix}/bin/{'clang++' if 'llvm' in prefix else 'g++'}"
    return found or {backends.CPU.name: Toolchain(backends.CPU.name, prefix, (), "", compiler)}


def _declared_toolkit(backend: str, facts: Facts, prefix: str | None) -> list[Toolchain]:
    """A toolkit of which only the version is known; its compiler is at the usual path below the prefix. Empty without a version."""
    version = facts.toolchain.get(toolkits.command(backend))
    if backend not in toolkits.SIDE_BY_SIDE or not version:
        return []
    compiler = f"{prefix}/{toolkits.SIDE_BY_SIDE[backend].compilers[0]}" if prefix else None
    return [Toolchain(backend, prefix or "", (), version, compiler)]


def _newest(name: str, offered: list[Toolchain], facts: Facts, architectures: list[str]) -> Toolchain | None:
    """The newest toolkit that fits and has its libraries, else the distribution's, whose libraries are packages; None if no toolkit is
    installed."""
    if not offered:
        return None
    other = f"or set llama_backend of {name} to {instead(facts, offered[0].backend)}"
    fitting = [toolkit for toolkit in offered if not _unfit(toolkit, architectures)]
    if not fitting:
        raise Refusal(f"{name} has {_unfit(offered[-1], architectures)}, {other}")
    whole = [toolkit for toolkit in fitting if not missing_libraries(toolkit)]
    whole = whole or [toolkit for toolkit in fitting if toolkit.prefix == names.SYSTEM]
    if not whole:
        newest = fitting[-1]
        title = toolkits.SIDE_BY_SIDE[newest.backend].title
        raise Refusal(
            f"{name} has {title} {newest.version} in {newest.prefix} without {', '.join(missing_libraries(newest))}: install their development "
            f"packages for that {title}, name one that has them in llama_build_toolchain, {other}"
        )
    return whole[-1]


def choose(name: str, backend: str, facts: Facts, wanted: str | None) -> dict[str, Any]:
    """What a host builds with: the toolkit that the operator names, or else the newest that fits the devices and has its libraries.

    :param facts: of the host; ``toolchains`` is None where it was not asked.
    :returns: ``toolkit`` (a toolchain, or None), ``version`` of the toolkit and of the ``compiler`` (None where not known; the path of one that is named),
        ``environment`` of the build.
    :raises Refusal: none of them fits.
    """
    found, toolkit = _at_prefix(wanted, facts, backend) if wanted else {}, None
    compiler = found.get(backends.CPU.name)
    if backend in toolkits.SIDE_BY_SIDE:
        installed = [toolchain for toolchain in facts.toolchains or [] if toolchain.backend == backend]
        offered = [found[backend]] if backend in found else installed or _declared_toolkit(backend, facts, None)
        toolkit = _newest(name, offered, facts, facts.architectures(backend))
    own = facts.toolchain.get("c++")
    if not compiler:
        _recent_enough(name, facts, own)
    return {
        "toolkit": toolkit,
        "version": toolkit.version if toolkit else facts.toolchain.get(toolkits.command(backend)),
        "compiler": compiler.compiler if compiler else own,
        "environment": {**_compiler_environment(compiler, backend), **_toolkit_environment(toolkit)},
    }


def _recent_enough(name: str, facts: Facts, version: str | None) -> None:
    if version and facts.system == "Linux" and numbers(version) < numbers(MINIMUM_COMPILER):
        raise Refusal(
            f"{name} has the C++ compiler {version}, too old for llama.cpp: install GCC {MINIMUM_COMPILER} or newer, and name its "
            "prefix in llama_build_toolchain, or use a compiled release, with source: binary or package"
        )


def _compiler_environment(compiler: Toolchain | None, backend: str) -> dict[str, str]:
    if not compiler:
        return {}
    cxx = str(compiler.compiler)
    environment = {"CC": cxx.replace("clang++", "clang").replace("g++", "gcc"), "CXX": cxx}
    toolkit = toolkits.TOOLKIT_OF.get(backend)
    return {**environment, **({toolkit.host_compiler: cxx} if toolkit and toolkit.host_compiler else {})}


def _toolkit_environment(toolkit: Toolchain | None) -> dict[str, str]:
    """What names the toolkit to cmake, and to the programs. A component that was not looked for is where ``latest`` leads."""
    if not toolkit or not toolkit.prefix:
        return {}
    known, prefix = toolkits.SIDE_BY_SIDE[toolkit.backend], toolkit.prefix
    beside = prefix.rsplit("/", 2)[0]
    components = toolkit.components or {name: f"{beside}/{name}/latest" for name in known.components}
    installed = [prefix, *components.values()]
    values = {
        "prefix": prefix,
        "compiler": toolkit.compiler or "",
        "beside": beside,
        "packages": ":".join(installed),
        "libraries": ":".join(f"{folder}/lib" for folder in installed),
    }
    left_out = known.not_of_system if prefix == names.SYSTEM else ()
    variables = {name: text.format(**values) for name, text in known.environment.items() if name not in left_out}
    return {name: text for name, text in variables.items() if text}

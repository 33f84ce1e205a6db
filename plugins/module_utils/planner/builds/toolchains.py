# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The toolkit and compiler that build llama.cpp on a host. facts/toolchains.py describes a toolchain."""

from __future__ import annotations

from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, versions
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts, Toolchain

MINIMUM_COMPILER = "9"
"""First GCC whose standard library holds std::filesystem, which llama.cpp uses."""


def missing_libraries(toolkit: Toolchain) -> list[str]:
    """Return the missing libraries of a toolkit; empty if its libraries are unknown."""
    if toolkit.libraries is None:
        return []
    return [name for name in toolkits.libraries(toolkit.backend) if name not in toolkit.libraries]


def vulkan_choice(facts: Facts) -> str | None:
    """Return how to name Vulkan as the backend of a host's cards, which may be known by another backend only; None without cards."""
    if facts.accelerators_of(backends.UNIVERSAL.name):
        return backends.UNIVERSAL.name
    has_card = facts.system == "Linux" and facts.accelerators
    return f"{backends.UNIVERSAL.name} (and declare the card for that backend in llama_hardware)" if has_card else None


def other_backends(facts: Facts, backend: str) -> str:
    """Return the other backends that this host could build for, for a message."""
    vulkan = vulkan_choice(facts)
    usable_backends = [name for name in backends.PREFERRED_ORDER if name != backend and facts.accelerators_of(name)]
    if vulkan and backend != backends.UNIVERSAL.name and backends.UNIVERSAL.name not in usable_backends:
        usable_backends.append(vulkan)
    *start, last_name = [*usable_backends, backends.CPU.name]
    return f"{', '.join(start)} or {last_name}" if start else last_name


def _unsuitable_reason(toolchain: Toolchain, architectures: list[str]) -> str | None:
    """Return why a toolchain cannot build for these architectures, with a remedy; None if it can."""
    toolkit, form = toolkits.SIDE_BY_SIDE[toolchain.backend], backends.BY_NAME[toolchain.backend].architecture
    title = f"{toolkit.title} {toolchain.version}"
    version = versions.parse(toolchain.version)
    if version < versions.parse(toolkit.minimum):
        return f"{title}, too old for llama.cpp: install {toolkit.title} {toolkit.minimum} or newer"
    if form is None:
        return None
    for architecture in architectures:
        oldest_kit = form.oldest_toolkits.get(architecture)
        if oldest_kit and version < versions.parse(oldest_kit):
            return f"{title}, too old for {form.title} {architecture}: install {toolkit.title} {oldest_kit} or newer"
        for first_dropping_version, minimum in form.dropped_targets:
            if version >= versions.parse(first_dropping_version) and versions.parse(architecture) < versions.parse(
                minimum
            ):
                return f"{title}, which no longer compiles for {form.title} {architecture}: install {toolkit.title} older than {first_dropping_version}"
    return None


def _toolchains_at(prefix: str, facts: Facts, backend: str) -> dict[str, Toolchain]:
    """Return the toolkits at the prefix that the operator names, by backend, or the compiler there as ``cpu``. On a host that was not contacted, the
    prefix is believed."""
    prefix = prefix.rstrip("/") or "/"
    if facts.toolchains is None:
        return {toolkit.backend: toolkit for toolkit in _declared_toolkit(backend, facts, prefix)}
    installed_toolchains = {
        toolchain.backend: toolchain for toolchain in facts.toolchains if prefix in (toolchain.prefix, *toolchain.links)
    }
    compiler = f"{prefix}/bin/{'clang++' if 'llvm' in prefix else 'g++'}"
    return installed_toolchains or {backends.CPU.name: Toolchain(backends.CPU.name, prefix, (), "", compiler)}


def _declared_toolkit(backend: str, facts: Facts, prefix: str | None) -> list[Toolchain]:
    """Return a toolkit with a known version and a compiler at the usual path below the prefix; nothing without a version."""
    version = facts.toolchain.get(toolkits.command(backend))
    if backend not in toolkits.SIDE_BY_SIDE or not version:
        return []
    compiler = f"{prefix}/{toolkits.SIDE_BY_SIDE[backend].compilers[0]}" if prefix else None
    return [Toolchain(backend, prefix or "", (), version, compiler)]


def _newest_suitable(
    name: str, candidates: list[Toolchain], facts: Facts, architectures: list[str]
) -> Toolchain | None:
    """Return the newest toolkit that fits and has its libraries, or else the distribution's, whose libraries are packages; None without a
    toolkit."""
    if not candidates:
        return None
    alternative = f"or set llama_backend to {other_backends(facts, candidates[0].backend)} for {name}"
    matches = [toolkit for toolkit in candidates if not _unsuitable_reason(toolkit, architectures)]
    if not matches:
        raise Refusal(f"{name} has {_unsuitable_reason(candidates[-1], architectures)}, {alternative}")
    complete_toolkits = [toolkit for toolkit in matches if not missing_libraries(toolkit)]
    complete_toolkits = complete_toolkits or [toolkit for toolkit in matches if toolkit.prefix == names.SYSTEM]
    if not complete_toolkits:
        choice = matches[-1]
        title = toolkits.SIDE_BY_SIDE[choice.backend].title
        raise Refusal(
            f"{name} has {title} {choice.version} in {choice.prefix} without {', '.join(missing_libraries(choice))}: install the development packages for "
            f"that {title}, set llama_build_toolchain to a complete {title}, {alternative}"
        )
    return complete_toolkits[-1]


def choose_toolchain(name: str, backend: str, facts: Facts, prefix: str | None) -> dict[str, Any]:
    """Return the tools of a host's build: the toolkit that the operator names, or else the newest that fits the devices and has its libraries.

    :param facts: facts of the host; ``toolchains`` is None if it was not contacted.
    :returns: ``toolkit`` (a toolchain, or None), its ``version``, ``compiler`` (the system's version, or the path of a named compiler; None if unknown),
        and ``environment`` of the build.
    :raises Refusal: no toolkit fits.
    """
    prefix_toolchains, toolkit = _toolchains_at(prefix, facts, backend) if prefix else {}, None
    compiler = prefix_toolchains.get(backends.CPU.name)
    if backend in toolkits.SIDE_BY_SIDE:
        toolchains = [toolchain for toolchain in facts.toolchains or [] if toolchain.backend == backend]
        candidates = (
            [prefix_toolchains[backend]]
            if backend in prefix_toolchains
            else toolchains or _declared_toolkit(backend, facts, None)
        )
        toolkit = _newest_suitable(name, candidates, facts, facts.architectures(backend))
    system_compiler = facts.toolchain.get("c++")
    if not compiler:
        _check_compiler(name, facts, system_compiler)
    return {
        "toolkit": toolkit,
        "version": toolkit.version if toolkit else facts.toolchain.get(toolkits.command(backend)),
        "compiler": compiler.compiler if compiler else system_compiler,
        "environment": {**_compiler_environment(compiler, backend), **_toolkit_environment(toolkit)},
    }


def _check_compiler(name: str, facts: Facts, version: str | None) -> None:
    if version and facts.system == "Linux" and versions.parse(version) < versions.parse(MINIMUM_COMPILER):
        raise Refusal(
            f"{name} has the C++ compiler {version}, too old for llama.cpp: set llama_build_toolchain to the prefix of GCC {MINIMUM_COMPILER} or newer, or "
            "use source: binary or package"
        )


def _compiler_environment(compiler: Toolchain | None, backend: str) -> dict[str, str]:
    if not compiler:
        return {}
    cxx = str(compiler.compiler)
    environment = {"CC": cxx.replace("clang++", "clang").replace("g++", "gcc"), "CXX": cxx}
    toolkit = toolkits.TOOLKITS.get(backend)
    return {**environment, **({toolkit.host_compiler: cxx} if toolkit and toolkit.host_compiler else {})}


def _toolkit_environment(toolkit: Toolchain | None) -> dict[str, str]:
    """Return the environment variables that name the toolkit to cmake and to the programs. Unknown components are at ``latest``."""
    if not toolkit or not toolkit.prefix:
        return {}
    toolkit_type, prefix = toolkits.SIDE_BY_SIDE[toolkit.backend], toolkit.prefix
    parent = prefix.rsplit("/", 2)[0]
    components = toolkit.components or {name: f"{parent}/{name}/latest" for name in toolkit_type.components}
    prefixes = [prefix, *components.values()]
    values = {
        "prefix": prefix,
        "compiler": toolkit.compiler or "",
        "beside": parent,
        "packages": ":".join(prefixes),
        "libraries": ":".join(f"{folder}/lib" for folder in prefixes),
    }
    excluded_names = toolkit_type.prefix_variables if prefix == names.SYSTEM else ()
    variables = {
        name: text.format(**values) for name, text in toolkit_type.environment.items() if name not in excluded_names
    }
    return {name: text for name, text in variables.items() if text}

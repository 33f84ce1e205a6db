# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The toolkit and compiler that build llama.cpp on a host. facts/toolchains.py describes a toolchain."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, versions
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts, Toolchain
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import BuildTools, Host

MIN_GCC_VERSION = "9"
"""Oldest version of GCC whose standard library contains std::filesystem, which llama.cpp uses."""


def can_build(facts: Facts, backend: str) -> bool:
    """Return whether a host has the toolkit and the libraries of a backend."""
    toolkit = toolkits.TOOLKITS.get(backend)
    has_command = not toolkit or bool(facts.toolchain.get(toolkit.command))
    installed_toolkits = facts.toolkits_of(backend) if backend in toolkits.SIDE_BY_SIDE else [None]
    return has_command and not all(
        _missing_libraries(facts, toolkit, toolkits.libraries_of(backend)) for toolkit in installed_toolkits or [None]
    )


def _missing_libraries(facts: Facts, toolkit: Toolchain | None, libraries: Sequence[str]) -> list[str]:
    """Return the libraries that a toolkit lacks, or that a host without such a toolkit lacks; empty if facts do not list them."""
    if not toolkit:
        return [name for name in libraries if facts.lacks_tool(name)]
    return [name for name in libraries if toolkit.libraries is not None and name not in toolkit.libraries]


def vulkan_setting(facts: Facts) -> str | None:
    """Return the value of llama_backend that selects Vulkan, with a hint if no card is declared for Vulkan; None without cards."""
    if facts.accelerators_of(backends.UNIVERSAL.name):
        return backends.UNIVERSAL.name
    has_card = facts.system == "Linux" and facts.accelerators
    return f"{backends.UNIVERSAL.name} (and declare the card for that backend in llama_hardware)" if has_card else None


def other_backends_text(facts: Facts, backend: str) -> str:
    """Return the other backends for which this host could build, as text."""
    vulkan = vulkan_setting(facts)
    usable_backends = [name for name in backends.PREFERRED_ORDER if name != backend and facts.accelerators_of(name)]
    if vulkan and backend != backends.UNIVERSAL.name and backends.UNIVERSAL.name not in usable_backends:
        usable_backends.append(vulkan)
    *first_names, last_name = [*usable_backends, backends.CPU.name]
    return f"{', '.join(first_names)} or {last_name}" if first_names else last_name


def _unsuitable_reason(toolchain: Toolchain, architectures: list[str]) -> str | None:
    """Return why a toolchain cannot build for these architectures, with a remedy; None if it can."""
    toolkit, form = toolkits.SIDE_BY_SIDE[toolchain.backend], backends.BY_NAME[toolchain.backend].architecture
    title = f"{toolkit.title} {toolchain.version}"
    version = versions.parse(toolchain.version)
    if version < versions.parse(toolkit.min_version):
        return f"{title}, too old for llama.cpp: install {toolkit.title} {toolkit.min_version} or newer"
    if form is None:
        return None
    for architecture in architectures:
        oldest_toolkit = form.oldest_toolkits.get(architecture)
        if oldest_toolkit and version < versions.parse(oldest_toolkit):
            return (
                f"{title}, too old for {form.title} {architecture}: install {toolkit.title} {oldest_toolkit} or newer"
            )
        for dropping_version, minimum in form.oldest_architectures:
            if version >= versions.parse(dropping_version) and versions.parse(architecture) < versions.parse(minimum):
                return f"{title}, which no longer compiles for {form.title} {architecture}: install a version of {toolkit.title} before {dropping_version}"
    return None


def _toolchains_at(prefix: str, facts: Facts, backend: str) -> dict[str, Toolchain]:
    """Return the toolkits at the prefix that the operator names, by backend, or the compiler there as ``cpu``. On a host that was not contacted, the
    prefix is assumed to contain them."""
    prefix = prefix.rstrip("/") or "/"
    if facts.toolchains is None:
        return {toolkit.backend: toolkit for toolkit in _declared_toolkits(backend, facts, prefix)}
    installed_toolchains = {
        toolchain.backend: toolchain for toolchain in facts.toolchains if prefix in (toolchain.prefix, *toolchain.links)
    }
    compiler = f"{prefix}/bin/{'clang++' if 'llvm' in prefix else 'g++'}"
    return installed_toolchains or {backends.CPU.name: Toolchain(backends.CPU.name, prefix, (), "", compiler)}


def _declared_toolkits(backend: str, facts: Facts, prefix: str | None) -> list[Toolchain]:
    """Return a toolkit with a known version and a compiler at the usual path below the prefix; nothing without a version."""
    version = facts.toolchain.get(toolkits.command_of(backend))
    if backend not in toolkits.SIDE_BY_SIDE or not version:
        return []
    compiler = f"{prefix}/{toolkits.SIDE_BY_SIDE[backend].compilers[0]}" if prefix else None
    return [Toolchain(backend, prefix or "", (), version, compiler)]


def _suitable_toolkit(host: Host, candidates: list[Toolchain], libraries: Sequence[str]) -> Toolchain | None:
    """Return the newest toolkit that fits and has its libraries, or else the distribution's, whose libraries are packages; None without a toolkit."""
    if not candidates:
        return None
    facts, backend = host.facts, candidates[0].backend
    alternative = f"or set llama_backend to {other_backends_text(facts, backend)} for {host.name}"
    reasons = [_unsuitable_reason(toolkit, facts.architectures_of(backend)) for toolkit in candidates]
    matches = [toolkit for toolkit, reason in zip(candidates, reasons) if not reason]
    if not matches:
        raise Refusal(f"{host.name} has {reasons[-1]}, {alternative}")
    complete_toolkits = [toolkit for toolkit in matches if not _missing_libraries(facts, toolkit, libraries)]
    complete_toolkits = complete_toolkits or [toolkit for toolkit in matches if toolkit.prefix == names.SYSTEM_PREFIX]
    if not complete_toolkits:
        toolkit, title = matches[-1], toolkits.SIDE_BY_SIDE[backend].title
        raise Refusal(
            f"{host.name} has {title} {toolkit.version} in {toolkit.prefix} without {', '.join(_missing_libraries(facts, toolkit, libraries))}: install its "
            f"development packages, set llama_build_toolchain to the prefix of a complete {title}, {alternative}"
        )
    return complete_toolkits[-1]


def choose_tools(host: Host, backend: str, fork: str) -> BuildTools:
    """Return the tools of a host's build: the toolkit that the operator names, or else the newest that fits the devices and has its libraries.

    :raises Refusal: no toolkit fits, or the compiler is too old.
    """
    facts, libraries, toolkit = host.facts, toolkits.libraries_of(backend, fork), None
    prefix_toolchains = _toolchains_at(host.toolchain, facts, backend) if host.toolchain else {}
    if backend in toolkits.SIDE_BY_SIDE:
        candidates = [prefix_toolchains[backend]] if backend in prefix_toolchains else facts.toolkits_of(backend)
        toolkit = _suitable_toolkit(host, candidates or _declared_toolkits(backend, facts, None), libraries)
    toolchain, compiler_version = prefix_toolchains.get(backends.CPU.name), facts.toolchain.get("c++")
    is_checked = not toolchain and facts.system == "Linux"
    if compiler_version and is_checked and versions.parse(compiler_version) < versions.parse(MIN_GCC_VERSION):
        raise Refusal(
            f"{host.name} has the C++ compiler {compiler_version}, too old for llama.cpp: set llama_build_toolchain to the prefix of GCC {MIN_GCC_VERSION} or "
            "newer, or use source: binary or package"
        )
    return BuildTools(
        prefix=(toolkit.prefix or None) if toolkit else None,
        version=toolkit.version if toolkit else facts.toolchain.get(toolkits.command_of(backend)),
        compiler=toolchain.compiler if toolchain else compiler_version,
        environment={**_compiler_environment(toolchain, backend), **_toolkit_environment(toolkit)},
        libraries=tuple(libraries),
        missing_libraries=tuple(_missing_libraries(facts, toolkit, libraries)),
    )


def _compiler_environment(toolchain: Toolchain | None, backend: str) -> dict[str, str]:
    if not toolchain:
        return {}
    cxx = str(toolchain.compiler)
    environment = {"CC": cxx.replace("clang++", "clang").replace("g++", "gcc"), "CXX": cxx}
    toolkit = toolkits.TOOLKITS.get(backend)
    return {**environment, **({toolkit.host_cxx_variable: cxx} if toolkit and toolkit.host_cxx_variable else {})}


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
        "components": parent,
        "packages": ":".join(prefixes),
        "libraries": ":".join(f"{folder}/lib" for folder in prefixes),
    }
    excluded_names = toolkit_type.prefix_variables if prefix == names.SYSTEM_PREFIX else ()
    variables = {
        name: text.format(**values) for name, text in toolkit_type.environment.items() if name not in excluded_names
    }
    return {name: text for name, text in variables.items() if text}

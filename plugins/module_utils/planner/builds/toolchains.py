# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which toolkit and compiler of a host build llama.cpp there. A toolchain is described in facts/toolchains.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.versions import numbers
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts

Toolchain = Mapping[str, Any]
"""As facts/toolchains.py describes it."""

MINIMUM_COMPILER = "9"
"""First GCC whose standard library holds std::filesystem, which llama.cpp uses."""


def missing_libraries(toolkit: Toolchain) -> list[str]:
    """Missing libraries of a toolkit; empty if its libraries are unknown."""
    if "libraries" not in toolkit:
        return []
    return [name for name in backends.libraries(toolkit["backend"]) if name not in toolkit["libraries"]]


def _title(backend: str) -> str:
    toolkit = backends.TOOLKITS.get(backend)
    return toolkit.title if toolkit else "a compiler"


def instead(facts: Facts, backend: str) -> str:
    """The backends that this host could build for in place of this one, for a message."""
    others = [other for other in backends.PREFERRED if other != backend and facts.of_backend(other)]
    *before, last = [*others, backends.CPU.name]
    return f"{', '.join(before)} or {last}" if before else last


def _unfit(toolchain: Toolchain, architectures: list[str]) -> str | None:
    """Why this one cannot build for these architectures, with what could; None where it can."""
    toolkit, form = backends.TOOLKITS[toolchain["backend"]], backends.RECORDS[toolchain["backend"]].architecture
    own = f"{toolkit.title} {toolchain['version']}"
    version = numbers(toolchain["version"])
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


def _at_prefix(
    name: str, backend: str, wanted: str, facts: Facts, beside: Collection[str]
) -> tuple[Toolchain | None, Toolchain | None]:
    """Toolkit and compiler at the prefix that the operator names, which may be meant for another backend of the host. Of a host that
    was not asked, the prefix is believed."""
    prefix = wanted.rstrip("/") or "/"
    where = f"llama_build_toolchain of {name} is {wanted}"
    installed = facts.toolchains
    if installed is None:
        return next(iter(_declared_toolkit(backend, facts, prefix)), None), None
    candidates = [toolchain for toolchain in installed if prefix in (toolchain["prefix"], *toolchain["links"])]
    if not candidates:
        known = ", ".join(toolchain["prefix"] for toolchain in installed) or "none"
        raise Refusal(
            f"{where}, but there is neither {', '.join(toolkit.title for toolkit in backends.TOOLKITS.values())} nor a compiler: use "
            f"the prefix of one that is installed ({known}), "
            "or leave it out"
        )
    by_backend = {toolchain["backend"]: toolchain for toolchain in candidates}
    toolkit = by_backend.get(backend) if backend in backends.TOOLKITS else None
    if not toolkit and any(other in by_backend for other in beside):
        return None, None
    if not toolkit and "cpu" not in by_backend:
        raise Refusal(
            f"{where}, which is {_title(candidates[0]['backend'])}, but the host builds llama.cpp for {backend}: "
            f"name a toolchain for {backend}, or set llama_backend of {name} to {instead(facts, backend)}"
        )
    return toolkit, by_backend.get("cpu")


def _declared_toolkit(backend: str, facts: Facts, prefix: str | None) -> list[Toolchain]:
    """A toolkit of which only the version is known; its compiler is at the usual path below the prefix. Empty without a version."""
    version = facts.toolchain.get(backends.toolkit(backend))
    if backend not in backends.TOOLKITS or not version:
        return []
    compiler = f"{prefix}/{backends.TOOLKITS[backend].compilers[0]}" if prefix else None
    return [{"backend": backend, "prefix": prefix, "version": version, "compiler": compiler}]


def _newest(
    name: str, facts: Facts, offered: list[Toolchain], architectures: list[str], wanted: str | None
) -> Toolchain | None:
    """The newest toolkit that fits and has its libraries, else the distribution's, whose libraries are packages; None if no toolkit is
    installed."""
    fitting = [toolkit for toolkit in offered if not _unfit(toolkit, architectures)]
    if offered and not fitting:
        raise Refusal(
            f"{name} has {_unfit(offered[-1], architectures)}"
            + (f" (llama_build_toolchain is {wanted})" if wanted else "")
            + f", or set llama_backend of {name} to {instead(facts, offered[-1]['backend'])}"
        )
    whole = [toolkit for toolkit in fitting if not missing_libraries(toolkit)]
    whole = whole or [toolkit for toolkit in fitting if toolkit["prefix"] == names.SYSTEM]
    if fitting and not whole:
        title = _title(fitting[-1]["backend"])
        raise Refusal(
            f"{name} has {title} {fitting[-1]['version']} in {fitting[-1]['prefix']} without {', '.join(missing_libraries(fitting[-1]))}"
            + (f" (llama_build_toolchain is {wanted})" if wanted else "")
            + f": install their development packages for that {title}, name one that has them in llama_build_toolchain, or set llama_backend "
            f"of {name} to {instead(facts, fitting[-1]['backend'])}"
        )
    return whole[-1] if whole else None


def choose(
    name: str, backend: str, facts: Facts, wanted: str | None, architectures: list[str], beside: Collection[str] = ()
) -> dict[str, Any]:
    """What a host builds with: the toolkit that the operator names, or else the newest that fits the devices and has its libraries.

    :param facts: of the host; ``toolchains`` is missing or None where it was not asked.
    :returns: ``toolkit`` (a toolchain, or None), ``version`` of the toolkit and ``compiler`` (versions, None where not known),
        ``environment`` of the build.
    :raises Refusal: none of them fits.
    """
    toolkit, compiler = _at_prefix(name, backend, wanted, facts, beside) if wanted else (None, None)
    if backend in backends.TOOLKITS:
        installed = [toolchain for toolchain in facts.toolchains or [] if toolchain["backend"] == backend]
        offered = [toolkit] if toolkit else installed or _declared_toolkit(backend, facts, None)
        toolkit = _newest(name, facts, offered, architectures, wanted if toolkit else None)
    own = _toolkit_environment(toolkit)
    if compiler and toolkit and "CXX" in own:
        raise Refusal(
            f"llama_build_toolchain of {name} is {wanted}, a compiler, but the host builds llama.cpp for {backend}, with the compiler of "
            f"{_title(backend)}: name a prefix of {_title(backend)}, or leave it out"
        )
    version = compiler["version"] if compiler else facts.toolchain.get("c++")
    _recent_enough(name, facts, version)
    return {
        "toolkit": toolkit,
        "version": toolkit["version"] if toolkit else facts.toolchain.get(backends.toolkit(backend)),
        "compiler": version,
        "environment": {**_compiler_environment(compiler, backend), **own},
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
    cxx = compiler["compiler"]
    environment = {"CC": cxx.replace("clang++", "clang").replace("g++", "gcc"), "CXX": cxx}
    toolkit = backends.RECORDS[backend].toolkit
    return {**environment, **({toolkit.host_compiler: cxx} if toolkit and toolkit.host_compiler else {})}


def _toolkit_environment(toolkit: Toolchain | None) -> dict[str, str]:
    """What names the toolkit to cmake, and to the programs. A component that was not looked for is where ``latest`` leads."""
    if not toolkit or not toolkit["prefix"]:
        return {}
    known, prefix = backends.TOOLKITS[toolkit["backend"]], toolkit["prefix"]
    beside = prefix.rsplit("/", 2)[0]
    components = toolkit.get("components") or {name: f"{beside}/{name}/latest" for name in known.components}
    installed = [prefix, *components.values()]
    values = {
        "prefix": prefix,
        "compiler": toolkit["compiler"] or "",
        "beside": beside,
        "packages": ":".join(installed),
        "libraries": ":".join(f"{folder}/lib" for folder in installed),
    }
    left_out = known.not_of_system if prefix == names.SYSTEM else ()
    variables = {name: text.format(**values) for name, text in known.environment.items() if name not in left_out}
    return {name: text for name, text in variables.items() if text}

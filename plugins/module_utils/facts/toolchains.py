# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Toolkits and libraries: which ones a host has.

A toolchain is ``backend`` (of its toolkit), ``prefix``, ``links`` (other names of the prefix), ``version``,
``compiler`` (path, or None), ``libraries`` (names of those of its backend that come with it) and, of a toolkit that has such, ``components`` (name →
prefix).
"""

from __future__ import annotations

import os
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, versions
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import toolkits

PRESENT = "present"
"""Stands for the version of a library that was found."""


def _on_host(root: Path, path: Path) -> str:
    """A path below the root as the host names it."""
    return "/" + os.path.relpath(path, os.path.realpath(root))


def _prefixes(root: Path, patterns: tuple[str, ...]) -> dict[Path, list[str]]:
    """Real folder of each installation → other names of it. A link from /usr/bin to another one is none of its own."""
    prefixes: dict[Path, list[str]] = {}
    for program in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        named = program.parent.parent
        real = Path(os.path.realpath(named))
        elsewhere = named == root / "usr" and Path(os.path.realpath(program)).parent != real / "bin"
        if program.exists() and not elsewhere:
            name = "/" + str(named.relative_to(root))
            prefixes.setdefault(real, []).extend([name] if name != _on_host(root, real) else [])
    return prefixes


def _include_folders(prefix: str) -> list[str]:
    """Patterns of the folders for headers of what is installed at a prefix."""
    folders = [f"{prefix}/{place}" for place in ("include", "targets/*/include")]
    return [*folders, "/usr/local/include"] if prefix == names.SYSTEM else folders


def _libraries_of(root: Path, prefixes: list[str], backend: str) -> list[str]:
    """Libraries of a backend that are installed with the toolkit at these prefixes, not with another one on the same host."""
    folders = [folder for prefix in prefixes for folder in _include_folders(prefix)]
    return [
        name
        for name in toolkits.libraries(backend)
        if any(next(root.glob(pattern), None) for pattern in _patterns(name, folders))
    ]


def _patterns(library: str, folders: list[str]) -> list[str]:
    """What exists, below the root, where a library is installed.

    :param folders: for headers.
    """
    known = toolkits.LIBRARIES[library]
    return [*known.files, *(f"{folder[1:]}/{known.header}" for folder in folders if known.header)]


def _compiler(folder: Path, prefix: str, toolkit: toolkits.Toolkit, ask: Ask) -> str | None:
    """Path of a toolkit's compiler; None where it is not found."""
    own = next((path for path in toolkit.compilers if (folder / path).exists()), None)
    if own or not toolkit.compiler_query:
        return f"{prefix}/{own}" if own else None
    place = ask([f"{prefix}/bin/{toolkit.command}", toolkit.compiler_query]).strip()
    return f"{place}/{Path(toolkit.compilers[0]).name}" if place else None


def _components(root: Path, folder: Path, toolkit: toolkits.Toolkit) -> dict[str, str]:
    """Component → its prefix, of those that are installed beside the compiler's folder: of its version, or else the newest that fits."""
    components = {}
    own = versions.numbers(folder.name)
    for name, same in toolkit.components.items():
        installed = {Path(os.path.realpath(path)) for path in folder.parent.parent.glob(f"{name}/[0-9]*")}
        fitting = [path for path in installed if not same or versions.numbers(path.name)[:1] == own[:1]]
        if fitting:
            best = max(fitting, key=lambda path: (versions.numbers(path.name) == own, versions.numbers(path.name)))
            components[name] = _on_host(root, best)
    return components


def _toolkits(root: Path, ask: Ask, backend: str, toolkit: toolkits.Toolkit) -> list[dict]:
    found = []
    for folder, links in _prefixes(root, toolkit.places).items():
        prefix = _on_host(root, folder)
        version = text_of(folder / toolkit.version_file) if toolkit.version_file else ""
        components = _components(root, folder, toolkit)
        found.append(
            {
                "backend": backend,
                "prefix": prefix,
                "links": links,
                "version": versions.first(version or ask([f"{prefix}/bin/{toolkit.command}", "--version"])),
                "compiler": _compiler(folder, prefix, toolkit, ask),
                "libraries": _libraries_of(root, [prefix, *components.values()], backend),
                **({"components": components} if toolkit.components else {}),
            }
        )
    return found


def find(root: Path = ROOT, ask: Ask = output) -> list[dict]:
    """Every toolkit of the host that works, oldest first."""
    toolchains = [
        entry for backend, toolkit in toolkits.SIDE_BY_SIDE.items() for entry in _toolkits(root, ask, backend, toolkit)
    ]
    working = [toolchain for toolchain in toolchains if toolchain["version"]]
    return sorted(working, key=lambda entry: (entry["backend"], versions.numbers(entry["version"]), entry["prefix"]))


def libraries(installed: list[dict], root: Path = ROOT) -> dict[str, str | None]:
    """Library → PRESENT, or None where no toolkit of the host has what is needed to build with it."""
    prefixes = [prefix for entry in installed for prefix in (entry["prefix"], *entry.get("components", {}).values())]
    folders = [folder for prefix in (names.SYSTEM, *prefixes) for folder in _include_folders(prefix)]
    return {
        name: PRESENT if any(next(root.glob(pattern), None) for pattern in _patterns(name, folders)) else None
        for name in toolkits.LIBRARIES
    }

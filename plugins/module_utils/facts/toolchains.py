# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Toolkits and libraries that are installed on this host.

A toolchain has ``backend``, ``prefix``, ``links`` (other names of the prefix), ``version``, ``compiler`` (path, or None), ``libraries`` (names of its
backend's libraries that come with it) and, for some toolkits, ``components`` (name → prefix).
"""

from __future__ import annotations

import os
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, versions
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import toolkits

ANY_VERSION = "present"
"""Placeholder for the version of an installed library."""


def _host_path(root: Path, path: Path) -> str:
    """Return the absolute path on the host for a path below the root."""
    return "/" + os.path.relpath(path, os.path.realpath(root))


def _links_by_prefix(root: Path, patterns: tuple[str, ...]) -> dict[Path, list[str]]:
    """Return the real folder of each installation, with its other names. A link in /usr/bin does not count as an installation in /usr."""
    links_by_prefix: dict[Path, list[str]] = {}
    for program in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        prefix = program.parent.parent
        real_path = Path(os.path.realpath(prefix))
        is_foreign_link = prefix == root / "usr" and Path(os.path.realpath(program)).parent != real_path / "bin"
        if program.exists() and not is_foreign_link:
            name = "/" + str(prefix.relative_to(root))
            links_by_prefix.setdefault(real_path, []).extend([name] if name != _host_path(root, real_path) else [])
    return links_by_prefix


def _include_patterns(prefix: str) -> list[str]:
    """Return patterns of the header folders of a prefix."""
    patterns = [f"{prefix}/{folder}" for folder in ("include", "targets/*/include")]
    return [*patterns, "/usr/local/include"] if prefix == names.SYSTEM_PREFIX else patterns


def _libraries_of(root: Path, prefixes: list[str], backend: str) -> list[str]:
    """Return the libraries of a backend that are installed with the toolkit at these prefixes."""
    folders = [folder for prefix in prefixes for folder in _include_patterns(prefix)]
    return [
        name
        for name in toolkits.libraries_of(backend)
        if any(next(root.glob(pattern), None) for pattern in _file_patterns(name, folders))
    ]


def _file_patterns(library: str, folders: list[str]) -> list[str]:
    """Return patterns, relative to the root, of the files of an installed library."""
    spec = toolkits.LIBRARIES[library]
    return [*spec.files, *(f"{folder[1:]}/{spec.header}" for folder in folders if spec.header)]


def _find_compiler(folder: Path, prefix: str, toolkit: toolkits.Toolkit, ask: Ask) -> str | None:
    compiler = next((path for path in toolkit.compilers if (folder / path).exists()), None)
    if compiler or not toolkit.compiler_query:
        return f"{prefix}/{compiler}" if compiler else None
    compiler_folder = ask([f"{prefix}/bin/{toolkit.command}", toolkit.compiler_query]).strip()
    return f"{compiler_folder}/{Path(toolkit.compilers[0]).name}" if compiler_folder else None


def _components(root: Path, folder: Path, toolkit: toolkits.Toolkit) -> dict[str, str]:
    """Return the prefix of each component, in the compiler's version or else the newest suitable version."""
    components = {}
    version = versions.parse(folder.name)
    for name, needs_same_major in toolkit.components.items():
        paths = {Path(os.path.realpath(path)) for path in folder.parent.parent.glob(f"{name}/[0-9]*")}
        matches = [path for path in paths if not needs_same_major or versions.parse(path.name)[:1] == version[:1]]
        if matches:
            best_path = max(matches, key=lambda path: (versions.parse(path.name) == version, versions.parse(path.name)))
            components[name] = _host_path(root, best_path)
    return components


def _toolchains(root: Path, ask: Ask, backend: str, toolkit: toolkits.Toolkit) -> list[dict]:
    toolchains = []
    for folder, links in _links_by_prefix(root, toolkit.command_patterns).items():
        prefix = _host_path(root, folder)
        text = text_of(folder / toolkit.version_file) if toolkit.version_file else ""
        components = _components(root, folder, toolkit)
        toolchains.append(
            {
                "backend": backend,
                "prefix": prefix,
                "links": links,
                "version": versions.first_version(text or ask([f"{prefix}/bin/{toolkit.command}", "--version"])),
                "compiler": _find_compiler(folder, prefix, toolkit, ask),
                "libraries": _libraries_of(root, [prefix, *components.values()], backend),
                **({"components": components} if toolkit.components else {}),
            }
        )
    return toolchains


def find_toolchains(root: Path = ROOT, ask: Ask = output) -> list[dict]:
    """Return every working toolkit of the host, oldest first."""
    toolchains = [
        entry
        for backend, toolkit in toolkits.SIDE_BY_SIDE.items()
        for entry in _toolchains(root, ask, backend, toolkit)
    ]
    working_toolchains = [toolchain for toolchain in toolchains if toolchain["version"]]
    return sorted(
        working_toolchains, key=lambda entry: (entry["backend"], versions.parse(entry["version"]), entry["prefix"])
    )


def library_versions(toolchains: list[dict], root: Path = ROOT) -> dict[str, str | None]:
    """Return ANY_VERSION for each library that a toolkit of the host can use, otherwise None."""
    prefixes = [prefix for entry in toolchains for prefix in (entry["prefix"], *entry.get("components", {}).values())]
    folders = [folder for prefix in (names.SYSTEM_PREFIX, *prefixes) for folder in _include_patterns(prefix)]
    return {
        name: ANY_VERSION if any(next(root.glob(pattern), None) for pattern in _file_patterns(name, folders)) else None
        for name in toolkits.LIBRARIES
    }

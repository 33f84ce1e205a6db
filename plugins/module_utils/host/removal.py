# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Removes an installation from a host, but nothing foreign."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, files, names, reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths, read_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import model_files

TEMPORARY_PREFIXES = (files.TEMPORARY_PREFIX, ".ansible_tmp")
"""Prefixes of files that a killed run leaves in a folder."""
PACKAGE_REMOVERS = ("apt-get remove", "dnf remove", "zypper remove", "pacman -R", "brew uninstall")
REMOVAL_TIMEOUT_SECONDS = 600
GENERATED_MODEL_PATTERN = re.compile(r"known-answer-.+\.gguf(\.part)?", re.ASCII | re.DOTALL)


def remove_installation(paths: InstallationPaths, host: str, check_mode: bool) -> tuple[list[str], list[str]]:
    """Remove an installation below its prefix, the mark last, so that a killed run can be repeated. Finally, remove the prefix if it is empty.

    :returns: removed paths (in check mode, paths to remove), and a sentence for everything that stays.
    :raises Refusal: something cannot be removed.
    """
    prefix = Path(paths.prefix)
    if not files.is_marked(prefix):
        reason = f"it lacks the folder {names.MARKER_FOLDER}, which marks an installation of this collection"
        return [], [f"{prefix} on {host} was not removed: {reason}."] if prefix.exists() else []
    installed_paths = _installed_paths(prefix)
    other_entries = sorted(set(os.listdir(prefix)) - {parts[0] for parts in installed_paths if len(parts) == 1})
    packages = sorted(set(files.text_of(prefix / names.PACKAGES_FILE).split()))
    metrics_files, metrics_folders = _remove_metrics(paths, check_mode)
    for parts in [] if check_mode else installed_paths:
        _remove(prefix.joinpath(*parts))
    if not other_entries and not check_mode:
        with suppress(OSError):  # it may be a link or a mount point
            os.rmdir(prefix)
    sentences = []
    if other_entries:
        sentences.append(
            f"{prefix} on {host} still contains {_join_names(other_entries)}: remove what is no longer needed."
        )
    if packages:
        command = next((line for line in PACKAGE_REMOVERS if commands.find(line.split()[0])), "the package manager:")
        sentences.append(
            f"{host} keeps the packages that site.yml installed, with their accounts and folders. If nothing else needs these packages, remove them with "
            f"{command} {_join_names(packages, ' ')}"
        )
    if metrics_folders:
        sentences.append(f"{host} keeps {_join_names(metrics_folders)} for metrics: remove what is no longer needed.")
    return [*metrics_files, *(str(prefix.joinpath(*parts)) for parts in installed_paths)], sentences


def _join_names(entries: Iterable[str], separator: str = ", ") -> str:
    return separator.join(map(validation.printable, entries))


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents.

    :raises Refusal: it cannot be removed.
    """
    commands.run(["rm", "-rf", str(path)], REMOVAL_TIMEOUT_SECONDS)


def _remove_metrics(paths: InstallationPaths, check_mode: bool) -> tuple[list[str], list[str]]:
    """Remove the metrics of killed launchers, and the account's right to write there. Return the paths, and the folders that exist."""
    folder_by_service: dict[str, str] = {}
    with suppress(*reading.PARSE_ERRORS):
        entries = read_json(paths.prefix, names.METRICS_FILE)["services"].items()
        service_folders = [(service, (entry or {}).get("folder") or "") for service, entry in entries]
        folder_by_service = {service: folder for service, folder in service_folders if os.path.isabs(folder)}
    all_paths = (Path(folder, f"{service}.prom") for service, folder in folder_by_service.items())
    metrics_paths, folders = [*filter(os.path.lexists, all_paths)], {*filter(os.path.isdir, folder_by_service.values())}
    if not check_mode:
        for path in metrics_paths:
            _remove(path)
        for folder in folders if paths.scope == "system" else set():
            System().output("setfacl", "--remove", f"user:{names.ACCOUNT}", folder)
    return [str(path) for path in metrics_paths], sorted(folders)


def _installed_paths(prefix: Path) -> list[tuple[str, ...]]:
    """Return the parts of each path that an installation created below the prefix, with the mark last."""
    entries, folder = os.listdir(prefix), prefix / names.MODELS_FOLDER
    paths: list[tuple[str, ...]] = [(path.name,) for path in prefix.iterdir() if _is_temporary(path)]
    if folder.is_dir() and not folder.is_symlink():  # other programs may use the target of a link
        own_paths = {path for path in folder.iterdir() if _is_generated(path) or path.name == model_files.LOCK_FILE}
        paths += [(names.MODELS_FOLDER, path.name) for path in own_paths]
        if all(_is_temporary(path) for path in folder.iterdir() if path not in own_paths):
            paths.append((names.MODELS_FOLDER,))
    return [*paths, *((entry,) for entry in names.INSTALLED_ENTRIES if entry in entries)]


def _is_generated(path: Path) -> bool:
    return bool(GENERATED_MODEL_PATTERN.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMPORARY_PREFIXES) and path.is_file() and not path.is_symlink()


def give_to_root(account: str, cache: str, check_mode: bool) -> list[str]:
    """Make root the owner of the building account's files in the cache, because a later account may get the same uid. Return the paths."""
    uid, paths = pwd.getpwnam(account).pw_uid, []
    for folder, folders, file_names, descriptor in os.fwalk(cache) if os.path.isdir(cache) else ():
        for name in (*folders, *file_names):
            if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_uid == uid:
                paths.append(os.path.join(folder, name))
                if not check_mode:
                    os.chown(name, 0, 0, dir_fd=descriptor, follow_symlinks=False)
    return paths

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the collection made a folder, file, service or rule that has one of its names.

A run names what somebody else made, and neither overwrites nor removes it."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, files, names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.place import (
    Place,
    is_own_definition,
    kept_facts,
    place_in,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import model_files
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan

TEMPORARY = (files.TEMPORARY, ".ansible_tmp")
"""How names of files begin that a killed run leaves in a folder."""
REMOVAL_SECONDS = 600
GENERATED = re.compile(r"known-answer-.+\.gguf(\.part)?", re.ASCII | re.DOTALL)


def check(planned: HostPlan) -> None:
    """
    :raises Refusal: an apply would overwrite, or run, what somebody else has made.
    """
    manager = services.manager_of(place_in(planned))
    defined = (manager.path(service.name) for service in planned.services)
    theirs = [str(path) for path in defined if os.path.lexists(path) and not is_own_definition(path)]
    found = [*_folders(planned), *theirs]
    if found:
        raise Refusal(f"This host has {', '.join(found)}{names.NOT_OURS}")


def _folders(planned: HostPlan) -> Iterator[str]:
    """Where the prefix has no mark: what is in places of the installation there, and folders of another owner than planned. What is empty may stay."""
    prefix = Path(planned.prefix)
    if files.is_marked(prefix):
        return
    owners: dict[str, str | None] = {folder.path: folder.owner for folder in planned.folders if folder.owner}
    owners.update({str(prefix / name): None for name in names.INSTALLED if not _is_free(prefix / name)})
    for path, owner in owners.items():
        with suppress(FileNotFoundError):
            actual = processes.owner_of(os.stat(path).st_uid)
            if actual != owner:
                yield f"{path} (of {actual}{f', not of {owner}' if owner else ''})"


def _is_free(path: Path) -> bool:
    """Whether there is nothing, or an empty folder."""
    return not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not os.listdir(path))


# --------------------------------------------------------------------------------------------------------------- removal


def remove(place: Place, name: str, check: bool) -> tuple[list[str], list[str]]:
    """Removes what an installation has made below its prefix, the mark last: what a killed run left, the next one finds. The prefix itself goes where
    it is empty then.

    :param name: of the host.
    :returns: what is removed, or would be in check mode (paths), and what is left (a sentence for each).
    :raises Refusal: something cannot be removed.
    """
    prefix = Path(place.prefix)
    if not files.is_marked(prefix):
        why = f"it has no {names.FOLDER_MARK}, so it is not an installation of this collection"
        return [], [f"{prefix} on {name} stays: {why}."] if prefix.exists() else []
    installed = _installed(prefix)
    rest = sorted(set(os.listdir(prefix)) - {steps[0] for steps in installed if len(steps) == 1})
    beside = _take_metrics_back(place, check)
    for steps in [] if check else installed:
        _remove(prefix.joinpath(*steps))
    if not rest and not check:
        with suppress(OSError):  # a link, or a disk is mounted there
            os.rmdir(prefix)
    left = f"{prefix} on {name} stays with {', '.join(map(validation.printable, rest))}: remove by hand what nothing else uses."
    return [*beside, *(str(prefix.joinpath(*steps)) for steps in installed)], [left] if rest else []


def _remove(path: Path) -> None:
    """A file, or a folder with all that it holds, however deep; of a link the link alone.

    :raises Refusal: it cannot be removed.
    """
    commands.run(["rm", "-rf", str(path)], REMOVAL_SECONDS)


def _take_metrics_back(place: Place, check: bool) -> list[str]:
    """Removes what launchers that were killed have left for node exporter, and the account's right to write there. Returns the paths."""
    told = kept_facts(place.prefix, names.METRICS).get("services", {})
    described = {service: one for service, one in told.items() if one["folder"]}
    paths = [
        path for service, one in described.items() if os.path.lexists(path := Path(one["folder"], f"{service}.prom"))
    ]
    if not check:
        for path in paths:
            _remove(path)
        for folder in {one["folder"] for one in described.values()} if place.scope == "system" else set():
            System().output("setfacl", "--remove", f"user:{names.ROOT}", folder)
    return [str(path) for path in paths]


def _installed(prefix: Path) -> list[tuple[str, ...]]:
    """Steps below the prefix to each file and folder that an installation has made there, its mark last."""
    entries, models = os.listdir(prefix), prefix / names.MODELS
    found: list[tuple[str, ...]] = [(path.name,) for path in prefix.iterdir() if _is_temporary(path)]
    if models.is_dir() and not models.is_symlink():  # others may use what lies behind a link
        generated = {path for path in models.iterdir() if _is_generated(path)}
        found += [(names.MODELS, path.name) for path in generated]
        rest = (path for path in models.iterdir() if path not in generated)
        if all(path.name == model_files.LOCK or _is_temporary(path) for path in rest):
            found.append((names.MODELS,))
    return [*found, *((entry,) for entry in names.INSTALLED if entry in entries)]


def _is_generated(path: Path) -> bool:
    """Whether a file of the folder of models is a known-answer model, or a part of one."""
    return bool(GENERATED.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMPORARY) and path.is_file() and not path.is_symlink()


def give_back(account: str, cache: str, check: bool) -> list[str]:
    """Gives root what the building account has in the cache: when that account is gone, its number may become somebody else's. Returns the paths."""
    uid, paths = pwd.getpwnam(account).pw_uid, []
    for place, folders, inside, at in os.fwalk(cache) if os.path.isdir(cache) else ():
        for name in (*folders, *inside):
            if os.stat(name, dir_fd=at, follow_symlinks=False).st_uid == uid:
                paths.append(os.path.join(place, name))
                if not check:
                    os.chown(name, 0, 0, dir_fd=at, follow_symlinks=False)
    return paths

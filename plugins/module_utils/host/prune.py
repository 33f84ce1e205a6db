# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an installation has on its disk that nothing uses: models, parts of models, workers' caches and releases. It is found, and removed on request.

Used is what the plan, a plan that any cluster keeps on this host, the definition of a service or a process names, and what a process has open. Only the
folders of the installation are looked into, and no symbolic link is followed: the account of the services may write into some of them. The folder of
models alone may be a link, where only who administers the installation can have put it there.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import is_marked, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import plan_history, removal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import calibration
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, model_files
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ModelPlan

MODELS, PARTS, CACHES, RELEASES = KINDS = ("models", "parts", "caches", "releases")
NOBODY = "no plan, no service and no process uses it"
MOST = 200
"""Entries that are reported, the largest ones."""
SOURCE = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{8}", re.ASCII)
"""Name of a folder with the files of one source; see _sources. Other folders below models are the operator's."""
GENERATED = re.compile(r"known-answer-.+\.gguf(\..+\.sha256)?", re.ASCII | re.DOTALL)
END = r"(?![\w.+@-])"
"""After a path that is named whole: what follows is not part of its last name."""


class UnusedFile(NamedTuple):
    """What nothing uses on a disk."""

    kind: Annotated[str, KINDS]
    """of `llama_clean`"""
    path: Annotated[str, Text(longest=4096)]
    """of a file or a folder"""
    bytes: int
    """size"""
    age_s: int
    """since it was last written or read, as far as the file system says"""
    why: Annotated[str, Text(longest=2000)]
    """why nothing uses it"""


class _Size(NamedTuple):
    bytes: int
    used: float


def _measure(path: Path) -> _Size:
    """Of a file, or of all files of a folder."""
    found = path.lstat()
    size, used = (found.st_size, max(found.st_mtime, found.st_atime)) if stat.S_ISREG(found.st_mode) else (0, 0.0)
    for place, _folders, inside in os.walk(path) if stat.S_ISDIR(found.st_mode) else ():
        for name in inside:
            with suppress(OSError):
                status = os.lstat(os.path.join(place, name))
                size += status.st_size
                used = max(used, status.st_mtime, status.st_atime)
    return _Size(size, used or found.st_mtime)


def _entries(prefix: str, *steps: str) -> list[Path]:
    """What a folder below the prefix holds; nothing where it, or a folder above it, is missing or a link that is not followed."""
    folder = Path(prefix)
    for step in steps:
        folder = folder / step
        if not folder.is_dir() or (folder.is_symlink() and not removal.may_follow(folder)):
            return []
    return sorted(folder.iterdir())


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def is_generated(path: Path) -> bool:
    """Whether a file of the folder of models is a known-answer model, or the record of one."""
    return bool(GENERATED.fullmatch(path.name)) and _is_file(path)


class Used:
    """What this host uses, as texts that name paths, and as paths that processes have open."""

    def __init__(self, planned: HostPlan, model: ModelPlan) -> None:
        self.prefix = planned.prefix
        self.models = os.path.realpath(Path(self.prefix, names.MODELS))
        self.prefixes = {self.prefix, os.path.realpath(self.prefix)}
        self.texts = [*_words(model), *_words(planned.services)]
        self.folders = {self.models}
        for prefix in _installations(planned.prefix):
            folder = str(Path(prefix, names.MODELS))
            if os.path.realpath(folder) == self.models:
                self.folders |= {folder, _target_of(folder)}
            with suppress(OSError):
                for record in plan_history.read_all(prefix).records:
                    self.texts += [*_words(record.model), *_words(record.host.services)]
        manager = service_managers.MANAGERS[planned.service_manager]
        for path in Path(planned.units).glob("*"):
            if manager.service(path):
                text = text_of(path)
                self.texts += [text, text.replace("\\x20", " ").replace("%%", "%")]
        if sys.platform == "darwin":
            running = processes.of_account(planned.prefix, planned.account)
            self.texts += [" ".join(argv) for argv in running.values()]
        else:
            self.texts += _of_processes()
        self.texts = [text for text in self.texts if any(place in text for place in (*self.prefixes, *self.folders))]

    def names(self, path: Path) -> bool:
        """Whether something uses this path, or one below it."""
        below = path.relative_to(self.prefix)
        places = {f"{prefix}/{below}" for prefix in self.prefixes}
        if (
            below.parts[0] == names.MODELS
        ):  # which may be a link: processes have files open by the path behind it, and clusters may share it
            places |= {str(Path(folder, *below.parts[1:])) for folder in self.folders}
        return any(re.search(re.escape(place) + END, text) for place in places for text in self.texts)


def _target_of(folder: str) -> str:
    """Where a link leads, as it says itself: people name files so. The folder itself where it is none."""
    return (
        os.path.normpath(os.path.join(os.path.dirname(folder), os.readlink(folder)))
        if os.path.islink(folder)
        else folder
    )


def _words(value: Any) -> Iterator[str]:
    """Every text in a value, however it is nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _words(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _words(part)


def _installations(prefix: str) -> set[str]:
    """Prefixes of all clusters on this host."""
    folders = {path for top in ("/opt", os.path.dirname(prefix)) for path in Path(top).glob(names.ROOT + "*")}
    return {prefix, *(str(path) for path in folders if names.cluster_of_folder(path.name))}


def _of_processes() -> Iterator[str]:
    """What processes were started with, and what they have open or mapped, as far as this account may see it (Linux)."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield text_of(process / "cmdline").replace("\0", "\n")
            yield text_of(process / "maps")
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    yield os.readlink(link)


def find(planned: HostPlan, model: ModelPlan, kinds: Collection[str] = KINDS, locked: bool = False) -> list[UnusedFile]:
    """What nothing uses, the largest first; nothing in a folder without the collection's mark.

    :param locked: whether nobody can download a model now. Else models are left out while somebody does.
    """
    if not is_marked(Path(planned.prefix)):
        return []
    used = Used(planned, model)
    finders: dict[str, Callable[[HostPlan, Used], Iterator[UnusedFile]]] = {
        MODELS: _models,
        PARTS: _parts,
        CACHES: _caches,
        RELEASES: _releases,
    }
    if not locked and _is_downloading(planned.prefix):
        kinds = set(kinds) - {MODELS, PARTS}
    unused = [entry for kind in KINDS if kind in kinds for entry in finders[kind](planned, used)]
    paths = {Path(entry.path) for entry in unused}
    unused = [entry for entry in unused if not paths & set(Path(entry.path).parents)]
    return sorted(unused, key=lambda entry: -entry.bytes)


def _unused(kind: str, path: Path, why: str) -> UnusedFile:
    size = _measure(path)
    return UnusedFile(kind, str(path), size.bytes, max(0, int(time.time() - size.used)), why)


def _is_downloading(prefix: str) -> bool:
    """Whether a process downloads a model now."""
    try:
        with locks.hold(Path(prefix, names.MODELS, model_files.LOCK), flags=os.O_RDONLY):
            return False
    except (locks.BusyError, PermissionError):  # without permission this account cannot know
        return True
    except OSError:
        return False


def _sources(prefix: str) -> Iterator[tuple[Path, list[Path]]]:
    """Folders with the files of one source, each with the files in it. A download leaves a record or a part in each; a folder that has neither is the
    operator's, also where a date ends its name."""
    for path in _entries(prefix, names.MODELS):
        if _is_folder(path) and SOURCE.fullmatch(path.name):
            files = [Path(place, name) for place, _folders, inside in os.walk(path) for name in inside]
            if any(file.name == download_record.RECORD or file.name.endswith(model_files.PART) for file in files):
                yield path, files


def _models(planned: HostPlan, used: Used) -> Iterator[UnusedFile]:
    """Whole models: those of sources, and known-answer models."""
    for path, files in _sources(planned.prefix):
        if _is_whole(files) and not used.names(path):
            yield _unused(MODELS, path, "no plan and no service names it")
    for path in _entries(planned.prefix, names.MODELS):
        model = path.with_name(path.name.split(".gguf")[0] + ".gguf")
        if is_generated(path) and not used.names(model):
            yield _unused(MODELS, path, "a known-answer model, which is generated again when it is needed")
    for path in _entries(planned.prefix, names.BENCHMARKS):
        if path.name.startswith(calibration.NAME) and _is_file(path) and not used.names(path):
            yield _unused(MODELS, path, "of a calibration that did not end")


def _is_whole(files: Sequence[Path]) -> bool:
    """Whether the files of a source were all there once, also where a later download of it did not end."""
    return any(file.name == download_record.RECORD for file in files)


def _parts(planned: HostPlan, used: Used) -> Iterator[UnusedFile]:
    """What downloads have left that did not end: parts, and all files of a source that were never whole together."""
    for path, files in _sources(planned.prefix):
        if used.names(path):
            continue
        if not _is_whole(files):
            yield _unused(PARTS, path, "a download that did not end, of a model that no plan names")
            continue
        for file in files:
            if file.name.endswith(model_files.PART) and _is_file(file):
                yield _unused(PARTS, file, "a download that did not end, of a model that no plan names")


def _caches(planned: HostPlan, used: Used) -> Iterator[UnusedFile]:
    """Tensors of workers that no plan has."""
    for path in _entries(planned.prefix, "state", "cache"):
        if _is_folder(path) and not used.names(path):
            yield _unused(CACHES, path, "no planned worker and no kept plan uses it")


def _releases(planned: HostPlan, used: Used) -> Iterator[UnusedFile]:
    """Installed releases that are neither planned nor built now, with which no kept plan can go back, and programs of llama-swap."""
    planned_builds = {build.id for build in planned.builds}
    kept = planned_builds | plan_history.builds(planned.prefix)
    for path in _entries(planned.prefix, "releases"):
        identity = path.name.removeprefix(".")
        if not _is_folder(path) or identity in kept or store.under_way(planned.cache, identity):
            continue
        if not used.names(path):
            yield _unused(RELEASES, path, NOBODY)
    for path in _entries(planned.prefix, names.SWAP_PROGRAMS):
        if _is_file(path) and not used.names(path):
            yield _unused(RELEASES, path, NOBODY)


# -------------------------------------------------------------------------------------------------------------- removal


def remove(planned: HostPlan, model: ModelPlan, kinds: Collection[str], check: bool) -> list[UnusedFile]:
    """Removes what nothing uses, of these kinds, and returns it.

    :param check: only return it.
    :raises Refusal: it cannot be known, a model is fetched now, or the prefix has no mark. Nothing is removed then.
    :raises OSError: a file cannot be removed.
    """
    if os.path.lexists(planned.prefix) and not is_marked(Path(planned.prefix)):
        raise Refusal(
            f"{planned.prefix} has no {names.FOLDER_MARK}, so it is not an installation of this collection and nothing is removed there: run site.yml first"
        )
    for prefix in sorted(_installations(planned.prefix)):
        unreadable = plan_history.read_all(prefix).unreadable
        if unreadable:
            raise Refusal(
                f"it is not known what a kept plan uses: {unreadable[0]}. Remove that file, then run this again"
            )
    of_models = {MODELS, PARTS} & set(kinds)
    with _no_download(planned.prefix) if of_models else nullcontext():
        unused = find(planned, model, kinds, locked=True)
        for entry in [] if check else unused:
            try:
                _remove(planned, entry)
            except OSError as error:
                raise OSError(error.errno, error.strerror, entry.path) from error
    return unused


@contextmanager
def _no_download(prefix: str) -> Iterator[None]:
    """Keeps processes that fetch models away meanwhile. Where the file of their lock is missing, nobody has ever fetched one.

    :raises Refusal: one fetches now.
    """
    path = Path(prefix, names.MODELS, model_files.LOCK)
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.hold(path, flags=os.O_RDWR))
        except FileNotFoundError:
            pass
        except locks.BusyError:
            raise Refusal(
                f"{locks.shown_holders(path)} fetches a model on this host: wait for it, or leave models and parts out of llama_clean"
            ) from None
        yield


def _remove(planned: HostPlan, unused: UnusedFile) -> None:
    path = Path(unused.path)
    if path.parent.name == RELEASES and not path.name.startswith("."):
        store.remove_release(planned.prefix, planned.cache, path.name)
        return
    removal.remove_below(planned.prefix, *path.relative_to(planned.prefix).parts)

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fetched files of models as a host stores them: which are whole, and how they differ from the plan.

What is recorded and was not changed since counts as whole, and is not read again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record

PART = ".part"
"""Ends the name of a file that is not whole, beside its place."""
LOCK = ".fetching"
"""File in the folder of models whose lock belongs to the process that fetches, and that says how far it is."""
CHECKED = "checked"
"""In a record: what was found of each file when it was whole."""
ENTRY = {"bytes": Number(), "sha256": Text(download_record.SHA256), "modified": Number(-validation.LARGEST)}
"""Of a file there."""
OF_CONTROLLER = "file:"
"""How the URL of a file begins that lies on the controller."""


class File(NamedTuple):
    """A file of the model: where it belongs, where it comes from, and what it has to be. ``sha256`` is None where its source names none."""

    name: str
    path: Path
    url: str
    bytes: int
    sha256: str | None
    role: str
    record: Path
    sent: bool = False
    """Whether the controller sends it, so that its URL is not asked here."""


class Need(NamedTuple):
    """A file that is not whole here, or that nobody has checked."""

    file: File
    have: int
    """Bytes of it that are here."""
    unchecked: bool
    """Whether it lies in its place with the right size, and has to be read."""


def of_plan(
    files: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]] = (), by_controller: bool = False
) -> list[File]:
    """Those files of a plan's model that are fetched. A record has those at its side and below; without one it lies beside the file.

    :param by_controller: whether the controller fetches them, and sends them on.
    """
    folders = sorted((Path(record["path"]) for record in records), key=lambda path: -len(path.parts))
    found = []
    for file in files:
        url = file["url"]
        if not url:
            continue
        path = Path(file["path"])
        beside = next(
            (record for record in folders if record.parent in path.parents), path.with_name(download_record.RECORD)
        )
        sent = by_controller or url.startswith(OF_CONTROLLER)
        found.append(File(file["name"], path, url, file["bytes"], file["sha256"], file["role"], beside, sent))
    return found


def token_server(files: Iterable[File], records: Iterable[Mapping[str, Any]]) -> str | None:
    """A URL of the only server that a token is for: that of the first file. Ollama's registry takes none."""
    without = {str(record["path"]) for record in records if "ollama" in (record.get("asked") or {})}
    urls = (file.url for file in files if not file.url.startswith(OF_CONTROLLER) and str(file.record) not in without)
    return next(urls, None)


def part_of(path: Path) -> Path:
    return path.with_name(path.name + PART)


def size_of(path: Path) -> int | None:
    """Of a regular file; None of anything else."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def read_record(path: Path) -> dict[str, dict[str, Any]]:
    """Path → ``bytes``, ``sha256`` and ``modified`` (the file's time when it was checked) of a record's files, as far as it has their form."""
    checked: Any = None
    with suppress(OSError, ValueError):
        checked = reading.read_object(path, download_record.RECORD_BYTES).get(CHECKED)
    if not isinstance(checked, dict):
        return {}
    return {name: entry for name, entry in checked.items() if not validation.mismatch("it", entry, ENTRY)}


def _is_whole(file: File, entry: Mapping[str, Any] | None) -> bool:
    """Whether the file is here as its record says, and as the plan does."""
    if not entry or entry["bytes"] != file.bytes or file.sha256 not in (None, entry["sha256"]):
        return False
    with suppress(OSError):
        status = os.stat(file.path)
        same = status.st_size == file.bytes and int(status.st_mtime) == entry["modified"]
        return same and stat.S_ISREG(status.st_mode)
    return False


def compare(files: Sequence[File]) -> list[Need]:
    """What is not whole here, or is not known to be."""
    known = {record: read_record(record) for record in {file.record for file in files}}
    needs = []
    for file in files:
        if _is_whole(file, known[file.record].get(str(file.path))):
            continue
        in_place = size_of(file.path) == file.bytes and file.sha256 is not None
        have = file.bytes if in_place else size_of(part_of(file.path)) or 0
        resumes = in_place or (file.sha256 is not None and have <= file.bytes)
        needs.append(Need(file, have if resumes else 0, in_place))
    return needs


class Differences(NamedTuple):
    """Paths of what is not as planned: files that are missing or have other content, others that nobody has checked, and records."""

    missing: list[str]
    unchecked: list[str]
    records: list[str]


def differences(files: Sequence[File], records: Iterable[Mapping[str, Any]]) -> Differences:
    found = Differences([], [], [])
    for need in compare(files):
        entry = read_record(need.file.record).get(str(need.file.path))
        other = entry is not None and need.file.sha256 not in (None, entry.get("sha256"))
        same_size = size_of(need.file.path) == need.file.bytes
        (found.unchecked if same_size and not other else found.missing).append(str(need.file.path))
    if not found.missing and not found.unchecked:
        found.records.extend(_stale(files, records))
    return found


def content(record: Mapping[str, Any]) -> dict[str, Any]:
    """What is to stand in a record, beside what was found of its files."""
    return {key: value for key, value in record.items() if key != "path"}


def _stale(files: Iterable[File], records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Records that say something else than they are to say, apart from what was found of the files."""
    stale = []
    for record in records:
        known: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            known = reading.read_object(Path(record["path"]), download_record.RECORD_BYTES)
        known.pop(CHECKED, None)
        if any(file.record == Path(record["path"]) for file in files) and known != content(record):
            stale.append(str(record["path"]))
    return stale

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of a plan's model that a host downloads: which are whole, and how they differ from the plan.

What is recorded and was not changed since counts as whole, and is not read again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import DownloadRecordPlan, ModelFilePlan

PART = ".part"
"""Ends the name of a file that is not whole, beside its place."""
LOCK = ".fetching"
"""File in the folder of models whose lock belongs to the process that downloads, and that has its progress."""
CHECKED = "checked"
"""In a record: what each file was when it was whole."""
ENTRY = {"bytes": Number(), "sha256": Text(download_record.SHA256), "modified": Number(-validation.LARGEST)}
"""Of a file there."""
OF_CONTROLLER = "file:"
"""How the URL of a file begins that lies on the controller."""


class ModelFile(NamedTuple):
    """A file that is downloaded or sent: its place, its source, and what it has to be."""

    name: str
    path: Path
    url: str
    bytes: int
    sha256: str | None
    """None where its source names none."""
    record: Path
    sent: bool = False
    """Whether the controller sends it, so that its URL is not asked here."""

    @property
    def part(self) -> Path:
        return part_of(self.path)

    @property
    def local_path(self) -> Path | None:
        """On the controller; None of a file of a web server."""
        return Path(unquote(urlsplit(self.url).path)) if self.url.startswith(OF_CONTROLLER) else None


class PendingFile(NamedTuple):
    """A file that is not whole here, or that has not been checked."""

    file: ModelFile
    present_bytes: int
    in_place: bool
    """Whether it lies in its place with the right size, and has to be read."""


def of_plan(
    files: Iterable[ModelFilePlan], records: Iterable[DownloadRecordPlan] = (), by_controller: bool = False
) -> list[ModelFile]:
    """Those files of a plan's model that have a source. A record has those at its side and below; without one it lies beside the file.

    :param by_controller: whether the controller downloads them, and sends them on.
    """
    paths = sorted((Path(record.path) for record in records), key=lambda path: -len(path.parts))
    selected = []
    for file in files:
        if not file.url:
            continue
        path = Path(file.path)
        record = next((record for record in paths if record.parent in path.parents), None)
        sent = by_controller or file.url.startswith(OF_CONTROLLER)
        record = record or path.with_name(download_record.RECORD)
        selected.append(ModelFile(file.name, path, file.url, file.bytes or 0, file.sha256, record, sent))
    return selected


def token_server(files: Iterable[ModelFile], records: Iterable[DownloadRecordPlan]) -> str | None:
    """A URL of the only server that a token is for: that of the first file. Ollama's registry takes none."""
    without = {record.path for record in records if "ollama" in record.asked}
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


def checked_files(record: Path) -> dict[str, dict[str, Any]]:
    """Path → ``bytes``, ``sha256`` and ``modified`` (the file's time when it was checked) of a record's files, as far as it has their form."""
    checked = _content_of(record).get(CHECKED)
    if not isinstance(checked, dict):
        return {}
    return {name: entry for name, entry in checked.items() if not validation.mismatch("it", entry, ENTRY)}


def _content_of(record: Path) -> dict[str, Any]:
    """Nothing of a record that cannot be read."""
    with suppress(OSError, ValueError):
        return reading.read_object(record, download_record.RECORD_BYTES)
    return {}


def _is_whole(file: ModelFile, entry: Mapping[str, Any] | None) -> bool:
    """Whether the file is here as its record says, and as the plan does."""
    if not entry or entry["bytes"] != file.bytes or file.sha256 not in (None, entry["sha256"]):
        return False
    with suppress(OSError):
        status = os.stat(file.path)
        same = status.st_size == file.bytes and int(status.st_mtime) == entry["modified"]
        return same and stat.S_ISREG(status.st_mode)
    return False


def pending(files: Sequence[ModelFile]) -> list[PendingFile]:
    """What is not whole here, or is not known to be."""
    checked = {record: checked_files(record) for record in {file.record for file in files}}
    return [_pending(file) for file in files if not _is_whole(file, checked[file.record].get(str(file.path)))]


def _pending(file: ModelFile) -> PendingFile:
    """Without a checksum nothing of an earlier run is believed."""
    if file.sha256 is None:
        return PendingFile(file, 0, False)
    if size_of(file.path) == file.bytes:
        return PendingFile(file, file.bytes, True)
    size = size_of(file.part) or 0
    return PendingFile(file, size if size <= file.bytes else 0, False)


class Differences(NamedTuple):
    """Paths of what is not as planned: files that are missing or have other content, others that have not been checked, and records."""

    missing: list[str]
    unchecked: list[str]
    records: list[str]


def differences(files: Sequence[ModelFile], records: Iterable[DownloadRecordPlan]) -> Differences:
    result = Differences([], [], [])
    for file in (one.file for one in pending(files)):
        entry = checked_files(file.record).get(str(file.path))
        other = entry is not None and file.sha256 not in (None, entry["sha256"])
        unchecked = size_of(file.path) == file.bytes and not other
        (result.unchecked if unchecked else result.missing).append(str(file.path))
    if not result.missing and not result.unchecked:
        result.records.extend(stale_records(files, records))
    return result


def content(record: DownloadRecordPlan) -> dict[str, Any]:
    """What is to stand in a record, beside what its files were."""
    return {key: value for key, value in typed_json.dump(record).items() if key != "path"}


def stale_records(files: Iterable[ModelFile], records: Iterable[DownloadRecordPlan]) -> list[str]:
    """Records that have another content than they should, apart from what their files were."""
    used = {str(file.record) for file in files}
    return [
        record.path
        for record in records
        if record.path in used
        and {key: value for key, value in _content_of(Path(record.path)).items() if key != CHECKED} != content(record)
    ]

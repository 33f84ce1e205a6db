# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of a plan's model that a host downloads or gets: which are whole, and how they differ from the plan.

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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Maybe, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import DownloadRecordPlan, ModelFilePlan

LOCK = ".fetching"
"""File in the folder of models whose lock belongs to the process that downloads."""
CHECKED = "checked"
"""In a record: what each file was when it was whole."""
ENTRY = {"bytes": Number(), "sha256": Maybe(Text(download_record.SHA256)), "modified": Number(-validation.LARGEST)}
"""Of a file there."""
OF_CONTROLLER = "file:"
"""How the URL of a file begins that lies on the controller."""


class ModelFile(NamedTuple):
    """A file that is downloaded or copied: its place, its source, and what it has to be."""

    name: str
    path: Path
    url: str
    bytes: int
    sha256: str | None
    """None where its source names none."""
    record: Path

    @property
    def part(self) -> Path:
        """What has come of it, beside its place."""
        return self.path.with_name(self.path.name + ".part")

    @property
    def copied(self) -> bool:
        """Whether it comes from the controller."""
        return self.url.startswith(OF_CONTROLLER)

    @property
    def local_path(self) -> str:
        """On the controller, of one that is copied."""
        return unquote(urlsplit(self.url).path)


class PendingFile(NamedTuple):
    """A file that is not whole here, or that has not been checked, and how many bytes are here."""

    file: ModelFile
    present_bytes: int


def of_plan(planned: Iterable[ModelFilePlan]) -> list[ModelFile]:
    """Those files of a plan's model that have a source. Their record lies beside them."""
    return [
        ModelFile(
            file.name,
            Path(file.path),
            file.url,
            file.bytes or 0,
            file.sha256,
            Path(file.path).with_name(download_record.RECORD),
        )
        for file in planned
        if file.url
    ]


def token_server(wanted: Iterable[ModelFile]) -> str | None:
    """A URL of the only server that a token is for: that of the first file."""
    return next((file.url for file in wanted if not file.copied), None)


def size_of(path: Path) -> int | None:
    """Of a regular file; None of anything else."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def _checked(record: Path) -> dict[str, dict[str, Any]]:
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
    return size_of(file.path) == file.bytes and int(os.stat(file.path).st_mtime) == entry["modified"]


def pending(wanted: Sequence[ModelFile]) -> list[PendingFile]:
    """What is not whole here, or is not known to be."""
    checked = {record: _checked(record) for record in {file.record for file in wanted}}
    return [
        PendingFile(file, _present(file))
        for file in wanted
        if not _is_whole(file, checked[file.record].get(str(file.path)))
    ]


def _present(file: ModelFile) -> int:
    """Without a checksum nothing of an earlier run is believed."""
    if file.sha256 is None:
        return 0
    sizes = [size_of(path) or 0 for path in (file.path, file.part)]
    return file.bytes if sizes[0] == file.bytes else sizes[1] if sizes[1] <= file.bytes else 0


class Differences(NamedTuple):
    """Paths of what is not as planned: files that are missing or have other content, others that have not been checked, and records."""

    missing: list[str]
    unchecked: list[str]
    records: list[str]


def differences(wanted: Sequence[ModelFile], records: Iterable[DownloadRecordPlan]) -> Differences:
    result = Differences([], [], [])
    for file in (one.file for one in pending(wanted)):
        entry = _checked(file.record).get(str(file.path))
        other = entry is not None and file.sha256 not in (None, entry["sha256"])
        unchecked = size_of(file.path) == file.bytes and not other
        (result.unchecked if unchecked else result.missing).append(str(file.path))
    if not result.missing and not result.unchecked:
        result.records.extend(stale_records(wanted, records))
    return result


def content(record: DownloadRecordPlan) -> dict[str, Any]:
    """What is to stand in a record, beside what its files were."""
    return {key: value for key, value in typed_json.dump(record).items() if key != "path"}


def stale_records(wanted: Iterable[ModelFile], records: Iterable[DownloadRecordPlan]) -> list[str]:
    """Records that have another content than they should, apart from what their files were."""
    used = {str(file.record) for file in wanted}
    return [
        record.path
        for record in records
        if record.path in used
        and {key: value for key, value in _content_of(Path(record.path)).items() if key != CHECKED} != content(record)
    ]

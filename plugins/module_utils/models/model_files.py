# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of a plan's model that a host downloads or receives: which are complete, and how they differ from the plan.

Recorded files that have not changed since count as complete, and are not read again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.download_record import StoredFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan

LOCK_FILE = ".fetching"
"""Name of the lock file of downloads, in the folder of models."""


class PendingFile(NamedTuple):
    """A file that is incomplete or unchecked, with its present bytes."""

    file: ModelFilePlan
    present_bytes: int


def part_path(file: ModelFilePlan) -> Path:
    return Path(f"{file.path}.part")


def is_copied(file: ModelFilePlan) -> bool:
    return str(file.url).startswith("file:")


def size_of(path: str | Path) -> int | None:
    """Return the size of a regular file; None for anything else."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def is_known_answer(path: Path, size: int) -> bool:
    """Return whether a known-answer model is unchanged."""
    return size_of(path) == size and int(os.stat(path).st_mtime) == names.KNOWN_ANSWER_MTIME


def _stored_file(file: ModelFilePlan) -> StoredFile | None:
    record = download_record.read_record(Path(file.path).parent)
    return next((stored_file for stored_file in record.files if stored_file.name == file.name), None)


def pending_files(files: Iterable[ModelFilePlan]) -> list[PendingFile]:
    return [PendingFile(file, _present_bytes(file)) for file in files if not _is_complete(file, _stored_file(file))]


def _is_complete(file: ModelFilePlan, stored_file: StoredFile | None) -> bool:
    """Return whether the file exists as recorded and as planned."""
    if not stored_file or stored_file.bytes != file.bytes or file.sha256 not in (None, stored_file.sha256):
        return False
    return download_record.is_complete(Path(file.path).parent, stored_file)


def _present_bytes(file: ModelFilePlan) -> int:
    """Return the number of bytes that a download can reuse: none without a checksum."""
    if file.sha256 is None:
        return 0
    file_bytes, part_bytes, planned_bytes = size_of(file.path), size_of(part_path(file)) or 0, file.bytes or 0
    return planned_bytes if file_bytes == planned_bytes else part_bytes if part_bytes <= planned_bytes else 0


class Differences(NamedTuple):
    """Paths of files that are missing or have different content, and of files that have not been checked."""

    missing_files: list[str]
    unchecked_files: list[str]


def differences(files: Sequence[ModelFilePlan]) -> Differences:
    paths = Differences([], [])
    for file in (pending_file.file for pending_file in pending_files(files)):
        stored_file = _stored_file(file)
        has_other_digest = stored_file is not None and file.sha256 not in (None, stored_file.sha256)
        (
            paths.unchecked_files if size_of(file.path) == file.bytes and not has_other_digest else paths.missing_files
        ).append(file.path)
    return paths

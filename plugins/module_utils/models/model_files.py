# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of a plan's model that a host downloads or gets: which are whole, and how they differ from the plan.

What is recorded and was not changed since counts as whole, and is not read again.
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

LOCK = ".fetching"
"""File in the folder of models whose lock belongs to the process that downloads."""


class PendingFile(NamedTuple):
    """A file that is not whole here, or that has not been checked, and how many bytes are here."""

    file: ModelFilePlan
    present_bytes: int


def part_of(file: ModelFilePlan) -> Path:
    """What has come of a file, beside its place."""
    return Path(f"{file.path}.part")


def is_copied(file: ModelFilePlan) -> bool:
    """Whether it comes from the controller."""
    return str(file.url).startswith("file:")


def size_of(path: str | Path) -> int | None:
    """Of a regular file; None of anything else."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def is_known_answer(path: Path, size: int) -> bool:
    """Whether a known-answer model is there as it was written."""
    return size_of(path) == size and int(os.stat(path).st_mtime) == names.KNOWN_ANSWER_TIME


def _recorded(file: ModelFilePlan) -> StoredFile | None:
    """What its record says of a file."""
    record = download_record.read(Path(file.path).parent)
    return next((one for one in record.files if one.name == file.name), None)


def pending(wanted: Iterable[ModelFilePlan]) -> list[PendingFile]:
    """What is not whole here, or is not known to be."""
    return [PendingFile(file, _present(file)) for file in wanted if not _is_whole(file, _recorded(file))]


def _is_whole(file: ModelFilePlan, stored: StoredFile | None) -> bool:
    """Whether the file is here as its record says, and as the plan does."""
    if not stored or stored.bytes != file.bytes or file.sha256 not in (None, stored.sha256):
        return False
    return download_record.is_whole(Path(file.path).parent, stored)


def _present(file: ModelFilePlan) -> int:
    """Without a checksum nothing of an earlier run is believed."""
    if file.sha256 is None:
        return 0
    whole, part, planned = size_of(file.path), size_of(part_of(file)) or 0, file.bytes or 0
    return planned if whole == planned else part if part <= planned else 0


class Differences(NamedTuple):
    """Paths of files that are missing or have other content, and of others that have not been checked."""

    missing: list[str]
    unchecked: list[str]


def differences(wanted: Sequence[ModelFilePlan]) -> Differences:
    result = Differences([], [])
    for file in (one.file for one in pending(wanted)):
        stored = _recorded(file)
        other = stored is not None and file.sha256 not in (None, stored.sha256)
        (result.unchecked if size_of(file.path) == file.bytes and not other else result.missing).append(file.path)
    return result

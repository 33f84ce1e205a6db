# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of models that are fetched, and the record beside them.

A record says what each file was when it was whole. It is written when all files of its folder are, so a later run asks no server for them. The folder's
name has a digest of what was asked for.
"""

import os
import posixpath
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple, Optional
from urllib.parse import unquote, urlsplit

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Size
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import Sha256

RECORD = ".source.json"
"""Name of a record in the folder of its files."""
RECORD_BYTES = 4 << 20
SHA256 = r"[0-9a-f]{64}"

BASE_NAME = r"[A-Za-z0-9][A-Za-z0-9._+@=,() -]{0,249}"
"""Of a file on the head: it stands in command lines and definitions. File systems take 255 bytes, and one that is not whole has ``.part`` at its end."""


class StoredFile(NamedTuple):
    """A file as it was when it was whole."""

    name: str
    """As its source calls it; in the folder it has the last part of that."""
    bytes: Size
    sha256: Optional[Sha256]
    modified: Annotated[int, Number(-validation.LARGEST)]
    revision: Optional[str] = None


class Record(NamedTuple):
    files: tuple[StoredFile, ...]
    """Parts in their order."""


def base_name(name: str) -> str:
    """Under which a file lies on the head."""
    return posixpath.basename(name)


def name_of_url(url: str) -> str:
    """Of the file at an address; empty where its path has none."""
    return base_name(unquote(urlsplit(url).path))


def problem_of_name(name: str) -> Optional[str]:
    """Why a file of a source cannot have this name on the head; None where it can."""
    leads_out = name.startswith("/") or ".." in name.split("/")
    if re.fullmatch(BASE_NAME, base_name(name)) and validation.is_plain(name) and not leads_out:
        return None
    return "cannot be the name of a model's file on the head"


def read(folder: Path) -> Record:
    """The record of a folder of this host; an empty one where there is none that can be used."""
    with suppress(OSError, ValueError):
        return typed_json.parse(Record, reading.read_object(folder / RECORD, RECORD_BYTES))
    return Record(())


def is_whole(folder: Path, file: StoredFile) -> bool:
    """Whether a file is there as its record says, and was not changed since."""
    with suppress(OSError):
        path = folder / base_name(file.name)
        status = os.stat(path)
        return path.is_file() and (status.st_size, int(status.st_mtime)) == (file.bytes, file.modified)
    return False

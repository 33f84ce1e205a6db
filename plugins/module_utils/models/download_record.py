# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Downloaded model files and the record in their folder.

A record describes each file as it was when it was complete. It is written when all files of its folder are complete, so a later run needs no server.
The folder's name contains a digest of the request.
"""

import os
import posixpath
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple, Optional
from urllib.parse import unquote, urlsplit

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Size
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import Sha256

RECORD_FILE = ".source.json"
"""Name of the record in the folder of its files."""
MAX_RECORD_BYTES = 4 << 20
SHA256_PATTERN = r"[0-9a-f]{64}"

BASE_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._+@=,() -]{0,249}"
"""Pattern for a file's name on the head, which appears in command lines and definitions. File systems allow 255 bytes, and the download appends ``.part``."""


class StoredFile(NamedTuple):
    """A file as it was when its download completed."""

    name: str
    """Name at its source; in the folder the file has only the last part of this name."""
    bytes: Size
    sha256: Optional[Sha256]
    modified: Annotated[int, Number(-validation.MAX_INT)]
    revision: Optional[str] = None


class DownloadRecord(NamedTuple):
    files: tuple[StoredFile, ...]
    """Files, with parts in order."""


def base_name(name: str) -> str:
    return posixpath.basename(name)


def name_of_url(url: str) -> str:
    """Return the name of the file at a URL; empty if the URL's path has none."""
    return base_name(unquote(urlsplit(url).path))


def problem_of_name(name: str) -> Optional[str]:
    """Return the reason why a file cannot have this name on the head, or None."""
    is_outside = name.startswith("/") or ".." in name.split("/")
    if re.fullmatch(BASE_NAME_PATTERN, base_name(name)) and validation.is_plain(name) and not is_outside:
        return None
    return "is not allowed as the name of a model file on the head"


def read_record(folder: Path) -> DownloadRecord:
    """Return the record of a folder on this host; an empty record if it is missing or invalid."""
    return typed_json.read_file(DownloadRecord, folder / RECORD_FILE, MAX_RECORD_BYTES) or DownloadRecord(())


def is_complete(folder: Path, file: StoredFile) -> bool:
    """Return whether a file exists and has not changed since it was recorded."""
    with suppress(OSError):
        path = folder / base_name(file.name)
        status = os.stat(path)
        return path.is_file() and (status.st_size, int(status.st_mtime)) == (file.bytes, file.modified)
    return False

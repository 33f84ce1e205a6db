# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of models that are fetched, and the record beside them.

A record says what was asked for, and what that was resolved to. It is written when all files are whole, so a later run asks no server.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Maybe, Number, Text

MODEL, MMPROJ, DRAFT = ROLES = ("model", "mmproj", "draft")
RECORD = ".source.json"
"""Name of a record in the folder of its files."""
RECORD_BYTES = 4 << 20
SCHEMA = 1
SHA256 = r"[0-9a-f]{64}"

BASE_NAME = r"[A-Za-z0-9][A-Za-z0-9._+@=,() -]{0,249}"
"""Of a file on the head: it stands in command lines and definitions. File systems take 255 bytes, and one that is not whole has ``.part`` at its end."""
URL = Text(r"(https?|file)://\S+", 4096)
RESOLVED = {"name": Text(longest=1024), "bytes": Maybe(Number()), "sha256": Maybe(Text(SHA256))}
"""Of a file in a record: where it comes from follows from the variables, since the host that keeps the record may write anything there."""
NAMED = {**RESOLVED, "url": Maybe(URL)}
SHAPE: dict[str, Any] = {
    "schema": Number(SCHEMA, SCHEMA),
    "asked": {},
    "source": Text(longest=4096),
    "revision": Maybe(Text()),
    "resolved": [RESOLVED],
}
"""Of a record, which may say more. What was asked for was resolved to these files: parts in their order, in its folder under the last part of
``name``."""


class StoredDownload(NamedTuple):
    """What the head has of a source: its record, and what of it is not whole."""

    record: Mapping[str, Any]
    missing: tuple[str, ...]
    """Names of files that are missing, or have another size."""


def base_name(name: str) -> str:
    """Under which a file lies on the head."""
    return posixpath.basename(name)


def name_of_url(url: str) -> str:
    """Of the file at an address; empty where its path has none."""
    return base_name(unquote(urlsplit(url).path))


def problem_of_name(name: str) -> str | None:
    """Why a file of a source cannot have this name on the head; None where it can."""
    leads_out = name.startswith("/") or ".." in name.split("/")
    if re.fullmatch(BASE_NAME, base_name(name)) and validation.is_plain(name) and not leads_out:
        return None
    return "cannot be the name of a model's file on the head"


def problem_of_record(record: Mapping[str, Any]) -> str | None:
    """Why this is no record; None where it is one."""
    found = validation.problem("it", record) or validation.mismatch("it", record, SHAPE)
    if found:
        return f"{found.where} {found.why}"
    named = [file["name"] for file in record["resolved"]]
    if not named or len(set(map(base_name, named))) < len(named):
        return "its files have no names, or the same ones"
    return next((f"{name!r} {why}" for name in named if (why := problem_of_name(name))), None)


def read_record(folder: str) -> StoredDownload | None:
    """The record of a folder of this host, and which of its files are whole by their size; None without a record that can be used."""
    try:
        record = reading.read_object(Path(folder) / RECORD, RECORD_BYTES)
    except (OSError, ValueError):
        return None
    if problem_of_record(record):
        return None
    record = validation.complete(record, SHAPE)
    missing = tuple(file["name"] for file in record["resolved"] if not _is_whole(Path(folder), file))
    return StoredDownload(record, missing)


def _is_whole(folder: Path, file: Mapping[str, Any]) -> bool:
    path = folder / base_name(file["name"])
    try:
        return path.is_file() and not path.is_symlink() and os.path.getsize(path) == file["bytes"]
    except OSError:
        return False

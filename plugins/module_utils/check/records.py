# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Benchmarks that the head keeps, a file for each, and the logs of the programs that measured."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.apply import unused
from ansible_collections.llamacpp.cluster.plugins.module_utils.check import measured
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names, reading, untrusted
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal

ID = r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}"
RECORD_BYTES, LOG_BYTES = 64 << 20, 256 << 20
MATTERS = re.compile(r"buffer size =|error|fail|abort|terminate|exception|unable|cannot", re.IGNORECASE)
"""Lines of a program's stderr that are passed on, beside those at the beginning of a context."""
LAST_LINES = 3
KEPT = 20
"""Benchmarks with their logs. All those of the plan that serves are kept beside."""


def _path(prefix: str, identity: str) -> Path:
    if not re.fullmatch(ID, identity):
        raise Refusal(f"{untrusted.show(identity)} is not the id of a benchmark")
    return Path(prefix, names.BENCHMARKS, f"{identity}.json")


def write(prefix: str, record: Mapping[str, Any]) -> None:
    """Keeps what was measured so far, and removes benchmarks of earlier plans that are too old, with their logs."""
    path = _path(prefix, str(record.get("id")))
    path.parent.mkdir(mode=0o755, exist_ok=True)
    files.replace_file(path, json.dumps(record, indent=1) + "\n", 0o644)
    for identity in _names(prefix)[KEPT:]:
        if (_read(_path(prefix, identity)) or {}).get("plan") != record["plan"]:
            unused.remove_below(prefix, "state", names.BENCHMARKS, identity)
            unused.remove_below(prefix, names.BENCHMARKS, f"{identity}.json")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = reading.read_object(path, RECORD_BYTES)
    except (OSError, ValueError):
        return None
    return record if record.get("id") == path.stem and isinstance(record.get("cells"), list) else None


def _names(prefix: str) -> list[str]:
    """Ids of the benchmarks that are kept, the newest first; empty where this account may not look."""
    try:
        present = sorted(os.listdir(Path(prefix, names.BENCHMARKS)), reverse=True)
    except OSError:
        return []
    return [name[:-5] for name in present if re.fullmatch(ID + r"\.json", name)]


def last(prefix: str) -> str | None:
    """Id of the last benchmark."""
    return next(iter(_names(prefix)), None)


def find(prefix: str, identity: str | None = None) -> dict[str, Any]:
    """``benchmarks``, ``id`` and ``complete`` of each, the newest first, and ``record``, the one that is asked for, or the last."""
    read = [record for record in (_read(_path(prefix, name)) for name in _names(prefix)) if record]
    chosen = next((record for record in read if identity in (None, record["id"])), None)
    listed = [{"id": record["id"], "complete": record.get("ended") is not None} for record in read]
    return {"benchmarks": listed, "record": chosen}


def lines_of(path: str) -> str:
    """Of the log of a program that measures: results, sizes of buffers, and how it ended; empty where it has not written anything yet."""
    try:
        text = reading.read(Path(path), LOG_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    lines = [line for line in text.split("\n")[:-1] if measured.LINE.fullmatch(line)]
    last = lines[-LAST_LINES:]
    kept = [
        line
        for line in lines
        if " err " not in line[:24]
        or measured.LOADED.search(line)
        or MATTERS.search(line)
        or "|" in line
        or line in last
    ]
    return "\n".join(kept)

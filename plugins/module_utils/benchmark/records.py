# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Benchmarks that the head keeps, a file for each, and the logs of the programs that measured."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import results
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names, reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import prune

ID = r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}"
RECORD_BYTES, LOG_BYTES, LINE_BYTES, KEPT_BYTES = 64 << 20, 256 << 20, 1 << 20, 8 << 20
"""Of a record; and of a log, of its lines, and of those that are passed on together."""
MATTERS = re.compile(r"buffer size =|error|fail|abort|terminate|exception|unable|cannot", re.IGNORECASE)
"""Lines of a program's stderr that are passed on, beside those at the beginning of a context."""
LAST_LINES = 3
SAID = " err "
"""In what a program says beside its results."""
ENDED = re.compile(rb"(?:\A|\n)[0-9]{1,9}\.[0-9]{4} run ended with -?[0-9]{1,9}\n\Z")
"""At the end of the log of benchmark/runner.py."""
LOOK_SECONDS = 0.2
KEPT = 20
"""Benchmarks with their logs. All those of the plan that serves are kept beside."""


def _path(prefix: str, identity: str) -> Path:
    if not re.fullmatch(ID, identity):
        raise Refusal(f"{validation.show(identity)} is not the id of a benchmark")
    return Path(prefix, names.BENCHMARKS, f"{identity}.json")


def write(prefix: str, record: Mapping[str, Any]) -> None:
    """Keeps what was measured so far. The first time, benchmarks of earlier plans that are too old are removed, with their logs."""
    path = _path(prefix, str(record.get("id")))
    path.parent.mkdir(mode=0o755, exist_ok=True)
    begins = not path.exists()
    files.replace_file(path, json.dumps(record, indent=1) + "\n", 0o644)
    for identity in _names(prefix)[KEPT:] if begins else ():
        if (_read(_path(prefix, identity)) or {}).get("plan") != record["plan"]:
            prune.remove_below(prefix, "state", names.BENCHMARKS, identity)
            prune.remove_below(prefix, names.BENCHMARKS, f"{identity}.json")


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


def wait_for_end(path: str, seconds: float) -> None:
    """Waits until the program has ended, as its log says, so many seconds at most. Each further look would take processors from what is measured."""
    deadline = time.monotonic() + seconds
    while not _has_ended(path) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def _has_ended(path: str) -> bool:
    try:
        with reading.open_file(path) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 64))
            return bool(ENDED.search(stream.read(64)))
    except FileNotFoundError:
        return False


def lines_of(path: str) -> str:
    """Of the log of a program that measures: results, sizes of buffers, and how it ended; empty where it has not written anything yet."""
    try:
        with reading.open_file(path) as stream:
            return "\n".join(_kept(_lines(stream)))
    except FileNotFoundError:
        return ""


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Whole lines of the log; nothing of one that is too long, and of what is torn at its end."""
    left = LOG_BYTES
    while left > 0 and (data := stream.readline(LINE_BYTES)):
        left -= len(data)
        text = data.decode("utf-8", "replace")
        if text.endswith("\n") and results.LINE.fullmatch(text[:-1]):
            yield text[:-1]


def _kept(lines: Iterable[str]) -> list[str]:
    """Those that matter, and the last ones. What a program says beside its results takes no room from these."""
    kept: dict[int, str] = {}
    last: deque[tuple[int, str]] = deque(maxlen=LAST_LINES)
    room = {True: KEPT_BYTES, False: KEPT_BYTES}
    for number, line in enumerate(lines):
        last.append((number, line))
        beside = SAID in line[:24]
        if room[beside] > 0 and (not beside or _matters(line)):
            kept[number] = line
            room[beside] -= len(line)
    return [line for _number, line in sorted({**kept, **dict(last)}.items())]


def _matters(line: str) -> bool:
    return bool(results.LOADED.search(line) or MATTERS.search(line)) or "|" in line

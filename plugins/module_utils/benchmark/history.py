# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Benchmarks that the head keeps, a file for each, and the logs of the programs that measured."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import results
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import ID, Benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    files,
    names,
    reading,
    typed_json,
    validation,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import removal

RECORD_BYTES, LOG_BYTES, LINE_BYTES, PASSED_BYTES = 64 << 20, 256 << 20, 1 << 20, 8 << 20
"""Of a record; and of a log, of its lines, and of those that are passed on together."""
MATTERS = re.compile(
    rf"{results.LOADED.pattern}|error|fail|abort|terminate|exception|unable|cannot|\d (?:out|run) ", re.IGNORECASE
)
"""Lines of a log that are passed on: results, and what went wrong."""
LAST_LINES = 3
MOST = 20
"""Benchmarks that are kept with their logs."""


def _path(prefix: str, identity: str) -> Path:
    if not re.fullmatch(ID, identity):
        raise Refusal(f"{validation.show(identity)} is not the id of a benchmark")
    return Path(prefix, names.BENCHMARKS, f"{identity}.json")


def write(prefix: str, record: Benchmark) -> None:
    """Writes a record, and removes the oldest ones with their logs."""
    path = _path(prefix, record.id)
    path.parent.mkdir(mode=0o755, exist_ok=True)
    files.replace_file(path, json.dumps(typed_json.dump(record), indent=1) + "\n", 0o644)
    for identity in ids(prefix)[MOST:]:
        removal.remove_below(prefix, "state", names.BENCHMARKS, identity)
        removal.remove_below(prefix, names.BENCHMARKS, f"{identity}.json")


def ids(prefix: str) -> list[str]:
    """Ids of the benchmarks that are kept, the newest first; empty where this account may not look."""
    try:
        present = sorted(os.listdir(Path(prefix, names.BENCHMARKS)), reverse=True)
    except OSError:
        return []
    return [name[:-5] for name in present if re.fullmatch(ID + r"\.json", name)]


def lines_of(path: str) -> str:
    """Of the log of a program that measures, what matters and the last lines; empty where it has not written anything yet. What is torn at its end is
    left out, and a line that is too long."""
    chosen: dict[int, str] = {}
    last: deque[tuple[int, str]] = deque(maxlen=LAST_LINES)
    unread, room, number = LOG_BYTES, PASSED_BYTES, 0
    try:
        with reading.open_file(path) as stream:
            while unread > 0 and (data := stream.readline(LINE_BYTES)):
                unread, number = unread - len(data), number + 1
                line = data.decode("utf-8", "replace")
                if not line.endswith("\n") or not results.LINE.fullmatch(line[:-1]):
                    continue
                last.append((number, line))
                if room > 0 and MATTERS.search(line):
                    chosen[number] = line
                    room -= len(line)
    except FileNotFoundError:
        return ""
    return "".join(line for _number, line in sorted({**chosen, **dict(last)}.items()))

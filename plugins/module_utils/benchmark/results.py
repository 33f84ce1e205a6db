# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Results of llama-bench, read from its files on the head."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import parse_count
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable

TAIL_BYTES = {"jsonl": 1 << 20, "log": 16 << 10, "status": 16}
"""Number of bytes to read from the end of a program's file, by its suffix."""
MAX_LOG_LINES, MAX_LINE_LENGTH = 3, 500
"""Maximum number of log lines to show, and maximum length of a line."""


def result_of(text: str) -> types.Result | None:
    """Return the result in a line of ``llama-bench -o jsonl``; None for any other line."""
    try:
        row = typed_json.parse(types.BenchRow, reading.parse(text))
        test = f"pp{row.n_prompt}" if row.n_prompt else f"tg{row.n_gen}"
    except ValueError:
        return None
    has_one_phase = bool(row.n_prompt) != bool(row.n_gen)
    return (
        types.Result(test, row.n_depth, types.Speed(float(row.avg_ts), float(row.stddev_ts))) if has_one_phase else None
    )


def read_progress(folder: Path, number: int) -> types.ProgramProgress:
    """Return a program's results so far. The services' account owns its files, so they may contain anything."""
    rows, log, status = (
        reading.read_tail(folder / f"{types.FILE_PREFIX}{number}.{suffix}", size) for suffix, size in TAIL_BYTES.items()
    )
    last_lines = [printable(line, MAX_LINE_LENGTH) for line in log.splitlines() if line.strip()][-MAX_LOG_LINES:]
    results = tuple(filter(None, map(result_of, rows.splitlines())))
    return types.ProgramProgress(results, parse_count(status), " / ".join(last_lines))

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What llama-bench has measured, by the files that it writes on the head."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import (
    FILES,
    Program,
    Result,
    Row,
    Speed,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable

SIZES = {"jsonl": 1 << 20, "log": 16 << 10, "status": 16}
"""Ending of a program's file → bytes of it that are read, the last ones."""
ERRORS, LOG_LINE = 3, 500
"""Last lines of a log that are shown, and characters of each."""


def result_of(text: str) -> Result | None:
    """What a line of ``llama-bench -o jsonl`` says; None of any other line."""
    try:
        row = typed_json.parse(Row, reading.parse(text))
        test = f"pp{row.n_prompt}" if row.n_prompt else f"tg{row.n_gen}"
    except ValueError:
        return None
    one = bool(row.n_prompt) != bool(row.n_gen)
    return Result(test, row.n_depth, Speed(float(row.avg_ts), float(row.stddev_ts))) if one else None


def read(state: Path, number: int) -> Program:
    """What a program has written so far. Its files are the services' account's, which may have put anything there.

    :param number: of the program.
    """
    rows, log, status = (reading.end_of(state / f"{FILES}{number}.{end}", size) for end, size in SIZES.items())
    last = [printable(line, LOG_LINE) for line in log.splitlines() if line.strip()][-ERRORS:]
    found = tuple(filter(None, map(result_of, rows.splitlines())))
    return Program(found, int(status) if status.strip().isdecimal() else None, " / ".join(last))

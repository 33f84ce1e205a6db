# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What llama-bench writes, and the figures of cells that follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import FASTEST, SLOWEST, Cell, Speed
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable

LINE = re.compile(r"([0-9]{1,9}\.[0-9]{4}) (out|err|run) (.*)")
"""Of benchmark/runner.py."""
LOADED = re.compile(r"constructing llama_context|llama_init_from_model: n_ctx\s*=")
"""With which the making of a context begins: the model is loaded."""
ENDED = re.compile(r"ended with (-?[0-9]{1,9})")
ERRORS, LOG_LINE = 3, 500
"""Last lines of a program that failed, which are shown, and characters of each."""


class Log(NamedTuple):
    """What llama-bench wrote, so far."""

    speeds: Mapping[tuple[str, int], Speed]
    """Test and depth → tokens per second."""
    load_s: float | None
    status: int | None
    """None while it runs, or where its end is not written."""
    last: tuple[str, ...]
    """Its last lines."""


def speed_of(text: str) -> tuple[tuple[str, int], Speed] | None:
    """Test, depth and speed of a line of ``llama-bench -o jsonl``; None of any other line."""
    if not text.startswith("{"):
        return None
    try:
        row = reading.parse(text)
        prompt, generated, depth = int(row["n_prompt"]), int(row["n_gen"]), int(row["n_depth"])
        samples = tuple(round(float(sample), 4) for sample in row["samples_ts"])
        mean, deviation = float(row["avg_ts"]), float(row["stddev_ts"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    possible = bool(prompt) != bool(generated) and samples and 0 <= deviation <= FASTEST
    if not possible or not all(SLOWEST <= number <= FASTEST for number in (*samples, mean)):
        return None
    return (f"pp{prompt}" if prompt else f"tg{generated}", depth), Speed(mean, deviation, samples)


def read(text: str) -> Log:
    """The log of benchmark/runner.py; its last line may be torn."""
    lines = [match.groups() for match in map(LINE.fullmatch, text.split("\n")) if match]
    errors = [words for _time, kind, words in lines if kind == "err"]
    ends = [ENDED.fullmatch(words) for _time, kind, words in lines if kind == "run"]
    statuses = [int(match[1]) for match in ends if match]
    return Log(
        speeds=dict(filter(None, (speed_of(words) for _time, kind, words in lines if kind == "out"))),
        load_s=next((float(seconds) for seconds, _kind, words in lines if LOADED.search(words)), None),
        status=statuses[-1] if statuses else None,
        last=tuple(printable(line)[:LOG_LINE] for line in errors if line.strip())[-ERRORS:],
    )


def fill(cells: Iterable[Cell], log: Log) -> list[Cell]:
    """Cells that one program measures, with what its log says of them so far."""
    filled = []
    for cell in cells:
        speed = log.speeds.get((cell.test, cell.depth))
        filled.append(cell._replace(measured=speed, load_s=log.load_s) if speed else cell)
    return filled


def failure_of(log: Log) -> str:
    """Why a program that has ended did not measure what it should."""
    how = f"ended with status {log.status}"
    if log.status is not None and log.status < 0:
        how = f"was ended by signal {-log.status}"
    return f"llama-bench {how}: {' / '.join(log.last) or 'it wrote nothing'}"

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What programs that measure write, and the figures of cells that follow from it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import FASTEST, SLOWEST, Cell, Speed
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import start_log

LINE = re.compile(r"([0-9]{1,9}\.[0-9]{4}) (out|err|run) (.*)")
"""Of benchmark/runner.py."""
LOADED = re.compile(r"constructing llama_context|llama_(?:new_context_with_model|init_from_model): n_ctx\s*=")
"""With which the making of a context begins: the model is loaded. In the trees of 0.3.16 to 0.3.36, and in ik_llama.cpp."""
SWEPT = re.compile(
    r"\|\s*([0-9]{1,9}) \|\s*([0-9]{1,9}) \|\s*([0-9]{1,9}) \|\s*[0-9.]+ \|\s*([0-9]+\.[0-9]+) \|\s*[0-9.]+ \|\s*([0-9]+\.[0-9]+) \|"
)
"""PP, TG, N_KV, T_PP, S_PP, T_TG and S_TG of llama-sweep-bench (examples/sweep-bench of ik_llama.cpp)."""
PROXY = re.compile(r"(127\.0\.0\.1:[0-9]{1,5}) leads to (\S+)")
ENDED = re.compile(r"ended with (-?[0-9]{1,9})")
ERRORS, LOG_LINE = 3, 500
"""Last lines of a program that failed, which are shown, and characters of each."""


class Result(NamedTuple):
    """What one test gave."""

    test: str
    depth: int
    samples: tuple[float, ...]
    """Tokens per second, one for each repetition."""
    mean: float
    deviation: float
    """Both as the program says them, which has more digits of the samples."""
    swept: bool = False
    """Whether llama-sweep-bench says it."""
    acceptance: float | None = None
    """Share of predicted tokens that were accepted; None where none were."""


class Log(NamedTuple):
    """What a program that measures wrote, so far."""

    results: tuple[Result, ...]
    repetitions: int
    """That the proxy saw begin, where latencies take turns."""
    load_s: float | None
    memory_mib: Mapping[str, float]
    """Device, as the plan names it → the most that it held, with weights, cache and compute buffer."""
    status: int | None
    """None while it runs, or where its end is not written."""
    last: tuple[str, ...]
    """Its last lines."""


def is_speed(number: float) -> bool:
    """Whether it can be a speed: neither nothing, nor beyond all that there is."""
    return SLOWEST <= number <= FASTEST


def speed_of(samples: Sequence[float]) -> Speed:
    deviation = round(statistics.stdev(samples), 4) if len(samples) > 1 else 0.0
    return Speed(round(statistics.fmean(samples), 4), deviation, tuple(round(sample, 4) for sample in samples))


def results_of(text: str) -> list[Result]:
    """A line of ``llama-bench -o jsonl``, or of runner.Runner, or a row of the table of llama-sweep-bench; empty for any other line."""
    swept = SWEPT.match(text.strip())
    if swept:
        prompt, generated, depth = (int(number) for number in swept.groups()[:3])
        speeds = {f"pp{prompt}": float(swept[4]), f"tg{generated}": float(swept[5])}
        return [Result(test, depth, (speed,), speed, 0.0, True) for test, speed in speeds.items() if is_speed(speed)]
    if not text.startswith("{"):
        return []
    try:
        row = reading.parse(text)
        prompt, generated, depth = int(row["n_prompt"]), int(row["n_gen"]), int(row.get("n_depth", 0))
        samples = tuple(float(sample) for sample in row["samples_ts"])
        mean, deviation = float(row["avg_ts"]), float(row["stddev_ts"])
        drafted, accepted = int(row.get("drafted", 0)), int(row.get("accepted", 0))
    except (ValueError, KeyError, TypeError, OverflowError):
        return []
    possible = bool(prompt) != bool(generated) and samples and all(map(is_speed, (*samples, mean)))
    if not possible or not 0 <= deviation <= FASTEST:
        return []
    acceptance = round(accepted / drafted, 3) if 0 <= accepted <= drafted and drafted else None
    return [Result(f"pp{prompt}" if prompt else f"tg{generated}", depth, samples, mean, deviation, False, acceptance)]


def read(text: str) -> Log:
    """The log of benchmark/runner.py; its last line may be torn."""
    lines = [match.groups() for match in map(LINE.fullmatch, text.split("\n")) if match]
    errors = [words for _time, kind, words in lines if kind == "err"]
    notes = [words for _time, kind, words in lines if kind == "run"]
    proxies = {match[1]: match[2] for match in map(PROXY.fullmatch, notes) if match}
    statuses = [int(match[1]) for match in map(ENDED.fullmatch, notes) if match]
    return Log(
        results=tuple(result for _time, _kind, words in lines for result in results_of(words)),
        repetitions=notes.count("repetition"),
        load_s=next((float(seconds) for seconds, _kind, words in lines if LOADED.search(words)), None),
        memory_mib=_memory(errors, proxies),
        status=statuses[-1] if statuses else None,
        last=tuple(printable(line)[:LOG_LINE] for line in errors if line.strip())[-ERRORS:],
    )


def _memory(lines: Sequence[str], workers: Mapping[str, str]) -> dict[str, float]:
    """:param workers: endpoint of a proxy → the worker's."""
    starts = [number for number, line in enumerate(lines) if LOADED.search(line)]
    ends = [*starts, len(lines)]
    weights = _sums("\n".join(lines[: ends[0]]))
    most: dict[str, float] = {}
    for start, end in zip(starts, ends[1:]):
        for device, mib in _sums("\n".join(lines[start:end])).items():
            if device in most or len(most) < start_log.DEVICES:
                most[device] = max(most.get(device, 0), mib)
    whole = {device: round(weights.get(device, 0) + most.get(device, 0), 2) for device in (*weights, *most)}
    names = {device: re.search(r"127\.0\.0\.1:[0-9]+", device) for device in whole}
    return {
        device.replace(match[0], workers.get(match[0], match[0])) if (match := names[device]) else device: mib
        for device, mib in whole.items()
    }


def _sums(text: str) -> dict[str, float]:
    """Device → MiB of all of its buffers."""
    return {device: sum(kind.mib for kind in kinds.values()) for device, kinds in start_log.buffers(text).items()}


def fill(cells: Iterable[Cell], log: Log, latencies: Sequence[float]) -> list[Cell]:
    """Cells that a command line measures, with what its log says of them so far.

    :param latencies: that take turns with the repetitions, the first of them while the model is loaded.
    """
    latest = {(result.test, result.depth): result for result in log.results}
    return [
        _filled(cell, log, latest.get((cell.test, cell.depth)) or _of_pieces(cell, latest), latencies) for cell in cells
    ]


def _of_pieces(cell: Cell, latest: Mapping[tuple[str, int], Result]) -> Result | None:
    """A prompt of several micro-batches, of which llama-sweep-bench gives each by itself, one after the other as llama-server computes them."""
    tokens, depth = int(cell.test[2:]), cell.depth
    swept = [int(test[2:]) for (test, _depth), result in latest.items() if result.swept and test.startswith("pp")]
    size = min(swept, default=0)
    if not cell.test.startswith("pp") or not size or tokens % size:
        return None
    pieces = [latest.get((f"pp{size}", start)) for start in range(depth, depth + tokens, size)]
    if not all(pieces):
        return None
    seconds = sum(size / piece.mean for piece in pieces if piece)
    return Result(cell.test, depth, (tokens / seconds,), tokens / seconds, 0.0)


def _filled(cell: Cell, log: Log, result: Result | None, latencies: Sequence[float]) -> Cell:
    # The longest test of a load may come last, so memory is that of the whole log.
    memory = tuple(row._replace(measured_mib=log.memory_mib.get(row.device)) for row in cell.memory_mib)
    cell = cell._replace(memory_mib=memory)
    if not result or not _are_known(log, latencies):
        return cell
    turn = latencies.index(cell.latency_ms) if len(latencies) > 1 and cell.latency_ms is not None else 0
    samples = result.samples[turn :: max(1, len(latencies))]
    if not samples:
        return cell
    speed = speed_of(samples)
    if len(latencies) < 2:  # rounded twice, one in some hundreds would not be the figure that the log has
        speed = speed._replace(mean=result.mean, deviation=result.deviation)
    load_s = None if turn else log.load_s
    return cell._replace(measured=speed, load_s=load_s, skipped=None, acceptance=result.acceptance)


def _are_known(log: Log, latencies: Sequence[float]) -> bool:
    """Whether each sample had the latency whose turn it was: the proxy saw every repetition begin."""
    return len(latencies) < 2 or log.repetitions >= sum(len(result.samples) for result in log.results)


def failure_of(log: Log, argv: Sequence[str], latencies: Sequence[float]) -> str:
    """Why a program that has ended did not measure what it should."""
    how = f"ended with status {log.status}"
    if log.status is not None and log.status < 0:
        how = f"was ended by signal {-log.status}"
    if log.status == 0 and not _are_known(log, latencies):
        how = "did not say when each repetition began: give one value in llama_benchmark_latency_ms"
    return f"{PurePosixPath(argv[0]).name} {how}: {' / '.join(log.last) or 'it wrote nothing'}"

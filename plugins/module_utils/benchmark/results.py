# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What programs that measure have written, and what follows from it: cells of a benchmark, and how generation depends on latency."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import (
    LONGEST,
    Maybe,
    Number,
    Text,
    complete,
    mismatch,
    printable,
    problem,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import verification

LINE = re.compile(r"([0-9]{1,9}\.[0-9]{4}) (out|err|run) (.*)")
"""Of benchmark/runner.py."""
ADDED = re.compile(r"benchmark ([0-9]{1,9}), repetition ([0-9]{1,9}): (\S{1,20}) ms are added")
"""What benchmark/runner.py says when a repetition begins, where several latencies take turns."""
LOADED = re.compile(r"constructing llama_context|llama_(?:new_context_with_model|init_from_model): n_ctx\s*=")
"""With which the making of a context begins: the model is loaded. In the trees of 0.3.16 to 0.3.36, and in ik_llama.cpp."""
SWEPT = re.compile(
    r"\|\s*([0-9]{1,9}) \|\s*([0-9]{1,9}) \|\s*([0-9]{1,9}) \|\s*[0-9.]+ \|\s*([0-9]+\.[0-9]+) \|\s*[0-9.]+ \|\s*([0-9]+\.[0-9]+) \|"
)
"""PP, TG, N_KV, T_PP, S_PP, T_TG and S_TG of llama-sweep-bench (examples/sweep-bench of ik_llama.cpp)."""
ERRORS = 3
"""Last lines of a program that failed, which are shown."""
ENDPOINT = re.compile(r"127\.0\.0\.1:[0-9]+")
LOG_LINE = 500
SLOWEST, FASTEST = 1e-4, 1e9
"""Tokens per second, or seconds. Figures are kept with four digits: a smaller one would be none."""


class Result(NamedTuple):
    """What one test gave."""

    test: str
    depth: int
    samples: tuple[float, ...]
    """Tokens per second, one for each repetition."""
    mean: float | None = None
    deviation: float | None = None
    """Both as the program says them, which has more digits of the samples; None where it does not."""
    latencies_ms: tuple[str, ...] = ()
    """Which the proxy added to each sample, as it writes them, where several take turns. Empty where the log does not say it of each."""


class Log(NamedTuple):
    """What a program that measures wrote, so far."""

    results: list[Result]
    load_s: float | None
    memory_mib: dict[str, float]
    """Device, as the plan names it → the most that it held, with weights, cache and compute buffer."""
    status: int | None
    """None while it runs, or where its end is not written."""
    last: list[str]
    """Its last lines."""


def is_speed(number: float) -> bool:
    """Whether it can be a speed, or seconds to the first token: neither nothing, nor beyond all that there is."""
    return SLOWEST <= number <= FASTEST


def result_of(text: str) -> Result | None:
    """A line of ``llama-bench -o jsonl``; None of any other line, and of a test of both kinds at once."""
    if not text.startswith("{"):
        return None
    try:
        row = reading.parse(text)
        prompt, generated = int(row["n_prompt"]), int(row["n_gen"])
        samples = tuple(float(sample) for sample in row["samples_ts"])
        depth = int(row.get("n_depth", 0))
        mean, deviation = float(row["avg_ts"]), float(row["stddev_ts"])
    except (ValueError, KeyError, TypeError):
        return None
    if bool(prompt) == bool(generated) or not all(map(is_speed, (*samples, mean))) or not 0 <= deviation <= FASTEST:
        return None
    if not samples:
        return None
    return Result(f"pp{prompt}" if prompt else f"tg{generated}", depth, samples, mean, deviation)


def sweep_results(text: str) -> list[Result]:
    """A row of the table of llama-sweep-bench; empty for any other line."""
    found = SWEPT.match(text.strip())
    if not found:
        return []
    prompt, generated, depth = (int(number) for number in found.groups()[:3])
    speeds = {f"pp{prompt}": float(found[4]), f"tg{generated}": float(found[5])}
    return [Result(test, depth, (speed,)) for test, speed in speeds.items() if is_speed(speed)]


def _memory(lines: Sequence[str], names: Mapping[str, str]) -> dict[str, float]:
    """:param names: endpoint of a proxy → the worker's."""
    starts = [number for number, line in enumerate(lines) if LOADED.search(line)]
    ends = [*starts, len(lines)]
    weights = verification.buffers("\n".join(lines[: ends[0]]))
    contexts = [verification.buffers("\n".join(lines[start:end])) for start, end in zip(starts, ends[1:])]
    most: dict[str, float] = {}
    for one in contexts:
        for device, kinds in one.items():
            if device in most or len(most) < verification.DEVICES:
                most[device] = max(most.get(device, 0), sum(kind.mib for kind in kinds.values()))
    held = {device: sum(kind.mib for kind in kinds.values()) for device, kinds in weights.items()}
    whole = {device: round(held.get(device, 0) + most.get(device, 0), 2) for device in (*held, *most)}
    return {ENDPOINT.sub(lambda found: names.get(found[0], found[0]), device): mib for device, mib in whole.items()}


def read(text: str) -> Log:
    """The log of benchmark/runner.py; its last line may be torn."""
    lines = [found for found in map(LINE.fullmatch, text.split("\n")) if found]
    results, said, proxies, status = [], [], {}, None
    # Other threads write the lines of repetitions and those of figures, so each of them may be before the other.
    turns: dict[int, dict[int, str]] = {}
    benchmarks: list[int] = []
    rows = 0
    for line in lines:
        rows += line[2] == "out" and line[3].startswith("{")
        own = result_of(line[3])
        found = [own] if own else sweep_results(line[3])
        results += found
        benchmarks += [rows] * len(found)
        adds = ADDED.fullmatch(line[3])
        leads = re.fullmatch(r"(127\.0\.0\.1:\d+) leads to (\S+)", line[3])
        ended = re.fullmatch(r"ended with (-?\d{1,9})", line[3])
        if line[2] == "run" and leads:
            proxies[leads[1]] = leads[2]
        elif line[2] == "run" and adds:
            turns.setdefault(int(adds[1]), {})[int(adds[2])] = adds[3]
        elif line[2] == "run" and ended:
            status = int(ended[1])
        elif line[2] == "err":
            said.append(line[3])
    results = [_with_turns(result, turns.get(number, {})) for result, number in zip(results, benchmarks)]
    loaded = next((float(line[1]) for line in lines if LOADED.search(line[3])), None)
    last = [printable(line)[:LOG_LINE] for line in said if line.strip()][-ERRORS:]
    return Log(results, loaded, _memory(said, proxies), status, last)


def measured_of(samples: Sequence[float], unit: str) -> dict[str, Any]:
    return {
        "mean": round(statistics.fmean(samples), 4),
        "deviation": round(statistics.stdev(samples), 4) if len(samples) > 1 else 0,
        "samples": [round(sample, 4) for sample in samples],
        "unit": unit,
    }


def _figures(result: Result) -> dict[str, float]:
    """As the program says them: rounded twice, one in some hundreds would not be the figure that its log has."""
    said = {"mean": result.mean, "deviation": result.deviation}
    return {name: value for name, value in said.items() if value is not None}


def with_memory(cell: Mapping[str, Any], log: Log) -> dict[str, Any]:
    """The cell with what devices held so far: the longest test of a load may come last."""
    rows = [{**row, "measured_mib": log.memory_mib.get(row["device"])} for row in cell["memory_mib"]]
    return {**cell, "memory_mib": rows}


def fill(cell: Mapping[str, Any], log: Log, argv: Sequence[str], path: str) -> dict[str, Any] | None:
    """The cell with what the log says of it; None where it does not say it yet."""
    own = [result for result in log.results if (result.test, result.depth) == (cell["test"], cell["depth"])]
    in_turns = options.SAYS_REPETITIONS in argv
    result = _of_latency(own[-1], cell["latency_ms"]) if own and in_turns else own[-1] if own else None
    if not result:
        return None
    loaded = not in_turns or own[-1].latencies_ms[0] == f"{cell['latency_ms']:g}"
    return {
        **with_memory(cell, log),
        "measured": {**measured_of(result.samples, "t/s"), **_figures(result)},
        "load_s": log.load_s if loaded else None,
        "skipped": None,
        "argv": list(argv),
        "log": path,
        "time": int(time.time()),
    }


def _with_turns(result: Result, latencies: Mapping[int, str]) -> Result:
    """:param latencies: number of a repetition, from 1 → its latency."""
    numbers = range(1, len(result.samples) + 1)
    if set(latencies) != set(numbers):
        return result
    return result._replace(latencies_ms=tuple(latencies[number] for number in numbers))


def _of_latency(result: Result, latency: float) -> Result | None:
    """The repetitions that had this latency; None where the log does not say which had it."""
    turns = zip(result.samples, result.latencies_ms)
    samples = tuple(sample for sample, added in turns if added == f"{latency:g}")
    return Result(result.test, result.depth, samples) if samples else None


def failure_of(log: Log, argv: Sequence[str]) -> str:
    """Why a program that has ended did not measure what it should."""
    how = "was ended" if log.status is None else f"ended with status {log.status}"
    if log.status is not None and log.status < 0:
        how = f"was ended by signal {-log.status}"
    turned = all(result.latencies_ms for result in log.results)
    if options.SAYS_REPETITIONS in argv and log.status == 0 and not turned:
        how = "did not say when each repetition began: give one value in llama_benchmark_latency_ms"
    return f"{PurePosixPath(argv[0]).name} {how}: {' / '.join(log.last) or 'it said nothing'}"


def is_done(cell: Mapping[str, Any]) -> bool:
    """Whether nothing more is to be measured for a cell."""
    return bool(cell["measured"] or cell["skipped"])


def fits(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How milliseconds per generated token depend on the latency that the proxy adds: a line for each row of cells that differ in that alone."""
    rows: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in cells:
        if cell["proxied"] and cell["measured"] and cell["test"].startswith("tg"):
            same = (*cell["hosts"], cell["backend"], cell["model"], *cell["options"].values(), cell["bandwidth_mbit"])
            rows.setdefault((*same, cell["test"], cell["depth"]), []).append(cell)
    return [_fit(row) for row in rows.values() if len({cell["latency_ms"] for cell in row}) > 1]


def _fit(row: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The line of least squares through the fastest repetition of each cell: whatever else a host does, adds to the others."""
    latencies = [float(cell["latency_ms"]) for cell in row]
    times = [1000 / max(cell["measured"]["samples"]) for cell in row]
    slope, fixed = _line(latencies, times)
    first = row[0]
    return {
        "cells": [cell["key"] for cell in row],
        **{key: first[key] for key in ("hosts", "backend", "model", "test")},
        "workers": len(first["workers"]),
        "fixed_ms": round(max(0.0, fixed), 4),
        "crossings": round(slope, 3),
        "planned_crossings": (first["predicted"] or {}).get("crossings") or 0,
        "worst": round(max(abs(fixed + slope * latency - ms) / ms for latency, ms in zip(latencies, times)), 4),
    }


def visits(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each visit to a worker costs a token: of the milliseconds that are not predicted for the devices, the slope over numbers of hosts.
    A rate that is wrong for all devices alike adds the same to each number of them, and is not taken for a visit's. None where nothing is left."""
    rows: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in cells:
        known = (cell["predicted"] or {}).get("visits") is not None
        if known and cell["measured"] and cell["test"].startswith("tg") and not cell["proxied"] and not cell["depth"]:
            rows.setdefault((cell["backend"], cell["model"], *cell["options"].values(), cell["test"]), []).append(cell)
    found = [_visit(row) for row in rows.values() if len({cell["predicted"]["visits"] for cell in row}) > 1]
    return [visit for visit in found if visit["visit_ms"] > 0]


def _visit(row: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = [cell["predicted"]["visits"] for cell in row]
    times = [1000 / max(cell["measured"]["samples"]) - cell["predicted"]["devices_ms"] for cell in row]
    slope, _fixed = _line(counts, times)
    first = row[0]
    return {
        "cells": [cell["key"] for cell in row],
        **{key: first[key] for key in ("backend", "model", "test")},
        "visit_ms": round(slope, 3),
    }


def _line(places: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Slope of the line of least squares, and its value at 0."""
    middle, mean = statistics.fmean(places), statistics.fmean(values)
    spread = sum((place - middle) ** 2 for place in places)
    slope = sum((place - middle) * (value - mean) for place, value in zip(places, values)) / spread
    return slope, mean - slope * middle


FIGURE, WORDS = Number(real=True), Text(longest=LONGEST)
KEPT = {
    "measured": Maybe({"mean": FIGURE, "deviation": FIGURE, "samples": [FIGURE], "unit": ("t/s", "s")}),
    "load_s": Maybe(FIGURE),
    "memory_mib": [
        {"device": Text(), "host": Text(), "planned_mib": FIGURE, "measured_mib": Maybe(FIGURE)},
    ],
    "skipped": Maybe(WORDS),
    "argv": [WORDS],
    "log": Maybe(WORDS),
    "time": Maybe(Number()),
}
"""What the record of an earlier run says of a cell, as far as it is taken over."""


def can_be_kept(cell: Any) -> bool:
    """Whether a cell of an earlier run's record, which anybody may have written, can be taken over."""
    shape = {"key": Text(longest=LONGEST), **KEPT}
    if problem("", cell) or mismatch("", cell, shape) or complete(cell, shape) != cell:
        return False
    return not cell["measured"] or are_speeds(cell["measured"])


def are_speeds(figures: Mapping[str, Any]) -> bool:
    """Whether ``measured`` of a cell has samples, and they and their mean can be speeds."""
    return bool(figures["samples"]) and all(map(is_speed, (figures["mean"], *figures["samples"])))

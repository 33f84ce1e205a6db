# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which curves and comparisons the cells of a benchmark give: numbers and words alone, nothing is drawn here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report.measurements import Benchmark, Cell, Measured

COLOURS = 8
MOST_CURVES = 6
"""In one figure; more are hard to tell apart."""
SAME_SCALE = 5
"""Curves whose largest values differ by more get figures of their own, since the smaller one would be flat."""

AXES = {
    "hosts": "number of hosts",
    "depth": "tokens already in the cache",
    "latency_ms": "added latency, one way (ms)",
    "bandwidth_mbit": "bandwidth (Mbit/s)",
    "parallel": "requests at once",
    "tokens": "tokens of the prompt",
}
"""Dimension → what a curve over it has below."""
PROMPTS = ("pp", "api-ttft")
TESTS = (*PROMPTS, "tg", "api-tg")
KINDS = {
    "pp": "Prompts",
    "tg": "Generation",
    "api-ttft": "Time to the first token, by the API",
    "api-tg": "Generation, by the API, all requests together",
    "load": "Loading the model",
    "fit": "Time of a token",
}
UNITS = {"t/s": "tokens per second", "s": "seconds", "ms": "milliseconds per token"}

NAMES: dict[str, Callable[[Any], str]] = {
    "model": str,
    "backend": str,
    "hosts": lambda value: f"{value} host{'s' * (value != 1)}",
    "tokens": lambda value: f"{value} tokens",
    "depth": lambda value: f"{value} tokens in the cache" if value else "empty cache",
    "parallel": lambda value: f"{value} requests at once" if value > 1 else "one request",
    "proxied": lambda value: "through the proxy" if value else "direct",
    "latency_ms": lambda value: f"{value:g} ms added" if value else "no latency added",
    "bandwidth_mbit": lambda value: "full bandwidth" if value is None else f"{value:g} Mbit/s",
    "ubatch": lambda value: f"-ub {value}",
    "flash_attention": lambda value: f"flash attention {value}",
    "cache_type_k": lambda value: f"K {value}",
    "cache_type_v": lambda value: f"V {value}",
    "split": lambda value: f"split {value}" if value else "planned split",
}
"""Dimension → its value for a person, in the order in which curves and titles name them."""
APART = (
    "backend", "ubatch", "flash_attention", "cache_type_k", "cache_type_v", "split", "bandwidth_mbit", "tokens", "proxied", "latency_ms", "parallel", "depth",
    "hosts", "model",
)  # fmt: skip
"""By which dimension curves are divided into figures first, where there are too many for one."""


class Point(NamedTuple):
    """``spread`` goes to both sides of ``y``; ``predicted`` is None where nothing is predicted."""

    x: float
    y: float
    spread: float
    predicted: float | None


class Curve(NamedTuple):
    """Points in order of x. ``number`` (0 to COLOURS - 1) chooses colour and letter: what has the same name has the same one, where that can be."""

    name: str
    points: tuple[Point, ...]
    number: int


class Figure(NamedTuple):
    """Curves with the same axes. ``common`` is what all their cells have in common and others have not, ``dashed`` what the dashed lines
    are, ``shown`` what the points are."""

    title: str
    common: str
    x: str
    y: str
    unit: str
    curves: tuple[Curve, ...]
    dashed: str = "predicted"
    shown: str = "mean ± standard deviation"


class _Line(NamedTuple):
    dimensions: dict[str, Any]
    points: tuple[Point, ...]

    @property
    def largest(self) -> float:
        return max(point.y for point in self.points)


def _point(cell: Cell, axis: str) -> Point | None:
    if cell.measured is None or cell.dimensions[axis] is None:
        return None
    return Point(cell.dimensions[axis], cell.measured.mean, cell.measured.deviation, cell.predicted)


def _lines(cells: Iterable[Cell], axis: str) -> list[_Line]:
    """Points that differ in this dimension alone, where there are two of them or more."""
    alike: dict[tuple, list[Point]] = {}
    for cell in cells:
        found = _point(cell, axis)
        if found:
            key = tuple((name, value) for name, value in cell.dimensions.items() if name != axis)
            alike.setdefault(key, []).append(found)
    lines = [_Line(dict(key), tuple(sorted(points, key=lambda point: point.x))) for key, points in alike.items()]
    return [line for line in lines if len({point.x for point in line.points}) > 1]


def _varying(lines: Iterable[_Line], axis: str) -> list[str]:
    """The dimensions in which lines differ, in the order in which they are named."""
    whole = [line.dimensions for line in lines]
    return [name for name in NAMES if name != axis and len({dimensions.get(name) for dimensions in whole}) > 1]


def _divide(lines: list[_Line], axis: str) -> list[list[_Line]]:
    """Lines that share a figure: few enough, and of a like size."""
    varying = [name for name in APART if name in _varying(lines, axis)]
    if len(lines) > MOST_CURVES and varying:
        groups: dict[Any, list[_Line]] = {}
        for line in lines:
            groups.setdefault(line.dimensions[varying[0]], []).append(line)
        return [part for group in groups.values() for part in _divide(group, axis)]
    parts: list[list[_Line]] = []
    for line in sorted(lines, key=lambda line: -line.largest):
        if not parts or line.largest * SAME_SCALE < parts[-1][0].largest or len(parts[-1]) == MOST_CURVES:
            parts.append([])
        parts[-1].append(line)
    return parts


def words(dimensions: dict[str, Any], names: Iterable[str]) -> str:
    """These dimensions for a person. What is added to the network says that the proxy is there, and without the proxy nothing is added."""
    names = [name for name in names if name in dimensions]
    added = dimensions.get("latency_ms") or dimensions.get("bandwidth_mbit") is not None
    if "proxied" in names and "latency_ms" in names:
        names.remove("proxied" if added else "latency_ms")
    return ", ".join(NAMES[name](dimensions[name]) for name in names)


def _numbers(labels: list[str], known: dict[str, int]) -> list[int]:
    """A number for each curve of a figure, by its name."""
    numbers: list[int] = []
    for label in labels:
        number = known.setdefault(label, len(known)) % COLOURS
        while number in numbers:
            number = (number + 1) % COLOURS
        numbers.append(number)
    return numbers


def _figures(kind: str, axis: str, unit: str, lines: list[_Line], known: dict[str, int]) -> list[Figure]:
    """:param lines: all of this kind over this axis.
    :param known: name → number, of the curves of the whole page.
    """
    varying = _varying(lines, axis)
    fixed = [] if axis == "tokens" or kind == "load" else ["tokens"]
    found = []
    for part in _divide(lines, axis):
        ordered = sorted(part, key=lines.index)
        own = _varying(part, axis)
        said = [name for name in (*varying, *fixed) if name not in own]
        labels = [words(line.dimensions, own) for line in ordered]
        if not own:
            labels, said = [words(ordered[0].dimensions, ["model"])], [name for name in said if name != "model"]
        curves = [
            Curve(label, line.points, number) for label, line, number in zip(labels, ordered, _numbers(labels, known))
        ]
        common = words(ordered[0].dimensions, dict.fromkeys(said))
        found.append(Figure(KINDS[kind], common, AXES[axis], UNITS[unit], unit, tuple(curves)))
    return found


def _numbers_of_models(measured: Benchmark) -> dict[str, int]:
    """Numbers of the models, which have them first."""
    return {model: number for number, model in enumerate(measured.about["models"])}


def _fits(measured: Benchmark, known: dict[str, int]) -> list[Figure]:
    """Milliseconds of a token over the added latency, and the lines that are fitted to them."""
    cells = {cell.key: cell for cell in measured.cells}
    lines = []
    for fit in measured.about["fits"]:
        found = [cells[key] for key in fit["cells"] if key in cells]
        points = [
            _time(cell.dimensions["latency_ms"], cell.measured, fit)
            for cell in found
            if cell.measured and cell.measured.largest
        ]
        if len({point.x for point in points}) > 1:
            size = {name: found[0].dimensions[name] for name in ("model", "backend", "hosts", "tokens")}
            lines.append(_Line(size, tuple(sorted(points, key=lambda point: point.x))))
    drawn = _figures("fit", "latency_ms", "ms", lines, known)
    return [figure._replace(dashed="fitted", shown="fastest repetition") for figure in drawn]


def _time(latency: float, measured: Measured, fit: dict[str, Any]) -> Point:
    """Milliseconds of a token where so many tokens per second were measured."""
    fitted = fit["fixed_ms"] + fit["crossings"] * latency
    return Point(latency, 1000 / measured.largest, 0.0, fitted)


def figures(measured: Benchmark) -> dict[str, list[Figure]]:
    """Dimension → the figures of all curves over it, without those that have none."""
    parts: dict[str, list[Figure]] = {}
    known = _numbers_of_models(measured)
    for axis in AXES:
        found = []
        for kind in TESTS:
            cells = [cell for cell in measured.cells if cell.dimensions["kind"] == kind]
            if axis == "tokens" and kind not in PROMPTS:
                continue
            lines = _lines(cells, axis)
            if lines:
                unit = next(cell.measured.unit for cell in cells if cell.measured)
                found += _figures(kind, axis, unit, lines, known)
        if axis == "latency_ms":
            found += _fits(measured, known)
        if found:
            parts[axis] = found
    return parts


class Load(NamedTuple):
    """Seconds to load a model: the mean of so many loads, the shortest and the longest one, and what the plan says of a load without caches."""

    model: str
    backend: str
    hosts: int
    mean: float
    shortest: float
    longest: float
    loads: int
    predicted: float | None


def loads(measured: Benchmark) -> list[Load]:
    """Of each model on so many hosts, without the proxy."""
    found: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in measured.cells:
        size = cell.dimensions
        if cell.load_s is not None and not size["proxied"]:
            found.setdefault((size["model"], size["backend"], size["hosts"]), []).append(cell)
    rows = []
    for (model, backend, hosts), cells in sorted(found.items()):
        seconds = [cell.load_s for cell in cells if cell.load_s is not None]
        predicted = [cell.predicted_load_s for cell in cells if cell.predicted_load_s is not None]
        mean, longest = statistics.fmean(seconds), max(predicted, default=None)
        rows.append(Load(model, backend, hosts, mean, min(seconds), max(seconds), len(seconds), longest))
    return rows


def load_figures(measured: Benchmark, rows: list[Load]) -> list[Figure]:
    """Seconds to load over the number of hosts, where that differs."""
    alike: dict[tuple, list[Point]] = {}
    for row in rows:
        spread = max(row.mean - row.shortest, row.longest - row.mean)
        alike.setdefault((row.model, row.backend), []).append(Point(row.hosts, row.mean, spread, row.predicted))
    lines = [
        _Line({"model": model, "backend": backend}, tuple(points))
        for (model, backend), points in alike.items()
        if len(points) > 1
    ]
    drawn = _figures("load", "hosts", "s", lines, _numbers_of_models(measured)) if lines else []
    return [figure._replace(shown="mean ± the farthest load") for figure in drawn]


class Difference(NamedTuple):
    """The same cell of two benchmarks. ``spread`` is two standard errors of the difference, None where one of them is not known."""

    before: Cell
    after: Cell
    change: float
    spread: float | None
    part: float
    verdict: str


def _difference(before: Cell, after: Cell) -> Difference | None:
    old, new = before.measured, after.measured
    if not old or not new or old.unit != new.unit or not old.mean:
        return None
    change = new.mean - old.mean
    spread = None
    if old.error is not None and new.error is not None:
        spread = 2 * (old.error**2 + new.error**2) ** 0.5
    better = change > 0 if new.unit == "t/s" else change < 0
    verdict = "faster" if better else "slower"
    if spread is None:
        verdict = "spread not known"
    elif abs(change) <= spread:
        verdict = "within the spread"
    return Difference(before, after, change, spread, change / old.mean, verdict)


class Comparison(NamedTuple):
    """Cells that both have, and the keys of those that one alone measured."""

    differences: tuple[Difference, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]


def compare(before: Benchmark, after: Benchmark) -> Comparison:
    """How the measurements of two benchmarks differ; a cell is the same where its key is."""
    old = {cell.key: cell for cell in before.cells if cell.measured}
    new = {cell.key: cell for cell in after.cells if cell.measured}
    both = [_difference(old[key], cell) for key, cell in new.items() if key in old]
    return Comparison(
        tuple(difference for difference in both if difference),
        tuple(key for key in old if key not in new),
        tuple(key for key in new if key not in old),
    )

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which curves the cells of a benchmark give, and where their points are in a drawing."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark, Cell

AXES = {
    "hosts": "number of hosts",
    "depth": "tokens in the cache",
    "latency_ms": "added latency, one way (ms)",
    "tokens": "tokens of the prompt",
}
"""What curves are drawn over → its words."""
KINDS = {"pp": "Prompts", "tg": "Generation"}
WORDS = {"hosts": "{} hosts", "tokens": "{} tokens", "depth": "{} tokens in the cache", "latency_ms": "{} ms added"}
MOST_CURVES = 8
"""In one figure: there are as many colours."""
LEFT, RIGHT, TOP, BOTTOM = 70, 425, 12, 215
"""Sides of the plane in a drawing of 440 x 260."""
CLOSEST = 40
"""Between two numbers below the plane."""


class Point(NamedTuple):
    x: float
    mean: float
    deviation: float
    predicted: float | None


class Curve(NamedTuple):
    name: str
    points: tuple[Point, ...]


class Figure(NamedTuple):
    """Curves of one model and kind of test."""

    title: str
    axis: str
    curves: tuple[Curve, ...]


def _dimensions(cell: Cell) -> dict[str, Any]:
    """All that tells a cell apart from others."""
    sizes = {"hosts": len(cell.hosts), "tokens": int(cell.test[2:]), "depth": cell.depth, "latency_ms": cell.latency_ms}
    return {**cell.settings, "kind": cell.test[:2], "model": cell.model, "backend": cell.backend, **sizes}


def figures(record: Benchmark) -> list[Figure]:
    """All curves: of cells that differ in one of AXES alone, where there are two of them or more."""
    drawn = []
    for axis in AXES:
        lines: dict[tuple, list[Point]] = {}
        for cell in record.cells:
            size = _dimensions(cell)
            if cell.measured and size[axis] is not None and (axis != "tokens" or size["kind"] == "pp"):
                point = Point(size.pop(axis), cell.measured.mean, cell.measured.deviation, cell.predicted)
                lines.setdefault(tuple(size.items()), []).append(point)
        groups: dict[tuple[str, str], list[tuple[dict[str, Any], list[Point]]]] = {}
        for key, points in lines.items():
            if len({point.x for point in points}) > 1:
                size = dict(key)
                groups.setdefault((size["kind"], size["model"]), []).append(
                    (size, sorted(points, key=lambda point: point.x))
                )
        for (kind, model), group in groups.items():
            names = _names([size for size, _points in group])
            curves = [Curve(name, tuple(points)) for name, (_size, points) in zip(names, group)]
            for start in range(0, len(curves), MOST_CURVES):
                drawn.append(Figure(f"{KINDS[kind]}, {model}", axis, tuple(curves[start : start + MOST_CURVES])))
    return drawn


def _names(sizes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of curves that share a figure: what tells them apart."""
    every = dict.fromkeys(name for size in sizes for name in size)
    apart = [name for name in every if len({size.get(name) for size in sizes}) > 1]
    return [", ".join(_words(name, size.get(name)) for name in apart) or "measured" for size in sizes]


def _words(name: str, value: Any) -> str:
    if name == "latency_ms" and value is None:
        return "without the proxy"
    return WORDS.get(name, f"{name} {{}}" if name.startswith("llama_") else "{}").format(value)


def figure_of(value: float | None) -> str:
    """A number with three digits that count, or all that stand before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def drawing(figure: Figure) -> dict[str, Any]:
    """Where the template draws a figure: numbers beside the axes, and of each curve its points with their titles and lines."""
    points = [point for curve in figure.curves for point in curve.points]
    least, most = min(point.x for point in points), max(point.x for point in points)
    step = _step(max(max(point.mean + point.deviation, point.predicted or 0) for point in points))
    count = math.ceil(max(max(point.mean + point.deviation, point.predicted or 0) for point in points) / step)

    def across(x: float) -> float:
        return round(LEFT + (x - least) / (most - least) * (RIGHT - LEFT), 1)

    def down(y: float) -> float:
        return round(BOTTOM - y / (step * count) * (BOTTOM - TOP), 1)

    def line(values: Iterable[tuple[float, float | None]]) -> str:
        return " ".join(f"{across(x)},{down(y)}" for x, y in values if y is not None)

    return {
        "figure": figure,
        "axis": AXES[figure.axis],
        "rows": [(down(step * number), figure_of(step * number)) for number in range(count + 1)],
        "columns": [(place, f"{x:g}") for place, x in _apart((across(x), x) for x in {point.x for point in points})],
        "curves": [
            {
                "number": number,
                "letter": string.ascii_uppercase[number],
                "name": curve.name,
                "line": line((point.x, point.mean) for point in curve.points),
                "predicted": line((point.x, point.predicted) for point in curve.points),
                "points": [
                    {
                        "x": across(point.x),
                        "y": down(point.mean),
                        "low": down(max(0, point.mean - point.deviation)),
                        "high": down(point.mean + point.deviation),
                        "title": f"{curve.name}: {figure_of(point.mean)} ± {figure_of(point.deviation)} t/s at {point.x:g}"
                        + (f", predicted {figure_of(point.predicted)}" if point.predicted is not None else ""),
                    }
                    for point in curve.points
                ],
            }
            for number, curve in enumerate(figure.curves)
        ],
    }


def _step(highest: float) -> float:
    """A round number of which four to ten reach so high."""
    power = 10.0 ** math.floor(math.log10(highest))
    return power * next(part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if highest / power / part <= 8)


def _apart(places: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that do not cover each other."""
    labels: list[tuple[float, float]] = []
    for place in sorted(places):
        if not labels or place[0] - labels[-1][0] >= CLOSEST:
            labels.append(place)
    return labels

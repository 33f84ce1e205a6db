# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the page shows of a benchmark: rows of texts for its template."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import amount
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import curves, plots
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report.curves import Curve, Figure
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report.measurements import Benchmark, Cell, Measured
from markupsafe import Markup

OVER = {
    "hosts": "Over the number of hosts",
    "depth": "Over the depth of the cache",
    "latency_ms": "Over added latency",
    "bandwidth_mbit": "Over the bandwidth",
    "parallel": "Over requests at once",
    "tokens": "Over the length of the prompt",
}
COMPARED = "Compared with the earlier benchmark"
VERDICTS = ("slower", "faster", "spread not known", "within the spread")
"""Of a comparison, in the order in which they are shown."""
MOST_OPEN = 40
"""Rows of a comparison that are shown without being asked for."""
SETTINGS = ("ubatch", "flash_attention", "cache_type_k", "cache_type_v", "split")
USUAL = {"depth": 0, "parallel": 1, "proxied": False, "latency_ms": 0, "bandwidth_mbit": None}


class Placed(NamedTuple):
    """MiB that the log of a cell says of each device of a plan, None where it does not; ``cell`` names it."""

    cell: str
    mib: tuple[float | None, ...]


def shown(value: float | None) -> str:
    """A number for a table, or nothing."""
    return "" if value is None else plots.figure_of(value)


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.0f} %"


def _mean(measured: Measured | None) -> str:
    return f"{shown(measured.mean)} ± {shown(measured.deviation)} {measured.unit}" if measured else ""


def _test(cell: Cell) -> str:
    return f"{cell.dimensions['kind']}{cell.dimensions['tokens']}"


class Names:
    """How cells are named: by what differs from the usual, which is said once."""

    def __init__(self, cells: Iterable[Cell]):
        whole = [cell.dimensions for cell in cells]
        self.usual: dict[str, Any] = dict(USUAL)
        for name in SETTINGS:
            values = [dimensions[name] for dimensions in whole]
            self.usual[name] = max(values, key=values.count, default=None)

    def __call__(self, cell: Cell, without: Iterable[str] = ()) -> str:
        size = cell.dimensions
        varied = [name for name in curves.NAMES if name not in ("tokens", *without)]
        varied = [name for name in varied if name not in self.usual or size[name] != self.usual[name]]
        return ", ".join(filter(None, [_test(cell), curves.words(size, varied)]))

    def said(self) -> str:
        return f"Where a name does not say something else: {curves.words(self.usual, (*SETTINGS, *USUAL))}."


def memory_of_plan(measured: Benchmark, plan: Plan) -> Placed | None:
    """What was measured of the memory that a plan places: of the cell with the same model and devices that needs most; None where there is none."""
    devices = [entry.device for entry in plan.placement]
    path = plan.model.path
    models = [name for name, model in measured.about["models"].items() if model["path"] == path]
    cells = [
        cell
        for cell in measured.cells
        if [row.device for row in cell.memory] == devices and cell.dimensions["model"] in models
        if any(row.measured is not None for row in cell.memory)
    ]
    if not cells or not devices:
        return None
    cell = max(cells, key=lambda cell: sum(row.planned for row in cell.memory))
    return Placed(Names(measured.cells)(cell), tuple(row.measured for row in cell.memory))


def _rows(figure: Figure) -> list[list[str]]:
    """The table behind a figure: a row for each x."""
    points = [{point.x: point for point in curve.points} for curve in figure.curves]
    rows = []
    for x in sorted({x for curve in points for x in curve}):
        row = [f"{x:,g}"]
        for curve in points:
            point = curve.get(x)
            text = plots.point_of(point, figure) if point else ""
            row.append(text + (f" ({shown(point.predicted)})" if point and point.predicted is not None else ""))
        rows.append(row)
    return rows


def _description(figure: Figure) -> str:
    """What a figure shows, for those who do not see it."""

    def course(curve: Curve) -> str:
        first, last = curve.points[0], curve.points[-1]
        return f"{curve.name}: {shown(first.y)} at {first.x:g} to {shown(last.y)} at {last.x:g}, {len(curve.points)} points"

    what = f"{figure.title}, {figure.y} over {figure.x}"
    return f"{what}{', ' if figure.common else ''}{figure.common}. {'; '.join(map(course, figure.curves))}. The table below has all points."


def _drawings(figures: list[Figure]) -> list[dict[str, Any]]:
    possible = not plots.missing()
    return [
        {
            "figure": figure,
            "svg": Markup(plots.svg(figure, _description(figure))) if possible else "",
            "predicted": any(point.predicted is not None for curve in figure.curves for point in curve.points),
            "rows": _rows(figure),
        }
        for figure in figures
    ]


def _plain(cell: Cell) -> bool:
    """Whether it was measured with an empty cache and nothing added to the network."""
    return bool(cell.measured) and all(cell.dimensions[name] == USUAL[name] for name in USUAL if name != "parallel")


def _summary(measured: Benchmark, loads: list[curves.Load]) -> dict[str, Any]:
    """The fastest of each model and kind of test, as texts, and below each of them where that was."""
    kinds = [
        kind
        for kind in curves.KINDS
        if any(_plain(cell) and cell.dimensions["kind"] == kind for cell in measured.cells)
    ]
    rows = []
    for model, about in measured.about["models"].items():
        cells = [cell for cell in measured.cells if _plain(cell) and cell.dimensions["model"] == model]
        shortest = min((row.mean for row in loads if row.model == model), default=None)
        load = "" if shortest is None else f"{shown(shortest)} s"
        best = []
        for kind in kinds:
            found = [cell for cell in cells if cell.dimensions["kind"] == kind]
            best.append(_best(found, kind) if found else {"measured": "", "place": ""})
        rows.append({"model": model, "size": amount(about["bytes"]), "load": load, "best": best})
    return {"kinds": [curves.KINDS[kind] for kind in kinds], "rows": rows}


def _best(cells: list[Cell], kind: str) -> dict[str, str]:
    """The fastest of these cells."""
    choose = min if kind == "api-ttft" else max
    cell = choose(cells, key=lambda cell: cell.measured.mean if cell.measured else 0)
    size = cell.dimensions
    names = ["hosts", "backend", *["parallel"] * (size["parallel"] > 1)]
    place = ", ".join([_test(cell), *(curves.NAMES[name](size[name]) for name in names)])
    predicted = f"; predicted {shown(cell.predicted)}" if cell.predicted is not None else ""
    return {"measured": _mean(cell.measured), "place": f"{place}{predicted}"}


def _ratios(cells: Iterable[Cell]) -> str:
    """How measurements and predictions compare over all cells."""
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    if not ratios:
        return "Nothing of what was measured is predicted by the plan."
    middle = statistics.median(ratios)
    return (
        f"Of {len(ratios)} predicted cells, the middle one measured {_percent(middle)} of its prediction; the lowest {_percent(min(ratios))}, "
        f"the highest {_percent(max(ratios))}."
    )


def _matrices(measured: Benchmark, name: Names) -> list[dict[str, Any]]:
    """A table for each model: its tests by number of hosts."""
    tables = []
    for model in measured.about["models"]:
        cells = [cell for cell in measured.cells if cell.dimensions["model"] == model]
        hosts = sorted({cell.dimensions["hosts"] for cell in cells})
        rows: dict[str, dict[int, Cell]] = {}
        for cell in cells:
            rows.setdefault(name(cell, ("hosts", "model")), {}).setdefault(cell.dimensions["hosts"], cell)
        if rows:
            tables.append(
                {
                    "title": model,
                    "hosts": hosts,
                    "rows": [
                        {"name": label, "cells": [_beside(found.get(count)) for count in hosts]}
                        for label, found in rows.items()
                    ],
                }
            )
    return tables


def _beside(cell: Cell | None) -> dict[str, str]:
    if cell is None or cell.measured is None:
        return {"measured": "not measured" if cell else "", "predicted": ""}
    predicted = f"{shown(cell.predicted)}, {_percent(cell.ratio)}" if cell.ratio is not None else ""
    return {"measured": f"{shown(cell.measured.mean)} {cell.measured.unit}", "predicted": predicted}


def _memory(measured: Benchmark) -> list[dict[str, Any]]:
    """For each model and number of hosts the cell that needs most, of those whose log says what it took."""
    largest: dict[tuple, Cell] = {}
    for cell in measured.cells:
        if any(row.measured is not None for row in cell.memory):
            key = tuple(cell.dimensions[name] for name in ("model", "backend", "hosts"))
            other = largest.get(key)
            if other is None or sum(row.planned for row in cell.memory) > sum(row.planned for row in other.memory):
                largest[key] = cell
    groups = []
    for cell in largest.values():
        most = max(max(row.planned, row.measured or 0) for row in cell.memory) or 1
        rows = [
            {
                "device": row.device,
                "host": row.host,
                "planned": shown(row.planned),
                "measured": "" if row.measured is None else shown(row.measured),
                "plan_share": f"{100 * row.planned / most:.2f}",
                "share": f"{100 * (row.measured or 0) / most:.2f}",
                "ratio": _percent(row.measured / row.planned) if row.planned and row.measured is not None else "",
            }
            for row in cell.memory
        ]
        names = [curves.NAMES[name](cell.dimensions[name]) for name in ("model", "backend", "hosts")]
        groups.append({"title": ", ".join([*names, _test(cell)]), "rows": rows})
    return groups


def _skipped(cells: Iterable[Cell], name: Names) -> list[tuple[str, list[str]]]:
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.measured is None:
            reasons.setdefault(cell.skipped or "it was not its turn yet", []).append(name(cell))
    return list(reasons.items())


def _all(measured: Benchmark, name: Names) -> list[dict[str, Any]]:
    """Every measured cell, by model."""
    groups = []
    for model in measured.about["models"]:
        cells = [cell for cell in measured.cells if cell.dimensions["model"] == model and cell.measured]
        rows = [
            {
                "name": name(cell, ("model",)),
                "measured": _mean(cell.measured),
                "samples": cell.measured.samples if cell.measured else 0,
                "predicted": shown(cell.predicted),
                "ratio": _percent(cell.ratio),
                "limited_by": cell.limited_by,
                "load": shown(cell.load_s),
                "log": cell.log,
                "lines": plan_text.command_lines(list(cell.argv), {}, ""),
            }
            for cell in cells
        ]
        if rows:
            groups.append({"title": f"{model}: {len(rows)} cells", "rows": rows})
    return groups


def _comparison(earlier: Benchmark, measured: Benchmark) -> dict[str, Any]:
    found = curves.compare(earlier, measured)
    name = Names([*earlier.cells, *measured.cells])
    alike: dict[str, list[dict[str, str]]] = {}
    for row in sorted(found.differences, key=lambda row: row.part):
        alike.setdefault(row.verdict, []).append(
            {
                "name": name(row.after),
                "before": _samples(row.before.measured),
                "after": _samples(row.after.measured),
                "change": f"{row.change:+.3g}{'' if row.spread is None else f' ± {shown(row.spread)}'}",
                "part": f"{100 * row.part:+.1f}",
                "verdict": row.verdict,
            }
        )
    said = ", ".join(f"{len(rows)} {verdict}" for verdict, rows in sorted(alike.items()))
    alone = [
        (f"{len(keys)} cells that only {which} measured", keys)
        for which, keys in (("the earlier one", found.only_before), ("this one", found.only_after))
        if keys
    ]
    return {
        "said": f"Earlier: {_when(earlier)}, {_release(earlier)}. Of {len(found.differences)} cells that both measured: {said or 'none'}.",
        "changed": _changes(earlier, measured),
        "groups": [
            {
                "title": f"{len(alike[verdict])} cells: {verdict}",
                "rows": alike[verdict],
                "open": verdict in ("slower", "faster") and len(alike[verdict]) <= MOST_OPEN,
            }
            for verdict in VERDICTS
            if verdict in alike
        ],
        "alone": alone,
    }


def _samples(measured: Measured | None) -> str:
    return f"{_mean(measured)}, {measured.samples}" if measured else ""


def _changes(earlier: Benchmark, measured: Benchmark) -> list[str]:
    """How the two benchmarks differ beside their figures."""
    old, new = earlier.about, measured.about
    lines = [] if old["cluster"] == new["cluster"] else [f"cluster: {old['cluster']}, now {new['cluster']}"]
    if old["release"]["id"] != new["release"]["id"]:
        lines.append(f"release: {_release(earlier)}, now {_release(measured)}")
    if old["plan"] != new["plan"]:
        lines.append(f"plan: {old['plan']}, now {new['plan']}")
    for part in ("hosts", "models"):
        gone, added = ", ".join(old[part].keys() - new[part].keys()), ", ".join(new[part].keys() - old[part].keys())
        lines += [f"{part} that only the earlier one has: {gone}"] * bool(gone)
        lines += [f"{part} that only this one has: {added}"] * bool(added)
        lines += [
            f"{part[:-1]} {name}: {', '.join(key for key in value if value[key] != new[part][name].get(key))} differ"
            for name, value in old[part].items()
            if name in new[part] and any(value[key] != new[part][name].get(key) for key in value)
        ]
    return lines


def _when(measured: Benchmark) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(measured.about["time"]))


def _release(measured: Benchmark) -> str:
    release = measured.about["release"]
    build = f", build {release['build']}" if release["build"] is not None else ""
    return f"{release['ref']}{build}, commit {release['commit']}, RPC protocol {release['protocol'] or 'unknown'}"


def view(measured: Benchmark, earlier: Benchmark | None) -> dict[str, Any]:
    """What the template takes of a benchmark, the names of its parts in ``parts``."""
    cells, about = measured.cells, measured.about
    figures = {OVER[axis]: _drawings(found) for axis, found in curves.figures(measured).items()}
    loads = curves.loads(measured)
    name = Names(cells)
    every = _all(measured, name)
    of_template = {
        "when": _when(measured),
        "release": _release(measured),
        "id": about["id"],
        "plan": about["plan"],
        "ended": about["ended"] is not None,
        "cells": len(cells),
        "done": sum(cell.measured is not None for cell in cells),
        "summary": _summary(measured, loads),
        "hosts": list(about["hosts"].items()),
        "figures": figures,
        "fits": about["fits"],
        "visits": about["visits"] or [],
        "loads": loads,
        "load_figures": _drawings(curves.load_figures(measured, loads)),
        "ratios": _ratios(cells),
        "matrices": _matrices(measured, name),
        "memory": _memory(measured),
        "skipped": _skipped(cells, name),
        "all": every,
        "usual": name.said(),
        "commands": every,
    }
    wanted = {
        "Summary": of_template["summary"]["kinds"],
        **figures,
        "Load times": loads,
        "Predicted beside measured": of_template["matrices"],
        "Memory, planned and measured": of_template["memory"],
        COMPARED: earlier,
        "Not measured": of_template["skipped"],
        "All cells": every,
        "Machines": of_template["hosts"],
        "Command lines of the benchmark": every,
    }
    return {
        "parts": [name for name, content in wanted.items() if content],
        "title": f"Benchmark of {about['cluster']}",
        "measured": of_template,
        "compared": _comparison(earlier, measured) if earlier else None,
    }

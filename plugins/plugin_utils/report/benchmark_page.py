# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the page shows of a benchmark: rows of texts for its template."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark, Cell
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table, curves


def _row(cell: Cell) -> dict[str, str]:
    measured, planned = benchmark_table.memory_of(cell)
    apart = [f"{name} {value}" for name, value in cell.settings.items()]
    apart += [f"{cell.latency_ms:g} ms added"] if cell.latency_ms is not None else []
    of_predicted = f"{100 * cell.measured.mean / cell.predicted:.0f} %" if cell.measured and cell.predicted else ""
    return {
        "test": benchmark_table.test_of(cell),
        "hosts": str(len(cell.hosts)),
        "how": ", ".join([cell.backend, *apart]),
        "speed": benchmark_table.speed(cell),
        "predicted": curves.figure_of(cell.predicted),
        "part": of_predicted,
        "load": curves.figure_of(cell.load_s),
        "predicted_load": curves.figure_of(cell.predicted_load_s),
        "mib": curves.figure_of(measured),
        "planned_mib": curves.figure_of(planned),
        "log": cell.log or "",
    }


def _skipped(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Why cells were not measured → their keys."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if not cell.measured:
            reasons.setdefault(cell.skipped or "it was not its turn yet", []).append(cell.key)
    return reasons


def view(record: Benchmark) -> dict[str, Any]:
    """What the template takes of a benchmark, the names of its parts in ``parts``."""
    of_axis: dict[str, list[dict[str, Any]]] = {}
    for figure in curves.figures(record):
        of_axis.setdefault(f"Over the {curves.AXES[figure.axis]}", []).append(curves.drawing(figure))
    measured = [cell for cell in record.cells if cell.measured]
    models = dict.fromkeys(cell.model for cell in measured)
    content = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.time)),
        "record": record,
        "done": len(measured),
        "figures": of_axis,
        "models": {model: [_row(cell) for cell in measured if cell.model == model] for model in models},
        "skipped": _skipped(record.cells),
    }
    sections = {
        **of_axis,
        "Measured and predicted": measured,
        "Not measured": content["skipped"],
        "Machines": record.hosts,
    }
    parts = [name for name, rows in sections.items() if rows]
    return {"parts": parts, "title": f"Benchmark of {record.cluster}", "measured": content}

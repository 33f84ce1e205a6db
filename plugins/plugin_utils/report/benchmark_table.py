# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark as a table: in Markdown, and for the page."""

from __future__ import annotations

import time
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark, Cell

NAMES = ("what", "t/s", "predicted", "of that")


def speed(cell: Cell) -> str:
    """``28.87 ± 0.11``, as llama-bench shows it; empty without a measurement."""
    return f"{cell.measured.mean:.2f} ± {cell.measured.deviation:.2f}" if cell.measured else ""


def row(cell: Cell) -> list[str]:
    """A cell, in the order of NAMES."""
    part = f"{100 * cell.measured.mean / cell.predicted:.0f} %" if cell.measured and cell.predicted else ""
    predicted = "" if cell.predicted is None else f"{cell.predicted:.4g}"
    return [cell.name, speed(cell) or "not measured", predicted, part]


def skipped(record: Benchmark) -> dict[str, list[str]]:
    """Why cells were not measured → their names."""
    reasons: dict[str, list[str]] = {}
    for cell in record.cells:
        if not cell.measured:
            reasons.setdefault(cell.skipped or "it was not its turn yet", []).append(cell.name)
    return reasons


def as_markdown(record: Benchmark) -> str:
    """The table of all cells, and why some were not measured."""
    rows = [list(NAMES), *map(row, record.cells)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(one, widths)) for one in rows]
    lines.insert(1, " | ".join("-" * width for width in widths))
    why = [f"- {reason}: {'; '.join(cells)}\n" for reason, cells in skipped(record).items()]
    text = (
        f"# Benchmark of {record.cluster}\n\n{record.model}; {record.release}.\n\n"
        + "".join(f"| {line} |\n" for line in lines)
        + ("\nNot measured:\n\n" + "".join(why) if why else "")
    )
    return text.replace("<", "&lt;")


def view(record: Benchmark) -> dict[str, Any]:
    """What the page's template takes of a benchmark, the names of its parts in ``parts``."""
    measured = [cell for cell in record.cells if cell.measured]
    content = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.time)),
        "record": record,
        "done": len(measured),
        "names": NAMES,
        "rows": list(map(row, measured)),
        "skipped": skipped(record),
    }
    parts = {"Measured and predicted": measured, "Not measured": content["skipped"]}
    return {
        "parts": [name for name, rows in parts.items() if rows],
        "title": f"Benchmark of {record.cluster}",
        "measured": content,
    }

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark as a table, in Markdown and for the HTML page."""

import time
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark, Cell

COLUMN_TITLES = ("test", "t/s", "predicted", "of prediction", "reason")


def speed_text(cell: Cell) -> str:
    """Return a speed like ``28.87 ± 0.11``, in llama-bench's notation; empty without a measurement."""
    return f"{cell.measured.mean:.2f} ± {cell.measured.deviation:.2f}" if cell.measured else ""


def row_of(cell: Cell) -> list[str]:
    """Return the values of a cell, in the order of COLUMN_TITLES."""
    ratio_text = f"{100 * cell.measured.mean / cell.predicted:.0f} %" if cell.measured and cell.predicted else ""
    predicted_text = "" if cell.predicted is None else f"{cell.predicted:.4g}"
    reason = "" if cell.measured else cell.skipped or "not measured yet"
    return [cell.name, speed_text(cell), predicted_text, ratio_text, reason]


def as_markdown(result: Benchmark) -> str:
    rows = [list(COLUMN_TITLES), *map(row_of, result.cells)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [" | ".join(text.ljust(width) for text, width in zip(row, widths)) for row in rows]
    lines.insert(1, " | ".join("-" * width for width in widths))
    table = "".join(f"| {line} |\n" for line in lines)
    return f"# Benchmark of {result.cluster}\n\n{result.model}; {result.release}.\n\n{table}".replace("<", "&lt;")


def view(result: Benchmark) -> dict[str, Any]:
    """Return the values of a benchmark for the page's template."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(result.time)),
        "result": result,
        "measured_count": sum(bool(cell.measured) for cell in result.cells),
        "titles": COLUMN_TITLES,
        "rows": list(map(row_of, result.cells)),
    }

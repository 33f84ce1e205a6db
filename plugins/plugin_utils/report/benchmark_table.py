# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark as a table: in Markdown, and for the page."""

from __future__ import annotations

import time
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark, Cell

NAMES = ("what", "t/s", "predicted", "of that", "why not")


def speed(cell: Cell) -> str:
    """``28.87 ± 0.11``, as llama-bench shows it; empty without a measurement."""
    return f"{cell.measured.mean:.2f} ± {cell.measured.deviation:.2f}" if cell.measured else ""


def row(cell: Cell) -> list[str]:
    """A cell, in the order of NAMES."""
    part = f"{100 * cell.measured.mean / cell.predicted:.0f} %" if cell.measured and cell.predicted else ""
    predicted = "" if cell.predicted is None else f"{cell.predicted:.4g}"
    why_not = "" if cell.measured else cell.skipped or "it was not its turn yet"
    return [cell.name, speed(cell), predicted, part, why_not]


def as_markdown(record: Benchmark) -> str:
    """The table of all cells."""
    rows = [list(NAMES), *map(row, record.cells)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(one, widths)) for one in rows]
    lines.insert(1, " | ".join("-" * width for width in widths))
    table = "".join(f"| {line} |\n" for line in lines)
    return f"# Benchmark of {record.cluster}\n\n{record.model}; {record.release}.\n\n{table}".replace("<", "&lt;")


def view(record: Benchmark) -> dict[str, Any]:
    """What the page's template takes of a benchmark."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.time)),
        "record": record,
        "done": sum(bool(cell.measured) for cell in record.cells),
        "names": NAMES,
        "rows": list(map(row, record.cells)),
    }

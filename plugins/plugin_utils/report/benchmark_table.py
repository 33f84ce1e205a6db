# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark as a table of Markdown, in the form of ``llama-bench -o md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark, Cell

COLUMNS = ("model", "backend", "hosts")
FIGURES = ("test", "t/s", "predicted", "load s", "MiB", "planned MiB")


def speed(cell: Cell) -> str:
    """``28.87 ± 0.11``, as llama-bench shows it; empty without a measurement."""
    return f"{cell.measured.mean:.2f} ± {cell.measured.deviation:.2f}" if cell.measured else ""


def test_of(cell: Cell) -> str:
    """``tg128 @ d2048``, as llama-bench names it."""
    return cell.test + (f" @ d{cell.depth}" if cell.depth else "")


def memory_of(cell: Cell) -> tuple[float | None, float | None]:
    """MiB on all devices together, measured and planned; None where one of them is not known."""
    measured = [row.measured_mib for row in cell.memory_mib]
    known = [mib for mib in measured if mib is not None]
    planned = [row.planned_mib for row in cell.memory_mib]
    return (sum(known) if known and len(known) == len(measured) else None), (sum(planned) or None)


def settings_of(cells: Iterable[Cell]) -> list[str]:
    """Names of the settings that differ."""
    return list(dict.fromkeys(name for cell in cells for name in cell.settings))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _row(cell: Cell, settings: Sequence[str], has_latency: bool, speculates: bool) -> list[Any]:
    added = [] if not has_latency else [None if cell.latency_ms is None else f"{cell.latency_ms:g} ms"]
    figures = [
        test_of(cell),
        speed(cell) or "not measured",
        *map(_rounded, (cell.predicted, cell.load_s, *memory_of(cell))),
    ]
    speculated = [cell.acceptance] * speculates
    return [cell.model, cell.backend, len(cell.hosts), *map(cell.settings.get, settings), *added, *figures, *speculated]


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = [
        ["" if value is None else str(value).replace("|", "\\|").replace("<", "&lt;") for value in row] for row in rows
    ]
    widths = [max(len(row[place]) for row in [list(names), *cells]) for place in range(len(names))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in [names, *cells]]
    rule = " | ".join("-" * width for width in widths)
    return "".join(f"| {line} |\n" for line in (lines[0], rule, *lines[1:]))


def as_markdown(record: Benchmark) -> str:
    """The table of all cells, and why some were not measured."""
    settings = settings_of(record.cells)
    has_latency = any(cell.latency_ms is not None for cell in record.cells)
    speculates = any(cell.acceptance is not None for cell in record.cells)
    names = [*COLUMNS, *settings, *["added latency"] * has_latency, *FIGURES, *["accepted"] * speculates]
    reasons = dict.fromkeys(cell.skipped for cell in record.cells if cell.skipped)
    why = [f"- {reason}: {sum(cell.skipped == reason for cell in record.cells)} cells\n" for reason in reasons]
    return (
        f"# Benchmark {record.id} of {record.cluster}\n\n{record.release}; hosts: {', '.join(record.hosts)}.\n\n"
        + _table(names, (_row(cell, settings, has_latency, speculates) for cell in record.cells))
        + ("\nNot measured:\n\n" + "".join(why).replace("<", "&lt;") if why else "")
    )

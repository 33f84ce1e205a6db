# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark as tables: CSV, and Markdown in the form of ``llama-bench -o md``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB

COLUMNS = (
    "key",
    "model",
    "backend",
    "hosts",
    "test",
    "depth",
    "parallel",
    "ubatch",
    "flash_attention",
    "cache_type_k",
    "cache_type_v",
    "split",
    "proxied",
    "latency_ms",
    "bandwidth_mbit",
    "mean",
    "deviation",
    "unit",
    "predicted",
    "load_s",
    "predicted_load_s",
    "memory_mib",
    "planned_mib",
    "skipped",
)


def _memory(cell: Mapping[str, Any], kind: str) -> float | None:
    """MiB on all devices together; None where one is not known."""
    sizes = [row[kind] for row in cell["memory_mib"]]
    return round(sum(sizes), 2) if sizes and None not in sizes else None


def _row(cell: Mapping[str, Any]) -> dict[str, Any]:
    measured, predicted = cell["measured"] or {}, cell["predicted"] or {}
    return {
        **{name: cell[name] for name in COLUMNS if name in cell},
        **cell["options"],
        "hosts": len(cell["hosts"]),
        **{name: measured.get(name) for name in ("mean", "deviation", "unit")},
        "predicted": predicted.get("mean"),
        "predicted_load_s": predicted.get("load_s"),
        "memory_mib": _memory(cell, "measured_mib"),
        "planned_mib": _memory(cell, "planned_mib"),
    }


def as_csv(record: Mapping[str, Any]) -> str:
    """A line for each cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(cell) for cell in record["cells"])
    return text.getvalue()


def table(names: Sequence[str], rows: Iterable[Sequence[Any]], left: int) -> str:
    """A table of Markdown.

    :param left: so many columns are aligned to the left, the others to the right.
    """
    shown = [
        ["" if value is None else str(value).replace("|", "\\|").replace("<", "&lt;") for value in row] for row in rows
    ]
    widths = [max(len(cells[place]) for cells in [list(names), *shown]) for place in range(len(names))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * width) if place < left else ("-" * (width - 1) + ":") for place, width in enumerate(widths)]
    return "\n".join([line(names), f"| {' | '.join(rule)} |", *map(line, shown)]) + "\n"


def speed(cell: Mapping[str, Any]) -> str:
    """``28.87 ± 0.11``, as llama-bench shows it; empty without a measurement."""
    measured = cell["measured"]
    return f"{measured['mean']:.2f} ± {measured['deviation']:.2f}" if measured else ""


def test_of(cell: Mapping[str, Any]) -> str:
    """``tg128 @ d2048``, as llama-bench names it."""
    return cell["test"] + (f" @ d{cell['depth']}" if cell["depth"] else "")


def _size(model: Mapping[str, Any]) -> str:
    size = model["bytes"] / MIB
    return f"{size / 1024:.2f} GiB" if size >= 1024 else f"{size:.2f} MiB"


def _parameters(model: Mapping[str, Any]) -> str:
    count = model["parameters"]
    if count is None:
        return ""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _extras(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Options that are not the same in all cells."""
    keys = cells[0]["options"] if cells else {}
    return [key for key in keys if len({cell["options"][key] for cell in cells}) > 1]


def _by_hosts(record: Mapping[str, Any]) -> str:
    cells = [cell for cell in record["cells"] if not cell["proxied"] and cell["test"][:2] in ("pp", "tg")]
    extras, models = _extras(cells), record["models"]
    names = [
        "model",
        "size",
        "params",
        "backend",
        "hosts",
        *extras,
        "test",
        "t/s",
        "predicted",
        "load s",
        "MiB",
        "planned MiB",
    ]
    rows = []
    for cell in cells:
        model, predicted = models[cell["model"]], cell["predicted"] or {}
        rows.append(
            [
                *(cell["model"], _size(model), _parameters(model), cell["backend"], len(cell["hosts"])),
                *(cell["options"][key] for key in extras),
                *(test_of(cell), speed(cell) or "not measured", predicted.get("mean"), cell["load_s"]),
                *(_memory(cell, kind) for kind in ("measured_mib", "planned_mib")),
            ]
        )
    return table(names, rows, 4)


def _loads(record: Mapping[str, Any]) -> str:
    """A row for each load of a model: seconds to load, and its first generation and prompt."""
    loads: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in record["cells"]:
        if not cell["proxied"] and cell["test"][:2] in ("pp", "tg"):
            loads.setdefault(
                (cell["model"], cell["backend"], len(cell["hosts"]), *cell["options"].values()), []
            ).append(cell)
    rows = []
    for cells in loads.values():
        first = cells[0]
        speeds = [next((speed(cell) for cell in cells if cell["test"].startswith(kind)), "") for kind in ("tg", "pp")]
        seconds = next((cell["load_s"] for cell in cells if cell["load_s"] is not None), None)
        status = next((cell["skipped"] for cell in cells if cell["skipped"]), "measured" if any(speeds) else "not yet")
        rows.append(
            [
                *(first["model"], first["backend"], _size(record["models"][first["model"]]), len(first["hosts"])),
                *(
                    first["options"]["split"] or "as planned",
                    None if seconds is None else f"~{seconds:.0f} s",
                    *speeds,
                    status,
                ),
            ]
        )
    return table(["model", "backend", "size", "hosts", "split", "load time", "tg (t/s)", "pp (t/s)", "status"], rows, 2)


def _requests(record: Mapping[str, Any]) -> str:
    cells = [cell for cell in record["cells"] if cell["test"].startswith("api-") and cell["measured"]]
    rows = [
        [cell["model"], len(cell["hosts"]), cell["parallel"], cell["test"], speed(cell), cell["measured"]["unit"]]
        for cell in cells
    ]
    return table(["model", "hosts", "parallel", "test", "measured", "unit"], rows, 1) if rows else ""


def _latencies(record: Mapping[str, Any]) -> str:
    """Tokens per second against added latency, beside those of the fewest hosts with the least of it."""
    cells = [cell for cell in record["cells"] if cell["proxied"] and cell["measured"]]
    first: dict[tuple[Any, ...], float] = {}
    rows = []
    for cell in cells:
        same = (cell["model"], cell["backend"], cell["bandwidth_mbit"], cell["test"])
        base = first.setdefault(same, cell["measured"]["mean"])
        part = f"{cell['measured']['mean'] / base:.2f}x"
        limit = f"{cell['bandwidth_mbit']:g} Mbit/s" if cell["bandwidth_mbit"] else ""
        rows.append(
            [cell["model"], len(cell["hosts"]), cell["test"], limit, f"{cell['latency_ms']:g} ms", speed(cell), part]
        )
    return table(["model", "hosts", "test", "limit", "latency", "t/s", "vs baseline"], rows, 1) if rows else ""


def _fits(record: Mapping[str, Any]) -> str:
    rows = [
        [
            *(
                fit["model"],
                len(fit["hosts"]),
                fit["test"],
                fit["fixed_ms"],
                fit["crossings"],
                fit["planned_crossings"],
            ),
            f"{100 * fit['worst']:.1f} %",
        ]
        for fit in record["fits"]
    ]
    names = ["model", "hosts", "test", "fixed ms", "crossings", "planned", "worst point"]
    return table(names, rows, 1) if rows else ""


def _visits(record: Mapping[str, Any]) -> str:
    """What a visit to a worker costs, with the variable that has the plan use it."""
    rows = [
        [*(visit[key] for key in ("model", "backend", "test", "visit_ms")), f"llama_link_visit_ms: {visit['visit_ms']}"]
        for visit in record.get("visits", ())
    ]
    return table(["model", "backend", "test", "ms a visit", "to plan with it"], rows, 1) if rows else ""


def _missing(record: Mapping[str, Any]) -> str:
    rows = [[cell["key"], cell["skipped"]] for cell in record["cells"] if cell["skipped"]]
    return table(["cell", "why"], rows, 2) if rows else ""


def as_markdown(record: Mapping[str, Any]) -> str:
    """The tables that the record has something for."""
    release = record["release"]
    parts = [
        f"# Benchmark {record['id']} of {record['cluster']}\n",
        f"Release {release['ref']} ({release['fork']}, protocol {release['protocol'] or 'not known'}); hosts: {', '.join(record['hosts'])}.\n",
        _by_hosts(record),
    ]
    for title, text in (
        ("Loads", _loads(record)),
        ("Through the API", _requests(record)),
        ("Against added latency", _latencies(record)),
        ("Milliseconds per token = fixed + crossings * latency", _fits(record)),
        ("What a visit to a worker costs a token", _visits(record)),
        ("Not measured", _missing(record)),
    ):
        parts += [f"## {title}\n", text] if text else []
    return "\n".join(parts)

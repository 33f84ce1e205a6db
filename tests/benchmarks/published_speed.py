"""Predicted beside published tokens per second, by machine: the second table of docs/performance.md, and every figure.

published_speeds.csv: `tg` is generation with an empty context, `pp` a prompt of 512 tokens. A device is NAME/BACKEND/LAYERS/LINK; those without
link are llama-server's own. Prompts are of builds from 8000 on, generation from
7183 on: older ones computed and sent otherwise. published_models.csv: tensors are PLACE TYPE BYTES WEIGHTS, those of all layers together; `graph` is
an architecture whose layers take as many steps.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/published_speed.py
"""

from __future__ import annotations

import collections
import csv
import functools
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary, TensorGroup
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load

NAMES = {
    "layer": "blk.*.attn_q.{}",
    "experts": "blk.*.ffn_up_exps.{}",
    "output": "output.weight",
    "embedding": "token_embd.weight",
}
PROCESSORS = {"AMD EPYC 9274F 24-Core Processor": ("x86_64", 48), "Raspberry Pi Compute Module 5": ("aarch64", 4)}
"""Architecture and threads."""
ROUND_TRIP_MS = {"usb4": 0.65}
"""As their owner measured it."""


class Figure(NamedTuple):
    machine: str
    test: str
    measured: float
    predicted: float
    factor: float


def _rows(name: str) -> list[dict[str, str]]:
    with Path(__file__).with_name(name).open() as file:
        return list(csv.DictReader(file))


@functools.cache
def _models() -> dict[str, ModelSummary]:
    models = {}
    for row in _rows("published_models.csv"):
        layers, every = int(row["layers"]), tuple(range(int(row["layers"])))
        groups = [("blk.*.hc_attn_fn.weight", "F32", 4, 1, every)] if row["graph"] == "hyper" else []
        for text in row["tensors"].split(";"):
            place, kind, size, weights = text.split()
            each = layers if place in ("layer", "experts") else 1
            name = NAMES[place].format(kind)
            groups.append((name, kind, int(size) // each, int(weights) // each, every if each > 1 else None))
        keys = {"expert_count": row["experts"], "expert_used_count": row["experts_used"]}
        models[row["model"]] = ModelSummary(
            *("llama" if row["graph"] == "hyper" else row["graph"], row["model"], layers, int(row["width"])),
            *(32, 8, 128, 128, 4096, 32000, (0,) * layers, 0, 0),
            keys=tuple((key, int(value)) for key, value in keys.items() if value),
            tensors=tuple(TensorGroup(name, kind, (max(1, n),), size, of) for name, kind, size, n, of in groups),
        )
    return models


def _rate(name: str, backend: str) -> cost_model.Rate:
    if backend != "cpu":
        row = device_rates.of_accelerator("", name)
        return cost_model.rate_of_row(row, cost_model.TABLE, backend)
    architecture, cores = PROCESSORS[name]
    facts = {"cpu": {"model": name, "cores": cores}, "architecture": architecture, "accelerators": ()}
    return cost_model.processor_rate(SimpleNamespace(**facts, rates={}))


def _link(name: str, kind: str) -> cost_model.Link:
    link = cost_model.LINKS[kind]
    round_trip = ROUND_TRIP_MS.get(kind, link.round_trip_ms)
    return link._replace(round_trip_ms=round_trip, board="Raspberry" in name, mac=name.startswith("Apple"))


def _works(row: dict[str, str]) -> list[cost_model.Work]:
    model, build = _models()[row["model"]], int(row["build"])
    load = device_load.Load(model, kv_cache.Settings(512), build)
    parts = list(zip(load.parts, cost_model.part_costs(load)))
    works, start, devices = [], 0, [device.split("/") for device in row["devices"].split(";")]
    for index, (name, backend, layers, *link) in enumerate(devices):
        end = load.units if index == len(devices) - 1 else start + int(layers)
        own = [(part, cost) for part, cost in parts if part.unit is not None and start <= part.unit < end]
        works.append(
            cost_model.Work(
                name,
                name,
                _rate(name, backend),
                read=sum(cost.read for _part, cost in own),
                weights=sum(part.bytes for part, _cost in own),
                multiplied=sum(cost.multiplied for _part, cost in own),
                nodes=int(layers) * cost_model.nodes_per_layer(model),
                link=_link(name, link[0]) if link else None,
                quantised=sum(cost.quantised for _part, cost in own),
            )
        )
        start = end
    return works


def figures() -> list[Figure]:
    """Every published figure with what the table predicts."""
    found = []
    for row in _rows("published_speeds.csv"):
        works, width = _works(row), _models()[row["model"]].width
        speed = 1000 / cost_model.token_ms(works)
        factor = cost_model.token_factor(works)
        if row["test"] == "pp":
            speed = 1000 * cost_model.PROMPT / cost_model.prompt_ms(works, width)
            factor = cost_model.prompt_factor(works, width)
        name = " and ".join(dict.fromkeys(work.host for work in works))
        machine = f"{name}, {len(works)} devices" if len(works) > 1 else name
        found.append(Figure(machine, row["test"], float(row["tokens_per_s"]), speed, factor))
    return found


FEW = 4
"""Machines with fewer figures are one row."""


def _shares(rows: list[Figure]) -> list[str]:
    """Cells of the table: number, per cent of the predictions within 20 and 35 %, per cent in the range."""
    if not rows:
        return ["0", "", ""]
    errors = [abs(row.predicted / row.measured - 1) for row in rows]
    shares = [statistics.mean(error <= limit for error in errors) for limit in (0.2, 0.35)]
    inside = [abs(math.log(row.predicted / row.measured)) <= math.log(row.factor) for row in rows]
    return [str(len(rows)), ", ".join(f"{100 * share:.0f}" for share in shares), f"{100 * statistics.mean(inside):.0f}"]


def table() -> str:
    """How well predictions hold, by machine, in Markdown."""
    rows = figures()
    counts = collections.Counter(row.machine for row in rows)
    groups: dict[str, list[Figure]] = {"all": rows}
    for row in sorted(rows, key=lambda row: -counts[row.machine]):
        few = counts[row.machine] < FEW
        groups.setdefault("machines with fewer figures" if few else row.machine, []).append(row)
    head = [
        "machine",
        *(f"{test}: {cell}" for test in ("generation", "prompts") for cell in ("figures", "fitted", "in range")),
    ]
    lines = [head, ["---"] * len(head)]
    for name, group in groups.items():
        lines.append(
            [name, *(cell for test in ("tg", "pp") for cell in _shares([row for row in group if row.test == test]))]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(table())
    for figure in figures():
        print(*(f"{value:.3g}" if isinstance(value, float) else value for value in figure), sep="\t")

"""Predicted beside measured tokens per second: the table of docs/performance.md, and every figure.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/predicted_speed.py
"""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from ansible.module_utils.common.yaml import yaml_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    header_summary,
    known_answer,
    kv_cache,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load

ROOT = Path(__file__).resolve().parents[2]
DATA = yaml_load(Path(__file__).with_name("figures.yml").read_text())
ENTRIES = [{**group, **figure} for group in DATA["groups"] for figure in group["figures"]]
WITHIN = 0.2
"""By how much a prediction may be off where the data do not say else."""
MEDIAN_WITHIN = 0.1


class Figure(NamedTuple):
    """What was measured once, and what is predicted for it."""

    source: str
    model: str
    devices: str
    build: int
    delay_ms: float
    measured: float
    predicted: float
    within: float
    why: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def _summary(model: Any) -> dict[str, Any]:
    if isinstance(model, dict) and "like" in model:
        base = _summary(model["like"])
        own = {key: value for key, value in model.items() if key != "like"}
        alike = {key: [value] * base["layers"] if isinstance(base[key], list) else value for key, value in own.items()}
        return {**base, **alike}
    if isinstance(model, dict):
        return known_answer.summary(**{"kind" if key == "type" else key: value for key, value in model.items()})
    return yaml_load((ROOT / "inventories" / model).read_text())["llama_model_gguf_summary"]


def _rate(machine: dict[str, Any]) -> device_rates.Rate:
    row = (
        device_rates.processor_row(machine["processor"])
        if "processor" in machine
        else device_rates.accelerator_row(machine["architecture"], machine["name"])
    )
    return device_rates.rate_of_row(row, device_rates.TABLE_SOURCE, machine.get("backend", "cpu"))


def release_of(build: int) -> ReleasePlan:
    """A release of llama.cpp with this build number."""
    return ReleasePlan("git", f"b{build}", build, "", capabilities.protocol_of(build), "")


def works_of(figure: dict[str, Any], model: ModelSummary) -> list[cost_model.ModelPart]:
    """Its devices with their parts of the model."""
    load = device_load.Load(model, kv_cache.CacheSettings(512), figure["build"])
    read, nodes = cost_model.bytes_read_by_unit(load), cost_model.nodes_per_layer(load)
    costs = cost_model.tensor_costs(load)
    works, start = [], 0
    for index, (machine, layers, *link) in enumerate(figure["devices"]):
        end = load.units if index == len(figure["devices"]) - 1 else start + layers
        via = cost_model.ASSUMED_LINKS[link[0]] if link else None
        rate = _rate(DATA["machines"][machine])
        size = sum(load.weights[start:end])
        weights = sum(cost.dense_weights + cost.expert_weights for cost in costs) * sum(read[start:end]) / sum(read)
        work = cost_model.ModelPart(machine, machine, rate, sum(read[start:end]), size, 0, layers * nodes, via)
        wire = 8.0 * model.width if link else 0.0
        works.append(work._replace(dense_weights=weights, network_bytes=wire))
        start += layers
    assert start == load.layers, figure
    return works


def predicted(figure: dict[str, Any]) -> float:
    """Tokens per second."""
    works = works_of(figure, header_summary.parse(_summary(DATA["models"][figure["model"]])))
    workers = sum(work.link is not None for work in works)
    proxies = figure.get("delay_ms", 0) * max(0, 2 * workers - 1)  # each worker but one computes two graphs for a token
    return 1000 / (cost_model.token_ms(works) + proxies)


def figures() -> list[Figure]:
    """Every figure of the data with its prediction."""
    rows = []
    for entry in ENTRIES:
        result = predicted(entry)
        devices = [device[0] for device in entry["devices"]]
        text = " + ".join(f"{devices.count(name)} {name}" for name in dict.fromkeys(devices))
        rows += [
            Figure(
                entry["source"],
                entry["model"],
                text,
                entry["build"],
                entry.get("delay_ms", 0),
                measured,
                result,
                entry.get("within", WITHIN),
                entry.get("why", ""),
            )
            for measured in entry["measured"]
        ]
    return rows


def table() -> str:
    """How well predictions hold, by source, in Markdown."""
    rows = figures()
    lines = ["| source | figures | within 20 % | median deviation | largest |", "|---|---|---|---|---|"]
    for source in dict.fromkeys(row.source for row in rows):
        errors = [row.error for row in rows if row.source == source]
        within = sum(abs(error) <= WITHIN for error in errors)
        largest = max(errors, key=abs)
        lines.append(
            f"| {source} | {len(errors)} | {within} | {100 * statistics.median(map(abs, errors)):.0f} % | {100 * largest:+.0f} % |"
        )
    outside = [row for row in rows if row.why]
    notes = [
        textwrap.fill(
            f"{row.model} ({row.measured:g} t/s): {row.why}.", 130, initial_indent="- ", subsequent_indent="  "
        )
        for row in outside
    ]
    return "\n".join([*lines, "", *notes]) + "\n"


def every_figure() -> str:
    """A line for each figure."""
    return "\n".join(
        f"{row.source}\t{row.model}\t{row.devices}\t{row.build}\t{row.delay_ms or ''}\t{row.measured:g}\t{row.predicted:.3g}\t{100 * row.error:+.0f} %"
        for row in figures()
    )


if __name__ == "__main__":
    print(table())
    print(every_figure())

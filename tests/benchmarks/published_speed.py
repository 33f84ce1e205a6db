"""Predicted beside published tokens per second, by machine: the second table of docs/performance.md, and every figure.

published_checks.csv has figures that no fit used, in the same form. published_speeds.csv: `tg` is generation with an empty context, `pp` a prompt of
512 tokens. A device is NAME/BACKEND/LAYERS/LINK; those without link are llama-server's own. Prompts are of builds from 8000 on, generation from 7183
on: older ones computed and sent otherwise. published_models.csv: tensors are PLACE TYPE BYTES WEIGHTS, those of all layers together; `graph` is an
architecture whose layers take as many steps.

«Held out» is what a fit predicts that sees no figure of this owner: from one generic family for all devices it moves what each family reaches by
the figures of the others. So it says how well the form of the model holds, and not the table's constants.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/published_speed.py [ANOTHER.csv]
"""

from __future__ import annotations

import collections
import csv
import functools
import itertools
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary, TensorGroup
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load, prompts

NAMES = {
    "layer": "blk.*.attn_q.{}",
    "experts": "blk.*.ffn_up_exps.{}",
    "output": "output.weight",
    "embedding": "token_embd.weight",
}
ROUND_TRIP_MS = {"usb4": 0.65}
"""As their owner measured it."""


class Figure(NamedTuple):
    machine: str
    test: str
    measured: float
    predicted: float
    factor: float


class Row(NamedTuple):
    """A published figure, and the parts of the model with the family of each."""

    owner: str
    test: str
    measured: float
    works: list[cost_model.ModelPart]
    families: list[str]

    def predict(self, fitted: Fitted) -> float:
        """Tokens per second of devices that reach what was fitted of their families."""
        return _speed(self.test, [_moved(*one, fitted) for one in zip(self.works, self.families)])


Fitted = dict[str, list[float]]
"""Family → logarithms of the share of the bandwidth, of the microseconds for a node, and of the share of the 16-bit rate, beside GENERIC."""
GENERIC = device_rates.Family(0.75, 2.0, 0.4, "every device")
SPREADS, NOISE = (0.2, 0.4, 0.5), 0.12
"""By which families differ from GENERIC, and figures of one device among each other, as standard deviations of logarithms."""


def _moved(work: cost_model.ModelPart, family: str, fitted: Fitted) -> cost_model.ModelPart:
    known, rate = device_rates.FAMILIES[family], work.rate
    bandwidth, nodes, prompts = map(math.exp, fitted.get(family, (0.0, 0.0, 0.0)))
    return work._replace(
        rate=rate._replace(
            gb_per_s=rate.gb_per_s / known.generation_share * GENERIC.generation_share * bandwidth,
            node_us=GENERIC.node_us * nodes,
            prompt_gflops=rate.prompt_gflops / known.prompt_share * GENERIC.prompt_share * prompts,
        )
    )


def fit(rows: list[Row]) -> Fitted:
    """Least squares of logarithms by smaller and smaller steps."""
    families = sorted({family for row in rows for family in row.families})
    fitted, step = {family: [0.0, 0.0, 0.0] for family in families}, 0.32

    def loss(family: str) -> float:
        errors = [math.log(row.predict(fitted) / row.measured) / NOISE for row in rows if family in row.families]
        return sum(error**2 for error in errors) + sum((move / of) ** 2 for move, of in zip(fitted[family], SPREADS))

    while step > 0.01:
        moved = False
        for family, index, sign in itertools.product(families, range(3), (1, -1)):
            before, was = loss(family), fitted[family][index]
            fitted[family][index] += sign * step
            if loss(family) < before:
                moved = True
            else:
                fitted[family][index] = was
        step = step if moved else step / 2
    return fitted


def _rows(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / name).open() as file:
        return list(csv.DictReader(file))


@functools.cache
def _models() -> dict[str, ModelSummary]:
    models = {}
    for row in _rows("published_models.csv"):
        layers, every = int(row["layers"]), tuple(range(int(row["layers"])))
        groups = []
        for text in row["tensors"].split(";"):
            place, kind, size, weights = text.split()
            each = layers if place in ("layer", "experts") else 1
            name = NAMES[place].format(kind)
            groups.append((name, kind, int(size) // each, int(weights) // each, every if each > 1 else None))
        keys = {"expert_count": row["experts"], "expert_used_count": row["experts_used"]}
        models[row["model"]] = ModelSummary(
            *(row["graph"], row["model"], layers, int(row["width"])),
            *(32, 8, 128, 128, 4096, 32000, (0,) * layers, 0, 0),
            keys=tuple((key, int(value)) for key, value in keys.items() if value),
            tensors=tuple(TensorGroup(name, kind, (max(1, n),), size, of) for name, kind, size, n, of in groups),
        )
    return models


def _known(name: str, backend: str) -> device_rates.RateRow:
    return device_rates.processor_row(name) if backend == "cpu" else device_rates.accelerator_row("", name)


def _link(name: str, kind: str) -> cost_model.Link:
    kind, _colon, gbit = kind.partition(":")
    link = cost_model.ASSUMED_LINKS[kind]
    if gbit:
        link = link._replace(gbit=float(gbit), is_rate_known=True)
    round_trip = ROUND_TRIP_MS.get(kind, link.round_trip_ms)
    return link._replace(round_trip_ms=round_trip, host_is_board="Raspberry" in name)


def _works(row: dict[str, str]) -> list[cost_model.ModelPart]:
    model, build = _models()[row["model"]], int(row["build"])
    load = device_load.Load(model, kv_cache.CacheSettings(512), build)
    tensors = list(zip(load.tensors, cost_model.tensor_costs(load)))
    works, start, devices = [], 0, [device.split("/") for device in row["devices"].split(";")]
    for index, (name, backend, layers, *link) in enumerate(devices):
        end = load.units if index == len(devices) - 1 else start + int(layers)
        own = [(tensor, cost) for tensor, cost in tensors if tensor.unit is not None and start <= tensor.unit < end]
        works.append(
            cost_model.ModelPart(
                name,
                name,
                device_rates.rate_of_row(_known(name, backend), device_rates.TABLE_SOURCE, backend, model.architecture),
                weight_bytes=sum(tensor.bytes for tensor, _cost in own),
                **{field: sum(getattr(cost, field) for _, cost in own) for field in cost_model.TensorCost._fields},
                active_share=model.active_expert_share,
                network_bytes=8.0 * model.width if link else 0.0,
                nodes=int(layers) * cost_model.nodes_per_layer(load),
                link=_link(name, link[0]) if link else None,
            )
        )
        start = end
    return works


def _speed(test: str, works: list[cost_model.ModelPart]) -> float:
    if test == "pp":
        return cost_model.PROMPT_TOKENS / prompts.prompt_s(
            works, cost_model.PROMPT_TOKENS, cost_model.PROMPT_TOKENS, is_overlapped=False
        )
    return 1000 / cost_model.token_ms(works)


def _family(name: str, backend: str, architecture: str) -> str:
    return device_rates.family_key(_known(name, backend).family, backend, architecture)


def published(name: str = "published_speeds.csv") -> list[Row]:
    rows = []
    for row in _rows(name):
        model = _models()[row["model"]]
        families = [_family(*device.split("/")[:2], model.architecture) for device in row["devices"].split(";")]
        figure = row["source"].split("@")[0], row["test"], float(row["tokens_per_s"])
        rows.append(Row(*figure, _works(row), families))
    return rows


def figures(rows: list[Row]) -> list[Figure]:
    """Every published figure with what the table predicts."""
    found = []
    for row in rows:
        factor = cost_model.token_factor(row.works)
        if row.test == "pp":
            factor = cost_model.prompt_factor(row.works)
        name = " and ".join(dict.fromkeys(work.host for work in row.works))
        machine = f"{name}, {len(row.works)} devices" if len(row.works) > 1 else name
        found.append(Figure(machine, row.test, row.measured, _speed(row.test, row.works), factor))
    return found


def held_out(rows: list[Row]) -> list[Figure]:
    """Every figure with what a fit without its owner predicts, in the table's range, or that of an unknown device where nobody else measured its family."""
    fits = {owner: fit([row for row in rows if row.owner != owner]) for owner in {row.owner for row in rows}}
    found = []
    for figure, row in zip(figures(rows), rows):
        known = fits[row.owner].keys() >= set(row.families)
        factor = figure.factor if known else max(figure.factor, device_rates.UNLISTED_UNCERTAINTY)
        found.append(figure._replace(predicted=row.predict(fits[row.owner]), factor=factor))
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
    rows = figures(published())
    counts = collections.Counter(row.machine for row in rows)
    groups: dict[str, list[Figure]] = {"all": rows}
    for row in sorted(rows, key=lambda row: -counts[row.machine]):
        few = counts[row.machine] < FEW
        groups.setdefault("machines with fewer figures" if few else row.machine, []).append(row)
    groups["checks, in no fit"] = figures(published("published_checks.csv"))
    head = [
        "machine",
        *(
            f"{test}: {cell}"
            for test in ("generation", "prompts")
            for cell in ("figures", "within 20, 35 %", "in range")
        ),
    ]
    lines = [head, ["---"] * len(head)]
    for name, group in groups.items():
        lines.append(
            [name, *(cell for test in ("tg", "pp") for cell in _shares([row for row in group if row.test == test]))]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(table())
    every = published(*sys.argv[1:])
    print("number of figures; percentage within 20 %, within 35 %, and in the range")
    for kind, shown in (("fitted", figures(every)), ("held out", held_out(every))):
        for test in ("tg", "pp"):
            print(kind, test, *_shares([row for row in shown if row.test == test]), sep="\t")
        for figure in shown:
            print(*(f"{value:.3g}" if isinstance(value, float) else value for value in figure), sep="\t")

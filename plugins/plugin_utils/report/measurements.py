# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What playbooks/benchmark.yml measured, as values: docs/benchmark.schema.json describes the file."""

from __future__ import annotations

import math
import os
import re
import string
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import matrix as plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import results as measured
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Each, Maybe, Number, Text

LARGEST_FILE = 256 << 20
"""Bytes of a benchmark.json; a cell takes 3 kB of it."""
REAL = Number(real=True)
WORDS = Text(longest=validation.LONGEST)
TEST = re.compile(r"(pp|tg|api-ttft|api-tg)([1-9][0-9]{0,9})")

OPTIONS: dict[str, Any] = {
    "ubatch": Number(1),
    "flash_attention": ("on", "off", "auto", "default"),
    "cache_type_k": Text(),
    "cache_type_v": Text(),
    "split": Maybe(Text()),
}
CELL = {
    "key": WORDS,
    "hosts": [Text()],
    "workers": [Text()],
    "backend": Text(),
    "model": Text(),
    "options": OPTIONS,
    "proxied": bool,
    "latency_ms": REAL,
    "bandwidth_mbit": Maybe(REAL),
    "test": Text(TEST.pattern),
    "program": Text(),
    "depth": Number(),
    "parallel": Number(1),
    "predicted": Maybe({"mean": Maybe(REAL), "load_s": Maybe(REAL), "limited_by": Maybe(WORDS)}),
    **{name: form for name, form in measured.KEPT.items() if name != "time"},
}
WHOLE = {
    "cluster": Text(),
    "id": Text(),
    "time": Number(),
    "ended": Maybe(Number()),
    "plan": Text(),
    "release": {"ref": Text(), "id": Text(), "build": Maybe(Number()), "commit": Text(), "protocol": Maybe(Text())},
    "hosts": Each(
        {
            "head": bool,
            "system": Text(),
            "architecture": Text(),
            "cpu": Text(),
            "cores": Maybe(Number()),
            "memory_mib": Number(),
            "accelerators": [Text()],
            "link": Maybe(Text()),
        }
    ),
    "models": Each({"path": WORDS, "architecture": Text(), "layers": Number(), "bytes": Number()}),
    "fits": [
        {
            "cells": [WORDS],
            "hosts": [Text()],
            "backend": Text(),
            "model": Text(),
            "test": Text(),
            "workers": Number(),
            "fixed_ms": REAL,
            "crossings": Number(-validation.LARGEST, real=True),
            "planned_crossings": REAL,
            "worst": REAL,
        }
    ],
    "visits": Maybe([{"backend": Text(), "model": Text(), "test": Text(), "visit_ms": REAL}]),
}


class Measured(NamedTuple):
    """Mean, standard deviation and number of the samples, in ``unit``: t/s or s; ``largest`` is the largest one."""

    mean: float
    deviation: float
    samples: int
    unit: str
    largest: float

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None of a single sample, whose spread is not known."""
        return self.deviation / math.sqrt(self.samples) if self.samples > 1 else None


class Memory(NamedTuple):
    """MiB of a device; None where the log does not say it."""

    device: str
    host: str
    planned: float
    measured: float | None


class Cell(NamedTuple):
    """One measurement. ``dimensions`` is all that tells it apart from others; ``predicted`` and ``measured`` are in the same unit."""

    key: str
    hosts: tuple[str, ...]
    dimensions: dict[str, Any]
    predicted: float | None
    limited_by: str | None
    predicted_load_s: float | None
    measured: Measured | None
    load_s: float | None
    memory: tuple[Memory, ...]
    skipped: str | None
    argv: tuple[str, ...]
    log: str | None

    @property
    def ratio(self) -> float | None:
        """Measured of predicted."""
        return self.measured.mean / self.predicted if self.measured and self.predicted else None

    @property
    def devices(self) -> int:
        return len(self.memory)


class Benchmark(NamedTuple):
    """``about`` is the whole file without its cells."""

    about: dict[str, Any]
    cells: tuple[Cell, ...]


def _measured(entry: dict) -> Measured:
    samples = entry["samples"]
    return Measured(entry["mean"], entry["deviation"], len(samples), entry["unit"], max(samples))


def _cell(entry: dict) -> Cell:
    kind = entry["test"].rstrip(string.digits)
    tokens = entry["test"][len(kind) :]
    predicted = entry["predicted"] or {}
    return Cell(
        entry["key"],
        tuple(entry["hosts"]),
        {
            "kind": kind,
            "model": entry["model"],
            "backend": entry["backend"],
            "hosts": len(entry["hosts"]),
            "tokens": int(tokens),
            "depth": entry["depth"],
            "parallel": entry["parallel"],
            "proxied": entry["proxied"],
            "latency_ms": entry["latency_ms"],
            "bandwidth_mbit": entry["bandwidth_mbit"],
            **{name: entry["options"][name] for name in OPTIONS},
        },
        predicted.get("mean"),
        predicted.get("limited_by"),
        predicted.get("load_s"),
        _measured(entry["measured"]) if entry["measured"] else None,
        entry["load_s"],
        tuple(
            Memory(row["device"], row["host"], row["planned_mib"], row["measured_mib"]) for row in entry["memory_mib"]
        ),
        entry["skipped"],
        tuple(entry["argv"]),
        entry["log"],
    )


def _no_speed(index: int, entry: dict) -> validation.Problem | None:
    """What no program measures, and no curve can show."""
    if not entry["measured"] or measured.are_speeds(entry["measured"]):
        return None
    return validation.Problem(f"cells[{index}].measured", "has no samples, or figures that are no speeds")


def benchmark(data: dict[str, Any], source: str) -> Benchmark:
    """A benchmark as values, whoever wrote it.

    :param source: what it is, for the message.
    :raises Refusal: it has another form.
    """
    problem = validation.mismatch("", {"schema": data.get("schema")}, {"schema": Number(plan.SCHEMA, plan.SCHEMA)})
    problem = problem or validation.mismatch("", data, WHOLE)
    cells = data.get("cells")
    if not isinstance(cells, (list, tuple)):
        problem, cells = problem or validation.Problem("cells", "is no list"), ()
    for index, entry in enumerate(cells):
        problem = problem or validation.mismatch(f"cells[{index}]", entry, CELL) or _no_speed(index, entry)
    if problem:
        raise Refusal(
            f"{source} is no benchmark that this collection can read: {problem.where} {problem.why}. Use a benchmark.json that "
            "playbooks/benchmark.yml wrote, of a collection that is not newer than this one."
        )
    about = validation.complete({name: data.get(name) for name in WHOLE}, WHOLE)
    return Benchmark(about, tuple(_cell(validation.complete(entry, CELL)) for entry in cells))


def read_object(variable: str, path: str) -> dict[str, Any]:
    """The JSON object in a file of the controller that a variable names.

    :raises Refusal: it cannot be read, or holds something else.
    """
    shown = f"{variable} is {validation.show(path)}"
    try:
        text = reading.read(Path(os.path.expanduser(path)), LARGEST_FILE + 1, follow=True)
    except OSError as error:
        raise Refusal(
            f"{shown}, which cannot be read on the controller: {error.strerror}. Use the path of a file that a playbook wrote there."
        ) from None
    try:
        if len(text) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE} bytes")
        return reading.parse(text)
    except ValueError as error:
        raise Refusal(
            f"{shown}, and the file holds no JSON that can be read: {validation.printable(error)}. Use a file that a playbook wrote there."
        ) from None


def read(variable: str, path: str) -> Benchmark:
    """The benchmark in a file of the controller that a variable names, or in benchmark.json of the folder there.

    :raises Refusal: it cannot be read, or has another form.
    """
    place = Path(os.path.expanduser(path))
    file = place / "benchmark.json" if place.is_dir() else place
    return benchmark(read_object(variable, str(file)), f"{variable} is {validation.show(path)}, and the file")

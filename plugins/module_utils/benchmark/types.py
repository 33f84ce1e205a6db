# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark: what was measured, what the plan predicts, and on which machines. docs/benchmark.schema.json describes its JSON."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import Absent
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import LONGEST, Number, Text

SCHEMA = 1
ID = r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}"
MOST_CELLS = 1024
"""As many entries as a list in JSON may have."""
SLOWEST, FASTEST = 1e-4, 10**9
"""Tokens per second. Figures have four decimal places: a smaller one would be 0."""

Figure = Annotated[float, Number(SLOWEST, FASTEST, real=True)]
Words = Annotated[str, Text(longest=LONGEST)]


class Speed(NamedTuple):
    """Tokens per second of a test."""

    mean: Figure
    """of the samples"""
    deviation: float
    """standard deviation of the samples"""
    samples: tuple[Figure, ...]
    """one for each repetition"""


class DeviceMemory(NamedTuple):
    """Memory of one device."""

    device: str
    """as llama.cpp names it"""
    host: str
    """that has it"""
    planned_mib: float
    """by the plan, an upper bound"""
    measured_mib: Optional[float]
    """by the log of the program; null where that does not say it"""


class Cell(NamedTuple):
    """One measurement."""

    key: Words
    """what names it in every benchmark"""
    hosts: tuple[str, ...]
    """that hold layers, the head first"""
    backend: str
    """of the head's program"""
    model: str
    """a key of `models`"""
    settings: Mapping[str, Words]
    """variable of `llama_benchmark_vary` → its value"""
    latency_ms: Optional[float]
    """one way, that the proxy adds in front of each worker; null without the proxy"""
    test: Annotated[str, Text("(pp|tg)[1-9][0-9]{0,9}")]
    """`pp` and tokens of a prompt, or `tg` and generated tokens"""
    depth: int
    """tokens in the cache before the measurement"""
    predicted: Optional[float]
    """tokens per second by the plan of these hosts; null where it predicts nothing, as of a cache that is not empty"""
    predicted_load_s: Optional[float]
    """seconds to load the model by that plan, with empty caches of workers"""
    memory_mib: tuple[DeviceMemory, ...]
    """of each device"""
    measured: Optional[Speed] = None
    """null as long as it is not measured"""
    load_s: Optional[float] = None
    """seconds from the start of the program until the model was loaded"""
    skipped: Optional[Words] = None
    """why it is not measured"""
    acceptance: Absent[float] = None
    """share of predicted tokens that were accepted; missing where none were predicted"""
    argv: tuple[Words, ...] = ()
    """command line of the program"""
    log: Optional[str] = None
    """file on the head with what the program wrote"""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to measure."""
        return bool(self.measured or self.skipped)


class Benchmark(NamedTuple):
    """Everything that playbooks/benchmark.yml measures."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    """version of this form"""
    cluster: str
    """its name"""
    id: Annotated[str, Text(ID)]
    """time of its beginning, and a hash of what is measured"""
    time: int
    """when it began, in seconds since 1970"""
    ended: Optional[int]
    """when every cell was done; null before"""
    plan: str
    """id of the plan that serves"""
    release: str
    """of llama.cpp, whose programs measure"""
    hosts: Mapping[str, Words]
    """name → processor, memory, accelerators, and the link to the head"""
    models: Mapping[str, Words]
    """name → path on the head; empty where that is not known"""
    cells: tuple[Cell, ...]
    """what is measured, in this order"""

    def with_cells(self, cells: Mapping[str, Cell]) -> "Benchmark":
        """With other cells in place of those that have the same keys."""
        return self._replace(cells=tuple(cells.get(cell.key, cell) for cell in self.cells))


def read(data: Any, source: str) -> Benchmark:
    """A benchmark of JSON that anybody may have written.

    :param source: what it is, for the message.
    :raises Refusal: it has another form.
    """
    problem = typed_json.problem("", data, Benchmark)
    if not problem:  # each cell by itself: all of them together have more parts than a value may have
        parts = [
            ("", {**data, "cells": ()}),
            *((f"cells[{number}]", cell) for number, cell in enumerate(data["cells"])),
        ]
        problem = next(filter(None, (validation.problem(where, part) for where, part in parts)), None)
    why = validation.printable(f"{problem.where} {problem.why}") if problem else ""
    if not why:
        benchmark = typed_json.parse(Benchmark, data)
        empty = [cell.key for cell in benchmark.cells if cell.measured and not cell.measured.samples]
        if not empty:
            return benchmark
        why = f"{empty[0]} has no samples"
    raise Refusal(
        f"{source} is not a benchmark that this collection can read: {why}. Use a benchmark.json that playbooks/benchmark.yml wrote, of a collection "
        "that is not newer than this one."
    )

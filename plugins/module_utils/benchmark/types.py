# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark: what was measured, what the plan predicts, and on which machines. docs/benchmark.schema.json describes its JSON."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import LONGEST, Number, Text

SCHEMA = 1
ID = r"[0-9]{8}-[0-9]{6}"
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


class Cell(NamedTuple):
    """One measurement."""

    hosts: tuple[str, ...]
    """that hold layers, the head first"""
    test: Annotated[str, Text("(pp|tg)[1-9][0-9]{0,9}")]
    """`pp` and tokens of a prompt, or `tg` and generated tokens"""
    depth: int
    """tokens in the cache before the measurement"""
    latency_ms: Optional[float]
    """one way, that the proxy adds in front of each worker; null without the proxy"""
    predicted: Optional[float]
    """tokens per second by the plan of these hosts; null where it predicts nothing, as of a cache that is not empty"""
    predicted_load_s: Optional[float]
    """seconds to load the model by that plan, with empty caches of workers"""
    measured: Optional[Speed] = None
    """null as long as it is not measured"""
    load_s: Optional[float] = None
    """seconds from the start of the program until the model was loaded"""
    skipped: Optional[Words] = None
    """why it is not measured"""
    log: Optional[str] = None
    """file on the head with what the program wrote"""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to measure."""
        return bool(self.measured or self.skipped)

    @property
    def name(self) -> str:
        """``2 hosts, tg128 @ d2048, 1 ms added``: with the words of llama-bench."""
        hosts = f"{len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
        depth = f" @ d{self.depth}" if self.depth else ""
        added = "" if self.latency_ms is None else f", {self.latency_ms:g} ms added"
        return f"{hosts}, {self.test}{depth}{added}"


class Benchmark(NamedTuple):
    """Everything that playbooks/benchmark.yml measures."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    """version of this form"""
    cluster: str
    """its name"""
    id: Annotated[str, Text(ID)]
    """time of its beginning"""
    time: int
    """when it began, in seconds since 1970"""
    plan: str
    """id of the plan that serves"""
    release: str
    """of llama.cpp, whose program measures"""
    model: str
    """that is served"""
    hosts: Mapping[str, Words]
    """name → processor, memory, accelerators, and the link to the head"""
    cells: tuple[Cell, ...]
    """what is measured, in this order"""


def read(data: Any, source: str) -> Benchmark:
    """A benchmark of JSON that anybody may have written.

    :param source: what it is, for the message.
    :raises Refusal: it has another form.
    """
    problem = typed_json.problem("", data, Benchmark) or validation.problem("", data)
    benchmark = None if problem else typed_json.parse(Benchmark, data)
    empty = [cell.name for cell in benchmark.cells if cell.measured and not cell.measured.samples] if benchmark else []
    if benchmark and not empty:
        return benchmark
    why = validation.printable(f"{problem.where} {problem.why}") if problem else f"«{empty[0]}» has no samples"
    raise Refusal(
        f"{source} is not a benchmark that this collection can read: {why}. Use a benchmark.json that playbooks/benchmark.yml wrote, of a collection "
        "that is not newer than this one."
    )

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark: what was measured, what the plan predicts, and on which machines. docs/benchmark.schema.json describes its JSON."""

from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import LONGEST, Number, Text

FILES = "benchmark-"
"""How the names of files begin in which programs write."""

SCHEMA = 1
SLOWEST, FASTEST = 1e-4, 10**9
"""Tokens per second."""

Figure = Annotated[float, Number(SLOWEST, FASTEST, real=True)]
Tokens = Annotated[int, Number(0, 10**9)]
Test = Annotated[str, Text("(pp|tg)[1-9][0-9]{0,9}")]
Words = Annotated[str, Text(longest=LONGEST)]


class Speed(NamedTuple):
    """Tokens per second of a test."""

    mean: Figure
    """of the samples"""
    deviation: float
    """standard deviation of the samples"""


class Cell(NamedTuple):
    """One measurement."""

    hosts: tuple[str, ...]
    """that hold layers, the head first"""
    test: Test
    """`pp` and tokens of a prompt, or `tg` and generated tokens"""
    depth: int
    """tokens in the cache before the measurement"""
    predicted: Optional[float]
    """tokens per second by the plan of these hosts; null where it predicts nothing, as of a cache that is not empty"""
    measured: Optional[Speed] = None
    """null as long as it is not measured"""
    skipped: Optional[Words] = None
    """why it is not measured"""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to measure."""
        return bool(self.measured or self.skipped)

    @property
    def name(self) -> str:
        """``2 hosts, tg128 @ d2048``: with the words of llama-bench."""
        hosts = f"{len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
        depth = f" @ d{self.depth}" if self.depth else ""
        return f"{hosts}, {self.test}{depth}"


class Benchmark(NamedTuple):
    """Everything that playbooks/benchmark.yml measures."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    """version of this form"""
    cluster: str
    """its name"""
    time: int
    """when it began, in seconds since 1970"""
    plan: str
    """id of the plan that serves"""
    release: str
    """of llama.cpp, whose program measures"""
    model: str
    """that is served"""
    cells: tuple[Cell, ...]
    """what is measured, in this order"""


class Row(NamedTuple):
    """What is read of a line of ``llama-bench -o jsonl``."""

    n_prompt: Tokens
    n_gen: Tokens
    n_depth: Tokens
    avg_ts: Figure
    stddev_ts: Annotated[float, Number(0, FASTEST, real=True)]


class Result(NamedTuple):
    """What llama-bench says of a test."""

    test: Test
    depth: int
    speed: Speed


class Program(NamedTuple):
    """How far a program on the head is."""

    results: tuple[Result, ...]
    status: Optional[int]
    """with which it ended; null while it runs"""
    said: Words
    """last lines of its log"""


class Progress(NamedTuple):
    """What the head reports of a benchmark."""

    running: bool
    programs: tuple[Program, ...]

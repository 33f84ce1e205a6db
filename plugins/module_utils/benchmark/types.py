# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A benchmark: measurements, predictions and machines. docs/benchmark.schema.json describes its JSON."""

from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import TEXT_LIMIT, Number, Text

FILE_PREFIX = "benchmark-"
"""Prefix of the names of the programs' output files."""

SCHEMA = 1
MIN_SPEED, MAX_SPEED = 1e-4, 10**9
"""Limits in tokens per second."""

TokensPerSecond = Annotated[float, Number(MIN_SPEED, MAX_SPEED, allows_fractions=True)]
Tokens = Annotated[int, Number(0, 10**9)]
Test = Annotated[str, Text("(pp|tg)[1-9][0-9]{0,9}")]
LongText = Annotated[str, Text(max_length=TEXT_LIMIT)]


class Speed(NamedTuple):
    """Tokens per second of a test."""

    mean: TokensPerSecond
    """mean of the samples"""
    deviation: float
    """standard deviation of the samples"""


class Cell(NamedTuple):
    """One measurement."""

    hosts: tuple[str, ...]
    """hosts with layers, the head first"""
    test: Test
    """`pp` and prompt tokens, or `tg` and generated tokens"""
    depth: int
    """tokens in the cache before the measurement"""
    predicted: Optional[float]
    """tokens per second according to the plan of these hosts; null without a prediction, for example for a cache that is not empty"""
    measured: Optional[Speed] = None
    """measured speed; null before the measurement"""
    skipped: Optional[LongText] = None
    """reason why it is not measured"""

    @property
    def is_done(self) -> bool:
        """Return whether the cell is measured or skipped."""
        return bool(self.measured or self.skipped)

    @property
    def name(self) -> str:
        """Return the name in llama-bench's terms, like ``2 hosts, tg128 @ d2048``."""
        hosts = f"{len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
        depth = f" @ d{self.depth}" if self.depth else ""
        return f"{hosts}, {self.test}{depth}"


class Benchmark(NamedTuple):
    """Contents of a benchmark."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    """version of this format"""
    cluster: str
    """name of the cluster"""
    time: int
    """start, in seconds since 1970"""
    plan: str
    """id of the serving plan"""
    release: str
    """llama.cpp release whose llama-bench measures"""
    model: str
    """served model"""
    cells: tuple[Cell, ...]
    """measurements, in this order"""


class BenchRow(NamedTuple):
    """Fields of a line of ``llama-bench -o jsonl``."""

    n_prompt: Tokens
    n_gen: Tokens
    n_depth: Tokens
    avg_ts: TokensPerSecond
    stddev_ts: Annotated[float, Number(0, MAX_SPEED, allows_fractions=True)]


class Result(NamedTuple):
    """Result of a test in llama-bench."""

    test: Test
    depth: int
    speed: Speed


class ProgramProgress(NamedTuple):
    """Progress of a program on the head."""

    results: tuple[Result, ...]
    status: Optional[int]
    """its exit status; null while it runs"""
    log_end: LongText
    """last lines of its log"""


class BenchmarkProgress(NamedTuple):
    """The head's report on a benchmark."""

    running: bool
    programs: tuple[ProgramProgress, ...]

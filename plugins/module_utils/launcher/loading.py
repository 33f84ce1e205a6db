# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a model is loaded: what the head's launcher writes of it, beside what the plan has on each device."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import metrics


class Load(NamedTuple):
    """How far the model is loaded."""

    seconds: float
    """since llama-server was started"""
    read: Optional[int]
    """bytes of files"""
    sent: Mapping[str, int]
    """endpoint of a worker → bytes that it has acknowledged"""


class Expected(NamedTuple):
    """Bytes of weights that a plan has on its devices. Empty where only the head's part of a plan is known."""

    workers: Mapping[str, int] = MappingProxyType({})
    """Endpoint → bytes."""
    head: int = 0
    """On the head's own devices and its processor."""
    cached: bool = False
    """Whether a worker caches tensors: what it has already is not sent."""


class WorkerProgress(NamedTuple):
    """How much of the model a worker has."""

    endpoint: str
    """of the worker"""
    sent_bytes: Optional[int]
    """that its host has acknowledged; null where the kernel does not say it"""
    planned_bytes: Optional[int]
    """of its weights; null where there is no plan"""


class Progress(NamedTuple):
    """How far the model is loaded."""

    seconds: float
    """since llama-server was started"""
    read_bytes: Optional[int]
    """of files"""
    planned_bytes: Optional[int]
    """of the whole model"""
    workers: tuple[WorkerProgress, ...]
    """in the order of the plan"""
    bytes_per_s: Optional[int]
    """null where nothing has moved"""
    left_s: Optional[int]
    """null where nothing has moved, or it is not known how much is missing"""
    at_most: bool
    """whether less may be left, since workers may have tensors in their caches"""


def expected(weights: Iterable[tuple[Optional[str], float]], cached: bool) -> Expected:
    """:param weights: endpoint of each worker, or None of the head's own memory, and MiB of weights that the plan has there."""
    workers: dict[str, int] = {}
    head = 0
    for endpoint, mib in weights:
        size = round(mib * units.MIB)
        if endpoint:
            workers[endpoint] = workers.get(endpoint, 0) + size
        else:
            head += size
    return Expected(workers, head, cached)


def _loaded_bytes(load: Load, goal: Expected) -> int:
    """Bytes that are where they belong. What was read and not sent is taken for the head's own."""
    if goal.workers and not load.sent:
        return min(load.read or 0, goal.head + sum(goal.workers.values()))
    sent = sum(min(size, goal.workers.get(endpoint, size)) for endpoint, size in load.sent.items())
    return sent + min(max(0, (load.read or 0) - sent), goal.head)


def progress_of(load: Load, goal: Expected) -> Progress:
    loaded = _loaded_bytes(load, goal)
    rate = round(loaded / load.seconds) if load.seconds >= metrics.MIN_SECONDS and loaded > 0 else None
    whole = goal.head + sum(goal.workers.values())
    endpoints = goal.workers or load.sent
    return Progress(
        round(load.seconds, 1),
        load.read,
        whole or None,
        tuple(WorkerProgress(endpoint, load.sent.get(endpoint), goal.workers.get(endpoint)) for endpoint in endpoints),
        rate,
        round((whole - loaded) / rate) if rate and whole > loaded else None,
        goal.cached,
    )


def _part(done: Optional[int], whole: Optional[int]) -> str:
    """«1.2 of 4.1 GB», «80 of 300 MB», «? of 4.1 GB», «1.2 GB»."""
    large = max(done or 0, whole or 0) >= units.GB
    figure = (
        f"{done / units.GB:.1f}" if large and done is not None else "?" if done is None else f"{done / units.MB:.0f}"
    )
    rest = "" if whole is None else f" of {whole / units.GB:.1f}" if large else f" of {whole / units.MB:.0f}"
    return f"{figure}{rest} {'GB' if large else 'MB'}"


def sentence(progress: Progress) -> str:
    """What a person is shown: bytes to each worker, bytes that were read, the rate, and what is left."""
    known_workers = [worker for worker in progress.workers if worker.sent_bytes is not None]
    parts = [
        f"{_part(worker.sent_bytes, worker.planned_bytes)} to worker {worker.endpoint}" for worker in progress.workers
    ]
    if progress.workers and not known_workers:
        parts = ["what workers received is not known, since the kernel does not show it"]
    if progress.read_bytes is not None:
        parts.append(f"{_part(progress.read_bytes, progress.planned_bytes)} read from files")
    if progress.bytes_per_s:
        parts.append(f"{units.amount(progress.bytes_per_s)}/s")
    if progress.left_s is not None:
        parts.append(f"{'at most' if progress.at_most else 'about'} {units.duration(progress.left_s)} left")
    return ", ".join(parts)

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Progress of loading a model: what the head's launcher records, compared with the plan's weights on each device."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import metrics


class LoadCounters(NamedTuple):
    """Counters of a model that is being loaded."""

    seconds: float
    """seconds since llama-server was started"""
    read: Optional[int]
    """bytes read from files"""
    sent: Mapping[str, int]
    """bytes that each worker has acknowledged, by endpoint"""


class ExpectedBytes(NamedTuple):
    """Bytes of weights that a plan puts on its devices. Empty without the plan of the whole cluster."""

    worker_bytes: Mapping[str, int] = MappingProxyType({})
    """Bytes on each worker, by endpoint."""
    head_bytes: int = 0
    """Bytes on the head's own devices and its processor."""
    uses_cache: bool = False
    """Whether a worker caches tensors; cached tensors are not sent."""


class WorkerProgress(NamedTuple):
    """Progress of one worker."""

    endpoint: str
    """endpoint of the worker"""
    sent_bytes: Optional[int]
    """bytes that its host has acknowledged; null if the kernel does not report them"""
    planned_bytes: Optional[int]
    """bytes of its weights; null without a plan"""


class LoadProgress(NamedTuple):
    """Progress of loading a model."""

    seconds: float
    """seconds since llama-server was started"""
    read_bytes: Optional[int]
    """bytes read from files"""
    planned_bytes: Optional[int]
    """bytes of the whole model"""
    workers: tuple[WorkerProgress, ...]
    """workers in the order of the plan"""
    bytes_per_s: Optional[int]
    """loading rate; null before anything is loaded"""
    left_s: Optional[int]
    """seconds left; null before anything is loaded, or without the model's size"""
    is_upper_bound: bool
    """whether less time may be left, because workers may have cached tensors"""


def expected_bytes(weights: Iterable[tuple[Optional[str], float]], uses_cache: bool) -> ExpectedBytes:
    """:param weights: endpoint of each worker, or None for the head's own memory, and its planned MiB of weights."""
    worker_bytes: dict[str, int] = {}
    head_bytes = 0
    for endpoint, mib in weights:
        size = round(mib * units.MIB)
        if endpoint:
            worker_bytes[endpoint] = worker_bytes.get(endpoint, 0) + size
        else:
            head_bytes += size
    return ExpectedBytes(worker_bytes, head_bytes, uses_cache)


def _loaded_bytes(load: LoadCounters, goal: ExpectedBytes) -> int:
    """Return the bytes that have arrived. Bytes that were read but not sent count as bytes on the head."""
    if goal.worker_bytes and not load.sent:
        return min(load.read or 0, goal.head_bytes + sum(goal.worker_bytes.values()))
    sent_bytes = sum(min(size, goal.worker_bytes.get(endpoint, size)) for endpoint, size in load.sent.items())
    return sent_bytes + min(max(0, (load.read or 0) - sent_bytes), goal.head_bytes)


def progress_of(load: LoadCounters, goal: ExpectedBytes) -> LoadProgress:
    done_bytes = _loaded_bytes(load, goal)
    rate = round(done_bytes / load.seconds) if load.seconds >= metrics.MIN_RATE_SECONDS and done_bytes > 0 else None
    total_bytes = goal.head_bytes + sum(goal.worker_bytes.values())
    endpoints = goal.worker_bytes or load.sent
    return LoadProgress(
        round(load.seconds, 1),
        load.read,
        total_bytes or None,
        tuple(
            WorkerProgress(endpoint, load.sent.get(endpoint), goal.worker_bytes.get(endpoint)) for endpoint in endpoints
        ),
        rate,
        round((total_bytes - done_bytes) / rate) if rate and total_bytes > done_bytes else None,
        goal.uses_cache,
    )


def _progress_text(size: Optional[int], total: Optional[int]) -> str:
    """Return a text such as '1.2 of 4.1 GB', '80 of 300 MB', '? of 4.1 GB' or '1.2 GB'."""
    uses_gb = max(size or 0, total or 0) >= units.GB
    figure = (
        f"{size / units.GB:.1f}" if uses_gb and size is not None else "?" if size is None else f"{size / units.MB:.0f}"
    )
    suffix = "" if total is None else f" of {total / units.GB:.1f}" if uses_gb else f" of {total / units.MB:.0f}"
    return f"{figure}{suffix} {'GB' if uses_gb else 'MB'}"


def progress_sentence(progress: LoadProgress) -> str:
    """Return a readable line: bytes sent to each worker, bytes read, rate and time left."""
    reported_workers = [worker for worker in progress.workers if worker.sent_bytes is not None]
    phrases = [
        f"{_progress_text(worker.sent_bytes, worker.planned_bytes)} sent to worker {worker.endpoint}"
        for worker in progress.workers
    ]
    if progress.workers and not reported_workers:
        phrases = ["bytes sent to workers are unknown, because the kernel does not report them"]
    if progress.read_bytes is not None:
        phrases.append(f"{_progress_text(progress.read_bytes, progress.planned_bytes)} read from files")
    if progress.bytes_per_s:
        phrases.append(f"{units.size_text(progress.bytes_per_s)}/s")
    if progress.left_s is not None:
        bound = "at most" if progress.is_upper_bound else "about"
        phrases.append(f"{bound} {units.duration_text(progress.left_s)} left")
    return ", ".join(phrases)

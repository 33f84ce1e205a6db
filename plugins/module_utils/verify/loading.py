# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a model is loaded: what the head's launcher writes of it, beside what the plan has on each device."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Optional, Union

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import GB, MB, MIB, amount, duration
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift.serving_record import Load
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Subject

LEAST_SECONDS = 0.001
"""For which a rate makes sense."""


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


def expected_of(plan: Union[Plan, Subject, None]) -> Expected:
    """:param plan: None where it is not known."""
    if not plan or not plan.placement:
        return Expected()
    workers: dict[str, int] = {}
    head = round(plan.head.cpu.weights_mib * MIB)
    for entry in plan.placement:
        size = round(entry.weights_mib * MIB)
        if entry.endpoint:
            workers[entry.endpoint] = workers.get(entry.endpoint, 0) + size
        else:
            head += size
    cached = any(worker.cache and worker.endpoint in workers for host in plan.hosts.values() for worker in host.workers)
    return Expected(workers, head, cached)


def _loaded(load: Load, expected: Expected) -> int:
    """Bytes that are where they belong. What was read and not sent is taken for the head's own."""
    if expected.workers and not load.sent:
        return min(load.read or 0, expected.head + sum(expected.workers.values()))
    sent = sum(min(size, expected.workers.get(endpoint, size)) for endpoint, size in load.sent.items())
    return sent + min(max(0, (load.read or 0) - sent), expected.head)


def progress_of(load: Load, expected: Expected, before: Optional[Load] = None) -> Progress:
    """:param before: an earlier one of the same start, from which on the rate is counted."""
    if before and before.seconds >= load.seconds:
        before = None
    loaded = _loaded(load, expected)
    seconds = load.seconds - (before.seconds if before else 0)
    moved = loaded - (_loaded(before, expected) if before else 0)
    rate = round(moved / seconds) if seconds >= LEAST_SECONDS and moved > 0 else None
    whole = expected.head + sum(expected.workers.values())
    endpoints = expected.workers or load.sent
    return Progress(
        round(load.seconds, 1),
        load.read,
        whole or None,
        tuple(
            WorkerProgress(endpoint, load.sent.get(endpoint), expected.workers.get(endpoint)) for endpoint in endpoints
        ),
        rate,
        round((whole - loaded) / rate) if rate and whole > loaded else None,
        expected.cached,
    )


def _part(done: Optional[int], whole: Optional[int]) -> str:
    """«1.2 of 4.1 GB», «80 of 300 MB», «? of 4.1 GB», «1.2 GB»."""
    large = max(done or 0, whole or 0) >= GB
    figure = f"{done / GB:.1f}" if large and done is not None else "?" if done is None else f"{done / MB:.0f}"
    rest = "" if whole is None else f" of {whole / GB:.1f}" if large else f" of {whole / MB:.0f}"
    return f"{figure}{rest} {'GB' if large else 'MB'}"


def sentence(progress: Progress) -> str:
    """What a person is shown: bytes to each worker, bytes that were read, the rate, and what is left."""
    known = [worker for worker in progress.workers if worker.sent_bytes is not None]
    parts = [
        f"{_part(worker.sent_bytes, worker.planned_bytes)} to worker {worker.endpoint}" for worker in progress.workers
    ]
    if progress.workers and not known:
        parts = ["what workers received is not known, since the kernel does not show it"]
    if progress.read_bytes is not None:
        parts.append(f"{_part(progress.read_bytes, progress.planned_bytes)} read from files")
    if progress.bytes_per_s:
        parts.append(f"{amount(progress.bytes_per_s)}/s")
    if progress.left_s is not None:
        parts.append(f"{'at most' if progress.at_most else 'about'} {duration(progress.left_s)} left")
    return ", ".join(parts)

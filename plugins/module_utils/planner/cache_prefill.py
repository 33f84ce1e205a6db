# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Caches of workers: which workers keep tensors on disk, and which tensors are put there before a head asks for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    options,
    rpc_upload,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    BuildPlan,
    CachePrefill,
    PrefillTensor,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Worker, WorkerRequest

DISK_DIVISOR = 2
"""A model's large tensors may take so many-th part of a worker's disk. Assumed: the rest is for the system and for models before."""
GIB = 1024 * MIB


def large_bytes(summary: ModelSummary) -> int:
    """Bytes of those tensors of a model that caches keep; of a summary without ``tensors`` what they are at most."""
    if summary.tensors is not None:
        return sum(row.bytes * row.how_many for row in summary.tensors if row.bytes > rpc_upload.CACHE_THRESHOLD)
    largest_bytes = summary.largest_tensor_bytes
    if largest_bytes is not None and largest_bytes <= rpc_upload.CACHE_THRESHOLD:
        return 0
    return int(sum(summary.layer_bytes) + summary.input_bytes + summary.output_bytes)


def large_sizes(summary: ModelSummary) -> list[int]:
    """Bytes of those tensors, each size once; none where the summary has no ``tensors``."""
    return sorted({row.bytes for row in summary.named_tensors if row.bytes > rpc_upload.CACHE_THRESHOLD})


def with_cache(request: WorkerRequest, facts: Facts, models: Sequence[ModelSummary]) -> WorkerRequest:
    """The request with ``cache`` and ``cache_why``. Where the inventory does not say, it follows from the models and the disk's size.

    :param models: those that are served, as far as they are known, and none that proves a release.
    """
    if request.cache is not None:
        return request._replace(cache_why="set in llama_worker_endpoints")
    size = sum(map(large_bytes, models))
    if not size:
        reason = f"no tensor of the model is larger than {rpc_upload.CACHE_THRESHOLD // MIB} MiB"
    elif facts.disk_gib is None:
        reason = "the size of the host's disk is unknown"
    elif facts.disk_gib * GIB < DISK_DIVISOR * size:
        needed_gib = 1 << (-(-DISK_DIVISOR * size // GIB) - 1).bit_length()
        reason = f"the host's disk is smaller than {needed_gib} GiB, the size required for this model"
    else:
        return request._replace(cache=True, cache_why="the host's disk is large enough")
    return request._replace(cache=False, cache_why=reason)


def worker_prefill(
    worker: Worker, build: BuildPlan, release: ReleasePlan, folder: str, candidate: Candidate
) -> CachePrefill | None:
    """Return how a worker's cache is filled; None if there is nothing to fill, or a fork has another protocol."""
    rows = _rows(_parts(candidate.layout, worker.endpoint), candidate.workload.model.path)
    if not worker.cache or not rows or not release.mainline:
        return None
    fork, processor = release.fork, backends.CPU.device
    return CachePrefill(
        tensors=tuple(rows),
        argv=(
            f"{folder}/{build.id}/bin/{capabilities.WORKER_BINARY[release.fork]}",
            *options.render("address", LOOPBACK, fork),
            *options.render("worker-device", processor, fork),
            *options.render("processor", processor, fork),
            *options.render("tensor-cache", "on", fork),
            options.render("worker-port", "0", fork)[0],
        ),
    )


def _parts(layout: device_load.Layout, endpoint: str) -> list[device_load.Part]:
    """Return the tensors on the device of a worker; none if the worker is not used."""
    for index, device in enumerate(layout.devices):
        if device.endpoint == endpoint:
            units = set(layout.units_of(index))
            return [part for part in layout.load.parts if part.unit in units or part.device == device.buffer]
    return []


def _rows(parts: Sequence[device_load.Part], path: str) -> list[PrefillTensor]:
    rows: dict[tuple[str, int], list[int] | None] = {}
    for part in parts:
        if part.name and part.bytes > rpc_upload.CACHE_THRESHOLD:
            match = re.fullmatch(r"blk\.(\d+)\.(.+)", part.name, re.DOTALL)
            key = (f"blk.*.{match[2]}" if match else part.name, part.bytes)
            layers = rows.setdefault(key, [] if match else None)
            if match and layers is not None:
                layers.append(int(match[1]))
    return [
        PrefillTensor(name, size, None if layers is None else tuple(layers), path)
        for (name, size), layers in rows.items()
    ]


def merged_prefill(prefills: Sequence[CachePrefill | None]) -> CachePrefill | None:
    """Return how the cache of a worker that several models use is filled.

    :param prefills: one of the plan of each model alone.
    """
    existing_prefills = [prefill for prefill in prefills if prefill]
    rows = dict.fromkeys(row for prefill in existing_prefills for row in prefill.tensors)
    return existing_prefills[0]._replace(tensors=tuple(rows)) if existing_prefills else None

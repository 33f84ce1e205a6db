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
"""A worker's disk has at least this multiple of the size of a model's large tensors. Assumed: the rest is for the system and older models."""
GIB = 1024 * MIB


def cached_tensor_bytes(summary: ModelSummary) -> int:
    """Return the total bytes of the tensors that caches keep; an upper bound if the summary has no ``tensors``."""
    if summary.tensors is not None:
        return sum(row.bytes * row.tensor_count for row in summary.tensors if row.bytes > rpc_upload.CACHE_THRESHOLD)
    largest_bytes = summary.largest_tensor_bytes
    if largest_bytes is not None and largest_bytes <= rpc_upload.CACHE_THRESHOLD:
        return 0
    return int(sum(summary.layer_bytes) + summary.input_bytes + summary.output_bytes)


def cached_tensor_sizes(summary: ModelSummary) -> list[int]:
    """Return the distinct sizes of these tensors in bytes; empty if the summary has no ``tensors``."""
    return sorted({row.bytes for row in summary.named_tensors if row.bytes > rpc_upload.CACHE_THRESHOLD})


def decide_cache(request: WorkerRequest, facts: Facts, models: Sequence[ModelSummary]) -> WorkerRequest:
    """Return the request with ``cache`` and ``cache_why``. Unless the inventory sets ``cache``, the models and the size of the disk decide.

    :param models: known served models, without models that only prove a release.
    """
    if request.cache is not None:
        return request._replace(cache_why="set in llama_worker_endpoints")
    cached_bytes = sum(map(cached_tensor_bytes, models))
    if not cached_bytes:
        reason = f"no tensor of the model is larger than {rpc_upload.CACHE_THRESHOLD // MIB} MiB"
    elif facts.disk_gib is None:
        reason = "the size of the host's disk is unknown"
    elif facts.disk_gib * GIB < DISK_DIVISOR * cached_bytes:
        needed_gib = 1 << (-(-DISK_DIVISOR * cached_bytes // GIB) - 1).bit_length()
        reason = f"the host's disk is smaller than {needed_gib} GiB, the size required for this model"
    else:
        return request._replace(cache=True, cache_why="the host's disk is large enough")
    return request._replace(cache=False, cache_why=reason)


def worker_prefill(
    worker: Worker, build: BuildPlan, release: ReleasePlan, folder: str, candidate: Candidate
) -> CachePrefill | None:
    """Return how a worker's cache is filled; None if there is nothing to fill, or a fork has another protocol."""
    tensors = _prefill_tensors(_worker_parts(candidate.layout, worker.endpoint), candidate.workload.model.path)
    if not worker.cache or not tensors or not release.mainline:
        return None
    fork, processor = release.fork, backends.CPU.device
    return CachePrefill(
        tensors=tuple(tensors),
        argv=(
            f"{folder}/{build.id}/bin/{capabilities.WORKER_BINARY[release.fork]}",
            *options.render_option("address", LOOPBACK, fork),
            *options.render_option("worker-device", processor, fork),
            *options.render_option("processor", processor, fork),
            *options.render_option("tensor-cache", "on", fork),
            options.render_option("worker-port", "0", fork)[0],
        ),
    )


def _worker_parts(layout: device_load.Layout, endpoint: str) -> list[device_load.Part]:
    """Return the tensors on the device of a worker; none if the worker is not used."""
    for index, device in enumerate(layout.devices):
        if device.endpoint == endpoint:
            units = set(layout.units_of(index))
            return [part for part in layout.load.parts if part.unit in units or part.device == device.buffer]
    return []


def _prefill_tensors(parts: Sequence[device_load.Part], path: str) -> list[PrefillTensor]:
    layers_by_tensor: dict[tuple[str, int], list[int] | None] = {}
    for part in parts:
        if part.name and part.bytes > rpc_upload.CACHE_THRESHOLD:
            match = re.fullmatch(r"blk\.(\d+)\.(.+)", part.name, re.DOTALL)
            key = (f"blk.*.{match[2]}" if match else part.name, part.bytes)
            layers = layers_by_tensor.setdefault(key, [] if match else None)
            if match and layers is not None:
                layers.append(int(match[1]))
    return [
        PrefillTensor(name, size, None if layers is None else tuple(layers), path)
        for (name, size), layers in layers_by_tensor.items()
    ]


def merge_prefills(prefills: Sequence[CachePrefill | None]) -> CachePrefill | None:
    """Return how the cache of a worker that several models use is filled.

    :param prefills: prefill in the separate plan of each model.
    """
    existing_prefills = [prefill for prefill in prefills if prefill]
    tensors = dict.fromkeys(row for prefill in existing_prefills for row in prefill.tensors)
    return existing_prefills[0]._replace(tensors=tuple(tensors)) if existing_prefills else None

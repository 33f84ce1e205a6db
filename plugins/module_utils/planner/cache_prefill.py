# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tensors that are put into caches of workers before a head asks for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    options,
    rpc_upload,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    BuildPlan,
    CachePrefill,
    PrefillTensor,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Worker


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

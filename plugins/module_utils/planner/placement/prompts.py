# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast prompts are, in which pieces they are best computed, and what a filled context does to them and to generation.

llama-server cuts a batch into micro-batches, and one device computes a micro-batch while the devices before it have the next one. But RPC has no copy
from device to device: the head's one thread waits for every worker but the last before it hands the result on, and carries all that crosses the network
(ggml_backend_sched_compute_splits of build 11063). It waits for the last one where a batch has output, so at the end of a prompt. Nothing waits for
what a worker computes, so workers do all this without llama.cpp's pipeline too; the head's own devices need that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import (
    Candidate,
    attempt_placement,
)

MICRO_BATCHES = (256, 512, 1024, 2048)
"""Sizes that are compared. Below 256 tokens, the step in which the cache grows, a graph is used again, and llama-server waits for the one before."""
MAX_SHARE = 0.9
"""llama-server's defaults stay unless prompts take less than this share of their time, because kernels differ by as much."""
NOISE = 1.02
"""Micro-batches whose times differ by less than this factor count as equal: the one next to the default is chosen."""


def at_depth(candidate: Candidate, depth: int) -> Candidate:
    """Return the candidate with the costs of a token that has this number of tokens before it."""
    workload, buffers = candidate.workload, candidate.layout.layer_buffers
    cache_bytes: dict[str, float] = {}
    attended_rates: dict[str, float] = {}
    layers = kv_cache.attention_costs(candidate.summary, workload.cache, candidate.release.build, max(1, depth))
    for buffer, size, multiplications in zip(buffers, *layers):
        cache_bytes[buffer] = cache_bytes.get(buffer, 0.0) + size
        attended_rates[buffer] = attended_rates.get(buffer, 0.0) + multiplications
    parts = [
        part._replace(
            cache=cache_bytes.get(part.device, 0.0) / cost_model.CACHE_SHARE,
            attention_weights=attended_rates.get(part.device, 0.0) * cost_model.ATTENTION_COST_RATIO,
        )
        for part in candidate.parts
    ]
    return candidate._replace(parts=parts)


def prompt_s(parts: Sequence[cost_model.ModelPart], tokens: int, micro_batch: int, is_overlapped: bool) -> float:
    """Return the seconds for a prompt in micro-batches.

    :param parts: parts of the model, at the depth that the prompt has in the middle.
    """
    size = min(micro_batch, tokens)
    costs = [cost_model.prompt_costs(part, size) for part in parts]
    stages, count = [sum(cost.values()) for cost in costs], tokens / size
    if not is_overlapped:
        return count * sum(stages) / 1000
    waits_for_link = [bool(part.link or next_part.link) for part, next_part in zip(parts, parts[1:])] + [False]
    serial_ms = sum(stage for stage, waits_here in zip(stages, waits_for_link) if waits_here) + costs[-1].get(
        cost_model.LINK_KIND, 0.0
    )
    parallel_ms = max(stage for stage, waits_here in zip(stages, waits_for_link) if not waits_here)
    return (sum(stages) + (count - 1) * max(serial_ms, parallel_ms)) / 1000


def best_batches(candidate: Candidate) -> Candidate:
    """Return the candidate with the batch sizes that suit it, on the same devices; the same candidate if there are none."""
    # The known-answer model is there to try workers, however fast.
    if not candidate.fits or candidate.workload.model.known_answer is not None:
        return candidate
    sizes = candidate.workload.cache.batch, _best_micro_batch(candidate)
    variant = attempt_placement(candidate.workload.with_batches(*sizes), candidate.site)
    # The sizes were chosen for the first layout: on other devices they may be wrong.
    return variant if variant.fits and variant.layout.devices == candidate.layout.devices else candidate


def _best_micro_batch(candidate: Candidate) -> int:
    """Return the micro-batch with which a short prompt and one of a part of the context take the fewest predicted seconds, of those that fit."""
    workload, default = candidate.workload, candidate.workload.micro_batch
    if not candidate.layout.devices or workload.server.override_tensor or workload.server.micro_batch:
        return default
    sizes = [size for size in MICRO_BATCHES if size != default and size <= workload.cache.batch]
    sizes = [size for size in sizes if _fits_beside_layers(candidate, workload.cache._replace(micro_batch=size))]
    candidate = at_depth(candidate, workload.prompt_tokens // 2)
    lengths = cost_model.PROMPT_TOKENS, workload.prompt_tokens
    seconds = {size: math.prod(_seconds(candidate, tokens, size) for tokens in lengths) for size in [default, *sizes]}
    shortest_time = min(seconds.values())
    if shortest_time > MAX_SHARE * seconds[default]:
        return default
    alternatives = [size for size, time in seconds.items() if time <= NOISE * shortest_time]
    return min(alternatives, key=lambda size: abs(size - default))


def _fits_beside_layers(candidate: Candidate, cache: kv_cache.CacheSettings) -> bool:
    """Return whether each device holds its layers with the compute buffer and windows of these settings."""
    load = device_load.load_of(candidate.summary, cache, candidate.release.build, ())
    layout = candidate.layout._replace(load=load)
    return all(share.total <= share.device.capacity_mib * MIB for share in layout.shares())


def is_pipelined(candidate: Candidate) -> bool:
    """Return whether llama.cpp's pipeline is on (llama_context of build 11063)."""
    layout, workload = candidate.layout, candidate.workload
    is_whole = layout.gpu_layers >= layout.load.units and workload.cache.offload and not workload.server.override_tensor
    return len(layout.devices) > 1 and workload.release.mainline and is_whole


def is_overlapped(candidate: Candidate) -> bool:
    """Return whether devices compute different micro-batches at the same time. Workers need no pipeline for that, but each may be visited only once."""
    workload, devices = candidate.workload, candidate.layout.devices
    has_pipeline = len(devices) > 1 and workload.release.mainline
    has_single_visits = not workload.server.override_tensor and workload.cache.offload
    return is_pipelined(candidate) or (has_pipeline and has_single_visits and all(device.worker for device in devices))


def _seconds(candidate: Candidate, tokens: int, micro_batch: int) -> float:
    return prompt_s(candidate.parts, tokens, micro_batch, is_overlapped(candidate))


def seconds_of(candidate: Candidate, tokens: int, depth: int = 0) -> float:
    """Return the seconds for a prompt in the planned micro-batches.

    :param depth: tokens that are in the context in the middle of the prompt; 0 ignores the attention to them.
    """
    filled_candidate = at_depth(candidate, depth) if depth else candidate
    return _seconds(filled_candidate, tokens, candidate.workload.micro_batch)

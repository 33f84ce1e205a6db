# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The speed of prompts, the best batch sizes for them, and the effect of a filled context on prompts and generation.

llama-server splits a batch into micro-batches, and one device computes a micro-batch while the devices before it compute the next one. But RPC cannot
copy between devices: the head's only thread waits for every worker but the last before it passes the result on, and carries all network traffic itself
(ggml_backend_sched_compute_splits of build 11063). It waits for the last worker only when a batch has output, at the end of a prompt. Nothing waits
for the computation of a worker itself, so workers need no pipeline of llama.cpp for all this; the head's own devices do.
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
"""Sizes that are compared. Below 256 tokens, the step by which the cache grows, llama-server reuses a graph, and waits for the previous one."""
MAX_TIME_SHARE = 0.9
"""Share of the time with llama-server's defaults below which another size replaces them: kernels differ by as much."""
NOISE_FACTOR = 1.02
"""Micro-batches whose times differ by less than this factor count as equal: the one closest to the default is chosen."""


def at_depth(candidate: Candidate, depth: int) -> Candidate:
    """Return the candidate with the costs of a token after this number of tokens."""
    workload, buffers = candidate.workload, candidate.layout.layer_buffers
    cache_bytes: dict[str, float] = {}
    attention_weights: dict[str, float] = {}
    costs = kv_cache.attention_costs(candidate.summary, workload.cache, candidate.release.build, max(1, depth))
    for buffer, size, multiplications in zip(buffers, *costs):
        cache_bytes[buffer] = cache_bytes.get(buffer, 0.0) + size
        attention_weights[buffer] = attention_weights.get(buffer, 0.0) + multiplications
    parts = [
        part._replace(
            cache_read_bytes=cache_bytes.get(part.buffer, 0.0) / cost_model.CACHE_RATE_SHARE,
            attention_weights=attention_weights.get(part.buffer, 0.0) * cost_model.ATTENTION_COST_RATIO,
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
    stage_ms, count = [sum(cost.values()) for cost in costs], tokens / size
    if not is_overlapped:
        return count * sum(stage_ms) / 1000
    waits_for_link = [bool(part.link or next_part.link) for part, next_part in zip(parts, parts[1:])] + [False]
    serial_ms = sum(ms for ms, waits_here in zip(stage_ms, waits_for_link) if waits_here) + costs[-1].get(
        cost_model.LINK_COST, 0.0
    )
    parallel_ms = max(ms for ms, waits_here in zip(stage_ms, waits_for_link) if not waits_here)
    return (sum(stage_ms) + (count - 1) * max(serial_ms, parallel_ms)) / 1000


def best_batches(candidate: Candidate) -> Candidate:
    """Return the candidate with the batch sizes that suit it, on the same devices; the same candidate if there are none."""
    # The known-answer model only tests workers, at any speed.
    if not candidate.fits or candidate.workload.model.known_answer is not None:
        return candidate
    sizes = candidate.workload.cache.batch, _best_micro_batch(candidate)
    variant = attempt_placement(candidate.workload.with_batches(*sizes), candidate.site)
    # The sizes were chosen for the first layout: on other devices they may be wrong.
    return variant if variant.fits and variant.layout.devices == candidate.layout.devices else candidate


def _best_micro_batch(candidate: Candidate) -> int:
    """Return the micro-batch that fits and with which a short prompt and the planned prompt take the least predicted time."""
    workload, default = candidate.workload, candidate.workload.micro_batch
    if not candidate.layout.devices or workload.server.override_tensor or workload.server.micro_batch:
        return default
    sizes = [size for size in MICRO_BATCHES if size != default and size <= workload.cache.batch]
    sizes = [size for size in sizes if _fits_on_devices(candidate, size)]
    candidate = at_depth(candidate, workload.prompt_tokens // 2)
    lengths = cost_model.PROMPT_TOKENS, workload.prompt_tokens
    products = {size: math.prod(_seconds(candidate, tokens, size) for tokens in lengths) for size in [default, *sizes]}
    least_product = min(products.values())
    if least_product > MAX_TIME_SHARE * products[default]:
        return default
    sizes = [size for size, value in products.items() if value <= NOISE_FACTOR * least_product]
    return min(sizes, key=lambda size: abs(size - default))


def _fits_on_devices(candidate: Candidate, micro_batch: int) -> bool:
    """Return whether each device holds its layers with the compute buffer and windows of this micro-batch."""
    cache = candidate.workload.cache._replace(micro_batch=micro_batch)
    load = device_load.load_of(candidate.summary, cache, candidate.release.build, ())
    layout = candidate.layout._replace(load=load)
    return all(share.total <= share.device.capacity_mib * MIB for share in layout.shares())


def is_pipelined(candidate: Candidate) -> bool:
    """Return whether llama.cpp's pipeline is on (llama_context of build 11063)."""
    layout, workload = candidate.layout, candidate.workload
    can_pipeline = len(layout.devices) > 1 and workload.release.mainline and not workload.server.override_tensor
    return can_pipeline and layout.gpu_layers >= layout.load.units and workload.cache.offload


def is_overlapped(candidate: Candidate) -> bool:
    """Return whether devices compute different micro-batches at the same time. Workers need no pipeline for that, but each may be visited only once."""
    workload, devices = candidate.workload, candidate.layout.devices
    can_overlap = len(devices) > 1 and all(device.worker for device in devices) and workload.release.mainline
    return is_pipelined(candidate) or (can_overlap and not workload.server.override_tensor and workload.cache.offload)


def _seconds(candidate: Candidate, tokens: int, micro_batch: int) -> float:
    return prompt_s(candidate.parts, tokens, micro_batch, is_overlapped(candidate))


def seconds_of(candidate: Candidate, tokens: int, depth: int = 0) -> float:
    """Return the seconds for a prompt in the planned micro-batches.

    :param depth: number of tokens in the context in the middle of the prompt; 0 ignores attention to them.
    """
    filled_candidate = at_depth(candidate, depth) if depth else candidate
    return _seconds(filled_candidate, tokens, candidate.workload.micro_batch)

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast prompts are, in which pieces they are best computed, and what a filled context does to them and to generation.

llama-server cuts a batch into micro-batches, and one device computes a micro-batch while the devices before it have the next one. But RPC has no copy
from device to device: the head's one thread waits for every worker but the last before it hands the result on, and carries all that crosses the network
(ggml_backend_sched_compute_splits of build 11063). It waits for the last one where a batch has output, so at the end of a prompt. Nothing waits for
what a worker computes, so workers do all this without llama.cpp's pipeline too; the head's own devices need that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ContextSpeed, PromptEstimate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    auxiliary_models,
    cost_model,
    device_load,
    estimate,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Server

MICRO_BATCHES = (256, 512, 1024, 2048)
"""What is compared. Below 256 tokens, the step in which the cache grows, a graph is used again, and llama-server waits for the one before."""
WORTH = 0.9
"""llama-server's defaults stay unless a prompt takes less than this part of their time: kernels differ by as much."""
NOISE = 1.02
"""Micro-batches that take up to so many times as long count as equal: that next to the default is chosen of them."""


class Batches(NamedTuple):
    batch: int
    micro_batch: int


def at_depth(
    case: estimate.Case, works: Sequence[cost_model.Work], settings: kv_cache.CacheSettings, depth: int
) -> list[cost_model.Work]:
    """The parts of the model with what a token reads, and is multiplied with, of so many tokens before it."""
    names = case.placed.buffer_of_layers()
    read: dict[str, float] = {}
    attended: dict[str, float] = {}
    for name, cached, cells in zip(names, *_of_layers(case.summary, settings, case.release.build, max(1, depth))):
        read[name] = read.get(name, 0.0) + cached
        attended[name] = attended.get(name, 0.0) + cells
    return [
        work._replace(
            read=work.read + read.get(work.device, 0.0) / cost_model.CACHE_SHARE,
            attended=attended.get(work.device, 0.0) * cost_model.ATTENTION_COST,
        )
        for work in works
    ]


@functools.lru_cache(maxsize=64)
def _of_layers(
    summary: ModelSummary, settings: kv_cache.CacheSettings, build: int, depth: int
) -> tuple[list[int], list[float]]:
    """Of each layer: bytes of cache that a token reads, and multiplications of its attention."""
    filled = settings._replace(context=depth, parallel=1)
    full, short = kv_cache.cells(summary, filled)
    heads = summary.by_layer("attention.head_count", summary.heads)
    each = summary.key_dimension + summary.value_dimension
    layers = kv_cache.layers_of(summary, True)
    return kv_cache.sizes(summary, filled, build)[0], [
        float(head * each * (short if layer.windowed else full)) if layer.key else 0.0
        for head, layer in zip(heads, layers)
    ]


def _is_switched_off(case: estimate.Case, server: Server) -> bool:
    """Whether the pipeline that this release would have is off (llama_context of build 11063)."""
    partly = case.placed.gpu_layers < case.placed.load.units
    return bool(partly or server.override_tensor or server_settings.without_kv_offload(server))


def prompt_s(
    case: estimate.Case, works: Sequence[cost_model.Work], tokens: int, micro_batch: int, overlapped: bool
) -> float:
    """Seconds for a prompt in these pieces.

    :param works: of the depth that the prompt has in the middle.
    """
    size = min(micro_batch, tokens)
    costs = [cost_model.prompt_costs(work, case.summary.width, size) for work in works]
    stages, count = [sum(cost.values()) for cost in costs], tokens / size
    if not overlapped:
        return count * sum(stages) / 1000
    waits = [bool(work.link or following.link) for work, following in zip(works, works[1:])] + [False]
    serial = sum(stage for stage, waited in zip(stages, waits) if waited) + costs[-1].get(cost_model.LINK, 0.0)
    beside = max(stage for stage, waited in zip(stages, waits) if not waited)
    return (sum(stages) + (count - 1) * max(serial, beside)) / 1000


def batches_of(case: estimate.Case, server: Server, works: Sequence[cost_model.Work]) -> Batches:
    """The pieces in which a prompt of a part of the context takes the fewest predicted seconds, of those that devices have room for."""
    batch = server_settings.batch_of(server)
    default = server_settings.micro_batch_of(server)
    if not case.placed.devices or server.override_tensor or server.micro_batch:
        return Batches(batch, default)
    settings = server_settings.settings_of(server, case.summary, case.release.fork)
    tokens = estimate.prompt_tokens(server, case.summary)
    filled, overlapped = at_depth(case, works, settings, tokens // 2), is_overlapped(case, server)
    seconds = {
        one: prompt_s(case, filled, tokens, one, overlapped)
        for one in MICRO_BATCHES
        if one <= batch and _has_room(case, settings._replace(micro_batch=one, batch=batch))
    }
    seconds[default] = prompt_s(case, filled, tokens, default, overlapped)
    least = min(seconds.values())
    if least > WORTH * seconds[default]:
        return Batches(batch, default)
    near = [one for one, time in seconds.items() if time <= NOISE * least]
    return Batches(batch, min(near, key=lambda one: abs(one - default)))


def _has_room(case: estimate.Case, settings: kv_cache.CacheSettings) -> bool:
    """Whether each device holds its layers with the compute buffer and windows of these pieces."""
    placed = case.placed
    load = device_load.load_of(case.summary, settings, case.release.build, ())
    moved = placed._replace(load=load)
    return all(
        share.weights + share.kv + moved.compute_on(device) + auxiliary_models.on_device(placed.auxiliary, device)
        <= device.capacity_mib * MIB
        for device, share in zip(placed.devices, moved.shares())
    )


def is_pipelined(case: estimate.Case, server: Server) -> bool:
    return len(case.placed.devices) > 1 and case.release.mainline and not _is_switched_off(case, server)


def is_overlapped(case: estimate.Case, server: Server) -> bool:
    """Whether devices compute different micro-batches at the same time. Workers need no pipeline for that, but may not be come to several times."""
    devices = case.placed.devices
    several = len(devices) > 1 and case.release.mainline
    alone = (
        all(device.worker for device in devices)
        and not server.override_tensor
        and not server_settings.without_kv_offload(server)
    )
    return several and (alone or not _is_switched_off(case, server))


def seconds_of(case: estimate.Case, server: Server, works: Sequence[cost_model.Work], tokens: int) -> float:
    """Seconds for a prompt in the pieces that the server takes."""
    settings = server_settings.settings_of(server, case.summary, case.release.fork)
    filled = at_depth(case, works, settings, tokens // 2)
    return prompt_s(case, filled, tokens, server_settings.micro_batch_of(server), is_overlapped(case, server))


def of_plan(case: estimate.Case, server: Server, works: Sequence[cost_model.Work]) -> PromptEstimate:
    """A prompt in the planned pieces."""
    settings = server_settings.settings_of(server, case.summary, case.release.fork)
    tokens, micro_batch = estimate.prompt_tokens(server, case.summary), server_settings.micro_batch_of(server)
    filled, overlapped = at_depth(case, works, settings, tokens // 2), is_overlapped(case, server)
    seconds = (
        prompt_s(case, filled, tokens, micro_batch, overlapped) + estimate.checkpoint_ms(case, works, tokens) / 1000
    )
    speed = estimate.rounded(tokens / (seconds or math.inf))
    sure = estimate.range_of(speed, cost_model.prompt_factor(filled, case.summary.width, micro_batch))
    return PromptEstimate(tokens, speed, sure, settings.batch, settings.micro_batch, is_pipelined(case, server))


def speeds_at_context(
    case: estimate.Case, server: Server, works: Sequence[cost_model.Work]
) -> tuple[ContextSpeed, ...]:
    """Of one request with half and all of its context filled."""
    settings = server_settings.settings_of(server, case.summary, case.release.fork)
    whole = server_settings.context_per_request(server, case.summary)
    speeds = [
        (depth, estimate.speeds_of(case, at_depth(case, works, settings, depth))) for depth in (whole // 2, whole)
    ]
    return tuple(
        ContextSpeed(depth, speed.generation, speed.generation_range, speed.prompt, speed.prompt_range)
        for depth, speed in speeds
    )

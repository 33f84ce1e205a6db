# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast a candidate is: tokens per second for one user and for several, seconds to load, and what limits them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, prompts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate


def round_figure(value: float) -> float:
    """Return the value with three significant digits, since predictions are no more precise."""
    return float(f"{value:.3g}")


def _largest_cause(costs: Iterable[tuple[str, str, float]]) -> str:
    """Return the kind of costs with the largest sum, with the host that causes the largest part of it.

    :param costs: kind (with a placeholder for the host), host and cost.
    """
    kinds: dict[str, dict[str, float]] = {}
    for kind, host, cost in costs:
        kinds.setdefault(kind, {}).setdefault(host, 0)
        kinds[kind][host] += cost
    kind = max(kinds, key=lambda name: sum(kinds[name].values()))
    return kind.format(max(kinds[kind], key=lambda host: kinds[kind][host]))


def _generation_bottleneck(parts: Sequence[cost_model.ModelPart]) -> str:
    costs = [("memory of {}", part.host, part.read_bytes / part.rate.gb_per_s / 1e6) for part in parts]
    costs += [("steps of the graph on {}", part.host, part.nodes * part.rate.node_us / 1e3) for part in parts]
    return _largest_cause(
        [*costs, *(("link to {}", part.host, cost_model.link_ms(part)) for part in parts if part.link)]
    )


def _prompt_bottleneck(candidate: Candidate) -> str:
    return _largest_cause(
        (f"{kind} {{}}", part.host, ms)
        for part in candidate.parts
        for kind, ms in cost_model.prompt_costs(part, _short_prompt_tokens(candidate)).items()
    )


def _load_bottleneck(candidate: Candidate) -> str:
    costs = [(part.host, *cost_model.largest_load_cost(candidate.release, part)) for part in candidate.parts]
    return _largest_cause(
        (f"{kind} {{}}", host if kind == cost_model.LINK_COST else candidate.site.head, seconds)
        for host, kind, seconds in costs
    )


class Speeds(NamedTuple):
    """Tokens per second."""

    generation: float
    prompt: float
    generation_range: types.SpeedRange
    prompt_range: types.SpeedRange


def range_of(speed: float, factor: float) -> types.SpeedRange:
    return types.SpeedRange(float(f"{speed / factor:.2g}"), float(f"{speed * factor:.2g}"))


def _short_prompt_tokens(candidate: Candidate) -> int:
    """Return how many tokens of a short prompt are computed together."""
    return min(cost_model.PROMPT_TOKENS, candidate.workload.micro_batch)


def checkpoint_ms(candidate: Candidate, tokens: int) -> float:
    """Return the milliseconds that checkpoints add to a prompt of this number of tokens; 0 if none are made."""
    return _checkpoint_cost_ms(candidate, tokens) if checkpoints_pay_off(candidate) else 0.0


def checkpoints_pay_off(candidate: Candidate) -> bool:
    """Return whether checkpoints take at most half as long as the planned prompt, which a conversation would compute again without them."""
    tokens = candidate.workload.prompt_tokens
    return not candidate.parts or _checkpoint_cost_ms(candidate, tokens) <= 500 * prompts.seconds_of(candidate, tokens)


def _checkpoint_cost_ms(candidate: Candidate, tokens: int) -> float:
    """Return the milliseconds of checkpoints: llama-server computes the last tokens separately, and fetches windows and states from the devices before them
    and, if a prompt is longer than a micro-batch, before its last one (server-context.cpp of build 11063)."""
    cache, parts = candidate.workload.cache, candidate.parts
    sizes = kv_cache.checkpoint_sizes(candidate.summary, cache, candidate.release.build, tokens)
    if not candidate.release.mainline or not any(candidate.layout.load.is_checkpointed):
        return 0.0
    s_per_gb = {part.buffer: cost_model.COPY_S_PER_GB + (8 / part.link.gbit if part.link else 0) for part in parts}
    layers = zip(candidate.layout.layer_buffers, sizes)
    fetch_ms = sum(size * s_per_gb.get(buffer, 0) for buffer, size in layers) / 1e6
    return cost_model.token_ms(parts) + fetch_ms * (1 + (tokens > cache.tokens))


def speeds_of(candidate: Candidate) -> Speeds:
    """Return the speeds for one user, with the context that the parts of the candidate have."""
    parts = candidate.parts
    generation = 1000 / cost_model.token_ms(parts)
    prompt_s = (
        prompts.seconds_of(candidate, cost_model.PROMPT_TOKENS)
        + checkpoint_ms(candidate, cost_model.PROMPT_TOKENS) / 1000
    )
    prompt_speed = cost_model.PROMPT_TOKENS / prompt_s if prompt_s else 0.0
    return Speeds(
        round_figure(generation),
        round_figure(prompt_speed),
        range_of(generation, cost_model.token_factor(parts)),
        range_of(prompt_speed, cost_model.prompt_factor(parts, _short_prompt_tokens(candidate))),
    )


SAMPLING_NS = 5.0
"""Nanoseconds per token of the vocabulary in which llama-server chooses and sends a user's next token: 0.8 ms for 152064 tokens, on a host with two H200."""


def users_estimate(candidate: Candidate, users: int) -> types.UsersEstimate:
    """Return the total speeds of users with simultaneous requests. Each has the planned prompt in the context; users without a free slot wait."""
    workload = candidate.workload
    count = max(1, min(users, workload.cache.parallel))
    variant = prompts.at_depth(candidate, workload.prompt_tokens) if count > 1 else candidate
    sampling_ms = count * workload.summary.vocabulary * SAMPLING_NS / 1e6 if count > 1 else 0.0
    speed = (
        1000 * count / (cost_model.token_ms(variant.parts, count) + sampling_ms) if workload.generates_text else None
    )
    tokens = count * cost_model.PROMPT_TOKENS
    prompt_s = prompts.seconds_of(candidate, tokens) + count * checkpoint_ms(candidate, cost_model.PROMPT_TOKENS) / 1000
    prompt_speed = tokens / (prompt_s or math.inf)
    return types.UsersEstimate(
        users=users,
        at_once=count,
        generation_tokens_per_s=speed and round_figure(speed),
        generation_range=range_of(speed, cost_model.token_factor(variant.parts, count)) if speed else None,
        prompt_tokens_per_s=round_figure(prompt_speed),
        prompt_range=range_of(prompt_speed, cost_model.prompt_factor(candidate.parts, _short_prompt_tokens(candidate))),
    )


def generation_figures(candidate: Candidate) -> dict[str, Any]:
    """Return the predicted speed of generation as fields of the plan; None unless the model fits and generates text."""
    speeds = speeds_of(candidate) if candidate.parts and candidate.workload.generates_text else None
    return {
        "generation_tokens_per_s": speeds and speeds.generation,
        "generation_range": speeds and speeds.generation_range,
    }


def prompt_figures(candidate: Candidate) -> dict[str, Any]:
    """Return the predicted speed of prompts as fields of the plan; None unless the model fits."""
    speeds = speeds_of(candidate) if candidate.parts else None
    return {"prompt_tokens_per_s": speeds and speeds.prompt, "prompt_range": speeds and speeds.prompt_range}


def prompt_estimate(candidate: Candidate) -> types.PromptEstimate:
    """Return the estimate for a prompt in the planned micro-batches."""
    workload, cache, tokens = candidate.workload, candidate.workload.cache, candidate.workload.prompt_tokens
    seconds = prompts.seconds_of(candidate, tokens, tokens // 2) + checkpoint_ms(candidate, tokens) / 1000
    speed = round_figure(tokens / (seconds or math.inf))
    factor = cost_model.prompt_factor(prompts.at_depth(candidate, tokens // 2).parts, workload.micro_batch)
    is_pipelined = prompts.is_pipelined(candidate)
    return types.PromptEstimate(tokens, speed, range_of(speed, factor), cache.batch, cache.micro_batch, is_pipelined)


def _full_context_speeds(candidate: Candidate) -> tuple[types.ContextSpeed, ...]:
    """Return the speeds of one request with all of its context filled."""
    context = candidate.workload.context_per_request
    speeds = speeds_of(prompts.at_depth(candidate, context))
    return (types.ContextSpeed(context, speeds.generation, speeds.prompt),)


def estimate(
    candidate: Candidate, best_host: types.SingleHostEstimate, shapes: tuple[types.ShapeEstimate, ...]
) -> types.Estimate:
    """Return the plan's ``estimate``."""
    parts, generates_text = candidate.parts, candidate.workload.generates_text
    sources = [part.rate.source for part in parts]
    part_by_device = {part.buffer: part for part in parts}
    worker_parts = [
        part_by_device[device.buffer]
        for device in candidate.layout.devices
        if device.worker and device.buffer in part_by_device
    ]
    return types.Estimate(
        **generation_figures(candidate),
        **prompt_figures(candidate),
        load_s=round_figure(cost_model.load_s(candidate.release, parts)) if parts else None,
        limited_by=_generation_bottleneck(parts) if parts and generates_text else None,
        prompt_limited_by=_prompt_bottleneck(candidate) if parts else None,
        load_limited_by=_load_bottleneck(candidate) if parts else None,
        rates=max(sources, key=(device_rates.TABLE_SOURCE, device_rates.ASSUMED_SOURCE).index, default=None),
        devices=tuple(_device_estimate(part) for part in parts),
        best_single_host=best_host,
        network_ms_per_token=round(sum(cost_model.link_ms(part) for part in worker_parts), 3),
        links=tuple(_links(candidate, part_by_device)),
        at_context=_full_context_speeds(candidate) if parts and generates_text else (),
        prompt=prompt_estimate(candidate) if parts else None,
        users=users_estimate(candidate, candidate.workload.users) if parts else None,
        shapes=shapes,
    )


def _device_estimate(part: cost_model.ModelPart) -> types.DeviceEstimate:
    return types.DeviceEstimate(
        device=part.buffer,
        host=part.host,
        gb_per_s=part.rate.gb_per_s,
        prompt_gflops=part.rate.prompt_gflops,
        source=part.rate.source,
        ms_per_token=round_figure(cost_model.device_ms(part)),
    )


def _links(candidate: Candidate, part_by_device: Mapping[str, cost_model.ModelPart]) -> Iterator[types.LinkEstimate]:
    """Yield the cost of each worker without the time that its device computes.

    :param part_by_device: buffer → part of the model.
    """
    for device in candidate.layout.devices:
        link, part = candidate.site.links.get(device.buffer), part_by_device.get(device.buffer)
        if link and device.endpoint:
            yield types.LinkEstimate(
                host=device.host,
                endpoint=device.endpoint,
                kind=link.kind,
                one_way_ms=round(link.round_trip_ms / 2, 4),
                gbit_per_s=link.gbit,
                measured=link.is_measured,
                ms_per_token=round_figure(cost_model.link_ms(part)) if part else 0.0,
            )

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cost of a token on each device, and for each worker. docs/performance.md compares predictions with measurements."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import TensorGroup
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load

EXPERT_PATTERN = re.compile(r"_(?:ch)?exps\b")
"""Pattern for names of tensors of which a token uses only the chosen experts."""


ASSUMED_BITS = 4.85
"""Bits per weight if the summary has no number of weights: those of Q4_K_M."""
LAYER_PATTERN = re.compile(r"^blk\.(\d+)\.")
"""Pattern for the beginning of the name of a layer's tensor."""
LATENT_PATTERN, LATENT_FACTOR = re.compile(r"attn_[kv]_b\."), 12
"""Pattern for the matrices that decompress a latent cache, one per head, and factor by which reading them takes longer: 18 on an H200, 8 on an M3 Ultra."""


PROMPT_TOKENS = 512
"""Tokens of a prompt: one batch, as llama-bench measures it."""
EXPERT_FACTOR, DOUBLING_TOKENS = 1.1, 20
"""Factor of the time of a multiplication with an expert in prompts, and number of tokens per expert at which it doubles."""


class TensorCost(NamedTuple):
    """The cost of a tensor for a token."""

    read_bytes: float
    """Bytes that it reads, more of types that take longer (device_rates.TYPE_COSTS)."""
    multiplied_weights: float
    """Weights that it is multiplied with, more of such types and of experts, which get few tokens of a prompt each."""
    expert_read_bytes: float
    """Part of ``read_bytes`` that belongs to experts."""
    dense_weights: float
    """Weights that each token is multiplied with, without those of experts."""
    expert_weights: float
    """Weights of its experts."""


@functools.lru_cache(maxsize=32)
def tensor_costs(load: device_load.Load) -> tuple[TensorCost, ...]:
    summary, rows = load.summary, {(row.name, row.bytes): row for row in load.summary.tensor_groups}
    weight_bytes = sum(tensor.bytes for tensor in load.tensors)
    average_bits = 8 * weight_bytes / summary.parameters if summary.parameters and weight_bytes else ASSUMED_BITS
    costs = []
    for tensor in load.tensors:
        expert_bytes = 0
        if EXPERT_PATTERN.search(tensor.name):
            expert_bytes = tensor.bytes
        elif not tensor.name and tensor.unit is not None and tensor.unit < len(summary.expert_bytes):
            expert_bytes = summary.expert_bytes[tensor.unit]
        row = rows.get((LAYER_PATTERN.sub("blk.*.", tensor.name), tensor.bytes))
        costs.append(_tensor_cost(tensor.bytes, expert_bytes, summary.active_expert_share, row, average_bits))
    return tuple(costs)


def _tensor_cost(size: int, expert_bytes: int, active_share: float, row: TensorGroup | None, bits: float) -> TensorCost:
    """
    :param size: bytes, of which ``expert_bytes`` are those of experts.
    :param bits: bits per weight if the type of the tensor is unknown.
    """
    bits = 8 * row.bytes / math.prod(row.shape) if row else bits
    cost = device_rates.cost_of_type(row.type) if row else device_rates.DEFAULT_TYPE_COST
    prompt_weights = 8 * cost.prompt_factor / bits
    latent_factor = LATENT_FACTOR if row and len(row.shape) > 2 and LATENT_PATTERN.search(row.name) else 1
    expert_factor = EXPERT_FACTOR * (active_share + DOUBLING_TOKENS / PROMPT_TOKENS)
    return TensorCost(
        read_bytes=(size - expert_bytes * (1 - active_share)) * cost.generation_factor * latent_factor,
        multiplied_weights=(size - expert_bytes + expert_bytes * expert_factor) * prompt_weights,
        expert_read_bytes=expert_bytes * active_share * cost.generation_factor,
        dense_weights=(size - expert_bytes) * prompt_weights,
        expert_weights=expert_bytes * active_share * prompt_weights,
    )


def bytes_read_by_unit(load: device_load.Load) -> list[float]:
    """Return the bytes of weights that a token reads of each unit (the layers, then the output), without the KV cache."""
    unit_bytes = [0.0] * load.units
    for tensor, cost in zip(load.tensors, tensor_costs(load)):
        if tensor.unit is not None:
            unit_bytes[tensor.unit] += cost.read_bytes
    return unit_bytes


LAYER_NODES = {"layer": 31, "experts": 19, "recurrent": 33}
"""Nodes of the graph per layer: the number that llama-server logs for llama, and additional nodes that take as long as layers with experts, or with a
state instead of attention, take besides reading. Backends compute many nodes together."""


def nodes_per_layer(load: device_load.Load) -> float:
    """Return the approximate number of nodes of the graph per layer."""
    nodes: float = LAYER_NODES["layer"] + LAYER_NODES["recurrent"] * load.recurrent_layers / load.layers
    return nodes + (LAYER_NODES["experts"] if load.summary.active_expert_share < 1 else 0)


def generation_ms(rate: device_rates.Rate, read_bytes: float, nodes: float, weights: float = 0.0) -> float:
    """Return the milliseconds that a device takes for its part of a token.

    :param nodes: nodes of its part of the graph: its layers times nodes_per_layer.
    :param weights: number of weights that the token is multiplied with.
    """
    return max(read_bytes / rate.gb_per_s, weights / rate.gweights_per_s) / 1e6 + nodes * rate.node_us / 1e3


@functools.lru_cache(maxsize=64)
def model_and_unit_ms(load: device_load.Load, rate: device_rates.Rate) -> tuple[float, list[float]]:
    """Return the milliseconds of a token on a device that holds the whole model, and those of each unit."""
    unit_bytes, nodes = bytes_read_by_unit(load), nodes_per_layer(load)
    read_bytes = sum(unit_bytes)
    weights_per_byte = sum(cost.dense_weights + cost.expert_weights for cost in tensor_costs(load)) / read_bytes
    unit_ms = [
        generation_ms(rate, unit_size, nodes * (unit < load.layers), weights_per_byte * unit_size)
        for unit, unit_size in enumerate(unit_bytes)
    ]
    return generation_ms(rate, read_bytes, nodes * load.layers, weights_per_byte * read_bytes), unit_ms


@functools.lru_cache(maxsize=64)
def fields_by_device(
    load: device_load.Load, owners: tuple[int | None, ...], buffers: tuple[str, ...]
) -> dict[int | None, dict[str, Any]]:
    """Return index of a used device → fields of its ModelPart; None is the head's processor. A token goes through the units, on their devices and those of
    overrides.

    :param owners: device of each unit.
    """
    indices = {buffer: index for index, buffer in enumerate(buffers)}
    names = (*TensorCost._fields, "weight_bytes", "nodes", "visits")
    fields: dict[int | None, dict[str, Any]] = {index: dict.fromkeys(names, 0) for index in (None, *indices.values())}
    unit_owners = [{owner: None} for owner in owners]
    for tensor, cost in zip(load.tensors, tensor_costs(load)):
        match = LAYER_PATTERN.match(tensor.name)
        if tensor.unit is None and not tensor.buffer and not match:
            continue
        owner = indices.get(tensor.buffer or "", None if tensor.unit is None else owners[tensor.unit])
        for name, value in {**cost._asdict(), "weight_bytes": tensor.bytes}.items():
            fields[owner][name] += value
        if match and tensor.unit is None:
            unit_owners[int(match[1])].setdefault(owner)
    last_owner: object = ""
    for unit, visited_owners in enumerate(unit_owners):
        for owner in visited_owners:
            fields[owner]["visits"] += owner != last_owner
            fields[owner]["nodes"] += nodes_per_layer(load) / len(visited_owners) if unit < load.layers else 0
            last_owner = owner
    return fields


VISIT_MS = 0.9
"""Time of each visit to a worker, besides the round trip: 0.57 to 1.1 ms on H200, 1.1 ms on an M4 Max."""
BOARD_FACTOR, BOARD_GB_PER_S = 4, 12.2
"""Factor of the time for a worker on a Raspberry Pi 5 (16 ms were measured), and the rate of its memory. Slower boards take longer in proportion."""


class Link(NamedTuple):
    """The link over which the head reaches a worker."""

    kind: str
    """Kind as site.link_kind_of returns it."""
    round_trip_ms: float
    gbit: float
    is_measured: bool
    """Whether the round trip was measured; ``gbit`` may still be assumed."""
    host_is_board: bool = False
    """Whether the worker's host is a small board."""
    is_rate_known: bool = False
    """Whether ``gbit`` was measured or declared."""


ASSUMED_LINKS = {
    kind: Link(kind, round_trip_ms, gbit, is_measured=False)
    for kind, round_trip_ms, gbit in (
        ("loopback", 0.04, 11.0),
        ("infiniband", 0.06, 40.0),
        ("thunderbolt", 0.2, 9.4),
        ("usb4", 0.24, 9.0),
        ("ethernet", 0.3, 2.5),
        ("wireless", 6.0, 0.3),
        ("tunnel", 0.3, 2.5),
        ("wireguard", 0.78, 2.5),
    )
}
"""Kind of a link → the link that is assumed if nothing was measured. Round trips include TCP on both hosts. USB4 is that of two Strix Halo, whose
controller delays interrupts by 0.128 ms (anthony-chaudhary/fak#11910), with the highest rate that was reached there
(kyuz0/amd-strix-halo-vllm-toolboxes#70). Loopback has the rate that prompts reach between two H200 (docs/hardware.md). A tunnel is as fast as
the link below it, which is assumed to be Ethernet; so is WireGuard, which adds at most 0.48 ms."""
STUNNEL_MS, STUNNEL_GBIT = 0.05, 3.0
"""Time that stunnel 5.68 at both ends adds to a round trip (33 to 67 µs on an idle machine), and its highest rate: on cores of a virtual machine, its
processor time for a stream allows 3.1 Gbit/s at the worker's end and 4.2 at the head's."""


def worker_ms(link: Link, rate: device_rates.Rate, visits: int = 1) -> float:
    """Return the milliseconds that a worker adds to a token, besides those of its device and of data on the wire.

    :param rate: rate of its device.
    :param visits: number of visits of a token: one, unless tensors are on other devices than their layers.
    """
    if link.kind == "loopback":
        return visits * VISIT_MS
    board_factor = BOARD_FACTOR * max(1.0, BOARD_GB_PER_S / rate.gb_per_s) if link.host_is_board else 1.0
    return (rate.wake_ms + visits * (VISIT_MS + link.round_trip_ms)) * board_factor


def wire_ms(link: Link, size: float) -> float:
    return 8 * size / link.gbit / 1e6


class ModelPart(NamedTuple):
    """The part of the model that one device holds."""

    host: str
    buffer: str
    """Buffer of the device."""
    rate: device_rates.Rate
    read_bytes: float
    """Bytes that a token reads of its weights."""
    weight_bytes: float
    """Bytes of all its weights."""
    multiplied_weights: float
    """Weights that each token is multiplied with."""
    nodes: float
    """Nodes of the graph."""
    link: Link | None = None
    visits: int = 1
    """Number of times that a token visits the device."""
    attention_weights: float = 0.0
    """Numbers that attention multiplies each token of a prompt with."""
    cache_read_bytes: float = 0.0
    """Bytes of weights that take as long to read as the KV cache and states of one conversation."""
    expert_read_bytes: float = 0.0
    """Part of ``read_bytes`` that belongs to experts."""
    dense_weights: float = 0.0
    """Weights that each token is multiplied with, without those of experts."""
    expert_weights: float = 0.0
    """Weights of its experts."""
    active_share: float = 1.0
    """Share of the experts that a token uses."""
    network_bytes: float = 0.0
    """Bytes that cross the network for each token, there and back."""
    result_bytes: float = 0.0
    """Bytes of the result that cross the network for each generated token."""


def parts_of(
    layout: device_load.Layout, head: str, rates: Mapping[str, device_rates.Rate], links: Mapping[str, Link]
) -> tuple[ModelPart, ...]:
    """Return the parts of the model: the part of the head's processor if it has layers, then those of the devices in order.

    :param rates: buffer of a device → its rate.
    :param links: buffer of a worker's device → how the head reaches it.
    """
    buffers, summary = tuple(device.buffer for device in layout.devices), layout.load.summary
    fields = fields_by_device(layout.load, layout.owners, buffers)
    hosts: dict[int | None, str] = {None: head, **dict(enumerate(device.host for device in layout.devices))}
    used_indices = [index for index in hosts if fields[index]["visits"]]
    parts = []
    for index in used_indices:
        buffer = device_load.CPU_BUFFER if index is None else buffers[index]
        link, is_last = links.get(buffer), index == used_indices[-1]
        part = ModelPart(
            host=hosts[index],
            buffer=buffer,
            rate=rates[buffer],
            link=link,
            active_share=summary.active_expert_share,
            # Only the last token's result comes back from the device with the output.
            network_bytes=4.0 * summary.width * (2 * fields[index]["visits"] - is_last) if link else 0.0,
            result_bytes=4.0 * summary.vocabulary if link and is_last else 0.0,
            **fields[index],
        )
        parts.append(part)
    return tuple(parts)


MAX_VECTOR_TOKENS, VECTOR_TOKEN_COST = 8, 5.0
"""Most tokens that kernels for single tokens compute in one step (MMVQ_MAX_BATCH_SIZE). Each but the first takes as long as VECTOR_TOKEN_COST tokens of a
prompt: 5.6 on an H200, 3 and 6 on an M2 Ultra with q8_0 and f16."""


def extra_token_cost(tokens: float) -> float:
    """Return the time of all tokens of a step but the first, in tokens of a prompt."""
    return VECTOR_TOKEN_COST * (min(tokens, MAX_VECTOR_TOKENS) - 1) + max(0.0, tokens - MAX_VECTOR_TOKENS)


def device_ms(part: ModelPart, users: int = 1) -> float:
    """Return the milliseconds of a step with a token of each user. Dense weights are read once, experts if any of the tokens uses them, and the KV cache of
    each user. The step takes no longer than as many steps with one token each."""
    rate, single_bytes = part.rate, part.read_bytes + part.cache_read_bytes
    weights = part.dense_weights + part.expert_weights
    single_ms = generation_ms(rate, single_bytes, part.nodes, weights)
    if users == 1:
        return single_ms
    expert_factor = (1 - (1 - part.active_share) ** users) / part.active_share
    read_bytes = single_bytes + (expert_factor - 1) * part.expert_read_bytes + (users - 1) * part.cache_read_bytes
    extra_cost = part.dense_weights * extra_token_cost(users) + expert_factor * part.expert_weights * extra_token_cost(
        max(1.0, users / expert_factor)
    )
    computing_ms = 2 * extra_cost / rate.prompt_gflops / 1e6
    return min(users * single_ms, generation_ms(rate, read_bytes, part.nodes, weights) + computing_ms)


def link_ms(part: ModelPart, users: int = 1) -> float:
    """Return the milliseconds that the link adds to such a step; 0 if llama-server drives the device itself."""
    if not part.link or not part.visits:
        return 0.0
    size = users * (part.network_bytes + part.result_bytes)
    return worker_ms(part.link, part.rate, part.visits) + wire_ms(part.link, size)


def token_ms(parts: Sequence[ModelPart], users: int = 1) -> float:
    """Return the milliseconds for a token of each user: devices compute one after the other."""
    return sum(device_ms(part, users) + link_ms(part, users) for part in parts)


CACHE_RATE_SHARE = 0.45
"""Share of the rate for weights at which a token reads KV cache: 0.38 and 0.44 on Strix Halo with 32768 tokens (kyuz0), 0.37 to 0.56 on GB10
(ggml-org/llama.cpp#15405)."""
ATTENTION_COST_RATIO = 2.5
"""Time of a multiplication of attention in prompts, with the mask that workers get, divided by that of weights: 3.8 on Strix Halo, 0.9 on GB10 by the
same reports."""
ATTENTION_UNCERTAINTY = 2.2
"""Factor by which this ratio may be larger or smaller, as in these reports."""
LINK_UNCERTAINTY, ASSUMED_RATE_UNCERTAINTY = 1.6, 3.0
"""Factors by which two times may be shorter or longer: of a worker without its device, and of data on a link whose rate is assumed."""
PROMPT_EXPONENT = 1.1
"""Exponent of the factor of a device for prompts, whose predictions are less certain."""


def _mean_factor(costs: Sequence[tuple[float, float]]) -> float:
    """Return the factor of a sum: the geometric mean of the factors of its parts, weighted by their times.

    :param costs: milliseconds and factor of each part.
    """
    total = sum(ms for ms, _factor in costs)
    return math.exp(sum(ms * math.log(factor) for ms, factor in costs) / total) if total else 1.0


def _link_factor(part: ModelPart) -> float:
    return LINK_UNCERTAINTY if not part.link or part.link.is_rate_known else ASSUMED_RATE_UNCERTAINTY


def token_factor(parts: Sequence[ModelPart], users: int = 1) -> float:
    """Return the factor by which generation may be faster or slower than token_ms says. A step of several users is less certain, like prompts."""
    exponent = PROMPT_EXPONENT if users > 1 else 1.0
    costs = [(device_ms(part, users), part.rate.uncertainty**exponent) for part in parts]
    for part in parts:
        visits_ms = link_ms(part._replace(network_bytes=0.0, result_bytes=0.0))
        costs += [(visits_ms, LINK_UNCERTAINTY), (link_ms(part, users) - visits_ms, _link_factor(part))]
    return _mean_factor(costs)


MIN_SPEEDUP = 1.05
"""Smallest predicted speed-up that is reported."""
MIN_SAVED_SHARE = 0.1
"""Share of a token's time that a worker on another host has to save before it replaces the head's devices: predictions are no more precise."""
LIKELY_SHARE = 0.66
"""Share of the uncertainty, which covers four of five measurements, by which a candidate has to be faster to be so in four of five cases."""


def is_likely_faster(faster_parts: Sequence[ModelPart], slower_parts: Sequence[ModelPart], users: int = 1) -> bool:
    """Return whether the first parts are predicted to generate faster in at least four of five cases. A kind of device that takes part in both has the same
    error in both; errors of other devices are independent."""
    share_by_rate: dict[device_rates.Rate | None, float] = {}
    for model_parts, direction in ((faster_parts, 1), (slower_parts, -1)):
        total = token_ms(model_parts, users)
        for part in model_parts:
            for rate, ms in ((part.rate, device_ms(part, users)), (None, link_ms(part, users))):
                share_by_rate[rate] = share_by_rate.get(rate, 0.0) + direction * ms / total
    uncertainties = [
        share * math.log(rate.uncertainty if rate else LINK_UNCERTAINTY) for rate, share in share_by_rate.items()
    ]
    log_speedup = math.log(token_ms(slower_parts, users) / token_ms(faster_parts, users))
    return log_speedup > max(math.log(MIN_SPEEDUP), LIKELY_SHARE * math.hypot(*uncertainties))


LINK_COST = "link to"
"""Kind of the costs that a worker adds to those of its device."""
PROMPT_NODE_FACTOR = 3
"""Factor of a node's time with the tokens of a prompt, compared with one token."""


def prompt_costs(part: ModelPart, tokens: int = PROMPT_TOKENS) -> dict[str, float]:
    """Return kind of cost → milliseconds for tokens of a prompt that one device computes together. Every expert is read once; each token is multiplied
    only with experts that it uses."""
    rate = part.rate
    costs = {
        "memory of": part.weight_bytes / part.rate.gb_per_s / 1e6,
        "computing on": 2 * tokens * (part.multiplied_weights + part.attention_weights) / rate.prompt_gflops / 1e6
        + part.nodes * rate.node_us * PROMPT_NODE_FACTOR / 1e3,
    }
    if part.link:
        costs[LINK_COST] = link_ms(part._replace(result_bytes=0.0), tokens)
    return costs


def prompt_factor(parts: Sequence[ModelPart], tokens: int = PROMPT_TOKENS) -> float:
    """Return the factor by which prompts may be faster or slower than predicted."""
    costs = []
    for part in parts:
        device_factor, device_costs = part.rate.uncertainty**PROMPT_EXPONENT, prompt_costs(part, tokens)
        attention_ms = 2 * tokens * part.attention_weights / part.rate.prompt_gflops / 1e6
        costs += [(ms, _link_factor(part) if kind == LINK_COST else device_factor) for kind, ms in device_costs.items()]
        costs += [(-attention_ms, device_factor), (attention_ms, device_factor * ATTENTION_UNCERTAINTY)]
    return _mean_factor(costs)


COPY_S_PER_GB = 0.3
"""Seconds that llama-server takes to fetch a GB of the cache from a device, besides the link (docs/performance.md)."""
DISK_GB_PER_S = 0.8
"""Assumed rate at which a model's files are read: 138 and 205 GiB took 190 and 285 s in the field notes."""
SEND_S_PER_GB = {False: 3.1, True: 0.75}
"""Whether the release has the collection's patch → time in which head and worker hash and copy tensors: 0.3.36 sent 8.9 GB to a worker on the 16 cores of
the same machine in 29.0 and 7.9 s, without a cache (docs/performance.md)."""


def largest_load_cost(release: ReleasePlan, part: ModelPart) -> tuple[str, float]:
    """Return what limits the load of one device, and the seconds for its weights: the file is read, copied and sent at the same time."""
    s_per_gb = {"disk of": 1 / DISK_GB_PER_S}
    if part.link:
        s_per_gb[LINK_COST] = 8 / part.link.gbit
        s_per_gb["RPC on"] = SEND_S_PER_GB[release.loads_fast] if release.mainline else 0.0
    kind = max(s_per_gb, key=s_per_gb.__getitem__)
    return kind, s_per_gb[kind] * part.weight_bytes / 1e9


def load_s(release: ReleasePlan, parts: Sequence[ModelPart]) -> float:
    """Return the seconds until the weights are on their devices, one after the other, if no worker has them in its cache."""
    return sum(largest_load_cost(release, part)[1] for part in parts)

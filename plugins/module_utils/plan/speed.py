# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a token costs: by device, by layer, and for each worker that takes part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import devices, placement
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Device, Facts, Release

MEASURED, TABLE, ASSUMED = "measured", "table", "assumed"
"""Sources of a rate."""


class Rate(NamedTuple):
    """How fast a device is."""

    gb_per_s: float
    """Bytes of weights and KV cache (1e9) that it reads per second in generation."""
    prompt_gflops: float
    """Reached in prompts."""
    source: str
    """MEASURED, TABLE or ASSUMED."""
    node_us: float = 3.0
    """Microseconds that each node of the graph takes besides reading."""


def rate_of(device: Device, facts: Facts) -> Rate:
    """The rate that was measured of a device, that of its architecture or name, or what is assumed of its kind.

    :param facts: of its host.
    """
    accelerator = devices.accelerator_of(facts, device.name)
    if accelerator:
        row, kind = rates.of_accelerator(accelerator.architecture, accelerator.name), "discrete"
        kind = "unified" if accelerator.unified else "discrete"
    else:
        row, kind = rates.of_processor(str(facts.cpu.get("model", ""))), "processor"
    source = TABLE if row else ASSUMED
    known = row or rates.ASSUMED[kind]
    family = rates.FAMILIES[known.family]
    return Rate(round(known.gb_per_s * family.share, 1), known.prompt_gflops, source, family.node_us)


EXPERTS = re.compile(r"_(?:ch)?exps\b")
"""In names of tensors of which a token uses the chosen experts only."""


def active_share(summary: Mapping[str, Any]) -> float:
    """Of the experts' tensors, what a token reads."""
    keys = summary.get("keys", {})
    count, used = keys.get("expert_count") or 0, keys.get("expert_used_count") or 0
    return min(1.0, used / count) if count and used else 1.0


def units_read(load: placement.Load, summary: Mapping[str, Any]) -> list[float]:
    """Bytes of weights that a token reads of each unit (the layers, then the output). The cache is not in it."""
    share = active_share(summary)
    read = [0.0] * load.units
    for part in load.parts:
        if part.unit is not None:
            read[part.unit] += part.bytes * (share if EXPERTS.search(part.name) else 1)
    return read


NODES = {"dense": 31, "experts": 30, "mla": 20, "recurrent": 30}
"""Nodes of the graph for each layer, as llama-server's log counts them: 31 of llama, so many more for experts (62 of qwen3moe), latent
attention (81 of deepseek2) and recurrent layers."""


def nodes_per_layer(summary: Mapping[str, Any]) -> int:
    """About how many nodes the graph has for each layer."""
    keys = summary.get("keys", {})
    kinds = {
        "dense": True,
        "experts": bool(keys.get("expert_count")),
        "mla": "attention.kv_lora_rank" in keys,
        "recurrent": "ssm.inner_size" in keys,
    }
    return sum(NODES[kind] for kind, has in kinds.items() if has)


def generation_ms(rate: Rate, read_bytes: float, nodes: float) -> float:
    """Milliseconds that a device takes for its part of a token.

    :param read_bytes: of weights and cache.
    :param nodes: of its part of the graph: its layers times nodes_per_layer.
    """
    return read_bytes / rate.gb_per_s / 1e6 + nodes * rate.node_us / 1e3


WORKER_MS = {"loopback": 0.7, "infiniband": 2.0, "thunderbolt": 3.0, "ethernet": 3.0, "wireless": 6.0}
"""Kind of a link → milliseconds of a token for each worker, before what follows from the model and the release."""


def worker_ms(release: Release, nodes: float, kind: str, round_trip_ms: float | None = None) -> float:
    """Milliseconds that a token costs for each worker that is used, besides what its device computes.

    :param nodes: of the whole model's graph.
    :param kind: of the link, as estimate.kind_of returns it.
    :param round_trip_ms: of the link, where it was measured.
    """
    return WORKER_MS[kind] + (round_trip_ms or 0.0)

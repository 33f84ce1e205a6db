# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What llama-server keeps of conversations in the head's memory: those that left their slot, and checkpoints of windows and states.

Both fetch KV cache from the devices, over the network where workers lend them: llama_state_seq_get_data_ext, read in build 11063.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    auxiliary_models,
    cost_model,
    device_load,
    devices,
    estimate,
    prompts,
    workers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Server

LIMIT_MIB, CHECKPOINTS = 8192, 32
"""llama-server's defaults: of ``--cache-ram``, and of ``--ctx-checkpoints``."""
STEP_MIB = 256
"""Room and cache are multiples of this: where a kernel takes a little more, that rarely restarts a server."""


class PromptCache(NamedTuple):
    """What the plan gives it."""

    mib: int
    """For conversations that left their slot; 0 switches it off."""
    checkpoints: int | None
    """Of each slot; None where this build or model makes none, 0 where they take longer than they save."""
    checkpoints_mib: int
    """That these take at most, all slots together."""


def of_plan(case: estimate.Case, server: Server, works: Sequence[cost_model.Work]) -> PromptCache:
    """The half of what is free in the head's memory: first for checkpoints, then for conversations
    where fetching one and sending it back takes less time than computing it again, llama-server's own limit of these at most for each.

    :param works: estimate.works_of the case; empty where the model does not fit.
    """
    release, placed, facts = case.release, case.placed, case.hosts[case.head].facts
    known = {name for name in ("prompt-cache", "context-checkpoints") if options.by_name(name).spelled(release.fork)}
    generates = server_settings.generates(server, case.summary)
    room = _free_mib(placed, facts, case.head) // 2 // STEP_MIB * STEP_MIB
    size = checkpoint_bytes(placed.load, server)
    checkpoints, checkpoints_mib = None, 0
    if size and "context-checkpoints" in known:
        most = max(1, min(CHECKPOINTS, min(LIMIT_MIB, room) * MIB // size))
        checkpoints = most if generates and estimate.pays_checkpoints(case, works) else 0
        checkpoints_mib = -(-checkpoints * size // MIB)
    tokens = server_settings.context_per_request(server, case.summary)
    pays = (
        generates
        and "prompt-cache" in known
        and works
        and not any(is_torn(release, case.summary, server, device.backend) for device in placed.devices)
        and _move_s(case, server) < prompts.seconds_of(case, server, works, tokens)
    )
    planned = max(0, min(LIMIT_MIB, room - checkpoints_mib)) // STEP_MIB * STEP_MIB if pays else 0
    mib = planned if server.prompt_cache_mib is None else server.prompt_cache_mib
    return PromptCache(mib, checkpoints, checkpoints_mib)


def is_torn(release: ReleasePlan, summary: ModelSummary, server: Server, backend: str) -> bool:
    """Whether llama-server ends when it fetches KV cache of a device: where a layer's last tensor is larger than a buffer, the views behind it get no data
    (ggml_backend_alloc_ctx_tensors_from_buft, seen with builds 11063 and 11434)."""
    settings = server_settings.settings_of(server, summary)
    largest = backends.RECORDS[backend].largest_buffer
    return release.mainline and settings.offload and 0 < largest < kv_cache.last_tensor(summary, settings)


def checkpoint_bytes(load: device_load.Load, server: Server) -> int:
    """Of one checkpoint in every slot: caches of windows, and states. Other caches need none."""
    saved = kv_cache.checkpointed(load.summary, server_settings.settings_of(server, load.summary))
    return sum(size for size, counts in zip(load.kv, saved) if counts)


def _free_mib(placed: device_load.Placed, facts: Facts, head: str) -> int:
    """Of the head's memory beside the reserve, what the plan does not use."""
    on_head, load = placed.on_head(), placed.load
    used = (
        on_head.weights
        + on_head.kv
        + (load.compute if on_head.layers else 0)
        + auxiliary_models.in_memory(placed.auxiliary)
    )
    for device, share in zip(placed.devices, placed.shares()):
        if device.host == head and devices.shares_memory(device, facts):
            used += (
                share.weights
                + share.kv
                + placed.compute_on(device)
                + auxiliary_models.on_device(placed.auxiliary, device)
            )
    return max(0, workers.usable_mib(facts.memory_mib) - -(-used // MIB))


def _move_s(case: estimate.Case, server: Server) -> float:
    """Seconds that a conversation of the longest context takes over the network, there and back."""
    slots = 1 if server_settings.settings_of(server, case.summary).unified else server.parallel
    seconds = 0.0
    for device, share in zip(case.placed.devices, case.placed.shares()):
        if device.endpoint:
            gbit = estimate.link_of(device.wire, case.every_host[device.host], case.every_host).gbit
            seconds += 2 * 8 * share.kv / slots / gbit / 1e9
    return seconds

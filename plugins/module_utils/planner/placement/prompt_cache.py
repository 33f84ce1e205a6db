# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations that llama-server keeps: in the head's memory those that lost their slot, and checkpoints; and conversations on its disk.

For all of these it fetches KV cache from devices, over the network from those of workers: llama_state_seq_get_data_ext, read in build 11063.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ConversationsPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, devices, prompts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.estimate import checkpoints_pay_off

MAX_CACHE_MIB, MAX_CHECKPOINTS = 8192, 32
"""llama-server's defaults for ``--cache-ram`` and ``--ctx-checkpoints``."""
MIN_CHECKPOINT_BUILD = 11669
"""Oldest build seen to save checkpoints in slot files (#26004). Older builds compute windows and states of a restored conversation again."""
MIN_TIMEOUT_S = 60
STEP_MIB = 256
"""Granularity of sizes: a kernel that needs a little more memory then rarely restarts a server."""


class PromptCache(NamedTuple):
    """The planned sizes of the prompt cache."""

    mib: int
    """Size for conversations that lost their slot; 0 disables it."""
    checkpoints: int | None
    """Checkpoints of each slot; None if this build or model makes none, 0 if they take longer than they save."""
    checkpoints_mib: int
    """Largest size of the checkpoints of all slots."""
    disk_plan: ConversationsPlan | None = None
    """Plan by which conversations survive a restart; None if they do not."""


def plan_prompt_cache(candidate: Candidate) -> PromptCache:
    """Return how the free half of the head's memory is used: first for checkpoints, then for conversations if fetching one and sending it back
    takes less time than computing it again, each up to llama-server's own limit."""
    workload = candidate.workload
    server, release = workload.server, workload.release
    supported_options = {
        name for name in ("prompt-cache", "context-checkpoints") if options.by_name(name).spellings_of(release.fork)
    }
    free_mib, load = _free_mib(candidate) // 2 // STEP_MIB * STEP_MIB, candidate.layout.load
    # Checkpoints contain the caches of windows, and states. Other caches need no checkpoints.
    size = sum(size for size, is_contained in zip(load.kv, load.is_checkpointed) if is_contained)
    checkpoints, checkpoints_mib = None, 0
    if size and "context-checkpoints" in supported_options:
        count = max(1, min(MAX_CHECKPOINTS, min(MAX_CACHE_MIB, free_mib) * MIB // size))
        checkpoints = count if workload.generates_text and checkpoints_pay_off(candidate) else 0
        checkpoints_mib = -(-checkpoints * size // MIB)
    lengths = workload.context_per_request, min(workload.context_per_request, workload.cache.batch)
    computing_s, batch_s = (prompts.seconds_of(candidate, count) if candidate.parts else 0.0 for count in lengths)
    transfer_s, used_backends = _transfer_s(candidate), {device.backend for device in candidate.layout.devices}
    is_worthwhile = (
        workload.generates_text
        and "prompt-cache" in supported_options
        and candidate.parts
        and not load.split_cache_backends & used_backends
        and transfer_s < computing_s
    )
    planned_mib = max(0, min(MAX_CACHE_MIB, free_mib - checkpoints_mib)) // STEP_MIB * STEP_MIB if is_worthwhile else 0
    mib = planned_mib if server.prompt_cache_mib is None else server.prompt_cache_mib
    if not server.keep_conversations or not candidate.parts or why_not_on_disk(candidate):
        return PromptCache(mib, checkpoints, checkpoints_mib)
    slots = 1 if workload.cache.unified else workload.cache.parallel
    slot_bytes = sum(load.kv) / slots + checkpoints_mib * MIB / slots
    disk_plan = ConversationsPlan(
        limit_mib=server.conversations_mib,
        file_mib=math.ceil(slot_bytes / MIB),
        move_s=round(transfer_s / 2 + slot_bytes / 1e9 / cost_model.DISK_GB_PER_S, 1),
        computing_s=round(computing_s, 1),
        timeout_s=max(MIN_TIMEOUT_S, math.ceil(2 * batch_s)),
    )
    return PromptCache(mib, checkpoints, checkpoints_mib, disk_plan)


def why_not_on_disk(candidate: Candidate) -> str:
    """Return why llama-server cannot restore conversations from its disk; empty if it can."""
    workload, release, load = candidate.workload, candidate.release, candidate.layout.load
    draft_arguments = [workload.server.argument(name) for name in ("draft", options.SPECULATION)]
    if not workload.generates_text:
        return "the model generates no text"
    if not release.mainline:
        return f"restoring conversations has not been tested with {release.fork}"
    if workload.spec_type.startswith("draft") or any(draft_arguments):
        return "llama-server does not save the context of a draft model (ggml-org/llama.cpp#28619)"
    if any(load.is_checkpointed) and release.build < MIN_CHECKPOINT_BUILD:
        return f"{candidate.summary.name} has sliding windows or recurrent layers, and only build {MIN_CHECKPOINT_BUILD} or newer saves their checkpoints"
    if any(device.backend in load.split_cache_backends for device in candidate.layout.devices):
        return "llama-server crashes when it saves a KV cache that is split into several buffers (ggml-org/llama.cpp#25584)"
    return ""


def _free_mib(candidate: Candidate) -> int:
    """Return the part of the head's memory beyond the reserve that the plan does not use."""
    layout, facts = candidate.layout, candidate.site.head_facts
    head_share, load = layout.head_share(), layout.load
    size = head_share.weights + head_share.kv + (load.compute if head_share.layers else 0)
    size += sum(model.head_bytes for model in layout.auxiliary)
    size += sum(
        share.total
        for share in layout.shares()
        if share.device.host == candidate.site.head and share.device.shares_memory
    )
    return max(0, devices.usable_mib(facts.memory_mib) - -(-size // MIB))


def _transfer_s(candidate: Candidate) -> float:
    """Return the seconds that a conversation with a full context takes over the network and back."""
    cache, seconds = candidate.workload.cache, 0.0
    slots = 1 if cache.unified else cache.parallel
    for share in candidate.layout.shares():
        link = candidate.site.links.get(share.device.buffer)
        if link:
            seconds += 2 * 8 * share.kv / slots / link.gbit / 1e9
    return seconds

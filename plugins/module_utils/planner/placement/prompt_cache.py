# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations that llama-server keeps in the head's memory: those that left their slot, and checkpoints of windows and states; and on its disk.

All fetch KV cache from the devices, over the network where workers lend them: llama_state_seq_get_data_ext, read in build 11063.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ConversationsPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, devices, prompts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.estimate import checkpoints_pay

LIMIT_MIB, MAX_CHECKPOINTS = 8192, 32
"""llama-server's defaults for ``--cache-ram`` and ``--ctx-checkpoints``."""
CHECKPOINTS_IN_FILES = 11669
"""Oldest build seen to save checkpoints in slot files (#26004): without them windows and states of a restored conversation are computed again."""
MIN_TIMEOUT_S = 60
STEP_MIB = 256
"""Unit of sizes: so a kernel that takes a little more rarely restarts a server."""


class PromptCache(NamedTuple):
    """The planned sizes."""

    mib: int
    """Size for conversations that left their slot; 0 switches it off."""
    checkpoints: int | None
    """Number for each slot; None if this build or model makes none, 0 if they take longer than they save."""
    checkpoints_mib: int
    """Largest size of these, all slots together."""
    on_disk: ConversationsPlan | None = None
    """How conversations survive a restart; None if they do not."""


def prompt_cache(candidate: Candidate) -> PromptCache:
    """Return how the free half of the head's memory is used: first for checkpoints, then for conversations if fetching one and sending it back
    takes less time than computing it again, each up to llama-server's own limit."""
    workload = candidate.workload
    server, release = workload.server, workload.release
    available_backends = {
        name for name in ("prompt-cache", "context-checkpoints") if options.by_name(name).spellings_of(release.fork)
    }
    free_mib, load = _free_mib(candidate) // 2 // STEP_MIB * STEP_MIB, candidate.layout.load
    # Checkpoints contain caches of windows, and states. Other caches need none.
    size = sum(size for size, is_contained in zip(load.kv, load.checkpointed) if is_contained)
    checkpoints, checkpoints_mib = None, 0
    if size and "context-checkpoints" in available_backends:
        count = max(1, min(MAX_CHECKPOINTS, min(LIMIT_MIB, free_mib) * MIB // size))
        checkpoints = count if workload.generates_text and checkpoints_pay(candidate) else 0
        checkpoints_mib = -(-checkpoints * size // MIB)
    tokens = workload.context_per_request, min(workload.context_per_request, workload.cache.batch)
    computing_s, batch_s = (prompts.seconds_of(candidate, count) if candidate.parts else 0.0 for count in tokens)
    move_s, used_backends = _move_s(candidate), {device.backend for device in candidate.layout.devices}
    is_worthwhile = (
        workload.generates_text
        and "prompt-cache" in available_backends
        and candidate.parts
        and not load.split_cache_backends & used_backends
        and move_s < computing_s
    )
    planned_mib = max(0, min(LIMIT_MIB, free_mib - checkpoints_mib)) // STEP_MIB * STEP_MIB if is_worthwhile else 0
    mib = planned_mib if server.prompt_cache_mib is None else server.prompt_cache_mib
    if not server.keep_conversations or not candidate.parts or why_not_on_disk(candidate):
        return PromptCache(mib, checkpoints, checkpoints_mib)
    slots = 1 if workload.cache.unified else workload.cache.parallel
    slot_bytes = sum(load.kv) / slots + checkpoints_mib * MIB / slots
    disk_plan = ConversationsPlan(
        limit_mib=server.conversations_mib,
        file_mib=math.ceil(slot_bytes / MIB),
        move_s=round(move_s / 2 + slot_bytes / 1e9 / cost_model.DISK_GB_PER_S, 1),
        computing_s=round(computing_s, 1),
        timeout_s=max(MIN_TIMEOUT_S, math.ceil(2 * batch_s)),
    )
    return PromptCache(mib, checkpoints, checkpoints_mib, disk_plan)


def why_not_on_disk(candidate: Candidate) -> str:
    """Return why llama-server cannot restore conversations from its disk; empty if it can."""
    workload, release, load = candidate.workload, candidate.release, candidate.layout.load
    drafts = [workload.server.argument(name) for name in ("draft", options.SPECULATION)]
    if not workload.generates_text:
        return "the model generates no text"
    if not release.mainline:
        return f"restoring conversations has not been tested with {release.fork}"
    if workload.speculation.startswith("draft") or any(drafts):
        return "llama-server does not save the context of a draft model (ggml-org/llama.cpp#28619)"
    if any(load.checkpointed) and release.build < CHECKPOINTS_IN_FILES:
        return f"{candidate.summary.name} has sliding windows or recurrent layers, whose checkpoints only build {CHECKPOINTS_IN_FILES} or newer saves"
    if any(device.backend in load.split_cache_backends for device in candidate.layout.devices):
        return "llama-server crashes when it saves a KV cache that is split into several buffers (ggml-org/llama.cpp#25584)"
    return ""


def _free_mib(candidate: Candidate) -> int:
    """Return the part of the head's memory beyond the reserve that the plan does not use."""
    layout, facts = candidate.layout, candidate.site.facts
    on_head, load = layout.on_head(), layout.load
    size = on_head.weights + on_head.kv + (load.compute if on_head.layers else 0)
    size += sum(model.head_bytes for model in layout.auxiliary)
    size += sum(
        share.total
        for share in layout.shares()
        if share.device.host == candidate.site.head and share.device.shares_memory
    )
    return max(0, devices.usable_mib(facts.memory_mib) - -(-size // MIB))


def _move_s(candidate: Candidate) -> float:
    """Return the seconds that a conversation of the longest context takes over the network, there and back."""
    cache, seconds = candidate.workload.cache, 0.0
    slots = 1 if cache.unified else cache.parallel
    for share in candidate.layout.shares():
        link = candidate.site.links.get(share.device.buffer)
        if link:
            seconds += 2 * 8 * share.kv / slots / link.gbit / 1e9
    return seconds

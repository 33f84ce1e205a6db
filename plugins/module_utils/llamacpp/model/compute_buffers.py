# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An upper bound of the compute buffer of a device: what llama.cpp reserves for the results of the layers that it works on.

Without flash attention the scores of all heads are there at once, for each token that is computed and each one of the context. With it
there are masks alone. Learnt from src/llama-graph.cpp, and from build_deepseek2 of ik_llama.cpp.
"""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA

FLOAT = 4

MASKS = 12
"""So many times as much as the scores of one head are for masks; 4 were seen, and 8.5 with a window of the whole context."""
COPIES = 3
"""So many times more a mask is on a device for the pipeline (GGML_SCHED_MAX_COPIES). MASKS has room for those of one mask, FLASH_MASKS for four in 16
bits; MASKS not for those of windows."""
FLASH_MASKS = 3
"""The same with flash attention, for layers with and without a window each: 32-bit floats, their copy in 16 bits, and one for the device."""
STATES, RECURRENT_STATES = 16, 32
"""So many values of the width, and of a recurrent layer's inner width, are kept for each token; 33 of twice the width were seen of mamba."""
FLASH_STATES = 32
"""The same of the width with flash attention, where no scores are above what experts need; 22 were seen (Qwen3 480B with b6110)."""
FLASH_HEADS = 2
"""So many times the queries and the values of all heads."""
LATENT_COPIES = 2
"""So many times the whole heads that ik_llama.cpp makes of its compressed cache: 32-bit floats, and halves of them as keys and as values."""
MASK_TOKENS = 64
"""Masks are made for a multiple of so many tokens: GGML_KQ_MASK_PAD."""

FLASH_SIZES = (40, 64, 72, 80, 96, 112, 128, 256)
"""Sizes of heads for which CUDA, HIP, Metal, Vulkan and processors have flash attention, where keys and values have one type: supports_op of
build 11063. RPC says yes to all."""
NO_FLASH = ("grok",)
"""Architectures for which llama.cpp switches it off."""


def uses_flash(summary: ModelSummary, settings: kv_cache.Settings) -> bool:
    """Whether it is sure that attention is computed without scores."""
    if settings.fork == IK_LLAMA:
        return settings.flash()
    if summary.architecture in NO_FLASH or settings.flash_attention == "off":
        return False
    alike = settings.type_k == settings.type_v and summary.key_dimension == summary.value_dimension
    return settings.flash_attention == "on" or (alike and summary.key_dimension in FLASH_SIZES)


def _heads_at_once(summary: ModelSummary, settings: kv_cache.Settings, context: int) -> int:
    """Heads whose scores are there at the same time: fewer than all with ``-amb`` of ik_llama.cpp."""
    heads, limit = summary.heads, (settings.attention_batch or 0) * MIB
    scores = FLOAT * heads * context * settings.tokens
    if settings.fork != IK_LLAMA or not limit or scores <= limit:
        return heads
    return -(-heads // min(heads, -(-scores // limit)))


def _whole_heads(summary: ModelSummary, settings: kv_cache.Settings, context: int) -> int:
    """Bytes of the heads that ik_llama.cpp makes of its compressed cache with ``-mla 2`` and 3, as many at a time as ``-amb`` allows."""
    if settings.fork != IK_LLAMA or summary.architecture not in kv_cache.LATENT:
        return 0
    if kv_cache.latent_mode(settings) < 2 or not uses_flash(summary, settings):
        return 0
    heads = summary.heads
    key = summary.number("attention.key_length_mla") or summary.key_dimension
    value = summary.number("attention.value_length_mla") or summary.value_dimension
    limit = (settings.attention_batch or 0) * MIB
    size = FLOAT * heads * (key + value) * context
    while limit and size > limit and heads % 2 == 0:
        heads, size = heads // 2, size // 2
    return LATENT_COPIES * size


def bound(summary: ModelSummary, settings: kv_cache.Settings) -> int:
    """Upper bound of a device's compute buffer in bytes: scores or masks, states, and the logits."""
    context, heads, width = kv_cache.pad(settings.context, 256), summary.heads, summary.width
    inner = summary.number("ssm.inner_size") or 0
    states = RECURRENT_STATES * inner + summary.vocabulary
    windows = kv_cache.window_size(summary) > 0
    if uses_flash(summary, settings):
        scores = FLASH_MASKS * (1 + windows) * context
        states += FLASH_STATES * width
        states += FLASH_HEADS * heads * (summary.key_dimension + summary.value_dimension)
    else:
        scores = (_heads_at_once(summary, settings, context) + MASKS + COPIES * windows) * context
        states += STATES * width
    tokens = kv_cache.pad(settings.tokens, MASK_TOKENS)
    return FLOAT * tokens * (scores + states) + _whole_heads(summary, settings, context)

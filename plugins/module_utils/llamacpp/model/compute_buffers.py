# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An upper bound of the compute buffer of a device: what llama.cpp reserves for the results of the layers that it works on.

Without flash attention the scores of all heads are there at once, for each token that is computed and each one of the context. With it
there are masks alone. Learnt from src/llama-graph.cpp, and from build_deepseek2 of ik_llama.cpp; held against what llama-fit-params reports
(tests/benchmarks/compute_bounds.py).
"""

from __future__ import annotations

import math

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA

FLOAT, HALF = 4, 2

COPIES = 4
"""Of each mask, and of the states that a device gets: one for each part of the pipeline (GGML_SCHED_MAX_COPIES)."""
STATES, RECURRENT_STATES = 8, 16
"""So many values of the width, four of them copies, and of a recurrent layer's inner width, are kept for each token."""
AT_ONCE = 2
"""So many times what the matrices of a layer make of a token is kept: 1.5 were seen."""
SLOT_OUTPUTS = 17
"""Tokens of a slot of which there are logits: drafted ones count."""
IK_MASKS, IK_FLASH_MASKS = 15, 6
"""Of ik_llama.cpp, so many times as much as the scores of one head are for masks, windows among them."""
UNNAMED_STATES, UNNAMED_HEADS = 32, 2
"""Of ik_llama.cpp, and where tensors have no names: values of the width, and of the queries and values of all heads; 22 of the width were seen (Qwen3
480B with b6110)."""
LATENT_COPIES = 2
"""So many times the whole heads that ik_llama.cpp makes of its compressed cache: 32-bit floats, and halves of them as keys and as values."""
MASK_TOKENS = 64
"""Masks are made for a multiple of so many tokens: GGML_KQ_MASK_PAD."""

FLASH_SIZES = (40, 64, 72, 80, 96, 112, 128, 256)
"""Sizes of heads for which CUDA, HIP, Metal, Vulkan and processors have flash attention, where keys and values have one type: supports_op of
build 11063. RPC says yes to all."""
GROUPED_FLASH = ((576, 512), (512, 512))
"""The same of keys and values, where several heads have one key: MLA, and layers of Gemma 4."""
NO_FLASH = ("grok",)
"""Architectures for which llama.cpp switches it off."""


def uses_flash(summary: ModelSummary, settings: kv_cache.Settings) -> bool:
    """Whether it is sure that attention is computed without scores."""
    if settings.fork == IK_LLAMA:
        return settings.flash()
    if summary.architecture in NO_FLASH or settings.flash_attention == "off":
        return False
    sizes = summary.key_dimension, summary.value_dimension
    known = (sizes[0] == sizes[1] and sizes[0] in FLASH_SIZES) or (
        sizes in GROUPED_FLASH and summary.heads > summary.kv_heads
    )
    return settings.flash_attention == "on" or (known and settings.type_k == settings.type_v)


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


def _made(summary: ModelSummary) -> int:
    """Values that the matrices of one layer make of a token, of the layer with the most."""
    used, layers = summary.number("expert_used_count") or 1, [0] * summary.layers
    for row in summary.named_tensors:
        made = math.prod(row.shape[1:-1]) * used if "exps" in row.name else math.prod(row.shape[1:])
        for layer in row.layers or ():
            layers[layer] += made if len(row.shape) > 1 else 0
    return max(layers)


def _whole_cache(summary: ModelSummary, settings: kv_cache.Settings, cells: int) -> int:
    """Bytes of the keys and values of a layer in 16 bits, which flash attention makes of others."""
    sizes = ((settings.type_k, summary.key_dimension), (settings.type_v, summary.value_dimension))
    heads = max(summary.by_layer("attention.head_count_kv", summary.kv_heads))
    return HALF * cells * heads * sum(size for kind, size in sizes if kind != "f16")


def bound(summary: ModelSummary, settings: kv_cache.Settings) -> int:
    """Upper bound of a device's compute buffer in bytes: scores or masks, states, and the logits."""
    tokens, width = kv_cache.pad(settings.tokens, MASK_TOKENS), summary.width
    full, short = kv_cache.cells(summary, settings)
    masked = full + (short if kv_cache.window_size(summary) else 0)
    flash, ours = uses_flash(summary, settings), settings.fork != IK_LLAMA
    heads = 0 if flash else _heads_at_once(summary, settings, full)
    outputs = tokens if settings.every_output or not ours else min(tokens, SLOT_OUTPUTS * settings.parallel)
    values = RECURRENT_STATES * (summary.number("ssm.inner_size") or 0)
    if ours and summary.tensors:
        values += STATES * width + AT_ONCE * _made(summary)
    else:
        values += UNNAMED_STATES * width + UNNAMED_HEADS * summary.heads * (
            summary.key_dimension + summary.value_dimension
        )
    size = FLOAT * (tokens * values + outputs * summary.vocabulary)
    if all(kv_cache.recurrent_layers(summary)):
        return size
    if not ours:
        masks = (IK_FLASH_MASKS if flash else IK_MASKS) * full
        return size + FLOAT * tokens * (heads * full + masks) + _whole_heads(summary, settings, full)
    masks = COPIES * masked * (HALF if flash else FLOAT)
    return size + tokens * (FLOAT * heads * full + masks) + (_whole_cache(summary, settings, full) if flash else 0)

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Upper bound on the size of a device's compute buffer, in which llama.cpp stores the intermediate results of layers.

Without flash attention, the scores of all heads exist at once, for each computed token and each token of the context. Flash attention needs only masks.
Sources: src/llama-graph.cpp, and build_deepseek2 of ik_llama.cpp. tests/benchmarks/compute_bounds.py compares the bound with llama-fit-params.
"""

from __future__ import annotations

import math

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA

F32, F16 = 4, 2

PIPELINE_COPIES = 4
"""Number of copies of each mask and of a device's input, one for each stage of the pipeline (GGML_SCHED_MAX_COPIES)."""
STATE_VECTORS, RECURRENT_VECTORS = 8, 16
"""Number of vectors for each token: of the model's width, including four copies, and of a recurrent layer's inner width."""
LIVE_OUTPUTS = 2
"""Factor for the outputs of a layer's matrices that exist at once; 1.5 was observed."""
SLOT_OUTPUTS = 17
"""Tokens of a slot with logits, including drafted tokens."""
IK_MASKS, IK_FLASH_MASK_FACTOR = 15, 6
"""Size of the masks of ik_llama.cpp, including windows, as a multiple of one head's scores."""
UNNAMED_STATES, UNNAMED_HEADS = 32, 2
"""Number of vectors for ik_llama.cpp and for tensors without names: of the width, and of the queries and values of all heads; 22 of the width were
observed (Qwen3 480B with b6110)."""
LATENT_COPIES = 2
"""Factor for the full heads that ik_llama.cpp expands from its compressed cache: 32-bit floats, and 16-bit keys and values."""
MASK_PADDING = 64
"""Masks are padded to a multiple of this number of tokens: GGML_KQ_MASK_PAD."""

FLASH_HEAD_SIZES = (40, 64, 72, 80, 96, 112, 128, 256)
"""Head sizes for which CUDA, HIP, Metal, Vulkan and processors have flash attention if keys and values share a type: supports_op of build 11063.
RPC claims to support all."""
GROUPED_FLASH_HEAD_SIZES = ((576, 512), (512, 512))
"""Sizes of keys and values with flash attention if several heads share a key: MLA, and layers of Gemma 4."""
NO_FLASH_ARCHITECTURES = ("grok",)
"""Architectures for which llama.cpp disables flash attention."""


def uses_flash(summary: ModelSummary, settings: kv_cache.CacheSettings) -> bool:
    """Return whether attention is certain to run as flash attention, which needs no scores."""
    if settings.fork == IK_LLAMA:
        return settings.uses_flash_attention()
    if summary.architecture in NO_FLASH_ARCHITECTURES or settings.flash_attention == "off":
        return False
    sizes = summary.key_dimension, summary.value_dimension
    is_supported = (sizes[0] == sizes[1] and sizes[0] in FLASH_HEAD_SIZES) or (
        sizes in GROUPED_FLASH_HEAD_SIZES and summary.heads > summary.kv_heads
    )
    return settings.flash_attention == "on" or (is_supported and settings.type_k == settings.type_v)


def _heads_at_once(summary: ModelSummary, settings: kv_cache.CacheSettings, context: int) -> int:
    """Return the number of heads whose scores exist at once, which ``-amb`` of ik_llama.cpp limits."""
    heads, limit = summary.heads, (settings.attention_batch or 0) * MIB
    scores = F32 * heads * context * settings.tokens
    if settings.fork != IK_LLAMA or not limit or scores <= limit:
        return heads
    return -(-heads // min(heads, -(-scores // limit)))


def _expanded_head_bytes(summary: ModelSummary, settings: kv_cache.CacheSettings, context: int) -> int:
    """Return the bytes of the heads that ik_llama.cpp expands at once from its compressed cache with ``-mla`` 2 and 3, limited by ``-amb``."""
    if settings.fork != IK_LLAMA or summary.architecture not in kv_cache.LATENT_ARCHITECTURES:
        return 0
    if kv_cache.latent_mode(settings) < 2 or not uses_flash(summary, settings):
        return 0
    heads = summary.heads
    key = summary.number("attention.key_length_mla") or summary.key_dimension
    value = summary.number("attention.value_length_mla") or summary.value_dimension
    limit = (settings.attention_batch or 0) * MIB
    size = F32 * heads * (key + value) * context
    while limit and size > limit and heads % 2 == 0:
        heads, size = heads // 2, size // 2
    return LATENT_COPIES * size


def _largest_layer_outputs(summary: ModelSummary) -> int:
    """Return the number of values that the matrices of the largest layer compute for a token."""
    active_experts, layers = summary.number("expert_used_count") or 1, [0] * summary.layers
    for row in summary.named_tensors:
        outputs = math.prod(row.shape[1:-1]) * active_experts if "exps" in row.name else math.prod(row.shape[1:])
        for layer in row.layers or ():
            layers[layer] += outputs if len(row.shape) > 1 else 0
    return max(layers)


def _f16_cache_bytes(summary: ModelSummary, settings: kv_cache.CacheSettings, cells: int) -> int:
    """Return the bytes of a layer's keys and values in 16 bits, to which flash attention converts other types."""
    sizes = ((settings.type_k, summary.key_dimension), (settings.type_v, summary.value_dimension))
    heads = max(summary.layer_kv_heads)
    return F16 * cells * heads * sum(size for kind, size in sizes if kind != "f16")


def compute_bound(summary: ModelSummary, settings: kv_cache.CacheSettings) -> int:
    """Return an upper bound on a device's compute buffer in bytes: scores or masks, states, and logits."""
    tokens, width = kv_cache.pad(settings.tokens, MASK_PADDING), summary.width
    cells, window_cells = kv_cache.cells(summary, settings)
    mask_cells = cells + (window_cells if kv_cache.window_size(summary) else 0)
    is_recurrent = all(kv_cache.recurrent_layers(summary))
    flash, is_mainline = uses_flash(summary, settings), settings.fork != IK_LLAMA
    heads = 0 if flash else _heads_at_once(summary, settings, cells)
    outputs = tokens if settings.every_output or not is_mainline else min(tokens, SLOT_OUTPUTS * settings.parallel)
    values = RECURRENT_VECTORS * (summary.number("ssm.inner_size") or 0)
    if is_mainline and summary.tensors:
        values += STATE_VECTORS * width + LIVE_OUTPUTS * _largest_layer_outputs(summary)
    else:
        values += UNNAMED_STATES * width + UNNAMED_HEADS * summary.heads * (
            summary.key_dimension + summary.value_dimension
        )
    size = F32 * (tokens * values + outputs * summary.vocabulary)
    if is_recurrent:
        return size
    if not is_mainline:
        masks = (IK_FLASH_MASK_FACTOR if flash else IK_MASKS) * cells
        return size + F32 * tokens * (heads * cells + masks) + _expanded_head_bytes(summary, settings, cells)
    masks = PIPELINE_COPIES * mask_cells * (F16 if flash else F32)
    return size + tokens * (F32 * heads * cells + masks) + (_f16_cache_bytes(summary, settings, cells) if flash else 0)

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

F32_BYTES, F16_BYTES = 4, 2

PIPELINE_COPIES = 4
"""Number of copies of each mask and of a device's input, one for each stage of the pipeline (GGML_SCHED_MAX_COPIES)."""
STATE_VECTORS, RECURRENT_VECTORS = 8, 16
"""Number of vectors for each token: of the model's width, including four copies, and of a recurrent layer's inner width."""
LIVE_OUTPUTS_FACTOR = 2
"""Factor for the outputs of a layer's matrices that exist at once; 1.5 was observed."""
SLOT_OUTPUTS = 17
"""Tokens of a slot with logits, including drafted tokens."""
IK_MASK_FACTOR, IK_FLASH_MASK_FACTOR = 15, 6
"""Size of the masks of ik_llama.cpp, including windows, as a multiple of one head's scores."""
UNNAMED_STATE_VECTORS, UNNAMED_HEAD_VECTORS = 32, 2
"""Number of vectors for ik_llama.cpp and for tensors without names: of the width, and of the queries and values of all heads; 22 of the width were
observed (Qwen3 480B with b6110)."""
EXPANDED_HEADS_FACTOR = 2
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
    head_sizes = summary.key_dimension, summary.value_dimension
    is_supported = (head_sizes[0] == head_sizes[1] and head_sizes[0] in FLASH_HEAD_SIZES) or (
        head_sizes in GROUPED_FLASH_HEAD_SIZES and summary.heads > summary.kv_heads
    )
    return settings.flash_attention == "on" or (is_supported and settings.type_k == settings.type_v)


def _heads_at_once(summary: ModelSummary, settings: kv_cache.CacheSettings, context: int) -> int:
    """Return the number of heads whose scores exist at once, which ``-amb`` of ik_llama.cpp limits."""
    heads, limit_bytes = summary.heads, (settings.attention_batch or 0) * MIB
    score_bytes = F32_BYTES * heads * context * settings.tokens
    if settings.fork != IK_LLAMA or not limit_bytes or score_bytes <= limit_bytes:
        return heads
    return -(-heads // min(heads, -(-score_bytes // limit_bytes)))


def _expanded_head_bytes(summary: ModelSummary, settings: kv_cache.CacheSettings, context: int) -> int:
    """Return the bytes of the heads that ik_llama.cpp expands at once from its compressed cache with ``-mla`` 2 and 3, limited by ``-amb``."""
    if settings.fork != IK_LLAMA or summary.architecture not in kv_cache.LATENT_ARCHITECTURES:
        return 0
    if kv_cache.latent_mode(settings) < 2 or not uses_flash(summary, settings):
        return 0
    heads, limit_bytes = summary.heads, (settings.attention_batch or 0) * MIB
    key_size = summary.number("attention.key_length_mla") or summary.key_dimension
    value_size = summary.number("attention.value_length_mla") or summary.value_dimension
    size = F32_BYTES * heads * (key_size + value_size) * context
    while limit_bytes and size > limit_bytes and heads % 2 == 0:
        heads, size = heads // 2, size // 2
    return EXPANDED_HEADS_FACTOR * size


def _largest_layer_outputs(summary: ModelSummary) -> int:
    """Return the number of values that the matrices of the largest layer compute for a token."""
    active_experts, layer_outputs = summary.number("expert_used_count") or 1, [0] * summary.layers
    for group in summary.tensor_groups:
        outputs = math.prod(group.shape[1:-1]) * active_experts if "exps" in group.name else math.prod(group.shape[1:])
        for layer in group.layers or ():
            layer_outputs[layer] += outputs if len(group.shape) > 1 else 0
    return max(layer_outputs)


def _f16_cache_bytes(summary: ModelSummary, settings: kv_cache.CacheSettings, cells: int) -> int:
    """Return the bytes of a layer's keys and values in 16 bits, to which flash attention converts other types."""
    sizes = ((settings.type_k, summary.key_dimension), (settings.type_v, summary.value_dimension))
    heads = max(summary.layer_kv_heads)
    return F16_BYTES * cells * heads * sum(size for cache_type, size in sizes if cache_type != "f16")


def buffer_bound(summary: ModelSummary, settings: kv_cache.CacheSettings) -> int:
    """Return an upper bound on a device's compute buffer in bytes: scores or masks, states, and logits."""
    tokens, is_recurrent = kv_cache.pad(settings.tokens, MASK_PADDING), all(kv_cache.recurrent_flags(summary))
    cells, window_cells = kv_cache.cell_counts(summary, settings)
    mask_cells = cells + (window_cells if kv_cache.window_size(summary) else 0)
    is_flash, is_mainline = uses_flash(summary, settings), settings.fork != IK_LLAMA
    scores = 0 if is_flash else cells * _heads_at_once(summary, settings, cells)
    output_rows = tokens if settings.every_output or not is_mainline else min(tokens, SLOT_OUTPUTS * settings.parallel)
    values_per_token = RECURRENT_VECTORS * (summary.number("ssm.inner_size") or 0)
    if is_mainline and summary.tensors:
        values_per_token += STATE_VECTORS * summary.width + LIVE_OUTPUTS_FACTOR * _largest_layer_outputs(summary)
    else:
        values_per_token += UNNAMED_STATE_VECTORS * summary.width + UNNAMED_HEAD_VECTORS * summary.heads * (
            summary.key_dimension + summary.value_dimension
        )
    size = F32_BYTES * (tokens * values_per_token + output_rows * summary.vocabulary)
    if is_recurrent:
        return size
    if not is_mainline:
        mask_values = (IK_FLASH_MASK_FACTOR if is_flash else IK_MASK_FACTOR) * cells
        return size + F32_BYTES * tokens * (scores + mask_values) + _expanded_head_bytes(summary, settings, cells)
    mask_bytes = PIPELINE_COPIES * mask_cells * (F16_BYTES if is_flash else F32_BYTES)
    f16_cache_bytes = _f16_cache_bytes(summary, settings, cells) if is_flash else 0
    return size + tokens * (F32_BYTES * scores + mask_bytes) + f16_cache_bytes

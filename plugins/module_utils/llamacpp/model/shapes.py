# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Headers of models with a published shape: their tensors, with the types that llama-quantize chooses (llama-quant.cpp of build 11063).

They omit biases, norms of heads, the extra bits of the first layers in Q3_K_M, and the reduced bits of values in IQ4_XS and Q2_K.
tests/unit/test_what_fits.py compares sizes with real files.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Annotated, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import MAX_LAYERS, ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.tensor_types import ALL_TYPES

TYPES_BY_NAME = {kind.name: kind for kind in ALL_TYPES.values()}
STATE_SIZE, CONV_SIZE, LAYER_PERIOD = 128, 4, 4
"""Constants of models with recurrent layers: elements of a head, tokens of the convolution, and period of attention layers."""
Count = Annotated[int, Number(1, 1 << 24)]
CountOrZero = Annotated[int, Number(0, 1 << 24)]


class Experts(NamedTuple):
    number: Count
    active: Count
    """Number of experts per token."""
    inner: Count
    """Width of an expert."""
    shared: CountOrZero = 0
    """Total width of the experts that every token uses."""
    first_layer: CountOrZero = 0
    """First layer with experts."""


class LatentAttention(NamedTuple):
    """MLA: ranks of queries and of the cache, and elements of a head's keys, their rotated part, and values."""

    query: Count
    cached: Count
    key: Count
    rotated: Count
    value: Count


class RecurrentHeads(NamedTuple):
    """Heads of the recurrent layers."""

    keys: Count
    values: Count


class WindowShape(NamedTuple):
    size: Count
    period: Count
    """Number of layers in a group, whose last layer attends to everything."""
    kv_heads: CountOrZero = 0
    """KV heads of the layers with a window, if they differ. Then ``head`` also differs, and the other layers have no separate values."""
    head: CountOrZero = 0


class ModelShape(NamedTuple):
    """Dimensions of a model, as its publisher describes them."""

    name: str
    architecture: str
    layers: Annotated[int, Number(1, MAX_LAYERS)]
    width: Count
    heads: Count
    kv_heads: Count
    vocabulary: Count
    context: Count
    repo: str = ""
    """Hugging Face repository with its GGUF files."""
    head: Count = 128
    """Elements of a head."""
    inner: CountOrZero = 0
    """Width of the feed-forward network in layers without experts."""
    tied: bool = False
    """Whether the output is the token embedding."""
    prediction_layers: CountOrZero = 0
    """Number of last layers that predict further tokens."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    recurrent: RecurrentHeads | None = None
    window: WindowShape | None = None
    quantisation: str = ""
    """Quantisation of the model if only one is published, otherwise empty."""


TYPE_MIXTURES: dict[str, dict[str, str]] = {
    "Q8_0": {"": "Q8_0", "output": "Q8_0"},
    "Q6_K": {"": "Q6_K"},
    "Q5_K_M": {"": "Q5_K", "more": "Q6_K"},
    "Q4_K_M": {"": "Q4_K", "more": "Q6_K"},
    "IQ4_XS": {"": "IQ4_XS", "value": "Q5_K"},
    "Q3_K_M": {"": "Q3_K", "value": "Q4_K", "ffn_down": "Q4_K", "attn_output": "Q4_K"},
    "Q2_K": {"": "Q2_K", "value": "Q4_K", "ffn_down": "Q3_K", "attn_output": "Q3_K"},
    "MXFP4_MOE": {"": "Q8_0", "output": "Q8_0", "experts": "MXFP4"},
}
"""Quantisation → type of each kind of tensor, the largest first. The output defaults to Q6_K; ``more`` is for values and ffn_down in layers with more bits."""
FALLBACK_TYPES = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""Replacement for types whose blocks are longer than a row; for other types it is Q4_0."""
UNQUANTISED_PATTERN = re.compile(r"norm|_inp$|conv1d")
"""Pattern for names of tensors that stay F32."""
VALUE_TENSORS = {"attn_v", "attn_qkv"}
MIXED_KINDS = ("value", "ffn_down")
TensorShapes = dict[str, "tuple[int, ...]"]
"""Number of elements in each dimension of each tensor, the row first."""


def quantisations(shape: ModelShape) -> list[str]:
    """Return the available quantisations of a model, the largest first."""
    return [shape.quantisation] if shape.quantisation else [name for name in TYPE_MIXTURES if name != "MXFP4_MOE"]


def _attention_shapes(shape: ModelShape, layer: int) -> TensorShapes:
    width, heads, head, kv_heads, has_values = shape.width, shape.heads, shape.head, shape.kv_heads, True
    if latent := shape.latent:
        return {
            "attn_q_a": (width, latent.query),
            "attn_q_b": (latent.query, heads * (latent.key + latent.rotated)),
            "attn_kv_a_mqa": (width, latent.cached + latent.rotated),
            "attn_k_b": (latent.key, latent.cached, heads),
            "attn_v_b": (latent.cached, latent.value, heads),
            "attn_output": (heads * latent.value, width),
        }
    if shape.recurrent and layer % LAYER_PERIOD != LAYER_PERIOD - 1:
        key_width, value_width = shape.recurrent.keys * STATE_SIZE, shape.recurrent.values * STATE_SIZE
        gate_shapes = dict.fromkeys(("ssm_beta", "ssm_alpha"), (width, shape.recurrent.values))
        qkv_shapes = {
            "attn_qkv": (width, 2 * key_width + value_width),
            "ssm_conv1d": (CONV_SIZE, 2 * key_width + value_width),
        }
        return {**qkv_shapes, **gate_shapes, "attn_gate": (width, value_width), "ssm_out": (value_width, width)}
    if shape.window and shape.window.head:
        has_values = _is_windowed(shape, layer)
        kv_heads, head = (shape.window.kv_heads, shape.window.head) if has_values else (kv_heads, head)
    tensors = {"attn_q": (width, heads * head * (2 if shape.recurrent else 1)), "attn_output": (heads * head, width)}
    return {**tensors, **dict.fromkeys(("attn_k", "attn_v") if has_values else ("attn_k",), (width, kv_heads * head))}


def _is_windowed(shape: ModelShape, layer: int) -> bool:
    period = shape.window.period if shape.window else 1
    return layer % period != period - 1


def _ffn_shapes(shape: ModelShape, layer: int) -> TensorShapes:
    width, experts = shape.width, shape.experts
    widths: TensorShapes = {"": (shape.inner,)}
    tensors: TensorShapes = {}
    if experts and layer >= experts.first_layer:
        widths = {"_exps": (experts.inner, experts.number), **({"_shexp": (experts.shared,)} if experts.shared else {})}
        tensors = {"ffn_gate_inp": (width, experts.number)}
    for suffix, (first_width, *expert_count) in widths.items():
        tensors.update(dict.fromkeys((f"ffn_gate{suffix}", f"ffn_up{suffix}"), (width, first_width, *expert_count)))
        tensors[f"ffn_down{suffix}"] = (first_width, width, *expert_count)
    return tensors


def _type_name(mixture: dict[str, str], name: str, index: int, count: int) -> str:
    """Return the type of a layer's tensor.

    :param index: position of the layer among the ``count`` layers with such a tensor.
    """
    if UNQUANTISED_PATTERN.search(name):
        return "F32"
    kind = "value" if name in VALUE_TENSORS else re.sub("_(exps|shexp)$", "", name)
    gets_more_bits = index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
    alternatives = (
        "experts" if name.endswith("_exps") else kind,
        "more" if gets_more_bits and kind in MIXED_KINDS else "",
    )
    return next(mixture[key] for key in (kind, *alternatives, "") if key in mixture)


def _quantised_tensor(kind: str, dimensions: tuple[int, ...]) -> gguf.Tensor:
    if dimensions[0] % TYPES_BY_NAME[kind].block_elements:
        kind = FALLBACK_TYPES.get(kind, "Q4_0")
    elements = math.prod(dimensions)
    return gguf.Tensor(kind, dimensions, elements, TYPES_BY_NAME[kind].size(dimensions[0], elements // dimensions[0]))


def tensors(shape: ModelShape, quantisation: str) -> dict[str, gguf.Tensor]:
    """Return the tensors of a model in a quantisation by name."""
    mixture, embedding, norm = TYPE_MIXTURES[quantisation], (shape.width, shape.vocabulary), (shape.width,)
    output = mixture.get("output", "Q6_K")
    result = {"output_norm.weight": _quantised_tensor("F32", norm)}
    result["token_embd.weight"] = _quantised_tensor(output if shape.tied else mixture[""], embedding)
    if not shape.tied:
        result["output.weight"] = _quantised_tensor(output, embedding)
    attentions = [_attention_shapes(shape, layer) for layer in range(shape.layers)]
    value_layers = [layer for layer, attention in enumerate(attentions) if VALUE_TENSORS & attention.keys()]
    for layer, attention in enumerate(attentions):
        for name, dimensions in {"attn_norm": norm, "ffn_norm": norm, **attention, **_ffn_shapes(shape, layer)}.items():
            place = (value_layers.index(layer), len(value_layers)) if name in VALUE_TENSORS else (layer, shape.layers)
            result[f"blk.{layer}.{name}.weight"] = _quantised_tensor(_type_name(mixture, name, *place), dimensions)
    return result


def header_keys(shape: ModelShape) -> dict[str, int | list[int]]:
    """Return the keys of the header without the architecture's name."""
    result: dict[str, int | list[int]] = {
        **{"block_count": shape.layers, "embedding_length": shape.width, "context_length": shape.context},
        **{"attention.head_count": shape.heads, "attention.head_count_kv": shape.kv_heads},
        **{"attention.key_length": shape.head, "attention.value_length": shape.head, "vocab_size": shape.vocabulary},
        **({"nextn_predict_layers": shape.prediction_layers} if shape.prediction_layers else {}),
    }
    if latent := shape.latent:
        lengths = {"key_length": latent.cached + latent.rotated, "key_length_mla": latent.key + latent.rotated}
        lengths.update(value_length=latent.cached, value_length_mla=latent.value)
        result.update({f"attention.{name}": value for name, value in lengths.items()})
    if shape.experts:
        result.update(expert_count=shape.experts.number, expert_used_count=shape.experts.active)
    if shape.recurrent:
        inner_size, groups = shape.recurrent.values * STATE_SIZE, shape.recurrent.keys
        result.update(
            {"full_attention_interval": LAYER_PERIOD, "ssm.conv_kernel": CONV_SIZE, "ssm.inner_size": inner_size}
        )
        result.update({"ssm.state_size": STATE_SIZE, "ssm.group_count": groups})
    if window := shape.window:
        result["attention.sliding_window"] = window.size
        if window.head:
            window_flags = [_is_windowed(shape, layer) for layer in range(shape.layers)]
            result["attention.sliding_window_pattern"] = list(map(int, window_flags))
            result["attention.head_count_kv"] = [window.kv_heads if flag else shape.kv_heads for flag in window_flags]
            result["attention.key_length_swa"] = result["attention.value_length_swa"] = window.head
    return result


@functools.lru_cache(maxsize=1024)
def summary_of(shape: ModelShape, quantisation: str) -> ModelSummary:
    """Return the summary of a model in a quantisation.

    :raises gguf.GGUFError: the model cannot be served.
    """
    stored_tensors, name = tensors(shape, quantisation), f"{shape.name} {quantisation}"
    architecture_keys = {f"{shape.architecture}.{key}": value for key, value in header_keys(shape).items()}
    general_keys = {"general.architecture": shape.architecture, "general.name": name}
    file = {"name": f"{name}.gguf", "bytes": sum(tensor.bytes for tensor in stored_tensors.values())}
    header = gguf.ModelHeader({**general_keys, **architecture_keys}, stored_tensors, [file], [])
    return header_summary.parse(header_summary.summarize(header))

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Headers of models of which the published shape is known: their tensors, with the types that llama-quantize gives them.

Read in llama-quant.cpp of build 11063. Left out: that Q3_K_M gives the first layers more bits, that IQ4_XS and Q2_K give values fewer where queries share
few of them, biases, and norms of heads. tests/unit/test_what_fits.py holds sizes against those of files.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Annotated, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import MAX_LAYERS, ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.tensor_types import ALL

TYPES = {kind.name: kind for kind in ALL.values()}
STATE, CONVOLUTION, PERIOD = 128, 4, 4
"""Of models with recurrent layers: elements of a head there, tokens of the convolution, and one layer of so many that attends."""
Count = Annotated[int, Number(1, 1 << 24)]
Some = Annotated[int, Number(0, 1 << 24)]


class Experts(NamedTuple):
    number: Count
    used: Count
    """By a token."""
    inner: Count
    """Width of each."""
    shared: Some = 0
    """Width of those that every token uses, together."""
    after: Some = 0
    """So many layers in front have none."""


class Latent(NamedTuple):
    """MLA: ranks of queries and of what is cached, and of each head the elements of keys, of their rotated part, and of values."""

    query: Count
    cached: Count
    key: Count
    rotated: Count
    value: Count


class Recurrent(NamedTuple):
    """Heads of the layers that keep a state."""

    keys: Count
    values: Count


class Window(NamedTuple):
    size: Count
    every: Count
    """One layer of so many, the last, attends to everything."""
    kv_heads: Some = 0
    """Of the layers with a window, where they differ, and ``head`` as well: then the others have no values of their own."""
    head: Some = 0


class Shape(NamedTuple):
    """A model as its publisher describes it."""

    name: str
    architecture: str
    layers: Annotated[int, Number(1, MAX_LAYERS)]
    width: Count
    heads: Count
    kv_heads: Count
    vocabulary: Count
    context: Count
    repo: str = ""
    """On Hugging Face, with its GGUF files."""
    head: Count = 128
    """Elements of one."""
    inner: Some = 0
    """Width of the feed-forward network in layers without experts."""
    tied: bool = False
    """Whether the output is the token embedding."""
    next: Some = 0
    """Of the layers, those at the end that predict further tokens."""
    experts: Experts | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    window: Window | None = None
    only: str = ""
    """The one quantisation in which it is published."""


MIXTURES: dict[str, dict[str, str]] = {
    "Q8_0": {"": "Q8_0", "output": "Q8_0"},
    "Q6_K": {"": "Q6_K"},
    "Q5_K_M": {"": "Q5_K", "more": "Q6_K"},
    "Q4_K_M": {"": "Q4_K", "more": "Q6_K"},
    "IQ4_XS": {"": "IQ4_XS", "value": "Q5_K"},
    "Q3_K_M": {"": "Q3_K", "value": "Q4_K", "ffn_down": "Q4_K", "attn_output": "Q4_K"},
    "Q2_K": {"": "Q2_K", "value": "Q4_K", "ffn_down": "Q3_K", "attn_output": "Q3_K"},
    "MXFP4_MOE": {"": "Q8_0", "output": "Q8_0", "experts": "MXFP4"},
}
"""Quantisation, the largest first → kind of tensor → its type. The output is Q6_K unless it is named; ``more`` are values and ffn_down, in those layers
that get more bits."""
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""What takes the place of types whose blocks are longer than a row; of others it is Q4_0."""
WHOLE = re.compile(r"norm|_inp$|conv1d")
"""In names of tensors that stay F32."""
VALUES = {"attn_v", "attn_qkv"}
BY_PLACE = ("value", "ffn_down")
Shapes = dict[str, "tuple[int, ...]"]
"""Name of a tensor → elements in each dimension, the row first."""


def quantisations(shape: Shape) -> list[str]:
    """In which it can be had, the largest first."""
    return [shape.only] if shape.only else [name for name in MIXTURES if name != "MXFP4_MOE"]


def _attention(shape: Shape, layer: int) -> Shapes:
    width, heads, head, kv_heads, values = shape.width, shape.heads, shape.head, shape.kv_heads, True
    if latent := shape.latent:
        return {
            "attn_q_a": (width, latent.query),
            "attn_q_b": (latent.query, heads * (latent.key + latent.rotated)),
            "attn_kv_a_mqa": (width, latent.cached + latent.rotated),
            "attn_k_b": (latent.key, latent.cached, heads),
            "attn_v_b": (latent.cached, latent.value, heads),
            "attn_output": (heads * latent.value, width),
        }
    if shape.recurrent and layer % PERIOD != PERIOD - 1:
        keys, own = shape.recurrent.keys * STATE, shape.recurrent.values * STATE
        gates = dict.fromkeys(("ssm_beta", "ssm_alpha"), (width, shape.recurrent.values))
        inner = {"attn_qkv": (width, 2 * keys + own), "ssm_conv1d": (CONVOLUTION, 2 * keys + own)}
        return {**inner, **gates, "attn_gate": (width, own), "ssm_out": (own, width)}
    if shape.window and shape.window.head:
        values = _windowed(shape, layer)
        kv_heads, head = (shape.window.kv_heads, shape.window.head) if values else (kv_heads, head)
    found = {"attn_q": (width, heads * head * (2 if shape.recurrent else 1)), "attn_output": (heads * head, width)}
    return {**found, **dict.fromkeys(("attn_k", "attn_v") if values else ("attn_k",), (width, kv_heads * head))}


def _windowed(shape: Shape, layer: int) -> bool:
    every = shape.window.every if shape.window else 1
    return layer % every != every - 1


def _forward(shape: Shape, layer: int) -> Shapes:
    width, experts = shape.width, shape.experts
    parts: Shapes = {"": (shape.inner,)}
    found: Shapes = {}
    if experts and layer >= experts.after:
        parts = {"_exps": (experts.inner, experts.number), **({"_shexp": (experts.shared,)} if experts.shared else {})}
        found = {"ffn_gate_inp": (width, experts.number)}
    for name, (inner, *many) in parts.items():
        found.update(dict.fromkeys((f"ffn_gate{name}", f"ffn_up{name}"), (width, inner, *many)))
        found[f"ffn_down{name}"] = (inner, width, *many)
    return found


def _type(mixture: dict[str, str], name: str, index: int, count: int) -> str:
    """Of a tensor of a layer, which is the one with this index of so many that have such a tensor."""
    if WHOLE.search(name):
        return "F32"
    kind = "value" if name in VALUES else re.sub("_(exps|shexp)$", "", name)
    more = index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
    others = "experts" if name.endswith("_exps") else kind, "more" if more and kind in BY_PLACE else ""
    return next(mixture[key] for key in (kind, *others, "") if key in mixture)


def _tensor(kind: str, size: tuple[int, ...]) -> gguf.Tensor:
    if size[0] % TYPES[kind].elements:
        kind = NARROW.get(kind, "Q4_0")
    elements = math.prod(size)
    return gguf.Tensor(kind, size, elements, TYPES[kind].size(size[0], elements // size[0]))


def tensors(shape: Shape, quantisation: str) -> dict[str, gguf.Tensor]:
    """Name → tensor of the model in a quantisation."""
    mixture, embedding, norm = MIXTURES[quantisation], (shape.width, shape.vocabulary), (shape.width,)
    output = mixture.get("output", "Q6_K")
    found = {"output_norm.weight": _tensor("F32", norm)}
    found["token_embd.weight"] = _tensor(output if shape.tied else mixture[""], embedding)
    if not shape.tied:
        found["output.weight"] = _tensor(output, embedding)
    layers = [_attention(shape, layer) for layer in range(shape.layers)]
    values = [layer for layer, own in enumerate(layers) if VALUES & own.keys()]
    for layer, own in enumerate(layers):
        for name, size in {"attn_norm": norm, "ffn_norm": norm, **own, **_forward(shape, layer)}.items():
            place = (values.index(layer), len(values)) if name in VALUES else (layer, shape.layers)
            found[f"blk.{layer}.{name}.weight"] = _tensor(_type(mixture, name, *place), size)
    return found


def keys(shape: Shape) -> dict[str, int | list[int]]:
    """What the header says, without the name of the architecture."""
    found: dict[str, int | list[int]] = {
        **{"block_count": shape.layers, "embedding_length": shape.width, "context_length": shape.context},
        **{"attention.head_count": shape.heads, "attention.head_count_kv": shape.kv_heads},
        **{"attention.key_length": shape.head, "attention.value_length": shape.head, "vocab_size": shape.vocabulary},
        **({"nextn_predict_layers": shape.next} if shape.next else {}),
    }
    if latent := shape.latent:
        lengths = {"key_length": latent.cached + latent.rotated, "key_length_mla": latent.key + latent.rotated}
        lengths.update(value_length=latent.cached, value_length_mla=latent.value)
        found.update({f"attention.{name}": value for name, value in lengths.items()})
    if shape.experts:
        found.update(expert_count=shape.experts.number, expert_used_count=shape.experts.used)
    if shape.recurrent:
        inner, groups = shape.recurrent.values * STATE, shape.recurrent.keys
        found.update({"full_attention_interval": PERIOD, "ssm.conv_kernel": CONVOLUTION, "ssm.inner_size": inner})
        found.update({"ssm.state_size": STATE, "ssm.group_count": groups})
    if window := shape.window:
        found["attention.sliding_window"] = window.size
        if window.head:
            windows = [_windowed(shape, layer) for layer in range(shape.layers)]
            found["attention.sliding_window_pattern"] = list(map(int, windows))
            found["attention.head_count_kv"] = [window.kv_heads if own else shape.kv_heads for own in windows]
            found["attention.key_length_swa"] = found["attention.value_length_swa"] = window.head
    return found


@functools.lru_cache(maxsize=1024)
def summary_of(shape: Shape, quantisation: str) -> ModelSummary:
    """What the header of the model says in this quantisation, one of ``quantisations``.

    :raises gguf.GGUFError: such a model cannot be served.
    """
    stored, name = tensors(shape, quantisation), f"{shape.name} {quantisation}"
    own = {f"{shape.architecture}.{key}": value for key, value in keys(shape).items()}
    named = {"general.architecture": shape.architecture, "general.name": name}
    file = {"name": f"{name}.gguf", "bytes": sum(tensor.bytes for tensor in stored.values())}
    model = gguf.Model({**named, **own}, stored, [file], [])
    return header_summary.parse(header_summary.summarize(model))

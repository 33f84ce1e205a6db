# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model whose right answer is known in advance, so that a wrong one proves a fault.

Its vocabulary is one sentence. A word is a unit vector, and the feed-forward of every layer is a permutation of the
words, another one in each layer; the output undoes all of them and adds one word. So the answer to an empty prompt is
the sentence if and only if every layer was computed, once and in order. Attention weights are too small to move the
answer: faults of attention or of the KV cache that stay small are not noticed.

This file holds what planning and verification need; known_answer_file.py writes the GGUF.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import MAX_LAYERS

SENTENCE = (
    "every layer of this model lives on some worker of your cluster and each one must move the answer one word forward "
    "so if you can read this sentence then all of them computed it right"
)
CONTEXT = 4096
EPSILON = 1e-9
HEAD_DIMENSION = 64
BLOCKS = {"f32": (1, 4), "f16": (1, 2), "q8_0": (32, 34)}
"""Elements and bytes of one block of each tensor type that the model is offered in."""

CONTROL_TOKENS = ["<unk>", "<s>", "</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def pieces() -> list[str]:
    """The sentence as tokens. A token's text must be unique, so a word that came before is joined with those that follow."""
    tokens: list[str] = []
    pending = ""
    for word in SENTENCE.replace(" ", " \u2581").split(" "):
        pending += word
        if pending not in tokens:
            tokens.append(pending)
            pending = ""
    if pending:
        tokens[-1] += pending
    return tokens


def positions() -> int:
    """Number of states that the layers permute: the tokens of the sentence and the end of the text."""
    return len(pieces()) + 1


def permutation(layer: int) -> list[int]:
    """Where each state goes in this layer: a rotation through all states in an order of its own, so that none stays."""
    order = list(range(positions()))
    random.Random(layer).shuffle(order)
    after = dict(zip(order, order[1:] + order[:1]))
    return [after[state] for state in range(positions())]


def first_piece() -> int:
    """The token of the sentence's first piece; the others follow it."""
    return len(CONTROL_TOKENS) + len(BYTE_TOKENS)


def _states() -> dict[int, int]:
    """Token → state, of those tokens that have one: beginning and end of the text share theirs."""
    end = positions() - 1
    return {1: end, 2: end, **{first_piece() + index: index for index in range(end)}}


def embedding() -> dict[tuple[int, int], float]:
    """Row and column → value of token_embd, of all that is not zero; the same of the others."""
    return dict.fromkeys(_states().items(), 1)


def step(layer: int, width: int) -> dict[tuple[int, int], float]:
    """Of a layer's ffn_down, which takes each state to the next."""
    hidden = math.sqrt(width) / (1 + math.exp(-math.sqrt(width))) * math.sqrt(width)
    entries = {}
    for state, following in enumerate(permutation(layer)):
        entries[following, state] = 1 / hidden
        entries[state, state] = -1 / hidden
    return entries


def output(layers: int) -> dict[tuple[int, int], float]:
    """Of output, which undoes what all layers did and adds one word."""
    reached = list(range(positions()))
    for layer in range(layers):
        after = permutation(layer)
        reached = [after[state] for state in reached]
    return {
        (token, reached[(state - 1) % positions()]): 1
        for token, state in _states().items()
        if token != CONTROL_TOKENS.index("<s>")
    }


MAX_WIDTH = 1 << 15
"""A layer of this width has 30 GB in f32."""


def problem(layers: int, width: int, kind: str) -> str | None:
    """What is wrong with a model of this size, or None."""
    if kind not in BLOCKS:
        return f"its type is {kind!r}: use one of {', '.join(BLOCKS)}"
    if not HEAD_DIMENSION <= width <= MAX_WIDTH or width % HEAD_DIMENSION:
        return f"its width is {width}: use a multiple of {HEAD_DIMENSION} up to {MAX_WIDTH}"
    if not 1 <= layers <= MAX_LAYERS:
        return f"it has {layers} layers: use 1 to {MAX_LAYERS}"
    return None


def bytes_of(elements: int, kind: str) -> int:
    per_block, size = BLOCKS[kind]
    return elements // per_block * size


def shapes(width: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, rows last; the layer is a ``*``."""
    tokens = (first_piece() + len(pieces()), width)
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    of_layer = [(f"blk.*.{part}.weight", (width,) if part.endswith("norm") else (width, width)) for part in parts]
    return [("token_embd.weight", tokens), *of_layer, ("output_norm.weight", (width,)), ("output.weight", tokens)]


NAME = "known answer, {} layers of {}, {}"
"""In the file: of its layers, width and type."""


def is_name(name: str) -> bool:
    """Whether a model calls itself one whose answer is known, wherever it was fetched from."""
    return bool(re.fullmatch(NAME.format(r"\d+", r"\d+", r"\w+"), name, re.ASCII))


def tensor_shapes(layers: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of all tensors in the file's order."""
    first, *of_layer, norm, last = shapes(width)
    every = [(name.replace("*", str(layer)), shape) for layer in range(layers) for name, shape in of_layer]
    return [first, *every, norm, last]


def metadata(layers: int, width: int, kind: str) -> list[tuple[str, str, Any]]:
    """Key, type and value of all metadata in the file's order. An array has the type of its elements, in brackets."""
    heads, tokens = width // HEAD_DIMENSION, CONTROL_TOKENS + BYTE_TOKENS + pieces()
    types = [2, 3, 3] + [6] * len(BYTE_TOKENS) + [1] * len(pieces())
    return [
        ("general.architecture", "STRING", "llama"),
        ("general.name", "STRING", NAME.format(layers, width, kind)),
        ("llama.context_length", "UINT32", CONTEXT),
        ("llama.embedding_length", "UINT32", width),
        ("llama.block_count", "UINT32", layers),
        ("llama.feed_forward_length", "UINT32", width),
        ("llama.attention.head_count", "UINT32", heads),
        ("llama.attention.head_count_kv", "UINT32", heads),
        ("llama.rope.dimension_count", "UINT32", HEAD_DIMENSION),
        ("llama.attention.layer_norm_rms_epsilon", "FLOAT32", EPSILON),
        ("llama.vocab_size", "UINT32", len(tokens)),
        ("tokenizer.ggml.model", "STRING", "llama"),
        ("tokenizer.ggml.tokens", "[STRING]", tokens),
        ("tokenizer.ggml.scores", "[FLOAT32]", [0.0] * len(tokens)),
        ("tokenizer.ggml.token_type", "[INT32]", types),
        ("tokenizer.ggml.unknown_token_id", "UINT32", 0),
        ("tokenizer.ggml.bos_token_id", "UINT32", 1),
        ("tokenizer.ggml.eos_token_id", "UINT32", 2),
        ("tokenizer.ggml.add_bos_token", "BOOL", True),
        ("tokenizer.ggml.add_eos_token", "BOOL", False),
    ]


def summary(layers: int, width: int, kind: str) -> dict[str, Any]:
    """What header_summary.summarize says of the written model, without writing it; all but its files."""
    keys = {key: value for key, _form, value in metadata(layers, width, kind)}
    tensors = {}
    for name, shape in tensor_shapes(layers, width):
        stored, elements = kind if len(shape) == 2 else "f32", math.prod(shape)
        tensors[name] = gguf.Tensor(stored.upper(), shape[::-1], elements, bytes_of(elements, stored))
    found = header_summary.summarize(gguf.Model(keys, tensors, [], []))
    return {key: value for key, value in found.items() if key not in ("files", "bytes")}


def file_name(layers: int, width: int, kind: str) -> str:
    return f"known-answer-{layers}x{width}-{kind}.gguf"


def path_of(prefix: str, layers: int, width: int, kind: str) -> str:
    """Where the model lies in an installation."""
    return f"{prefix}/{names.MODELS}/{file_name(layers, width, kind)}"

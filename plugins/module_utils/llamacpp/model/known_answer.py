# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model whose correct answer is known, so that a wrong answer proves a fault.

Its vocabulary is one sentence. A word is a unit vector, and the feed-forward of each layer is a different permutation of the words. The output reverses
all permutations and advances by one word. So the answer to an empty prompt is the sentence if and only if every layer was computed, once and in order.
Attention weights are too small to change the answer, so the model does not detect small faults in attention or in the KV cache.

Planning and verification use this file; known_answer_file.py writes the GGUF.
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
CONTEXT_LENGTH = 4096
EPSILON = 1e-9
HEAD_DIMENSION = 64
TYPE_BLOCKS = {"f32": (1, 4), "f16": (1, 2), "q8_0": (32, 34)}
"""Supported tensor type → elements and bytes of a block."""

CONTROL_TOKENS = ["<unk>", "<s>", "</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def pieces() -> list[str]:
    """Return the sentence as tokens. Their texts must be unique, so a repeated word is joined with the next words."""
    tokens: list[str] = []
    pending_text = ""
    for word in SENTENCE.replace(" ", " \u2581").split(" "):
        pending_text += word
        if pending_text not in tokens:
            tokens.append(pending_text)
            pending_text = ""
    if pending_text:
        tokens[-1] += pending_text
    return tokens


def count_states() -> int:
    """Return the number of states that the layers permute: the tokens of the sentence and the end of the text."""
    return len(pieces()) + 1


def permutation(layer: int) -> list[int]:
    """Return the successor of each state in this layer: a rotation of all states in a random order, so that each state changes."""
    order = list(range(count_states()))
    random.Random(layer).shuffle(order)
    successors = dict(zip(order, order[1:] + order[:1]))
    return [successors[state] for state in range(count_states())]


def first_piece_token() -> int:
    """Return the token of the sentence's first piece; the other pieces follow it."""
    return len(CONTROL_TOKENS) + len(BYTE_TOKENS)


def _states_by_token() -> dict[int, int]:
    """Return the state of each token that has a state; the beginning and the end of the text share a state."""
    end = count_states() - 1
    return {1: end, 2: end, **{first_piece_token() + index: index for index in range(end)}}


def embedding_matrix() -> dict[tuple[int, int], float]:
    """Return the values of token_embd other than zero, by row and column."""
    return dict.fromkeys(_states_by_token().items(), 1)


def ffn_down_matrix(layer: int, width: int) -> dict[tuple[int, int], float]:
    """Return the values of a layer's ffn_down by row and column; it maps each state to its successor."""
    hidden_value = math.sqrt(width) / (1 + math.exp(-math.sqrt(width))) * math.sqrt(width)
    entries = {}
    for state, next_state in enumerate(permutation(layer)):
        entries[next_state, state] = 1 / hidden_value
        entries[state, state] = -1 / hidden_value
    return entries


def output_matrix(layers: int) -> dict[tuple[int, int], float]:
    """Return the values of output by row and column; it reverses all layers and advances by one word."""
    reached_states = list(range(count_states()))
    for layer in range(layers):
        successors = permutation(layer)
        reached_states = [successors[state] for state in reached_states]
    return {
        (token, reached_states[(state - 1) % count_states()]): 1
        for token, state in _states_by_token().items()
        if token != CONTROL_TOKENS.index("<s>")
    }


MAX_WIDTH = 1 << 15
"""Maximum width. A layer of this width has 30 GB in f32."""


def problem(layers: int, width: int, kind: str) -> str | None:
    """Return the error and remedy for a model of this size, or None."""
    if kind not in TYPE_BLOCKS:
        return f"its type is {kind!r}: use one of {', '.join(TYPE_BLOCKS)}"
    if not HEAD_DIMENSION <= width <= MAX_WIDTH or width % HEAD_DIMENSION:
        return f"its width is {width}: use a multiple of {HEAD_DIMENSION} up to {MAX_WIDTH}"
    if not 1 <= layers <= MAX_LAYERS:
        return f"it has {layers} layers: use 1 to {MAX_LAYERS}"
    return None


def bytes_of(elements: int, kind: str) -> int:
    block_elements, block_bytes = TYPE_BLOCKS[kind]
    return elements // block_elements * block_bytes


def tensor_templates(width: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the name and shape of each tensor, with the length of a row last; ``*`` stands for the layer."""
    shape = (first_piece_token() + len(pieces()), width)
    stems = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    layer_tensors = [(f"blk.*.{stem}.weight", (width,) if stem.endswith("norm") else (width, width)) for stem in stems]
    return [("token_embd.weight", shape), *layer_tensors, ("output_norm.weight", (width,)), ("output.weight", shape)]


MODEL_NAME_TEMPLATE = "known answer, {} layers of {}, {}"
"""Template for the name in the file, with layers, width and type."""


def is_model_name(name: str) -> bool:
    return bool(re.fullmatch(MODEL_NAME_TEMPLATE.format(r"\d+", r"\d+", r"\w+"), name, re.ASCII))


def tensor_shapes(layers: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of all tensors in the file's order."""
    first_tensor, *layer_tensors, norm, last_tensor = tensor_templates(width)
    layer_shapes = [(name.replace("*", str(layer)), shape) for layer in range(layers) for name, shape in layer_tensors]
    return [first_tensor, *layer_shapes, norm, last_tensor]


def metadata(layers: int, width: int, kind: str) -> list[tuple[str, str, Any]]:
    """Return key, type and value of all metadata in the file's order. The type of an array is its element type in brackets."""
    heads, tokens = width // HEAD_DIMENSION, CONTROL_TOKENS + BYTE_TOKENS + pieces()
    token_types = [2, 3, 3] + [6] * len(BYTE_TOKENS) + [1] * len(pieces())
    return [
        ("general.architecture", "STRING", "llama"),
        ("general.name", "STRING", MODEL_NAME_TEMPLATE.format(layers, width, kind)),
        ("llama.context_length", "UINT32", CONTEXT_LENGTH),
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
        ("tokenizer.ggml.token_type", "[INT32]", token_types),
        ("tokenizer.ggml.unknown_token_id", "UINT32", 0),
        ("tokenizer.ggml.bos_token_id", "UINT32", 1),
        ("tokenizer.ggml.eos_token_id", "UINT32", 2),
        ("tokenizer.ggml.add_bos_token", "BOOL", True),
        ("tokenizer.ggml.add_eos_token", "BOOL", False),
    ]


def summary(layers: int, width: int, kind: str) -> dict[str, Any]:
    """Return the result of header_summary.summarize for the model, except for its files, without writing it."""
    metadata_values = {key: value for key, _type, value in metadata(layers, width, kind)}
    tensors = {}
    for name, shape in tensor_shapes(layers, width):
        stored_type, elements = kind if len(shape) == 2 else "f32", math.prod(shape)
        tensors[name] = gguf.Tensor(stored_type.upper(), shape[::-1], elements, bytes_of(elements, stored_type))
    full_summary = header_summary.summarize(gguf.ModelHeader(metadata_values, tensors, [], []))
    return {key: value for key, value in full_summary.items() if key not in ("files", "bytes")}


def file_name(layers: int, width: int, kind: str) -> str:
    return f"known-answer-{layers}x{width}-{kind}.gguf"


def path_of(prefix: str, layers: int, width: int, kind: str) -> str:
    return f"{prefix}/{names.MODELS_FOLDER}/{file_name(layers, width, kind)}"

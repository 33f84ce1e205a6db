# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes models of random weights as GGUF, as fast as a disk: all tensors of a type are pieces of the same random bytes."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import calibration
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.known_answer_file import (
    ALIGNMENT,
    header_of,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import TensorGroup
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.tensor_types import ALL

PIECE_BLOCKS = 1 << 16
"""Of random bytes, which are written over and over."""
SCALE = b"\x40\x00"
"""A small number: layers add little to a token's embedding, so that experts are chosen by that, and all of them in turn."""
MXFP4_SCALE = b"\x6c"
SMALL = {"F32": 0x3C, "F16": 0x0C, "BF16": 0x3A}
"""Type → last byte of its numbers, beside the sign: they are small as well."""
ONE = b"\0\0\x80\x3f"
EMBEDDING = 0x38
"""The same of the embedding, in F16: about one."""


def write(path: Path, trial: calibration.Trial) -> None:
    """:raises OSError: it does not fit there."""
    write_model(path, _metadata(trial), trial.tensors())


def write_model(path: Path, keys: Sequence[tuple[str, str, Any]], groups: Sequence[TensorGroup]) -> None:
    """Writes a model with this metadata and these tensors."""
    rows = [
        (row.name if layer is None else row.name.replace("*", str(layer)), row)
        for row in groups
        for layer in (row.layers if row.layers is not None else (None,))
    ]
    listed = [(name, row.shape, calibration.TYPES[row.type], kv_cache.pad(row.bytes, ALIGNMENT)) for name, row in rows]
    with path.open("wb") as stream:
        stream.write(header_of(keys, listed))
        for name, row in rows:
            small = len(row.shape) == 1
            piece = ONE * row.shape[0] if small else _piece(row.type, name.startswith("token_embd"))
            left = row.bytes
            while left > 0:
                left -= stream.write(piece[:left])
            stream.write(bytes(-row.bytes % ALIGNMENT))


@functools.cache
def _piece(kind: str, embedding: bool) -> bytes:
    """Random blocks of a type, with scales that are numbers."""
    size = ALL[calibration.TYPES[kind]].bytes
    data = bytearray(random.Random(kind).randbytes(PIECE_BLOCKS * size))
    if kind in SMALL:
        last = EMBEDDING if embedding and kind == "F16" else SMALL[kind]
        data[size - 1 :: size] = bytes(byte & 0x80 | last for byte in data[size - 1 :: size])
    for place in calibration.SCALES.get(kind, ()):
        for byte, value in enumerate(MXFP4_SCALE if kind == "MXFP4" else SCALE):
            data[place + byte :: size] = bytes([value]) * PIECE_BLOCKS
    return bytes(data)


def _metadata(trial: calibration.Trial) -> list[tuple[str, str, Any]]:
    shape = calibration.SHAPES[trial.kind]
    numbers = {
        "context_length": 4096,
        "embedding_length": shape.width,
        "block_count": trial.layers,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": calibration.HEAD,
        "attention.value_length": calibration.HEAD,
        "rope.dimension_count": calibration.HEAD,
        "vocab_size": calibration.VOCABULARY,
        **({"expert_count": shape.experts, "expert_used_count": shape.used} if shape.experts else {}),
    }
    return [
        ("general.architecture", "STRING", "llama"),
        ("general.name", "STRING", trial.name),
        *((f"llama.{name}", "UINT32", number) for name, number in numbers.items()),
        ("llama.attention.layer_norm_rms_epsilon", "FLOAT32", 1e-5),
        ("tokenizer.ggml.model", "STRING", "none"),
    ]

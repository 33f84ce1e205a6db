# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the known-answer model as GGUF, one tensor at a time, so that a model may be larger than the memory."""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import known_answer

try:
    import gguf
    import numpy

    HAS_GGUF = True
except ImportError:
    HAS_GGUF = False

ATTENTION_SPREAD = 0.25
"""Standard deviation of attention weights times the width; more loses the answer on wide models."""


def _matrix(rows: int, width: int, entries: dict[tuple[int, int], float]) -> numpy.ndarray:
    matrix = numpy.zeros((rows, width), numpy.float32)
    for place, value in entries.items():
        matrix[place] = value
    return matrix


def _layer(layer: int, width: int) -> list[tuple[str, numpy.ndarray]]:
    ones = numpy.ones(width, numpy.float32)
    identity = numpy.eye(width, dtype=numpy.float32)
    noise = numpy.frombuffer(random.Random(layer).randbytes(2 * width * width), numpy.int16).reshape(width, width)
    noise = (noise / 32768 * math.sqrt(3) * ATTENTION_SPREAD / width).astype(numpy.float32)
    parts = ("attn_q", "attn_k", "attn_v", "attn_output")
    attention: list[tuple[str, numpy.ndarray]] = [
        (part, numpy.roll(noise, turn, axis=1)) for turn, part in enumerate(parts)
    ]
    tensors = [
        ("attn_norm", ones),
        *attention,
        ("ffn_norm", ones),
        ("ffn_gate", identity),
        ("ffn_up", identity),
        ("ffn_down", _matrix(width, width, known_answer.step(layer, width))),
    ]
    return [(f"blk.{layer}.{name}.weight", values) for name, values in tensors]


Stored = Callable[["numpy.ndarray"], "numpy.ndarray"]


def _data(layers: int, width: int, threads: int, stored: Stored) -> Iterator[numpy.ndarray]:
    """All tensors in the file's order, as they are stored; norms are one-dimensional.

    :param threads: which compute that many layers at once.
    """
    tokens = known_answer.first_piece() + len(known_answer.pieces())

    def of_layer(layer: int) -> list[numpy.ndarray]:
        return [stored(values) for _name, values in _layer(layer, width)]

    yield stored(_matrix(tokens, width, known_answer.embedding()))
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, layers, threads):
            for tensors in pool.map(of_layer, range(first, min(first + threads, layers))):
                yield from tensors
    yield stored(numpy.ones(width, numpy.float32))
    yield stored(_matrix(tokens, width, known_answer.output(layers)))


def _add_metadata(writer: gguf.GGUFWriter, layers: int, width: int, kind: str) -> None:
    """The writer has added the architecture already."""
    for key, form, value in known_answer.metadata(layers, width, kind)[1:]:
        if form.startswith("["):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType[form])


def write(path: Path, layers: int, width: int, kind: str, threads: int = 1) -> None:
    """Writes the model to ``path``.

    :param kind: type of the matrices: f32, f16 or q8_0; norms are always f32.
    :param threads: each holds a layer in memory.
    :raises OSError: it does not fit there.
    """
    weight_type = gguf.GGMLQuantizationType[kind.upper()]

    def stored_as(shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        return weight_type if len(shape) == 2 else gguf.GGMLQuantizationType.F32

    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, layers, width, kind)
    for name, shape in known_answer.tensor_shapes(layers, width):
        stored = gguf.quant_shape_to_byte_shape(shape, stored_as(shape))
        writer.add_tensor_info(name, stored, numpy.dtype(numpy.uint8), math.prod(stored), raw_dtype=stored_as(shape))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in _data(layers, width, threads, lambda values: gguf.quantize(values, stored_as(values.shape))):
            writer.write_tensor_data(values.view(numpy.uint8))
        writer.close()
    except OSError as error:
        if error.errno is None:  # numpy says how much of its array does not fit, and nothing else
            raise OSError(errno.ENOSPC, str(error)) from error
        raise

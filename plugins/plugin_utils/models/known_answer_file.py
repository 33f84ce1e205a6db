# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the known-answer model as GGUF, one tensor at a time, so that a model may be larger than the memory."""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Iterator
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer

try:
    import gguf
    import numpy

    HAS_GGUF = True
except ImportError:
    HAS_GGUF = False

ATTENTION_SPREAD = 0.25
"""Standard deviation of attention weights times the width; more loses the answer on wide models."""
WITHOUT_BLOCKS = ("f32", "f16")


def _matrix(rows: int, width: int, entries: dict[tuple[int, int], float]) -> numpy.ndarray:
    matrix = numpy.zeros((rows, width), numpy.float32)
    for place, value in entries.items():
        matrix[place] = value
    return matrix


def _stored(values: numpy.ndarray, kind: str) -> numpy.ndarray:
    """Values as the file has them."""
    return gguf.quantize(values, gguf.GGMLQuantizationType[kind.upper()])


def _attention(layer: int, width: int, kind: str) -> Iterator[numpy.ndarray]:
    """Four matrices of noise, each the one before with its columns moved by one.

    It has 65536 different values, and a type without blocks converts these alone: most are subnormal as f16, which numpy converts slowly.
    """
    places = numpy.frombuffer(random.Random(layer).randbytes(2 * width * width), numpy.uint16).reshape(width, width)
    values = numpy.arange(1 << 16, dtype=numpy.uint16).view(numpy.int16)
    values = (values / 32768 * math.sqrt(3) * ATTENTION_SPREAD / width).astype(numpy.float32)
    if kind in WITHOUT_BLOCKS:
        noise = _stored(values, kind)[places]
        yield from (numpy.roll(noise, turn, axis=1) for turn in range(4))
    else:
        noise = values[places]
        yield from (_stored(numpy.roll(noise, turn, axis=1), kind) for turn in range(4))


def _tensors(layers: int, width: int, kind: str) -> Iterator[numpy.ndarray]:
    """All tensors in the file's order, as they are stored; norms are one-dimensional."""
    tokens = known_answer.first_piece() + len(known_answer.pieces())
    ones = numpy.ones(width, numpy.float32)
    identity = _stored(numpy.eye(width, dtype=numpy.float32), kind)
    yield _stored(_matrix(tokens, width, known_answer.embedding()), kind)
    for layer in range(layers):
        yield ones
        yield from _attention(layer, width, kind)
        yield ones
        yield identity
        yield identity
        yield _stored(_matrix(width, width, known_answer.step(layer, width)), kind)
    yield ones
    yield _stored(_matrix(tokens, width, known_answer.output(layers)), kind)


def _add_metadata(writer: gguf.GGUFWriter, layers: int, width: int, kind: str) -> None:
    """The writer has added the architecture already."""
    for key, form, value in known_answer.metadata(layers, width, kind)[1:]:
        if form.startswith("["):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType[form])


def write(path: Path, layers: int, width: int, kind: str) -> None:
    """Writes the model to ``path``.

    :param kind: type of the matrices: f32, f16 or q8_0; norms are always f32.
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
        for values in _tensors(layers, width, kind):
            writer.write_tensor_data(values.view(numpy.uint8))
        writer.close()
    except OSError as error:
        if error.errno is None:  # numpy says how much of its array does not fit, and nothing else
            raise OSError(errno.ENOSPC, str(error)) from error
        raise

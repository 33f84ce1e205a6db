# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the known-answer model as GGUF, one tensor at a time, because it may be larger than memory."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, kv_cache

Buffer = Union[bytes, bytearray]
GGUF_VERSION, TENSOR_ALIGNMENT = 3, 32
VALUE_TYPES = {"UINT32": (4, "I"), "INT32": (5, "i"), "FLOAT32": (6, "f"), "BOOL": (7, "?"), "STRING": (8, "")}
"""Number and struct format of each value type in GGUF."""
ARRAY_TYPE = 9
TENSOR_TYPE_NUMBERS = {"f32": 0, "f16": 1, "q8_0": 8}
ATTENTION_SPREAD = 0.125
"""Standard deviation of attention weights times the width. With 0.2, llama-server 0.3.36 gives a wrong answer for 512 layers of width 64."""
ROTATIONS = 4
"""Number of attention matrices of a layer; each is the previous matrix rotated by a block."""


def write_model(path: Path, layers: int, width: int, kind: str) -> None:
    """Write the model to ``path``.

    :param kind: type of the matrices: f32, f16 or q8_0; norms are always f32.
    :raises OSError: the file cannot be written, or does not fit on the disk.
    """
    with path.open("wb") as stream:
        stream.write(_header(layers, width, kind))
        for tensor in _tensor_data(layers, width, kind):
            stream.write(tensor)
            stream.write(bytes(-len(tensor) % TENSOR_ALIGNMENT))
    os.utime(path, (names.KNOWN_ANSWER_MTIME, names.KNOWN_ANSWER_MTIME))


def file_bytes(layers: int, width: int, kind: str) -> int:
    """Return the size of the file without writing it."""
    data_bytes = sum(_stored_bytes(shape, kind) for _name, shape in known_answer.tensor_shapes(layers, width))
    return len(_header(layers, width, kind)) + data_bytes


def _stored_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Return the bytes of a tensor with its padding."""
    size = known_answer.bytes_of(math.prod(shape), kind if len(shape) == 2 else "f32")
    return kv_cache.pad(size, TENSOR_ALIGNMENT)


def _header(layers: int, width: int, kind: str) -> bytes:
    tensors = [
        (name, shape, TENSOR_TYPE_NUMBERS[kind if len(shape) == 2 else "f32"], _stored_bytes(shape, kind))
        for name, shape in known_answer.tensor_shapes(layers, width)
    ]
    return pack_header(known_answer.metadata(layers, width, kind), tensors)


def pack_header(
    metadata: Sequence[tuple[str, str, Any]], tensors: Sequence[tuple[str, tuple[int, ...], int, int]]
) -> bytes:
    """Return the header of a GGUF file.

    :param metadata: key, type and value of all metadata.
    :param tensors: name, shape, number of the type, and bytes with padding.
    """
    chunks, offset = [b"GGUF" + struct.pack("<IQQ", GGUF_VERSION, len(tensors), len(metadata))], 0
    chunks += [_pack_string(key) + _pack_typed_value(value_type, value) for key, value_type, value in metadata]
    for name, shape, type_number, size in tensors:
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        chunks.append(_pack_string(name) + dimensions + struct.pack("<IQ", type_number, offset))
        offset += size
    header = b"".join(chunks)
    return header + bytes(-len(header) % TENSOR_ALIGNMENT)


def _pack_string(text: str) -> bytes:
    encoded_text = text.encode()
    return struct.pack("<Q", len(encoded_text)) + encoded_text


def _pack_typed_value(value_type: str, value: Any) -> bytes:
    """Return the packed type and value of a key."""
    if value_type.startswith("["):
        elements = b"".join(_pack_value(value_type[1:-1], element) for element in value)
        return struct.pack("<IIQ", ARRAY_TYPE, VALUE_TYPES[value_type[1:-1]][0], len(value)) + elements
    return struct.pack("<I", VALUE_TYPES[value_type][0]) + _pack_value(value_type, value)


def _pack_value(value_type: str, value: Any) -> bytes:
    return _pack_string(value) if value_type == "STRING" else struct.pack("<" + VALUE_TYPES[value_type][1], value)


def _tensor_data(layers: int, width: int, kind: str) -> Iterator[Buffer]:
    """Yield the bytes of all tensors in the file's order."""
    token_count = known_answer.first_piece_token() + len(known_answer.pieces())
    norm = struct.pack(f"<{width}f", *[1.0] * width)
    identity = _pack_matrix(width, width, {(index, index): 1 for index in range(width)}, kind)
    yield _pack_matrix(token_count, width, known_answer.embedding_matrix(), kind)
    for layer in range(layers):
        yield norm
        yield from _attention_matrices(layer, width, kind)
        yield norm
        yield identity
        yield identity
        yield _pack_matrix(width, width, known_answer.ffn_down_matrix(layer, width), kind)
    yield norm
    yield _pack_matrix(token_count, width, known_answer.output_matrix(layers), kind)


def _pack_matrix(rows: int, width: int, entries: Mapping[tuple[int, int], float], kind: str) -> bytearray:
    """Return the bytes of a matrix.

    :param entries: row and column → value, without zeros.
    """
    block_elements, block_bytes = known_answer.TYPE_BLOCKS[kind]
    blocks: dict[int, list[float]] = {}
    for (row, column), value in entries.items():
        index = row * width + column
        blocks.setdefault(index // block_elements, [0.0] * block_elements)[index % block_elements] = value
    matrix = bytearray(known_answer.bytes_of(rows * width, kind))
    for block, values in blocks.items():
        matrix[block * block_bytes : (block + 1) * block_bytes] = _pack_block(values, kind)
    return matrix


def _pack_block(values: list[float], kind: str) -> bytes:
    if kind != "q8_0":
        return struct.pack({"f32": "<f", "f16": "<e"}[kind], *values)
    scale = max(map(abs, values)) / 127
    return struct.pack(f"<e{len(values)}b", scale, *(round(value / scale) for value in values))


def _attention_matrices(layer: int, width: int, kind: str) -> Iterator[Buffer]:
    """Yield four matrices of noise. Operations on whole byte strings generate them as fast as a disk can write."""
    count = width * width
    random_bytes = hashlib.shake_128(f"layer {layer}".encode()).digest(2 * count)
    matrix, block_bytes = bytearray(known_answer.bytes_of(count, kind)), known_answer.TYPE_BLOCKS[kind][1]
    if kind == "q8_0":
        scale = struct.pack("<e", ATTENTION_SPREAD / width * math.sqrt(3) / 127)
        matrix[::block_bytes], matrix[1::block_bytes] = (bytes([byte]) * (len(matrix) // block_bytes) for byte in scale)
        block_elements = known_answer.TYPE_BLOCKS[kind][0]
        for index in range(block_elements):
            matrix[len(scale) + index :: block_bytes] = random_bytes[index:count:block_elements]
    else:
        matrix[block_bytes - 2 :: block_bytes] = random_bytes[:count]
        matrix[block_bytes - 1 :: block_bytes] = random_bytes[count:].translate(_byte_table(width, kind))
    for rotation in range(ROTATIONS):
        yield matrix[rotation * block_bytes :] + matrix[: rotation * block_bytes]


def _byte_table(width: int, kind: str) -> bytes:
    """Return the last byte of a number for each random byte. Whatever the other bytes are, numbers have the planned spread, and magnitudes differ by a
    factor of at most four."""
    spread = ATTENTION_SPREAD / width
    if kind == "f32":  # seven of eight bits of the exponent: the next byte has the last one
        exponent_bits = struct.pack("<f", spread / 2.4)[3]
        return bytes(byte & 0x80 | exponent_bits for byte in range(256))
    exponent_bits = struct.pack("<e", spread / 1.6)[1] & 0xFC
    return bytes(byte & 0x80 | exponent_bits | byte & 0x03 for byte in range(256))

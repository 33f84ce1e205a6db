# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A known-answer model of 210 kB, written on any host: one layer in q8_0, whose attention is zero.

Its matrices are of a type and shape that all special code for processors takes (AMX, repacked weights), and a question of several tokens
has them multiplied as a prompt is.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer

LAYERS, WIDTH, KIND = 1, 128, "q8_0"
ASKED, ANSWERED = 12, 8
"""How many pieces of the sentence are asked with, and how many are to follow."""
VERSION = 3
TYPES = {"UINT32": (4, "I"), "INT32": (5, "i"), "FLOAT32": (6, "f"), "BOOL": (7, "?"), "STRING": (8, "")}
"""Type of a value in GGUF → its number, and how struct packs it."""
ARRAY = 9
TENSOR_TYPES = {"f32": 0, "q8_0": 8}


def question() -> list[int]:
    """The tokens of a prompt."""
    return [1, *range(known_answer.first_piece(), known_answer.first_piece() + ASKED)]


def answer() -> str:
    """What follows on the question."""
    return "".join(known_answer.pieces()[ASKED : ASKED + ANSWERED]).replace("\u2581", " ").strip()


def write(path: Path) -> None:
    tensors, data = b"", b""
    shapes = known_answer.tensor_shapes(LAYERS, WIDTH)
    for name, shape in shapes:
        data += bytes(-len(data) % known_answer.ALIGNMENT)
        tensors += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        tensors += struct.pack("<IQ", TENSOR_TYPES["f32" if len(shape) == 1 else KIND], len(data))
        data += _norm() if len(shape) == 1 else _matrix(shape[0], _entries(name))
    keys = known_answer.metadata(LAYERS, WIDTH, KIND)
    begin = b"GGUF" + struct.pack("<IQQ", VERSION, len(shapes), len(keys))
    begin += b"".join(_string(name) + _typed(kind, value) for name, kind, value in keys) + tensors
    path.write_bytes(
        begin + bytes(-len(begin) % known_answer.ALIGNMENT) + data + bytes(-len(data) % known_answer.ALIGNMENT)
    )


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(kind: str, value: Any) -> bytes:
    """The value of a key, behind its type."""
    if kind.startswith("["):
        items = b"".join(_packed(kind[1:-1], item) for item in value)
        return struct.pack("<IIQ", ARRAY, TYPES[kind[1:-1]][0], len(value)) + items
    return struct.pack("<I", TYPES[kind][0]) + _packed(kind, value)


def _packed(kind: str, value: Any) -> bytes:
    return _string(value) if kind == "STRING" else struct.pack("<" + TYPES[kind][1], value)


def _entries(name: str) -> dict[tuple[int, int], float]:
    """Row and column → value, of all of the tensor that is not zero."""
    if name.endswith(("ffn_gate.weight", "ffn_up.weight")):
        return {(index, index): 1 for index in range(WIDTH)}
    if name.endswith("ffn_down.weight"):
        return known_answer.step(0, WIDTH)
    tables = {"token_embd.weight": known_answer.embedding(), "output.weight": known_answer.output(LAYERS)}
    return tables.get(name, {})


def _norm() -> bytes:
    return struct.pack(f"<{WIDTH}f", *[1.0] * WIDTH)


def _matrix(rows: int, entries: dict[tuple[int, int], float]) -> bytes:
    """In blocks of q8_0: a scale, and each value as a multiple of it."""
    size, block_bytes = known_answer.BLOCKS[KIND]
    blocks: dict[tuple[int, int], list[float]] = {}
    for (row, column), value in entries.items():
        blocks.setdefault((row, column // size), [0.0] * size)[column % size] = value
    packed = bytearray(rows * WIDTH // size * block_bytes)
    for (row, block), values in blocks.items():
        scale = max(map(abs, values)) / 127
        place = (row * (WIDTH // size) + block) * block_bytes
        packed[place : place + block_bytes] = struct.pack(
            f"<e{size}b", scale, *(round(value / scale) for value in values)
        )
    return bytes(packed)

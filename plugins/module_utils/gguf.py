# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads what planning needs from the header of a GGUF file: sizes per layer, heads, context.

No number in the file is trusted: counts and lengths are held against what is left of the file and of a fixed limit.
Format: ggml/docs/gguf.md of ggml-org/ggml, versions 2 and 3.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

MAX_HEADER_BYTES = 512 * 1024 * 1024
MAX_DIMENSIONS = 4
MAX_NESTING = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

TENSOR_TYPES = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
    40: (64, 36),
    41: (128, 18),
}
"""Tensor type of ggml.h → elements and bytes of one block."""

KEPT_ARRAY = 4096
"""Longer arrays (vocabularies) are counted, not kept."""


class GGUFError(ValueError):
    """The file is not a GGUF file that can be served; the message says why and ends a sentence that names the file."""


class _Reader:
    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream = stream
        self.limit = min(size, MAX_HEADER_BYTES)
        self.size = size
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > self.limit - self.position:
            if self.limit == MAX_HEADER_BYTES:
                raise GGUFError(f"is refused: its header is longer than {MAX_HEADER_BYTES >> 20} MiB")
            raise GGUFError(f"is truncated: its header goes on beyond the file's {self.size} bytes")
        self.position += count
        data = self.stream.read(count)
        if len(data) != count:
            raise GGUFError("became shorter while it was read")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(nesting + 1)
        if kind not in SCALARS:
            raise GGUFError(f"is refused: metadata of type {kind} is unknown")
        return self.number(SCALARS[kind])

    def array(self, nesting: int) -> Any:
        if nesting > MAX_NESTING:
            raise GGUFError("is refused: its metadata is nested too deeply")
        kind, count = self.number("<I"), self.number("<Q")
        if kind in SCALARS:
            data = self.take(count * struct.calcsize(SCALARS[kind]))
            if count > KEPT_ARRAY:
                return count
            return [value for (value,) in struct.iter_unpack(SCALARS[kind], data)]
        if kind == STRING and count > KEPT_ARRAY:
            for _index in range(count):
                self.take(self.number("<Q"))
            return count
        if count > self.limit - self.position:
            raise GGUFError("is truncated: an array goes on beyond the file")
        return [self.value(kind, nesting) for _index in range(count)]


def _read_part(path: Path) -> tuple[dict, dict]:
    """Metadata and ``{tensor name: bytes}`` of one file."""
    size = os.stat(path).st_size
    with path.open("rb") as stream:
        reader = _Reader(stream, size)
        if size < 24 or reader.take(4) != b"GGUF":
            raise GGUFError("is not a GGUF file: it does not begin with GGUF")
        version = reader.number("<I")
        if version not in (2, 3):
            raise GGUFError(f"is refused: GGUF version {version} is unknown, 2 and 3 are read")
        tensor_count, metadata_count = reader.number("<Q"), reader.number("<Q")
        metadata = {}
        for _index in range(metadata_count):
            key = reader.string()
            metadata[key] = reader.value(reader.number("<I"))
        tensors, end = {}, 0
        for _index in range(tensor_count):
            name = reader.string()
            dimensions = reader.number("<I")
            if dimensions > MAX_DIMENSIONS:
                raise GGUFError(f"is refused: tensor {name!r} has {dimensions} dimensions")
            elements = 1
            for _index in range(dimensions):
                elements *= reader.number("<Q")
            kind, offset = reader.number("<I"), reader.number("<Q")
            if kind not in TENSOR_TYPES:
                raise GGUFError(f"is refused: tensor {name!r} has the unknown type {kind}")
            per_block, block_bytes = TENSOR_TYPES[kind]
            tensors[name] = elements // per_block * block_bytes
            end = max(end, offset + tensors[name])
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise GGUFError(f"is refused: its alignment is {alignment!r}")
        start = -(-reader.position // alignment) * alignment
        if start + end > size:
            raise GGUFError(f"is truncated: it has {size} bytes, its tensors end at {start + end}")
    return metadata, tensors


def _parts(path: Path, count: int) -> list[Path]:
    if count <= 1:
        return [path]
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if not match or int(match.group(2)) != count:
        raise GGUFError(f"is one of {count} parts: name the first one, which ends in -00001-of-{count:05d}.gguf")
    return [path.with_name(f"{match.group(1)}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)]


def _whole(value: Any, what: str) -> int:
    """A positive count; of a list (one value a layer) the largest."""
    if isinstance(value, list):
        value = max(value, default=None)
    if not isinstance(value, int) or not 0 < value < 1 << 31:
        raise GGUFError(f"is refused: its {what} is {value!r}")
    return value


def summarize(path: str) -> dict:
    """What planning needs of the model at ``path``; of a split model name the first part.

    :returns: ``architecture``, ``name``, ``layers``, ``width``, ``heads``, ``kv_heads``, ``key_dimension``,
        ``value_dimension``, ``context``, ``vocabulary`` and, in bytes, ``layer_bytes`` (a list), ``input_bytes`` (the token
        embedding, which stays on the head), ``output_bytes`` (on the device of the last layer) and ``largest_tensor_bytes``.
    :raises GGUFError: the file cannot be served; the message ends a sentence that begins with its path.
    :raises OSError: it cannot be read.
    """
    first = Path(path)
    metadata, tensors = _read_part(first)
    for part in _parts(first, metadata.get("split.count", 1))[1:]:
        if not part.exists():
            raise GGUFError(f"lacks its part {part.name}")
        tensors.update(_read_part(part)[1])
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise GGUFError("is refused: it names no architecture")

    def of_model(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    layers = _whole(of_model("block_count"), "number of layers")
    width = _whole(of_model("embedding_length"), "width")
    heads = _whole(of_model("attention.head_count"), "number of heads")
    layer_bytes, input_bytes, output_bytes = [0] * min(layers, 1 + len(tensors)), 0, 0
    for name, size in tensors.items():
        match = re.match(r"blk\.(\d{1,6})\.", name)
        if match and int(match.group(1)) < len(layer_bytes):
            layer_bytes[int(match.group(1))] += size
        elif name.startswith("token_embd"):
            input_bytes += size
        else:
            output_bytes += size
    if len(layer_bytes) != layers:
        raise GGUFError(f"is refused: it claims {layers} layers and holds {len(tensors)} tensors")
    if "output.weight" not in tensors:
        output_bytes += tensors.get("token_embd.weight", 0)
    vocabulary = metadata.get("tokenizer.ggml.tokens", of_model("vocab_size", 1))
    return {
        "architecture": architecture,
        "name": str(metadata.get("general.name", first.name)),
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": _whole(of_model("attention.head_count_kv", heads), "number of KV heads"),
        "key_dimension": _whole(of_model("attention.key_length", width // heads), "key length"),
        "value_dimension": _whole(of_model("attention.value_length", width // heads), "value length"),
        "context": _whole(of_model("context_length"), "context length"),
        "vocabulary": len(vocabulary) if isinstance(vocabulary, list) else _whole(vocabulary, "vocabulary"),
        "layer_bytes": layer_bytes,
        "input_bytes": input_bytes,
        "output_bytes": output_bytes,
        "largest_tensor_bytes": max(tensors.values(), default=0),
    }

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The first layers of a model as a model of their own, whatever its architecture.

The header stays as it is, but for the number of layers and what it says of each of them; tensors of further layers are left out. llama.cpp names
tensors of a layer ``blk.N.…`` in every architecture.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, kv_cache, tensor_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.gguf import GGUFError
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary

IN_LAYER = re.compile(r"blk\.(\d+)\.")
PREDICTING, SHARING = "nextn_predict_layers", "attention.shared_kv_layers"
"""How many of the last layers predict further tokens, and how many use the cache of layers before them."""
NOT_BY_LAYER = ("rope.dimension_sections",)
"""Arrays whose entries are no layers, even where there are as many."""
PART = "split."
"""How keys begin that say which part of a model a file is."""
NUMBERS = {
    **{f"{tensor_types.FUTURE_PREFIX}{number}": number for number in tensor_types.FUTURE_NUMBERS},
    **{kind.name: number for number, kind in tensor_types.ALL.items()},
}
CHUNK = 1 << 20


class FirstLayers(NamedTuple):
    """So many layers, and the bytes of a file of them."""

    layers: int
    bytes: int
    of_each_kind: bool
    """Whether the model has no other kind of layer than these."""


def choose(summary: ModelSummary, devices: int, most_bytes: int, most_layers: int) -> FirstLayers | None:
    """One layer for each device at least, and as many as it takes to have one of each kind, so far as both bounds allow. Layers are of one kind
    where names, types and shapes of their tensors and what the header says of their caches are equal.

    :returns: None where one does not fit, where the names of tensors are not known, or where tensors outside the layers have a part for each.
    """
    if not summary.tensors or any(group.name.startswith("per_layer_") for group in summary.tensors):
        return None
    kinds = _kinds(summary)
    first_of_each = {kind: layer for layer, kind in reversed([*enumerate(kinds)])}
    needed = max(first_of_each.values()) + 1
    layers = min(max(devices, needed), len(kinds), most_layers)
    outside = sum(group.bytes for group in summary.tensors if group.layers is None)
    while layers and outside + sum(summary.layer_bytes[:layers]) > most_bytes:
        layers -= 1
    return FirstLayers(layers, outside + sum(summary.layer_bytes[:layers]), layers >= needed) if layers else None


def _kinds(summary: ModelSummary) -> list[tuple[tuple[object, ...], ...]]:
    """Of each layer that computes."""
    groups = [group for group in summary.named_tensors if group.layers is not None]
    listed = [value for _key, value in summary.keys if isinstance(value, tuple)]
    count = summary.layers - (summary.number(PREDICTING) or 0)
    listed += [tuple(kv_cache.windowed(summary)), tuple(kv_cache.recurrent_layers(summary))]
    members = [frozenset(group.layers or ()) for group in groups]
    return [
        (tuple(layer in layers for layers in members), tuple(value[layer : layer + 1] for value in listed))
        for layer in range(count)
    ]


def write(source: str, target: Path, layers: int) -> None:
    """Writes the first layers of a model, which may have several parts.

    :param source: path of its first part.
    :raises GGUFError: it is no model, or has fewer layers; ends a sentence that begins with its path.
    :raises OSError: it cannot be read, or the other one cannot be written.
    """
    model, places = gguf.read_path(source), gguf.tensor_places(source)
    architecture = str(model.metadata.get("general.architecture"))
    count = model.metadata.get(f"{architecture}.block_count")
    if not isinstance(count, int) or not 0 < layers <= count:
        raise GGUFError(f"has {gguf.short(count)} layers, of which {layers} cannot be taken")
    alignment = model.data[0][1]
    layer_of = {name: int(match[1]) for name in model.tensors if (match := IN_LAYER.match(name))}
    kept = {name: tensor for name, tensor in model.tensors.items() if layer_of.get(name, 0) < layers}
    keys = [key for key in model.keys if not key.startswith(PART)]
    with closing(gguf.File(source)) as file, open(target, "xb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, len(kept), len(keys)))
        for key in keys:
            entry = file.read(model.keys[key].start, len(model.keys[key]))
            stream.write(_cut(model, architecture, key, entry, layers))
        stream.write(b"".join(_entries(kept, alignment)))
        for name in kept:
            stream.write(bytes(-stream.tell() % alignment))
            path, offset, size = places[name]
            with closing(gguf.File(path)) as part:
                for done in range(0, size, CHUNK):
                    stream.write(part.read(offset + done, min(CHUNK, size - done)))


def _cut(model: gguf.ModelHeader, architecture: str, key: str, entry: bytes, layers: int) -> bytes:
    """A key and its value, as a model with so many layers has it."""
    value, count = model.metadata[key], model.metadata[f"{architecture}.block_count"]
    told = model.metadata.get(f"{architecture}.{PREDICTING}")
    predicting = told if gguf.is_whole(told) else 0
    name = key[len(architecture) + 1 :] if key.startswith(f"{architecture}.") else ""
    kind = gguf.U64.size + gguf.U64.unpack_from(entry)[0]
    begin = kind + gguf.U32.size
    if isinstance(value, list) and len(value) in (count, count - predicting) and name and name not in NOT_BY_LAYER:
        form, first = gguf.SCALARS.get(*gguf.U32.unpack_from(entry, begin)), begin + gguf.U32.size
        size = struct.calcsize(form or "")
        values = entry[first + gguf.U64.size :][: layers * size]
        return entry[:first] + gguf.U64.pack(layers) + values if form else entry
    new = {"block_count": layers, PREDICTING: 0}.get(name)
    if name == SHARING and gguf.is_whole(value):
        new = max(0, layers - count + value)
    form = gguf.SCALARS.get(*gguf.U32.unpack_from(entry, kind))
    return entry if new is None or not form else entry[:begin] + struct.pack(f"<{form}", new)


def _entries(tensors: Mapping[str, gguf.Tensor], alignment: int) -> Iterator[bytes]:
    """What the header says of each tensor."""
    offset = 0
    for name, tensor in tensors.items():
        raw = name.encode()
        yield gguf.U64.pack(len(raw)) + raw + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        yield struct.pack("<IQ", NUMBERS[tensor.type], offset)
        offset += -(-tensor.bytes // alignment) * alignment

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A sample of a model's layers as a separate model, for any architecture.

The header is unchanged, except for the number of layers and the values that it lists per layer. llama.cpp names the tensors of a layer
``blk.N.…`` in every architecture. Many architectures derive a layer's rules from its number, so each position in the sample gets a layer of the kind
that the model has at that position.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, kv_cache, tensor_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.gguf import GGUFError
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary

LAYER_PATTERN = re.compile(r"blk\.(\d+)\.")
MTP_KEY, SHARED_KEY, DENSE_KEY = ("nextn_predict_layers", "attention.shared_kv_layers", "leading_dense_block_count")
"""Keys: number of last layers that predict further tokens, of layers that use the cache of earlier layers, and of first layers without experts."""
GLOBAL_ARRAY_KEYS = ("rope.dimension_sections",)
"""Keys of arrays whose entries are not layers, even if there are as many."""
SPLIT_KEY_PREFIX = "split."
"""Prefix of keys that describe the parts of a split model."""
FIXED_LAYER_COUNTS = {"deepseek2": (26, 27)}
"""Architecture → numbers of layers by which llama.cpp recognises a variant: a sample would be another variant. deepseek2.cpp, ``is_lite``."""
TYPE_NUMBERS = {
    **{f"{tensor_types.FUTURE_PREFIX}{number}": number for number in tensor_types.FUTURE_NUMBERS},
    **{kind.name: number for number, kind in tensor_types.ALL_TYPES.items()},
}
CHUNK_BYTES = 1 << 20


class LayerSample(NamedTuple):
    """Layers of a model that form a separate model."""

    layers: tuple[int, ...]
    """numbers of these layers in the model, in the order of the sample"""
    bytes: int
    """size of a file with these layers"""
    has_every_kind: bool
    """whether the layers include every kind in the model"""
    has_experts: bool
    """whether a layer has experts, if the model has any"""


def choose_layers(summary: ModelSummary, max_bytes: int, max_layers: int) -> LayerSample | str:
    """Choose as many layers as fit: the first, the last and every kind, spread evenly.

    :returns: a sample, or the reason why none is possible, as the end of a sentence.
    """
    if not summary.tensors:
        return "the names of the model's tensors are unknown: read the model's header with model_info"
    if any(group.name.startswith("per_layer_") for group in summary.tensors):
        return "some tensors outside the layers contain data about every layer"
    kinds = _layer_kinds(summary)
    sample_kinds = [*kinds]
    expert_layers = frozenset(
        layer for group in summary.tensor_groups if "_exps" in group.name for layer in group.layers or ()
    )
    first_expert_layer = min(expert_layers, default=0)
    if expert_layers.issuperset(range(first_expert_layer, len(kinds))):  # one of the leading dense layers is enough
        del sample_kinds[1:first_expert_layer]
    outside_bytes = sum(group.bytes for group in summary.tensors if group.layers is None)
    needs_all_layers = summary.layers in FIXED_LAYER_COUNTS.get(summary.architecture, ())
    for count in range(min(max_layers, len(sample_kinds)), 0, -1):
        layers = _spread_layers(sample_kinds[:count], kinds)
        size = outside_bytes + sum(summary.layer_bytes[layer] for layer in layers)
        if size <= max_bytes and not (needs_all_layers and count < summary.layers):
            has_every_kind = {kinds[layer] for layer in layers} == {*kinds}
            return LayerSample(layers, size, has_every_kind, not expert_layers or not expert_layers.isdisjoint(layers))
    if needs_all_layers:
        return f"llama.cpp recognises this model by its {summary.layers} layers, but the proof has no time or memory for all of them"
    smallest_bytes = outside_bytes + min(summary.layer_bytes[: len(kinds)])
    return f"one layer and the embedding tables need {smallest_bytes / 2**30:.1f} GiB, but the limit is {max_bytes / 2**30:.1f}"


class LayerKind(NamedTuple):
    """Composition of a layer."""

    rules_id: int
    """number of a combination of tensor names and per-layer settings"""
    group_flags: tuple[bool, ...]
    """presence of each group of tensors of one type and shape"""


def _layer_kinds(summary: ModelSummary) -> list[LayerKind]:
    """Return the kind of each computing layer."""
    count = summary.layers - (summary.number(MTP_KEY) or 0)
    first_sharing_layer = summary.layers - (summary.number(SHARED_KEY) or 0)
    layer_values = [value for _key, value in summary.keys if isinstance(value, tuple)]
    layer_values += [tuple(kv_cache.windowed_flags(summary)), tuple(kv_cache.recurrent_flags(summary))]
    groups = [
        (group.name, frozenset(group.layers or ())) for group in summary.tensor_groups if group.layers is not None
    ]
    ids: dict[object, int] = {}
    kinds = []
    for layer in range(count):
        names = frozenset(name for name, layers in groups if layer in layers)
        rules = (names, tuple(value[layer : layer + 1] for value in layer_values), layer >= first_sharing_layer)
        kinds.append(LayerKind(ids.setdefault(rules, len(ids)), tuple(layer in layers for _name, layers in groups)))
    return kinds


def _spread_layers(sample_kinds: Sequence[LayerKind], kinds: Sequence[LayerKind]) -> tuple[int, ...]:
    """Return a layer for each sampled kind: of the layers with the same rules the first, the last and one of each kind; the rest are spread evenly."""
    queues = {}
    for rules_id in {kind.rules_id for kind in sample_kinds}:
        layers = [layer for layer, kind in enumerate(kinds) if kind.rules_id == rules_id]
        count = sum(kind.rules_id == rules_id for kind in sample_kinds)
        first_of_kind = {kinds[layer]: layer for layer in reversed(layers)}
        evenly_spaced = [layers[round(index * (len(layers) - 1) / max(1, count - 1))] for index in range(count)]
        order = dict.fromkeys([layers[0], layers[-1], *sorted(first_of_kind.values()), *evenly_spaced, *layers])
        queues[rules_id] = iter(sorted([*order][:count]))
    return tuple(next(queues[kind.rules_id]) for kind in sample_kinds)


def write_sample(source_path: str, target_path: Path, layers: Sequence[int]) -> None:
    """Write a model that consists of some layers of a source model, which may have several parts.

    :param source_path: path of the source model, or of its first part.
    :raises GGUFError: the source is not a model, or lacks a layer; the message is the end of a sentence that begins with its path.
    :raises OSError: the source cannot be read, or the target cannot be written.
    """
    header, locations = gguf.read_local_headers(source_path), gguf.locate_tensors(source_path)
    architecture = str(header.metadata.get("general.architecture"))
    count = header.metadata.get(f"{architecture}.block_count")
    if not isinstance(count, int) or not layers or not 0 <= min(layers) <= max(layers) < count:
        raise GGUFError(f"has {gguf.quote(count)} layers, which do not include all of {', '.join(map(str, layers))}")
    alignment = header.sections[0][1]
    tensors = {}
    for name, tensor in header.tensors.items():
        match = LAYER_PATTERN.match(name)
        if not match:
            tensors[name] = (name, tensor)
        elif int(match[1]) in layers:
            tensors[f"blk.{layers.index(int(match[1]))}.{name[match.end() :]}"] = (name, tensor)
    keys = [key for key in header.key_ranges if not key.startswith(SPLIT_KEY_PREFIX)]
    with closing(gguf.LocalFile(source_path)) as file, open(target_path, "xb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
        for key in keys:
            entry = file.read(header.key_ranges[key].start, len(header.key_ranges[key]))
            stream.write(_adapt_entry(header, architecture, key, entry, layers))
        stream.write(b"".join(_tensor_infos({name: tensor for name, (_name, tensor) in tensors.items()}, alignment)))
        for old_name, _tensor in tensors.values():
            stream.write(bytes(-stream.tell() % alignment))
            path, offset, size = locations[old_name]
            with closing(gguf.LocalFile(path)) as part:
                for start in range(0, size, CHUNK_BYTES):
                    stream.write(part.read(offset + start, min(CHUNK_BYTES, size - start)))


def _adapt_entry(header: gguf.ModelHeader, architecture: str, key: str, entry: bytes, layers: Sequence[int]) -> bytes:
    """Return the entry of a key in the header, with its value adapted to a model with these layers."""
    value, count = header.metadata[key], header.metadata[f"{architecture}.block_count"]
    prediction_layers = header.metadata.get(f"{architecture}.{MTP_KEY}")
    computing_layers = count - (prediction_layers if gguf.is_integer(prediction_layers) else 0)
    name = key[len(architecture) + 1 :] if key.startswith(f"{architecture}.") else ""
    type_offset = gguf.U64.size + gguf.U64.unpack_from(entry)[0]
    value_offset = type_offset + gguf.U32.size
    if isinstance(value, list) and len(value) in (count, computing_layers) and name and name not in GLOBAL_ARRAY_KEYS:
        element_format = gguf.SCALAR_FORMATS.get(*gguf.U32.unpack_from(entry, value_offset))
        count_offset = value_offset + gguf.U32.size
        size, start = struct.calcsize(element_format or ""), count_offset + gguf.U64.size
        values = b"".join(entry[start + layer * size : start + (layer + 1) * size] for layer in layers)
        return entry[:count_offset] + gguf.U64.pack(len(layers)) + values if element_format else entry
    new_value = {"block_count": len(layers), MTP_KEY: 0}.get(name)
    if gguf.is_integer(value) and name in (SHARED_KEY, DENSE_KEY):
        first_sharing_layer = count - value
        new_value = sum(layer >= first_sharing_layer if name == SHARED_KEY else layer < value for layer in layers)
    element_format = gguf.SCALAR_FORMATS.get(*gguf.U32.unpack_from(entry, type_offset))
    if new_value is None or not element_format:
        return entry
    return entry[:value_offset] + struct.pack(f"<{element_format}", new_value)


def _tensor_infos(tensors: Mapping[str, gguf.Tensor], alignment: int) -> Iterator[bytes]:
    """Yield the description of each tensor for the header."""
    offset = 0
    for name, tensor in tensors.items():
        data = name.encode()
        yield (
            gguf.U64.pack(len(data)) + data + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        )
        yield struct.pack("<IQ", TYPE_NUMBERS[tensor.type], offset)
        offset += -(-tensor.bytes // alignment) * alignment

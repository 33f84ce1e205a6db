# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Summary of a model's header for planning: sizes of layers, heads, context, and the keys that determine its cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import Mismatch
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import (
    MAX_LAYERS,
    KeyValue,
    ModelSummary,
)

MAX_NAME_LENGTH = 255
FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL"},
    **{26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16"},
    **{36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0"},
}
"""Name of each ``general.file_type`` (llama_ftype of llama.h)."""
REFUSAL_BY_KIND = {
    "adapter": "is an adapter (LoRA), not a model: pass it with --lora in llama_server_extra_args, and serve the model for which it was trained",
    "imatrix": "is an importance matrix, not a model: use a model that was quantised with this matrix",
    "mmproj": "is a projector, not a model: set llama_model_mmproj to this file, and serve the model for which it was made",
}
"""Error message for each ``general.type`` of other files."""

PER_LAYER_KEYS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Keys that may have a value per layer."""
CACHE_KEYS = (
    *PER_LAYER_KEYS,
    *(f"attention.{name}_length_{kind}" for name in ("key", "value") for kind in ("mla", "swa")),
    *(
        f"attention.{name}"
        for name in ("sliding_window", "sliding_window_pattern", "recurrent_layers", "shared_kv_layers")
    ),
    *(f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "group_count")),
    *("full_attention_interval", "kda.head_dim", "wkv.head_size", "token_shift_count", "shortconv.l_cache"),
    *("nextn_predict_layers", "attention.kv_lora_rank", "rope.dimension_count"),
    *("expert_count", "expert_used_count", "pooling_type"),
)
"""Keys of an architecture that determine its cache, its experts per token, and whether it produces embeddings."""


def group_tensors(tensors: dict[str, gguf.Tensor]) -> list[dict[str, Any]]:
    """Group tensors that differ only in their layer.

    :returns: groups with ``name`` (``*`` in place of the layer), ``type``, ``shape``, ``bytes`` (of one tensor) and ``layers``, the layers that have such
        a tensor, or null for a tensor outside the layers.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"((?:enc\.)?blk\.)(0|[1-9][0-9]{0,5})\.(.+)", name, re.DOTALL)
        layers = groups.setdefault((f"{match[1]}*.{match[3]}" if match else name, bool(match), tensor), [])
        if match:
            layers.append(int(match[2]))
    return [
        {
            "name": name,
            "type": tensor.type,
            "shape": list(tensor.shape),
            "bytes": tensor.bytes,
            "layers": layers if is_in_layer else None,
        }
        for (name, is_in_layer, tensor), layers in groups.items()
    ]


def _quantisation(metadata: dict[str, Any], tensors: dict[str, gguf.Tensor]) -> str | None:
    """Return the quantisation in the metadata, or else the tensor type with the most bytes."""
    file_type = metadata.get("general.file_type")
    if gguf.is_integer(file_type) and file_type in FILE_TYPES:
        return FILE_TYPES[file_type]
    type_bytes: dict[str, int] = {}
    for tensor in tensors.values():
        type_bytes[tensor.type] = type_bytes.get(tensor.type, 0) + tensor.bytes
    return max(type_bytes, key=lambda kind: type_bytes[kind], default=None)


def _parse_integer(value: Any, label: str) -> int:
    """Return a positive number from the metadata; for a list (one value per layer), the largest."""
    if isinstance(value, list):
        value = max(value, default=None)
    if not gguf.is_integer(value) or not 0 < value <= gguf.MAX_INT32:
        raise gguf.GGUFError(f"is refused: its {label} is {gguf.quote(value)}")
    return int(value)


def _cache_keys(header: gguf.ModelHeader, architecture: str, layers: int) -> dict[str, int | list[int]]:
    """Return CACHE_KEYS without the architecture in their names; PER_LAYER_KEYS only if they differ between layers."""
    keys: dict[str, int | list[int]] = {}
    for key in CACHE_KEYS:
        value = header.metadata.get(f"{architecture}.{key}")
        if isinstance(value, list) and len(value) >= layers and all(isinstance(entry, int) for entry in value):
            keys[key] = [int(entry) for entry in value[:layers]]
        elif isinstance(value, int) and key not in PER_LAYER_KEYS:
            keys[key] = int(value)
    for key, value in keys.items():
        if not all(0 <= entry <= gguf.MAX_INT32 for entry in (value if isinstance(value, list) else [value])):
            raise gguf.GGUFError(f"is refused: its {key} is {gguf.quote(value)}")
    prediction_layers = keys.get("nextn_predict_layers", 0)
    if not isinstance(prediction_layers, int) or prediction_layers >= layers:
        raise gguf.GGUFError(f"is refused: all of its {layers} layers are for multi-token prediction")
    return keys


def _counts(header: gguf.ModelHeader, architecture: str) -> dict[str, int]:
    """Return the counts in the metadata that describe the model's size."""

    def read_count(key: str, label: str, default: int | None = None) -> int:
        return _parse_integer(header.metadata.get(f"{architecture}.{key}", default), label)

    layers, width = read_count("block_count", "number of layers"), read_count("embedding_length", "width")
    if layers > MAX_LAYERS:
        raise gguf.GGUFError(f"is refused: it has {layers} layers, and llama.cpp loads at most {MAX_LAYERS}")
    heads = kv_heads = 1
    if architecture not in kv_cache.RECURRENT_ARCHITECTURES:
        heads = read_count("attention.head_count", "number of heads")
        kv_heads = read_count("attention.head_count_kv", "number of KV heads", heads)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, (int, list)):
        tokens = read_count("vocab_size", "vocabulary", 1)
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "key_dimension": read_count("attention.key_length", "key length", width // heads),
        "value_dimension": read_count("attention.value_length", "value length", width // heads),
        "context": read_count("context_length", "context length"),
        "vocabulary": len(tokens) if isinstance(tokens, list) else tokens,
    }


def _sizes(tensors: Mapping[str, gguf.Tensor], layers: int) -> dict[str, Any]:
    """Return the bytes of each layer, of the input, and of the output."""
    layer_bytes, input_bytes, output_bytes = [0] * layers, 0, 0
    for name, tensor in tensors.items():
        match = re.match(r"(?:enc\.)?blk\.([0-9]{1,9})[0-9]*\.", name)
        if match and int(match.group(1)) >= layers:
            raise gguf.GGUFError(
                f"is refused: it claims {layers} layers, but tensor {gguf.quote(name)} belongs to a layer beyond them"
            )
        if match:
            layer_bytes[int(match.group(1))] += tensor.bytes
        elif name.startswith("token_embd"):
            input_bytes += tensor.bytes
        else:
            output_bytes += tensor.bytes
    if "output.weight" not in tensors:
        output_bytes += tensors["token_embd.weight"].bytes if "token_embd.weight" in tensors else 0
    return {"layer_bytes": layer_bytes, "input_bytes": input_bytes, "output_bytes": output_bytes}


def summarize(header: gguf.ModelHeader) -> dict[str, Any]:
    """Return the summary of a model. A draft model of layers for multi-token prediction also counts the layers of its main model, although its file lacks
    them (--mtp in convert_hf_to_gguf.py of build 11063).

    :returns: ``architecture``, ``name``, ``parameters``, ``quantisation``, ``layers``, ``width``, ``heads``, ``kv_heads``,
        ``key_dimension``, ``value_dimension``, ``context``, ``vocabulary``, ``keys`` (further keys that determine the cache) and, in
        bytes, ``layer_bytes`` (a list), ``input_bytes`` (the token embedding, which stays on the head), ``output_bytes`` (on the
        device of the last layer) and ``largest_tensor_bytes``; ``tensors`` (see group_tensors), ``files`` (``name`` and ``bytes`` of each)
        and ``bytes`` of all of them.
    :raises gguf.GGUFError: the model cannot be served; the message is the end of a sentence that begins with its path.
    """
    metadata, tensors = header.metadata, header.tensors
    architecture = metadata.get("general.architecture")
    kind = "mmproj" if architecture == "clip" else metadata.get("general.type")
    if isinstance(kind, str) and kind in REFUSAL_BY_KIND:
        raise gguf.GGUFError(REFUSAL_BY_KIND[kind])
    if not isinstance(architecture, str):
        raise gguf.GGUFError("is refused: it has no architecture")
    name, counts = metadata.get("general.name"), _counts(header, architecture)
    summary = {
        "architecture": printable(architecture),
        "name": printable((name if isinstance(name, str) else header.files[0]["name"])[:MAX_NAME_LENGTH]),
        "parameters": sum(tensor.elements for tensor in tensors.values()),
        "quantisation": _quantisation(metadata, tensors),
        **counts,
        "keys": _cache_keys(header, architecture, counts["layers"]),
        **_sizes(tensors, counts["layers"]),
        "largest_tensor_bytes": max((tensor.bytes for tensor in tensors.values()), default=0),
        "tensors": group_tensors(tensors),
        "chat_template": "tokenizer.chat_template" in metadata,
        "files": header.files,
        "bytes": sum(file["bytes"] for file in header.files),
    }
    try:
        parse(summary)
    except Mismatch as error:
        raise gguf.GGUFError(f"is refused: its {error}") from None
    return summary


CacheKeys: Any = Mapping[Annotated[str, CACHE_KEYS], KeyValue]


def parse(data: Any) -> ModelSummary:
    """Convert the result of ``summarize`` to a ModelSummary.

    :raises Mismatch: the data is invalid, or contradicts itself.
    """
    summary = typed_json.parse(ModelSummary, {**data, "keys": []} if isinstance(data, Mapping) else data)
    try:
        keys: Mapping[str, KeyValue] = typed_json.parse(CacheKeys, data.get("keys") or {})
    except Mismatch as error:
        raise Mismatch(error.reason, f".keys{error.path}") from None
    summary = summary._replace(keys=tuple(keys.items()))
    layers, expert_bytes = summary.layers, summary.expert_bytes or summary.layer_bytes
    if len(summary.layer_bytes) != layers:
        raise Mismatch(f"has the sizes of {len(summary.layer_bytes)} layers, not {layers}", ".layer_bytes")
    if not any(summary.layer_bytes):
        raise Mismatch("has only layers without weights", ".layer_bytes")
    if summary.tensors == ():
        raise Mismatch("is empty, although the layers have weights", ".tensors")
    if len(expert_bytes) != layers or any(experts > size for experts, size in zip(expert_bytes, summary.layer_bytes)):
        raise Mismatch(f"does not have the sizes of the experts in {layers} layers", ".expert_bytes")
    if any(layer >= layers for group in summary.tensor_groups for layer in group.layers or ()):
        raise Mismatch(f"contains a layer beyond the {layers} layers", ".tensors")
    if _has_experts(summary) and not keys.get("expert_count"):
        raise Mismatch("is missing, so all experts would count for each token", ".keys.expert_count")
    return summary


def _has_experts(summary: ModelSummary) -> bool:
    """Return whether the architecture, the names of tensors, or the bytes of experts indicate experts."""
    has_expert_tensors = any("_exps." in group.name for group in summary.tensor_groups)
    return has_expert_tensors or "moe" in summary.architecture or any(summary.expert_bytes)

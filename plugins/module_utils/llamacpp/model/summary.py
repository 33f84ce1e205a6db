# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Typed form of the result of header_summary.summarize."""

from typing import Annotated, NamedTuple, Optional, Union

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import TEXT_LIMIT, Number, Size, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf

MAX_LAYERS = 512
"""Maximum number of layers that llama.cpp and ik_llama.cpp load: LLAMA_MAX_LAYERS in llama-hparams.h."""
Name = Annotated[str, Text(max_length=TEXT_LIMIT)]
Count = Annotated[int, Number(1, gguf.MAX_INT32)]
CountOrZero = Annotated[int, Number(0, gguf.MAX_INT32)]
KeyValue = Union[CountOrZero, tuple[CountOrZero, ...]]
"""Value of a key of the header: a single value, or a value for each layer."""
_DIFFUSION_REASON = "a diffusion model, which llama-server does not support: use an autoregressive model"
_SPEECH_REASON = "a speech model, which only llama-tts supports: use a model that generates text"
_DRAFT_REASON = "a draft model: set llama_model_draft to this file, and serve the model for which it predicts tokens"
REFUSALS = {
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION_REASON),
    "t5": "an encoder-decoder model, which llama-server does not support: use a decoder-only model",
    "clip": "a projector: set llama_model_mmproj to this file, and serve the model for which it encodes images or sound",
    "wavtokenizer-dec": "a vocoder, which llama-server does not support: use a model that generates text or embeddings",
    **dict.fromkeys(("pockettts", "qwen3tts"), _SPEECH_REASON),
    **dict.fromkeys(("dflash", "dflash-draft", "eagle3", "gemma4-assistant", "gemma4_mtp"), _DRAFT_REASON),
}
"""Reason and remedy for each architecture that llama-server does not serve (llm_arch_is_diffusion and llama_model_has_encoder of build 11434)."""
_EMBEDDING_ARCHITECTURES = """
bert eurobert gemma-embedding gemma-embedding2 jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert nomic-bert-moe t5encoder
"""
EMBEDDING_ARCHITECTURES = frozenset(_EMBEDDING_ARCHITECTURES.split())
"""Architectures that only produce embeddings; other embedding models have a pooling type in the header."""
RANK_POOLING = 4
"""``pooling_type`` of a model for reranking (LLAMA_POOLING_TYPE_RANK); 0 means no pooling."""


class TensorGroup(NamedTuple):
    """Tensors that differ only in their layer."""

    name: Name
    """Name with ``*`` instead of the layer."""
    type: Name
    shape: tuple[Annotated[int, Number(1)], ...]
    bytes: Annotated[int, Number(1)]
    """Bytes of each tensor."""
    layers: Optional[tuple[int, ...]]
    """Layers that have such a tensor; None for a tensor outside the layers."""

    @property
    def tensor_count(self) -> int:
        """Number of tensors: one per layer, or a single tensor outside the layers."""
        return 1 if self.layers is None else len(self.layers)


class ModelFile(NamedTuple):
    name: Annotated[str, Text(max_length=1024)]
    bytes: Size


class ModelSummary(NamedTuple):
    """Summary of a model's header; header_summary.summarize explains the fields."""

    architecture: Name
    name: Name
    layers: Annotated[int, Number(1, MAX_LAYERS)]
    width: Count
    heads: Count
    kv_heads: Count
    key_dimension: Count
    value_dimension: Count
    context: Count
    vocabulary: Count
    layer_bytes: tuple[Size, ...]
    input_bytes: Size
    output_bytes: Size
    keys: tuple[tuple[str, KeyValue], ...] = ()
    """Names of keys without the architecture, and their values."""
    tensors: Optional[tuple[TensorGroup, ...]] = None
    """Groups of tensors; None for a summary without names of tensors."""
    expert_bytes: tuple[Size, ...] = ()
    """Bytes of the experts in each layer, for a summary without names of tensors."""
    largest_tensor_bytes: Optional[Size] = None
    parameters: Optional[Annotated[int, Number(1)]] = None
    bytes: Optional[Size] = None
    """Bytes of all files."""
    files: tuple[ModelFile, ...] = ()
    chat_template: Optional[bool] = None
    """Whether the file has a chat template; None if unknown."""

    @property
    def tensor_groups(self) -> tuple[TensorGroup, ...]:
        return self.tensors or ()

    @property
    def pooling_option(self) -> Optional[str]:
        """Option of llama-server for a model that produces embeddings or reranks; None for a model that generates text."""
        pooling_type = self.number("pooling_type") or 0
        if pooling_type == RANK_POOLING:
            return "--reranking"
        return "--embeddings" if pooling_type or self.architecture in EMBEDDING_ARCHITECTURES else None

    @property
    def size(self) -> int:
        """Bytes of its files, or of its tensors if its files are unknown."""
        return self.bytes or sum(self.layer_bytes) + self.input_bytes + self.output_bytes

    @property
    def active_expert_share(self) -> float:
        """Share of the experts' tensors that a token reads."""
        count, used_count = self.number("expert_count") or 0, self.number("expert_used_count") or 0
        return min(1.0, used_count / count) if count and used_count else 1.0

    def number(self, key: str) -> Optional[int]:
        """Return the single value of a key; None if it is missing or has a value per layer."""
        value = dict(self.keys).get(key)
        return value if isinstance(value, int) else None

    def listed_values(self, key: str) -> Optional[tuple[int, ...]]:
        """Return the values of a key that has a value per layer, or None."""
        value = dict(self.keys).get(key)
        return value if isinstance(value, tuple) else None

    @property
    def layer_heads(self) -> list[int]:
        """Number of heads in each layer."""
        return self.values_by_layer("attention.head_count", self.heads)

    @property
    def layer_kv_heads(self) -> list[int]:
        """Number of heads with keys and values in each layer."""
        return self.values_by_layer("attention.head_count_kv", self.kv_heads)

    def values_by_layer(self, key: str, default: int = 0) -> list[int]:
        """Return the value of a key for each layer: its single value, ``default`` if the key is missing, or its list, padded with zeros."""
        listed_values = self.listed_values(key)
        if listed_values is None:
            number = self.number(key)
            return [default if number is None else number] * self.layers
        return [*listed_values[: self.layers], *[0] * (self.layers - len(listed_values))]

    def without_key(self, key: str) -> "ModelSummary":
        return self._replace(keys=tuple(entry for entry in self.keys if entry[0] != key))

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What planning knows of a model: the JSON of header_summary.summarize as values."""

from typing import Annotated, NamedTuple, Optional, Union

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import LONGEST, Number, Size, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf

MAX_LAYERS = 512
"""Of a model that llama.cpp loads: LLAMA_MAX_LAYERS in llama-hparams.h and of ik_llama.cpp."""
Name = Annotated[str, Text(longest=LONGEST)]
Count = Annotated[int, Number(1, gguf.MAX_COUNT)]
Number0 = Annotated[int, Number(0, gguf.MAX_COUNT)]
KeyValue = Union[Number0, tuple[Number0, ...]]
"""Value of a key of the header: one for the model, or one for each layer."""


_DIFFUSION = (
    "a diffusion model, whose answers llama-server does not compute: use a model that predicts one token after another"
)
_SPEECH = "a model for speech, which llama-tts makes and llama-server does not: use a model that generates text"
_DRAFT = "a draft model: set llama_model_draft to it, and serve the model for which it predicts tokens"
NOT_SERVED = {
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    "t5": "an encoder with a decoder, and llama-server runs no encoder for its answers: use a model that is a decoder alone",
    "clip": "a projector: set llama_model_mmproj to it, and serve the model for which it reads images or sound",
    "wavtokenizer-dec": "a vocoder, which llama-server does not run: use a model that generates text or embeddings",
    **dict.fromkeys(("pockettts", "qwen3tts"), _SPEECH),
    **dict.fromkeys(("dflash", "dflash-draft", "eagle3", "gemma4-assistant", "gemma4_mtp"), _DRAFT),
}
"""Architecture of a model that llama-server does not serve → what it is. llm_arch_is_diffusion and llama_model_has_encoder of build 11434."""
_EMBEDS = """
bert eurobert gemma-embedding gemma-embedding2 jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert nomic-bert-moe t5encoder
"""
EMBEDS = frozenset(_EMBEDS.split())
"""Architectures of models that make embeddings and no text; of others the header says how they pool."""
RANK = 4
"""``pooling_type`` of a model for reranking, LLAMA_POOLING_TYPE_RANK; 0 is none."""


class TensorGroup(NamedTuple):
    """Tensors that differ in nothing but their layer."""

    name: Name
    """With ``*`` in place of the layer."""
    type: Name
    shape: tuple[Annotated[int, Number(1)], ...]
    bytes: Annotated[int, Number(1)]
    """Of each of them."""
    layers: Optional[tuple[int, ...]]
    """None of a tensor outside the layers."""

    @property
    def how_many(self) -> int:
        """One outside the layers, else one in each."""
        return 1 if self.layers is None else len(self.layers)


class NamedFile(NamedTuple):
    """A file of a model."""

    name: Annotated[str, Text(longest=1024)]
    bytes: Size


class ModelSummary(NamedTuple):
    """The header of a model. header_summary.summarize says what the fields mean."""

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
    """Name of a key without the architecture, and its value."""
    tensors: Optional[tuple[TensorGroup, ...]] = None
    """None of a summary without their names."""
    expert_bytes: tuple[Size, ...] = ()
    """Of each layer, where there are no names: bytes of which a token reads those of the chosen experts."""
    largest_tensor_bytes: Optional[Size] = None
    parameters: Optional[Annotated[int, Number(1)]] = None
    bytes: Optional[Size] = None
    """Of all files."""
    files: tuple[NamedFile, ...] = ()

    @property
    def named_tensors(self) -> tuple[TensorGroup, ...]:
        return self.tensors or ()

    @property
    def switch(self) -> Optional[str]:
        """The option with which llama-server serves it as what it is; None of a model that generates text."""
        pools = self.number("pooling_type") or 0
        if pools == RANK:
            return "--reranking"
        return "--embeddings" if pools or self.architecture in EMBEDS else None

    @property
    def size(self) -> int:
        """Bytes of its files, or of its tensors where those are not known."""
        return self.bytes or sum(self.layer_bytes) + self.input_bytes + self.output_bytes

    def number(self, key: str) -> Optional[int]:
        """The one value of a key; None where there is none, or one for each layer."""
        value = dict(self.keys).get(key)
        return value if isinstance(value, int) else None

    def listed(self, key: str) -> Optional[tuple[int, ...]]:
        """The values of a key that has one for each layer."""
        value = dict(self.keys).get(key)
        return value if isinstance(value, tuple) else None

    def by_layer(self, key: str, default: int = 0) -> list[int]:
        """The value of a key in each layer: the same for all, ``default`` without the key, or those that are listed, and 0 where the list ends."""
        listed = self.listed(key)
        if listed is None:
            number = self.number(key)
            return [default if number is None else number] * self.layers
        return [*listed[: self.layers], *[0] * (self.layers - len(listed))]

    def without_key(self, key: str) -> "ModelSummary":
        return self._replace(keys=tuple(pair for pair in self.keys if pair[0] != key))

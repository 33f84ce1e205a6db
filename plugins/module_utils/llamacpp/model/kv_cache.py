# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Size of llama.cpp's cache for each layer of a model: keys, values, and states of recurrent layers.

Sources in build 11063: load_arch_hparams of each architecture, create_memory of llama-model.cpp, and the constructors in llama-kv-cache*.cpp and
llama-memory-recurrent.cpp. Sizes for ik_llama.cpp are upper bounds from llama_kv_cache_init of src/llama.cpp in its commit 4840.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE

NEWEST_MEASURED_BUILD = 11669
"""Newest build whose logged buffers all match these sources: Debian's llama.cpp 0.7.0."""
CACHE_TYPES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes of an element for each type of the KV cache."""
UNQUANTISED_TYPES = ("f32", "f16", "bf16")

DEFAULT_BATCH, DEFAULT_MICRO_BATCH = 2048, 512
"""llama-server's defaults: tokens in a batch, and tokens that a device computes at once."""

_UNIFORM_ARCHITECTURES = """
apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell cogvlm command-r dbrx deci deepseek
deepseek2 deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone falcon gemma glm4 glm4moe gpt2 gptneox granite granitemoe grok grovemoe
hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais jais2 llama maincoder minicpm minicpm3 minimax-m2 mistral3 mistral4 mpt
nemotron olmo olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe
qwen3vl qwen3vlmoe refact seed_oss smollm3 stablelm starcoder starcoder2 talkie xverse
"""
UNIFORM_ARCHITECTURES = frozenset(_UNIFORM_ARCHITECTURES.split())
"""Architectures whose layers all have full attention: no windows, and no recurrent layers."""


class WindowPattern(NamedTuple):
    """Pattern of the layers that attend only to a sliding window."""

    period: int | None
    """Number of layers in a group in which a single layer attends to everything; None if the file lists the layers."""
    is_dense_first: bool = False
    """Whether that layer is the first of the group instead of the last."""
    size: int | None = None
    """Size of the window if the file lacks it."""
    is_fixed: bool = False
    """Whether ``size`` overrides the file."""


WINDOWS = {
    "afmoe": WindowPattern(4),
    "cohere2": WindowPattern(4),
    "cohere2moe": WindowPattern(4, is_dense_first=True),
    "exaone-moe": WindowPattern(4, size=128),
    "exaone4": WindowPattern(4, size=4096),
    "gemma2": WindowPattern(2, size=4096),
    "gemma3": WindowPattern(6),
    "gemma3n": WindowPattern(5),
    "gemma4": WindowPattern(None),
    "gpt-oss": WindowPattern(2),
    "granite_swa": WindowPattern(None),
    "laguna": WindowPattern(4, is_dense_first=True),
    "llama4": WindowPattern(4, size=8192, is_fixed=True),
    "maple": WindowPattern(None),
    "mellum": WindowPattern(4),
    "mimo2": WindowPattern(None),
    "muse-glimmer": WindowPattern(4),
    "olmo2": WindowPattern(4),
    "plamo3": WindowPattern(8),
    "smallthinker": WindowPattern(4, is_dense_first=True, size=4096, is_fixed=True),
    "spark2_5": WindowPattern(None),
    "step35": WindowPattern(None),
}
SIZED_WINDOW_ARCHITECTURES = frozenset(("smallthinker",))
"""Architectures that have a window only if the file contains its size, although llama.cpp ignores that number."""
EXAONE4_LAYERS = 64
"""Number of layers of the only exaone4 model with a window."""
GEMMA3N_SHARED_START = 20
"""Number of the first gemma3n layer that uses the cache of an earlier layer."""

RECURRENT_ARCHITECTURES = frozenset(("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"))
"""Architectures in which every layer has a state and none a cache."""

_NO_CACHE = "bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 modern-bert neo-bert nomic-bert nomic-bert-moe"
NO_CACHE_ARCHITECTURES = frozenset(_NO_CACHE.split())
"""Architectures for which llama.cpp creates no cache: create_memory in llama-model.cpp of build 11063. ik_llama.cpp creates one."""

HEADLESS_ARCHITECTURES = frozenset(
    ("granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "plamo2")
)
"""Architectures whose recurrent layers are the layers without KV heads."""
INTERVAL_ARCHITECTURES = frozenset(("qwen3next", "qwen35", "qwen35moe"))
"""Architectures with recurrent layers except for one attention layer in each interval, by default four."""
CACHE_AND_STATE_ARCHITECTURES = frozenset(("falcon-h1",))
"""Architectures in which every layer has a cache and a state."""
HYBRID_ARCHITECTURES = HEADLESS_ARCHITECTURES | INTERVAL_ARCHITECTURES | CACHE_AND_STATE_ARCHITECTURES

LATENT_ARCHITECTURES = frozenset(("deepseek2", "kimi-linear", "mistral4"))
"""Architectures that cache one compressed vector per token (MLA) if the file has the size of the expanded heads."""
DEFAULT_LATENT_MODE = 3
"""Default of ``-mla`` in ik_llama.cpp: gpt_params in common/common.h."""


class LayerCache(NamedTuple):
    keys: int = 0
    """Elements of a token's keys."""
    values: int = 0
    is_windowed: bool = False
    state_bytes: int = 0
    """Bytes of the state for each parallel request."""


class CacheSettings(NamedTuple):
    """Settings of llama-server that change the cache."""

    context: int
    parallel: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: str | None = None
    """on, off or auto; None for llama-server's default."""
    unified: bool = False
    full_window: bool = False
    micro_batch: int = DEFAULT_MICRO_BATCH
    batch: int = DEFAULT_BATCH
    fork: str = MAINLINE
    latent_attention: int | None = None
    """``-mla`` of ik_llama.cpp: 0 caches full heads, 1 compressed keys and values, 2 and 3 only compressed keys."""
    attention_batch: int | None = None
    """``-amb`` of ik_llama.cpp: limit of the scores in MiB; 0 for no limit."""
    offload: bool = True
    """Whether each layer's cache is on its device instead of the head's memory."""
    every_output: bool = False
    """Whether the server computes the output of every token, as for embeddings, instead of only the last token of a slot."""

    @property
    def tokens(self) -> int:
        """Number of tokens that a device computes at once."""
        return min(self.micro_batch, self.batch, self.context)

    def uses_flash_attention(self) -> bool:
        """Return whether values are stored for flash attention. Quantised values require it, and ``auto`` starts with it."""
        if self.type_v not in UNQUANTISED_TYPES:
            return True
        return self.flash_attention != "off"


def is_known_build(build: int) -> bool:
    """Return whether a build is at most as new as the newest measured build: caches of newer builds may differ."""
    return build <= NEWEST_MEASURED_BUILD


def pad(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def windowed_flags(summary: ModelSummary) -> list[bool]:
    """Return for each layer whether it attends only to a sliding window."""
    layers, architecture = summary.layers, summary.architecture
    if architecture in ("lfm2", "lfm2moe") and window_size(summary):
        return [heads > 0 for heads in summary.layer_kv_heads]
    if not window_size(summary):
        return [False] * layers
    window, pattern = WINDOWS[architecture], "attention.sliding_window_pattern"
    if summary.listed_values(pattern) is not None:
        return [bool(entry) for entry in summary.values_by_layer(pattern)]
    period, stored_pattern = window.period or 0, summary.number(pattern)
    period = period if stored_pattern is None else stored_pattern
    mtp_start = layers - count_mtp_layers(summary)
    dense_index = 0 if window.is_dense_first else period - 1
    return [index < mtp_start and (not period or index % period != dense_index) for index in range(layers)]


def window_size(summary: ModelSummary) -> int:
    """Return the tokens of the sliding window; 0 without a window."""
    size, architecture = summary.number("attention.sliding_window"), summary.architecture
    if architecture in ("lfm2", "lfm2moe"):
        return size or 0 if architecture == "lfm2" else 0
    window = WINDOWS.get(architecture)
    if window is None or (architecture == "exaone4" and summary.layers != EXAONE4_LAYERS):
        return 0
    if (architecture in SIZED_WINDOW_ARCHITECTURES and not size) or size == 0:
        return 0
    return window.size if window.size and (window.is_fixed or size is None) else size or 0


def count_mtp_layers(summary: ModelSummary) -> int:
    """Return the number of last layers that predict further tokens. llama-server does not load them by default."""
    return summary.number("nextn_predict_layers") or 0


def _state_bytes(summary: ModelSummary) -> int:
    """Return the bytes of the states of a recurrent layer and of its convolution, in 32-bit floats."""
    width, convolution = summary.width, summary.number("ssm.conv_kernel") or 0
    if size := summary.number("wkv.head_size"):
        shift_count = summary.number("token_shift_count")
        return 4 * width * ((2 if shift_count is None else shift_count) + size)
    if size := summary.number("shortconv.l_cache"):
        return 4 * width * (size - 1)
    if size := summary.number("kda.head_dim"):
        heads = summary.layer_heads[0]
        return 4 * heads * size * (3 * (convolution - 1 if convolution else 3) + size)
    inner_width, state_size, groups = (
        summary.number(f"ssm.{key}") or 0 for key in ("inner_size", "state_size", "group_count")
    )
    return 4 * (max(0, convolution - 1) * (inner_width + 2 * groups * state_size) + state_size * inner_width)


def recurrent_flags(summary: ModelSummary) -> list[bool]:
    """Return for each layer whether it has a state; true for unknown architectures."""
    layers, architecture = summary.layers, summary.architecture
    if architecture in RECURRENT_ARCHITECTURES or architecture in CACHE_AND_STATE_ARCHITECTURES:
        return [True] * layers
    if architecture in HEADLESS_ARCHITECTURES:
        ffn_sizes = summary.values_by_layer("feed_forward_length")
        has_ffn_layers = architecture.startswith("nemotron_h")
        return [not heads and not (has_ffn_layers and size) for heads, size in zip(summary.layer_kv_heads, ffn_sizes)]
    if architecture in INTERVAL_ARCHITECTURES:
        if summary.listed_values("attention.recurrent_layers") is not None:
            return [bool(entry) for entry in summary.values_by_layer("attention.recurrent_layers")]
        interval = summary.number("full_attention_interval") or 4
        return [(index + 1) % interval != 0 for index in range(layers)]
    return [not is_known_architecture(summary) and architecture not in NO_CACHE_ARCHITECTURES] * layers


def _cached_flags(summary: ModelSummary) -> list[bool]:
    """Return for each layer whether it has its own keys and values."""
    layers, architecture = summary.layers, summary.architecture
    end = layers - count_mtp_layers(summary)
    if architecture == "gemma3n":
        end = min(end, GEMMA3N_SHARED_START)
    if architecture == "gemma4":
        end -= summary.number("attention.shared_kv_layers") or 0
    if architecture in RECURRENT_ARCHITECTURES | NO_CACHE_ARCHITECTURES:
        return [False] * layers
    replaces_cache = architecture in HEADLESS_ARCHITECTURES or architecture in INTERVAL_ARCHITECTURES
    return [
        index < end and not (replaces_cache and has_state) for index, has_state in enumerate(recurrent_flags(summary))
    ]


def is_latent(summary: ModelSummary) -> bool:
    """Return whether the file uses llama.cpp's form of MLA: compressed keys, and the size of the expanded heads."""
    return summary.architecture in LATENT_ARCHITECTURES and bool(summary.number("attention.key_length_mla"))


def layer_caches(summary: ModelSummary, uses_flash: bool, has_latent_values: bool = False) -> list[LayerCache]:
    """Return the cache of each layer.

    :param uses_flash: whether values are stored for flash attention.
    :param has_latent_values: whether values are also cached if keys are compressed.
    """
    heads, window_flags, state_flags = summary.layer_kv_heads, windowed_flags(summary), recurrent_flags(summary)
    cache_flags, state_bytes = _cached_flags(summary), _state_bytes(summary)
    key, value = summary.key_dimension, summary.value_dimension
    windowed_sizes = [summary.number(f"attention.{name}_length_swa") for name in ("key", "value")]
    windowed_key, windowed_value = (
        size if windowed_size is None else windowed_size for windowed_size, size in zip(windowed_sizes, (key, value))
    )
    key_lengths, value_lengths = {False: key, True: windowed_key}, {False: value, True: windowed_value}
    value_sizes = [value_lengths[is_windowed] * count for is_windowed, count in zip(window_flags, heads)]
    if not uses_flash:
        value_sizes = [max(value_sizes)] * len(value_sizes)
    if is_latent(summary) and not has_latent_values:
        value_sizes = [0] * len(value_sizes)
    mtp_start = summary.layers - count_mtp_layers(summary)
    return [
        LayerCache(
            key_lengths[window_flags[index]] * heads[index] if cache_flags[index] else 0,
            value_sizes[index] if cache_flags[index] else 0,
            window_flags[index],
            state_bytes if state_flags[index] and index < mtp_start else 0,
        )
        for index in range(summary.layers)
    ]


def checkpointed_flags(summary: ModelSummary, settings: CacheSettings) -> list[bool]:
    """Return for each layer whether context checkpoints contain its cache: windows and states cannot be truncated."""
    layers = zip(windowed_flags(summary), recurrent_flags(summary))
    return [(is_windowed and not settings.full_window) or is_recurrent for is_windowed, is_recurrent in layers]


def checkpoint_sizes(summary: ModelSummary, settings: CacheSettings, build: int, tokens: int) -> list[int]:
    """Return the bytes of each layer in a checkpoint after this number of tokens; 0 for layers that checkpoints do not contain."""
    checkpoint_settings = settings._replace(context=min(tokens, window_size(summary) or 1), parallel=1)
    layers = zip(sizes(summary, checkpoint_settings, build)[0], checkpointed_flags(summary, settings))
    return [size if is_contained else 0 for size, is_contained in layers]


@functools.lru_cache(maxsize=64)
def attention_costs(
    summary: ModelSummary, settings: CacheSettings, build: int, depth: int
) -> tuple[list[int], list[float]]:
    """Return for each layer the bytes of cache that a token reads (states count twice, as they are also written), and the multiplications of attention.

    :param depth: tokens before this token.
    """
    settings = settings._replace(context=depth, parallel=1)
    full_cells, window_cells = cell_counts(summary, settings)
    head_size = summary.key_dimension + summary.value_dimension
    layers = zip(sizes(summary, settings, build)[0], recurrent_flags(summary))
    return [size * (1 + is_recurrent) for size, is_recurrent in layers], [
        float(heads * head_size * (window_cells if layer.is_windowed else full_cells)) if layer.keys else 0.0
        for heads, layer in zip(summary.layer_heads, layer_caches(summary, True))
    ]


def cell_counts(summary: ModelSummary, settings: CacheSettings) -> tuple[int, int]:
    """Return the capacity in tokens of the cache of a layer without and with a window; the size of a micro-batch if there is no cache."""
    context, parallel, streams = settings.context, settings.parallel, 1 if settings.unified else settings.parallel
    visible_tokens = window_size(summary) * (parallel if settings.unified else 1) + settings.tokens
    if summary.architecture in NO_CACHE_ARCHITECTURES and settings.fork == MAINLINE:
        return settings.tokens, settings.tokens
    stream_cells = pad(pad(context, 256) // streams, 256)
    window_cells = pad(min(stream_cells, visible_tokens), 256)
    return stream_cells * streams, (stream_cells if settings.full_window else window_cells) * streams


def is_known_architecture(summary: ModelSummary) -> bool:
    """Return whether the caches of this architecture are known."""
    return summary.architecture in UNIFORM_ARCHITECTURES | set(WINDOWS) | RECURRENT_ARCHITECTURES | HYBRID_ARCHITECTURES


def _sizes(summary: ModelSummary, settings: CacheSettings, has_latent_values: bool = False) -> list[int]:
    full_cells, window_cells = cell_counts(summary, settings)
    key_bytes, value_bytes = CACHE_TYPES[settings.type_k], CACHE_TYPES[settings.type_v]
    return [
        int((window_cells if layer.is_windowed else full_cells) * (layer.keys * key_bytes + layer.values * value_bytes))
        + layer.state_bytes * settings.parallel
        for layer in layer_caches(summary, settings.uses_flash_attention(), has_latent_values)
    ]


def last_tensor_bytes(summary: ModelSummary, settings: CacheSettings) -> int:
    """Return the bytes of the largest tensor at the end of a layer's cache: its values, or else its keys."""
    full_cells, window_cells = cell_counts(summary, settings)
    key_bytes, value_bytes = CACHE_TYPES[settings.type_k], CACHE_TYPES[settings.type_v]
    return max(
        int(
            (window_cells if cache.is_windowed else full_cells) * (cache.values * value_bytes or cache.keys * key_bytes)
        )
        for cache in layer_caches(summary, settings.uses_flash_attention())
    )


def is_cache_split(summary: ModelSummary, settings: CacheSettings, backend: str) -> bool:
    """Return whether llama-server crashes when it fetches the KV cache of a device: if a layer's last tensor is larger than a buffer, the views after it
    get no data (ggml_backend_alloc_ctx_tensors_from_buft, seen with builds 11063 and 11434)."""
    if settings.fork != MAINLINE or not settings.offload:
        return False
    return 0 < backends.BY_NAME[backend].max_buffer_bytes < last_tensor_bytes(summary, settings)


def latent_mode(settings: CacheSettings) -> int:
    """Return ``-mla`` of ik_llama.cpp, or its default."""
    return DEFAULT_LATENT_MODE if settings.latent_attention is None else settings.latent_attention


def _latent_token_bytes(summary: ModelSummary, settings: CacheSettings) -> tuple[float, float] | None:
    """Return the bytes of a token's keys and values in a layer of ik_llama.cpp with MLA; None if it caches full heads.

    Without flash attention a file that lacks attn_kv_b gets ``-mla 1``, which also caches values.
    """
    mode = latent_mode(settings)
    rank, rope_size = (summary.number("attention.kv_lora_rank") or 0, summary.number("rope.dimension_count") or 0)
    is_compressed = is_latent(summary) and summary.kv_heads == 1
    if summary.architecture not in LATENT_ARCHITECTURES or not mode or not (is_compressed or (rank and rope_size)):
        return None
    key, value = (summary.key_dimension, summary.value_dimension) if is_compressed else (rank + rope_size, rank)
    key_bytes, value_bytes = CACHE_TYPES[settings.type_k], CACHE_TYPES[settings.type_v]
    if settings.uses_flash_attention():
        return key * key_bytes, 0.0
    has_kv_b = any(group.name == "blk.*.attn_kv_b.weight" for group in summary.tensor_groups)
    return key * max(key_bytes, value_bytes), 0.0 if mode > 1 and has_kv_b else value * value_bytes


def _ik_llama_sizes(summary: ModelSummary, settings: CacheSettings) -> list[int]:
    """Return upper bounds: one cache serves all requests, and every layer, including those that predict further tokens, stores the whole context."""
    one_stream_settings, layers = settings._replace(unified=True, full_window=True), summary.layers
    summary = summary.without_key("attention.key_length_swa").without_key("attention.value_length_swa")
    token_bytes = _latent_token_bytes(summary, settings)
    if is_latent(summary) and summary.kv_heads == 1:
        key, value = (summary.number(f"attention.{name}_length_mla") or 0 for name in ("key", "value"))
        summary = summary._replace(key_dimension=key, value_dimension=value, kv_heads=summary.heads, keys=())
    else:
        summary = summary.without_key("nextn_predict_layers")
    if summary.architecture in NO_CACHE_ARCHITECTURES:
        summary = summary._replace(architecture="llama")
    if token_bytes is None:
        return _sizes(summary, one_stream_settings, True)
    return [int(cell_counts(summary, one_stream_settings)[0] * sum(token_bytes))] * layers


def sizes(summary: ModelSummary, settings: CacheSettings, build: int) -> tuple[list[int], bool]:
    """Return the bytes of each layer's cache, and whether they are exact or an upper bound."""
    if settings.fork == IK_LLAMA:
        return _ik_llama_sizes(summary, settings), False
    is_known = is_known_architecture(summary) or summary.architecture in NO_CACHE_ARCHITECTURES
    return _sizes(summary, settings), is_known and is_known_build(build)

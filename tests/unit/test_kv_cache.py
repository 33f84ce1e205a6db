"""The cache of each layer; tests/integration/test_placement.py holds it against the log of the real server."""

import re
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    compute_buffers,
    header_summary,
    kv_cache,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import TensorGroup
from support import models

MIB = 1024 * 1024


def model(architecture, layers=6, **keys):
    return models.model(architecture, layers, keys)


def sizes(summary, build=11063, **settings):
    return kv_cache.sizes(summary, kv_cache.CacheSettings(**{"context": 4096, **settings}), build)


def cells(summary, **settings):
    """Tokens for which each layer has room, by 16-bit floats."""
    found, exact = sizes(summary, **settings)
    assert exact
    return [size // (2 * 512) for size in found]


def test_cache_of_a_layer_is_that_of_llama_cpp():
    """16 layers of 128 at 512 tokens took 4 MiB in 16-bit floats, by llama-server's own log."""
    summary = models.known_answer_model(16, 128)
    assert sum(sizes(summary, context=512)[0]) == 4 * MIB
    assert sizes(summary, context=1) == sizes(summary, context=256)
    assert sizes(summary, type_k="q8_0", type_v="q8_0")[0][0] / sizes(summary)[0][0] == 34 / 64


WINDOW = {"attention__sliding_window": 512}
OF_LATENT = {"attention__key_length_mla": 192, "attention__value_length_mla": 128}
SHARED = {**WINDOW, "attention__sliding_window_pattern": [1, 0, 1, 0, 1, 0], "attention__shared_kv_layers": 2}
NARROW = {**SHARED, "attention__key_length_swa": 32, "attention__value_length_swa": 32}
FURTHER = {"nextn_predict_layers": 1}


@pytest.mark.parametrize(
    "architecture, keys, settings, expected",
    [
        # The context is rounded up for each request.
        ("llama", {}, {"context": 1000}, [1024] * 6),
        ("llama", {}, {"context": 1000, "parallel": 3}, [3 * 512] * 6),
        ("llama", {}, {"context": 1000, "parallel": 3, "unified": True}, [1024] * 6),
        ("falcon-h1", {}, {"parallel": 2}, [4096] * 6),
        # Layers with a sliding window hold the window and one batch.
        ("gemma3", WINDOW, {}, [1024] * 5 + [4096]),
        ("gemma3", WINDOW, {"context": 600}, [768] * 6),
        ("gemma3", WINDOW, {"parallel": 2}, [2 * 1024] * 5 + [2 * 2048]),
        ("gemma3", WINDOW, {"parallel": 2, "unified": True}, [1536] * 5 + [4096]),
        ("gemma3", WINDOW, {"micro_batch": 64}, [768] * 5 + [4096]),
        ("gemma3", WINDOW, {"full_window": True}, [4096] * 6),
        # Latent attention caches no values.
        ("deepseek2", OF_LATENT, {}, [2048] * 6),
        ("deepseek2", {}, {}, [4096] * 6),
        # Layers that use the cache of others, or predict further tokens, have none.
        ("gemma3n", {**WINDOW, "layers": 24}, {"context": 512}, [512] * 20 + [0] * 4),
        ("gemma4", SHARED, {"context": 512}, [512] * 4 + [0] * 2),
        ("gemma4", NARROW, {"context": 512}, [256, 512] * 2 + [0] * 2),
        ("glm4moe", FURTHER, {}, [4096] * 5 + [0]),
        ("exaone-moe", {**FURTHER, **WINDOW}, {}, [1024] * 3 + [4096, 1024, 0]),
    ],
)
def test_cells_of_each_layer(architecture, keys, settings, expected):
    assert cells(model(architecture, **keys), **settings) == expected


WITH_A_SIZE = {"xxxoxx": "olmo2 afmoe mellum muse-glimmer cohere2", "oxxxox": "laguna smallthinker"}
WITH_A_SIZE |= {"xoxoxo": "gpt-oss", "xxxxxx": "plamo3", "oooooo": "phi3"}
WITHOUT_A_SIZE = {"xoxoxo": "gemma2", "oooooo": "laguna smallthinker exaone4", "xxxoxx": "llama4"}
"""Which layers have a window → architectures whose file says how large it is, or does not."""


@pytest.mark.parametrize(
    "architecture, keys, windows",
    [
        *((name, WINDOW, windows) for windows, names in WITH_A_SIZE.items() for name in names.split()),
        *((name, {}, windows) for windows, names in WITHOUT_A_SIZE.items() for name in names.split()),
        ("granite_swa", {**WINDOW, "attention__sliding_window_pattern": [1, 1, 0, 1, 1, 0]}, "xxoxxo"),
        ("maple", {**WINDOW, "attention__sliding_window_pattern": [0, 1, 0, 1, 0, 1]}, "oxoxox"),
        ("spark2_5", {**WINDOW, "attention__sliding_window_pattern": [1, 0, 0, 1, 0, 0]}, "xooxoo"),
        ("step35", {**WINDOW, "attention__sliding_window_pattern": [0, 1, 1, 1, 0, 1]}, "oxxxox"),
        ("llama4", {"attention__sliding_window": 0}, "oooooo"),
        ("mimo2", {**WINDOW, "attention__sliding_window_pattern": [0, 1, 1, 0, 1, 1]}, "oxxoxx"),
        ("gemma3", {**WINDOW, "attention__sliding_window_pattern": 3}, "xxoxxo"),
        ("gemma3", {**WINDOW, "attention__sliding_window_pattern": [1, 0, 0, 0, 0, 0]}, "xooooo"),
        ("cohere2moe", {**WINDOW, "nextn_predict_layers": 1}, "oxxxoo"),
        ("lfm2", {**WINDOW, "attention__head_count_kv": [0, 4, 0, 4, 0, 0]}, "oxoxoo"),
    ],
)
def test_which_layers_have_a_window(architecture, keys, windows):
    found = kv_cache.windowed_flags(model(architecture, **keys))
    assert "".join("x" if window else "o" for window in found) == windows


def test_a_build_that_nobody_measured_is_a_bound():
    assert sizes(model("llama"), kv_cache.NEWEST_MEASURED_BUILD) == sizes(model("llama"))
    assert sizes(model("llama"), kv_cache.NEWEST_MEASURED_BUILD + 1) == (sizes(model("llama"))[0], False)


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert-moe", "jina-bert-v3", "modern-bert", "gemma-embedding"])
def test_models_for_embeddings_have_no_cache(architecture):
    summary = model(architecture)
    assert sizes(summary, context=65536) == ([0] * 6, True)
    assert not any(kv_cache.checkpointed_flags(summary, kv_cache.CacheSettings(4096)))
    assert all(sizes(summary, build=4840, fork="ik_llama.cpp")[0])
    long = kv_cache.CacheSettings(65536, every_output=True)
    bounds = [compute_buffers.buffer_bound(summary, one) for one in (long, long._replace(context=4096))]
    assert bounds[0] == bounds[1]


def test_an_unknown_architecture_is_a_bound():
    found, exact = sizes(model("unheard-of", ssm__state_size=16, ssm__inner_size=1024))
    assert not exact
    assert found == [size + 4 * 16 * 1024 for size in sizes(model("llama"))[0]]


MLA = {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
R1 = {"kv_heads": 1, "key_dimension": 576, "value_dimension": 512, "keys": tuple(MLA.items())}
"""DeepSeek R1 in llama.cpp's form: 512 values of a token and 64 that are rotated."""
Q8 = {"context": 16384, "type_k": "q8_0", "flash_attention": "on"}
WITH_WHOLE_MATRIX = {"tensors": (TensorGroup("blk.*.attn_kv_b.weight", "F16", (512, 512), 1 << 19, (0,)),)}


@pytest.mark.parametrize(
    "settings, more, expected",
    [
        ({**Q8, "latent_attention": 3}, {}, 583),
        ({**Q8, "latent_attention": 1}, {}, 583),
        ({"context": 16384, "type_k": "q8_0"}, {}, 583),
        ({**Q8, "latent_attention": 1, "flash_attention": "off"}, {}, 1098 + 976),
        ({**Q8, "latent_attention": 3, "flash_attention": "off"}, {}, 1098 + 976),
        ({**Q8, "latent_attention": 3, "flash_attention": "off"}, WITH_WHOLE_MATRIX, 1098),
        ({**Q8, "latent_attention": 1, "flash_attention": "off"}, WITH_WHOLE_MATRIX, 1098 + 976),
        (Q8, {}, 583),
        ({**Q8, "latent_attention": 0}, {}, 24888 + 31232),
        ({**Q8, "latent_attention": 3}, {"keys": (), "kv_heads": 128}, 74664 + 124928),
        (
            {**Q8, "latent_attention": 3},
            {"keys": (("attention.kv_lora_rank", 512), ("rope.dimension_count", 64)), "kv_heads": 128},
            583,
        ),
    ],
)
def test_ik_llama_caches_keys_alone_with_mla_and_flash_attention(settings, more, expected):
    """DeepSeek R1 at 16384 tokens: 61 layers of 576 elements in q8_0 are 583 MiB, values of 512 in f16 976 more."""
    summary = model("deepseek2")._replace(**{"layers": 61, "heads": 128, **R1, **more})
    found, exact = sizes(summary, fork="ik_llama.cpp", **settings)
    assert (round(sum(found) / MIB), exact) == (expected, False)


def test_ik_llama_keeps_the_whole_context_in_every_layer_once_for_all_requests():
    found, _exact = sizes(model("gemma3", **WINDOW), fork="ik_llama.cpp", context=4000, parallel=4)
    assert found == [2 * 512 * 4096] * 6
    found, _exact = sizes(model("glm4moe", nextn_predict_layers=1), fork="ik_llama.cpp")
    assert found == [2 * 512 * 4096] * 6


def test_without_flash_attention_values_are_as_wide_as_the_widest_layer():
    uneven = model("deci", attention__head_count_kv=[4, 2, 4, 4, 4, 0])
    assert cells(uneven) == [4096, 2048, 4096, 4096, 4096, 0]
    assert cells(uneven, flash_attention="off") == [4096, 3072, 4096, 4096, 4096, 2048]
    quantised = sizes(uneven, flash_attention="off", type_v="q8_0")
    assert quantised == sizes(uneven, type_v="q8_0")


def test_recurrent_layers_keep_a_state_for_each_request():
    mamba = model("mamba", ssm__conv_kernel=4, ssm__inner_size=1024, ssm__state_size=16)
    assert sizes(mamba) == ([4 * (3 * 1024 + 16 * 1024)] * 6, True)
    assert sizes(mamba, parallel=3)[0][0] == 3 * sizes(mamba)[0][0]
    rwkv = model("rwkv7", wkv__head_size=64)
    assert sizes(rwkv)[0][0] == 4 * 512 * (2 + 64)


def test_hybrids_keep_one_or_the_other_or_both():
    cache, _exact = sizes(model("llama"))
    state = 4 * 512 * 2
    lfm = model("lfm2", shortconv__l_cache=3, attention__head_count_kv=[0, 4, 0, 0, 4, 0])
    assert sizes(lfm)[0] == [state, cache[0], state, state, cache[0], state]
    ssm = {"ssm__conv_kernel": 4, "ssm__inner_size": 1024, "ssm__state_size": 16, "ssm__group_count": 2}
    mamba = 4 * (3 * (1024 + 2 * 2 * 16) + 16 * 1024)
    assert sizes(model("falcon-h1", **ssm))[0] == [cache[0] + mamba] * 6
    assert sizes(model("qwen3next", **ssm))[0] == [mamba, mamba, mamba, cache[0], mamba, mamba]
    assert sizes(model("qwen3next", **ssm, full_attention_interval=2))[0] == [mamba, cache[0]] * 3
    told = model("qwen3next", **ssm, attention__recurrent_layers=[0, 1, 1, 1, 1, 1])
    assert sizes(told)[0] == [cache[0]] + [mamba] * 5
    heads, feeds = [0, 0, 4, 0, 0, 4], [0, 64, 0, 64, 0, 0]
    nemotron = model("nemotron_h", **ssm, attention__head_count_kv=heads, feed_forward_length=feeds)
    assert sizes(nemotron)[0] == [mamba, 0, cache[0], 0, mamba, cache[0]]
    kimi = model("kimi-linear", kda__head_dim=64, ssm__conv_kernel=4, attention__head_count_kv=[0, 4, 0, 0, 0, 4])
    assert sizes(kimi)[0][0] == 4 * 8 * 64 * (3 * 3 + 64)


def test_every_key_that_tells_a_cache_is_kept_of_the_header():
    """A key that summarize drops is never there, and its default would be planned with without a word."""
    text = Path(kv_cache.__file__).read_text()
    read = set(re.findall(r'(?:number|listed_values|values_by_layer)\("([a-z0-9_.]+)"', text))
    assert read > {"attention.sliding_window", "wkv.head_size"}
    assert not read - set(header_summary.CACHE_KEYS)

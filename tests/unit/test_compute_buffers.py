"""The upper bound of compute buffers; tests/integration/test_placement.py holds it against the log of the real server."""

import compute_bounds
import pytest
import shapes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    compute_buffers,
    gguf,
    header_summary,
    kv_cache,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device
from support import models

MIB = 1024 * 1024
FORK = {"fork": "ik_llama.cpp"}


def model(architecture="llama", **more):
    """One as wide as DeepSeek R1, without its MLA."""
    plain = {"width": 7168, "heads": 128, "kv_heads": 8, "key_dimension": 128, "value_dimension": 128}
    return models.model(architecture, 61, **{**plain, "vocabulary": 129280, **more})


LATENT = {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
MLA = {"kv_heads": 1, "key_dimension": 576, "value_dimension": 512, "keys": LATENT}


def bound(summary, **settings):
    return compute_buffers.buffer_bound(summary, kv_cache.CacheSettings(**{"context": 16384, **settings})) // MIB


def test_the_bound_follows_the_settings():
    summary = models.known_answer_model(4, 256, "f16")
    plain = bound(summary, flash_attention="off")
    assert bound(summary, flash_attention="off", micro_batch=1024) == pytest.approx(2 * plain, abs=1)
    assert bound(summary, flash_attention="off", micro_batch=1024, batch=512) == plain
    assert bound(summary, flash_attention="off", context=32768) > 1.9 * plain
    assert bound(summary._replace(keys=(("ssm.inner_size", 512),)), flash_attention="off") > plain
    assert bound(summary, context=256, micro_batch=4096) == bound(summary, context=256)
    assert bound(summary, micro_batch=8) == bound(summary, micro_batch=64)


def test_flash_attention_needs_masks_alone():
    """128 heads at 65536 tokens of context: 16384 MiB of scores and 512 of masks, or 256 of masks of 16 bits; one of a window is of 768 tokens."""
    without, with_it = (bound(model(), context=65536, flash_attention=value) for value in ("off", "on"))
    assert without - with_it == 16384 + 512 - 256
    assert with_it < 1100
    assert bound(model(), context=131072, flash_attention="on") - with_it == 256
    windowed = model("gpt-oss", keys={"attention.sliding_window": 128})
    assert bound(windowed, context=65536, flash_attention="on") - with_it == 3


def test_the_buffers_of_the_field_notes_are_within_the_bound():
    """Qwen3 480B with b6110 and -fa: 308.75 MiB on the device with the output, 265.51 on others."""
    qwen = model("qwen3moe", width=6144, heads=96, vocabulary=151936)
    assert 309 < bound(qwen, context=1024, flash_attention="on") < 900


@pytest.mark.parametrize(
    "summary, wanted, more, expected",
    [
        (model(), "on", {}, True),
        (model(), "off", {}, False),
        (model(), None, {}, True),
        (model(), "auto", {}, True),
        (model(), "auto", {"type_k": "q8_0"}, False),
        (model(), "on", {"type_k": "q8_0"}, True),
        (model(key_dimension=192, value_dimension=192), None, {}, False),
        (model(key_dimension=192, value_dimension=128), None, {}, False),
        (model("deepseek2", **MLA), "auto", {}, True),
        (model("deepseek2", **MLA), "on", {}, True),
        (model("deepseek2", **MLA), None, FORK, True),
        (model("grok"), "on", {}, False),
    ],
)
def test_flash_attention_counts_where_it_is_sure(summary, wanted, more, expected):
    """Where nothing is said, newer builds use it if the backend can; each can for the usual sizes of heads, and of types that are the same."""
    settings = kv_cache.CacheSettings(4096, flash_attention=wanted, **more)
    assert compute_buffers.uses_flash(summary, settings) is expected


def test_ik_llama_computes_scores_in_pieces_of_its_attention_batch():
    """128 heads of 512 by 16384 scores are 4096 MiB; with 512 MiB at a time 16 heads are there at once."""
    settings = {**FORK, "flash_attention": "off"}
    whole = bound(model(), **settings)
    assert whole - bound(model(), attention_batch=512, **settings) == (128 - 16) * 32
    assert bound(model(), attention_batch=0, **settings) == whole
    assert bound(model(), attention_batch=1, **settings) == whole - 127 * 32
    mainline = bound(model(), flash_attention="off")
    assert bound(model(), attention_batch=512, flash_attention="off") == mainline


def test_ik_llama_makes_whole_heads_of_its_compressed_cache_in_pieces():
    """-mla 3 with flash attention: 128 heads of 320 elements for 16384 tokens are 2560 MiB, and as much as halves of them."""
    settings = {**FORK, "flash_attention": "on"}
    latent = model("deepseek2", **MLA)
    alone = bound(latent, latent_attention=1, **settings)
    assert bound(latent, latent_attention=3, **settings) - alone == 2 * 2560
    assert bound(latent, latent_attention=3, attention_batch=512, **settings) - alone == 2 * 320
    assert bound(latent, **settings) - alone == 2 * 2560
    odd = latent._replace(heads=20)
    wide = bound(odd, latent_attention=3, attention_batch=1, **settings)
    assert wide - bound(odd, latent_attention=1, **settings) == 2 * 100


def summary_of(folder, shape):
    path = folder / "shape.gguf"
    shapes.write(path, shapes.SHAPES[shape], "q8_0", filled=False)
    return header_summary.parse(header_summary.summarize(gguf.read_local_headers(str(path))))


@pytest.mark.parametrize(
    "shape, setting, seen",
    [
        ("Llama 3 70B", (32768, 512), 456),
        ("Qwen3 480B", (4096, 2048), 1456),
        ("GLM 4.6", (4096, 2048), 1288),
        ("Gemma 3 27B", (4096, 2048), 1110),
        ("gpt-oss 20B", (4096, 2048), 627),
        ("DeepSeek R1", (32768, 512), 607),
        ("DeepSeek R1", (32768, 512, "off"), 8913),
        ("Qwen3 Next", (32768, 512), 285),
        ("Mamba 2.8B", (32768, 512), 180),
        ("Llama 2 7B", (131072, 512, "on", "q8_0"), 2208),
    ],
)
def test_the_bound_is_above_what_llama_cpp_reserves_and_not_far_above(tmp_path, shape, setting, seen):
    """The larger of two devices, by tests/benchmarks/compute_bounds.py on two H200; with q8_0 of one."""
    settings = compute_bounds.settings_of(compute_bounds.Setting(*setting))
    found = compute_buffers.buffer_bound(summary_of(tmp_path, shape), settings) / MIB
    assert seen <= found <= 2 * seen


@pytest.mark.parametrize(
    "shape, overrides, first, seen",
    [("Qwen3 480B", (("exps", "CPU"),), 0, 2766), ("gpt-oss 120B", (), 3, 1219), ("Llama 2 7B", (), 3, 824)],
)
def test_a_device_of_the_heads_own_gets_copies_of_what_is_in_its_memory(tmp_path, shape, overrides, first, seen):
    """By the same script: experts moved, or layers before ``first`` on the processor, with 32768 tokens. Workers get none."""
    load = device_load.Load(summary_of(tmp_path, shape), kv_cache.CacheSettings(32768), 11063, overrides)
    own = Device("here", "cuda", "CUDA0", "CUDA0", 0, {})
    assert seen <= load.compute_on(own, first) / MIB <= 1.5 * seen
    assert load.compute_on(own._replace(worker="a worker"), first) == load.compute


def test_logits_are_those_of_slots_but_of_embeddings():
    wide = model(vocabulary=262144)
    plain, every = (bound(wide, every_output=given) for given in (False, True))
    assert every - plain == 512 - 17

"""The upper bound of compute buffers; tests/integration/test_placement.py holds it against the log of the real server."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    compute_buffers,
    kv_cache,
)
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
    return compute_buffers.bound(summary, kv_cache.Settings(**{"context": 16384, **settings})) // MIB


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
    """128 heads at 65536 tokens of context: 17920 MiB of scores and masks, or 384 of masks."""
    without, with_it = (bound(model(), context=65536, flash_attention=value) for value in ("off", "on"))
    assert without == 18396
    assert with_it < 1500
    assert bound(model(), context=131072, flash_attention="on") - with_it == 384
    windowed = model("gpt-oss", keys={"attention.sliding_window": 128})
    assert bound(windowed, context=65536, flash_attention="on") - with_it == 384


def test_the_pipeline_has_four_of_each_mask():
    """8.5 times the scores of one head were seen beside those of all, with a window and one copy; a mask is 512 tokens times 65536 of 4 bytes."""
    windowed = model("gpt-oss", keys={"attention.sliding_window": 128})
    two, one = (bound(summary, context=65536, flash_attention="off") for summary in (windowed, model("gpt-oss")))
    assert two - one == 3 * 128


def test_the_buffers_of_the_field_notes_are_within_the_bound():
    """Qwen3 480B with b6110 and -fa: 308.75 MiB on the device with the output, 265.51 on others."""
    qwen = model("qwen3moe", width=6144, heads=96, vocabulary=151936)
    assert 309 < bound(qwen, context=1024, flash_attention="on") < 900


@pytest.mark.parametrize(
    "summary, wanted, expected",
    [
        (model(), "on", True),
        (model(), "off", False),
        (model(), None, True),
        (model(), "auto", True),
        (model(key_dimension=192, value_dimension=192), None, False),
        (model(key_dimension=192, value_dimension=128), None, False),
        (model("deepseek2", **MLA), "auto", False),
        (model("deepseek2", **MLA), "on", True),
        (model("grok"), "on", False),
    ],
)
def test_flash_attention_counts_where_it_is_sure(summary, wanted, expected):
    """Where nothing is said, newer builds use it if the backend can; each can for the usual sizes of heads."""
    settings = kv_cache.Settings(4096, flash_attention=wanted)
    assert compute_buffers.uses_flash(summary, settings) is expected


def test_types_of_keys_and_values_that_differ_are_not_sure_of_flash_attention():
    for wanted, expected in (("auto", False), ("on", True)):
        settings = kv_cache.Settings(4096, type_k="q8_0", flash_attention=wanted)
        assert compute_buffers.uses_flash(model(), settings) is expected


def test_flash_attention_is_the_default_of_ik_llama():
    assert compute_buffers.uses_flash(model("deepseek2", **MLA), kv_cache.Settings(4096, **FORK))


def test_ik_llama_computes_scores_in_pieces_of_its_attention_batch():
    """128 heads of 512 by 16384 scores are 4096 MiB; with 512 MiB at a time 16 heads are there at once."""
    settings = {**FORK, "flash_attention": "off"}
    whole = bound(model(), **settings)
    assert whole - bound(model(), attention_batch=512, **settings) == (128 - 16) * 32
    assert bound(model(), attention_batch=0, **settings) == whole
    assert bound(model(), attention_batch=1, **settings) == whole - 127 * 32
    assert bound(model(), attention_batch=512, flash_attention="off") == whole


def test_ik_llama_makes_whole_heads_of_its_compressed_cache_in_pieces():
    """-mla 3 with flash attention: 128 heads of 320 elements for 16384 tokens are 2560 MiB, and as much as halves of them."""
    settings = {**FORK, "flash_attention": "on"}
    latent = model("deepseek2", **MLA)
    alone = bound(latent, latent_attention=1, **settings)
    assert bound(latent, latent_attention=3, **settings) - alone == 2 * 2560
    assert bound(latent, latent_attention=3, attention_batch=512, **settings) - alone == 2 * 320
    assert bound(latent, **settings) - alone == 2 * 2560
    assert bound(latent, flash_attention="on") == alone
    odd = latent._replace(heads=20)
    wide = bound(odd, latent_attention=3, attention_batch=1, **settings)
    assert wide - bound(odd, latent_attention=1, **settings) == 2 * 100

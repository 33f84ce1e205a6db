"""Tokens that llama-server predicts: what it is told, what that is predicted to gain, and how it is measured."""

import pytest
from support.clusters import TREE, cards_of
from test_auxiliary_models import after, draft, with_both

PREDICTING = {
    "keys": {"nextn_predict_layers": 1},
    "tensors": [
        {"name": name, "type": "F16", "shape": shape, "bytes": 2 * shape[0] * shape[1], "layers": layers}
        for name, shape, layers in (
            ("blk.*.ffn_up.weight", [16384, 8192], list(range(40))),
            ("output.weight", [16384, 32768], None),
        )
    ],
}


def build(number):
    return {"llama_release": {**TREE, "build": number}}


def speculating(kind, summary=None, gib=10, **variables):
    given = {"llama_server_speculation": kind, **build(11063), **variables}
    return cards_of(gib, summary=summary, **given)


@pytest.mark.parametrize(
    "kind, summary, drafts, word, files",
    [
        ("none", None, True, None, 1),
        ("ngram", None, True, "ngram-mod", 1),
        ("ngram", None, False, "ngram-mod", 1),
        ("draft", None, True, "draft-simple", 2),
        ("mtp", PREDICTING, False, "draft-mtp", 1),
    ],
)
def test_llama_server_is_told_what_predicts_and_loads_no_draft_model_that_is_not_used(
    kind, summary, drafts, word, files
):
    cluster = speculating(kind, summary)
    plan = (with_both(cluster, draft=draft()) if drafts else cluster).accepted()
    argv = plan["head"]["argv"]
    assert after(argv, "--spec-type") == word
    assert ("--model-draft" in argv, len(plan["model"]["files"])) == (files == 2, files)


@pytest.mark.parametrize(
    "kind, variables, why",
    [
        ("ngram", {"llama_release": {**TREE, "build": 4840, "fork": "ik_llama.cpp"}}, "does not support this method: use draft or none"),
        ("draft", {}, "llama_model_draft is not set: set it to a small model with the same vocabulary, or use ngram"),
        ("mtp", {}, "on paper has no layers for multi-token prediction: use a model file with such"),
        ("ngram", {"llama_server_extra_args": ["--spec-type", "ngram-simple"]}, "but llama_server_extra_args also has --spec-type"),
    ],
)  # fmt: skip
def test_what_llama_server_cannot_predict_with_is_refused_with_a_remedy(kind, variables, why):
    assert why in speculating(kind, **variables).reason()


def test_a_draft_model_without_layers_that_predict_is_no_mtp():
    assert "has no layers for multi-token prediction" in with_both(speculating("mtp"), draft=draft()).reason()


def test_layers_that_predict_are_counted_where_they_are_loaded():
    plain, loaded = (speculating(kind, PREDICTING).plan()["placement"][0] for kind in (None, "mtp"))
    assert loaded["weights_mib"] == pytest.approx(plain["weights_mib"] + 256, abs=1)
    assert loaded["kv_mib"] > plain["kv_mib"]
    assert (loaded["exact"], loaded["without"]) == ([], ["compute buffers of multi-token prediction layers"])

"""Tokens that llama-server predicts: what it is told, what that is predicted to gain, and how it is measured."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from conftest import typed
from support.clusters import TREE, advisories_of, cards_of, head_with_cards
from test_further import after, draft, with_both

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


def predicted(cluster):
    plan = cluster.accepted()
    return plan["estimate"]["speculation"]


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
    assert ("speculation" in plan["estimate"]) == (word is not None)


@pytest.mark.parametrize(
    "kind, variables, why",
    [
        ("ngram", {"llama_release": {**TREE, "build": 4840, "fork": "ik_llama.cpp"}}, "with which only draft and none are"),
        ("draft", {}, "llama_model_draft is not set: set it to a small model with the same vocabulary, or use ngram"),
        ("mtp", {}, "on paper has no layers that predict further tokens: use a file of the model that has"),
        ("ngram", {"llama_server_extra_args": ["--spec-type", "ngram-simple"]}, "and --spec-type is given to llama-server"),
        ("ngram", {"llama_server_speculation_acceptance": 1.5}, "llama_server_speculation_acceptance is 1.5: use 1 or less"),
    ],
)  # fmt: skip
def test_what_llama_server_cannot_predict_with_is_refused_with_a_remedy(kind, variables, why):
    assert why in speculating(kind, **variables).reason()


def test_a_draft_model_without_layers_that_predict_is_no_mtp():
    assert "has no layers that predict" in with_both(speculating("mtp"), draft=draft()).reason()


def test_layers_that_predict_are_counted_where_they_are_loaded():
    plain, loaded = (speculating(kind, PREDICTING).plan()["placement"][0] for kind in (None, "mtp"))
    assert loaded["weights_mib"] == pytest.approx(plain["weights_mib"] + 256, abs=1)
    assert loaded["kv_mib"] > plain["kv_mib"]
    assert (loaded["exact"], loaded["without"]) == ([], ["compute buffers of layers that predict further tokens"])


def test_the_prediction_follows_from_what_is_accepted():
    """A token takes as long as a visit with k + 1 tokens, divided by 1 + a k."""
    speeds = {}
    for share in (0.0, 0.5, 1.0):
        found = predicted(speculating("ngram", llama_server_speculation_acceptance=share))
        assert (found["acceptance"], found["stated"], found["drafted"]) == (share, True, 64)
        speeds[share] = found["generation_tokens_per_s"]
    assert speeds[0.5] == pytest.approx(speeds[0.0] * 33, rel=0.01)
    assert speeds[1.0] == pytest.approx(speeds[0.0] * 65, rel=0.01)
    assumed = speculating("ngram").plan()["estimate"]
    assert (assumed["speculation"]["acceptance"], assumed["speculation"]["stated"]) == (0.9, False)
    at_break_even = predicted(
        speculating("ngram", llama_server_speculation_acceptance=assumed["speculation"]["pays_from"])
    )
    assert at_break_even["generation_tokens_per_s"] == pytest.approx(assumed["generation_tokens_per_s"], rel=0.15)


def test_a_longer_way_makes_drafts_pay_more_and_more_tokens_are_taken_from_the_options():
    near, far = (
        predicted(with_both(speculating("draft", llama_link_visit_ms=ms, llama_placement="all"), draft=draft(0.1)))
        for ms in (0.1, 20.0)
    )
    assert far["pays_from"] < near["pays_from"]
    more = speculating("draft", llama_server_extra_args=["--spec-draft-n-max", "8"])
    assert predicted(with_both(more, draft=draft()))["drafted"] == 8


def test_layers_that_predict_on_a_worker_are_visited_for_each_token():
    local = predicted(speculating("mtp", PREDICTING, llama_link_visit_ms=0.001))
    away = predicted(speculating("mtp", PREDICTING, llama_link_visit_ms=5.0))
    assert away["generation_tokens_per_s"] < 0.8 * local["generation_tokens_per_s"]


def test_a_draft_model_that_costs_more_than_it_saves_is_reported_and_none_is_the_remedy():
    cluster = with_both(head_with_cards(1, 20, llama_server_speculation="draft", **build(11063)), draft=draft(15))
    cluster.hosts["head"]["facts"]["memory_mib"] = 131072
    (advisory,) = advisories_of(cluster, "speculation-slower")
    assert "and 0.7 is assumed" in advisory["message"]
    assert "Set llama_server_speculation to none" in advisory["remedy"]
    cluster.hosts["head"]["variables"]["llama_server_speculation"] = "none"
    assert advisories_of(cluster, "speculation-slower") == []


def test_the_page_shows_it_beside_the_plain_figure():
    rows = plan_text.speed_rows(typed(speculating("ngram").plan()))
    assert [row[0] for row in rows[:2]] == ["generation", "with ngram-mod"]
    assert rows[1][1].endswith("tokens per second where text repeats")
    assert rows[1][2].startswith("0.9 of 64 accepted (assumed), pays from 0")

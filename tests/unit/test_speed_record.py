"""What the cluster measured last corrects the speeds that the next plan predicts, and nothing else of it."""

import math

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import plan as plan_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import speed_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import speed_text
from conftest import complete, typed
from support.clusters import cards_of
from support.drift import drifts
from support.verification import RIGHT, healthy, verify

RECORD = {
    "date": "2026-11-25",
    "release": "0.3.36",
    "model": "m",
    "devices": ["x of y"],
    "measured": 8.6,
    "planned": 10.0,
}


@pytest.fixture(scope="module")
def plan():
    return typed(complete(cards_of(20).plan()))


def measured(plan, factor):
    return speed_record.new_record(plan, plan.estimate.generation_tokens_per_s * factor)


def width(bounds):
    return bounds.high / bounds.low


def test_speeds_of_generation_are_corrected_those_of_alternatives_too_and_nothing_else(plan):
    after = speed_record.correct_plan(plan, measured(plan, 0.8))
    before, now = plan.estimate, after.estimate
    assert after._replace(estimate=before, fallbacks=plan.fallbacks) == plan
    for one, other in [
        (before, now),
        (before.users, now.users),
        (before.best_single_host, now.best_single_host),
        (before.at_context[0], now.at_context[0]),
        *zip(before.shapes, now.shapes),
        *zip(plan.fallbacks, after.fallbacks),
    ]:
        expected = one.generation_tokens_per_s and pytest.approx(0.8 * one.generation_tokens_per_s, rel=0.01)
        assert other.generation_tokens_per_s == expected
    assert before.shapes
    assert plan.fallbacks
    assert (now.prompt_tokens_per_s, now.prompt_range, now.prompt) == (
        before.prompt_tokens_per_s,
        before.prompt_range,
        before.prompt,
    )
    assert width(now.generation_range) < width(before.generation_range)
    assert now.generation_range.low < now.generation_tokens_per_s < now.generation_range.high


def test_the_page_says_it(plan):
    after = speed_record.correct_plan(plan, measured(plan, 0.86)._replace(date="2026-11-25"))
    notes = " ".join(speed_text.speed_notes(after))
    assert f"corrected, by a factor of 0.86, measured on 2026-11-25 with {plan.model.name} and " in notes
    assert "corrected" not in " ".join(speed_text.speed_notes(plan))


def test_of_another_release_less_is_known_and_of_another_model_nothing(plan):
    record = measured(plan, 1.5)
    same, other = (speed_record.correct_plan(plan, one) for one in (record, record._replace(release="other")))
    assert other.estimate.generation_tokens_per_s == same.estimate.generation_tokens_per_s
    assert width(same.estimate.generation_range) < width(other.estimate.generation_range)
    assert speed_record.correct_plan(plan, record._replace(model="other")) == plan


def test_other_devices_are_not_corrected(plan):
    record = measured(plan, 1.5)
    assert speed_record.correct_plan(plan, record._replace(devices=record.devices[1:])) == plan


@pytest.mark.parametrize("factor, again", [(0.95, False), (1.05, False), (0.7, True), (1.3, True)])
def test_a_measurement_that_says_nothing_new_leaves_the_record(plan, factor, again):
    """A second run finds the same plan, whatever the noise."""
    after = speed_record.correct_plan(plan, measured(plan, 0.8))
    found = measured(after, factor)
    assert bool(found) == again
    if found:
        assert found.planned == pytest.approx(plan.estimate.generation_tokens_per_s, rel=0.01)
        assert math.isclose(found.measured / found.planned, 0.8 * factor, rel_tol=0.01)


def test_what_says_nothing_of_the_devices_is_not_kept(plan, local):
    assert measured(typed(local.plan()), 0.8) is None, "the known-answer model is too small"
    guessed = cards_of(20, llama_server_speculation="ngram").plan()
    assert measured(typed(guessed), 0.8) is None
    assert [measured(plan, factor) for factor in (0, 0.1, 10)] == [None] * 3
    assert speed_record.new_record(plan, None) is None


BROKEN = {"measured": ("8", 0, 1000), "planned": (-1, None), "date": ("\x1b",), "devices": (1,)}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BROKEN.items() for value in values])
def test_a_record_that_cannot_be_read_is_left_out(name, value):
    assert speed_record.parse_record(RECORD)
    assert speed_record.parse_record({**RECORD, name: value}) is None


@pytest.mark.parametrize(
    "answers", [{}, {"head": None}, {"head": {"facts": {"measured_speed": {}}}}, {"head": {"facts": 1}}]
)
def test_a_head_that_keeps_none(answers):
    assert inventory.measured_speed(answers, "head") is None
    assert inventory.measured_speed({"head": {"facts": {"measured_speed": RECORD}}}, "head") is not None


def test_a_short_completion_of_verify_corrects_nothing(plan):
    left = []

    def record(text, _data):
        left.append(text.rsplit("/", 1)[1])
        return {"rc": 0}

    described = typed_json.dump(plan)
    answers = {name: {"drift": drift} for name, drift in drifts(described).items()}
    evidence = healthy(plan)
    evidence = evidence._replace(server=evidence.server._replace(completion=RIGHT._replace(tokens_per_second=9.0)))
    verify(described, evidence, recorded=record, answers=answers)
    assert "verified.json" in left
    assert "speed.json" not in left


def test_a_plan_counts_with_what_its_head_keeps(plan, monkeypatch):
    cluster = cards_of(20)
    monkeypatch.setattr(
        plan_action.inventory,
        "cluster_hosts",
        lambda *_arguments: ("llama_cluster", cluster_inputs.checked_hosts("llama_cluster", cluster.hosts)),
    )
    monkeypatch.setattr(plan_action.inventory, "play_variables", lambda _vars: set())
    monkeypatch.setattr(plan_action.sources, "look_up", lambda _find, found, _catalogue: found)
    answers = {"head": {"facts": {"measured_speed": typed_json.dump(measured(plan, 0.8))}}}
    first, again = (plan_action.make_plan(str, {}, facts, cluster.model) for facts in ({}, answers))
    assert (first.estimate.correction, again.estimate.correction.factor) == (None, 0.8)
    assert again._replace(estimate=first.estimate, fallbacks=first.fallbacks) == first

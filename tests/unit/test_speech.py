"""How well the served model reads plain text: what the server is asked, and how the reading is judged and kept."""

import json
import math
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import evidence, judge, server_client, speech
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import TextReading
from conftest import typed
from support.clusters import with_small_layers
from support.drift import drifts
from support.verification import RIGHT, checks, healthy, judged, several, subject, verify

PIECES = [f"word {number} " if number % 9 else [0xC3] for number in range(300)]


class Model:
    """A server that answers as recorded ones do: llama-server reports the probability before the bias."""

    def __init__(self, logarithm=-1.5, tokens=300, **changes):
        self.logarithm, self.changes, self.asked = logarithm, changes, []
        self.tokens = [{"id": 1000 + number, "piece": piece} for number, piece in enumerate(PIECES[:tokens])]

    def ask(self, path, seconds, question):
        self.asked.append(question)
        if path == "/tokenize":
            return replies.Reply(200, json.dumps({"tokens": self.tokens}))
        entry = {"id": question["logit_bias"][0][0], "logprob": self.logarithm, **self.changes}
        return replies.Reply(200, json.dumps({"choices": [{"logprobs": {"content": [entry]}}]}))


def test_each_token_of_the_text_is_predicted_from_those_before():
    model = Model()
    reading = speech.take_reading(model.ask, "f" * 16, "one")
    assert reading.logarithms == (-1.5,) * speech.MAX_TOKENS
    assert reading.bytes == sum(len(piece) for piece in PIECES[1 : speech.MAX_TOKENS + 1])
    assert reading.bits_per_byte == pytest.approx(1.5 * speech.MAX_TOKENS / math.log(2) / reading.bytes)
    assert {question["model"] for question in model.asked} == {"one"}
    prompts = [question["prompt"] for question in model.asked[1:]]
    assert [len(prompt) for prompt in prompts] == [*range(1, speech.MAX_TOKENS + 1)]
    assert [question["logit_bias"][0][0] for question in model.asked[1:3]] == [1001, 1002]


@pytest.mark.parametrize(
    "model, read",
    [
        (Model(-3.4e38), (speech.MIN_LOGARITHM,) * speech.MAX_TOKENS),
        (Model(1e-7), (0.0,) * speech.MAX_TOKENS),
        (Model(tokens=speech.MIN_TOKENS + 1), (-1.5,) * speech.MIN_TOKENS),
        (Model(tokens=speech.MIN_TOKENS), None),
        (Model(None), None),
        (Model(id=7), None),
        (Model(tokens=0), None),
        (SimpleNamespace(ask=lambda *_question: replies.Reply(0, "refused")), None),
    ],
)
def test_a_server_that_reports_no_probabilities_is_not_judged(model, read):
    reading = speech.take_reading(model.ask, "f" * 16, None)
    assert (reading and reading.logarithms) == read
    assert not reading or typed_json.parse(TextReading, typed_json.dump(reading)) == reading


def test_a_slow_server_reads_less(monkeypatch):
    monkeypatch.setattr(speech, "time", SimpleNamespace(monotonic=iter(range(1000)).__next__))
    assert len(speech.take_reading(Model().ask, "f" * 16, None).logarithms) == speech.TIME_LIMIT_SECONDS


@pytest.fixture
def served(pair, big_model):
    """A cluster whose model generates text."""
    return with_small_layers(pair, big_model)


def reading_of(plan, bits, identifier=None):
    """A reading with so many bits per byte."""
    return TextReading(identifier or plan.head.reading, (-bits * math.log(2) * 4,) * 100, 400)


def test_a_reading_without_tokens_is_no_worse_than_another():
    assert TextReading(OTHER, (), 1).perplexity_ratio(TextReading(OTHER, (-1.0,), 4)) == 1


def evidence_of(plan, now, *earlier, completion=RIGHT):
    found = healthy(plan, completion)
    return found._replace(server=found.server._replace(reading=now), readings=earlier)


OTHER = "0" * 16


@pytest.mark.parametrize(
    "now, earlier, status, said",
    [
        (1.1, (), "passed", "1.10 bits per byte of plain text; there is no earlier reading for comparison"),
        (1.1, ((1.0, OTHER),), "passed", "there is no earlier reading for comparison"),
        (1.1, ((1.11, None), (0.5, OTHER)), "passed", "perplexity 0.973 times that of the best reading so far"),
        (1.1, ((1.08, None),), "passed", "perplexity 1.057 times"),
        (1.1, ((1.07, None),), "failed", "1.087 times that of the best reading so far, more than 1.07: the release, a"),
        (
            2.01,
            ((2.01, None),),
            "failed",
            "2.01 bits per byte of plain text, more than 2: the cluster computes incorrectly",
        ),
        (None, ((1.0, None),), "not tested", "the server does not report token probabilities"),
    ],
)
def test_a_model_that_reads_worse_than_a_language_model_or_than_before_fails(served, now, earlier, status, said):
    plan = typed(served.accepted())
    before = [reading_of(plan, bits, identifier) for bits, identifier in earlier]
    found = evidence_of(plan, reading_of(plan, now) if now else None, *before)
    (check,) = checks(judged(plan, found), "speaks")
    assert (check.status, said in check.evidence) == (status, True), check
    refusal = judge.serving_failure(subject(typed_json.dump(plan)), found) or ""
    assert ("speaks: " in refusal, said in refusal) == (status == "failed",) * 2


def test_what_speaks_does_not_test(served, local):
    plan = typed(served.accepted())
    (check,) = checks(judged(plan, evidence_of(plan, None, completion=None)), "speaks")
    assert (check.status, check.evidence) == ("not tested", judge.ASLEEP_NOTE)
    served.set("head", llama_server_extra_args=["--embeddings"])
    for silent in (typed(served.accepted()), typed(local.accepted())):
        assert silent.head.reading is None
        found = [(check.status, check.evidence) for check in checks(judged(silent), "speaks")]
        assert found == [("not tested", "this model generates no text")] * (not silent.model.known_answer)
        client = SimpleNamespace(ask=None)
        assert evidence._take_reading(client, subject(typed_json.dump(silent))) is None


def test_the_model_of_several_that_is_asked_reads(served):
    plan = several(typed(served.accepted()), "one", "two")
    plan = plan._replace(head=plan.head._replace(models=tuple(one._replace(reading=OTHER) for one in plan.head.models)))
    model = Model()
    reading = evidence._take_reading(model, subject(typed_json.dump(plan)).per_model()[1])
    assert (reading.id, model.asked[0]["model"]) == (OTHER, "two")


def test_the_same_text_is_compared_across_releases_and_devices(served):
    first = typed(served.accepted()).head.reading
    release = {**served.hosts["head"]["variables"]["llama_release"], "checksum": "sha256:" + "b" * 64}
    for host in served.hosts:
        served.set(host, llama_release=release)
    for settings, same in (
        ({"llama_server_parallel": 2, "llama_server_port": 9090, "llama_server_flash_attention": "on"}, True),
        ({"llama_server_cache_type_k": "q8_0"}, False),
        ({"llama_server_cache_type_k": "f16", "llama_model_path": "/models/other.gguf"}, False),
    ):
        served.set("head", **settings)
        assert (typed(served.accepted()).head.reading == first) == same


@pytest.mark.parametrize(
    "bits, kept", [(1.02, ["0.50", "1.00"]), (0.9, ["0.50", "0.90"]), (1.5, None), (None, ["0.50", "1.00"])]
)
def test_readings_are_kept_after_a_verification_that_passed(served, bits, kept):
    described, written = served.accepted(), {}
    plan = typed(described)

    def record(text, data):
        written[text.rsplit("/", 1)[1]] = json.loads(data)
        return {"rc": 0}

    now = reading_of(plan, bits) if bits else None
    found = evidence_of(plan, now, reading_of(plan, 1.0), reading_of(plan, 0.5, OTHER))
    found = found._replace(readings=found.readings[::-1])
    answers = {name: {"drift": drift} for name, drift in drifts(described).items()}
    verify(described, found, recorded=record, answers=answers)
    record = written.get(names.READINGS_FILE)
    readings = [typed_json.parse(TextReading, one) for one in record["readings"]] if record else None
    assert (readings and [f"{one.bits_per_byte:.2f}" for one in readings]) == kept


def test_the_record_of_readings_is_bounded(served):
    plan = typed(served.accepted())
    many = [reading_of(plan, 1, f"{number:016x}") for number in range(judge.MAX_READINGS)]
    kept = judge.readings_of([evidence_of(plan, reading_of(plan, 1), *many)])
    assert [one.id for one in kept] == [*(one.id for one in many[1:]), plan.head.reading]


@pytest.mark.parametrize(
    "logarithms, computes",
    [([-0.5, -2], True), ([], True), ([-0.5, None], False), ([-3.4028234663852886e38], False), ([0.5], False)],
)
def test_a_completion_without_probabilities_fails(served, logarithms, computes):
    entries = [{"logprob": value} for value in logarithms]
    choice = {"text": "........", "logprobs": {"content": entries}}
    reply = replies.Reply(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": 8}}))
    plan, completion = typed(served.accepted()), server_client.parse_completion(reply)
    (check,) = checks(judged(plan, healthy(plan, completion)), "completion")
    assert (check.status, "NaN results" in check.evidence) == (("passed", False) if computes else ("failed", True))

"""Tokens that llama-server predicts: what it is told, what that is predicted to gain, and how it is measured."""

import json
import sys

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import command_line, matrix, results, runner
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table
from benchmarks import example, read
from conftest import typed
from support.clusters import TREE, advisories_of, cards_of, head_with_cards
from support.hosts import free_port
from test_benchmark import cluster_of, loads_of, request_of
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
        ("ngram", build(8643), "which is known of builds from b9435 on, but archive-bbbbbbbb is older: set"),
        ("mtp", build(9435), "builds from b10458 on"),
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


# Benchmarks


VARIED = {"llama_server_speculation": ["none", "ngram"]}


def test_where_it_varies_llama_server_itself_is_asked_and_else_nothing_predicts():
    release = {"llama_release": {**TREE, "build": 11063}}
    loads = loads_of(cluster_of(**release, llama_benchmark_vary=VARIED, llama_benchmark_hosts=[2]))
    none, ngram = ((load, plan, matrix.cells_of(load, plan, None)) for load, plan in loads)
    for load, plan, cells in (none, ngram):
        assert [cell.test for cell in cells] == ["tg128"]
        argv = command_line.argv_of(plan, load, 5)
        assert argv[0].endswith("/llama-server")
        assert argv[-2:] == ["--host", "127.0.0.1"]
        assert argv.count("--host") == 1
        assert matrix.asks_of(plan, load, 5)["port"] == plan.head.port
    assert none[2][0].predicted == none[1].estimate.generation_tokens_per_s
    assert ngram[2][0].predicted == ngram[1].estimate.speculation.generation_tokens_per_s
    (load, plan), *_others = loads_of(cluster_of(**release, llama_server_speculation="ngram"))
    assert (plan.estimate.speculation, matrix.asks_of(plan, load, 5)) == (None, None)
    with pytest.raises(Refusal, match="changes generation alone: give a number of tokens"):
        request_of(cluster_of(), vary=VARIED, generated=[])


SERVER = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self): self.answer({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"timings": TIMINGS} if asked["prompt"] == "say" else {})
    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(text))); self.end_headers()
        self.wfile.write(text)
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


@pytest.mark.parametrize("text, speed", [("say", 12.5), ("other", None)])
def test_what_llama_server_answers_is_measured_as_llama_bench_would_and_it_is_ended(tmp_path, text, speed):
    port = free_port()
    timings = {"predicted_per_second": 12.5, "draft_n": 64, "draft_n_accepted": 48}
    program = SERVER.replace("TIMINGS", json.dumps(timings)).replace("PORT", str(port))
    asks = {"port": port, "text": text, "generated": [8], "repetitions": 3}
    log = tmp_path / "log"
    runner.Runner(60).run(runner.Load([sys.executable, "-c", program], {}, str(log), [], [], asks=asks))
    found = results.read(log.read_text())
    assert found.status == -15
    if speed is None:
        assert (found.results, "does not answer as it should: KeyError" in found.last[-1]) == ((), True)
        return
    (result,) = found.results
    assert (result.test, result.samples, result.mean, result.acceptance) == ("tg8", (speed,) * 3, speed, 0.75)


def test_the_table_has_the_share_that_was_accepted():
    record = read(example())
    assert "accepted" not in benchmark_table.as_markdown(record)
    cells = tuple(cell._replace(acceptance=0.75) for cell in record.cells)
    assert "| 0.75" in benchmark_table.as_markdown(record._replace(cells=cells))

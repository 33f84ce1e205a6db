"""Whatever a host, a server of models or a program that measures says, it is used by its form or refused in a sentence."""

import copy
import json
import time
from unittest import mock

import benchmarks
import gguf_files
import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import (
    plan_diff,
    rollback,
    status,
    verify,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import history, results, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift.serving_record import Load
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import (
    download,
    download_record,
    local_models,
    model_files,
    ollama,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import LinkMeasurement, ServedFallback
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import delivery, hub, lookup
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table
from conftest import typed
from hypothesis import example
from hypothesis import strategies as st
from model_server import download_record_of, parsed
from support import actions
from support.clusters import strix_halos
from support.fuzzing import changed, fuzzed
from support.model_sources import REPO, of_ollama, on_huggingface, request_of, run, server
from support.rollbacks import completed, record_of
from support.verification import healthy
from test_benchmark import measuring
from test_fuzz_report import JUNK, news
from test_rollback import summary
from test_status import answers_of

__all__ = ["measuring", "server"]
SHA = "0123456789abcdef" * 4
COMMIT = "0123456789" * 4
SECONDS = 2
"""Of processor time."""
SUMMARY = {**known_answer.summary(4, 128, "f32"), "files": [{"name": "m.gguf", "bytes": 5000}]}
FILE = {"name": "m.gguf", "bytes": 5, "sha256": SHA}
ASKED = {
    "llama_model_huggingface": {"repo": REPO, "quantisation": "Q4_K_M"},
    "llama_model_url": ["https://models.example/m.gguf"],
    "llama_model_ollama": "gemma3:4b",
    "llama_model_path": "/srv/m.gguf",
}


def record(source):
    return {
        "schema": 1,
        "asked": model_source.asked(source),
        "source": model_source.shown(source),
        "revision": COMMIT,
        "resolved": [FILE],
        "checked": {"/m/m.gguf": {"bytes": 5, "sha256": SHA, "modified": 1}},
    }


def answer(variable, value):
    """What a host says of a source that it has."""
    source = request_of(**{variable: value}).sources()[0]
    manifest = {"layers": [{"mediaType": ollama.MEDIA_TYPES["model"], "digest": f"sha256:{SHA}", "size": 5}]}
    folder = {"record": record(source), "whole": True, "summary": SUMMARY, "closed": None}
    return {
        "folders": {} if source.path else {model_source.folder("/p", source): folder},
        "paths": {"/srv/p.gguf": {"bytes": 5, "closed": None}},
        "ollama": {
            str(source.ollama): {
                "manifest": manifest,
                "folder": "/o",
                "blobs": {"model": {"bytes": 5, "summary": SUMMARY, "closed": None}},
            }
        },
        "summary": SUMMARY,
        "closed": None,
    }


ANSWERS = st.one_of(
    *(
        st.tuples(st.just(variable), news(answer(variable, value)), st.booleans())
        for variable, value in sorted(ASKED.items())
    )
)


@pytest.fixture
def offline(monkeypatch):
    """No server is asked."""

    def nobody(query, seconds):
        raise Refusal("nobody is asked")

    monkeypatch.setattr(lookup, "look_up", nobody)


@fuzzed(ANSWERS)
def test_any_answer_of_a_host(offline, answered):
    variable, new, projector = answered
    said = changed(answer(variable, ASKED[variable]), new)
    wanted = {variable: ASKED[variable], **({"llama_model_mmproj": {"path": "/srv/p.gguf"}} if projector else {})}
    started = time.process_time()
    found, _action = run(lambda **_arguments: said if isinstance(said, dict) else {}, wanted, "/p")
    assert time.process_time() - started < SECONDS
    assert validation.is_plain(found.get("refused", ""))


RECORD = record(request_of(llama_model_url=ASKED["llama_model_url"]).sources()[0])


@fuzzed(news(RECORD), st.none() | st.text(st.characters(codec="utf-8")))
def test_any_record_beside_a_model(tmp_path, new, text):
    place = tmp_path / download_record.RECORD
    place.write_text(json.dumps(changed(RECORD, new)) if text is None else text)
    (tmp_path / "m.gguf").write_bytes(b"12345")
    given = [{**FILE, "path": str(tmp_path / "m.gguf"), "url": "https://models.example/m.gguf", "role": "model"}]
    files, records = parsed(given, [download_record_of(tmp_path)])
    for entry in model_files.checked_files(place).values():
        assert validation.mismatch("it", entry, model_files.ENTRY) is None
    model_files.differences(files, records)
    stored = local_models.report([str(tmp_path)], [], [], "nobody")["folders"].get(str(tmp_path))
    assert stored is None or not stored["whole"] or stored["summary"] is None


SIBLING = {"rfilename": "m-Q4_K_M.gguf", "size": 5000, "blobId": "0" * 40, "lfs": {"sha256": SHA, "size": 5000}}
ABOUT = {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": [SIBLING], "private": False, "createdAt": "2025-01-01"}
OTHERS = {"siblings": [SIBLING, {**SIBLING, "rfilename": "x/m-Q8_0-00001-of-00002.gguf"}], "lastModified": "2025"}


@fuzzed(news({**ABOUT, **OTHERS}), st.none() | st.binary(), st.sampled_from([None, "Q4_K_M", "Q8_0", "m"]), seconds=0)
def test_any_listing_of_a_repository(server, new, text, quantisation):
    said = json.dumps(changed({**ABOUT, **OTHERS}, new)).encode() if text is None else text
    server.faults[f"/api/models/{REPO}/revision/main"] = lambda handler: server.reply(handler, 200, said, {})
    source = on_huggingface(quantisation=quantisation).sources()[0]
    try:
        listed = hub.list_files(source, None)
        for file in hub.choose(listed, source):
            assert download_record.problem_of_name(file.name) is None
            hub.quantisations(listed, source, file.name)
    except Refusal as refusal:
        said = str(refusal)
    assert validation.is_plain(str(said))


MANIFEST = {
    "schemaVersion": 2,
    "layers": [{"mediaType": ollama.MEDIA_TYPES["model"], "digest": f"sha256:{SHA}", "size": len(gguf_files.model())}],
}


@fuzzed(news(MANIFEST), st.none() | st.binary(), st.sampled_from([200, 302, 404, 500, 999]), seconds=0)
def test_any_manifest_of_a_registry(server, new, text, code):
    said = json.dumps(changed(MANIFEST, new)).encode() if text is None else text
    server.faults["/v2/library/gemma3/manifests/4b"] = lambda handler: server.reply(handler, code, said, {})
    with pytest.raises(Refusal) as refused:
        lookup.look_up(lookup.Query(of_ollama(server).source), 20)
    assert validation.is_plain(str(refused.value))


PROGRESS = {"file": "m.gguf", "step": "fetch", "files": 1, "done": 5, "total": 9}


@fuzzed(JUNK.map(json.dumps) | st.text() | news(PROGRESS).map(lambda new: json.dumps(changed(PROGRESS, new))))
@example(json.dumps({**PROGRESS, "total": "9" * 900}))
def test_any_progress_of_a_download(text):
    report = download.parse_progress(text)
    assert report is None or validation.is_plain(delivery.sentence(report, 2.0))


ROW = {"n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ts": 10.0, "stddev_ts": 0.1, "samples_ts": [10.0, 10.1]}
SWEPT = "|   512 |    128 |      0 |    1.100 |   465.51 |    2.311 |    55.38 |"
LINES = st.one_of(
    news(ROW).map(lambda new: json.dumps(changed(ROW, new))),
    st.lists(st.sampled_from([*SWEPT.split(), "9" * 400, "nan", "-1", "."]), min_size=5, max_size=9).map(" ".join),
    st.sampled_from(["llama_init_from_model: n_ctx = 1", "ended with 0", "127.0.0.1:1 leads to 192.0.2.1:1"]),
    st.text(max_size=40),
    st.integers(0, 9).map(
        lambda number: f"x: RPC{number}[127.0.0.1:{number}] compute buffer size = {'9' * number}.5 MiB"
    ),
)
STAMPS = st.sampled_from(["1.0000 out", "2.0000 err", "3.0000 run", "999999999.0000 out", "1 out", ""])
EXAMPLE = benchmarks.example()
EXAMPLE["cells"] = EXAMPLE["cells"][:4]


@fuzzed(st.lists(st.tuples(STAMPS, LINES).map(" ".join), max_size=12))
def test_any_log_of_a_program_that_measures(tmp_path, lines):
    path = tmp_path / "x.log"
    path.write_text("\n".join(lines), errors="replace")
    log = results.read(history.lines_of(str(path)))
    assert validation.is_plain(results.failure_of(log, ["llama-bench"], ()))
    empty = benchmarks.read(EXAMPLE).cells[0]._replace(measured=None)
    cells = [empty._replace(test=result.test, depth=result.depth) for result in log.results]
    for latencies in ((), (0.0, 1.0)):
        for cell in results.fill(cells, log, latencies):
            plain = cell._replace(test="pp1", depth=0)
            assert not typed_json.problem("", typed_json.dump(plain), types.Cell)
            assert benchmark_table.as_markdown(benchmarks.read(EXAMPLE)._replace(cells=(cell,)))


@fuzzed(news(EXAMPLE))
def test_any_record_of_an_earlier_run(new):
    """As the next run takes it over."""
    try:
        record = types.read(changed(EXAMPLE, new), "it")
    except Refusal as refusal:
        record, refused = None, str(refusal)
    if not record:
        assert validation.is_plain(refused)
        return
    assert all(map(validation.is_plain, benchmark_table.as_markdown(record).splitlines()))
    assert benchmarks.read(json.loads(json.dumps(typed_json.dump(record), allow_nan=False))) == record


WHOLE = json.loads(json.dumps(completed(strix_halos(3, 200))))
HEAD, HOSTS = WHOLE["head"]["host"], list(WHOLE["hosts"])
LOOKED = json.loads(json.dumps(answers_of(WHOLE)))
BACK = {
    name: {"record": {**record_of(WHOLE, name), "time": 1, "state": "served"}, "missing": [], "drift": answer["drift"]}
    for name, answer in LOOKED.items()
}
WAITED = {**WHOLE, "head": {**WHOLE["head"], "start_timeout": 0}}
EVIDENCE = typed_json.dump(
    healthy(typed(WHOLE))._replace(
        load=Load(2.5, 5, {"192.0.2.12:50052": 5}),
        links={"strix1": LinkMeasurement(900.5, 0.2, "")},
        fallback=ServedFallback("strix1:rocm0", 1),
        drift=LOOKED[HEAD]["drift"],
    )
)
EVIDENCE["server"]["certificate"] = {"names": ["a"], "until": "2030", "error": ""}
MIB = dict.fromkeys(("total_mib", "free_mib", "shared_total_mib", "shared_free_mib"), 5)
LOOKED[HEAD]["condition"]["head"]["serving"]["load"] = EVIDENCE["load"]
LOOKED[HEAD]["condition"]["resources"]["devices"] = [{"name": "GPU", **MIB}]


def judge(call):
    """Nothing but a refusal ends it, and nothing that it shows moves a cursor."""
    shown = []

    def show(_self, text, **_how):
        shown.append(text)

    with mock.patch.multiple("ansible.utils.display.Display", display=show, warning=show):
        try:
            shown.append(call().get("msg", ""))
        except (Refusal, AnsibleActionFail) as refused:
            shown.append(str(refused))
    assert all(validation.is_plain(line) for text in shown for line in text.split("\n"))


def act(module, answer=None, **arguments):
    """:param answer: of the action's module."""
    action = actions.made(module, **arguments)
    action._execute_module = lambda **_given: copy.deepcopy(answer)
    host = arguments.get("plan", WHOLE)["head"]["host"]
    judge(lambda: action.run(task_vars={"inventory_hostname": host, "hostvars": {name: {} for name in HOSTS}}))


def looked(said):
    act(status, plan=WHOLE, heads=[HEAD], answers={**LOOKED, HEAD: said}, facts={})
    act(plan_diff, plan=WHOLE, answers={**LOOKED, HEAD: said}, facts={HEAD: {"facts": said.get("condition")}})


def verified(said):
    act(verify, {"evidence": said.get("evidence")}, plan=WAITED, answers={**LOOKED, HEAD: said.get("answer")})
    act(verify, {"evidence": said.get("evidence")}, plan=WAITED, gate=True)


def gone_back(said):
    target = {"id": WHOLE["id"], "release": "b1", "head": HEAD, "hosts": HOSTS}
    given = {
        "cluster": WHOLE["cluster"],
        "heads": [HEAD],
        "target": target,
        "facts": {name: {"facts": host} for name, host in WHOLE["hosts"].items()},
    }
    act(rollback, state="chosen", answers=dict.fromkeys(HOSTS, said.get("plans")), **given)
    act(rollback, state="accepted", answers={**BACK, HEAD: said.get("part")}, **given)
    act(rollback, state="failed", id="1", reasons={HEAD: said.get("why")})


SUMMARIES = [summary(number, number, head=True, cluster=WHOLE["cluster"], hosts=HOSTS) for number in (1, 2)]
REPORTS = {
    looked: LOOKED[HEAD],
    verified: {"answer": LOOKED[HEAD], "evidence": EVIDENCE},
    gone_back: {"plans": {"plans": SUMMARIES, "unreadable": []}, "part": BACK[HEAD], "why": "x"},
}


@fuzzed(
    st.one_of(*(st.tuples(st.just(taken), news(given), st.just(given)) for taken, given in REPORTS.items())), seconds=0
)
def test_any_report_of_a_host(monkeypatch, report):
    monkeypatch.setattr(verify, "_addresses", lambda _host: set())
    monkeypatch.setattr(verify.ActionModule, "command", lambda *_words: {"rc": 0})
    taken, new, given = report
    said = changed(given, new)
    taken(said if isinstance(said, dict) else {})


MEASURING = {
    "benchmark_info": {"running": True, "lines": "1.0000 out x", "record": EXAMPLE},
    "started": {"changed": True},
    "absent": {"changed": True},
}


@fuzzed(news(MEASURING), seconds=0)
def test_any_answer_of_a_head_on_which_is_measured(measuring, new):
    said, honest = changed(MEASURING, new), type(measuring.host).answer
    lies = dict(said) if isinstance(said, dict) else {}

    def answer(name, arguments):
        """Lies once for each state, and goes on with the truth."""
        lie = lies.pop(arguments.get("state", name), None)
        true = honest(measuring.host, name, arguments)
        return lie if isinstance(lie, dict) else true

    measuring.host.answer = answer
    judge(measuring.run)

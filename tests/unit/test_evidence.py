"""What is collected on the head: from a server of this test, and from files of a launcher that may be of any form."""

import hashlib
import json
import os
import ssl
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cluster_lock
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, runtime, serving
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.rpc import Handshake, WorkerDevice
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import evidence, judge, server_client
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Exits, Handshakes, Health
from conftest import typed
from support import llama_server
from support.verification import several, subject

server = llama_server.server


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "state"
    path.mkdir()
    return path


@pytest.fixture
def collect(server, folder, tmp_path, local, monkeypatch):
    """Collects what the head of a plan knows whose server is that of this test; its process is this one."""

    def run(seconds=0.0, running=True, wake=True, **head):
        starts = running if callable(running) else lambda: running
        found = {os.getpid(): ["--", "x"]}
        monkeypatch.setattr(evidence.processes, "account_processes", lambda *_arguments: found if starts() else {})
        place, file = str(tmp_path), tmp_path / "runtime.py"
        file.write_text("text")
        planned = subject(local.plan())
        host = planned.hosts["here"]
        first, second = host.workers
        host = host._replace(
            **{"prefix": place, "cache": place, "units": place, "state": str(folder), "scope": "user", "account": None},
            **dict.fromkeys(("services", "builds", "accounts", "folders", "firewall", "links", "port_probes"), ()),
            files=(FilePlan(str(file), 4, hashlib.sha256(b"text").hexdigest()),),
            **{"service_manager": "launchd", "host_settings": False},
            workers=(
                first._replace(endpoint="127.0.0.1:1", used=False),
                second._replace(endpoint="127.0.0.1:2", used=True),
            ),
        )
        url = f"http://127.0.0.1:{server.server_port}"
        head = planned.head._replace(**{"own_url": url, "argv": ("x",), "launcher": (), **head})
        planned = planned._replace(head=head, hosts={"here": host}, links=("worker1", "worker2"))
        return evidence.collect(planned, seconds, wake)

    return run


def test_a_healthy_head(collect, server, folder, tmp_path):
    (tmp_path / "key").write_text("\nsecret\nother\n")
    (folder / journal.START_LOG_FILE).write_text("load_tensors: CPU model buffer size = 2 MiB\nlast\n")
    runtime.write_handshakes(folder, {})
    help_text = [f"--option{number}" for number in range(30)]
    runtime.record_exit(folder, "with status 1", "\n".join(["one", "Failed to open file", *help_text]))
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "worker1.json").write_text('{"mbit_per_second": 9400}')
    found = collect(1, api_key_file=str(tmp_path / "key"))
    assert found.health == (True, "ok")
    assert found.exits == (1, "with status 1", ("Failed to open file", *help_text[-runtime.MAX_LAST_LINES :]))
    assert found.links == {"worker1": (9400, None, "", False), "worker2": None}
    assert found.server.buffers == {"CPU": {"model": 2.0}}
    assert found.handshakes == ({}, None)
    assert found.drift.differences == ()
    assert found.server.completion[:3] == ("hello", 1, 5)
    assert server.asked == [("Bearer secret", {"prompt": "", "temperature": 0, "max_tokens": 64, "n_probs": 1})]
    assert "secret" not in json.dumps(typed_json.dump(found))


@pytest.mark.parametrize("script, has_page", [("x", True), ("", False)])
def test_a_chat_page_works_only_if_its_script_needs_no_key(collect, server, script, has_page):
    assert collect().server.page
    server.texts.update({"/": '<script src="./chat.js" type="module">', "/chat.js": script})
    assert collect().server.page is has_page


def test_a_cluster_that_lacks_a_host_gets_less_time_for_the_answer(local):
    told, planned = [], subject(local.plan())
    client = SimpleNamespace(ask=lambda _path, seconds, _question: told.append(seconds) or replies.Reply(0, "late"))
    for away in ((), ("strix1",)):
        assert evidence._ask_question(client, planned._replace(unreachable_hosts=away)).error == "late"
    assert told == [300, 60]


def test_connections_are_counted_when_the_question_has_loaded_the_model(collect, server, monkeypatch):
    monkeypatch.setattr(evidence, "_count_rdma_connections", lambda _subject, _host: len(server.asked))
    assert collect().server.rdma == 1


def test_the_key_goes_to_no_other_server(collect, server, tmp_path):
    """Here the tests listen on the port, and no process runs below the prefix."""
    (tmp_path / "key").write_text("secret")
    found = collect(1, running=False, api_key_file=str(tmp_path / "key"))
    error = f"the API key was not sent: no program of the cluster listens on 127.0.0.1:{server.server_port}"
    assert found.server.completion.error == error
    assert server.asked == []


def test_the_key_goes_to_a_server_that_starts_during_the_wait(collect, tmp_path):
    (tmp_path / "key").write_text("secret")
    looks = iter([False])
    found = collect(1, running=lambda: next(looks, True), api_key_file=str(tmp_path / "key"))
    assert found.server.completion.text == "hello"


def test_a_server_that_sleeps_is_judged_by_its_first_load(collect, folder, server):
    load = "load_tensors: CPU model buffer size = 2 MiB\n"
    sleep = "I srv handle_sleep: server is entering sleeping state\n"
    (folder / journal.START_LOG_FILE).write_text(f"{load}{sleep}{load}{sleep}{load[:40]}")
    written = {"state": "asleep", "without": [], "since": 1, "process": os.getpid()}
    (folder / serving.RECORD_FILE).write_text(json.dumps(written))
    left, woken = collect(wake=False), collect(start_timeout=900)
    assert [found.health.detail.split(";")[1] for found in (left, woken)] == [
        " the server is asleep",
        " the server was asleep until this check woke it",
    ]
    assert [found.server.buffers for found in (left, woken)] == [{"CPU": {"model": 2.0}}] * 2
    assert (left.server.completion, woken.server.completion.text, len(server.asked)) == (None, "hello", 1)


def test_a_model_of_several_is_loaded_and_asked_for_by_its_name(collect, server, folder, local, monkeypatch):
    one, two = several(typed(local.plan()), "one", "a two").head.models
    (folder / f"a%20two.{journal.START_LOG_FILE}").write_text("[1] load: CPU model buffer size = 2 MiB\n")
    found = collect(models=(two,))
    assert server.looked[-2:] == ["/props?model=a%20two", "/"]
    assert server.asked[-1][1] == {"prompt": "", "temperature": 0, "max_tokens": 64, "n_probs": 1, "model": "a two"}
    assert found.server.buffers == {"CPU": {"model": 2.0}}
    found = collect(models=(one,))
    assert found.server.buffers == {}
    monkeypatch.setattr(evidence, "MIN_LOAD_TIMEOUT_SECONDS", 0.1)
    server.loads, asked = 1, len(server.asked)
    assert (collect(models=(one,)).health, len(server.asked)) == ((False, "the model is loading"), asked)
    server.loads = 0
    assert collect(models=(one,), wake=False).server.completion is None
    assert len(server.asked) == asked
    server.texts["/models"] = '{"data": [{"id": "one", "status": {"value": "loaded"}}]}'
    assert collect(models=(one,), wake=False).server.completion.text == "hello"
    assert collect(models=(two,), wake=False).server.completion is None


def test_a_server_that_loads_or_is_not_there(collect, server):
    server.health = 503
    assert collect(0.2).health == (False, "the model is loading")
    server.shutdown()
    server.server_close()
    assert "refused" in collect().health.detail


def test_a_server_that_fails_to_answer(collect, server):
    server.status = 500
    found = collect()
    assert found.server.completion.error.startswith("status 500")
    assert found.handshakes.error


def test_a_model_that_fails_names_the_workers_that_it_lacks(collect, server, folder, local, monkeypatch):
    """A router is healthy without them, and says «proxy error» of a model that lost one. Those that the model holds are not asked."""
    endpoints = sorted({entry.endpoint for entry in typed(local.plan()).placement})
    runtime.write_handshakes(folder, dict.fromkeys(endpoints, Handshake("ok", "", "7.0.0", ())))
    monkeypatch.setattr(evidence.rpc, "probe", lambda *_arguments: Handshake("unreachable", "no route"))
    monkeypatch.setattr(evidence.server, "connected_endpoints", lambda _links, wanted: {*wanted} - {endpoints[0]})
    assert not collect().waits_for
    server.status = 500
    found = collect()
    assert found.waits_for == (f"the model needs worker {endpoints[0]}: unreachable, no route",)
    assert [found.handshakes.workers[endpoint].state for endpoint in endpoints] == ["unreachable", "ok"]


def test_the_run_that_has_the_lock_is_known(collect, tmp_path):
    assert collect().lock is None
    run = cluster_lock.Run("anna", "laptop7", "boot", 4711, "site.yml", 1)
    (tmp_path / names.CLUSTER_LOCK_FILE).write_text(json.dumps(run._asdict()))
    assert collect().lock == run


def test_the_form_of_the_evidence(collect, server):
    """What the head sends is what the controller reads."""
    for health, status in ((200, 200), (200, 500), (503, 200)):
        server.health, server.status = health, status
        found = collect()
        sent = json.loads(json.dumps(typed_json.dump(found)))
        assert judge.parse_evidence("here", sent) == found


def test_files_of_the_launcher_of_another_form_count_for_nothing(tmp_path):
    handshakes = [
        "",
        '{"workers": 1}',
        '{"workers": {"a": {"state": "ok"}}}',
        '{"workers": {"a": {"state": "ok", "detail": "", "protocol": "", "devices": [{"free_mib": 1, "total_mib": 1e999}]}}}',
    ]
    path = tmp_path / "file"
    assert evidence.read_exits(path) == Exits(0, "", ())
    for text in handshakes:
        path.write_text(text)
        found = evidence.read_handshakes(path)
        assert (found.workers, bool(found.error)) == ({}, True)
    for text in ("", "{}", '{"number": "x"}', '{"number": 1, "how": "", "log": 1}'):
        path.write_text(text)
        assert evidence.read_exits(path) == Exits(0, "", ())


def test_files_that_are_pipes_or_links_are_not_read(collect, folder):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        for name in (runtime.HANDSHAKES_FILE, runtime.EXITS_FILE, journal.START_LOG_FILE):
            make(folder / name)
        found = collect()
        assert (found.log, found.exits.total) == ((), 0)
        assert "handshakes.json cannot be used" in found.handshakes.error
        for path in folder.iterdir():
            path.unlink()


def test_handshakes_of_an_earlier_start_are_not_believed(tmp_path):
    answers = {"x": Handshake("ok", "", "7.0.0", (WorkerDevice(1, 2),))}
    runtime.write_handshakes(tmp_path, answers)
    path = tmp_path / runtime.HANDSHAKES_FILE
    assert evidence.read_handshakes(path, [os.getpid()]) == Handshakes(answers)
    found = evidence.read_handshakes(path, [1])
    assert found.workers == {}
    assert "from an earlier start of the server: check whether the disk is full or read-only" in found.error


def test_what_the_head_waits_for():
    workers = {
        "192.0.2.12:50052": Handshake("unreachable", "timed out", None, ()),
        "192.0.2.11:50052": Handshake("ok", "", None, ()),
    }
    assert evidence.wait_reasons(workers) == ("the head waits for worker 192.0.2.12:50052: unreachable, timed out",)
    named = evidence.wait_reasons(workers, {"192.0.2.12:50052": "nas"})
    assert named == ("the head waits for nas's worker 192.0.2.12:50052: unreachable, timed out",)


def test_an_answer_of_another_form_is_an_error():
    usage = '{"choices": [{"text": "a"}], "usage": {"completion_tokens": '
    for text in (
        "",
        "{}",
        '{"choices": []}',
        '{"choices": {"0": 1}}',
        usage + "1e999}}",
        usage + "null}}",
        usage + '1}, "timings": []}',
        usage + '1}, "timings": {"predicted_per_second": NaN}}',
        usage + '1}, "timings": {"predicted_per_second": "x"}}',
    ):
        for is_embedding in (False, True):
            found = server_client.parse_completion(replies.Reply(200, text), is_embedding)
            assert "not an answer from llama-server" in found.error


def test_tokens_of_a_question_are_counted_where_a_server_makes_embeddings():
    answer = replies.Reply(200, '{"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 7}}')
    assert server_client.parse_completion(answer, is_embedding=True).tokens == 7


# --------------------------------------------------------------------------------------------------------------- HTTPS


@pytest.fixture
def secured(server, certify):
    """Makes the server speak TLS; returns the part of the head's plan that says so."""

    def secure(**given):
        certificate, key = certify("own", **given)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = f"https://127.0.0.1:{server.server_port}"
        return {"own_url": url, "tls_certificate_file": str(certificate)}

    return secure


def test_a_server_that_speaks_https(collect, server, secured, tmp_path):
    (tmp_path / "key").write_text("secret")
    found = collect(1, api_key_file=str(tmp_path / "key"), **secured())
    assert found.health == Health(True, "ok")
    assert found.server.completion.text == "hello"
    assert server.asked[0][0] == "Bearer secret"
    assert found.server.certificate_names == ("head.lan", "own", "192.0.2.10")


def test_a_server_with_another_certificate_is_neither_believed_nor_waited_for(collect, secured, certify):
    head = secured()
    os.replace(certify("other")[0], head["tls_certificate_file"])
    assert collect(3600, **head).health == Health(False, replies.WRONG_CERTIFICATE_MESSAGE)


@pytest.mark.parametrize("text, why", [(None, "No such file or directory"), ("nothing", "no certificate in PEM form")])
def test_a_certificate_that_cannot_be_read(collect, tmp_path, text, why):
    path = tmp_path / "certificate"
    if text:
        path.write_text(text)
    health = collect(tls_certificate_file=str(path)).health
    assert not health.healthy
    assert health.detail.startswith(f"llama_server_tls_certificate_file is {str(path)!r}, which cannot be used")
    assert why in health.detail

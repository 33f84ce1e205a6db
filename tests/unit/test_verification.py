"""Every check passes on right evidence, and fails on wrong."""

import copy
import http.server
import json
import os
import socket
import ssl
import threading
from unittest import mock

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import verify as verify_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import verification
from ansible_collections.llamacpp.cluster.plugins.modules import verify as verify_module
from conftest import typed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MODULE = verify_module
ENDPOINTS = ("127.0.0.1:50052", "127.0.0.1:50053")


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "workers",
                    "a",
                    "state",
                    "detail",
                    "protocol",
                    "devices",
                    "total_mib",
                    "number",
                    "how",
                    "log",
                    "process",
                ]
            )
            | st.sampled_from(["choices", "text", "usage", "completion_tokens", "timings", "predicted_per_second"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)
EXAMPLES = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def plan(local):
    return local.plan()


@pytest.fixture
def drifts(plan):
    services = {
        service["name"]: {"state": "running", "pid": 1, "addresses": ["127.0.0.1"], "clients": ["127.0.0.1"]}
        for service in plan["hosts"]["here"]["services"]
    }
    lists = ("defined", "stale", "missing_builds", "running_releases", "changed_files", "redefined", "differences")
    return {"here": {"services": services, **{key: [] for key in lists}}}


@pytest.fixture
def evidence(plan):
    answer = {"state": "ok", "detail": "", "protocol": "7.0.0", "devices": [{"free_mib": 1, "total_mib": 65536}]}
    return {
        "health": {"healthy": True, "said": "ok"},
        "handshakes": {"workers": {endpoint: copy.deepcopy(answer) for endpoint in ENDPOINTS}},
        "buffers": {
            entry["device"]: {"model": [entry["weights_mib"], 1], "KV": [entry["kv_mib"], 1], "compute": [1.0, 1]}
            for entry in plan["placement"]
        },
        "completion": {"text": known_answer.SENTENCE, "tokens": 33, "tokens_per_second": 700.0},
        "log": [],
        "log_complete": True,
        "links": {},
        "rdma": 0,
    }


def test_all_right(plan, drifts, evidence):
    judged = verification.judge(plan, drifts, evidence, {})
    assert judged["passed"]
    assert {check["status"] for check in judged["checks"]} == {"passed"}
    assert [check["name"] for check in judged["checks"]] == [
        "release",
        "closed",
        "closed",
        "health",
        "handshake",
        "handshake",
        "buffers",
        "buffers",
        "known answer",
        "completion",
    ]
    assert "700.0 tokens per second" in judged["checks"][-1]["evidence"]


def words(change):
    said = known_answer.SENTENCE.split()
    change(said)
    return " ".join(said)


WRONG = {
    "a service is stopped": (
        "release",
        "llamacpp-server is stopped",
        lambda p, d, e: d["here"]["services"]["llamacpp-server"].update(state="stopped"),
    ),
    "a service of an older plan runs": (
        "release",
        "old runs, but is not planned",
        lambda p, d, e: d["here"]["stale"].append("llamacpp-worker-old"),
    ),
    "a host does not answer": ("release", "the host does not answer", lambda p, d, e: d.clear()),
    "another head holds a worker": (
        "release",
        "llamacpp-worker-one has a connection from 192.0.2.99, which is not the head",
        lambda p, d, e: d["here"]["services"]["llamacpp-worker-one"]["clients"].append("192.0.2.99"),
    ),
    "a worker listens everywhere": (
        "closed",
        "0.0.0.0",
        lambda p, d, e: d["here"]["services"]["llamacpp-worker-one"].update(addresses=["0.0.0.0"]),
    ),
    "no handshake": (
        "handshake",
        "recorded no handshake",
        lambda p, d, e: e["handshakes"]["workers"].pop(ENDPOINTS[1]),
    ),
    "an unused worker is silent": (
        "handshake",
        "silent: held",
        lambda p, d, e: e["handshakes"]["workers"][ENDPOINTS[0]].update(state="silent", detail="held"),
    ),
    "too little memory": (
        "handshake",
        "planned: 1 device",
        lambda p, d, e: e["handshakes"]["workers"][ENDPOINTS[0]].update(devices=[{"free_mib": 1, "total_mib": 9}]),
    ),
    "one device too many": (
        "handshake",
        "2 device",
        lambda p, d, e: e["handshakes"]["workers"][ENDPOINTS[0]]["devices"].append({"free_mib": 1, "total_mib": 1}),
    ),
    "layers are elsewhere": (
        "buffers",
        "model 3.0 MiB, planned",
        lambda p, d, e: e["buffers"]["RPC0[127.0.0.1:50052]"].update(model=[3.0, 1]),
    ),
    "a worker was left out": ("buffers", "model 0.0 MiB", lambda p, d, e: e["buffers"].pop("RPC0[127.0.0.1:50053]")),
    "cache of another size": (
        "buffers",
        "KV 99 MiB",
        lambda p, d, e: e["buffers"]["RPC0[127.0.0.1:50052]"].update(KV=[99, 1]),
    ),
    "a wrong word": (
        "known answer",
        "word 3 is 'off', expected 'of'",
        lambda p, d, e: e["completion"].update(text=words(lambda w: w.__setitem__(2, "off"))),
    ),
    "a missing end": (
        "known answer",
        "expected 'right'",
        lambda p, d, e: e["completion"].update(text=words(lambda w: w.pop())),
    ),
    "one word more": (
        "known answer",
        "'the end'",
        lambda p, d, e: e["completion"].update(text=known_answer.SENTENCE + " every"),
    ),
    "no words": ("known answer", "word 1 is 'missing'", lambda p, d, e: e["completion"].update(text="")),
    "an error": ("completion", "status 500", lambda p, d, e: e.update(completion={"error": "status 500: no"})),
    "no tokens": ("completion", "0 tokens", lambda p, d, e: e["completion"].update(tokens=0)),
    "the head waits for a worker": (
        "health",
        "it waits for worker 192.0.2.11:50052: refused",
        lambda p, d, e: e.update(
            health={"healthy": False, "said": "refused"}, waits_for=["it waits for worker 192.0.2.11:50052: refused"]
        ),
    ),
    "a link without an answer": (
        "link",
        "worker1 does not answer",
        lambda p, d, e: e["links"].update(
            worker1={"mbit_per_second": None, "round_trip_ms": None, "detail": "worker1 does not answer"}
        ),
    ),
    "not healthy": (
        "health",
        "the model is loading",
        lambda p, d, e: e.update(health={"healthy": False, "said": "the model is loading"}),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong(plan, drifts, evidence, case):
    name, said, change = WRONG[case]
    change(plan, drifts, evidence)
    judged = verification.judge(plan, drifts, evidence, {})
    assert not judged["passed"]
    assert any(
        check["name"] == name and check["status"] == "failed" and said in check["evidence"]
        for check in judged["checks"]
    )


def test_a_known_answer_model_that_was_fetched_is_asked_its_question_too(plan, drifts, evidence):
    plan["model"].update(known_answer=None, name="known answer, 16 layers of 128, f32")
    checks = {check["name"]: check for check in verification.judge(plan, drifts, evidence, {})["checks"]}
    assert checks["known answer"]["status"] == "passed"


def test_what_could_not_be_tested_is_said_with_the_reason(plan, drifts, evidence):
    evidence["health"] = {"healthy": False, "said": "refused"}
    checks = {check["name"]: check for check in verification.judge(plan, drifts, evidence, {})["checks"]}
    assert checks["known answer"]["status"] == "not tested"
    assert checks["known answer"]["evidence"] == "the server is not healthy"


def test_another_model_has_no_known_answer(plan, drifts, evidence):
    plan["model"].update(known_answer=None, name="GLM")
    evidence["completion"]["text"] = "2, 3 and 5"
    judged = verification.judge(plan, drifts, evidence, {})
    assert judged["passed"]
    assert [check["evidence"] for check in judged["checks"] if check["status"] == "not tested"] == [
        "GLM is served, not the known-answer model"
    ]


@pytest.mark.parametrize(
    "knocks, status, said",
    [
        ({"192.0.2.11:50052": None}, "passed", "reaches the host, but not this port"),
        ({}, "not tested", "reaches the host at another address"),
        ({"192.0.2.11:50052": "192.0.2.10"}, "not tested", "the controller is the head"),
        ({"192.0.2.11:50052": "192.0.2.99"}, "failed", "can connect from 192.0.2.99"),
    ],
)
def test_a_worker_on_a_network_is_closed_where_somebody_else_could_not_connect(pair, knocks, status, said):
    plan = pair.plan()
    service = {"state": "running", "pid": 1, "addresses": ["192.0.2.11"]}
    found = verification._closed(plan, {"worker1": {"services": {"llamacpp-worker-cpu": service}}}, knocks)
    assert found[0]["status"] == status
    assert said in found[0]["evidence"]


def knocked(source, is_open):
    return [{"endpoint": "192.0.2.11:50052", "source": source, "open": is_open}]


@pytest.mark.parametrize(
    "by, knock, status, said",
    [
        ("worker1", knocked("10.0.0.11", False), "passed", "worker1 reaches the host from 10.0.0.11, but not this"),
        ("worker1", knocked("10.0.0.11", True), "failed", "worker1 can connect from 10.0.0.11"),
        ("worker2", knocked("192.0.2.12", False), "passed", "worker2 reaches the host from 192.0.2.12, but not this"),
        ("worker2", knocked("192.0.2.12", True), "failed", "worker2 can connect from 192.0.2.12: close the port"),
        ("worker2", [], "not tested", "no other host could try"),
    ],
)
@pytest.mark.parametrize("controller", [{}, {"192.0.2.11:50052": "192.0.2.10"}])
def test_other_hosts_say_whether_a_worker_is_closed(pair, by, knock, status, said, controller):
    """The controller cannot: it does not reach that address, or is the head."""
    plan = pair.plan()
    found = verification._closed(plan, {by: {"services": {}, "knocks": knock}}, controller)
    assert (found[0]["status"], said in found[0]["evidence"]) == (status, True)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_host_says_nothing_of_ports_that_it_was_not_asked_to_try(pair, is_open):
    plan = pair.plan()
    plan["hosts"]["worker2"]["knocks"] = ["192.0.2.12:50052"]
    drifts = {"worker2": {"services": {}, "knocks": knocked("192.0.2.12", is_open)}}
    assert verification._closed(plan, drifts, {})[0]["status"] == "not tested"


def test_what_a_host_said_before_another_one_was_changed_does_not_count(pair):
    plan = pair.plan()
    drifts = {"worker2": {"services": {}, "knocks": knocked("192.0.2.12", False)}}
    for changed, status in ((["worker1"], "not tested"), (["worker1", "worker2"], "passed"), (["worker2"], "passed")):
        assert verification._closed(plan, drifts, {}, changed)[0]["status"] == status


@pytest.mark.parametrize(
    "measured, status, said",
    [
        ({"mbit_per_second": 9412, "round_trip_ms": 0.214, "detail": ""}, "passed", "9412 Mbit/s, round trip 0.21 ms"),
        (
            {"mbit_per_second": None, "round_trip_ms": 0.2, "detail": "iperf3 is not installed on head"},
            "passed",
            "round trip 0.20 ms, iperf3 is not installed on head",
        ),
        (None, "not tested", "not measured yet: set llama_link_measure to true"),
    ],
)
def test_what_is_said_of_a_link(evidence, measured, status, said):
    evidence["links"] = {"worker1": measured}
    found = verification._links(evidence)
    assert [(check["name"], check["subject"], check["status"], check["evidence"]) for check in found] == [
        ("link", "worker1", status, said)
    ]


def test_an_open_worker_that_was_accepted_fails_nothing(pair):
    pair.hosts["worker1"]["facts"].update(service_manager="supervisor")
    pair.hosts["head"]["variables"]["llama_accept_advisories"] = ["unprotected-worker"]
    plan = pair.plan()
    found = verification._closed(plan, {}, {"192.0.2.11:50052": "192.0.2.99"})
    assert (found[0]["status"], "accepts" in found[0]["evidence"]) == ("not tested", True)


def test_buffers_are_not_tested_where_the_log_has_none(plan, drifts, evidence):
    """As with 0.3.25, which logs them with --log-verbosity 4 alone."""
    evidence["buffers"] = {}
    judged = verification.judge(plan, drifts, evidence, {})
    checks = [check for check in judged["checks"] if check["name"] == "buffers"]
    assert judged["passed"]
    assert {check["status"] for check in checks} == {"not tested"}
    assert "no sizes of buffers" in checks[0]["evidence"]


@pytest.mark.parametrize(
    "log, complete, transport",
    [
        ("x", True, "over TCP"),
        ("x", False, "over TCP or RDMA: start.log on the head is incomplete"),
        ("RDMA activate failed, staying on TCP\n", True, "over TCP"),
        ("RDMA probed: dev=a gid=3 (RoCEv2) qpn=7 inline=316\n", True, "over TCP"),
        ("I RDMA activated: qpn=1->2 mtu=4096 rx_depth=24\n", True, "over TCP or RDMA: 1 of 2 use RDMA"),
        ("I RDMA activated: qpn=1->2\nI RDMA(Apple/UC) activated: qpn=1->2\n", True, "over RDMA"),
    ],
)
def test_the_transport_that_is_used_is_named(plan, drifts, evidence, log, complete, transport):
    evidence.update(rdma=verification.connections_by_rdma(log), log_complete=complete)
    checks = verification.judge(plan, drifts, evidence, {})["checks"]
    said = {check["evidence"] for check in checks if check["name"] == "handshake"}
    assert said == {f"protocol 7.0.0, 1 device, 65536 MiB, {transport}"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 9999,
        '{"workers": 1}',
        '{"workers": {"a": 1}}',
        '{"workers": {"a": {"state": "ok"}}}',
        '{"workers": {"a": {"state": "ok", "detail": "", "protocol": "", "devices": [{"total_mib": 1e999}]}}}',
    ],
)
def test_a_record_of_another_shape_is_none(tmp_path, text):
    path = tmp_path / "handshakes.json"
    path.write_text(text)
    found = verification.handshakes(path)
    assert found["workers"] == {}
    assert found["error"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"number": "x"}', '{"number": 1, "how": "", "log": 1}', "[" * 9999])
def test_a_record_of_ends_of_another_shape_is_none(tmp_path, text):
    path = tmp_path / runtime.ENDS
    assert verification.ends(path)["number"] == 0
    path.write_text(text)
    assert verification.ends(path) == {"number": 0, "how": "", "log": []}


def test_records_and_logs_that_are_pipes_links_or_endless_are_none(server, tmp_path):
    plan = asked(server, tmp_path)
    folder = tmp_path / "state"
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        for name in (runtime.HANDSHAKES, runtime.ENDS, runtime.START_LOG):
            make(folder / name)
        found = verification.collect(plan, 1)
        assert (found["log"], found["log_complete"], found["ends"]["number"]) == ([], False, 0)
        assert "handshakes.json cannot be used" in found["handshakes"]["error"]
        for path in folder.iterdir():
            path.unlink()


def test_handshakes_of_an_earlier_start_are_not_believed(tmp_path, plan, drifts, evidence):
    runtime.write_handshakes(tmp_path, evidence["handshakes"]["workers"])
    path = tmp_path / runtime.HANDSHAKES
    assert "error" not in verification.handshakes(path, [os.getpid()])
    evidence["handshakes"] = verification.handshakes(path, [1])
    checks = verification.judge(plan, drifts, evidence, {})["checks"]
    assert "of an earlier start: the disk may be full or read-only" in next(
        check["evidence"] for check in checks if check["name"] == "handshake"
    )


def test_buffers_that_an_incomplete_log_does_not_list_are_not_tested(plan, drifts, evidence):
    evidence["buffers"].pop("RPC0[127.0.0.1:50053]")
    evidence["log_complete"] = False
    checks = [check for check in verification.judge(plan, drifts, evidence, {})["checks"] if check["name"] == "buffers"]
    assert [check["status"] for check in checks] == ["passed", "not tested"]
    assert "incomplete" in checks[1]["evidence"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"choices": []}',
        '{"choices": {"0": 1}}',
        '{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1e999}}',
        '{"choices": [{"text": "a"}], "usage": {"completion_tokens": null}}',
        '{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}, "timings": []}',
        '{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}, "timings": {"predicted_per_second": NaN}}',
        '{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}, "timings": {"predicted_per_second": "x"}}',
    ],
)
def test_an_answer_of_another_form_is_an_error(plan, drifts, evidence, text):
    evidence["completion"] = verification.completion(verification.reading.Reply(200, text))
    judged = verification.judge(plan, drifts, evidence, {})
    assert not judged["passed"]
    assert "not one of llama-server" in judged["checks"][-1]["evidence"]


def test_nothing_that_others_wrote_moves_the_cursor(plan, drifts, evidence):
    evidence["health"] = {"healthy": False, "said": "\x1b[2J\rpassed\n\u2028"}
    checks = verification.judge(plan, drifts, evidence, {})["checks"]
    assert all(check["evidence"].isprintable() for check in checks)


@pytest.mark.fuzz
@EXAMPLES
@given(ODD.map(json.dumps) | st.text(max_size=99))
def test_records_and_answers_of_every_form_are_judged(tmp_path, plan, drifts, evidence, text):
    for name in (runtime.HANDSHAKES, runtime.ENDS):
        (tmp_path / name).write_text(text, errors="replace")
    assert verification.ends(tmp_path / runtime.ENDS)["number"] in range(-(10**20), 10**20)
    evidence["handshakes"] = verification.handshakes(tmp_path / runtime.HANDSHAKES)
    evidence["completion"] = verification.completion(verification.reading.Reply(200, text))
    verification.waits_for(evidence["handshakes"]["workers"])
    json.dumps(verification.judge(plan, drifts, evidence, {}), allow_nan=False).encode()


@pytest.mark.fuzz
@EXAMPLES
@given(
    st.lists(
        st.tuples(
            st.sampled_from([": ", ":", "x: ", ""]),
            st.sampled_from(["CPU", "RPC0[127.0.0.1:50052]", "", "x" * 300]) | st.text(max_size=9),
            st.sampled_from([" model", " KV", " compute", ""]),
            st.sampled_from([" buffer size = ", " buffer size =", " "]),
            st.sampled_from(["1.2.3", "9" * 400, "...", "1e9", "-1", "1.5"]) | st.text(max_size=5),
            st.sampled_from([" MiB\n", " MiB", "\n", "\r"]),
        ).map("".join),
        max_size=20,
    ).map("".join)
)
def test_logs_of_every_form_are_judged(plan, drifts, evidence, log):
    evidence["buffers"] = verification.buffers(log)
    json.dumps(verification.judge(plan, drifts, evidence, {}), allow_nan=False).encode()


def test_a_log_may_name_any_number_of_devices():
    log = "".join(f"a: CPU{number} model buffer size = 1.00 MiB\n" for number in range(9999))
    assert len(verification.buffers(log)) == verification.DEVICES


def test_the_controller_does_not_wait_for_another_certificate(local, monkeypatch):
    evidence = {"health": {"healthy": False, "said": reading.OTHER_CERTIFICATE}, "launched": True, "log": []}
    evidence.update(log_complete=True, handshakes={"workers": {}}, links={}, ends={"number": 0, "how": "", "log": []})
    answers = iter([{"evidence": evidence}])
    action = verify_action.ActionModule.__new__(verify_action.ActionModule)
    action.variables = {}
    monkeypatch.setattr(action, "_execute_module", lambda module_args, task_vars: next(answers))
    found = action._collect({}, {**local.plan(), "staging": False}, 600)["evidence"]
    assert found == validation.complete(evidence, verification.EVIDENCE)


def test_a_server_that_ends_at_each_start_is_not_waited_for(local, monkeypatch):
    """It is never seen to run, and its launcher was started often before."""
    plan = {**local.plan(), "staging": False}
    plan["head"]["start_timeout"] = 600
    numbers = iter([7, 8, 8, 10, 11])
    calls = []

    def collected(module_args, task_vars):
        calls.append(module_args["wait"])
        told = {"number": next(numbers), "how": "with status 1", "log": ["error: invalid argument: --colour"]}
        evidence = {"health": {"healthy": False, "said": "refused"}, "launched": True, "ends": told, "log": []}
        evidence.update(log_complete=True, handshakes={"workers": {}}, links={})
        return {"evidence": {**evidence, **({"waits_for": ["it waits for worker x"]} if len(calls) == 4 else {})}}

    action = verify_action.ActionModule.__new__(verify_action.ActionModule)
    action.variables = {}
    monkeypatch.setattr(action, "_execute_module", collected)
    evidence = action._collect({}, plan, 600)["evidence"]
    assert len(calls) == 4
    assert evidence["health"]["said"] == (
        "llama-server ended 3 times while verify waited for it, the last time with status 1"
    )
    assert (evidence["log"], evidence["waits_for"]) == (["error: invalid argument: --colour"], [])


@pytest.mark.parametrize("answered", [True, False])
def test_other_hosts_are_judged_by_their_answers(plan, drifts, evidence, monkeypatch, capsys, answered):
    """What they reported is an argument of the task, not a variable of the hosts."""
    answers = {"here": {"drift": drifts["here"], "changed": False}} if answered else {"here": {"unreachable": True}}
    task = mock.Mock(args={"plan": plan, "answers": answers}, async_val=0)
    action = verify_action.ActionModule(task, *(mock.Mock() for _number in range(5)))
    monkeypatch.setattr(action, "_collect", lambda *_arguments: {"evidence": evidence})
    result = action.run(task_vars={"hostvars": {"here": {}}})
    assert bool(result.get("failed")) != answered
    assert ("Ask it:" in capsys.readouterr().out) == answered
    assert answered or "release of here: the host does not answer" in result["msg"]
    identity = plan["hosts"]["here"]["builds"][0]["id"]
    recorded = {("here", identity): changes.Recorded({"bin/llama-server": "1" * 64}, True)}
    monkeypatch.setattr(verify_action.build_registry, "recorded", lambda _plan: recorded)
    other = f"release {identity} on here is not the one that the controller recorded of here"
    assert (other in action.run(task_vars={"hostvars": {"here": {}}}).get("msg", "")) == answered


def test_the_hosts_that_a_run_changed_are_known_to_the_judgement(plan, drifts, evidence, monkeypatch):
    asked, judge = [], verification.judge
    monkeypatch.setattr(verification, "judge", lambda *arguments: asked.append(arguments) or judge(*arguments))
    task = mock.Mock(args={"plan": plan, "answers": {}, "changed": ["here"]}, async_val=0)
    action = verify_action.ActionModule(task, *(mock.Mock() for _number in range(5)))
    monkeypatch.setattr(action, "_collect", lambda *_arguments: {"evidence": evidence})
    action.run(task_vars={"hostvars": {"here": {}}})
    assert asked[0][-1] == ["here"]


def test_the_result_is_recorded_on_the_head(plan, drifts, evidence, monkeypatch, call, tmp_path):
    """For status.yml; a run without a change stays one, and check mode writes nothing."""
    plan["hosts"]["here"]["prefix"] = str(tmp_path)
    calls, warned = [], []
    answer = {"failed": True, "msg": "x\x1b: No space left on device"}
    monkeypatch.setattr(verify_action.display, "warning", warned.append)
    monkeypatch.setattr(verify_action.display, "display", lambda _text: None)
    for check, answers in ((True, {"here": {}}), (False, {"here": {}}), (False, {"here": {"drift": drifts["here"]}})):
        task = mock.Mock(args={"plan": plan, "answers": answers}, async_val=0, check_mode=check)
        action = verify_action.ActionModule(task, *(mock.Mock() for _number in range(5)))
        monkeypatch.setattr(action, "_collect", lambda *_arguments: {"evidence": evidence})
        monkeypatch.setattr(
            action, "_execute_module", lambda module_args, task_vars: calls.append(module_args) or answer
        )
        action.run(task_vars={"hostvars": {"here": {}}})
    assert len(calls) == 2
    assert "No space left" in warned[0]
    assert "\x1b" not in warned[0]
    for arguments, passed in zip(calls, (False, True)):
        assert call(**arguments)["changed"] is False
        left = json.loads((tmp_path / "verified.json").read_text())
        assert (left["passed"], bool(left["failed"]), left["release"]) == (passed, not passed, plan["release"]["ref"])
    plan["hosts"]["here"]["prefix"] = str(tmp_path / "none")
    assert "No such file or directory" in call(plan=plan, record={})["msg"]


def test_what_the_head_collects_has_the_form_that_is_asked_for(server, tmp_path, monkeypatch):
    monkeypatch.setattr(verification.state, "processes", lambda prefix, account: {})
    for health, status in ((200, 200), (200, 500), (503, 200)):
        server.health, server.status = health, status
        found = json.loads(json.dumps(verification.collect(asked(server, tmp_path), 0)))
        verification.check_evidence("here", found)
        for key in set(found) - {"drift"}:
            with pytest.raises(Refusal, match=f"What here reports of the server .*{key} "):
                verification.check_evidence("here", {**found, key: 1.5})
            if key != "waits_for":
                with pytest.raises(Refusal, match=f"{key} is missing"):
                    verification.check_evidence("here", {name: found[name] for name in found if name != key})
    found["health"]["healthy"] = True
    with pytest.raises(Refusal, match="other lists than pairs"):
        verification.check_evidence(
            "here", {**found, "buffers": {"CPU": {"KV": [1]}}, "completion": {"error": ""}, "rdma": 0}
        )


@pytest.mark.parametrize("odd", [None, [], {}, {"health": {"healthy": True, "said": "\x1b[2J"}}])
def test_a_head_that_answers_in_another_form_is_named(local, monkeypatch, odd):
    action = verify_action.ActionModule.__new__(verify_action.ActionModule)
    action.variables = {}
    monkeypatch.setattr(action, "_execute_module", lambda module_args, task_vars: {"evidence": odd})
    with pytest.raises(Refusal, match="What here reports of the server"):
        action._collect({}, local.plan(), 0)


def test_knocking():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert verification.knock(endpoint) == "127.0.0.1"
    assert verification.knock(endpoint) is None


def test_what_the_head_waits_for():
    answers = {
        "192.0.2.12:50052": {"state": "unreachable", "detail": "timed out"},
        "192.0.2.11:50052": {"state": "ok", "detail": ""},
    }
    assert verification.waits_for(answers) == ["it waits for worker 192.0.2.12:50052: unreachable, timed out"]


def test_sizes_that_are_not_known_exactly_are_told_and_do_not_fail(plan, drifts, evidence):
    plan["placement"][0]["exact"] = []
    evidence["buffers"]["RPC0[127.0.0.1:50052]"] = {"model": [1.0, 1], "KV": [2.0, 1]}
    judged = verification.judge(plan, drifts, evidence, {})
    check = next(check for check in judged["checks"] if check["name"] == "buffers")
    assert check["status"] == "passed"
    assert "KV 2.0 MiB, model planned up to" in check["evidence"]
    del evidence["buffers"]["RPC0[127.0.0.1:50052]"]
    judged = verification.judge(plan, drifts, evidence, {})
    check = next(check for check in judged["checks"] if check["name"] == "buffers")
    assert (check["status"], check["evidence"][:30]) == ("failed", "model 0.0 MiB, planned up to 3")


@pytest.mark.parametrize("lines, passed", [(1, False), (2, False), (3, True)])
def test_each_line_of_the_log_is_rounded_and_so_is_the_plan(plan, drifts, evidence, lines, passed):
    entry = plan["placement"][0]
    entry["kv_mib"] = 1.0
    evidence["buffers"][entry["device"]]["KV"] = [1.02, lines]
    judged = verification.judge(plan, drifts, evidence, {})
    check = next(check for check in judged["checks"] if check["name"] == "buffers")
    assert check["status"] == ("passed" if passed else "failed")


def test_states_of_recurrent_layers_belong_to_the_cache():
    log = "a: CUDA0 KV buffer size = 8.00 MiB\nb: CUDA0 RS buffer size =   0.50 MiB\n"
    assert verification.buffers(log) == {"CUDA0": {"KV": (8.5, 2)}}


def test_parts_of_the_file_that_are_mapped_belong_to_their_device():
    assert verification.buffers("a: MTL0_Mapped model buffer size = 8.00 MiB") == {"MTL0": {"model": (8.0, 1)}}


def test_buffers_of_a_log():
    log = (
        "0.00 I load_tensors:   CPU_Mapped model buffer size =     0.07 MiB\n"
        "0.00 I load_tensors: RPC0[127.0.0.1:50052] model buffer size =     1.98 MiB\n"
        "0.00 I load_tensors: RPC0[127.0.0.1:50052] model buffer size =     1.00 MiB\n"
        "0.02 I llama_context:        CPU  output buffer size =     0.01 MiB\n"
        "0.03 I llama_kv_cache: RPC0[127.0.0.1:50052] KV buffer size =     2.25 MiB\n"
        "0.03 I sched_reserve: RPC0[127.0.0.1:50052] compute buffer size =     4.29 MiB\n"
    )
    assert verification.buffers(log) == {
        "CPU": {"model": (0.07, 1)},
        "RPC0[127.0.0.1:50052]": {"model": (2.98, 2), "KV": (2.25, 1), "compute": (4.29, 1)},
    }


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(self.server.health)
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self):
        self.server.asked.append(
            (self.headers.get("Authorization"), json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        )
        self.send_response(self.server.status)
        self.end_headers()
        reply = {
            "choices": [{"text": "hello"}],
            "usage": {"completion_tokens": 1},
            "timings": {"predicted_per_second": 5},
        }
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.health, served.status, served.asked = 200, 200, []
        threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True).start()
        yield served
        served.shutdown()


def asked(server, tmp_path, **head):
    """The parts of a plan that the head is asked about, for a server of this test."""
    (tmp_path / "state").mkdir(exist_ok=True)
    return {
        "head": {
            "host": "here",
            "hosts": ["here"],
            "own_url": f"http://127.0.0.1:{server.server_port}",
            "argv": ["x"],
            "launcher": [],
            "api_key_file": None,
            "tls_certificate_file": None,
            **head,
        },
        "hosts": {
            "here": {
                "prefix": str(tmp_path),
                "cache": str(tmp_path),
                "state": str(tmp_path / "state"),
                "units": str(tmp_path),
                "names": names.of("llama_cluster").as_dict(),
                "scope": "user",
                "account": None,
                "service_manager": "launchd",
                "services": [],
                "builds": [],
                "keep_releases": 2,
                "knocks": [],
                "accounts": [],
                "folders": [],
                "files": [],
                "workers": [
                    {"endpoint": "127.0.0.1:1", "used": False, "protocol": None},
                    {"endpoint": "127.0.0.1:2", "used": True, "protocol": None},
                ],
            }
        },
        "staging": False,
        "links": ["worker1", "worker2"],
        "release": {"protocol": None},
        "model": {"known_answer": {"layers": 1}},
    }


def test_the_key_goes_to_nobody_but_our_server(server, tmp_path):
    """Here the tests listen on the port: no process below the prefix."""
    key = tmp_path / "key"
    key.write_text("secret")
    found = verification.collect(asked(server, tmp_path, api_key_file=str(key)), 1)
    assert found["completion"]["error"].startswith(
        f"the API key was not sent: 127.0.0.1:{server.server_port} is held by"
    )
    assert server.asked == []


def test_evidence_of_the_head(server, tmp_path, monkeypatch):
    monkeypatch.setattr(verification.state, "processes", lambda prefix, account: {os.getpid(): ["x"]})
    key = tmp_path / "key"
    key.write_text("\nsecret\nother\n")
    plan = asked(server, tmp_path, api_key_file=str(key))
    (tmp_path / "state" / runtime.START_LOG).write_text("load_tensors: CPU model buffer size = 2 MiB\nlast\n")
    (tmp_path / "state" / runtime.HANDSHAKES).write_text('{"workers": {}}')
    runtime.write_end(tmp_path / "state", "with status 1", "one\ntwo\n")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "worker1.json").write_text('{"mbit_per_second": 9400}')
    found = verification.collect(plan, 1)
    assert found["health"]["healthy"]
    assert found["ends"] == {"number": 1, "how": "with status 1", "log": ["one", "two"]}
    assert found["links"] == {
        "worker1": {"mbit_per_second": 9400, "round_trip_ms": None, "detail": ""},
        "worker2": None,
    }
    assert found["buffers"] == {"CPU": {"model": (2.0, 1)}}
    assert found["handshakes"]["workers"]["127.0.0.1:1"]["state"] == "refused"
    assert "127.0.0.1:2" not in found["handshakes"]["workers"]
    assert found["drift"]["differences"] == []
    assert found["completion"] == {"text": "hello", "tokens": 1, "fingerprint": None, "tokens_per_second": 5}
    assert server.asked == [("Bearer secret", {"prompt": "", "temperature": 0})]
    assert "secret" not in json.dumps(found)


def test_evidence_of_a_server_that_sleeps_is_of_its_first_load(server, tmp_path, monkeypatch):
    monkeypatch.setattr(verification.state, "processes", lambda prefix, account: {os.getpid(): ["--", "x"]})
    plan = asked(server, tmp_path, start_timeout=900)
    load = "load_tensors: CPU model buffer size = 2 MiB\nRDMA activated: 1\n"
    sleep = "I srv handle_sleep: server is entering sleeping state\n"
    (tmp_path / "state" / runtime.START_LOG).write_text(f"{load}{sleep}{load}{sleep}{load[:40]}")
    said = {"state": "asleep", "without": [], "since": 1, "process": os.getpid()}
    (tmp_path / "state" / names.SERVING).write_text(json.dumps(said))
    found = verification.collect(plan, 1)
    assert (found["health"]["healthy"], "slept" in found["health"]["said"]) == (True, True)
    assert (found["buffers"], found["rdma"]) == ({"CPU": {"model": (2.0, 1)}}, 1)


def test_evidence_of_a_server_that_loads_or_is_not_there(server, tmp_path):
    server.health = 503
    found = verification.collect(asked(server, tmp_path), 0.2)
    assert found["health"] == {"healthy": False, "said": "the model is loading"}
    server.shutdown()
    server.server_close()
    assert "refused" in verification.collect(asked(server, tmp_path), 0)["health"]["said"]


def test_evidence_of_a_failing_completion_and_no_record(server, tmp_path):
    server.status = 500
    found = verification.collect(asked(server, tmp_path), 1)
    assert found["completion"]["error"].startswith("status 500")
    assert found["handshakes"]["error"]


def test_the_table_shows_each_check(plan, drifts, evidence):
    evidence["completion"]["tokens"] = 0
    text = plan_text.checks_table(verification.judge(plan, drifts, evidence, {})["checks"])
    assert text.count("\n") == 9
    assert "FAILED      completion" in text or "FAILED  completion" in text
    assert plan_text.plan_table(typed(plan)).count("RPC0[") == 2


def test_a_server_is_waited_for_only_while_its_workers_run(plan, drifts):
    assert verification.may_become_healthy(plan, drifts)
    drifts["here"]["services"]["llamacpp-server"]["state"] = "stopped"
    assert verification.may_become_healthy(plan, drifts)
    drifts["here"]["services"]["llamacpp-worker-two"]["state"] = "stopped"
    assert not verification.may_become_healthy(plan, drifts)
    assert not verification.may_become_healthy(plan, {})


def test_instances_on_the_staging_ports_are_judged_by_what_they_computed(local, evidence):
    plan = local.plan(staging=True)
    evidence["handshakes"]["workers"] = {
        worker["endpoint"]: next(iter(evidence["handshakes"]["workers"].values()))
        for worker in plan["hosts"]["here"]["workers"]
    }
    evidence["buffers"] = {
        entry["device"]: {"model": [entry["weights_mib"], 1], "KV": [entry["kv_mib"], 1]} for entry in plan["placement"]
    }
    judged = verification.judge(plan, {}, evidence, {})
    assert {check["name"] for check in judged["checks"]} == {
        "health",
        "handshake",
        "buffers",
        "known answer",
        "completion",
    }
    assert judged["passed"]
    assert verification.may_become_healthy(plan, {})


@pytest.mark.parametrize(
    "staged, status, said",
    [
        ({"reasons": ["here has 5 MiB free on CPU"]}, "not tested", "here has 5 MiB free on CPU"),
        ({"reasons": []}, "failed", "did not start"),
        (
            {"reasons": [], "checks": [{"name": "health", "subject": "x", "status": "failed", "evidence": "refused"}]},
            "failed",
            "health of x: refused",
        ),
        (
            {
                "reasons": [],
                "checks": [
                    {"name": "buffers", "subject": "x", "status": "passed", "evidence": ""},
                    {"name": "known answer", "subject": "x", "status": "passed", "evidence": "36 of 36"},
                ],
            },
            "passed",
            "36 of 36, on the staging ports of 1 worker",
        ),
    ],
)
def test_what_staging_proved_is_a_check_of_the_cluster(plan, drifts, evidence, staged, status, said):
    judged = verification.judge(plan, drifts, evidence, {}, staged)
    check = next(check for check in judged["checks"] if check["name"] == "staging")
    assert check["status"] == status
    assert said in check["evidence"]
    assert judged["passed"] == (status != "failed")


def test_a_host_with_another_release_than_its_builder_is_named(plan, drifts, evidence):
    drifts["here"]["unlike"] = ["release x on here is not the one that the controller recorded of head"]
    (check,) = (
        check for check in verification.judge(plan, drifts, evidence, {})["checks"] if check["name"] == "release"
    )
    assert (check["status"], check["evidence"]) == ("failed", drifts["here"]["unlike"][0])


@pytest.fixture
def secured(server, certify):
    """Makes the server speak TLS; returns the part of the head's plan that says so, and the file with the certificate."""

    def secure(**given):
        certificate, key = certify("own", **given)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = f"https://127.0.0.1:{server.server_port}"
        return {"own_url": url, "tls_certificate_file": str(certificate)}

    return secure


def test_evidence_of_a_server_that_speaks_https(server, secured, tmp_path, monkeypatch, plan, drifts, evidence):
    monkeypatch.setattr(verification.state, "processes", lambda prefix, account: {os.getpid(): ["x"]})
    (tmp_path / "key").write_text("secret")
    found = verification.collect(asked(server, tmp_path, api_key_file=str(tmp_path / "key"), **secured()), 1)
    assert found["health"] == {"healthy": True, "said": "ok"}
    assert found["completion"]["text"] == "hello"
    assert server.asked[0][0] == "Bearer secret"
    assert found["certificate"]["names"] == ["head.lan", "192.0.2.10"]
    verification.check_evidence("here", json.loads(json.dumps(found)))
    plan["head"]["tls_certificate_file"] = "/etc/tls.pem"
    judged = verification.judge(plan, drifts, {**evidence, "certificate": found["certificate"]}, {})
    (check,) = [check for check in judged["checks"] if check["name"] == "certificate"]
    assert (check["subject"], check["status"]) == ("/etc/tls.pem", "passed")
    assert check["evidence"].startswith("for head.lan, 192.0.2.10; valid until ")


def test_a_certificate_that_clients_refuse(server, secured, tmp_path, plan, drifts, evidence):
    found = verification.collect(asked(server, tmp_path, **secured(expired=True)), 1)
    assert found["health"]["healthy"]
    assert found["certificate"] == {"error": "certificate has expired"}
    plan["head"]["tls_certificate_file"] = "/etc/tls.pem"
    judged = verification.judge(plan, drifts, {**evidence, "certificate": found["certificate"]}, {})
    assert not judged["passed"]
    assert "certificate has expired: clients refuse it" in str(judged["checks"])


def test_a_certificate_without_names_is_pointed_out(plan, drifts, evidence):
    shown = {"names": [], "until": "Jan  1 00:00:00 2030 GMT"}
    judged = verification.judge(plan, drifts, {**evidence, "certificate": shown}, {})
    assert judged["passed"]
    assert "for no name, so that most clients refuse it; valid until Jan" in str(judged["checks"])


def test_a_server_with_another_certificate_is_neither_believed_nor_waited_for(server, secured, certify, tmp_path):
    head = secured()
    os.replace(certify("other")[0], head["tls_certificate_file"])
    found = verification.collect(asked(server, tmp_path, **head), 3600)
    assert found["health"] == {"healthy": False, "said": reading.OTHER_CERTIFICATE}
    assert "certificate" not in found


@pytest.mark.parametrize("text, why", [(None, "No such file or directory"), ("nothing", "no certificate in PEM form")])
def test_a_certificate_that_cannot_be_read(server, tmp_path, text, why):
    path = tmp_path / "certificate"
    if text:
        path.write_text(text)
    found = verification.collect(asked(server, tmp_path, tls_certificate_file=str(path)), 0)
    assert not found["health"]["healthy"]
    assert found["health"]["said"].startswith(
        f"llama_server_tls_certificate_file is {str(path)!r}, which cannot be used"
    )
    assert why in found["health"]["said"]


def test_a_server_that_hangs_up_when_its_certificate_is_examined(certify):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"https://127.0.0.1:{free.getsockname()[1]}"
    assert "refused" in verification.examine_certificate(url, str(certify("own")[0]))["error"]

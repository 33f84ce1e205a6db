"""Every check passes on right reports, and fails on wrong ones."""

import json
import os
import socket
import subprocess
from functools import partial

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import cluster_lock
from ansible_collections.llamacpp.cluster.plugins.action import verify as verify_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.cluster_lock import Run
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.rpc import WorkerDevice
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import PortProbe
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import start_log, types
from ansible_collections.llamacpp.cluster.plugins.modules import verify as verify_module
from conftest import typed
from support.drift import drifts
from support.verification import ANSWER, RIGHT, checks, healthy, judged, reports, several, unhealthy, verify

MODULE = verify_module
ONE, TWO = "127.0.0.1:50052", "127.0.0.1:50053"
WORKER = "RPC0[127.0.0.1:50052]"


@pytest.fixture
def plan(local):
    return typed(local.plan())


def test_a_cluster_that_does_what_was_planned(plan):
    report = judged(plan)
    assert report.passed
    of_workers = ["handshake", "handshake", "buffers", "buffers"]
    names = ["release", "closed", "closed", "health", *of_workers, "known answer", "completion"]
    assert [(check.name, check.status) for check in report.checks] == [(name, "passed") for name in names]
    assert "700.0 tokens per second" in report.checks[-1].evidence


def with_answer(evidence, endpoint, **changes):
    workers = evidence.handshakes.workers
    return evidence._replace(handshakes=types.Handshakes({**workers, endpoint: workers[endpoint]._replace(**changes)}))


def with_server(evidence, **changes):
    return evidence._replace(server=evidence.server._replace(**changes))


def with_buffers(evidence, device, **sizes):
    """:param sizes: kind → MiB."""
    found = evidence.server.buffers
    return with_server(evidence, buffers={**found, device: {**found[device], **sizes}})


def without_device(evidence, device):
    buffers = {name: sizes for name, sizes in evidence.server.buffers.items() if name != device}
    return with_server(evidence, buffers=buffers)


def words(change):
    """A change of the evidence: the answer has other words."""
    answer = known_answer.SENTENCE.split()
    change(answer)
    return lambda evidence: with_server(evidence, completion=RIGHT._replace(text=" ".join(answer)))


def changed(evidence, **values):
    return evidence._replace(**values)


BROKEN_RECORD = types.Handshakes({}, "handshakes.json cannot be used")
WAITS = "the head waits for worker x: refused"
WRONG_EVIDENCE = [
    ("handshake", "recorded no handshake", partial(changed, handshakes=types.Handshakes({ONE: ANSWER}))),
    ("handshake", "handshakes.json cannot be used", partial(changed, handshakes=BROKEN_RECORD)),
    ("handshake", "silent: held", partial(with_answer, endpoint=ONE, state="silent", detail="held")),
    ("handshake", "planned: 1 device", partial(with_answer, endpoint=ONE, devices=(WorkerDevice(9, 9),))),
    ("handshake", "2 device", partial(with_answer, endpoint=ONE, devices=(*ANSWER.devices, WorkerDevice(1, 1)))),
    ("buffers", "model 3.0 MiB, planned", partial(with_buffers, device=WORKER, model=3.0)),
    ("buffers", "model 0.0 MiB", partial(without_device, device=WORKER)),
    ("buffers", "KV 99 MiB", partial(with_buffers, device=WORKER, KV=99)),
    ("known answer", "word 3: expected 'of', got 'off'", words(lambda w: w.__setitem__(2, "off"))),
    ("known answer", "expected 'right'", words(lambda w: w.pop())),
    ("known answer", "expected the end, got", words(lambda w: w.append("every"))),
    ("known answer", "got the end", words(lambda w: w.clear())),
    ("completion", "status 500", partial(with_server, completion=RIGHT._replace(error="status 500: no"))),
    ("completion", "0 tokens", partial(with_server, completion=RIGHT._replace(tokens=0))),
    ("health", WAITS, lambda _evidence: unhealthy(waits_for=(WAITS,))),
    ("health", "the model is loading", lambda _evidence: unhealthy("the model is loading\x1b[2J\r\u2028")),
]


@pytest.mark.parametrize("name, text, change", WRONG_EVIDENCE)
def test_wrong_evidence_of_the_head(plan, name, text, change):
    report = judged(plan, change(healthy(plan)))
    assert not report.passed
    assert all(check.evidence.isprintable() for check in report.checks)
    assert any(check.status == "failed" and text in check.evidence for check in checks(report, name))


SERVER, FIRST = "llamacpp-server", "llamacpp-worker-one"
STRANGER = f"{FIRST} has a connection from 192.0.2.99, not from the head"
OLD = "llamacpp-worker-old is running but is not planned"
WRONG_REPORTS = [
    ("release", "llamacpp-server is stopped", SERVER, {"state": "stopped"}, {}),
    ("release", OLD, SERVER, {}, {"unplanned": ("llamacpp-worker-old",)}),
    ("release", STRANGER, FIRST, {"clients": ("127.0.0.1", "192.0.2.99")}, {}),
    ("closed", "0.0.0.0", FIRST, {"addresses": ("0.0.0.0",)}, {}),
]


@pytest.mark.parametrize("name, text, service, of_service, of_host", WRONG_REPORTS)
def test_wrong_reports_of_hosts(plan, name, text, service, of_service, of_host):
    right = reports(plan)["here"]
    services = {**right.services, service: right.services[service]._replace(**of_service)}
    report = judged(plan, hosts={"here": right._replace(services=services, **of_host)})
    assert not report.passed
    assert any(check.status == "failed" and text in check.evidence for check in checks(report, name))


def test_what_could_not_be_tested_has_the_reason(plan):
    report = judged(plan, unhealthy())
    assert [(check.name, check.evidence) for check in report.checks if check.status == "not tested"] == [
        (name, "the server is not healthy") for name in ("handshake", "buffers", "known answer", "completion", "speaks")
    ]


def test_a_server_that_sleeps_is_asked_nothing_unless_it_is_to_be_woken(local, plan, capsys):
    described, told = local.plan(), []
    answers = {"here": {"drift": drifts(described)["here"]}}

    def record(_text, data):
        told.append(json.loads(data))
        return {"rc": 0}

    asleep = verify(described, healthy(plan, None), answers=answers, recorded=record)
    left_so = [check["name"] for check in asleep["report"]["checks"] if "(asleep)" in check["evidence"]]
    assert left_so == ["known answer", "completion"]
    shown = capsys.readouterr().out
    assert "The server's answers were not tested: the model is not loaded" in shown
    assert "Ask it" not in shown
    assert (told[0]["passed"], told[0]["asleep"]) == (True, True)
    wakes = [({}, False), ({"wake": True}, True), ({"changed": ["here"]}, True), ({"gate": True}, True)]
    for arguments, wake in wakes:
        asked = {"asked": lambda module_args: told.append(module_args["wake"])}
        verify(described, healthy(plan), answers=answers, **asked, **arguments)
        assert told.pop() == wake


def test_a_known_answer_model_that_was_fetched_is_asked_its_question_too(plan):
    model = plan.model._replace(known_answer=None, name="known answer, 16 layers of 128, f32")
    (check,) = checks(judged(plan._replace(model=model)), "known answer")
    assert check.status == "passed"
    report = judged(plan._replace(model=model._replace(name="GLM")), healthy(plan, RIGHT._replace(text="2, 3 and 5")))
    assert report.passed
    (check,) = checks(report, "known answer")
    assert (check.status, check.evidence) == ("not tested", "the cluster serves GLM, not the known-answer model")


def closed(plan, probes=(), changed=(), **by_host):
    """The first check of a port.

    :param by_host: host → its attempts to connect.
    """
    hosts = {name: reports(plan)[name]._replace(port_probes=attempts) for name, attempts in by_host.items()}
    check = checks(judged(plan, hosts=hosts, probes=probes, changed_hosts=changed), "closed")[0]
    assert check.subject == "192.0.2.11:50052"
    return check.status, check.evidence


def tried(source, is_open):
    return (PortProbe("192.0.2.11:50052", source, is_open),)


def test_a_port_is_closed_where_somebody_else_than_the_head_could_not_connect(pair):
    plan, endpoint = typed(pair.plan()), "192.0.2.11:50052"
    by_controller = [
        ({endpoint: None}, {}, "passed", "the controller reaches the host, but not this port"),
        ({}, {}, "not tested", "not tested: no connection could be tried"),
        ({endpoint: "192.0.2.10"}, {}, "not tested", "not tested: no connection could be tried"),
        ({endpoint: "192.0.2.99"}, {}, "failed", "the controller can connect from 192.0.2.99"),
    ]
    by_others = [
        ("worker1", tried("10.0.0.11", False), "passed", "worker1 reaches the host from 10.0.0.11, but not this"),
        ("worker1", tried("10.0.0.11", True), "failed", "worker1 can connect from 10.0.0.11"),
        ("worker2", tried("192.0.2.12", False), "passed", "worker2 reaches the host from 192.0.2.12, but not this"),
        ("worker2", tried("192.0.2.12", True), "failed", "worker2 can connect from 192.0.2.12: close the port"),
        ("worker2", (), "not tested", "not tested: no connection could be tried"),
    ]
    for probes in ({}, {endpoint: "192.0.2.10"}):
        by_controller += [(probes, {name: attempts}, *expected) for name, attempts, *expected in by_others]
    for probes, attempts, status, text in by_controller:
        found = closed(plan, probes, **attempts)
        assert (found[0], text in found[1]) == (status, True), found


def test_attempts_before_another_host_was_changed_do_not_count(pair):
    attempts = tried("192.0.2.12", False)
    for changed, status in ((["worker1"], "not tested"), (["worker1", "worker2"], "passed"), (["worker2"], "passed")):
        assert closed(typed(pair.plan()), changed=changed, worker2=attempts)[0] == status


def test_attempts_of_a_host_that_was_not_asked_to_try_do_not_count(pair):
    plan = typed(pair.plan())
    worker2 = plan.hosts["worker2"]._replace(port_probes=("192.0.2.12:50052",))
    plan = plan._replace(hosts={**plan.hosts, "worker2": worker2})
    assert {closed(plan, worker2=tried("192.0.2.12", it))[0] for it in (True, False)} == {"not tested"}


def test_an_open_worker_that_was_accepted_fails_nothing(pair):
    pair.hosts["worker1"]["facts"].update(service_manager="supervisor")
    pair.hosts["head"]["variables"]["llama_accept_advisories"] = ["unprotected-worker"]
    status, text = closed(typed(pair.plan()), {"192.0.2.11:50052": "192.0.2.99"})
    assert (status, "accepted with" in text) == ("not tested", True)


def test_the_port_of_a_worker(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert verify_action._probe("localhost", endpoint) == "127.0.0.1"
        assert verify_action._probe("192.0.2.1", endpoint) == verify_action.UNREACHABLE
        assert verify_action._probe("a..b", endpoint) == verify_action.UNREACHABLE
    assert verify_action._probe("127.0.0.1", endpoint) is None


def test_links(plan):
    without_iperf = "iperf3 is not installed on head"
    cases = [
        (types.LinkMeasurement(9412, 0.214, "", True), "passed", "9412 Mbit/s, round trip 0.21 ms"),
        (
            types.LinkMeasurement(None, 0.2, without_iperf, False),
            "passed",
            f"round trip 0.20 ms, {without_iperf}, run with -e llama_link_measure=true to use this measurement in planning",
        ),
        (
            types.LinkMeasurement(None, None, without_iperf, False),
            "not tested",
            f"{without_iperf}, the head's ping was not answered: run with -e llama_link_measure=true to measure again",
        ),
        (None, "not tested", "not measured yet: the next run that reaches both hosts will measure it"),
    ]
    for measured, status, text in cases:
        report = judged(plan, healthy(plan)._replace(links={"worker1": measured}))
        assert checks(report, "link") == [types.Check("link", "worker1", status, text)]


def test_buffers_that_the_log_does_not_list_are_not_tested(plan):
    """As with 0.3.25, which logs them with --log-verbosity 4 alone."""
    report = judged(plan, with_server(healthy(plan), buffers={}))
    assert report.passed
    assert [check.status for check in checks(report, "buffers")] == ["not tested", "not tested"]
    assert "lists no buffer sizes" in checks(report, "buffers")[-1].evidence


def test_sizes_that_are_bounds_are_shown_and_do_not_fail(plan):
    placement = (plan.placement[0]._replace(exact=()), *plan.placement[1:])
    plan = plan._replace(placement=placement)
    check = checks(judged(plan, with_buffers(healthy(plan), WORKER, model=1.0, KV=2.0)), "buffers")[0]
    assert check.status == "passed"
    assert "KV 2.0 MiB" in check.evidence
    assert "MiB planned for model" in check.evidence
    check = checks(judged(plan, without_device(healthy(plan), WORKER)), "buffers")[0]
    assert (check.status, check.evidence[:30]) == ("failed", "model 0.0 MiB, planned up to 3")


@pytest.mark.parametrize("logged, status", [(1.02, "passed"), (1.03, "failed"), (0.97, "failed")])
def test_lines_of_the_log_are_rounded(plan, logged, status):
    plan = plan._replace(placement=(plan.placement[0]._replace(kv_mib=1.0), *plan.placement[1:]))
    assert checks(judged(plan, with_buffers(healthy(plan), WORKER, KV=logged)), "buffers")[0].status == status


def test_buffers_of_a_log():
    log = (
        "0.00 I load_tensors:   CPU_Mapped model buffer size =     0.07 MiB\n"
        "0.00 I load_tensors: RPC0[127.0.0.1:50052] model buffer size =     1.98 MiB\n"
        "0.00 I load_tensors: RPC0[127.0.0.1:50052] model buffer size =     1.00 MiB\n"
        "0.02 I llama_context:        CPU  output buffer size =     0.01 MiB\n"
        "0.03 I llama_kv_cache: RPC0[127.0.0.1:50052] KV buffer size =     2.25 MiB\n"
        "0.03 I llama_memory_recurrent: RPC0[127.0.0.1:50052] RS buffer size =   0.50 MiB\n"
        "0.03 I sched_reserve: RPC0[127.0.0.1:50052] compute buffer size =     4.29 MiB\n"
        # As builds 11434 and 12211 write them.
        "0.03 I llama_dsv4_comp_state: RPC0[127.0.0.1:50053] DSV4 csa state buffer size = 0.25 MiB\n"
        "0.03 I init_rotation: RPC0[127.0.0.1:50053] rotation buffer size = 0.06 MiB\n"
        "0.03 I output_reserve:        CPU layer input buffer size =     0.50 MiB (3 layers)\n"
        # As ik_llama.cpp writes it.
        "llm_load_tensors: RPC0[127.0.0.1:51052] buffer size =     4.03 MiB\n"
        "llama_kv_cache_init: RPC0[127.0.0.1:51052] KV buffer size =    32.00 MiB\n"
        "llama_init_from_model: RPC0[127.0.0.1:51052] compute buffer size =    12.25 MiB\n"
    )
    assert start_log.parse_buffers(log) == {
        "CPU": {"model": 0.07, "layer input": 0.5},
        WORKER: {"model": 2.98, "KV": 2.75, "compute": 4.29},
        "RPC0[127.0.0.1:50053]": {"KV": 0.25, "rotation": 0.06},
        "RPC0[127.0.0.1:51052]": {"model": 4.03, "KV": 32.0, "compute": 12.25},
    }
    for odd in ("1.2.3", "...", "1e9", "-1", "9" * 400):
        assert start_log.parse_buffers(f"a: CPU model buffer size = {odd} MiB\n") == {}
    endless = "".join(f"a: CPU{number} model buffer size = 1.00 MiB\n" for number in range(9999))
    assert len(start_log.parse_buffers(endless)) == start_log.MAX_DEVICES


# ------------------------------------------------------------------------------------------------------------ the action


def test_hosts_are_judged_by_their_answers(local, plan, capsys):
    """What they reported is an argument of the task, not a variable of the hosts."""
    described = local.plan()
    answers = {"here": {"drift": drifts(described)["here"], "changed": False}}
    result = verify(described, healthy(plan), answers=answers)
    assert result["report"]["passed"]
    assert list(result["report"]["checks"][0]) == ["name", "subject", "status", "evidence"]
    assert "Try it on here:" in capsys.readouterr().out
    result = verify(described, healthy(plan), answers={"here": {"unreachable": True}})
    assert result["msg"].startswith("Verification failed: release (here): the host did not answer")
    assert result["failing"] == ["closed", "release"] or result["failing"] == ["release"]
    shown = capsys.readouterr().out
    assert "  FAILED      release" in shown
    assert "Ask it" not in shown


def test_a_failure_says_what_to_do_or_where_to_look(local, monkeypatch):
    described = local.plan()
    evidence = unhealthy("refused", log=("bad model",))
    assert verify(described, evidence)["msg"].endswith("The last lines of its log (errors first):\nbad model"), (
        "nothing runs"
    )
    waiting = evidence._replace(waits_for=("the head waits for worker x: silent",))
    assert "Check firewalls" in verify(described, waiting)["msg"]


def test_a_failure_names_the_worker_that_is_away_and_the_run_that_has_the_lock(local, plan):
    lacks = "the model needs nas's worker 192.0.2.12:50052: silent"
    other = Run("anna", "laptop7", "boot", 4711, "site.yml")
    evidence = healthy(plan, RIGHT._replace(error="status 500: proxy error"))._replace(waits_for=(lacks,), lock=other)
    asked = {"answers": {name: {"drift": drift} for name, drift in drifts(local.plan()).items()}}
    for arguments in (asked, {"gate": True}):
        said = verify(local.plan(), evidence, **arguments)["msg"]
        assert f"status 500: proxy error; {lacks}" in said
    said = verify(local.plan(), evidence, **asked)["msg"]
    assert said.endswith("Another run may be changing this cluster: " + other.describe() + ".")
    mine = cluster_lock.run_identity(os.getppid(), [])
    for run in (mine, mine._replace(pid=2**40)):  # this one, and one that has ended here
        assert "Another run" not in verify(local.plan(), evidence._replace(lock=run), **asked)["msg"]


def test_a_host_that_froze_in_the_middle_is_named_and_the_question_is_not_held_for_long(pair, capsys):
    described, told = pair.plan(), []
    answers = {name: {"drift": drift} for name, drift in drifts(described).items()}
    all_hosts = ["head", "worker1", "worker2"]
    waits = unhealthy(waits_for=("the head waits for worker 192.0.2.11:50052: silent",))
    for left, away in ((all_hosts, []), (["head", "worker2"], ["worker1"])):
        for arguments in ({"answers": answers}, {"gate": True}):
            play = {
                "ansible_play_hosts_all": all_hosts,
                "ansible_play_hosts": left,
                "groups": {"llama_cluster": all_hosts},
            }
            said = verify(described, *[waits] * 99, asked=told.append, play=play, **arguments)["msg"]
            assert told[-1]["plan"]["unreachable_hosts"] == away
            assert ("The controller got no answer from worker1 either" in said) is bool(away)
            assert ("Check firewalls" in said) is (not away)
            line = "  worker1 did not answer: the server may be waiting for these hosts, so this run waits at most 60 s for the server"
            assert (line in capsys.readouterr().out) is bool(away)
    verify(described, *[waits] * 99, asked=told.append, answers={"head": answers["head"]})
    assert told[-1]["plan"]["unreachable_hosts"] == ["worker1", "worker2"]


def test_the_hosts_that_a_run_changed_are_known_to_the_judgement(pair, monkeypatch):
    described = pair.plan()
    found = drifts(described)
    found["worker2"]["port_probes"] = [{"endpoint": "192.0.2.11:50052", "source": "192.0.2.12", "open": True}]
    answers = {name: {"drift": drift} for name, drift in found.items()}
    for changed, failing in (([], ["closed"]), (["worker1"], None)):
        result = verify(described, healthy(typed(described)), answers=answers, changed=changed)
        assert result.get("failing") == failing


def test_the_head_is_judged_by_how_it_is_now(local, plan, monkeypatch):
    described = local.plan()
    before, now = drifts(described)["here"], drifts(described, **{"llamacpp-server": "different"})["here"]
    evidence = healthy(plan)._replace(drift=now)
    result = verify(described, evidence, answers={"here": {"drift": before}})
    assert "llamacpp-server is running with another configuration" in result["msg"]
    with pytest.raises(AnsibleActionFail, match="The report from here about"):
        verify(described, evidence._replace(drift={"services": 1}), monkeypatch)


def test_the_result_is_recorded_on_the_head(local, plan, monkeypatch, tmp_path):
    """For status.yml; a run without a change stays one, and check mode writes nothing."""
    described, left, warned = local.plan(), [], []
    monkeypatch.setattr(verify_action.Display, "warning", lambda _self, text: warned.append(text))
    monkeypatch.setattr(verify_action.display, "display", lambda _text: None)

    def record(text, data):
        ran = subprocess.run(text, shell=True, input=data, capture_output=True, check=False)
        left.append((tmp_path / "it's" / "verified.json").read_text() if not ran.returncode else None)
        return {"rc": ran.returncode, "stderr": ran.stderr.decode() + "\x1b"}

    answers = {"here": {"drift": drifts(described)["here"]}}
    described["hosts"]["here"]["prefix"] = str(tmp_path / "it's")
    for check_mode, reported in ((True, {}), (False, {}), (False, answers)):
        verify(described, healthy(plan), check_mode=check_mode, recorded=record, answers=reported)
        (tmp_path / "it's").mkdir(exist_ok=True)
    described["hosts"]["here"]["prefix"] = str(tmp_path / "none")
    verify(described, healthy(plan), recorded=record, answers=answers)
    outcomes = [json.loads(text) for text in left if text]
    assert [(outcome["passed"], bool(outcome["failed_checks"])) for outcome in outcomes] == [(0, 1), (1, 0)]
    assert outcomes[0]["release"] == plan.release.ref
    assert [path.name for path in (tmp_path / "it's").iterdir()] == ["verified.json"]
    assert len(left) == 3
    assert len(warned) == 1
    assert "here could not write verified.json" in warned[0]
    assert "\x1b" not in warned[0]


def test_a_head_that_fails_or_answers_in_another_form_is_named(local, plan):
    form, right = "The report from here about the server", healthy(plan)
    contradictions = (right._replace(server=None), right._replace(health=types.Health(False, "no")))
    odd = (None, [], {}, {"health": {"healthy": True, "detail": "\x1b[2J"}}, *contradictions)
    for answer, said in (*((one, form) for one in odd), ({"failed": True, "msg": "no ss there\x1b[2J"}, "no ss there")):
        with pytest.raises(AnsibleActionFail, match=said) as raised:
            verify(local.plan(), answer)
        assert str(raised.value).isprintable()


# ------------------------------------------------------------------------------------------------------------- the gate


def test_the_gate_is_one_right_answer(local, plan):
    described, wrong = local.plan(), RIGHT._replace(text="wrong")
    assert verify(described, healthy(plan), gate=True) == {"changed": False}
    result = verify(described, healthy(plan, wrong), gate=True)
    assert result["failed"]
    assert "known answer: word 1: expected" in result["msg"]
    result = verify(described, healthy(plan, RIGHT._replace(error="status 500: compute error")), gate=True)
    assert "completion: status 500" in result["msg"]
    described["model"].update(known_answer=None, name="some model")
    assert verify(described, healthy(plan, wrong), gate=True) == {"changed": False}


def test_each_model_that_takes_turns_is_judged_by_its_own_load(plan, monkeypatch):
    plan, displayed = several(plan, "one", "two", "three"), []
    monkeypatch.setattr(verify_action.display, "display", displayed.append)
    wrong = with_buffers(healthy(plan, RIGHT._replace(text="wrong")), WORKER, KV=99)
    late = unhealthy("the model is loading")
    result = verify(typed_json.dump(plan), healthy(plan), wrong, late, late)
    assert result["failing"] == ["buffers", "health", "known answer", "release"]
    assert f"buffers (two: {WORKER}): KV 99 MiB" in result["msg"]
    assert "known answer (two: " in result["msg"]
    assert f"health (three: {plan.head.url}): the model is loading" in result["msg"]
    assert " of one: " not in result["msg"]
    left = healthy(plan, None)
    left = left._replace(server=left.server._replace(buffers={}))
    report = judged(plan, healthy(plan), other_evidence=[left, left])
    assert report.passed
    left_so = [(check.name, check.subject[:5]) for check in report.checks if "(asleep)" in check.evidence]
    assert left_so == [(name, model) for model in ("two: ", "three") for name in ("known answer", "completion")]
    assert verify(typed_json.dump(plan), wrong, gate=True)["failed"]
    assert verify(typed_json.dump(plan), healthy(plan), gate=True) == {"changed": False}


def test_the_gate_ends_with_the_log_of_a_server_that_ends_at_each_start(local):
    crashed = unhealthy("Connection refused", exits=types.Exits(3, "with status 1", ("bad model",)))
    result = verify(local.plan(), unhealthy("Connection refused"), crashed, gate=True)
    assert "exited 3 times" in result["msg"]
    assert result["msg"].endswith("\nbad model")

"""A head that serves on a fallback is as planned, as long as it does exactly what its launcher and the plan say."""

import os
import subprocess
import sys

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import verify as verify_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes, state
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServiceFallback
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import judge
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Handshakes, ServedFallback
from conftest import typed
from support.drift import drifts
from support.hosts import free_port, service_plan
from support.verification import checks, healthy, judged, reports, verify

pytestmark = pytest.mark.programs

WORKERS = ("192.0.2.11:50052", "192.0.2.12:50052")
SERVER = "import time\nprint(1, flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def service(tmp_path):
    """A planned head whose programs are scripts, with a fallback."""
    (tmp_path / "server").write_text(SERVER)
    server = [sys.executable, str(tmp_path / "server")]
    return service_plan(
        [sys.executable, tmp_path / "launcher", server[1], "--full"],
        f"127.0.0.1:{free_port()}",
        name="llamacpp-server",
        kind="head",
        process=(*server, "--full"),
        fallbacks=(ServiceFallback("worker1:cpu", (*server, "--small")),),
    )


@pytest.fixture
def launch(tmp_path):
    """Starts the launcher as the service manager does, with a llama-server of these arguments; returns the launcher's process."""
    started = []

    def start(service, *arguments):
        program = str(tmp_path / "server")
        script = f"import os, subprocess, sys\nsubprocess.run({[sys.executable, program, *arguments]!r})\n"
        (tmp_path / "launcher").write_text(script)
        process = subprocess.Popen(service.argv, stdout=subprocess.PIPE)
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        for pid in processes.account_processes(str(tmp_path), None):
            os.kill(pid, 9)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    "argument, expected, fallback",
    [("--small", "running", "worker1:cpu"), ("--full", "running", None), ("--other", "waiting", None)],
)
def test_the_plan_or_a_planned_fallback_runs_and_nothing_else(tmp_path, service, launch, argument, expected, fallback):
    process = launch(service, argument)
    found = state.service_state(service, processes.account_processes(str(tmp_path), None), processes.read_sockets())
    assert (found.state, found.fallback) == (expected, fallback)
    assert (found.pid != process.pid) == (expected == "running")


@pytest.fixture
def plan(pair):
    pair.hosts["head"]["variables"]["llama_server_fallback"] = True
    return pair.plan()


def on_fallback(plan):
    """What the head reports while worker1 is off; ``plan`` has types."""
    served = ServedFallback("worker1:cpu", 1700000000).find_in(plan.fallbacks)
    evidence = healthy(plan._replace(placement=served.placement))
    lost = evidence.handshakes.workers[WORKERS[0]]._replace(state="unreachable", detail="timed out")
    return evidence._replace(
        fallback=ServedFallback("worker1:cpu", 1700000000),
        handshakes=Handshakes({**evidence.handshakes.workers, WORKERS[0]: lost}),
    )


def test_a_run_restarts_no_head_that_serves_on_a_fallback(plan):
    found = drifts(plan)
    found["head"]["services"]["llamacpp-server"]["fallback"] = "worker1:cpu"
    del found["worker1"]
    answers = changes.parse_answers(typed(plan).hosts, {name: {"drift": drift} for name, drift in found.items()})
    decided = changes.decide(typed(plan), changes.comparable_drifts(answers))
    assert decided.restarts["head"] == []
    assert (decided.outdated_hosts, decided.unreached_hosts) == ([], ["worker1"])


def test_verify_judges_the_fallback_and_fails_since_the_cluster_is_degraded(plan):
    plan = typed(plan)
    hosts = {name: report for name, report in reports(plan).items() if name != "worker1"}
    report = judged(plan, on_fallback(plan), hosts=hosts)
    status = {(check.name, check.subject): check.status for check in report.checks}
    assert status["release", "head"] == "passed"
    assert status["release", "worker1"] == "failed"
    assert status["handshake", WORKERS[1]] == "passed"
    assert status["handshake", WORKERS[0]] == "not tested"
    assert [check.status for check in checks(report, "buffers")] == ["passed"]
    assert status["known answer", plan.head.url] == "passed"
    (check,) = checks(report, "fallback")
    assert (check.subject, check.status) == (plan.head.url, "failed")
    assert check.evidence.startswith("the head has served without worker1:cpu since 2023-11-14 22:13:20 UTC")
    assert not report.passed


@pytest.mark.parametrize("patience, failing", [(0, True), (60, False)])
def test_verify_waits_for_the_return_from_a_fallback(plan, monkeypatch, patience, failing):
    said, evidence = [], (on_fallback(typed(plan)), healthy(typed(plan)))
    monkeypatch.setattr(verify_action.display, "display", said.append)
    answers = {name: {"drift": drift} for name, drift in drifts(plan).items()}
    result = verify(plan, *evidence, answers=answers, fallback_wait=patience)
    assert ("fallback" in result.get("failing", ())) == failing
    waits = "  [head] llama-server: the head has served without worker1:cpu"
    assert any(line.startswith(waits) for line in said) != failing


def test_verify_says_that_no_fallback_is_needed(plan, pair):
    (check,) = checks(judged(typed(plan)), "fallback")
    assert check[2:] == ("passed", "none in use; fallbacks are planned for 2 of 2 possible absences")
    pair.hosts["head"]["variables"]["llama_server_fallback"] = False
    assert checks(judged(typed(pair.plan())), "fallback") == []


def test_a_fallback_that_the_plan_does_not_know_is_judged_by_the_plan(plan):
    plan = typed(plan)
    evidence = on_fallback(plan)
    assert judge.served_plan(plan, evidence._replace(fallback=ServedFallback("worker7:cpu", 1))) == plan
    served = judge.served_plan(plan, evidence)
    used = {worker.endpoint: worker.used for host in served.hosts.values() for worker in host.workers}
    assert used == {WORKERS[0]: False, WORKERS[1]: True}

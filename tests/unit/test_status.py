"""How a cluster is shown: every state, what hosts may say of themselves, and what makes a cluster unhealthy."""

import copy
import json
from unittest import mock

import jsonschema_rs
import pytest
from ansible_collections.llamacpp.cluster.plugins.action import status as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, units
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import cluster_status, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import VerificationStatus
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import status_text
from conftest import ROOT, typed
from support import actions, playbook_runs
from support.drift import drifts
from support.verification import several

SCHEMA = jsonschema_rs.validator_for(json.loads((ROOT / "docs" / "status.schema.json").read_text()))
NOW = 1_700_000_000
VERIFIED = {"age_s": 3600, "passed": True, "failed_checks": [], "release": "pypi-0.3.36", "asleep": False}
TOLD = {
    **{"time": NOW, "process": 123, "state": "serving", "since": NOW - 600, "without": [], "waiting_for": []},
    "restarts": 3,
    "last": [
        {"time": NOW - 7200, "text": "lost worker 192.0.2.12:50052: restarting llama-server"},
        {"time": NOW - 600, "text": "lost worker 192.0.2.11:50052: restarting llama-server"},
    ],
}
DIFFERENCE = {"kind": "file", "subject": "/opt/llamacpp/x", "text": "/opt/llamacpp/x is missing"}


def resources_of(**others):
    known = {"uptime_s": 270_000, "memory_total_mib": 65536, "memory_free_mib": 20480}
    disk = {"path": "/opt/llamacpp", "total_mib": 900_000, "free_mib": 300_000}
    return {**known, "devices": [], "disks": [disk], **others}


def look(plan, name, drift, **others):
    """What host_status returns on a host that is well."""
    services = [service["name"] for service in plan["hosts"][name]["services"]]
    exits = {"total": 1, "last_exit": "on signal 9", "log": []}
    head = {"health": {"healthy": True, "detail": "ok"}, "current": True, "waits_for": [], "ends": exits}
    head.update(serving=copy.deepcopy(TOLD), verified=dict(VERIFIED))
    known = {"now": NOW, "resources": resources_of(), "head": head if name == plan["head"]["host"] else None}
    for key, value in (("service_states", "running"), ("uptimes_s", 11520), ("restarts", 0)):
        known[key] = dict.fromkeys(services, value)
    return {"changed": False, "drift": drift, "condition": {**known, **others}}


@pytest.fixture
def plan(pair):
    return pair.plan()


def answers_of(plan):
    """Host → what host_status returns there, of a cluster that is well."""
    states = drifts(plan)
    for name, drift in states.items():
        drift["running_build_ids"] = [build["id"] for build in plan["hosts"][name]["builds"]]
        for service in drift["services"].values():
            service.update(pid=4711, clients=["192.0.2.10"] if name != "head" else [])
    return {name: look(plan, name, drift) for name, drift in states.items()}


@pytest.fixture
def answers(plan):
    return answers_of(plan)


def run(plan, answers, heads=("head",), **others):
    """Result of the action, and what it shows; it is given no variables, so it cannot read any."""
    shown = []
    with mock.patch.object(action.Display, "display", lambda _self, text: shown.append(text)):
        result = actions.run(action, plan=plan, heads=list(heads), answers=answers, **others)
    return result, "\n".join(shown)


def written(plan, answers, tmp_path, **others):
    """The JSON, which has the form that is documented, the error and the page."""
    path = tmp_path / "status.json"
    result, shown = run(plan, answers, path=str(path), **others)
    told = json.loads(path.read_text())
    SCHEMA.validate(told)
    assert all(len(line) <= tables.MAX_LINE_LENGTH for line in shown.splitlines())
    return told, result.get("msg", ""), shown


def test_a_healthy_cluster(plan, answers, tmp_path):
    told, error, shown = written(plan, answers, tmp_path)
    assert (error, told["problems"]) == ("", [])
    cluster = told["cluster"]
    assert [cluster[key] for key in ("state", "as_planned", "restarts", "uptime_s")] == ["serving", True, 3, 11520]
    assert cluster["planned"] == {"ref": "pypi-0.3.36", "build": 11063, "protocol": "7.0.0"}
    assert cluster["verified"] == VERIFIED
    assert [restart["age_s"] for restart in cluster["last_restarts"]] == [600, 7200]
    worker = told["hosts"][1]["workers"][0]
    assert (worker["endpoint"], worker["state"], worker["clients"]) == ("192.0.2.11:50052", "running", ["192.0.2.10"])
    for text in (
        "llama_cluster  healthy",
        "serving for 3 h 12 min",
        "pypi-0.3.36 (build 11063, RPC protocol 7.0.0), all hosts match the plan",
        "1 h ago with pypi-0.3.36, passed",
        "10 min ago: lost worker 192.0.2.11:50052",
        "20.0 of 64.0",
        "3 d 3 h",
        "192.0.2.10  running",
    ):
        assert text in shown, text


def of_head(answers, **changes):
    answers["head"]["condition"]["head"].update(changes)
    return answers


LOADING = {"healthy": False, "detail": "the model is loading"}
SILENT = {"healthy": False, "detail": "[Errno 111] Connection refused"}
WAITS = {"state": "waiting", "waiting_for": ["192.0.2.11:50052"]}


@pytest.mark.parametrize(
    "drifted, managed, health, told, state, reason",
    [
        ("running", "running", LOADING, {}, "loading", ""),
        ("running", "running", SILENT, {"state": "loading"}, "loading", ""),
        ("running", "running", SILENT, {}, "silent", ": [Errno 111] Connection refused"),
        ("waiting", "running", SILENT, None, "waiting", ": the head waits for worker 192.0.2.11:50052: refused"),
        ("waiting", "running", SILENT, WAITS, "waiting", ": the head waits for worker worker1:cpu (192.0.2.11:50052)"),
        ("stopped", "running", SILENT, None, "starting", ": llama-server exited on signal 9"),
        ("stopped", "stopped", SILENT, None, "stopped", ""),
        ("stopped", "failed", SILENT, None, "failed", ": llama-server exited on signal 9"),
    ],
)
def test_a_cluster_that_does_not_serve(plan, answers, tmp_path, drifted, managed, health, told, state, reason):
    problem = f"the cluster {'gives no valid answer' if state == 'silent' else f'is {state}'}{reason}"
    answers["head"]["drift"]["services"]["llamacpp-server"]["state"] = drifted
    answers["head"]["condition"]["service_states"]["llamacpp-server"] = managed
    serving = None if told is None else {**TOLD, **told}
    of_head(answers, health=health, serving=serving, waits_for=["the head waits for worker 192.0.2.11:50052: refused"])
    found, error, shown = written(plan, answers, tmp_path)
    assert found["cluster"]["state"] == state
    assert problem in found["problems"]
    assert error.startswith(f"llama_cluster is not healthy: {problem}")
    assert "NOT HEALTHY" in shown


def test_a_cluster_that_loads_its_model(plan, answers, tmp_path):
    head = answers["head"]["condition"]["head"]
    head["health"] = LOADING
    endpoint = next(entry["endpoint"] for entry in plan["placement"] if entry["endpoint"])
    head["serving"].update(state="loading", load={"seconds": 12.0, "read": 5_000_000, "sent": {endpoint: 1000}})
    told, _error, shown = written(plan, answers, tmp_path)
    load = told["cluster"]["load"]
    assert (load["seconds"], load["read_bytes"]) == (12.0, 5_000_000)
    assert {"endpoint": endpoint, "sent_bytes": 1000} in [
        {key: worker[key] for key in ("endpoint", "sent_bytes")} for worker in load["workers"]
    ]
    assert "loaded" in shown
    assert f"to worker {endpoint}" in " ".join(shown.split())
    head["serving"]["load"] = {"seconds": 12.0, "read": "much", "sent": {}}
    assert "could not be examined" in written(plan, answers, tmp_path)[1]


def test_models_that_take_turns(plan, answers, tmp_path):
    plan = typed_json.dump(several(typed(plan), "one", "two"))
    head = answers["head"]["condition"]["head"]
    head["serving"].update(state="loading", load={"seconds": 12.0, "read": 5_000_000, "sent": {}})
    head["models"] = [{"name": "one", "state": "failed"}, {"name": "two", "state": "loading"}]
    told, error, shown = written(plan, answers, tmp_path)
    assert (told["cluster"]["state"], told["cluster"]["models"], error) == ("serving", head["models"], "")
    assert "models    one failed, two loading\n" in shown
    assert "lost worker 192.0.2.11:50052" in shown
    assert told["cluster"]["load"]["planned_bytes"] is None
    head["models"] = []
    assert "model     one, two\n" in written(plan, answers, tmp_path)[2]


def test_a_cluster_on_a_fallback(plan, answers, tmp_path):
    of_head(
        answers, serving={**TOLD, "state": "fallback", "without": ["worker1:cpu"], "waiting_for": ["192.0.2.11:50052"]}
    )
    told, error, shown = written(plan, answers, tmp_path)
    assert (told["cluster"]["state"], told["cluster"]["without"]) == ("fallback", ["worker1:cpu"])
    assert error == "llama_cluster is not healthy: the head serves without worker1:cpu."
    assert "serves on a fallback without worker1:cpu" in shown


def test_a_cluster_that_sleeps_is_healthy(plan, answers, tmp_path):
    of_head(answers, serving={**TOLD, "state": "asleep", "since": NOW - 600}, verified={**VERIFIED, "asleep": True})
    told, error, shown = written(plan, answers, tmp_path)
    assert (told["cluster"]["state"], told["cluster"]["asleep_s"], error, told["problems"]) == ("asleep", 600, "", [])
    assert "asleep (a request wakes it) for 10 min" in shown
    assert "passed, but the model was asleep and was not tested" in " ".join(shown.split())


def test_what_an_earlier_launcher_left_or_none_does_not_count(plan, answers, tmp_path):
    of_head(answers, serving={**TOLD, "state": "fallback", "without": ["worker1:cpu"]}, current=False)
    assert written(plan, answers, tmp_path)[0]["cluster"]["state"] == "serving"
    of_head(answers, serving=None)
    cluster = written(plan, answers, tmp_path)[0]["cluster"]
    assert (cluster["restarts"], cluster["last_restarts"]) == (1, [])


def test_a_host_that_does_not_answer(plan, answers, tmp_path):
    answers["worker1"] = {"unreachable": True, "msg": "Failed to connect:\n\x1b[2J no route to host"}
    told, error, shown = written(plan, answers, tmp_path)
    assert (told["cluster"]["state"], told["cluster"]["as_planned"]) == ("serving", None)
    assert [host["reachable"] for host in told["hosts"]] == [True, False, True]
    assert "worker1 does not answer: Failed to connect:" in error
    assert "worker1         " in shown
    assert "does not answer" in shown
    assert "\x1b" not in shown + error


def test_the_head_does_not_answer(plan, answers, tmp_path):
    facts = {"head": {"unreachable": True, "msg": "timed out"}}
    answers["head"] = {"skipped": True}
    told, error, _shown = written(plan, answers, tmp_path, facts=facts)
    assert (told["cluster"]["state"], told["cluster"]["verified"]) == ("unknown", None)
    assert "so the cluster's state is unknown; head does not answer: timed out" in error
    assert [host["reachable"] for host in told["hosts"]] == [False, True, True]


REFUSED = {"schema": 1, "cluster": "llama_cluster", "refused": True, "fits": False}
REFUSED["reasons"] = ["llama_model_path is missing."]


def test_without_a_plan_the_rest_is_shown(plan, answers, tmp_path):
    for answer in answers.values():
        del answer["drift"]
        answer["condition"]["uptimes_s"] = {}
    of_head(answers, health=None)
    told, error, shown = written(REFUSED, answers, tmp_path)
    assert told["unplanned"] == "llama_model_path is missing."
    cluster = told["cluster"]
    assert (cluster["head"], cluster["state"], cluster["as_planned"], cluster["url"]) == ("head", "serving", None, None)
    assert error.endswith("the inventory cannot be planned: llama_model_path is missing.")
    assert [len(host["workers"]) for host in told["hosts"]] == [0, 1, 1]
    assert told["hosts"][1]["workers"][0]["state"] == "running"
    assert "not compared" in shown
    of_head(answers, serving=None)
    assert written(REFUSED, answers, tmp_path)[0]["cluster"]["state"] == "running"


def test_nothing_is_installed(plan, answers, tmp_path):
    for name, answer in answers.items():
        answer["condition"].update(service_states={}, restarts={}, uptimes_s={}, head=None)
        answer["drift"].update(differences=[DIFFERENCE] * 9, running_build_ids=[])
        for service in plan["hosts"][name]["services"]:
            answer["drift"]["services"][service["name"]]["state"] = "stopped"
    told, error, shown = written(plan, answers, tmp_path)
    assert told["cluster"]["state"] == "not installed"
    assert error == "llama_cluster is not healthy: the cluster is not installed."
    assert shown.count("  not installed") == 4
    assert DIFFERENCE["text"] not in shown
    answers["head"] = look(plan, "head", drifts(plan)["head"])
    assert "nothing is installed on worker1, worker2." in written(plan, answers, tmp_path)[1]


def test_differences_from_the_plan(plan, answers, tmp_path):
    unneeded = {"kind": "unneeded", "subject": "old", "text": "release old is no longer needed"}
    answers["worker1"]["drift"]["differences"] = [unneeded]
    assert written(plan, answers, tmp_path)[1] == ""
    stopped = {"kind": "service", "subject": "llamacpp-worker-cpu", "text": "llamacpp-worker-cpu is stopped"}
    answers["worker1"]["drift"]["differences"] = [unneeded, stopped, *[DIFFERENCE] * 9]
    answers["worker1"]["drift"]["services"]["llamacpp-worker-cpu"]["state"] = "stopped"
    told, error, shown = written(plan, answers, tmp_path)
    assert "is stopped; worker1 differs from the plan in 9 ways (file)." in error
    assert told["cluster"]["as_planned"] is False
    assert len(told["hosts"][1]["differences"]) == 11
    assert "differs (10)" in shown
    assert "worker1: and 4 more" in shown


def test_another_plan_than_that_of_the_inventory(plan, answers, tmp_path, monkeypatch):
    """As after a rollback."""
    other = "The inventory plans release b2, but plan 1 with release b1 serves."
    monkeypatch.setattr(action.rollback, "other_plan_note", lambda *_arguments: other)
    told, _error, shown = written(plan, answers, tmp_path)
    assert (told["other"], told["problems"]) == (other, [other.rstrip(".")])
    assert f"problem   {other.rstrip('.')}" in shown


def test_the_last_verification_failed(plan, answers, tmp_path):
    failed_check = "known answer of http://127.0.0.1:8080: 3 of 36 words right"
    failed = {**VERIFIED, "passed": False, "failed_checks": [failed_check]}
    of_head(answers, verified=failed)
    _told, error, shown = written(plan, answers, tmp_path)
    assert error == f"llama_cluster is not healthy: the last verification failed: {failed_check}."
    assert "1 h ago with pypi-0.3.36, failed" in shown
    assert "problem   the last verification failed: known answer" in shown
    of_head(answers, verified=None)
    assert "never: the head has no record" in written(plan, answers, tmp_path)[2]


def test_devices_and_what_is_not_shown(plan, answers, tmp_path):
    device = {"name": "amdgpu 0000:c5:00.0", "total_mib": 512, "free_mib": 312}
    device.update(shared_total_mib=112_640, shared_free_mib=51_200)
    bare = {**dict.fromkeys(device, None), "name": "i915 " + "x" * 60}
    worker = answers["worker1"]["condition"]
    worker["resources"] = resources_of(devices=[device, bare], memory_free_mib=None, disks=[])
    worker["restarts"] = {"llamacpp-worker-cpu": 2}
    shown = written(plan, answers, tmp_path)[2]
    for text in ("0.3 of 0.5", "host memory (GTT) 50.0 of 110.0", "? of 64.0", "running, 2 restarts", "x…"):
        assert text in " ".join(shown.split()), text


def test_an_unused_worker_and_one_that_is_not_planned(plan, answers, tmp_path):
    plan["hosts"]["worker1"]["workers"][0]["used"] = False
    answers["worker1"]["condition"]["service_states"]["llamacpp-worker-old"] = "failed"
    told, error, shown = written(plan, answers, tmp_path)
    assert "running, not used" in shown
    assert "llamacpp-worker-old on worker1 is failed" in error
    assert told["hosts"][1]["workers"][1]["endpoint"] is None


@pytest.mark.parametrize(
    "part, name, value",
    [
        ("condition", "now", "soon"),
        ("condition", "resources", resources_of(disks="\x1b[2J")),
        ("drift", "differences", [{**DIFFERENCE, "text": "a\x1b]0;x"}]),
    ],
)
def test_a_host_may_report_anything_of_itself(plan, answers, tmp_path, part, name, value):
    answers["worker1"][part][name] = value
    told, error, shown = written(plan, answers, tmp_path)
    assert "worker1 could not be examined: " in error
    assert name in error
    assert told["cluster"]["state"] == "serving"
    assert (shown + error).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "odd, said",
    [
        (None, "the run did not contact it"),
        ([], "the run did not contact it"),
        ({"condition": "x"}, "The report from head about its status"),
        ({"condition": {"a": {}}}, "The report from head about its status"),
        ({"failed": True, "msg": "account llamacpp is missing"}, "account llamacpp is missing"),
    ],
)
def test_an_answer_may_be_anything(plan, answers, tmp_path, odd, said):
    answers["head"] = odd
    told = written(plan, answers, tmp_path)[0]
    assert told["cluster"]["state"] == "unknown"
    assert any(problem.startswith(f"head could not be examined: {said}") for problem in told["problems"])


@pytest.mark.parametrize(
    "state, problems", [("UP 1/3", []), ("DRAIN", ["the balancer sends no requests to head: DRAIN"])]
)
def test_a_replica_at_the_balancer(plan, answers, tmp_path, state, problems):
    told, _error, shown = written(plan, answers, tmp_path, balancer=state, fail=False)
    assert (told["problems"], told["cluster"]["balancer"]) == (problems, state)
    assert f"balancer  {state}" in shown


def test_durations():
    seconds = (None, 0, 59, 60, 3599, 3600, 90000, 86460)
    assert [*map(units.duration_text, seconds)] == ["", "0 s", "59 s", "1 min", "59 min", "1 h", "1 d 1 h", "1 d"]


@pytest.mark.programs
@pytest.mark.timeout(300)
def test_a_run(tmp_path):
    """On a head that is this machine, where nothing is installed, and a worker that cannot be reached."""
    path = tmp_path / "status.json"
    groups = {"llama_head": {"hosts": {"head": {**playbook_runs.LOCAL, "ansible_host": "192.0.2.10"}}}}
    groups["llama_workers"] = {"hosts": {"worker": playbook_runs.LOST}}
    known = {"llama_host_scope": "user", "llama_model_known_answer": {"layers": 16}}
    known["ansible_remote_tmp"] = str(tmp_path / "remote")
    inventory = {"llama_cluster": {"children": groups, "vars": known}}
    status, shown = playbook_runs.run(
        tmp_path, ROOT / "playbooks/status.yml", inventory, "-e", f"llama_status_path={path}", HOME=str(tmp_path)
    )
    assert status == 2
    told = json.loads(path.read_text())
    SCHEMA.validate(told)
    assert [(host["name"], host["reachable"]) for host in told["hosts"]] == [("head", True), ("worker", False)]
    assert told["problems"][0] == "the cluster is not installed"
    assert told["hosts"][0]["resources"]["memory_total_mib"] > 0
    assert "head (head)" in shown
    assert "changed=1" not in shown


def test_the_page_in_the_documentation_is_what_is_shown():
    device = {"name": "amdgpu 0000:c5:00.0", "total_mib": 512, "free_mib": 307}
    device.update(shared_total_mib=112_640, shared_free_mib=31_027)
    known = resources_of(devices=[device], memory_total_mib=128_000, memory_free_mib=36_044)
    resources = typed_json.parse(types.resources.Resources, known)
    own = types.WorkerStatus(
        *("llamacpp-worker-vulkan", "192.168.128.13:50052", "vulkan Vulkan0", "7.0.0", True, "running", 259_200, 0),
        ("192.168.128.11",),
    )
    why = "Failed to connect to the host via ssh: ssh: connect to host 192.168.128.12 port 22: No route to host"
    hosts = (
        types.HostStatus("strix0", True, "", True, True, (), resources, ()),
        types.HostStatus("strix1", False, why, False, False, (), None, None),
        types.HostStatus("strix2", False, "", True, True, (own,), resources, ()),
    )
    cluster = types.ClusterStatus(
        *("llama_cluster", "fallback", "", "strix0", "http://192.168.128.11:8080", "gpt-oss 120B"),
        planned=types.ReleaseStatus("b11063", 11063, "7.0.0"),
        running_builds=("b11063-vulkan-a154adb8",),
        as_planned=None,
        uptime_s=480,
        restarts=1,
        last_restarts=(types.RestartStatus(600, "lost worker 192.168.128.12:50052: restarting llama-server"),),
        without=("strix1:cpu",),
        verified=VerificationStatus(3600, True, (), "b11063"),
    )
    problems = cluster_status.problems_of(cluster, hosts)
    shown = status_text.text_of(types.Status(types.SCHEMA, 0, cluster, hosts, "", "", problems))
    assert shown.strip("\n") in (ROOT / "docs" / "operating.md").read_text()

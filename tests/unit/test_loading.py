"""What is shown of a model that is loaded: bytes to each worker, what was read, what is left, and what is said when the time is over."""

import json
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import verify as verify_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import serving_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift.serving_record import Load
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import loading, verification

ONE, TWO = "192.0.2.11:50052", "192.0.2.12:50052"
GB = 10**9
EXPECTED = loading.Expected({ONE: 4 * GB, TWO: 2 * GB}, 3 * GB, cached=False)


def load_of(seconds, one, two, read=None):
    return Load(seconds, read, {ONE: one, TWO: two})


def test_what_a_plan_has_on_each_device(pair):
    plan = pair.plan()
    expected = loading.expected_of(typed_json.parse(Plan, plan))
    used = {entry["endpoint"]: entry["weights_mib"] for entry in plan["placement"] if entry["endpoint"]}
    assert set(expected.workers) == set(used)
    assert all(expected.workers[endpoint] == round(mib * 1024 * 1024) for endpoint, mib in used.items())
    assert expected.own == round(plan["head"]["cpu"]["weights_mib"] * 1024 * 1024) > 0
    pair.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"name": "cpu", "cache": True}]
    assert loading.expected_of(typed_json.parse(Plan, pair.plan())).cached
    assert loading.expected_of(None) == loading.Expected({}, 0, cached=False)


@pytest.mark.parametrize(
    "load, before, rate, left",
    [
        (load_of(10, 1 * GB, 0), None, 100_000_000, 80),
        (load_of(20, 3 * GB, 1 * GB), load_of(10, 1 * GB, 0), 300_000_000, 17),
        (load_of(20, 3 * GB, 1 * GB, read=6 * GB), None, 300_000_000, 10),
        (load_of(20, 3 * GB, 1 * GB), load_of(20, 3 * GB, 1 * GB), 200_000_000, 25),
        (load_of(30, 3 * GB, 1 * GB), load_of(20, 3 * GB, 1 * GB), None, None),
        (load_of(30, 4 * GB + 9, 2 * GB + 9, read=9 * GB + 99), None, 300_000_000, None),
    ],
)
def test_rate_and_what_is_left(load, before, rate, left):
    progress = loading.progress_of(load, EXPECTED, before)
    assert (progress.bytes_per_s, progress.left_s) == (rate, left)


def test_what_a_person_is_shown():
    shown = loading.sentence(loading.progress_of(load_of(20, 1_200_000_000, 0, read=3_400_000_000), EXPECTED))
    assert shown == (
        f"1.2 of 4.0 GB to worker {ONE}, 0.0 of 2.0 GB to worker {TWO}, 3.4 of 9.0 GB read from files, 170 MB/s, about 33 s left"
    )
    small = loading.Expected({ONE: 80_000_000}, 0, cached=True)
    load = Load(4, None, {ONE: 20_000_000})
    assert loading.sentence(loading.progress_of(load, small)) == (
        f"20 of 80 MB to worker {ONE}, 5.0 MB/s, at most 12 s left"
    )


def test_where_the_kernel_lends_no_sockets_what_is_known_is_shown():
    load = Load(10, 3 * GB, {})
    shown = loading.sentence(loading.progress_of(load, EXPECTED))
    assert shown == (
        "what workers have got is not known, since the kernel lends no sockets, 3.0 of 9.0 GB read from files, 300 MB/s, about 20 s left"
    )
    nothing = loading.progress_of(Load(10, None, {}), EXPECTED)
    assert loading.sentence(nothing) == "what workers have got is not known, since the kernel lends no sockets"
    partly = loading.progress_of(Load(10, None, {ONE: GB}), EXPECTED)
    assert f"? of 2.0 GB to worker {TWO}" in loading.sentence(partly)


@pytest.mark.parametrize("seconds", [0, 5e-324, 1e-300, 1e-9])
def test_no_rate_is_told_of_a_moment(tmp_path, seconds):
    """Whoever took over the head's launcher may write any time."""
    load = {"seconds": seconds, "read": 9 * GB, "sent": {ONE: GB}}
    (tmp_path / names.SERVING).write_text(json.dumps({"state": "loading", "process": 7, "load": load}))
    progress = loading.progress_of(serving_record.of_launcher(tmp_path, [7]).load, EXPECTED)
    assert (progress.bytes_per_s, progress.left_s) == (None, None)
    assert loading.sentence(progress).startswith("1.0 of")


def test_a_part_of_a_plan_names_the_workers_that_got_something():
    progress = loading.progress_of(load_of(10, GB, 0), loading.Expected({}, 0, cached=False))
    assert (progress.planned_bytes, progress.left_s) == (None, None)
    assert loading.sentence(progress).startswith(f"1.0 GB to worker {ONE}, 0 MB to worker {TWO}, 100 MB/s")


@pytest.mark.parametrize(
    "change",
    [
        {"process": 7},
        {"load": {"seconds": "x", "read": 1, "sent": {}}},
        {"load": {"seconds": 1, "read": 1, "sent": {"\x1b[2J": 1}}},
        {"load": {"seconds": 1, "read": -1, "sent": {}}},
        {"load": {"seconds": 1, "read": 1, "sent": {str(number): 1 for number in range(9999)}}},
    ],
)
def test_what_the_launcher_wrote_is_believed_in_its_form_alone(tmp_path, change):
    said = {"state": "loading", "process": 42, "load": {**load_of(1.5, 2, 3)._asdict(), "more": "x"}}
    (tmp_path / names.SERVING).write_text(json.dumps(said))
    assert serving_record.of_launcher(tmp_path, [42]).load == load_of(1.5, 2, 3)
    (tmp_path / names.SERVING).write_text(json.dumps({**said, **change}))
    assert serving_record.of_launcher(tmp_path, [42]) is None
    (tmp_path / names.SERVING).unlink()
    assert serving_record.of_launcher(tmp_path, [42]) is None


class Waiting:
    """An action whose head answers as a script says; time passes with the answers alone."""

    def __init__(self, monkeypatch, plan, answers, each):
        self.now, self.lines, self.waits = 0.0, [], []
        self.action = verify_action.ActionModule.__new__(verify_action.ActionModule)
        self.action.variables = {}
        self.plan, self.answers = plan, iter(answers)

        def collected(module_args, task_vars):
            self.now += each
            self.waits.append(module_args["wait"])
            return {"evidence": next(self.answers)}

        monkeypatch.setattr(self.action, "_execute_module", collected)
        monkeypatch.setattr(verify_action, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(verify_action.display, "display", self.lines.append)

    def collect(self, patience):
        return self.action._collect({}, self.plan, patience)["evidence"]


def evidence(load=None, healthy=False):
    base = {"health": {"healthy": healthy, "said": verification.LOADING}, "launched": True, "log": [], "links": {}}
    base.update(log_complete=True, handshakes={"workers": {}}, ends={"number": 0, "how": "", "log": []})
    if healthy:
        base.update(buffers={}, rdma=0, completion={"text": "x", "tokens": 1, "tokens_per_second": 1.0})
    return {**base, **({"load": load} if load else {})}


def test_a_load_of_less_than_ten_seconds_shows_nothing(pair, monkeypatch):
    waiting = Waiting(monkeypatch, pair.plan(), [evidence(load_of(5, 1, 1)._asdict()), evidence(healthy=True)], 4.9)
    assert waiting.collect(600)["health"]["healthy"]
    assert waiting.lines == []


def test_a_line_every_ten_seconds(pair, monkeypatch):
    plan = pair.plan()
    endpoints = [entry["endpoint"] for entry in plan["placement"] if entry["endpoint"]]
    loads = [{"seconds": 5.0 * step, "read": None, "sent": {endpoints[0]: 1000 * step}} for step in range(1, 8)]
    waiting = Waiting(monkeypatch, plan, [*map(evidence, loads), evidence(healthy=True)], 5.0)
    waiting.collect(600)
    assert [line.rsplit(", ", 1)[1] for line in waiting.lines] == ["10 s", "20 s", "30 s"]
    assert all(f"to worker {endpoints[0]}" in line for line in waiting.lines)


def test_when_the_time_is_over_it_is_said_how_far_each_worker_came(pair, monkeypatch):
    plan = pair.plan()
    endpoint = next(entry["endpoint"] for entry in plan["placement"] if entry["endpoint"])
    loads = [{"seconds": 10.0 * step, "read": None, "sent": {endpoint: 1000 * step}} for step in range(1, 9)]
    found = Waiting(monkeypatch, plan, map(evidence, loads), 10.0).collect(60)
    wrong = verification.gate(plan, found)
    assert "the model is loading, and the limit of 60 s is over (llama_server_start_timeout, or" in wrong
    assert f"to worker {endpoint}" in wrong
    assert "; set llama_server_start_timeout to " in wrong
    assert int(wrong.split("llama_server_start_timeout to ")[1].split(",")[0]) > 60
    still = [{"seconds": 10.0 * step, "read": None, "sent": {endpoint: 1000}} for step in range(1, 9)]
    found = Waiting(monkeypatch, plan, map(evidence, still), 10.0).collect(60)
    others = {entry["endpoint"] for entry in plan["placement"]} - {endpoint, None}
    assert "nothing moved in the end" in verification.gate(plan, found)
    assert any(f"at the worker {other}" in verification.gate(plan, found) for other in others or {endpoint})
    alone = [{"seconds": 10.0, "read": None, "sent": {}}] * 9
    found = Waiting(monkeypatch, {**plan, "placement": []}, map(evidence, alone), 10.0).collect(60)
    assert "look at the log of the service on the head, or set" in verification.gate(plan, found)
    found = Waiting(monkeypatch, plan, [evidence()] * 9, 10.0).collect(60)
    assert "over (llama_server_start_timeout, or several times the predicted load where that is not set); look at" in (
        verification.gate(plan, found)
    )
    refused = {**evidence(), "health": {"healthy": False, "said": "refused"}}
    assert verification.gate(plan, Waiting(monkeypatch, plan, [refused] * 9, 10.0).collect(60)).endswith(
        "healthy: refused."
    )

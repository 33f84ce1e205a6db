"""What a benchmark measures, how its job takes the server's place, and how it reads what llama-bench writes."""

import json
import re
from pathlib import Path

import benchmarks
import jsonschema_rs
import pytest
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible_collections.llamacpp.cluster.plugins.action import benchmark as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import (
    command_line,
    history,
    job,
    matrix,
    results,
    types,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.modules import benchmark as module
from ansible_collections.llamacpp.cluster.plugins.modules import service
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table
from conftest import CATALOGUE, Cluster, known_answer_of
from support import actions
from support.clusters import IK_LLAMA as FORK
from support.clusters import cards_of
from test_services import defined, machine_with

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("data")
LOG = (DATA / "benchmark" / "llama-bench-0.3.36.log").read_text()
SCHEMA = jsonschema_rs.validator_for(json.loads((ROOT / "docs" / "benchmark.schema.json").read_text()))
MEASURED = {"llama_benchmark_programs": True}


def cluster_of(*workers, **variables):
    """A head, and workers of which each has 64 GiB."""
    found = Cluster().add(
        "head", "head", address="192.0.2.10", **{"llama_model_known_answer": known_answer_of(), **variables}
    )
    for number, name in enumerate(workers or ("worker1", "worker2")):
        release = {key: value for key, value in variables.items() if key.startswith("llama_release")}
        found.add(name, "worker", address=f"192.0.2.{11 + number}", **release)
    return found


def request_of(found, **variables):
    given = {f"llama_benchmark_{name}": value for name, value in variables.items()}
    return matrix.request_of({**found.hosts["head"]["variables"], **given})


def served_by(found, model=None):
    """The plan that serves."""
    values = cluster_inputs.read("llama_cluster", found.hosts)
    return planner.make(values, model or {}, CATALOGUE, "runtime")._replace(id="0123456789abcdef")


def loads_of(found, **variables):
    """The request, and each load with its plan."""
    request, served = request_of(found, **variables), served_by(found)
    cluster = cluster_inputs.read("llama_cluster", found.hosts)
    return request, [
        (load, planner.make(matrix.cluster_of(cluster, load, request, served), {}, CATALOGUE, "runtime"))
        for load in matrix.loads_of(request, served)
    ]


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("prompts", [0], "llama_benchmark_prompts has 0: use 1 to 1048576"),
        ("latency_ms", 1e5, "llama_benchmark_latency_ms has 100000.0: use 0 to 10000"),
        ("hosts", [2, 2], "llama_benchmark_hosts has a value twice"),
        ("depths", [], "llama_benchmark_prompts or llama_benchmark_depths is empty"),
        ("hosts", [4], r"llama_benchmark_hosts has 4, but the cluster has 3 hosts with devices"),
        ("depths", [*range(0, 800, 2)], "ask for 3600 measurements, and 200 are possible"),
    ],
)
def test_wrong_variables_are_named_with_their_values(name, value, message):
    found = cluster_of()
    with pytest.raises(Refusal, match=message):
        matrix.loads_of(request_of(found, **{name: value}), served_by(found))


def test_hosts_prompts_and_depths_multiply_and_a_latency_is_measured_beside_them():
    request, loads = loads_of(cluster_of(**MEASURED), depths=[0, 64], latency_ms=5.0)
    cells = [cell for load, plan in loads for cell in matrix.cells_of(load, request, plan, None)]
    assert [(len(load.hosts), load.latency_ms) for load, _plan in loads] == [
        (1, None),
        (2, None),
        (3, None),
        (2, 5.0),
        (3, 5.0),
    ]
    assert len({cell.name for cell in cells}) == len(cells) == 5 * 2 * 3
    assert {"1 host, pp512", "3 hosts, tg128 @ d64, 5 ms added"} <= {cell.name for cell in cells}
    generation = {(len(cell.hosts), cell.latency_ms): cell for cell in cells if cell.test == "tg128" and not cell.depth}
    ((_load, plan),) = [one for one in loads if one[0] == (generation[3, 5.0].hosts, 5.0)]
    slower = 1000 / generation[3, 5.0].predicted - 1000 / generation[3, None].predicted
    assert slower == pytest.approx(5 * plan.estimate.crossings, rel=1e-3)
    assert not any(cell.predicted for cell in cells if cell.depth)


def test_a_long_prompt_is_not_predicted_to_be_as_slow_as_one_micro_batch():
    request, ((alone, plan), (pipelined, other)) = loads_of(cluster_of(), prompts=[256, 4096], hosts=[1, 3])
    assert all(cell.predicted for cell in matrix.cells_of(alone, request, plan, None))
    assert other.estimate.prompt.pipelined
    assert [cell.test for cell in matrix.cells_of(pipelined, request, other, None) if not cell.predicted] == ["pp4096"]


def test_prompts_are_measured_in_the_pieces_that_are_served():
    found, plan = cluster_of(), served_by(cluster_of())
    prompt = plan.estimate.prompt._replace(batch=4096, micro_batch=1024)
    plan = plan._replace(model=plan.model._replace(known_answer=None), estimate=plan.estimate._replace(prompt=prompt))
    cluster, request = cluster_inputs.read("llama_cluster", found.hosts), request_of(found, hosts=[3])
    (load,) = matrix.loads_of(request, plan)
    server = matrix.cluster_of(cluster, load, request, plan).server
    assert (server.batch, server.micro_batch, server.context, server.parallel) == (4096, 1024, 2048, 1)


def test_why_a_load_cannot_be_measured():
    found = cluster_of("worker1", **MEASURED, llama_model_known_answer=known_answer_of(16, 8192))
    for host in found.hosts.values():
        host["facts"]["memory_mib"] = 8192
    request, ((alone, plan), *_others) = loads_of(found)
    why = matrix.obstacle(plan, served_by(cluster_of(**MEASURED)), alone)
    assert "does not fit" in why
    assert {cell.skipped for cell in matrix.cells_of(alone, request, plan, why)} == {why}
    _request, ((load, plan), *_others) = loads_of(cluster_of())
    assert matrix.obstacle(plan, served_by(cluster_of(**MEASURED)), load).startswith("it needs the build pypi-0.3.36-")
    idle = cluster_of(**MEASURED, llama_server_tensor_split=[1, 0])
    _request, ((load, plan),) = loads_of(idle, hosts=[3])
    assert matrix.obstacle(plan, served_by(idle), load) == "the plan gives no layer to worker2"


def test_the_program_that_measures_is_part_of_the_builds_where_it_is_asked_for():
    plain, measures = served_by(cluster_of()), served_by(cluster_of(**MEASURED))
    fork = served_by(cluster_of(**MEASURED, llama_release=FORK))
    builds = [plan.hosts["head"].builds[0] for plan in (plain, measures, fork)]
    assert ["llama-bench" in build.targets for build in builds] == [False, True, False]
    assert builds[0].id != builds[1].id


def test_a_package_without_the_program_is_refused():
    distribution = {"id": "debian", "version": "14", "family": "debian"}
    found = Cluster().add(
        *("head", "head", "worker"),
        llama_model_known_answer=known_answer_of(),
        llama_release={"source": "package"},
        facts={"packaged": {"version": "0.7.0", "installed": []}, "distribution": distribution},
        **MEASURED,
    )
    assert "no package of head's distribution is known to have llama-bench" in found.reason()


def test_llama_bench_gets_the_words_of_the_server():
    found = cluster_of(
        **MEASURED, llama_server_load_mode="none", llama_server_flash_attention="on", llama_server_cache_type_k="q8_0"
    )
    request, ((_load, plan),) = loads_of(found, hosts=[3], depths=[0, 64])
    words = command_line.argv_of(plan, request)
    given = dict(zip(words, words[1:]))
    assert words[0].endswith("/bin/llama-bench")
    assert {"-fa": "on", "-lm": "none", "-ctk": "q8_0", "-dev": "RPC0/RPC1"}.items() <= given.items()
    assert given["-rpc"] == "192.0.2.11:50052,192.0.2.12:50052"
    assert re.fullmatch(r"\d+/\d+", given["-ts"])
    assert (given["-p"], given["-n"], given["-d"]) == ("512,2048", "128", "0,64")


def row_of(*samples, **other):
    row = {"n_prompt": 0, "n_gen": 8, "n_depth": 0, "samples_ts": samples, "avg_ts": 1, "stddev_ts": 0, **other}
    return f"out {json.dumps(row)}"


def log_of(*lines, status=0):
    lines = ["err llama_context: constructing llama_context", *lines, f"run ended with {status}"]
    return results.read("".join(f"{number}.0000 {line}\n" for number, line in enumerate(lines)))


def cell_of(test="tg8", depth=0):
    return benchmarks.read(benchmarks.example()).cells[0]._replace(test=test, depth=depth, measured=None, load_s=None)


def test_what_llama_bench_writes_is_read():
    log = results.read(LOG)
    assert list(log.speeds) == [("pp64", 0), ("tg32", 0), ("pp64", 256), ("tg32", 256)]
    assert (log.status, 0 < log.load_s < 1) == (0, True)
    (filled, other) = results.fill([cell_of("tg32", 256), cell_of("tg32", 1)], log)
    assert filled.measured == types.Speed(pytest.approx(819.806), pytest.approx(68.3, rel=1e-3), (868.103, 771.509))
    assert (filled.load_s, other.measured) == (log.load_s, None)


ROW = {"n_prompt": 0, "n_gen": 1, "n_depth": 0, "samples_ts": [1.0], "avg_ts": 1, "stddev_ts": 0}
NO_RESULTS = [
    *({**ROW, "samples_ts": samples} for samples in (["nan"], [0], [-1.0], [1e300], [5e-324], [4e-5], [], 7)),
    *({**ROW, "avg_ts": "inf"}, {**ROW, "stddev_ts": "nan"}, {**ROW, "n_prompt": 1}, {"n_prompt": 1}),
    {**ROW, "n_gen": float("inf")},
]


def test_what_is_no_result_is_left_out():
    log = log_of(*(f"out {json.dumps(row)}" for row in NO_RESULTS), "out {torn", "out 7", "err {}")
    assert log.speeds == {}
    assert list(log_of(f"out {json.dumps(ROW)}").speeds) == [("tg1", 0)]


def test_a_failure_says_how_the_program_ended_and_what_it_said():
    log = log_of("err loading", "err error: failed to create context", status=1)
    said = "llama_context: constructing llama_context / loading / error: failed to create context"
    assert results.failure_of(log) == f"llama-bench ended with status 1: {said}"
    ended = results.read("0.3000 run ended with -15\n")
    assert results.failure_of(ended) == "llama-bench was ended by signal 15: it wrote nothing"


def test_the_example_has_the_form_of_the_schema_and_the_table_has_every_cell():
    data = benchmarks.example()
    SCHEMA.validate(data)
    record = benchmarks.read(data)
    assert typed_json.dump(record) == data
    data["cells"][0]["surprise"] = 1
    with pytest.raises(jsonschema_rs.ValidationError):
        SCHEMA.validate(data)
    text = benchmark_table.as_markdown(record)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(record.cells)
    for cell, row in zip(record.cells, rows[2:]):
        assert row.startswith(f"| {cell.name} ")
        assert (benchmark_table.speed(cell) or "not measured") in row
    spoiled = record.cells[0]._replace(measured=None, skipped="<img src=//a.example/x>")
    text = benchmark_table.as_markdown(record._replace(cells=(spoiled,)))
    assert "&lt;img src=//a.example/x>" in text, "what a log says is no markup"


def test_a_record_that_would_control_a_terminal_is_refused():
    whole = benchmarks.example()
    for record in ({**whole, "cluster": "x\x1b[2J"}, {**whole, "hosts": {"x\x1b[2J": 1}}):
        with pytest.raises(Refusal) as refused:
            benchmarks.read(record)
        assert str(refused.value).isprintable()
        assert r"x\x1b[2J" in str(refused.value)


def test_the_last_benchmarks_are_kept_with_their_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MOST", 3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    identities = [f"2025112{day}-150000" for day in range(5)]
    for identity in identities:
        logs = tmp_path / "state" / "benchmarks" / identity
        logs.mkdir(parents=True)
        (logs / "link").symlink_to(elsewhere)
        history.write(str(tmp_path), benchmarks.read({**benchmarks.example(), "id": identity}))
    assert sorted(path.stem for path in (tmp_path / "benchmarks").iterdir()) == identities[2:]
    assert sorted(path.name for path in (tmp_path / "state" / "benchmarks").iterdir()) == identities[2:]
    assert elsewhere.is_dir()
    with pytest.raises(Refusal, match="is not the id of a benchmark"):
        history.write(str(tmp_path), benchmarks.read(benchmarks.example())._replace(id="../x"))


def test_of_a_log_comes_what_matters_in_bounded_size(tmp_path, monkeypatch):
    path = tmp_path / "x.log"
    assert history.lines_of(str(path)) == ""
    noise = "".join(f"0.1000 err llama_model_loader: - kv {number}\n" for number in range(100))
    path.write_text(f"{noise}0.2000 err unable to open x\n{noise}0.3000 out {{}}\n0.4000 err torn")
    lines = history.lines_of(str(path)).splitlines()
    assert (lines[0], lines[-1]) == ("0.2000 err unable to open x", "0.3000 out {}")
    assert len(lines) == 1 + history.LAST_LINES
    monkeypatch.setattr(history, "PASSED_BYTES", 1000)
    monkeypatch.setattr(history, "LINE_BYTES", 100)
    said = [f"0.1000 err error {number:05}" for number in range(2000)]
    path.write_text("\n".join([*said, "0.2000 out " + "x" * 1000, "0.3000 run ended with 0", ""]))
    text = history.lines_of(str(path))
    assert text.splitlines()[-2:] == [said[-1], "0.3000 run ended with 0"]
    assert 900 < len(text) < 1200


def test_a_log_that_is_a_link_is_not_read(tmp_path):
    (tmp_path / "x.log").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="Too many levels"):
        history.lines_of(str(tmp_path / "x.log"))


PROGRAM, SERVER = "llamacpp-benchmark", "llamacpp-server"


@pytest.fixture(params=["systemd", "supervisor"])
def head(request, tmp_path, monkeypatch):
    """A head whose server runs."""
    machine = machine_with(request.param, tmp_path, monkeypatch)
    monkeypatch.setattr(job, "VOLATILE", machine.folder / "units")
    machine.apply(defined(SERVER))
    machine.lines("calls"), machine.lines("events")
    return machine


def started(machine, **other):
    """Arguments that start a job."""
    record = benchmarks.example()
    given = {"definition": f"{PROGRAM} 1\n", "runner": "# runner", "job": {"loads": []}, "record": record}
    return {"host": machine.host, "state": "started", **given, **other}


def test_a_job_takes_the_place_of_the_server_and_gives_it_back(head, call):
    absent = {"host": head.host, "state": "absent"}
    assert not call(module=module, **absent)["changed"]
    assert call(module=module, check=True, **started(head))["changed"]
    assert head.state(PROGRAM) == [services.STOPPED], "check mode starts nothing"
    assert call(module=module, **started(head))["changed"]
    found = call(module=module, host=head.host)
    assert (found["running"], found["changed"], found["lines"]) == (True, False, "")
    assert history.ids(str(head.prefix)) == [benchmarks.example()["id"]]
    folder = head.prefix / "benchmarks"
    assert (folder / "runner.py").read_text() == "# runner"
    assert json.loads((folder / "job.json").read_text()) == {"loads": []}
    text = job.Job(typed_json.parse(job.Head, head.host)).measuring.path(PROGRAM).read_text()
    if head.name == "systemd":
        unit, _service, own = text.partition("\n[Service]\n")
        assert f"Conflicts={SERVER}.service\nAfter={SERVER}.service\nOnFailure={SERVER}.service\n" in unit
        assert own == f"ExecStopPost=+/usr/bin/env systemctl --no-block start {SERVER}.service\n"
    else:
        assert head.state(SERVER) == [services.STOPPED]
    assert "is there already" in call(module=module, **started(head))["msg"]
    assert call(module=module, **absent, record=benchmarks.example())["changed"]
    assert head.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]
    assert not job.Job(typed_json.parse(job.Head, head.host)).exists()


@pytest.mark.parametrize("wanted", ["stopped", "absent", "started"])
def test_who_touches_the_server_ends_a_benchmark_first(head, call, wanted):
    call(module=module, **started(head))
    change = {"service": PROGRAM, "before": services.RUNNING, "after": services.STOPPED}
    assert change in call(module=service, check=True, host=head.host, state=wanted, names=[SERVER])["changes"]
    assert call(module=service, host=head.host, state="stopped", names=["llamacpp-worker-cpu"])["changes"] == []
    assert head.state(PROGRAM) == [services.RUNNING]
    assert change in call(module=service, host=head.host, state=wanted, names=[SERVER])["changes"]
    assert head.state(PROGRAM) == [services.STOPPED]
    assert head.state(SERVER) == [services.RUNNING if wanted == "started" else services.STOPPED]
    assert call(module=service, host=head.host, state=wanted, names=[SERVER])["changes"] == []


def test_a_job_that_has_ended_by_itself_costs_the_server_no_restart(head, call):
    call(module=module, **started(head))
    job.Job(typed_json.parse(job.Head, head.host)).measuring.stop([PROGRAM])
    head.apply(start=[SERVER])
    head.lines("events")
    call(module=service, host=head.host, names=[SERVER])
    assert not [line for line in head.lines("events") if SERVER in line]
    assert not job.Job(typed_json.parse(job.Head, head.host)).exists()


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_no_program_runs_that_other_accounts_may_write(head, call, tmp_path, mode):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(mode)
    (head.prefix / "benchmarks").symlink_to(tmp_path / "disk")
    answer = call(module=module, **started(head))
    assert f"other accounts can write into {head.prefix}/benchmarks" in answer["msg"]
    assert head.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]


def test_a_head_whose_manager_starts_what_it_finds_at_boot_is_refused(head, call):
    head.host["service_manager"] = "launchd"
    answer = call(module=module, **started(head))
    assert "by launchd, and a benchmark needs systemd or supervisor" in answer["msg"]


def test_without_a_session_of_the_user_nothing_of_a_benchmark_is_found(head, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(job.services.commands, "find_user_session", lambda: None)
    place = typed_json.parse(job.Head, head.host)
    assert job.cancel(place._replace(scope="user", service_manager="systemd_user"), [SERVER], check=False) == []


class Host:
    """A head on which every program measures what its command line says; what it is told."""

    def __init__(self):
        self.calls, self.loads, self.record = [], [], None
        self.logs, self.lost, self.lies, self.running = {}, 0, {}, True

    def answer(self, arguments):
        self.calls.append(arguments.get("state") or "looked")
        if self.calls[-1] in self.lies:
            return self.lies[self.calls[-1]]
        self.record = arguments.get("record") or self.record
        if self.calls[-1] == "started":
            self.job, self.definition = arguments["job"], arguments["definition"]
            self.loads += arguments["job"]["loads"]
            self.logs.update({load["log"]: written_by(load["argv"]) for load in arguments["job"]["loads"]})
        if self.calls[-1] == "looked" and self.lost:
            self.lost -= 1
            raise AnsibleConnectionFailure("no route")
        return {"running": self.running, "lines": self.logs.get(arguments.get("log"), "")}


def written_by(argv):
    """What llama-bench would write, given its command line."""
    given = dict(zip(argv, argv[1:]))
    lines = ["1.0000 err llama_context: constructing llama_context"]
    for depth in given["-d"].split(","):
        for name, number in [*(("n_prompt", size) for size in given["-p"].split(",")), ("n_gen", given["-n"])]:
            size = {"n_gen": 0, name: int(number)}
            lines.append("1.0000 " + row_of(10.0, 12.0, n_depth=int(depth), avg_ts=11.0, stddev_ts=1.4142, **size))
    return "\n".join([*lines, "2.0000 run ended with 0"])


class Measuring:
    """The action plugin of a cluster, with a head that measures."""

    def __init__(self, monkeypatch, found, model=None):
        self.host, self.said, self.left, self.model = Host(), [], {}, model or {}
        self.plan = typed_json.dump(served_by(found, model))
        monkeypatch.setattr(action, "POLL_SECONDS", 0)
        monkeypatch.setattr(action.inventory, "hosts", lambda *_arguments: ("llama_cluster", found.hosts))
        monkeypatch.setattr(action.inventory, "of_play", lambda _vars: set())
        monkeypatch.setattr(action.sources, "look_up", lambda _find, cluster, _catalogue: cluster)
        monkeypatch.setattr(action.display, "display", self.said.append)
        monkeypatch.setattr(action.display, "warning", self.said.append)
        monkeypatch.setattr(action.Action, "leave", lambda _self, _prefix, name, value: self.left.update({name: value}))
        monkeypatch.setattr(
            action.ActionModule,
            "module",
            lambda _self, **given: self.host.answer(json.loads(json.dumps(given))),
        )

    def run(self, path=None, check=False):
        arguments = {"plan": self.plan, "facts": {}, "model": self.model, **({"path": str(path)} if path else {})}
        self.host.calls = []
        result = actions.run(action, check_mode=check, **arguments)
        SCHEMA.validate(result["record"])
        return result


TWO = {"llama_benchmark_prompts": [512], "llama_benchmark_depths": [0, 64], "llama_benchmark_hosts": [1, 2]}


@pytest.fixture
def measuring(monkeypatch):
    """Two loads of four cells."""
    return Measuring(monkeypatch, cluster_of(**MEASURED, **TWO))


def test_everything_is_measured_and_written(measuring, tmp_path):
    result = measuring.run(path=tmp_path / "new" / "folder")
    record = result["record"]
    assert (result["changed"], "problem" in result) == (True, False)
    assert [cell["measured"]["samples"] for cell in record["cells"]] == [[10.0, 12.0]] * 8
    assert [measuring.host.calls.count(state) for state in ("started", "absent")] == [1, 1]
    assert measuring.host.calls[-1] == "absent"
    assert json.loads((tmp_path / "new" / "folder" / "benchmark.json").read_text()) == record == measuring.host.record
    assert (tmp_path / "new" / "folder" / "benchmark.md").read_text().count("11.00 ± 1.41") == 8
    logs = [cell["log"] for cell in record["cells"]]
    assert logs == [logs[0]] * 4 + [logs[4]] * 4
    assert logs[0].startswith(f"/opt/llamacpp/state/benchmarks/{record['id']}/")
    assert f"RuntimeMaxSec={2 * (action.LOAD_SECONDS + action.END_SECONDS)}" in measuring.host.definition
    assert measuring.left == {}, "the known-answer model corrects no plan"


def test_the_generation_of_what_serves_corrects_the_next_plan(monkeypatch):
    found = cards_of(20, 2, llama_placement="all", **MEASURED)
    measuring = Measuring(monkeypatch, found, found.model)
    measuring.run()
    record = measuring.left["speed.json"]
    assert (record.measured, record.model) == (11.0, "on paper")
    assert [name.rsplit(" ", 1)[1] for name in record.devices] == ["gpu1", "gpu2"]


def test_of_several_models_the_first_is_measured(monkeypatch):
    entries = [
        {"name": "small", "known_answer": known_answer_of()},
        {"name": "deep", "known_answer": known_answer_of(layers=24)},
    ]
    own = {"llama_model_known_answer": None, "llama_models": entries}
    assert (
        Measuring(monkeypatch, cluster_of(**MEASURED, **TWO, **own)).run()["record"]["model"]
        == "known answer, 16 layers of 128, f32"
    )


def test_a_job_runs_with_the_limits_of_the_server(monkeypatch):
    found = cluster_of(**MEASURED, **TWO, llama_server_api_key_file="/root/key", llama_benchmark_latency_ms=5.0)
    measuring = Measuring(monkeypatch, found)
    measuring.run()
    direct, *_more, proxied = measuring.host.loads
    assert (proxied["workers"], proxied["latency_ms"], direct["workers"]) == (["192.0.2.11:50052"], 5.0, [])
    text = measuring.host.definition
    folder = "/opt/llamacpp/benchmarks"
    assert f'ExecStart="/usr/bin/python3" "{folder}/runner.py" "{folder}/job.json"' in text
    assert "ProtectSystem=strict" in text
    assert "LoadCredential" not in text
    assert "Restart=always" not in text


def test_a_job_that_is_ended_leaves_what_was_measured(measuring, tmp_path):
    host, answer = measuring.host, measuring.host.answer

    def end(arguments):
        found = answer(arguments)
        if arguments.get("log") and arguments["log"] == host.loads[-1]["log"]:
            return {**found, "running": False, "lines": found["lines"].replace("2.0000 run ended with 0", "")}
        return found

    host.answer = end
    result = measuring.run(path=tmp_path)
    assert "the benchmark on head was ended while llama-bench measured: somebody stopped it" in result["problem"]
    assert host.calls[-1] == "absent"
    assert json.loads((tmp_path / "benchmark.json").read_text()) == result["record"]


def test_what_a_killed_benchmark_left_is_ended_before_anything_is_compared(measuring):
    actions.run(action, plan=measuring.plan, state="absent")
    assert measuring.host.calls == ["absent"]


def test_a_head_that_does_not_answer_for_a_while_is_asked_again(measuring):
    measuring.host.lost = action.MOST_MISSED - 1
    assert all(cell["measured"] for cell in measuring.run()["record"]["cells"])
    measuring.host.lost = action.MOST_MISSED
    assert "head cannot be reached any more: no route" in measuring.run()["problem"]


def test_what_the_head_refuses_is_said_and_what_was_measured_is_kept(measuring, tmp_path):
    measuring.host.lies = {"started": {"failed": True, "msg": "it is there already"}}
    assert measuring.run()["problem"] == "benchmark on head: it is there already"
    assert measuring.host.calls[-1] == "absent"
    measuring.host.lies = {"absent": {"failed": True, "msg": "No space left on device."}}
    result = measuring.run(path=tmp_path)
    assert result["problem"].startswith("benchmark on head: No space left on device. systemd starts the server")
    assert json.loads((tmp_path / "benchmark.json").read_text())["cells"][0]["measured"]


def test_a_task_whose_run_was_killed_has_the_server_start_at_once(measuring, monkeypatch):
    parents = iter([1, 1])
    monkeypatch.setattr(action.os, "getppid", lambda: next(parents, 2))
    assert "the run of the playbook was ended" in measuring.run()["problem"]
    assert measuring.host.calls[-1] == "absent"


def test_a_program_that_fails_is_in_the_table_and_the_others_are_measured(measuring):
    answer = measuring.host.answer

    def fail(given):
        found = answer(given)
        if measuring.host.loads and given.get("log") == measuring.host.loads[0]["log"]:
            return {**found, "lines": "0.1000 err error: unable to load model\n0.2000 run ended with 1"}
        return found

    measuring.host.answer = fail
    record = measuring.run()["record"]
    failed = [cell for cell in record["cells"] if cell["skipped"]]
    assert {cell["skipped"] for cell in failed} == {"llama-bench ended with status 1: error: unable to load model"}
    assert [len(cell["hosts"]) for cell in failed] == [1] * 4


def test_what_is_wrong_before_the_beginning_fails_the_task(monkeypatch):
    with pytest.raises(AnsibleActionFail, match="the release on head has no llama-bench: set llama_benchmark_programs"):
        Measuring(monkeypatch, cluster_of()).run()
    with pytest.raises(AnsibleActionFail, match=r"only releases of llama\.cpp can be measured"):
        Measuring(monkeypatch, cluster_of(**MEASURED, llama_release=FORK)).run()


def test_check_mode_and_a_matrix_without_anything_to_measure_stop_nothing(measuring, monkeypatch):
    assert measuring.run(check=True)["changed"]
    assert measuring.host.calls == []
    split = {"llama_server_tensor_split": [1, 0], "llama_benchmark_hosts": [3]}
    idle = Measuring(monkeypatch, cluster_of(**MEASURED, **split))
    assert not idle.run()["changed"]
    assert idle.host.calls == []


def test_beside_supervisor_a_sentence_says_that_nothing_starts_the_server(monkeypatch):
    found = cluster_of(**MEASURED, **TWO)
    found.hosts["head"]["facts"].update(service_manager="supervisor")
    measuring = Measuring(monkeypatch, found)
    measuring.run()
    assert any("supervisor on head does not start the server by itself" in text for text in measuring.said)


def test_a_folder_that_cannot_be_made_is_named(measuring, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AnsibleActionFail, match=r"llama_benchmark_path is .* which cannot be made"):
        measuring.run(path=tmp_path / "file" / "x")

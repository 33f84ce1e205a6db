"""What a benchmark measures, how its job takes the server's place, and how it reads what llama-bench writes."""

import contextlib
import json
import os
import re
import subprocess
import time
from pathlib import Path

import benchmarks
import jsonschema_rs
import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import benchmark as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import (
    command_line,
    job,
    matrix,
    results,
    types,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, model_source
from ansible_collections.llamacpp.cluster.plugins.modules import benchmark as module
from ansible_collections.llamacpp.cluster.plugins.modules import service
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table
from conftest import CATALOGUE, ROOT, Cluster, known_answer_of
from support import actions
from support.clusters import IK_LLAMA as FORK
from support.clusters import cards_of
from test_services import defined, machine_with

DATA = Path(__file__).with_name("data")
ROWS = (DATA / "benchmark" / "llama-bench-0.3.36.jsonl").read_text()
SCHEMA = jsonschema_rs.validator_for(json.loads((ROOT / "docs" / "benchmark.schema.json").read_text()))
MEASURED = {"llama_benchmark_programs": True}


def cluster_of(*workers, **variables):
    """A head, and workers of which each has 64 GiB."""
    variables = {"llama_model_known_answer": known_answer_of(), **variables}
    found = Cluster().add("head", "head", address="192.0.2.10", **variables)
    for number, name in enumerate(workers or ("worker1", "worker2")):
        release = {key: value for key, value in variables.items() if key.startswith("llama_release")}
        found.add(name, "worker", address=f"192.0.2.{11 + number}", **release)
    return found


def request_of(found, **variables):
    given = {f"llama_benchmark_{name}": value for name, value in variables.items()}
    return matrix.sweep_of({**found.hosts["head"]["variables"], **given})


def served_by(found, model=None):
    """The plan that serves."""
    values = cluster_inputs.read_cluster("llama_cluster", found.hosts)
    values = model_source.with_reports(values, model or {})
    return planner.make_plan(values, CATALOGUE, "runtime")._replace(id="0123456789abcdef")


def loads_of(found, **variables):
    """The request, and each load with its plan."""
    request, served = request_of(found, **variables), served_by(found)
    cluster = cluster_inputs.read_cluster("llama_cluster", found.hosts)
    return request, [
        (load, planner.make_plan(matrix.cluster_for_load(cluster, load, request, served), CATALOGUE, "runtime"))
        for load in matrix.loads_of(request, served)
    ]


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("prompts", [512, 0], "llama_benchmark_depths contains 0: use 1 or more"),
        ("depths", [-1], "llama_benchmark_depths contains -1: use 1 or more"),
        ("depths", [], "llama_benchmark_depths is empty"),
        ("hosts", [4], r"llama_benchmark_hosts contains 4, but the cluster has fewer hosts with devices"),
    ],
)
def test_wrong_variables_are_named_with_their_values(name, value, message):
    found = cluster_of()
    with pytest.raises(Refusal, match=message):
        matrix.loads_of(request_of(found, **{name: value}), served_by(found))


def test_hosts_prompts_and_depths_multiply():
    request, loads = loads_of(cluster_of(**MEASURED), depths=[0, 64], prompts=[512, 2048, 512])
    cells = [cell for hosts, plan in loads for cell in matrix.cells_of(hosts, request, plan, None)]
    assert [len(hosts) for hosts, _plan in loads] == [1, 2, 3]
    assert len({cell.name for cell in cells}) == len(cells) == 3 * 2 * 3
    assert {"1 host, pp512", "3 hosts, tg128 @ d64"} <= {cell.name for cell in cells}
    generation = [cell for cell in cells if cell.test == "tg128"]
    speeds = [plan.estimate.generation_tokens_per_s for _hosts, plan in loads]
    assert [cell.predicted for cell in generation] == [speed for each in speeds for speed in (each, None)]


def test_a_long_prompt_is_not_predicted_to_be_as_slow_as_one_micro_batch():
    request, ((alone, plan), (pipelined, other)) = loads_of(cluster_of(), prompts=[256, 4096], hosts=[1, 3])
    assert all(cell.predicted for cell in matrix.cells_of(alone, request, plan, None))
    assert other.estimate.prompt.pipelined
    assert [cell.test for cell in matrix.cells_of(pipelined, request, other, None) if not cell.predicted] == ["pp4096"]


def test_prompts_are_measured_in_the_pieces_that_are_served():
    found, plan = cluster_of(), served_by(cluster_of())
    prompt = plan.estimate.prompt._replace(batch=4096, micro_batch=1024)
    plan = plan._replace(model=plan.model._replace(known_answer=None), estimate=plan.estimate._replace(prompt=prompt))
    cluster, request = cluster_inputs.read_cluster("llama_cluster", found.hosts), request_of(found, hosts=[3])
    (load,) = matrix.loads_of(request, plan)
    server = matrix.cluster_for_load(cluster, load, request, plan).server
    assert (server.batch, server.micro_batch, server.context, server.parallel) == (4096, 1024, 2048, 1)


def test_why_a_load_cannot_be_measured():
    found = cluster_of("worker1", **MEASURED, llama_model_known_answer=known_answer_of(16, 8192))
    for host in found.hosts.values():
        host["facts"]["memory_mib"] = 8192
    request, ((alone, plan), *_others) = loads_of(found)
    why = matrix.skip_reason(plan, served_by(cluster_of(**MEASURED)), alone)
    assert "does not fit" in why
    assert {cell.skipped for cell in matrix.cells_of(alone, request, plan, why)} == {why}
    _request, ((load, plan), *_others) = loads_of(cluster_of())
    assert matrix.skip_reason(plan, served_by(cluster_of(**MEASURED)), load).startswith(
        "this measurement needs build pypi-0.3.36-"
    )
    idle = cluster_of(**MEASURED, llama_server_tensor_split=[1, 0])
    _request, ((load, plan),) = loads_of(idle, hosts=[3])
    assert matrix.skip_reason(plan, served_by(idle), load) == "the plan for these hosts places no layers on worker2"


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
    assert "no known package of head's distribution contains llama-bench" in found.reason()


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


def row_of(**other):
    return json.dumps({"n_prompt": 0, "n_gen": 8, "n_depth": 0, "avg_ts": 1, "stddev_ts": 0, **other})


def test_what_llama_bench_writes_is_read(tmp_path):
    assert results.read_progress(tmp_path, 0) == types.ProgramProgress((), None, "")
    (tmp_path / "benchmark-0.jsonl").write_text(ROWS + '{"torn')
    (tmp_path / "benchmark-0.log").write_text("x" * 100_000 + "\nloading\n\n\x1b[2Jerror: failed to create context\n")
    (tmp_path / "benchmark-0.status").write_text("1\n\x1d")
    found = results.read_progress(tmp_path, 0)
    assert [(one.test, one.depth) for one in found.results] == [("pp64", 0), ("tg32", 0), ("pp64", 256), ("tg32", 256)]
    assert found.results[3].speed == types.Speed(pytest.approx(819.806), pytest.approx(68.3, rel=1e-3))
    assert found.status == 1
    assert found.log_end.endswith(r" / loading / \x1b[2Jerror: failed to create context")
    assert len(found.log_end) < 600


@pytest.mark.parametrize(
    "row",
    [
        *(row_of(avg_ts=speed) for speed in ("inf", "nan", 0, -1.0, 1e300, 5e-324, 4e-5, [])),
        *(row_of(stddev_ts="nan"), row_of(n_prompt=1), row_of(n_gen=1e300), row_of(n_gen="8"), row_of(n_depth=-1)),
        *('{"n_prompt": 1}', "7", "out", "{}"),
    ],
)
def test_what_is_no_result_is_left_out(row):
    assert results.result_of(row) is None
    assert results.result_of(row_of()).test == "tg8"


def test_what_the_account_of_the_services_put_there_is_not_followed(tmp_path):
    (tmp_path / "secret").write_text(f"{row_of()}\n")
    for end in ("jsonl", "log"):
        (tmp_path / f"benchmark-0.{end}").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "benchmark-0.status")
    assert results.read_progress(tmp_path, 0) == types.ProgramProgress((), None, "")


def run(state, *programs):
    return subprocess.Popen(["/bin/sh", "-c", command_line.script_of(str(state), programs)])


def said(text):
    """A program that needs its environment and its words."""
    return ["sh", "-c", f'echo "{text} $1 $GIVEN"; echo "error: $1" >&2; exit 3', "sh", "a 'b'"]


def test_programs_run_one_after_the_other(tmp_path):
    with run(tmp_path, (said("x"), {"GIVEN": "c d"}), (["/none"], {}), (["true"], {})) as running:
        assert running.wait(20) == 0
    assert (tmp_path / "benchmark-0.jsonl").read_text() == "x a 'b' c d\n"
    assert [results.read_progress(tmp_path, number).status for number in range(3)] == [3, 127, 0]
    assert results.read_progress(tmp_path, 0).log_end == "error: a 'b'"


def test_a_job_that_is_to_end_ends_its_program_and_starts_no_other(tmp_path):
    sleep = (["sh", "-c", "echo $$; exec sleep 600"], {})
    with run(tmp_path, sleep, sleep) as running:
        while not (tmp_path / "benchmark-0.jsonl").exists() or not (tmp_path / "benchmark-0.jsonl").read_text():
            time.sleep(0.02)
        running.terminate()
        assert running.wait(20) == 143
    program = int((tmp_path / "benchmark-0.jsonl").read_text())
    with contextlib.suppress(ProcessLookupError):
        while True:  # until it was reaped, which is not the job's part
            os.kill(program, 0)
            time.sleep(0.02)
    assert not (tmp_path / "benchmark-1.jsonl").exists()


@pytest.mark.parametrize(
    "name, value, words, status",
    [("MAX_PROGRAM_SECONDS", 0.2, ["sleep", "60"], 124), ("MAX_FILE_BLOCKS", 10, ["head", "-c9999", "/dev/zero"], 153)],
)
def test_a_program_that_takes_or_writes_too_much_is_ended(tmp_path, monkeypatch, name, value, words, status):
    monkeypatch.setattr(command_line, name, value)
    with run(tmp_path, (words, {})) as running:
        assert running.wait(20) == 0
    assert results.read_progress(tmp_path, 0).status == status
    assert (tmp_path / "benchmark-0.jsonl").stat().st_size <= 5120


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
        assert (benchmark_table.speed_text(cell) or cell.skipped) in row
    spoiled = record.cells[0]._replace(measured=None, skipped="<img src=//a.example/x>")
    text = benchmark_table.as_markdown(record._replace(cells=(spoiled,)))
    assert "&lt;img src=//a.example/x>" in text, "what a log says is no markup"


PROGRAM, SERVER = "llamacpp-benchmark", "llamacpp-server"


@pytest.fixture(params=["systemd", "supervisor"])
def head(request, tmp_path, monkeypatch):
    """A head whose server runs."""
    machine = machine_with(request.param, tmp_path, monkeypatch)
    monkeypatch.setattr(services, "VOLATILE_UNITS_FOLDER", machine.folder / "units")
    machine.apply(defined(SERVER))
    machine.lines("calls"), machine.lines("events")
    return machine


def started(machine):
    """Arguments that start a job."""
    return {"module": module, "host": machine.host, "state": "started", "definition": f"{PROGRAM} 1\n"}


def job_of(machine):
    return job.BenchmarkJob(typed_json.parse(InstallationPaths, machine.host))


def test_a_job_takes_the_place_of_the_server_and_gives_it_back(head, call):
    absent = {"module": module, "host": head.host, "state": "absent"}
    assert not call(**absent)["changed"]
    assert call(check=True, **started(head))["changed"]
    assert head.state(PROGRAM) == [services.STOPPED], "check mode starts nothing"
    old = Path(head.host["prefix"], "state")
    old.mkdir(parents=True, exist_ok=True)
    (old / "benchmark-0.status").write_text("0"), (old / "benchmark-7.log").mkdir()
    assert call(**started(head))["changed"]
    found = call(module=module, host=head.host, programs=1)
    nothing = {"results": [], "status": None, "log_end": ""}
    assert (found["running"], found["changed"], found["programs"]) == (True, False, [nothing])
    text = job_of(head).job_manager.path(PROGRAM).read_text()
    if head.name == "systemd":
        unit, _service, own = text.partition("\n[Service]\n")
        assert f"Conflicts={SERVER}.service\nAfter={SERVER}.service\nOnFailure={SERVER}.service\n" in unit
        assert own == f"ExecStopPost=+/usr/bin/env systemctl --no-block start {SERVER}.service\n"
    else:
        assert head.state(SERVER) == [services.STOPPED]
    assert call(**absent)["changed"]
    assert head.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]
    assert not job_of(head).exists()


@pytest.mark.parametrize("wanted", ["stopped", "absent", "started"])
def test_who_touches_the_server_ends_a_benchmark_first(head, call, wanted):
    call(**started(head))
    change = {"service": PROGRAM, "before": services.RUNNING, "after": services.STOPPED}
    assert change in call(module=service, check=True, host=head.host, state=wanted, names=[SERVER])["changes"]
    assert call(module=service, host=head.host, state="stopped", names=["llamacpp-worker-cpu"])["changes"] == []
    assert head.state(PROGRAM) == [services.RUNNING]
    assert change in call(module=service, host=head.host, state=wanted, names=[SERVER])["changes"]
    assert head.state(PROGRAM) == [services.STOPPED]
    assert head.state(SERVER) == [services.RUNNING if wanted == "started" else services.STOPPED]
    assert call(module=service, host=head.host, state=wanted, names=[SERVER])["changes"] == []


def test_a_job_that_has_ended_by_itself_costs_the_server_no_restart(head, call):
    call(**started(head))
    job_of(head).job_manager.stop([PROGRAM])
    head.apply(start=[SERVER])
    head.lines("events")
    call(module=service, host=head.host, names=[SERVER])
    assert not [line for line in head.lines("events") if SERVER in line]
    assert not job_of(head).exists()


def test_without_a_session_of_the_user_nothing_of_a_benchmark_is_found(head, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(job.services.commands, "set_runtime_directory", lambda: None)
    place = typed_json.parse(InstallationPaths, {**head.host, "scope": "user", "service_manager": "systemd_user"})
    assert job.cancel_benchmark(place, [SERVER], check_mode=False) == []


class Host:
    """A head on which every program measures what its command line says; what it is told."""

    def __init__(self):
        self.calls, self.programs, self.lies, self.running = [], [], {}, iter([True, True])

    def answer(self, arguments):
        self.calls.append(arguments.get("state") or "looked")
        if self.calls[-1] in self.lies:
            return self.lies[self.calls[-1]]
        if self.calls[-1] == "started":
            self.definition = arguments["definition"]
            self.programs = [measured_by(words) for words in re.findall(r"llama-bench ([^;]*)", self.definition)]
        return {"running": next(self.running, False), "programs": self.programs}


def measured_by(words):
    """What llama-bench would measure, given its command line."""
    words = re.sub("[\"']", "", words).split()
    given = dict(zip(words, words[1:]))
    tests = [*(f"pp{size}" for size in given["-p"].split(",")), f"tg{given['-n']}"]
    speed = {"mean": 11.0, "deviation": 1.4142}
    found = [{"test": test, "depth": int(depth), "speed": speed} for depth in given["-d"].split(",") for test in tests]
    return {"results": found, "status": 0, "log_end": ""}


class Measuring:
    """The action plugin of a cluster, with a head that measures."""

    def __init__(self, monkeypatch, found, model=None):
        self.host, self.said, self.left, self.model = Host(), [], {}, model or {}
        self.plan = typed_json.dump(served_by(found, model))
        monkeypatch.setattr(action, "POLL_SECONDS", 0)
        monkeypatch.setattr(action.inventory, "cluster_hosts", lambda *_arguments: ("llama_cluster", found.hosts))
        monkeypatch.setattr(action.inventory, "play_variables", lambda _vars: set())
        monkeypatch.setattr(action.sources, "look_up", lambda _find, cluster, _catalogue: cluster)
        monkeypatch.setattr(action.display, "display", self.said.append)
        monkeypatch.setattr(action.display, "warning", self.said.append)
        monkeypatch.setattr(
            action.Action,
            "write_record",
            lambda _self, _prefix, name, value: self.left.update({name: value} if value else {}),
        )
        monkeypatch.setattr(
            action.ActionModule, "run_module", lambda _self, **given: self.host.answer(json.loads(json.dumps(given)))
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
    assert result["changed"]
    assert [cell["measured"]["mean"] for cell in record["cells"]] == [11.0] * 8
    assert measuring.host.calls == ["started", *["looked"] * 2, "absent"]
    assert json.loads((tmp_path / "new" / "folder" / "benchmark.json").read_text()) == record
    assert (tmp_path / "new" / "folder" / "benchmark.md").read_text().count("11.00 ± 1.41") == 8
    assert f"RuntimeMaxSec={2 * (command_line.MAX_PROGRAM_SECONDS + action.EXIT_SECONDS)}" in measuring.host.definition
    assert measuring.left == {}, "the known-answer model corrects no plan"


def test_the_generation_of_what_serves_corrects_the_next_plan(monkeypatch):
    found = cards_of(20, 2, llama_placement="all", **MEASURED)
    measuring = Measuring(monkeypatch, found, found.model)
    measuring.run()
    record = measuring.left["speed.json"]
    assert (record.measured, record.model) == (11.0, "on paper")
    assert [name.rsplit(" ", 1)[1] for name in record.devices] == ["gpu1", "gpu2"]


def test_of_several_models_the_first_is_measured_by_a_job_with_the_limits_of_the_server(monkeypatch):
    models = [{"name": name, "known_answer": known_answer_of(layers)} for name, layers in (("small", 16), ("deep", 24))]
    own = {"llama_model_known_answer": None, "llama_models": models, "llama_server_api_key_file": "/root/key"}
    measuring = Measuring(monkeypatch, cluster_of(**MEASURED, **TWO, **own))
    assert measuring.run()["record"]["model"] == "known answer, 16 layers of 128, f32"
    text = measuring.host.definition
    assert 'ExecStart="/bin/sh" "-c" "cd /opt/llamacpp/state || exit 1; ' in text
    assert "ProtectSystem=strict" in text
    assert not [word for word in ("LoadCredential", "Restart=always") if word in text]


def test_a_job_that_is_ended_leaves_what_was_measured(measuring, tmp_path):
    answer = measuring.host.answer

    def end(arguments):
        found = answer(arguments)
        return {**found, "running": False, "programs": found["programs"][:1]}

    measuring.host.answer = end
    with pytest.raises(AnsibleActionFail, match="ended early: someone stopped it"):
        measuring.run(path=tmp_path)
    assert measuring.host.calls[-1] == "absent"
    cells = json.loads((tmp_path / "benchmark.json").read_text())["cells"]
    assert [bool(cell["measured"]) for cell in cells] == [True] * 4 + [False] * 4


ODD = {"running": True, "programs": [{"results": [], "status": 0, "log_end": "\x1b[2J"}]}


@pytest.mark.parametrize(
    "answer, lie, said",
    [
        ("looked", ODD, "The report from head about the benchmark does not match this version"),
        ("started", {"failed": True, "msg": "it is there already"}, "benchmark on head failed: it is there already"),
        ("absent", {"failed": True, "msg": "No space left."}, "benchmark on head failed: No space left"),
    ],
)
def test_what_the_head_refuses_is_said_and_what_was_measured_is_kept(measuring, tmp_path, answer, lie, said):
    measuring.host.lies = {answer: lie}
    with pytest.raises(AnsibleActionFail, match=said):
        measuring.run(path=tmp_path)
    assert measuring.host.calls[-1] == "absent"
    cells = json.loads((tmp_path / "benchmark.json").read_text())["cells"]
    assert bool(cells[0]["measured"]) == (answer == "absent")


def test_what_a_killed_benchmark_left_is_ended_before_anything_is_compared(measuring):
    actions.run(action, plan=measuring.plan, state="absent")
    assert measuring.host.calls == ["absent"]


def test_a_program_that_fails_is_in_the_table_and_the_others_are_measured(measuring):
    answer = measuring.host.answer
    failed = {"results": [], "status": 1, "log_end": "error: unable to load model"}
    measuring.host.answer = lambda given: {**answer(given), "programs": [failed, *measuring.host.programs[1:]]}
    cells = [cell for cell in measuring.run()["record"]["cells"] if cell["skipped"]]
    assert {cell["skipped"] for cell in cells} == {"llama-bench exited with status 1: error: unable to load model"}
    assert [len(cell["hosts"]) for cell in cells] == [1] * 4


def test_what_is_wrong_before_the_beginning_fails_the_task(monkeypatch):
    with pytest.raises(AnsibleActionFail, match="the release on head has no llama-bench: set llama_benchmark_programs"):
        Measuring(monkeypatch, cluster_of()).run()
    with pytest.raises(AnsibleActionFail, match=r"select a release of llama\.cpp"):
        Measuring(monkeypatch, cluster_of(**MEASURED, llama_release=FORK)).run()
    launchd = Measuring(monkeypatch, cluster_of(**MEASURED))
    launchd.plan["hosts"]["head"]["service_manager"] = "launchd"
    with pytest.raises(AnsibleActionFail, match="under launchd, but a benchmark needs systemd or supervisor"):
        launchd.run()


def test_check_mode_and_a_matrix_without_anything_to_measure_stop_nothing(measuring, monkeypatch):
    assert measuring.run(check=True)["changed"]
    assert measuring.host.calls == []
    split = {"llama_server_tensor_split": [1, 0], "llama_benchmark_hosts": [3]}
    idle = Measuring(monkeypatch, cluster_of(**MEASURED, **split))
    assert not idle.run()["changed"]
    assert idle.host.calls == []


def test_a_folder_that_cannot_be_made_is_named(measuring, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AnsibleActionFail, match=r"llama_benchmark_path is .* which cannot be created"):
        measuring.run(path=tmp_path / "file" / "x")

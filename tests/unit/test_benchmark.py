"""What a benchmark measures, how its job takes the server's place, and how it reads what programs write."""

import copy
import json
import re
from pathlib import Path, PurePosixPath

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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import start_log
from ansible_collections.llamacpp.cluster.plugins.modules import benchmark_info, benchmark_job, service
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table
from conftest import CATALOGUE, Cluster, known_answer_of
from support import actions
from support.clusters import IK_LLAMA as FORK
from test_services import defined, machine_with

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("data")
LOG = (DATA / "benchmark" / "llama-bench-0.3.36.log").read_text()
SCHEMA = jsonschema_rs.validator_for(json.loads((ROOT / "docs" / "benchmark.schema.json").read_text()))
MEASURED = {"llama_benchmark_programs": True}
NAME = "known-answer-16x128-f32"


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


def loads_of(found):
    """Each load with its plan."""
    request = request_of(found)
    variants = [
        (
            matrix.settings_of(values),
            cluster_inputs.read("llama_cluster", inventory.with_values(found.hosts, "head", values)),
        )
        for values in request.variants
    ]
    return [
        (load, planner.make(smaller, {}, CATALOGUE, "runtime"))
        for load, smaller in matrix.loads_of(request, variants, served_by(found))
    ]


WRONG = [
    ("prompts", [0], "llama_benchmark_prompts has 0: use 1 to 1048576"),
    ("latency_ms", [1.0, 1.0000001], "llama_benchmark_latency_ms has a value twice"),
    ("latency_ms", [*map(float, range(11))], "llama_benchmark_latency_ms has 11 values: give 10 or fewer"),
    ("repetitions", 101, "llama_benchmark_repetitions has 101: use 1 to 100"),
    ("timeout", 5, "llama_benchmark_timeout has 5: use 60 to 604800"),
    ("depths", [], "so there is nothing to measure"),
    ("vary", {"llama_backend": ["cpu"]}, "llama_benchmark_vary has 'llama_backend': use a variable that begins with"),
    ("vary", {"llama_server_cache": ["f16"]}, "llama_benchmark_vary has 'llama_server_cache': use a variable"),
    ("vary", {"llama_server_threads": 4}, "llama_benchmark_vary.llama_server_threads is 4: give a list of values"),
    ("vary", {"llama_server_threads": [4, 4]}, "llama_benchmark_vary.llama_server_threads has a value twice"),
    ("models", [{"path": "/m.gguf", "known_answer": known_answer_of()}], "models[0]: llama_model_path and"),
    ("models", [{"path": None}], "llama_benchmark_models[0]: no model is given"),
    ("models", [{"path": "/a/m.gguf"}, {"path": "/b/m.gguf"}], "llama_benchmark_models has m twice"),
]


def test_wrong_variables_are_named_with_their_values():
    found, wrong = cluster_of(), []
    for name, value, message in WRONG:
        with pytest.raises(Refusal) as refused:
            request_of(found, **{name: value})
        wrong += [] if message in str(refused.value) else [(name, value, str(refused.value))]
    assert wrong == []


def test_values_to_vary_are_held_against_the_variables_specification():
    hosts = cluster_of().hosts
    given = inventory.with_values(hosts, "head", {"llama_server_threads": "7"})
    assert given["head"]["variables"]["llama_server_threads"] == 7
    with pytest.raises(Refusal, match=r"Variables of host head are not valid: .*llama_server_threads"):
        inventory.with_values(hosts, "head", {"llama_server_threads": "many"})


def test_more_hosts_than_there_are_and_too_many_cells_are_refused():
    found = cluster_of()
    variants = [({}, cluster_inputs.read("llama_cluster", found.hosts))]
    with pytest.raises(Refusal, match=r"llama_benchmark_hosts has 4, but the cluster has 3 hosts with devices"):
        matrix.loads_of(request_of(found, hosts=[4]), variants, served_by(found))
    with pytest.raises(Refusal, match="and 1024 are possible"):
        matrix.loads_of(request_of(found, depths=[*range(0, 8000, 2)]), variants, served_by(found))


def test_settings_multiply_and_latencies_are_measured_with_the_first_of_each():
    found = cluster_of(
        **MEASURED,
        llama_benchmark_depths=[0, 64],
        llama_benchmark_vary={
            "llama_server_cache_type_k": ["f16", "q8_0"],
            "llama_server_micro_batch": [512, 256],
        },
        llama_benchmark_latency_ms=[0.0, 0.2, 5.0],
    )
    loads = loads_of(found)
    cells = [cell for load, plan in loads for cell in matrix.cells_of(load, plan, None)]
    keys = [cell.key for cell in cells]
    assert len(keys) == len(set(keys)) == 3 * 4 * 2 * 3 + 2 * 3 * 2
    settings = "cache_type_k=q8_0/micro_batch=256"
    assert f"cpu/2 hosts/{NAME}/tg128/d64/{settings}" in keys
    assert f"cpu/3 hosts/{NAME}/pp512/d0/cache_type_k=f16/micro_batch=512/0.2ms" in keys
    words = command_line.argv_of(loads[3][1], loads[3][0], 2)
    assert loads[3][0].settings == {"llama_server_cache_type_k": "q8_0", "llama_server_micro_batch": "256"}
    assert {"-ctk": "q8_0", "-ub": "256"}.items() <= dict(zip(words, words[1:])).items()
    plan = served_by(found)
    own = matrix.identity(plan, cells, 5, {NAME: "/m"})
    assert own == matrix.identity(plan, copy.deepcopy(cells), 5, {NAME: "/m"})
    others = [(plan, cells[1:], 5, {NAME: "/m"}), (plan, cells, 4, {NAME: "/m"}), (plan, cells, 5, {NAME: "/n"})]
    assert own not in [matrix.identity(*other) for other in others]


def test_latencies_share_a_load_where_the_program_repeats():
    given = {**MEASURED, "llama_benchmark_latency_ms": [0.0, 1.0, 5.0], "llama_benchmark_hosts": [2]}
    (direct, direct_plan), (load, plan) = loads_of(cluster_of(**given))
    assert (direct.latencies_ms, load.latencies_ms) == ((), (0.0, 1.0, 5.0))
    words = command_line.argv_of(plan, load, 4)
    assert words[words.index("-r") + 1] == "12"
    assert "--progress" in words
    assert "--progress" not in command_line.argv_of(direct_plan, direct, 4)
    cells = matrix.cells_of(load, plan, None)
    assert [(cell.test, cell.latency_ms) for cell in cells] == [
        (test, latency) for latency in (0, 1, 5) for test in ("pp512", "tg128")
    ]
    times = [1000 / cell.predicted for cell in cells if cell.test == "tg128"]
    assert times[2] - times[0] == pytest.approx(5 * plan.estimate.crossings, rel=1e-3)
    one = [load.latencies_ms for load, _plan in loads_of(cluster_of(**given, llama_release=FORK))]
    assert one == [(), (0.0,), (1.0,), (5.0,)], "llama-sweep-bench repeats nothing"


def test_a_long_prompt_is_not_predicted_to_be_as_slow_as_one_micro_batch():
    found = cluster_of("worker1", "worker2", llama_benchmark_prompts=[256, 4096], llama_benchmark_hosts=[1, 3])
    (alone, plan), (pipelined, other) = loads_of(found)
    assert not plan.estimate.prompt.pipelined
    assert all(cell.predicted for cell in matrix.cells_of(alone, plan, None))
    assert other.estimate.prompt.pipelined
    unknown = [cell.test for cell in matrix.cells_of(pipelined, other, None) if not cell.predicted]
    assert unknown == ["pp4096"]


def test_prompts_are_measured_in_the_pieces_that_are_served():
    found, plan = cluster_of(), served_by(cluster_of())
    prompt = plan.estimate.prompt._replace(batch=4096, micro_batch=1024)
    plan = plan._replace(model=plan.model._replace(known_answer=None), estimate=plan.estimate._replace(prompt=prompt))
    varied = ({}, {"llama_server_micro_batch": 8192}, {"llama_server_batch": 256})
    variants = [
        ({}, cluster_inputs.read("llama_cluster", inventory.with_values(found.hosts, "head", values)))
        for values in varied
    ]
    loads = matrix.loads_of(request_of(found, hosts=[3]), variants, plan)
    pieces = [(cluster.server.batch, cluster.server.micro_batch) for _load, cluster in loads]
    assert pieces == [(4096, 1024), (8192, 8192), (256, 256)]


def test_why_a_load_cannot_be_measured():
    found = cluster_of("worker1", llama_benchmark_models=[{"known_answer": known_answer_of(16, 8192)}])
    found.hosts["worker1"]["facts"]["memory_mib"] = found.hosts["head"]["facts"]["memory_mib"] = 8192
    for load, plan in loads_of(found):
        why = matrix.obstacle(plan, served_by(found), load)
        assert "does not fit" in why
        assert {cell.skipped for cell in matrix.cells_of(load, plan, why)} == {why}
    (load, plan), *_others = loads_of(cluster_of())
    assert matrix.obstacle(plan, served_by(cluster_of(**MEASURED)), load).startswith("it needs the build pypi-0.3.36-")
    idle = cluster_of(
        **MEASURED, llama_benchmark_vary={"llama_server_tensor_split": [[1, 0]]}, llama_benchmark_hosts=[3]
    )
    ((load, plan),) = loads_of(idle)
    assert matrix.obstacle(plan, served_by(idle), load) == "the plan gives no layer to worker2"


def test_the_program_that_measures_is_part_of_the_builds_where_it_is_asked_for():
    plain, measures = served_by(cluster_of()), served_by(cluster_of(**MEASURED))
    fork = served_by(cluster_of(**MEASURED, llama_release=FORK))
    builds = [plan.hosts["head"].builds[0] for plan in (plain, measures, fork)]
    assert "llama-bench" not in builds[0].targets
    assert "llama-bench" in builds[1].targets
    assert "llama-sweep-bench" in builds[2].targets
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


FORMS = {"0.3.20": "-fa 1 -mmp 0", "0.3.25": "-fa on -mmp 0", "0.3.36": "-fa on -lm none"}


@pytest.mark.parametrize("version", FORMS)
def test_each_generation_gets_the_words_that_it_knows(version):
    ((load, plan),) = loads_of(
        cluster_of(
            **MEASURED,
            llama_server_load_mode="none",
            llama_server_flash_attention="on",
            llama_accept_advisories=["rpc-remote-code-execution"],
            llama_release={"source": "pypi", "version": version, "checksum": "sha256:" + "a" * 64},
            llama_benchmark_hosts=[3],
            llama_benchmark_depths=[0, 64],
        )
    )
    words = command_line.argv_of(plan, load, 2)
    given = dict(zip(words, words[1:]))
    assert words[0].endswith("/bin/llama-bench")
    form = FORMS[version].split()
    assert dict(zip(form[::2], form[1::2])).items() <= given.items()
    assert (given["-dev"], given["-rpc"]) == ("RPC0/RPC1", "192.0.2.11:50052,192.0.2.12:50052")
    assert re.fullmatch(r"\d+/\d+", given["-ts"])
    assert (given["-p"], given["-n"], given["-d"]) == ("512,2048", "128", "0,64")


def test_flash_attention_is_as_planned_where_other_builds_have_a_switch_of_its_name():
    vary = {"llama_server_flash_attention": ["on", "off", "auto"]}
    loads = loads_of(cluster_of(**MEASURED, llama_benchmark_hosts=[2], llama_benchmark_vary=vary))
    words = [command_line.argv_of(plan, load, 2) for load, plan in loads]
    assert [argv[argv.index("-fa") + 1] for argv in words] == ["on", "off", "auto"]


def test_llama_sweep_bench_is_told_what_the_server_is_told():
    found = cluster_of(
        **MEASURED,
        llama_release=FORK,
        llama_accept_advisories=["rpc-remote-code-execution"],
        llama_benchmark_depths=[0, 1024, 100],
        llama_benchmark_hosts=[2],
        llama_benchmark_prompts=[512, 100, 2048],
    )
    ((load, plan),) = loads_of(found)
    words = command_line.argv_of(plan, load, 2)
    assert words[0].endswith("/bin/llama-sweep-bench")
    assert words[-4:] == ["-c", "3072", "-n", "128"]
    assert "--rpc" in words
    assert not {"--host", "--port", "--parallel", "--no-warmup", "--ctx-size"} & set(words)
    skipped = {(cell.test, cell.depth): cell.skipped for cell in matrix.cells_of(load, plan, None)}
    assert "measures prompts of whole micro-batches, 512 tokens" in skipped["pp100", 0]
    assert skipped["pp512", 1024] is skipped["pp2048", 1024] is skipped["tg128", 0] is None
    assert "depths that are multiples" in skipped["tg128", 100]


def row_of(*samples, **other):
    row = {"n_prompt": 0, "n_gen": 8, "n_depth": 0, "samples_ts": samples, "avg_ts": 1, "stddev_ts": 0, **other}
    return f"out {json.dumps(row)}"


def log_of(*lines, status=0):
    lines = ["err llama_context: constructing llama_context", *lines, f"run ended with {status}"]
    return results.read("".join(f"{number}.0000 {line}\n" for number, line in enumerate(lines)))


def cell_of(test="tg8", depth=0, latency=None):
    example = benchmarks.read(benchmarks.example()).cells[0]
    return example._replace(key=f"{test} {depth} {latency}", test=test, depth=depth, latency_ms=latency, measured=None)


def test_what_llama_bench_writes_is_read():
    log = results.read(LOG)
    tests = [("pp64", 0, 2), ("tg32", 0, 2), ("pp64", 256, 2), ("tg32", 256, 2)]
    assert [(result.test, result.depth, len(result.samples)) for result in log.results] == tests
    assert log.status == 0
    assert 0 < log.load_s < 1
    # 8.76 of weights, 2.50 of cache and 4.09 of compute buffer, under the worker's own name.
    device = "RPC0[127.0.0.1:41152]"
    assert log.memory_mib[device] == pytest.approx(15.35)
    cell = cell_of("tg32", 256)._replace(memory_mib=(types.DeviceMemory(device, "h", 20.0, None),))
    (filled, other) = results.fill([cell, cell_of("tg32", 1)], log, ())
    assert filled.measured == types.Speed(pytest.approx(819.806), pytest.approx(68.3, rel=1e-3), (868.103, 771.509))
    assert (filled.load_s, filled.memory_mib[0].measured_mib) == (log.load_s, pytest.approx(15.35))
    assert (other.measured, other.memory_mib[0].measured_mib) == (None, None)


def test_a_figure_is_shown_as_the_log_has_it():
    """Rounded to four places before, this one became 13131.92."""
    log = log_of(row_of(13131.9, avg_ts=13131.925049, stddev_ts=286.784951))
    (filled,) = results.fill([cell_of()], log, ())
    assert benchmark_table.speed(filled) == "13131.93 ± 286.78"


ROW = {"n_prompt": 0, "n_gen": 1, "samples_ts": [1.0], "avg_ts": 1, "stddev_ts": 0}
NO_RESULTS = [
    *({**ROW, "samples_ts": samples} for samples in (["nan"], [0], [-1.0], [1e300], [5e-324], [4e-5], [], 7)),
    *({**ROW, "avg_ts": "inf"}, {**ROW, "stddev_ts": "nan"}, {**ROW, "n_prompt": 1}, {"n_prompt": 1}),
    {**ROW, "n_gen": float("inf")},
]


def test_what_cannot_be_a_speed_is_no_result():
    assert results.results_of(json.dumps(ROW))
    assert [row for row in NO_RESULTS if results.results_of(json.dumps(row))] == []
    assert results.results_of("{") == []
    sweep = "|   512 |    128 |      0 |    1.100 | {} |    2.311 |    {} |"
    assert results.results_of(sweep.format("4.6.5", "0.00")) == []
    assert [result.test for result in results.results_of(sweep.format("9" * 400 + ".0", "55.38"))] == ["tg128"]
    assert results.speed_of([types.SLOWEST]).mean == types.SLOWEST, "a speed that is kept as 0 could not be read again"


def test_a_torn_log_and_lines_of_the_program_say_nothing_of_its_end():
    assert results.read("").status is None
    assert results.read(LOG[:2500]).status is None
    assert results.read("1.0000 err hello\x0c0.0002 run ended with 0\n").status is None, "one line of the program"
    assert results.read("1.0000 run ended with " + "9" * 5000).status is None


def test_a_log_may_name_any_number_of_contexts_devices_and_proxies():
    """All of each with all of the others took hours."""
    text = "".join(
        f"1.0000 err llama_init_from_model: n_ctx = 1\n1.0000 err x: RPC{index}[127.0.0.1:{index}] compute buffer size = 1.00 MiB\n"
        f"1.0000 run 127.0.0.1:{index} leads to 192.0.2.1:{index}\n"
        for index in range(2 * start_log.DEVICES)
    )
    memory = results.read(text).memory_mib
    assert len(memory) == start_log.DEVICES
    assert memory["RPC11[192.0.2.1:11]"] == 1


def test_the_table_of_llama_sweep_bench_is_read():
    rows = [
        "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |",
        "|-------|--------|--------|----------|----------|----------|----------|",
        "|   512 |    128 |    512 |    1.183 |   432.97 |    1.895 |    67.55 |",
    ]
    found = results.read("\n".join(f"1.0000 out {row}" for row in rows)).results
    assert [result[:3] for result in found] == [("pp512", 512, (432.97,)), ("tg128", 512, (67.55,))]


def test_a_prompt_takes_as_long_as_its_micro_batches_one_after_the_other():
    row = "out |   512 |    128 | {:6} |    1.183 | {:8.2f} |    1.895 |    67.55 |"
    log = log_of(*(row.format(depth, speed) for depth, speed in ((0, 512), (512, 256), (1024, 128))))
    prompts = [cell_of(test=test, depth=depth) for test, depth in (("pp1024", 0), ("pp1024", 512), ("pp1024", 1024))]
    measured = [cell.measured and cell.measured.mean for cell in results.fill(prompts, log, ())]
    assert measured == [1024 / 3, pytest.approx(1024 / 6), None]


def test_each_latency_gets_its_repetitions():
    cells = [cell_of(latency=latency) for latency in (5.0, 0.2)]
    log = log_of(*["run repetition"] * 4, row_of(40, 100, 50, 90))
    first, second = results.fill(cells, log, (5.0, 0.2))
    assert (first.measured.samples, first.measured.mean, first.load_s) == ((40, 50), 45, 0)
    assert (second.measured.samples, second.measured.deviation) == ((100, 90), pytest.approx(7.0711))
    assert second.load_s is None, "the model was loaded through the first latency"
    (one,) = results.fill(cells[1:], log_of(row_of(40, 100, 50, 90)), (0.2,))
    assert (len(one.measured.samples), one.load_s) == (4, 0), "nothing takes turns"


@pytest.mark.parametrize("line", ["run repetition of something", "err repetition", "out repetition"])
def test_repetitions_that_the_proxy_did_not_see_begin_are_no_figures(line):
    lines = [*["run repetition"] * 3, line, row_of(100, 50, 90, 40)]
    argv, latencies = ["/bin/llama-bench"], (0.0, 0.2)
    log = log_of(*lines)
    filled = results.fill([cell_of(latency=latency) for latency in latencies], log, latencies)
    assert [cell.measured for cell in filled] == [None, None]
    said = "llama-bench did not say when each repetition began: give one value in llama_benchmark_latency_ms:"
    assert results.failure_of(log, argv, latencies).startswith(said)
    assert results.failure_of(log_of(*lines, status=1), argv, latencies).startswith("llama-bench ended with status 1:")


def test_a_failure_says_how_the_program_ended_and_what_it_said():
    log = log_of("err loading", "err error: failed to create context", status=1)
    said = "llama_context: constructing llama_context / loading / error: failed to create context"
    assert results.failure_of(log, ["/bin/llama-bench"], ()) == f"llama-bench ended with status 1: {said}"
    ended = results.read("0.3000 run ended with -15\n")
    assert results.failure_of(ended, ["x"], ()) == "x was ended by signal 15: it wrote nothing"


def test_the_example_has_the_form_of_the_schema_and_the_tables_have_every_cell():
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
    assert len({line.count(" | ") for line in rows}) == 1
    for cell, row in zip(record.cells, rows[2:]):
        assert (benchmark_table.speed(cell) or "not measured") in row
    assert "tg128 @ d2048" in text
    assert re.search(
        r"^\| model +\| backend +\| hosts +\| llama_server_cache_type_k +\| added latency", text, re.MULTILINE
    )
    assert "- llama-bench ended with status 1: failed to create context: 1 cells" in text


def test_what_a_log_says_is_no_markup_in_a_table():
    record = benchmarks.read(benchmarks.example())
    spoiled = record.cells[0]._replace(model="a | b", measured=None, skipped="<img src=//a.example/x>")
    text = benchmark_table.as_markdown(record._replace(cells=(spoiled,)))
    assert "a \\| b" in text
    assert "&lt;img src=//a.example/x>" in text


def test_a_record_that_would_control_a_terminal_is_refused():
    whole = benchmarks.example()
    spoiled = [
        {**whole, "cluster": "x\x1b[2J"},
        {**whole, "hosts": {"x\x1b[2J": 1}},
        {**whole, "cells": [{**whole["cells"][0], "settings": {"x\x1b[2J": 1}}]},
    ]
    for record in spoiled:
        with pytest.raises(Refusal) as refused:
            benchmarks.read(record)
        assert str(refused.value).isprintable()
        assert r"x\x1b[2J" in str(refused.value)


def test_a_record_of_the_most_cells_and_devices_is_read():
    whole = benchmarks.example()
    cell = next(cell for cell in whole["cells"] if cell["memory_mib"])
    cells = [{**cell, "memory_mib": cell["memory_mib"][:1] * 64}] * types.MOST_CELLS
    assert len(benchmarks.read({**whole, "cells": cells}).cells) == types.MOST_CELLS


def test_records_are_kept_and_found(tmp_path):
    prefix, example = str(tmp_path), benchmarks.example()
    assert (history.ids(prefix), history.find(prefix, "1a2b3c4d")) == ([], None)
    older = {**example, "id": "20251122-150000-1a2b3c4d", "ended": None}
    for record in (example, older):
        history.write(prefix, benchmarks.read(record))
    (tmp_path / "benchmarks" / "20261122-150001-ffffffff.json").write_text("{")
    (tmp_path / "benchmarks" / "job.json").write_text("{}")
    assert history.ids(prefix) == ["20261122-150001-ffffffff", example["id"], older["id"]]
    assert history.find(prefix, "1a2b3c4d") == example, "the last one"
    assert history.find(prefix, "ffffffff") is None
    assert history.last(prefix) == "20261122-150001-ffffffff"
    with pytest.raises(Refusal, match="is not the id of a benchmark"):
        history.write(prefix, benchmarks.read(example)._replace(id="../x"))


def test_the_last_benchmarks_are_kept_with_their_logs(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MOST", 3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    identities = [f"2025112{day}-150000-1a2b3c4d" for day in range(5)]
    for identity in identities:
        logs = tmp_path / "state" / "benchmarks" / identity
        logs.mkdir(parents=True)
        (logs / "link").symlink_to(elsewhere)
        history.write(str(tmp_path), benchmarks.read({**benchmarks.example(), "id": identity}))
    assert sorted(path.stem for path in (tmp_path / "benchmarks").iterdir()) == identities[2:]
    assert sorted(path.name for path in (tmp_path / "state" / "benchmarks").iterdir()) == identities[2:]
    assert elsewhere.is_dir()


def test_of_a_log_comes_what_matters_in_bounded_size(tmp_path, monkeypatch):
    path = tmp_path / "x.log"
    assert history.lines_of(str(path)) == ""
    noise = "".join(f"0.1000 err llama_model_loader: - kv {number}\n" for number in range(100))
    path.write_text(f"{noise}0.2000 err x model buffer size = 1.00 MiB\n{noise}0.3000 out {{}}\n0.4000 err torn")
    lines = history.lines_of(str(path)).splitlines()
    assert (lines[0], lines[-1]) == ("0.2000 err x model buffer size = 1.00 MiB", "0.3000 out {}")
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
    machine.host["names"] = names.DEFAULT.as_dict()
    machine.apply(defined(SERVER))
    machine.lines("calls"), machine.lines("events")
    return machine


def started(machine, **other):
    """Arguments that start a job."""
    record = benchmarks.example()
    given = {"definition": f"{PROGRAM} 1\n", "runner": "# runner", "job": {"loads": []}, "record": record}
    return {"host": machine.host, "state": "started", **given, **other}


def test_a_job_takes_the_place_of_the_server_and_gives_it_back(head, call):
    info = {"host": head.host, "same": "1a2b3c4d"}
    absent = {"host": head.host, "state": "absent"}
    assert not call(module=benchmark_job, **absent)["changed"]
    assert call(module=benchmark_info, **info)["record"] is None
    assert call(module=benchmark_job, check=True, **started(head))["changed"]
    assert head.state(PROGRAM) == [services.STOPPED], "check mode starts nothing"
    assert call(module=benchmark_job, **started(head))["changed"]
    found = call(module=benchmark_info, **info)
    assert (found["running"], found["record"], found["lines"]) == (True, benchmarks.example(), "")
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
    assert "is there already" in call(module=benchmark_job, **started(head))["msg"]
    assert call(module=benchmark_job, **absent, record={**benchmarks.example(), "ended": None})["changed"]
    assert head.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]
    assert call(module=benchmark_info, **info)["record"]["ended"] is None
    assert not job.Job(typed_json.parse(job.Head, head.host)).exists()


@pytest.mark.parametrize("wanted", ["stopped", "absent", "started"])
def test_who_touches_the_server_ends_a_benchmark_first(head, call, wanted):
    call(module=benchmark_job, **started(head))
    change = {"service": PROGRAM, "before": services.RUNNING, "after": services.STOPPED}
    assert change in call(module=service, check=True, host=head.host, state=wanted, names=[SERVER])["changes"]
    assert call(module=service, host=head.host, state="stopped", names=["llamacpp-worker-cpu"])["changes"] == []
    assert head.state(PROGRAM) == [services.RUNNING]
    assert change in call(module=service, host=head.host, state=wanted, names=[SERVER])["changes"]
    assert head.state(PROGRAM) == [services.STOPPED]
    assert head.state(SERVER) == [services.RUNNING if wanted == "started" else services.STOPPED]
    assert call(module=service, host=head.host, state=wanted, names=[SERVER])["changes"] == []


def test_a_job_that_has_ended_by_itself_costs_the_server_no_restart(head, call):
    call(module=benchmark_job, **started(head))
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
    answer = call(module=benchmark_job, **started(head))
    assert f"other accounts can write into {head.prefix}/benchmarks" in answer["msg"]
    assert head.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]


def test_a_head_whose_manager_starts_what_it_finds_at_boot_is_refused(head, call):
    head.host["service_manager"] = "launchd"
    answer = call(module=benchmark_job, **started(head))
    assert "by launchd, and a benchmark needs systemd or supervisor" in answer["msg"]


def test_without_a_session_of_the_user_nothing_of_a_benchmark_is_found(head, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(job.services.commands, "find_user_session", lambda: None)
    place = typed_json.parse(job.Head, head.host)
    assert job.cancel(place._replace(scope="user", service_manager="systemd_user"), [SERVER], check=False) == []


class Host:
    """A head on which every program measures what its command line says; what it is told."""

    def __init__(self):
        self.records, self.calls, self.loads = {}, [], []
        self.logs, self.lost, self.lies, self.running = {}, 0, {}, True

    def answer(self, name, arguments):
        self.calls.append(arguments.get("state", name))
        if self.calls[-1] in self.lies:
            return self.lies[self.calls[-1]]
        if arguments.get("record"):
            self.records[arguments["record"]["id"][-8:]] = copy.deepcopy(arguments["record"])
        if self.calls[-1] == "started":
            self.job, self.definition = arguments["job"], arguments["definition"]
            self.loads += arguments["job"]["loads"]
            self.logs.update({load["log"]: written_by(load["argv"]) for load in arguments["job"]["loads"]})
        if name == "benchmark_info" and self.lost:
            self.lost -= 1
            raise AnsibleConnectionFailure("no route")
        log = self.logs.get(arguments.get("log"), "")
        lines = log if isinstance(log, str) else log.pop(0)
        return {"running": self.running, "lines": lines, "record": self.records.get(arguments.get("same"))}


def written_by(argv):
    """What llama-bench would write, given its command line."""
    given = dict(zip(argv, argv[1:]))
    repetitions = int(given["-r"])
    lines = ["1.0000 err llama_context: constructing llama_context", *["1.0000 run repetition"] * 2 * repetitions]
    for depth in given["-d"].split(","):
        for name, number in [*(("n_prompt", size) for size in given["-p"].split(",")), ("n_gen", given["-n"])]:
            samples = [10.0, 12.0] * (repetitions // 2)
            size = {"n_gen": 0, name: int(number)}
            lines.append("1.0000 " + row_of(*samples, n_depth=int(depth), avg_ts=11.0, stddev_ts=1.4142, **size))
    return "\n".join([*lines, "2.0000 run ended with 0"])


class Measuring:
    """The action plugin of a cluster, with a head that measures."""

    def __init__(self, monkeypatch, found, model=None):
        self.host, self.said, self.model = Host(), [], model or {}
        self.plan = typed_json.dump(served_by(found, model))
        monkeypatch.setattr(action, "POLL_SECONDS", 0)
        monkeypatch.setattr(action.inventory, "hosts", lambda *_arguments: ("llama_cluster", found.hosts))
        monkeypatch.setattr(action.inventory, "of_play", lambda _vars: set())
        monkeypatch.setattr(action.sources, "look_up", lambda _find, cluster, _catalogue: cluster)
        monkeypatch.setattr(action.display, "display", self.said.append)
        monkeypatch.setattr(action.display, "warning", self.said.append)
        monkeypatch.setattr(
            action.ActionModule,
            "module",
            lambda _self, name, /, **given: self.host.answer(name.rsplit(".", 1)[1], json.loads(json.dumps(given))),
        )

    def run(self, path=None, check=False):
        arguments = {"plan": self.plan, "facts": {}, "model": self.model, **({"path": str(path)} if path else {})}
        self.host.calls = []
        result = actions.run(action, check_mode=check, **arguments)
        SCHEMA.validate(result["record"])
        return result


MATRIX = {"prompts": [512], "depths": [0, 64], "hosts": [1, 2], "repetitions": 2}
TWO = {f"llama_benchmark_{name}": value for name, value in MATRIX.items()}


@pytest.fixture
def measuring(monkeypatch):
    """Two loads of four cells."""
    return Measuring(monkeypatch, cluster_of(**MEASURED, **TWO))


def test_everything_is_measured_and_written(measuring, tmp_path):
    result = measuring.run(path=tmp_path / "new" / "folder")
    record = result["record"]
    assert (result["changed"], "problem" in result, bool(record["ended"])) == (True, False, True)
    assert [cell["measured"]["samples"] for cell in record["cells"]] == [[10.0, 12.0]] * 8
    assert [measuring.host.calls.count(state) for state in ("started", "absent")] == [1, 1]
    assert measuring.host.calls[-1] == "absent"
    assert json.loads((tmp_path / "new" / "folder" / "benchmark.json").read_text()) == record
    assert record == measuring.host.records[record["id"][-8:]]
    assert (tmp_path / "new" / "folder" / "benchmark.md").read_text().count("11.00 ± 1.41") == 8
    logs = [cell["log"] for cell in record["cells"]]
    assert logs == [logs[0]] * 4 + [logs[4]] * 4
    assert logs[0].startswith(f"/opt/llamacpp/state/benchmarks/{record['id']}/")
    assert f"RuntimeMaxSec={2 * (7200 + action.END_SECONDS)}" in measuring.host.definition
    assert measuring.host.job["timeout"] == 7200


def test_of_several_models_the_one_that_is_named_is_measured(monkeypatch):
    entries = [
        {"name": "small", "known_answer": known_answer_of()},
        {"name": "deep", "known_answer": known_answer_of(layers=24), "extra_args": ["--temp", "-1"]},
    ]

    def paths(**variables):
        own = {"llama_model_known_answer": None, "llama_models": entries, **variables}
        measuring = Measuring(monkeypatch, cluster_of(**MEASURED, **TWO, **own))
        return {PurePosixPath(path).name for path in measuring.run()["record"]["models"].values()}

    assert paths() == paths(llama_benchmark_served="small") == {"known-answer-16x128-f32.gguf"}
    assert paths(llama_benchmark_served="deep") == {"known-answer-24x128-f32.gguf"}
    with pytest.raises(
        AnsibleActionFail, match="served is 'large', and llama_models has small, deep: name one of them"
    ):
        paths(llama_benchmark_served="large")
    with pytest.raises(AnsibleActionFail, match="served is 'small', and llama_models is not set: remove it"):
        paths(llama_benchmark_served="small", llama_models=None, llama_model_known_answer=known_answer_of())


def test_a_job_runs_with_the_limits_of_the_server(monkeypatch):
    found = cluster_of(**MEASURED, **TWO, llama_server_api_key_file="/root/key", llama_benchmark_latency_ms=[0.0, 5.0])
    measuring = Measuring(monkeypatch, found)
    record = measuring.run()["record"]
    assert [cell["measured"]["samples"] for cell in record["cells"] if cell["latency_ms"] is not None] == [
        [sample] * 2 for sample in (10.0, 10.0, 12.0, 12.0)
    ]
    load = measuring.host.loads[-1]
    assert (load["workers"], load["latencies_ms"]) == (["192.0.2.11:50052"], [0.0, 5.0])
    assert measuring.host.loads[0]["workers"] == []
    text = measuring.host.definition
    folder = "/opt/llamacpp/benchmarks"
    assert f'ExecStart="/usr/bin/python3" "{folder}/runner.py" "{folder}/job.json"' in text
    assert "ProtectSystem=strict" in text
    assert "LoadCredential" not in text
    assert "Restart=always" not in text


def test_what_a_run_that_was_killed_left_is_taken_from_its_logs(measuring):
    first = measuring.run()["record"]
    half = copy.deepcopy(first)
    half["ended"] = None
    for cell in half["cells"]:
        cell.update(measured=None, load_s=None)
    logs = measuring.host.logs
    measuring.host.records, measuring.host.loads = {first["id"][-8:]: half}, []
    del logs[first["cells"][-1]["log"]]
    assert measuring.host.calls.count("started") == 1
    second = measuring.run()["record"]
    assert second["id"] == first["id"]
    assert len(measuring.host.loads) == 1, "the other load has ended"
    assert all(cell["measured"] for cell in second["cells"])
    assert measuring.run()["record"]["id"][-8:] == first["id"][-8:]
    assert len(measuring.host.loads) == 3, "a benchmark that is complete is followed by a new one"


def test_of_a_record_that_lies_nothing_is_taken_over(measuring):
    first, spoiled = measuring.run()["record"], {"measured": {"mean": 1, "deviation": 0, "samples": []}}
    lie = {**first, "ended": None, "cells": [{**cell, **spoiled} for cell in first["cells"]]}
    measuring.host.records, measuring.host.loads = {first["id"][-8:]: lie}, []
    assert all(cell["measured"] for cell in measuring.run()["record"]["cells"])
    assert len(measuring.host.loads) == 2


def test_a_job_that_is_ended_leaves_what_was_measured(measuring, tmp_path):
    host = measuring.host
    answer, started = host.answer, []

    def end(name, arguments):
        found = answer(name, arguments)
        started.append(arguments.get("state"))
        if name == "benchmark_info" and arguments.get("log") == (host.loads or [{}])[-1].get("log"):
            return {**found, "running": False, "lines": found["lines"].replace("2.0000 run ended with 0", "")}
        return found

    host.answer = end
    result = measuring.run(path=tmp_path)
    assert "the benchmark on head was ended while llama-bench measured: somebody stopped it" in result["problem"]
    assert host.calls[-1] == "absent"
    assert result["record"]["ended"] is None
    assert json.loads((tmp_path / "benchmark.json").read_text()) == result["record"]


def test_a_head_that_does_not_answer_for_a_while_is_asked_again(measuring):
    measuring.host.lost = action.MOST_MISSED - 1
    assert all(cell["measured"] for cell in measuring.run()["record"]["cells"])
    measuring.host.lost = action.MOST_MISSED
    with pytest.raises(AnsibleActionFail, match="head cannot be reached any more: no route"):
        measuring.run()


def test_what_the_head_refuses_is_said_and_what_was_measured_is_kept(measuring, tmp_path):
    measuring.host.lies = {"started": {"failed": True, "msg": "it is there already"}}
    assert measuring.run()["problem"] == "benchmark_job on head: it is there already"
    assert measuring.host.calls[-1] == "absent"
    measuring.host.lies = {"absent": {"failed": True, "msg": "No space left on device."}}
    result = measuring.run(path=tmp_path)
    assert result["problem"].startswith("benchmark_job on head: No space left on device. systemd starts the server")
    assert json.loads((tmp_path / "benchmark.json").read_text())["cells"][0]["measured"]


def test_a_task_whose_run_was_killed_has_the_server_start_at_once(measuring, monkeypatch):
    parents = iter([1, 1])
    monkeypatch.setattr(action.os, "getppid", lambda: next(parents, 2))
    assert "the run of the playbook was ended" in measuring.run()["problem"]
    assert measuring.host.calls[-1] == "absent"


def test_a_program_that_fails_is_in_the_table_and_the_others_are_measured(measuring):
    answer = measuring.host.answer

    def fail(name, given):
        found = answer(name, given)
        if measuring.host.loads and given.get("log") == measuring.host.loads[0]["log"]:
            return {**found, "lines": "0.1000 err error: unable to load model\n0.2000 run ended with 1"}
        return found

    measuring.host.answer = fail
    record = measuring.run()["record"]
    failed = [cell for cell in record["cells"] if cell["skipped"]]
    assert {cell["skipped"] for cell in failed} == {"llama-bench ended with status 1: error: unable to load model"}
    assert [len(cell["hosts"]) for cell in failed] == [1] * 4
    assert all(cell["argv"][0].endswith("llama-bench") for cell in failed)
    assert record["ended"]


def test_why_a_program_did_not_measure_is_said_once(measuring, monkeypatch):
    monkeypatch.setitem(globals(), "written_by", lambda _argv: "1.0000 err no room\n2.0000 run ended with 1")
    measuring.run()
    assert len([text for text in measuring.said if ": not measured: " in text]) == 1
    assert "no room: 8 cells" in measuring.said[-1]


def test_progress_is_shown_while_a_program_runs(measuring):
    answer = measuring.host.answer
    pages = []

    def slow(name, given):
        found = answer(name, given)
        if given.get("log") and len(pages) < 2:
            pages.append("")
            return {**found, "lines": found["lines"][: 70 * (len(pages) - 1)]}
        return found

    measuring.host.answer = slow
    measuring.run()
    said = [text for text in measuring.said if " loads, " in text or " measures, " in text]
    assert [text.split(", ")[0] for text in said] == ["  [head] llama-bench loads", "  [head] llama-bench measures"]


def test_a_setting_that_the_program_does_not_know_is_not_measured_twice(monkeypatch):
    vary = {"llama_server_port": [8080, 8081]}
    measuring = Measuring(monkeypatch, cluster_of(**MEASURED, **TWO, llama_benchmark_vary=vary))
    record = measuring.run()["record"]
    assert len(measuring.host.loads) == 2
    why = "llama-bench gets the same command line as with {'llama_server_port': '8080'}"
    assert {cell["skipped"] for cell in record["cells"] if cell["settings"]["llama_server_port"] == "8081"} == {why}


def test_what_is_wrong_before_the_beginning_fails_the_task(monkeypatch):
    with pytest.raises(AnsibleActionFail, match="the release on head has no llama-bench: set llama_benchmark_programs"):
        Measuring(monkeypatch, cluster_of()).run()
    with pytest.raises(AnsibleActionFail, match="llama_benchmark_hosts has 9, but the cluster has 3 hosts"):
        Measuring(monkeypatch, cluster_of(**MEASURED, llama_benchmark_hosts=[9])).run()


def test_check_mode_and_a_matrix_without_anything_to_measure_stop_nothing(measuring, monkeypatch):
    assert measuring.run(check=True)["changed"]
    assert measuring.host.calls == ["benchmark_info"]
    models = [{"known_answer": known_answer_of(16, 8192)}]
    large = cluster_of("worker1", **MEASURED, llama_benchmark_models=models, llama_benchmark_hosts=[1])
    large.hosts["head"]["facts"]["memory_mib"] = 8192
    monkeypatch.setattr(action.Action, "action", lambda *_arguments, **_more: {})
    idle = Measuring(monkeypatch, large)
    assert not idle.run()["changed"]
    assert "started" not in idle.host.calls


def test_beside_supervisor_a_sentence_says_that_nothing_starts_the_server(monkeypatch):
    found = cluster_of(**MEASURED, **TWO)
    found.hosts["head"]["facts"].update(service_manager="supervisor")
    measuring = Measuring(monkeypatch, found)
    measuring.run()
    assert any("supervisor on head does not start the server by itself" in text for text in measuring.said)


HUB = "/opt/llamacpp/models/x/m-Q4.gguf"


def found_on_the_hub():
    """What is found of a model and its projector."""
    files = [
        {"name": name, "path": path, "url": None, "bytes": 1000, "sha256": None, "role": role}
        for name, path, role in (("m-Q4.gguf", HUB, "model"), ("mm.gguf", "/srv/mm.gguf", "mmproj"))
    ]
    source = {"closed": None, "source": "huggingface:a/b@c", "revision": "c"}
    return {"summary": known_answer.summary(16, 128, "f32"), "files": files, **source}


def test_a_model_from_a_hub_is_measured_without_its_projector(monkeypatch):
    found = cluster_of(
        "worker1",
        **MEASURED,
        llama_model_known_answer=None,
        llama_model_huggingface={"repo": "a/b", "quantisation": "Q4"},
        llama_model_mmproj={"path": "/srv/mm.gguf"},
    )
    measuring = Measuring(monkeypatch, found, found_on_the_hub())
    assert "--mmproj" in measuring.plan["head"]["argv"]
    record = measuring.run()["record"]
    assert record["models"] == {"b-Q4": HUB}
    assert not [cell for cell in record["cells"] if cell["skipped"]]
    assert {load["argv"][load["argv"].index("-m") + 1] for load in measuring.host.loads} == {HUB}
    assert not [load for load in measuring.host.loads if "--mmproj" in load["argv"]]


ELSEWHERE = "https://h.example/n-Q4.gguf"


@pytest.mark.parametrize("failed", [False, True])
def test_a_model_of_a_url_is_fetched_while_the_server_still_serves(monkeypatch, failed):
    found = cluster_of("worker1", **MEASURED, llama_benchmark_models=[{"url": [ELSEWHERE]}])
    found.hosts["head"]["variables"]["llama_model_token_file"] = "/controller/token"
    measuring, fetched = Measuring(monkeypatch, found), []
    file = {"name": "n-Q4.gguf", "url": ELSEWHERE, "bytes": 1000, "sha256": None, "role": "model"}
    source = {"source": f"url:{ELSEWHERE}", "revision": None}
    known = {"summary": known_answer.summary(16, 128, "f32"), "closed": None, "files": [file], **source}
    known["sources"] = [{"role": "model", **source}]
    monkeypatch.setattr(action.resolver, "resolve", lambda *_arguments: known)

    def called(_action, name, /, **given):
        fetched.append((name, given))
        measuring.host.calls.append("fetched")
        return {"failed": True, "msg": "no route to h.example"} if failed else {"changed": True}

    monkeypatch.setattr(action.Action, "action", called)
    result = measuring.run()
    ((name, given),) = fetched
    assert name == "llamacpp.cluster.model"
    assert given["token_file"] == "/controller/token"
    (file,) = given["files"]
    assert file["path"].startswith(given["folder"] + "/")
    assert result["record"]["models"] == {"n-Q4": file["path"]}
    assert ("started" in measuring.host.calls) != failed
    if failed:
        assert result["problem"] == "n-Q4.gguf cannot be fetched: no route to h.example"
    else:
        assert measuring.host.calls.index("fetched") < measuring.host.calls.index("started")
        assert all(file["path"] in cell["argv"] for cell in result["record"]["cells"])


def test_a_model_of_a_path_is_read_on_the_head(monkeypatch):
    measuring = Measuring(monkeypatch, cluster_of(**MEASURED, **TWO, llama_benchmark_models=[{"path": "/srv/m.gguf"}]))
    summary = {**known_answer.summary(16, 128, "f32"), "files": [{"name": "m.gguf", "bytes": 1000}]}
    measuring.host.lies = {"gguf_info": {"summary": summary, "closed": None}}
    record = measuring.run()["record"]
    assert record["models"] == {"m": "/srv/m.gguf"}
    assert all(cell["measured"] for cell in record["cells"])
    measuring.host.lies = {"gguf_info": {"failed": True, "msg": "/srv/m.gguf is missing"}}
    with pytest.raises(AnsibleActionFail, match=r"llama_benchmark_models: /srv/m\.gguf is missing"):
        measuring.run()


def test_a_folder_that_cannot_be_made_is_named(measuring, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AnsibleActionFail, match=r"llama_benchmark_path is .* which cannot be made"):
        measuring.run(path=tmp_path / "file" / "x")

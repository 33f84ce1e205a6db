"""What a benchmark measures, how it reads what programs write, and that the server serves again whatever happens."""

import copy
import fcntl
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import jsonschema_rs
import pytest
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible_collections.llamacpp.cluster.plugins.action import benchmark as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import load_test, records, runner
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import matrix as benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import results as measured
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import takeover as stage
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs as entry
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import ModelRequest, ModelSource
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import verification
from ansible_collections.llamacpp.cluster.plugins.modules import benchmark as module
from ansible_collections.llamacpp.cluster.plugins.modules import service as service_module
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_tables, html_page, measurements
from conftest import CATALOGUE, Cluster, known_answer_of, make
from test_fork import RELEASE as FORK
from test_services import defined, machine_with

MODULE = module
ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("data")
LOG = (DATA / "benchmark" / "llama-bench-0.3.36.log").read_text()
EXAMPLE = json.loads((DATA / "benchmark.json").read_text())
SCHEMA = jsonschema_rs.validator_for(json.loads((ROOT / "docs" / "benchmark.schema.json").read_text()))


def cluster_of(*workers, **variables):
    """A head, and workers of which each has 64 GiB."""
    found = Cluster().add(
        "head", "head", address="192.0.2.10", **{"llama_model_known_answer": known_answer_of(), **variables}
    )
    for number, name in enumerate(workers or ("worker1", "worker2")):
        release = {key: value for key, value in variables.items() if key.startswith("llama_release")}
        found.add(name, "worker", address=f"192.0.2.{11 + number}", **release)
    return found


def planned(found):
    """The plan that serves, the cluster, and what is asked for."""
    plan = found.plan()
    plan["id"] = "0123456789abcdef"
    values = entry.read("llama_cluster", found.hosts)
    return plan, values, benchmark.request_of(found.hosts["head"]["variables"])


def loads_of(found):
    """Each load with its plan."""
    plan, values, request = planned(found)
    return [
        (setup, make(benchmark.cluster_of(values, setup), {}, CATALOGUE, "runtime"))
        for setup in benchmark.setups_of(request, values, plan)
    ]


LLAMA, IK = "llama.cpp", "ik_llama.cpp"
MEASURED = {"llama_benchmark_programs": True}


# ------------------------------------------------------------------------------------------------------------- matrix


WRONG = {
    "prompts": ([0], "llama_benchmark_prompts has 0: use 1 to 1048576"),
    "depths": ([-1], "llama_benchmark_depths has -1"),
    "hosts": ([0], "llama_benchmark_hosts has 0: use 1 to 64"),
    "parallel": ([1, 1], "llama_benchmark_parallel has a value twice"),
    "latency_ms that are shown alike": ([1.0, 1.0000001], "llama_benchmark_latency_ms has a value twice"),
    "latency_ms": ([10001.0], "llama_benchmark_latency_ms has 10001.0: use 0 to 10000"),
    "bandwidth_mbit": ([0.5], "llama_benchmark_bandwidth_mbit has 0.5"),
    "repetitions": (0, "llama_benchmark_repetitions has 0"),
    "timeout": (5, "llama_benchmark_timeout has 5: use 60 to 604800"),
    "flash_attention": (["yes"], "llama_benchmark_flash_attention has 'yes': use on, off or auto"),
    "cache_types": (["q8_0/q9"], "llama_benchmark_cache_types has 'q8_0/q9': use one of"),
    "splits": (["1,2"], "llama_benchmark_splits has '1,2': use shares with / between them"),
    "splits that are nothing": (
        ["3/1", "0/0.0"],
        "llama_benchmark_splits has '0/0.0': use shares with / between them, not all 0",
    ),
    "splits that no float holds": (["1/1" + "0" * 300], "llama_benchmark_splits has '1/1000"),
    "again": (["("], "which is no regular expression"),
    "micro_batches": ([], "so there is nothing to measure"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variable_is_named_with_its_value(name):
    value, message = WRONG[name]
    variables = cluster_of().hosts["head"]["variables"]
    with pytest.raises(Refusal, match=re.escape(message)):
        benchmark.request_of({**variables, f"llama_benchmark_{name.split()[0]}": value})


MODELS = {
    "both": ({"path": "/m.gguf", "known_answer": known_answer_of()}, "has a source and known_answer: give one of "),
    "neither": (
        {"path": None, "known_answer": None},
        "has no source and no known_answer: give one of path, huggingface, ",
    ),
    "relative": ({"path": "m.gguf", "known_answer": None}, "use the absolute path on the head"),
    "empty": ({"copy": ""}, "[0].copy is '': use the path on the controller"),
    "several": ({"path": "/m.gguf", "ollama": "m:1b"}, "has path and ollama: give one"),
    "misnamed": ({"huggingface": {"repo": "m"}}, "[0].huggingface has the repo 'm'"),
    "impossible": ({"path": None, "known_answer": known_answer_of(0)}, "is not possible"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_model_is_named(name):
    model, message = MODELS[name]
    variables = cluster_of(llama_benchmark_models=[model]).hosts["head"]["variables"]
    with pytest.raises(Refusal, match=re.escape(message)) as refused:
        benchmark.request_of(variables)
    assert "llama_benchmark_models[0]" in str(refused.value)


def test_models_of_one_name_are_refused():
    models = [{"path": f"/{folder}/m.gguf", "known_answer": None} for folder in "ab"]
    with pytest.raises(Refusal, match="has m twice"):
        benchmark.request_of(cluster_of(llama_benchmark_models=models).hosts["head"]["variables"])


PROJECTOR = {
    "llama_model_huggingface": {"repo": "a/b", "quantisation": "Q4"},
    "llama_model_mmproj": {"path": "/srv/mm.gguf"},
}
HUB = "/opt/llamacpp/models/x/m-Q4.gguf"


def found_on_the_hub():
    """What is found of that model and its projector."""
    files = [
        {"name": name, "path": path, "url": None, "bytes": 1000, "sha256": None, "role": role}
        for name, path, role in (("m-Q4.gguf", HUB, "model"), ("mm.gguf", "/srv/mm.gguf", "mmproj"))
    ]
    return {
        "summary": known_answer.summary(16, 128, "f32"),
        "closed": None,
        "source": "huggingface:a/b@c",
        "revision": "c",
        "files": files,
    }


def on_the_hub(*models):
    return cluster_of(
        "worker1",
        **MEASURED,
        **PROJECTOR,
        llama_model_known_answer=None,
        llama_benchmark_models=[{"path": path, "known_answer": None} for path in models],
    )


def test_a_model_from_elsewhere_is_measured_without_its_projector():
    found = on_the_hub()
    values, request = entry.read("llama_cluster", found.hosts), benchmark.request_of(found.hosts["head"]["variables"])
    plan = make(values, found_on_the_hub(), CATALOGUE, "runtime")
    assert "--mmproj" in plan["head"]["argv"]
    for setup in benchmark.setups_of(request, values, plan):
        own = make(benchmark.cluster_of(values, setup), found_on_the_hub(), CATALOGUE, "runtime")
        words = benchmark.argv_of(own, setup, 1)
        assert words[words.index("-m") + 1] == HUB
        assert "--mmproj" not in own["head"]["argv"]
        assert benchmark.obstacle(own, plan, setup) is None
        assert benchmark.name_of(setup.model) == "b-Q4"


def test_another_file_of_the_served_models_name_is_refused():
    def check(path, served):
        found = on_the_hub(path)
        values, request = (
            entry.read("llama_cluster", found.hosts),
            benchmark.request_of(found.hosts["head"]["variables"]),
        )
        benchmark.check_names(request.models, values.model, served)

    check("/srv/b-Q4.gguf", "/srv/b-Q4.gguf")
    check("/srv/m-Q4.gguf", HUB)
    with pytest.raises(Refusal, match="llama_benchmark_models has another file than the model that is served"):
        check("/srv/b-Q4.gguf", HUB)


def test_the_name_of_a_url_is_that_of_its_file():
    source = ModelSource("model", "llama_model_url", url=("https://h.example/a/m-Q4.gguf?download=true",))
    assert benchmark.name_of(ModelRequest(source, None, None)) == "m-Q4"


def test_more_requests_than_a_record_can_hold_are_refused():
    variables = cluster_of(llama_benchmark_parallel=[1, 256], llama_benchmark_repetitions=5).hosts["head"]["variables"]
    with pytest.raises(Refusal, match="that is 1280 requests for a figure, and 1024 are possible"):
        benchmark.request_of(variables)
    benchmark.request_of({**variables, "llama_benchmark_repetitions": 4})


def test_more_repetitions_than_the_line_of_a_test_can_hold_are_refused():
    variables = cluster_of(llama_benchmark_latency_ms=[0.0, 1.0, 5.0], llama_benchmark_parallel=[]).hosts["head"][
        "variables"
    ]
    with pytest.raises(
        Refusal, match="latency_ms has 3 values: that is 1503 repetitions of a test, and 1500 are possible"
    ):
        benchmark.request_of({**variables, "llama_benchmark_repetitions": 501})
    benchmark.request_of({**variables, "llama_benchmark_repetitions": 500})
    sample = {"samples_ns": 10**15, "samples_ts": 123456.789012}
    row = {key: [value] * benchmark.MOST_TURNS for key, value in sample.items()}
    assert len(json.dumps(row)) < runner.LINE_BYTES - 4096


def test_more_hosts_than_there_are_and_too_many_cells_are_refused():
    plan, values, request = planned(cluster_of())
    with pytest.raises(Refusal, match=r"llama_benchmark_hosts has 4, but the cluster has 3 hosts with devices"):
        benchmark.setups_of(request._replace(hosts=(4,)), values, plan)
    with pytest.raises(Refusal, match="and 4096 are possible"):
        benchmark.setups_of(request._replace(depths=tuple(range(0, 8000, 2))), values, plan)
    latencies = tuple(number / 4 for number in range(1100))
    with pytest.raises(Refusal, match="and 4096 are possible"):
        benchmark.setups_of(request._replace(latency_ms=latencies), values, plan)


def test_each_number_of_hosts_has_a_plan_of_its_own():
    loads = loads_of(cluster_of(**MEASURED))
    assert [setup.hosts for setup, _plan in loads] == [
        ("head",),
        ("head", "worker1"),
        ("head", "worker1", "worker2"),
    ]
    assert [[entry["host"] for entry in plan["placement"]] for _setup, plan in loads] == [
        [],
        ["worker1"],
        ["worker1", "worker2"],
    ]
    assert all(plan["head"]["argv"][0] == loads[0][1]["head"]["argv"][0] for _setup, plan in loads), "one build"
    speeds = [plan["estimate"]["generation_tokens_per_s"] for _setup, plan in loads]
    assert len(set(speeds)) == 3


def test_keys_are_unique_and_the_same_in_every_run():
    found = cluster_of(
        **MEASURED,
        llama_benchmark_depths=[0, 64],
        llama_benchmark_micro_batches=[128, 512],
        llama_benchmark_flash_attention=["on", "off"],
        llama_benchmark_cache_types=["f16", "q8_0/q4_0"],
        llama_benchmark_latency_ms=[0.0, 0.2, 5.0],
        llama_benchmark_bandwidth_mbit=[100.0, 1000.0],
    )
    plan, values, request = planned(found)
    cells = benchmark.asked_cells(request, values, plan)
    for setup, own in loads_of(found):
        cells += benchmark.cells_of(setup, own, LLAMA, benchmark.obstacle(own, plan, setup))
    keys = [cell["key"] for cell in cells]
    assert len(keys) == len(set(keys)) == 6 + 3 * 8 * 4 + 2 * 6 * 2
    assert "cpu/2 hosts/known-answer-16x128-f32/tg128/d0/p1/ub128/fa-on/f16/0.2ms/1000mbit" in keys
    model = {"m": {"path": "/m.gguf", "bytes": 1}}
    own = benchmark.identity(plan, cells, 5, model)
    assert own == benchmark.identity(plan, copy.deepcopy(cells), 5, model)
    assert own != benchmark.identity(plan, cells[1:], 5, model)
    assert own != benchmark.identity(plan, cells, 5, {"m": {"path": "/m.gguf", "bytes": 2}})


def test_the_program_that_measures_is_part_of_the_builds_where_it_is_asked_for():
    plain, measures = cluster_of().plan(), cluster_of(**MEASURED).plan()
    assert "llama-bench" not in plain["hosts"]["head"]["builds"][0]["targets"]
    assert "llama-bench" in measures["hosts"]["head"]["builds"][0]["targets"]
    assert plain["hosts"]["head"]["builds"][0]["id"] != measures["hosts"]["head"]["builds"][0]["id"]
    fork = cluster_of(**MEASURED, llama_release=FORK).plan()
    assert "llama-sweep-bench" in fork["hosts"]["head"]["builds"][0]["targets"], fork["reasons"]


def test_a_package_without_the_program_is_refused():
    packaged = {"version": "0.7.0", "installed": []}
    found = Cluster().add(
        "head",
        "head",
        "worker",
        llama_model_known_answer=known_answer_of(),
        llama_release={"source": "package"},
        facts={"packaged": packaged, "distribution": {"id": "debian", "version": "14", "family": "debian"}},
        **MEASURED,
    )
    assert "no package of head's distribution is known to have llama-bench" in found.reason()


def test_why_a_load_cannot_be_measured():
    found = cluster_of("worker1", llama_benchmark_models=[{"known_answer": known_answer_of(16, 8192), "path": None}])
    found.hosts["worker1"]["facts"]["memory_mib"] = found.hosts["head"]["facts"]["memory_mib"] = 8192
    plan, _values, _request = planned(found)
    for setup, own in loads_of(found):
        why = benchmark.obstacle(own, plan, setup)
        assert "does not fit" in why
        cells = benchmark.cells_of(setup, own, LLAMA, why)
        assert {cell["skipped"] for cell in cells} == {why}
    (setup, own), *_others = loads_of(cluster_of())
    assert "set llama_benchmark_programs to true" in benchmark.obstacle(own, cluster_of().plan(), setup)
    other = benchmark.obstacle(own, cluster_of(**MEASURED).plan(), setup)
    assert other.startswith("it needs the build pypi-0.3.36-cpu-")


def test_a_host_without_a_layer_is_named():
    found = cluster_of(**MEASURED, llama_benchmark_splits=["1/0"], llama_benchmark_hosts=[3])
    plan, _values, _request = planned(found)
    ((setup, own),) = loads_of(found)
    assert benchmark.obstacle(own, plan, setup) == "the plan gives no layer to worker2"


# --------------------------------------------------------------------------------------------------------------- argv


def release_of(version):
    return {"source": "pypi", "version": version, "checksum": "sha256:" + "a" * 64}


FORMS = {
    "0.3.20": ["-fa", "1", "-mmp", "0"],
    "0.3.25": ["-fa", "on", "-mmp", "0"],
    "0.3.36": ["-fa", "on", "-lm", "none"],
}


@pytest.mark.parametrize("version", FORMS)
def test_each_generation_gets_the_words_that_it_knows(version):
    given = {"llama_server_load_mode": "none", "llama_accept_advisories": ["rpc-remote-code-execution"]}
    found = cluster_of(
        **MEASURED,
        **given,
        llama_release=release_of(version),
        llama_benchmark_flash_attention=["on"],
        llama_benchmark_hosts=[3],
    )
    ((setup, own),) = loads_of(found)
    words = benchmark.argv_of(own, setup, 2)
    assert words[0].endswith("/bin/llama-bench")
    assert " ".join(FORMS[version][:2]) in " ".join(words)
    assert " ".join(FORMS[version][2:]) in " ".join(words)
    assert words[words.index("-dev") + 1] == "RPC0/RPC1"
    assert words[words.index("-rpc") + 1] == "192.0.2.11:50052,192.0.2.12:50052"
    assert re.fullmatch(r"\d+/\d+", words[words.index("-ts") + 1])


def test_llama_sweep_bench_is_told_what_the_server_is_told():
    found = cluster_of(
        **MEASURED,
        llama_release=FORK,
        llama_accept_advisories=["rpc-remote-code-execution"],
        llama_benchmark_depths=[0, 1024],
        llama_benchmark_hosts=[2],
        llama_benchmark_prompts=[512, 100],
    )
    ((setup, own),) = loads_of(found)
    words = benchmark.argv_of(own, setup, 2)
    assert words[0].endswith("/bin/llama-sweep-bench")
    assert words[-4:] == ["-c", "1536", "-n", "128"]
    assert words.count("--ubatch-size") == 1
    assert "--rpc" in words
    assert not {"--host", "--port", "--parallel", "--no-warmup", "--ctx-size"} & set(words)
    assert benchmark.arguments_of_tests(words, [("tg128", 0)]) == [words]
    skipped = {cell["test"]: cell["skipped"] for cell in benchmark.cells_of(setup, own, IK, None)}
    assert "measures prompts of one micro-batch, 512 tokens" in skipped["pp100"]
    assert skipped["pp512"] is skipped["tg128"] is None
    odd = benchmark.cells_of(setup._replace(tests=(("tg128", 100),)), own, IK, None)
    assert "depths that are multiples" in odd[0]["skipped"]


def test_only_what_is_missing_is_measured():
    argv = ["/bin/llama-bench"]

    def asked(*tests):
        return [words[1:] for words in benchmark.arguments_of_tests(argv, tests)]

    assert asked(("tg128", 0)) == [["-p", "0", "-n", "128", "-d", "0"]]
    whole = [("pp512", 0), ("tg128", 0), ("pp512", 64), ("tg128", 64)]
    assert asked(*whole) == [["-p", "512", "-n", "128", "-d", "0,64"]]
    assert asked(*whole[1:]) == [["-p", "0", "-n", "128", "-d", "0,64"], ["-p", "512", "-n", "0", "-d", "64"]]
    for words in asked(*whole[1:]):
        tests = [(name, depth) for name, depth in whole if action._is_of(words, {"test": name, "depth": depth})]
        assert set(tests) <= set(whole[1:])


def test_a_program_runs_with_the_limits_of_the_server():
    found = cluster_of(
        **MEASURED, llama_server_api_key_file="/root/key", llama_benchmark_latency_ms=[1.0], llama_benchmark_hosts=[2]
    )
    _setup, own = loads_of(found)[-1]
    how = benchmark.Measuring("/opt/m.py", "/opt/x.log", benchmark.Link((0.0, 0.2, 5.0), 100.0), 600)
    service = benchmark.service_of(own, ["/bin/llama-bench"], how)
    assert service["name"] == "llamacpp-benchmark"
    assert service["argv"][1:] == [
        *["/opt/m.py", "--log", "/opt/x.log", "--latency-ms=0,0.2,5", "--bandwidth-mbit", "100"],
        *["--proxy", "192.0.2.11:50052", "--", "/bin/llama-bench"],
    ]
    text = action.definitions.definition(
        typed_json.parse(HostPlan, own["hosts"]["head"]), typed_json.parse(ServicePlan, service), service["seconds"]
    )
    assert "RuntimeMaxSec=600" in text
    assert "ProtectSystem=strict" in text
    assert "LoadCredential" not in text
    assert "Restart=always" not in text


# --------------------------------------------------------------------------------------------------------------- logs


def test_what_llama_bench_writes_is_read():
    log = measured.read(LOG)
    assert [(result.test, result.depth, len(result.samples)) for result in log.results] == [
        ("pp64", 0, 2),
        ("tg32", 0, 2),
        ("pp64", 256, 2),
        ("tg32", 256, 2),
    ]
    assert log.status == 0
    assert 0 < log.load_s < 1
    # 8.76 of weights, 2.50 of cache and 4.09 of compute buffer, under the worker's own name.
    assert log.memory_mib["RPC0[127.0.0.1:41152]"] == pytest.approx(15.35)
    for result in log.results:
        assert all(f"{sample:g}" in LOG for sample in result.samples)


def test_a_torn_log_and_other_lines_are_no_results():
    assert measured.read("").status is None
    assert not measured.read(LOG[:2500]).results or measured.read(LOG[:2500]).status is None
    for text in (
        "{",
        '{"n_prompt": 1}',
        '{"n_prompt": 1, "n_gen": 1, "samples_ts": [1.0], "avg_ts": 1, "stddev_ts": 0}',
        '{"n_prompt": 0, "n_gen": 1, "samples_ts": [], "avg_ts": 1, "stddev_ts": 0}',
    ):
        assert measured.result_of(text) is None


ROW = {"n_prompt": 0, "n_gen": 1, "samples_ts": [1.0], "avg_ts": 1, "stddev_ts": 0}
LIES = [
    {"samples_ts": ["nan"]},
    {"samples_ts": [0]},
    {"samples_ts": [-1.0]},
    {"avg_ts": "inf"},
    {"stddev_ts": "nan"},
    {"samples_ts": [1e300]},
    {"samples_ts": [5e-324]},
]


@pytest.mark.parametrize("lie", LIES)
def test_a_speed_that_cannot_be_is_no_result(lie):
    assert measured.result_of(json.dumps(ROW))
    assert measured.result_of(json.dumps({**ROW, **lie})) is None


def test_a_log_that_lies_ends_nothing():
    row = "1.0000 out |   512 |    128 |      0 |    1.100 | {} |    2.311 |    {} |"
    assert [result.test for result in measured.read(row.format("4.6.5", "0.00")).results] == []
    assert [result.test for result in measured.read(row.format("9" * 400 + ".0", "55.38")).results] == ["tg128"]
    assert measured.read("1.0000 err hello\x0c0.0002 run ended with 0\n").status is None, "one line of the program"
    assert measured.read("1.0000 run ended with " + "9" * 5000).status is None


def test_a_speed_that_is_kept_as_nothing_is_no_result():
    """A record with it could neither be fitted nor read again."""
    row = {"n_prompt": 0, "n_gen": 8, "samples_ts": [4e-5], "avg_ts": 4e-5, "stddev_ts": 0}
    assert measured.result_of(json.dumps(row)) is None
    assert measured.result_of(json.dumps({**row, "avg_ts": 1e-4, "samples_ts": [1e-4]})).samples == (1e-4,)
    assert measured.measured_of([measured.SLOWEST], "t/s")["mean"] == measured.SLOWEST


def test_a_log_may_name_any_number_of_contexts_devices_and_proxies():
    """All of each with all of the others took hours."""
    number = 2 * verification.DEVICES
    text = "".join(
        f"1.0000 err llama_init_from_model: n_ctx = 1\n1.0000 err x: RPC{index}[127.0.0.1:{index}] compute buffer size = 1.00 MiB\n"
        f"1.0000 run 127.0.0.1:{index} leads to 192.0.2.1:{index}\n"
        for index in range(number)
    )
    memory = measured.read(text).memory_mib
    assert len(memory) == verification.DEVICES
    assert memory["RPC11[192.0.2.1:11]"] == 1


def test_the_table_of_llama_sweep_bench_is_read():
    rows = [
        "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |",
        "|-------|--------|--------|----------|----------|----------|----------|",
        "|   512 |    128 |      0 |    1.100 |   465.51 |    2.311 |    55.38 |",
        "|   512 |    128 |    512 |    1.183 |   432.97 |    1.895 |    67.55 |",
    ]
    log = measured.read("\n".join(f"1.0000 out {row}" for row in rows))
    assert [result[:3] for result in log.results] == [
        ("pp512", 0, (465.51,)),
        ("tg128", 0, (55.38,)),
        ("pp512", 512, (432.97,)),
        ("tg128", 512, (67.55,)),
    ]


def test_a_failure_says_how_the_program_ended_and_what_it_said():
    text = "0.1000 err loading\n0.2000 err error: failed to create context\n0.3000 run ended with 1\n"
    assert measured.failure_of(measured.read(text), ["/bin/llama-bench"]) == (
        "llama-bench ended with status 1: loading / error: failed to create context"
    )
    killed = measured.read("0.3000 run ended with -15\n")
    assert measured.failure_of(killed, ["x"]) == "x was ended by signal 15: it said nothing"
    assert measured.failure_of(measured.read(""), ["x"]) == "x was ended: it said nothing"


def cell_of(latency, speed, workers=2):
    return {
        **copy.deepcopy(EXAMPLE["cells"][-2]),
        "key": f"{latency}",
        "workers": ["a"] * workers,
        "predicted": {"crossings": 2 * workers},
        "latency_ms": latency,
        "proxied": True,
        "measured": {"mean": speed, "deviation": 0, "samples": [speed], "unit": "t/s"},
    }


def test_the_line_through_latencies_is_found():
    cells = [cell_of(latency, 1000 / (10 + 4 * latency)) for latency in (0, 0.2, 1, 5)]
    (fit,) = measured.fits(cells)
    assert (fit["fixed_ms"], fit["crossings"], fit["worst"]) == (pytest.approx(10), pytest.approx(4), pytest.approx(0))
    assert fit["planned_crossings"] == cells[0]["predicted"]["crossings"]
    assert measured.fits(cells[:1]) == [], "one point is no line"
    assert measured.fits([{**cell, "proxied": False} for cell in cells]) == []
    assert len(measured.fits([*cells, *({**cell, "model": "other"} for cell in cells)])) == 2


def visited(hosts, ms, devices_ms=8.0, **other):
    cell = cell_of(0, 1000 / ms, hosts - 1)
    return {
        **cell,
        "proxied": False,
        "key": f"{hosts}",
        "predicted": {"visits": hosts - 1, "crossings": 4 * (hosts - 1), "devices_ms": devices_ms},
        **other,
    }


def test_a_visit_costs_what_each_further_host_adds():
    # The devices take 2 ms more than predicted, whoever computes.
    cells = [visited(1, 10), visited(2, 12.5), visited(3, 15)]
    (visit,) = measured.visits(cells)
    assert (visit["visit_ms"], visit["cells"]) == (pytest.approx(2.5), ["1", "2", "3"])
    assert measured.visits([visited(1, 10), visited(2, 12.5, devices_ms=11)]) == [], "less than nothing"
    assert measured.visits([visited(2, 12.5), visited(2, 12.6)]) == [], "one number of hosts"
    assert measured.visits([visited(1, 10), visited(2, 12.5, depth=64)]) == []
    assert measured.visits([visited(1, 10), visited(2, 12.5, proxied=True)]) == []
    assert measured.visits([visited(1, 10), visited(2, 12.5, predicted={"crossings": 2, "devices_ms": 8})]) == [], (
        "of an older record"
    )
    record = {**EXAMPLE, "visits": [visit]}
    SCHEMA.validate(record)
    assert "llama_link_visit_ms: 2.5 |" in benchmark_tables.as_markdown(record)


def test_cells_get_what_their_test_measured():
    cell = {**EXAMPLE["cells"][0], "test": "tg32", "depth": 256, "memory_mib": [{"device": "RPC0[127.0.0.1:41152]"}]}
    filled = measured.fill(cell, measured.read(LOG), ["llama-bench"], "/x.log")
    assert filled["measured"]["samples"] == [868.103, 771.509]
    assert filled["measured"]["mean"] == pytest.approx(819.806)
    assert filled["memory_mib"][0]["measured_mib"] == pytest.approx(15.35)
    assert filled["log"] == "/x.log"
    assert measured.fill({**cell, "depth": 1}, measured.read(LOG), [], "") is None


TURNS = ["/bin/llama-bench", "-r", "4", "--progress"]


def row_of(*samples, **other):
    row = {"n_prompt": 0, "n_gen": 8, "n_depth": 0, "samples_ts": samples, "avg_ts": 1, "stddev_ts": 0, **other}
    return f"out {json.dumps(row)}"


def added_of(*latencies, benchmark=1):
    """Lines of repetitions that had these latencies."""
    return [
        f"run benchmark {benchmark}, repetition {number}: {latency} ms are added"
        for number, latency in enumerate(latencies, 1)
    ]


def log_of(*lines, status=0):
    lines = ["err llama_context: constructing llama_context", *lines, f"run ended with {status}"]
    return measured.read("".join(f"{number}.0000 {line}\n" for number, line in enumerate(lines)))


def cells_of_latencies(*latencies):
    return [{**cell_of(latency, 1), "test": "tg8", "depth": 0, "memory_mib": []} for latency in latencies]


def test_each_latency_gets_its_repetitions():
    log = log_of(*added_of("5", "0.2", "5", "0.2"), row_of(40, 100, 50, 90))
    cells = cells_of_latencies(5.0, 0.2, 0)
    first, second, third = (measured.fill(cell, log, TURNS, "/x.log") for cell in cells)
    assert (first["measured"]["samples"], first["measured"]["mean"], first["load_s"]) == ([40, 50], 45, 0)
    assert (second["measured"]["samples"], second["measured"]["deviation"]) == ([100, 90], pytest.approx(7.0711))
    assert second["load_s"] is None, "the model was loaded through the first latency"
    assert third is None
    one = measured.fill(cells[1], log, ["/bin/llama-bench", "-r", "4"], "/x.log")
    assert (len(one["measured"]["samples"]), one["load_s"]) == (4, 0), "nothing takes turns"


@pytest.mark.parametrize(
    "added",
    [
        *[[], added_of("0"), added_of("0", "0.2", "0"), added_of("0", "0.2", "0", "0.2", "0")],
        [*added_of("0", "0.2", "0"), "err benchmark 1, repetition 4: 0.2 ms are added"],
        [*added_of("0", "0.2", "0"), "out benchmark 1, repetition 4: 0.2 ms are added"],
        [*added_of("0", "0.2", "0"), *added_of("0", "0.2", "0", "0.2", benchmark=2)],
    ],
)
def test_repetitions_of_which_nobody_knows_the_latency_are_no_figures(added):
    log = log_of(*added, row_of(100, 50, 90, 40))
    assert [measured.fill(cell, log, TURNS, "/x.log") for cell in cells_of_latencies(0, 0.2)] == [None, None]
    assert measured.failure_of(log, TURNS).startswith(
        "llama-bench did not say when each repetition began: give one value in llama_benchmark_latency_ms:"
    )
    ended = log_of(*added, row_of(100, 50, 90, 40), status=1)
    assert measured.failure_of(ended, TURNS).startswith("llama-bench ended with status 1:")


def test_lines_of_repetitions_may_be_before_or_behind_the_figures():
    first, second = added_of("0", "1"), added_of("1", "0", benchmark=2)
    rows = [row_of(5, 6, n_prompt=8, n_gen=0), row_of(7, 8)]
    for lines in ([*first, second[0], rows[0], second[1], rows[1]], [first[0], rows[0], first[1], rows[1], *second]):
        results = log_of(*lines).results
        assert [(result.test, result.latencies_ms) for result in results] == [("pp8", ("0", "1")), ("tg8", ("1", "0"))]
    wrong = row_of(0, 6, n_prompt=8, n_gen=0)
    (result,) = log_of(*first, wrong, *second, rows[1]).results
    assert (result.samples, result.latencies_ms) == ((7, 8), ("1", "0"))


def test_latencies_are_of_repetitions_alone():
    log = Sink()
    latency = runner.Latency([0.005, 0.0])
    said = "llama-bench: benchmark 3/4: {}\n".format
    for text in ("warmup generation run", "depth run 2/4", "depth run 2/4 (cached)", "warmup prompt run 2/4"):
        latency.follow(said(text), log)
    latency.follow("x " + said("prompt run 2/4"), log)
    assert (latency.now, log.lines) == (0.005, [])
    for text in ("prompt run 2/4", "generation run 3/4"):
        latency.follow(said(text), log)
    assert log.lines == [
        ("run", "benchmark 3, repetition 2: 0 ms are added"),
        ("run", "benchmark 3, repetition 3: 5 ms are added"),
    ]
    runner.Latency([0.005]).follow(said("prompt run 2/4"), log)
    assert len(log.lines) == 2, "nothing takes turns"


def test_latencies_share_a_load_where_the_program_repeats():
    given = {**MEASURED, "llama_benchmark_latency_ms": [0.0, 1.0, 5.0], "llama_benchmark_hosts": [2]}
    loads = loads_of(cluster_of(**given))
    assert [setup.link and setup.link.latencies_ms for setup, _plan in loads] == [None, (0.0, 1.0, 5.0)]
    (setup, own) = loads[-1]
    argv = benchmark.argv_of(own, setup, 4)
    assert argv[argv.index("-r") + 1] == "12"
    assert "--progress" in argv
    cells = benchmark.cells_of(setup, own, LLAMA, None)
    assert [(cell["test"], cell["latency_ms"]) for cell in cells] == [
        (test, latency) for latency in (0, 1, 5) for test in ("pp512", "tg128")
    ]
    fast, middle, slow = [cell["predicted"]["mean"] for cell in cells if cell["test"] == "tg128"]
    assert fast > middle > slow
    missing = [(cell["test"], cell["depth"]) for cell in cells]
    assert benchmark.arguments_of_tests(argv, missing) == [[*argv, "-p", "512", "-n", "128", "-d", "0"]]
    direct = benchmark.argv_of(loads[0][1], loads[0][0], 4)
    assert direct[direct.index("-r") + 1] == "4"
    assert "--progress" not in direct
    setup, own = loads_of(cluster_of(**{**given, "llama_benchmark_latency_ms": [1.0]}))[-1]
    assert "--progress" not in benchmark.argv_of(own, setup, 4), "nothing takes turns"
    one = [setup.link.latencies_ms for setup, _plan in loads_of(cluster_of(**given, llama_release=FORK)) if setup.link]
    assert one == [(0.0,), (1.0,), (5.0,)]


# -------------------------------------------------------------------------------------------------------------- tables


def test_the_example_and_every_record_have_the_form_of_the_schema():
    SCHEMA.validate(EXAMPLE)
    spoiled = copy.deepcopy(EXAMPLE)
    spoiled["cells"][0]["surprise"] = 1
    with pytest.raises(jsonschema_rs.ValidationError):
        SCHEMA.validate(spoiled)
    plan, values, request = planned(cluster_of(**MEASURED, llama_benchmark_latency_ms=[0.0, 1.0]))
    cells = benchmark.asked_cells(request, values, plan)
    for setup, own in loads_of(cluster_of(**MEASURED, llama_benchmark_latency_ms=[0.0, 1.0])):
        cells += benchmark.cells_of(setup, own, LLAMA, None)
    hosts = benchmark.machines(values, plan, lambda _host: None)
    SCHEMA.validate({**EXAMPLE, "cells": cells, "hosts": hosts, "fits": measured.fits(EXAMPLE["cells"])})


def test_tables_have_every_cell():
    lines = benchmark_tables.as_csv(EXAMPLE).splitlines()
    assert len(lines) == 1 + len(EXAMPLE["cells"])
    text = benchmark_tables.as_markdown(EXAMPLE)
    for cell in EXAMPLE["cells"]:
        if cell["measured"]:
            assert benchmark_tables.speed(cell) in text
        else:
            assert cell["skipped"] in text
    assert "tg128 @ d2048" in text
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        assert len({line.count(" | ") for line in table.splitlines()}) == 1


def test_loads_and_latencies_are_in_the_form_of_field_notes():
    text = benchmark_tables.as_markdown(EXAMPLE)
    loads = text.split("## Loads\n")[1].split("\n## ")[0]
    rows = [[column.strip() for column in line.split("|")[1:-1]] for line in loads.strip().splitlines()]
    assert rows[0] == ["model", "backend", "size", "hosts", "split", "load time", "tg (t/s)", "pp (t/s)", "status"]
    known = {(row[0], row[3], row[4]): row for row in rows[2:]}
    measured_once = known["known-answer-16x512-f16", "2", "as planned"]
    cells = [
        cell for cell in EXAMPLE["cells"] if len(cell["hosts"]) == 2 and cell["model"] == "known-answer-16x512-f16"
    ]
    assert benchmark_tables.speed(next(cell for cell in cells if cell["test"] == "tg128")) == measured_once[6]
    assert next(row for row in rows[2:] if not row[6])[8] not in ("", "measured"), (
        "a load that is not possible says why"
    )
    latencies = text.split("## Against added latency\n")[1].split("\n## ")[0]
    assert "vs baseline" in latencies
    assert re.findall(r"([\d.]+)x \|", latencies) == ["1.00", "0.83", "0.48", "0.16", "0.86", "0.63", "0.30", "0.08"]


def test_what_a_log_says_is_no_markup_in_a_table():
    spoiled = copy.deepcopy(EXAMPLE)
    spoiled["cells"][0].update(measured=None, skipped="ended: <img src=//a.example/x> | y")
    assert "ended: &lt;img src=//a.example/x> \\| y" in benchmark_tables.as_markdown(spoiled)


# --------------------------------------------------------------------------------------------------------------- proxy


def accept(listener, answer):
    """Has each client answered in a thread of its own, until the listener is shut down."""

    def serve():
        while True:
            try:
                client, _address = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


@pytest.fixture
def echo():
    """A server that sends back what it gets; its endpoint."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(client):
        with client:
            while data := client.recv(1 << 16):
                client.sendall(data)

    accept(listener, answer)
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


class Sink:
    def __init__(self):
        self.lines = []

    def write(self, kind, text):
        self.lines.append((kind, text))

    def wait(self):
        """For the first line."""
        deadline = time.monotonic() + 20
        while not self.lines and time.monotonic() < deadline:
            time.sleep(0.01)


@contextmanager
def through_a_proxy(endpoint, latency):
    """A client that reaches the endpoint through a proxy, which has ended its threads afterwards."""
    proxy = runner.Proxy(endpoint, runner.Latency([latency]), None, sink := Sink())
    proxy.start()
    with socket.create_connection(("127.0.0.1", int(proxy.endpoint.split(":")[1])), 10) as client:
        yield client
    sink.wait()
    proxy.close()


def read(client, size):
    """So many bytes."""
    data = b""
    while len(data) < size:
        data += client.recv(1 << 16)
    return data


class Clock:
    """Stands still until the test sets it; who sleeps wakes up when it is time."""

    def __init__(self):
        self.now, self.over, self.ends, self.changed = 0.0, False, [], threading.Condition()
        self.seen = threading.local()

    def monotonic(self):
        self.seen.now = self.now
        return self.seen.now

    def sleep(self, seconds):
        with self.changed:
            end = self.seen.now + seconds
            self.ends.append(end)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.over or self.now >= end, 20)

    def wait_for_sleep(self, end):
        """Until somebody sleeps until then."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.ends and self.ends[-1] == pytest.approx(end), 20), self.ends

    def set(self, now, over=False):
        with self.changed:
            self.now, self.over = now, over
            self.changed.notify_all()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(runner, "time", made)
    return made


@pytest.fixture
def carried(clock):
    """Sends through one direction of a connection; returns what it is sent to once all of it was taken."""
    ends, threads = [*socket.socketpair(), *socket.socketpair()], []

    def send(data, parts, **how):
        link = runner.Link(ends[1], ends[2], runner.Latency([how.get("latency", 0.0)]), how.get("rate"))
        threads.extend(link.start())
        for number in range(parts):
            ends[0].sendall(data[number * len(data) // parts : (number + 1) * len(data) // parts])
        deadline = time.monotonic() + 20
        while link.bytes < len(data) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert link.bytes == len(data)
        return ends[3]

    yield send
    clock.set(clock.now, over=True)
    ends[0].shutdown(socket.SHUT_WR)
    for thread in threads:
        thread.join(20)
    for end in ends:
        end.close()


def test_the_proxy_changes_no_byte(echo):
    data = bytes(range(256)) * 8000
    with through_a_proxy(echo, 0.001) as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        assert read(client, len(data)) == data
        sender.join()


def test_each_direction_has_the_latency_once(clock, echo):
    with through_a_proxy(echo, 0.05) as client:
        for began in (0.0, 1.0):
            clock.set(began)
            client.sendall(b"x")
            for end in (began + 0.05, began + 0.1):
                clock.wait_for_sleep(end)
                assert select.select([client], [], [], 0)[0] == []
                clock.set(end)
            assert client.recv(1) == b"x"
        assert clock.ends == pytest.approx([0.05, 0.1, 1.05, 1.1])
        clock.set(2, over=True)


def test_what_follows_does_not_wait_for_the_latency_of_what_is_before(carried, clock):
    target = carried(b"x" * 20, 20, latency=0.2)
    clock.wait_for_sleep(0.2)
    clock.set(0.2)
    assert read(target, 20) == b"x" * 20
    assert clock.ends == [0.2]


def test_bandwidth_is_limited_apart_from_the_latency(carried, clock):
    target = carried(b"x" * 100_000, 10, rate=1e6)
    target.setblocking(False)
    came = b""
    while len(came) < 100_000:
        with clock.changed:
            assert clock.changed.wait_for(lambda: clock.ends and clock.ends[-1] > clock.now, 20)
        with suppress(BlockingIOError):
            came += target.recv(1 << 20)
        # Nothing comes before its last byte was carried.
        assert len(came) <= 1e6 * clock.now + 1
        end = clock.ends[-1]
        clock.set(end)
        if end == pytest.approx(0.1):
            target.setblocking(True)
            came += read(target, 100_000 - len(came))
    assert clock.ends[-1] == pytest.approx(0.1)


def test_the_end_of_one_side_is_passed_on(echo):
    proxy = runner.Proxy(echo, runner.Latency([0.0]), None, sink := Sink())
    proxy.start()
    client = socket.create_connection(("127.0.0.1", int(proxy.endpoint.split(":")[1])), 10)
    client.sendall(b"last")
    client.shutdown(socket.SHUT_WR)
    assert client.recv(10) == b"last"
    assert client.recv(10) == b""
    client.close()
    proxy.close()
    sink.wait()
    assert "was sent 4 bytes in 1 parts and sent 4 in 1" in sink.lines[0][1]


def test_latencies_take_turns_with_the_repetitions(tmp_path, echo):
    program = [
        *["import sys, socket, time, json", "said = 'llama-bench: benchmark 1/1: '", "samples = []"],
        "address, port = sys.argv[1].split(':')",
        "link = socket.create_connection((address, int(port)))",
        "def run(text):",
        "    print(said + text, file=sys.stderr, flush=True); time.sleep(0.2)",
        "    before = time.monotonic(); link.sendall(b'x'); link.recv(1); samples.append(1 / (time.monotonic() - before))",
        *["run('warmup generation run')", "for number in range(4): run(f'generation run {number + 1}/4')"],
        "row = {'n_prompt': 0, 'n_gen': 1, 'n_depth': 0, 'samples_ts': samples[1:], 'avg_ts': 1, 'stddev_ts': 0}",
        "print(json.dumps(row))",
    ]
    log = tmp_path / "x.log"
    argv = ["--log", str(log), "--latency-ms=200,-0", "--proxy", echo, "--", sys.executable, "-c", "\n".join(program)]
    subprocess.run([sys.executable, runner.__file__, *argv, echo], check=False)
    (result,) = measured.read(log.read_text()).results
    assert result.latencies_ms == ("200", "-0", "200", "-0")
    slow, fast = result.samples[::2], result.samples[1::2]
    assert max(slow) <= 2.5, "0.4 s at least"
    assert min(fast) > max(slow)


def test_a_worker_that_is_away_is_named():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    proxy = runner.Proxy(f"127.0.0.1:{port}", runner.Latency([0.0]), None, sink := Sink())
    proxy.start()
    with socket.create_connection(("127.0.0.1", int(proxy.endpoint.split(":")[1])), 10) as client:
        assert client.recv(1) == b""
    assert "cannot be reached" in sink.lines[0][1]
    proxy.close()


def test_a_program_finds_the_workers_through_proxies_and_its_lines_have_times(tmp_path, echo):
    program = [
        sys.executable,
        "-c",
        "import sys; print(sys.argv[1]); print('said', file=sys.stderr); sys.exit(3)",
        f"{echo},10.0.0.1:1",
    ]
    argv = ["--log", str(tmp_path / "deep" / "x.log"), "--latency-ms", "1", "--proxy", echo, "--", *program]
    assert subprocess.run([sys.executable, runner.__file__, *argv], check=False).returncode == 1
    lines = (tmp_path / "deep" / "x.log").read_text().splitlines()
    assert all(measured.LINE.fullmatch(line) for line in lines)
    leads = re.search(r"run (127\.0\.0\.1:\d+) leads to", lines[0])[1]
    assert any(line.endswith(f"out {leads},10.0.0.1:1") for line in lines)
    assert any(line.endswith("err said") for line in lines)
    assert measured.read("\n".join(lines)).status == 3


def test_a_program_that_is_to_end_is_ended_and_its_end_is_written(tmp_path):
    log = tmp_path / "x.log"
    argv = [
        sys.executable,
        runner.__file__,
        "--log",
        str(log),
        "--",
        sys.executable,
        "-c",
        "import time; print(1, flush=True); time.sleep(60)",
    ]
    with subprocess.Popen(argv) as running:
        while not log.exists() or "out 1" not in log.read_text():
            time.sleep(0.05)
        running.terminate()
        assert running.wait(20) == 1
    assert measured.read(log.read_text()).status == -15


def test_a_program_whose_log_cannot_be_written_is_ended():
    program = "import sys, time\nwhile True: print('x' * 1000, flush=True)"
    argv = [sys.executable, runner.__file__, "--log", "/dev/full", "--", sys.executable, "-c", program]
    done = subprocess.run(argv, check=False, capture_output=True, timeout=20, text=True)
    assert done.returncode == 1
    assert "the log cannot be written: [Errno 28] No space left on device" in done.stderr


def test_a_program_that_writes_without_an_end_is_ended(tmp_path, monkeypatch):
    """Neither its log nor one of its lines grows without an end."""
    monkeypatch.setattr(runner, "LOG_BYTES", 100_000)
    monkeypatch.setattr(runner, "LINE_BYTES", 1000)
    path = tmp_path / "log"
    with path.open("w") as stream:
        program = "import sys\nwhile True: sys.stderr.write('x' * 500)"
        assert runner.run([sys.executable, "-c", program], [], runner.Log(stream), runner.Latency([0.0])) == -9
    lines = path.read_text().splitlines()
    assert lines[-1].endswith(" run ended with -9")
    assert {len(line.split(" ", 2)[2]) for line in lines[:-1]} == {1000}
    assert path.stat().st_size < 110_000


# ------------------------------------------------------------------------------------------------------------- records


IDENTITY = EXAMPLE["id"]


def test_records_are_kept_and_found(tmp_path, call):
    assert call(state="found", prefix=str(tmp_path)) == {
        "benchmarks": [],
        "record": None,
        "changed": False,
        "invocation": mock.ANY,
    }
    older = {**EXAMPLE, "id": "20251122-150000-1a2b3c4d", "ended": None}
    for record in (EXAMPLE, older):
        call(state="written", prefix=str(tmp_path), record=record)
    (tmp_path / "benchmarks" / "20261122-150000-ffffffff.json").write_text("{")
    found = call(state="found", prefix=str(tmp_path))
    assert found["benchmarks"] == [{"id": IDENTITY, "complete": True}, {"id": older["id"], "complete": False}]
    assert found["record"] == EXAMPLE
    assert records.find(str(tmp_path), older["id"])["record"] == older
    with pytest.raises(Refusal, match="is not the id of a benchmark"):
        records.write(str(tmp_path), {"id": "../x"})


def test_the_last_benchmarks_are_kept_and_those_of_the_plan_that_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "KEPT", 3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    written = [{**EXAMPLE, "id": f"2025112{day}-150000-1a2b3c4d", "plan": plan} for day, plan in enumerate("abaac")]
    for record in written:
        logs = tmp_path / "state" / "benchmarks" / record["id"]
        logs.mkdir(parents=True)
        (logs / "1.log").write_text("")
        (logs / "link").symlink_to(elsewhere)
        records.write(str(tmp_path), record)
    kept = [record["id"] for record in written[2:]]
    assert sorted(path.stem for path in (tmp_path / "benchmarks").iterdir()) == kept
    assert sorted(path.name for path in (tmp_path / "state" / "benchmarks").iterdir()) == kept
    assert elsewhere.is_dir()
    for record in (written[1], {**EXAMPLE, "plan": "a"}):
        records.write(str(tmp_path), record)
    left = {found["id"] for found in records.find(str(tmp_path))["benchmarks"]}
    assert left == {EXAMPLE["id"], *kept}, "the two of plan a are no more than the last ones and those of the plan"


def test_older_benchmarks_are_read_once_and_not_for_each_cell(tmp_path, monkeypatch):
    """Each may have tens of MiB, and those of the plan that serves are never removed."""
    monkeypatch.setattr(records, "KEPT", 1)
    read, real = [], records._read
    monkeypatch.setattr(records, "_read", lambda path: read.append(path.stem) or real(path))
    older = {**EXAMPLE, "id": "20251121-150000-1a2b3c4d"}
    records.write(str(tmp_path), older)
    for _cell in range(3):
        records.write(str(tmp_path), EXAMPLE)
    assert read == [older["id"]]


def test_a_link_in_place_of_the_logs_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "KEPT", 1)
    old = {**EXAMPLE, "id": "20251121-150000-1a2b3c4d", "plan": "old"}
    target = tmp_path / "precious" / old["id"]
    target.mkdir(parents=True)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "benchmarks").symlink_to(tmp_path / "precious")
    records.write(str(tmp_path), old)
    with pytest.raises(OSError, match="benchmarks"):
        records.write(str(tmp_path), EXAMPLE)
    assert target.is_dir()


def test_a_figure_is_shown_as_the_log_has_it():
    """Rounded to four places before, this one became 13131.92."""
    row = json.dumps({**ROW, "samples_ts": [13131.9], "avg_ts": 13131.925049, "stddev_ts": 286.784951})
    log = measured.read(f"0.1000 out {row}\n")
    cell = next(cell for cell in EXAMPLE["cells"] if cell["test"].startswith("tg"))
    filled = measured.fill({**cell, "test": "tg1", "depth": 0}, log, cell["argv"], cell["log"])["measured"]
    assert f"{filled['mean']:.2f} ± {filled['deviation']:.2f}" == "13131.93 ± 286.78"


def test_of_a_log_comes_what_matters(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(
        "0.1000 err llama_model_loader: - kv 3\n0.2000 err x model buffer size = 1.00 MiB\n0.3000 out {}\n0.4000 err torn"
    )
    assert (
        records.lines_of(str(path))
        == "0.1000 err llama_model_loader: - kv 3\n0.2000 err x model buffer size = 1.00 MiB\n0.3000 out {}"
    )
    long = "".join(f"0.1000 err llama_model_loader: - kv {number}\n" for number in range(100))
    path.write_text(long + "0.2000 out {}\n")
    assert len(records.lines_of(str(path)).splitlines()) == records.LAST_LINES
    assert records.lines_of(str(tmp_path / "none")) == ""


def test_of_a_log_comes_what_matters_in_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "KEPT_BYTES", 1000)
    monkeypatch.setattr(records, "LINE_BYTES", 100)
    path = tmp_path / "x.log"
    said = [f"0.1000 err error {number:05}" for number in range(2000)]
    path.write_text("\n".join([*said, "0.2000 out {}", "0.2000 out " + "x" * 1000, "0.3000 run ended with 0", ""]))
    lines = records.lines_of(str(path)).splitlines()
    assert lines[0] == said[0]
    assert lines[-3:] == [said[-1], "0.2000 out {}", "0.3000 run ended with 0"]
    assert 1000 < len("\n".join(lines)) < 1200


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_a_log_that_is_no_file_is_not_read(tmp_path, make):
    make(tmp_path / "x.log")
    with pytest.raises(OSError, match=r"not a regular file|Too many levels|Is a directory"):
        records.lines_of(str(tmp_path / "x.log"))


@pytest.mark.parametrize(
    "text, looks",
    [
        (None, 3),
        ("", 3),
        ("0.1000 out {}\n", 3),
        ("0.1000 out 0.1000 run ended with 0\n0.2000 err x\n", 3),
        ("0.1000 out x run ended with 0\n", 3),
        ("0.1000 out 0.1000 run ended with 0\n", 3),
        ("0.2000 run ended with 0", 3),
        ("0.2000 run ended with 0\n", 0),
        ("0.1000 out {}\n" * 1000 + "123456789.2000 run ended with -15\n", 0),
    ],
)
def test_a_look_waits_for_the_program_to_end(tmp_path, monkeypatch, text, looks):
    """What looks again and again takes processors from what is measured."""
    clock = [0.0]
    monkeypatch.setattr(records.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(records.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    path = tmp_path / "x.log"
    if text is not None:
        path.write_text(text)
    records.wait_for_end(str(path), 2.5 * records.LOOK_SECONDS)
    assert clock[0] == pytest.approx(looks * records.LOOK_SECONDS)


def test_while_a_program_measures_the_head_is_rarely_asked(matrix):
    plan, whole = matrix
    run = Run(whole)
    run.still, waits = [True] * 3, []
    before = run._execute_module
    run._execute_module = lambda **given: waits.append(given["module_args"].get("seconds")) or before(**given)
    run._measured({"plan": plan}, {})
    assert set(waits) == {None, action.POLL_SECONDS}


def test_measured_runs_on_the_controller(call):
    assert "action plugin" in call(state="measured")["msg"]


# --------------------------------------------------------------------------------------------------------- stop and go


GUARD, PROGRAM, SERVER = "llamacpp-benchmark-guard", "llamacpp-benchmark", "llamacpp-server"


@pytest.fixture
def head(tmp_path, monkeypatch):
    """A head whose server runs; its part of the plan."""
    machine = machine_with("systemd", tmp_path, monkeypatch)
    monkeypatch.setattr(stage, "VOLATILE", machine.folder / "units")
    machine.host["names"] = {"server": SERVER, "cluster": "llama_cluster"}
    machine.apply(defined(SERVER))
    machine.lines("calls"), machine.lines("events")
    return machine


def asked(state, machine, **arguments):
    plan = {"head": {"host": "head"}, "hosts": {"head": machine.host}}
    return {"state": state, "plan": plan, **arguments}


def test_the_server_stops_only_once_somebody_is_there_to_start_it_again(head, call):
    assert call(**asked("begun", head, runner="# runner"))["changed"]
    calls = [line for line in head.lines("calls") if " restart " in line or " stop " in line]
    assert calls == [
        f"systemctl stop {GUARD}.service",
        f"systemctl restart {GUARD}.timer",
        f"systemctl stop {SERVER}.service",
    ]
    assert (head.prefix / "benchmarks" / stage.RUNNER).read_text() == "# runner"
    service = (stage.VOLATILE / f"{GUARD}.service").read_text()
    assert f"stop {PROGRAM}.service\n" in service
    assert re.search(rf"^ExecStart=\S*systemctl start {SERVER}\.service$", service, re.MULTILINE)
    assert f"Restart=on-failure\nRestartSec={stage.AGAIN_SECONDS}\n" in service, "until the head starts"
    timer = (stage.VOLATILE / f"{GUARD}.timer").read_text()
    assert f"OnActiveSec={stage.SILENCE_SECONDS}" in timer
    # It is wound up more often than systemd starts a unit without this.
    assert "StartLimitIntervalSec=0" in timer.split("[Timer]")[0]
    assert head.state(SERVER) == [services.STOPPED]


def test_a_program_runs_is_looked_at_and_the_server_serves_again(head, call, tmp_path):
    call(**asked("begun", head, runner="#"))
    call(**asked("run", head, definition="text"))
    log = tmp_path / "x.log"
    log.write_text("0.1000 out one\n")
    head.lines("calls")
    answer = call(**asked("looked", head, log=str(log)))
    assert (answer["runs"], answer["lines"]) == (True, "0.1000 out one")
    assert f"systemctl restart {GUARD}.timer" in head.lines("calls"), "each look winds the guard up"
    assert not answer["serves"]
    call(**asked("stopped", head))
    assert not call(**asked("looked", head, log=str(log)))["runs"]
    head.lines("calls")
    assert call(**asked("ended", head))["changed"]
    calls = [line for line in head.lines("calls") if " start " in line or " stop " in line]
    assert calls == [f"systemctl start {SERVER}.service", f"systemctl stop {GUARD}.timer {GUARD}.service"]
    assert head.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]
    assert [path.name for path in stage.VOLATILE.glob("*benchmark*")] == []


def test_what_a_killed_run_left_is_ended_by_the_next_one(head, call):
    assert not call(**asked("recovered", head))["changed"]
    assert head.lines("events") == []
    call(**asked("begun", head, runner="#"))
    call(**asked("run", head, definition="text"))
    assert call(**asked("recovered", head))["changed"]
    assert head.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]
    assert not call(**asked("recovered", head))["changed"]


def killed(machine, call, monkeypatch):
    """A benchmark that nobody looks at any more; from here on the module of services is called."""
    call(**asked("begun", machine, runner="#"))
    call(**asked("run", machine, definition="text"))
    machine.lines("calls")
    monkeypatch.setattr(sys.modules[__name__], "MODULE", service_module)


@pytest.mark.parametrize("wanted", ["stop", "remove"])
def test_who_stops_the_server_ends_what_a_killed_run_left_and_its_timer_first(head, call, monkeypatch, wanted):
    killed(head, call, monkeypatch)
    foreseen = call(check=True, host=head.host, **{wanted: [SERVER]})
    assert {"service": GUARD, "before": services.RUNNING, "after": services.STOPPED} in foreseen["changes"]
    assert head.state(PROGRAM) == [services.RUNNING], "check mode ends nothing"
    head.lines("calls")
    result = call(host=head.host, **{wanted: [SERVER]})
    assert result["changed"]
    assert result["changes"][0]["service"] == GUARD
    stops = [line for line in head.lines("calls") if " stop " in line]
    assert stops[:2] == [f"systemctl stop {GUARD}.timer {GUARD}.service", f"systemctl stop {PROGRAM}.service"]
    assert head.state(SERVER, PROGRAM) == [services.STOPPED, services.STOPPED]
    assert list(stage.VOLATILE.glob("*benchmark*")) == []
    assert not call(host=head.host, **{wanted: [SERVER]})["changed"]


def test_who_starts_the_server_ends_it_too_and_who_touches_a_worker_does_not(head, call, monkeypatch):
    killed(head, call, monkeypatch)
    worker = "llamacpp-worker-cpu"
    call(host=head.host, stop=[worker])
    assert head.state(PROGRAM) == [services.RUNNING]
    call(host=head.host, start=[SERVER])
    assert head.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]
    assert list(stage.VOLATILE.glob("*guard*")) == []


def test_without_a_session_of_the_user_nothing_of_a_benchmark_is_found(head, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(stage.services.commands, "find_user_session", lambda: None)
    monkeypatch.setattr(stage.Stage, "runs", lambda self: False)
    assert stage.disarm({**head.host, "scope": "user", "service_manager": "systemd_user"}, [SERVER], check=False) == []


def test_a_head_that_restarted_meanwhile_says_that_it_serves(head, call):
    call(**asked("begun", head, runner="#"))
    for unit in stage.VOLATILE.glob("*benchmark*"):
        unit.unlink()
    head.apply(defined(SERVER))
    head.lines("calls")
    answer = call(**asked("looked", head, log="/none"))
    assert answer["serves"]
    assert not [line for line in head.lines("calls") if GUARD in line]


def test_no_program_is_started_beside_a_server_that_runs(head, call):
    call(**asked("begun", head, runner="#"))
    head.apply(defined(SERVER))
    answer = call(**asked("run", head, definition="text"))
    assert "llamacpp-server runs, and a worker serves one client" in answer["msg"]
    assert head.state(PROGRAM) == [services.STOPPED]


def test_no_program_is_started_on_a_head_that_restarted_meanwhile(head, call, monkeypatch):
    call(**asked("begun", head, runner="#"))
    missing = commands.CommandError(["systemctl", "restart"], f"Unit {GUARD}.timer not found.", 5)
    monkeypatch.setattr(stage.Stage, "wind_up", mock.Mock(side_effect=missing))
    assert "not found" in call(**asked("run", head, definition="text"))["msg"], "nobody would start the server"
    head.apply(defined(SERVER))
    assert (
        "llamacpp-server runs, and a worker serves one client" in call(**asked("run", head, definition="text"))["msg"]
    )
    assert head.state(PROGRAM) == [services.STOPPED]


def test_a_command_that_fails_is_said(head, call, monkeypatch):
    call(**asked("begun", head, runner="#"))
    failed = commands.CommandError(["systemctl", "restart"], "Job failed", 1)
    monkeypatch.setattr(stage.Stage, "wind_up", mock.Mock(side_effect=failed))
    answer = call(**asked("looked", head, log="/none"))
    assert answer["failed"]
    assert "«systemctl restart» failed: Job failed" in answer["msg"]


def test_check_mode_stops_nothing(head, call):
    assert not call(check=True, **asked("begun", head, runner="#"))["changed"]
    assert head.state(SERVER) == [services.RUNNING]


def test_a_head_that_nothing_would_start_again_is_refused(head, call):
    head.host["service_manager"] = "launchd"
    answer = call(**asked("begun", head, runner="#"))
    assert answer["failed"]
    assert "by launchd, and a benchmark needs systemd or supervisor" in answer["msg"]


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """A head without systemd whose server runs; processes of a guard that it starts."""
    machine = machine_with("supervisor", tmp_path, monkeypatch)
    machine.host["names"] = {"server": SERVER, "cluster": "llama_cluster"}
    machine.apply(defined(SERVER))
    machine.lines("calls"), machine.lines("events")
    machine.guards = []
    monkeypatch.setattr(stage, "start_detached", machine.guards.append)
    return machine


def test_a_login_without_a_session_is_no_traceback(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    timer = stage.Timer({"scope": "user", "names": {"server": SERVER}}, GUARD, PROGRAM)
    assert timer.units == Path(f"/run/user/{os.geteuid()}/systemd/user")


TIMES = ["--silence", str(stage.SILENCE_SECONDS), "--again", str(stage.AGAIN_SECONDS)]


def test_beside_supervisor_a_process_guards_the_head(supervised, call, tmp_path):
    assert call(**asked("begun", supervised, runner="#"))["changed"]
    records = supervised.prefix / "benchmarks"
    assert [argv[1:] for argv in supervised.guards] == [
        [str(records / stage.RUNNER), "--guard", str(records / "guard"), *TIMES]
    ]
    assert [command[-2:] for command in json.loads((records / "guard").read_text())] == [
        ["stop", PROGRAM],
        ["start", SERVER],
    ]
    call(**asked("run", supervised, definition="text"))
    assert supervised.state(SERVER, PROGRAM) == [services.STOPPED, services.RUNNING]
    os.utime(records / "guard", (0, 0))
    assert call(**asked("looked", supervised, log="/none"))["runs"]
    assert time.time() - (records / "guard").stat().st_mtime < 60, "each look winds the guard up"
    assert call(**asked("recovered", supervised))["changed"]
    assert supervised.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]
    assert not (records / "guard").exists()
    assert not call(**asked("recovered", supervised))["changed"]


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_no_guard_carries_out_what_other_accounts_may_write(supervised, call, tmp_path, mode):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(mode)
    (supervised.prefix / "benchmarks").symlink_to(tmp_path / "disk")
    answer = call(**asked("begun", supervised, runner="#"))
    assert answer["failed"]
    assert f"other accounts can write into {supervised.prefix}/benchmarks" in answer["msg"]
    assert supervised.guards == []
    assert supervised.state(SERVER) == [services.RUNNING]


def test_a_guard_that_runs_is_not_started_twice(supervised, call):
    call(**asked("begun", supervised, runner="#"))
    with (supervised.prefix / "benchmarks/guard").open() as held:
        assert os.fstat(held.fileno()).st_mode & 0o777 == 0o600
        fcntl.flock(held, fcntl.LOCK_EX)
        call(**asked("looked", supervised, log="/none"))
        assert len(supervised.guards) == 1
        assert runner.guard(supervised.prefix / "benchmarks/guard", 0, 0) == 0, "it leaves the work to the first one"
        assert (supervised.prefix / "benchmarks/guard").exists()
    call(**asked("looked", supervised, log="/none"))
    assert len(supervised.guards) == 2, "it runs no more"


def guarded(tmp_path):
    """A guard's file, and what its commands write."""
    path, said = tmp_path / "guard", tmp_path / "said"
    path.write_text(json.dumps([["/bin/sh", "-c", f"echo {word} >> {said}"] for word in ("stop", "start")]))
    return path, said


def test_a_guard_that_nobody_winds_up_starts_the_head(tmp_path, monkeypatch):
    path, said = guarded(tmp_path)
    os.utime(path, (0, 0))
    assert runner.main(["--guard", str(path), *TIMES]) == 0
    assert said.read_text().split() == ["stop", "start"]
    assert not path.exists()


def test_a_guard_starts_nothing_once_it_is_disarmed(tmp_path):
    """stop.yml removes the file while the guard ends the program, which may take its time."""
    path, said = guarded(tmp_path)
    path.write_text(json.dumps([["rm", str(path)], ["/bin/sh", "-c", f"echo start >> {said}"]]))
    os.utime(path, (0, 0))
    runner.guard(path, 120, 7)
    assert not said.exists()


def test_a_guard_tries_to_start_the_head_until_it_starts(tmp_path, monkeypatch):
    """As while supervisor itself starts."""
    path, said = guarded(tmp_path)
    path.write_text(
        json.dumps([["/none", "stop"], ["/bin/sh", "-c", f"echo start >> {said}; [ $(wc -l < {said}) = 3 ]"]])
    )
    os.utime(path, (0, 0))
    assert runner.guard(path, 120, 0) == 0
    assert said.read_text().split() == ["start"] * 3
    assert not path.exists()


def test_a_guard_that_cannot_start_the_head_goes_on_until_somebody_disarms_it(tmp_path, monkeypatch):
    """As systemd's, which starts its service again."""
    path, _said = guarded(tmp_path)
    path.write_text(json.dumps([["/none", "stop"], ["/none", "start"]]))
    os.utime(path, (0, 0))
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 100:
            path.unlink()

    monkeypatch.setattr(runner.time, "sleep", sleep)
    assert runner.guard(path, 120, 7) == 0
    assert slept == [7] * 100


def acts(tmp_path, monkeypatch, stop, start):
    """What a guard does whose commands also do this, once each; and its file. Time passes without a wait."""
    path, said = guarded(tmp_path)
    programs = [f"echo {word} >> {said}; " for word in ("stop", "start")]
    once = [
        f"[ -e {tmp_path}/{word} ] || {{ touch {tmp_path}/{word}; {do}; }}" for word, do in (("a", stop), ("b", start))
    ]
    path.write_text(json.dumps([["/bin/sh", "-c", program + do] for program, do in zip(programs, once)]))
    os.utime(path, (0, 0))
    seconds = [1000.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(runner.time, "sleep", lambda length: seconds.append(seconds.pop() + length))
    runner.guard(path, 120, 7)
    return said.read_text().split(), path, seconds[0] - 1000


def test_who_looks_while_a_guard_ends_the_program_finds_no_head_started_beside_it(tmp_path, monkeypatch):
    done, path, waited = acts(tmp_path, monkeypatch, f"touch {tmp_path}/guard", ":")
    assert done == ["stop", "stop", "start"]
    assert waited >= 119
    assert not path.exists()


def test_who_looks_while_a_guard_starts_the_head_is_still_guarded(tmp_path, monkeypatch):
    done, path, waited = acts(tmp_path, monkeypatch, ":", f"touch {tmp_path}/guard")
    assert done == ["stop", "start"] * 2
    assert waited >= 119
    assert not path.exists()


def test_a_guard_leaves_the_file_of_the_next_benchmark(tmp_path, monkeypatch):
    done, path, _waited = acts(
        tmp_path, monkeypatch, ":", f"cp {tmp_path}/guard {tmp_path}/new; mv {tmp_path}/new {tmp_path}/guard"
    )
    assert done == ["stop", "start"]
    assert path.exists()


@pytest.mark.parametrize("step", ["utime", "flock"])
def test_a_guard_that_ends_while_it_is_wound_up_is_followed_by_another(supervised, call, monkeypatch, step):
    call(**asked("begun", supervised, runner="#"))
    file = supervised.prefix / "benchmarks/guard"
    module, real = (os, os.utime) if step == "utime" else (stage.Watcher, stage.Watcher._runs)

    def end(*arguments):
        file.unlink(missing_ok=True)
        monkeypatch.setattr(module, real.__name__, real)
        return real(*arguments)

    monkeypatch.setattr(module, real.__name__, end)
    assert "failed" not in call(**asked("looked", supervised, log="/none"))
    assert file.exists()
    assert len(supervised.guards) == 2


def test_a_program_is_not_run_beside_a_head_that_the_guard_has_just_started(supervised, call, monkeypatch):
    call(**asked("begun", supervised, runner="#"))
    real = stage.Watcher.wind_up

    def wind_up(self):
        supervised.apply(start=[SERVER])
        real(self)

    monkeypatch.setattr(stage.Watcher, "wind_up", wind_up)
    assert "nobody looked for 120 s" in call(**asked("run", supervised, definition="text"))["msg"]
    assert supervised.state(SERVER, PROGRAM) == [services.RUNNING, services.STOPPED]


@pytest.mark.parametrize("jump", [-86400, 86400])
def test_a_clock_that_jumps_neither_hurries_nor_stops_the_guard(tmp_path, monkeypatch, jump):
    path, said = guarded(tmp_path)
    ahead, seconds = [0.0], [1000.0]
    now = time.time()
    os.utime(path, (now, now))
    monkeypatch.setattr(runner.time, "time", lambda: now + ahead[0])
    monkeypatch.setattr(runner.time, "monotonic", lambda: seconds[0])

    def sleep(length):
        assert not said.exists()
        ahead[0] = jump
        seconds[0] += length

    monkeypatch.setattr(runner.time, "sleep", sleep)
    assert runner.guard(path, 120, 7) == 0
    assert seconds[0] == 1120
    assert said.read_text().split() == ["stop", "start"]


@pytest.mark.parametrize("again", [False, True], ids=["ended", "begun again"])
def test_a_guard_ends_with_its_benchmark(tmp_path, monkeypatch, again):
    path, said = guarded(tmp_path)

    def end(_seconds):
        text = path.read_text()
        path.rename(tmp_path / "old")
        if again:
            path.write_text(text)

    monkeypatch.setattr(runner.time, "sleep", end)
    assert runner.guard(path, 120, 7) == 0
    assert (said.exists(), path.exists()) == (False, again)


# ----------------------------------------------------------------------------------------------------------------- API


def stream(tokens, status="200 OK", together=1):
    """What a server does with each request: it sends so many tokens, once so many requests are there."""
    arrived = threading.Barrier(together)

    def answer(client):
        request = client.recv(1 << 20)
        while not request.endswith(b"}"):
            request += client.recv(1 << 20)
        arrived.wait(20)
        client.sendall(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        for number in range(tokens):
            client.sendall(f'data: {{"content": "{number}", "stop": false}}\n\n'.encode())
        client.sendall(b'data: {"content": "", "stop": true, "timings": {}}\n\n')
        client.close()

    return answer


@pytest.fixture
def served():
    """A plan whose server answers as it is told to."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=16)

    def serve(answer):
        accept(listener, answer)
        own = {"prefix": "/opt/llamacpp", "account": None}
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        head = {"host": "head", "own_url": url, "api_key_file": None, "tls_certificate_file": None}
        return {"head": head, "hosts": {"head": own}}

    yield serve
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_requests_run_at_the_same_time(served, call):
    question = {"prompt": 4, "generated": 10, "vocabulary": 100, "parallel": 4, "seconds": 20}
    speeds = call(state="asked", plan=served(stream(10, together=4)), question=question)["speeds"]
    assert len(speeds["first_s"]) == 4


def test_tokens_are_counted_from_the_first_one_on(served, call, monkeypatch):
    # A clock that moves on by half a second whenever somebody looks at it: at the question, and at each token.
    monkeypatch.setattr(load_test, "time", mock.Mock(monotonic=mock.Mock(side_effect=[half / 2 for half in range(11)])))
    question = {"prompt": 4, "generated": 10, "vocabulary": 100, "parallel": 1, "seconds": 20}
    speeds = call(state="asked", plan=served(stream(10)), question=question)["speeds"]
    assert speeds == {"first_s": [0.5], "tokens_per_s": 2.0}


def test_speeds_of_several_requests_are_those_of_all_together():
    heard = [load_test.Heard(10, 10.5, 12.5, 10), load_test.Heard(10.25, 11, 14.5, 7)]
    assert load_test.speeds_of(heard) == {"first_s": [0.5, 0.75], "tokens_per_s": 3.75}


def test_a_server_that_does_not_answer_as_it_should_is_named(served, call):
    question = {"prompt": 4, "generated": 10, "vocabulary": 100, "parallel": 1, "seconds": 10}
    answer = call(state="asked", plan=served(stream(2)), question=question)
    assert answer["msg"].startswith("the server sent 2 of 10 tokens")


def test_an_error_of_the_server_is_passed_on(served):
    with pytest.raises(Refusal, match="status 400"):
        load_test.ask(served(stream(1, "400 Bad Request")), load_test.Question(1, 1, 9), 1, 10)


def test_prompts_are_random_tokens_of_the_vocabulary():
    body = load_test.body_of(load_test.Question(50, 8, 40))
    assert len(body["prompt"]) == 50
    assert all(load_test.LOWEST_TOKEN <= token < 40 for token in body["prompt"])
    assert body["prompt"] != load_test.body_of(load_test.Question(50, 8, 40))["prompt"]
    assert (body["n_predict"], body["stream"], body["cache_prompt"]) == (8, True, False)


# -------------------------------------------------------------------------------------------------------------- action


class Run(action.ActionModule):
    """The action with a matrix of its own, and a head that answers from a script."""

    def __init__(self, matrix, check=False):
        self.matrix, self._task, self.kept, self.calls = matrix, mock.Mock(args={}, check_mode=check), [], []
        self.fail_at, self.logs, self.still = None, [], []
        self.away, self.serves = [], False

    def _matrix(self, arguments, task_vars):
        return copy.deepcopy(self.matrix)

    def _execute_module(self, module_name=None, module_args=None, task_vars=None, **_rest):
        state = module_args["state"]
        self.calls.append(state)
        if self.away and state == self.away[0]:
            raise AnsibleConnectionFailure(f"no route at the {self.away.pop(0)} one")
        if state == self.fail_at:
            raise RuntimeError("killed")
        if state == "written":
            self.kept = [record for record in self.kept if record["id"] != module_args["record"]["id"]]
            self.kept.insert(0, copy.deepcopy(module_args["record"]))
        if state == "found":
            chosen = [record for record in self.kept if module_args.get("id") in (None, record["id"])]
            listed = [{"id": record["id"], "complete": record["ended"] is not None} for record in self.kept]
            return {"benchmarks": listed, "record": chosen[0] if chosen else None}
        if state == "asked":
            return {"speeds": {"first_s": [0.5], "tokens_per_s": 20.0}}
        if state == "run":
            self.words = re.search(r"ExecStart=(.*)", module_args["definition"])[1]
        if state == "looked":
            return {
                "runs": self.still.pop(0) if self.still else False,
                "serves": self.serves,
                "lines": self.logs.pop(0) if self.logs else written_by(self.words),
            }
        return {"changed": True}


def written_by(words):
    """What llama-bench would write, given its command line."""
    given = dict(re.findall(r'"(-[pnd])" "([\d,]+)"', words))
    lines = []
    for depth in given["-d"].split(","):
        for kind, name in (("-p", "n_prompt"), ("-n", "n_gen")):
            for number in given[kind].split(","):
                if number != "0":
                    row = {
                        "n_prompt": 0,
                        "n_gen": 0,
                        "n_depth": int(depth),
                        "samples_ts": [10.0, 12.0],
                        "avg_ts": 11.0,
                        "stddev_ts": 1.4142,
                        name: int(number),
                    }
                    lines.append(f"1.0000 out {json.dumps(row)}")
    return "\n".join([*lines, "2.0000 run ended with 0"])


@pytest.fixture
def matrix(monkeypatch):
    """Six cells of llama-bench, and two of the API."""
    monkeypatch.setattr(action, "POLL_SECONDS", 0)
    monkeypatch.setattr(action.copying, "run", lambda *_arguments: {"changed": False})
    found = cluster_of(
        **MEASURED, llama_benchmark_parallel=[1], llama_benchmark_depths=[0, 64], llama_benchmark_hosts=[1, 2]
    )
    plan, values, request = planned(found)
    loads, cells = [], benchmark.asked_cells(request, values, plan)
    for setup, own in loads_of(found):
        fresh = benchmark.cells_of(setup, own, LLAMA, None)
        loads.append(action.Load(setup, own, [cell["key"] for cell in fresh], None))
        cells += fresh
    record = {**copy.deepcopy(EXAMPLE), "id": "20261122-160000-0123abcd", "cells": cells, "ended": None, "fits": []}
    models = dict.fromkeys({cell["model"] for cell in cells}, EXAMPLE["models"]["known-answer-16x512-f16"])
    return plan, action.Matrix(request, loads, {**record, "models": models}, 300)


def test_everything_is_measured_and_written(matrix, tmp_path):
    plan, whole = matrix
    run = Run(whole)
    result = run._measured({"plan": plan, "path": str(tmp_path / "new" / "folder")}, {})
    record = result["record"]
    SCHEMA.validate(record)
    assert all(cell["measured"] for cell in record["cells"])
    assert record["ended"]
    assert run.calls.index("asked") < run.calls.index("begun") < run.calls.index("run") < run.calls.index("ended")
    assert run.calls.count("run") == 2, "one load for each number of hosts"
    written = json.loads((tmp_path / "new" / "folder" / "benchmark.json").read_text())
    assert written == record == run.kept[0]
    assert "11.00 ± 1.41" in (tmp_path / "new" / "folder" / "benchmark.md").read_text()
    assert (tmp_path / "new" / "folder" / "benchmark.csv").read_text().count("\n") == 1 + len(record["cells"])


def test_a_run_that_is_cut_off_ends_the_program_and_the_next_one_goes_on(matrix):
    plan, whole = matrix
    run = Run(whole)
    run.logs = [written_by('"-p" "512" "-n" "128" "-d" "0"').replace("2.0000 run ended with 0", "")]
    run.fail_at = "stopped"
    with pytest.raises(RuntimeError):
        run._measured({"plan": plan}, {})
    assert run.calls[-2:] == ["ended", "written"]
    half = copy.deepcopy(run.kept[0])
    assert sum(bool(cell["measured"]) for cell in half["cells"]) == 4
    run.fail_at, run.calls = None, []
    record = run._measured({"plan": plan}, {})["record"]
    assert (record["id"], len(run.kept)) == (half["id"], 1)
    before = {cell["key"]: cell for cell in half["cells"] if cell["measured"]}
    assert all(cell == before.get(cell["key"], cell) for cell in record["cells"])
    assert all(cell["measured"] for cell in record["cells"])
    assert "asked" not in run.calls, "the API's cells were measured already"


def test_a_task_whose_run_was_killed_has_the_server_start_at_once(matrix, monkeypatch):
    plan, whole = matrix
    run, parents = Run(whole), iter([1, 1, 1, 1, 1, 1, 1])
    monkeypatch.setattr(action.os, "getppid", lambda: next(parents, 2))
    with pytest.raises(AnsibleActionFail, match="the run of the playbook was ended"):
        run._measured({"plan": plan}, {})
    assert run.calls[-2:] == ["ended", "written"]


def test_a_head_that_does_not_answer_for_a_while_is_asked_again(matrix):
    plan, whole = matrix
    run = Run(whole)
    run.away = ["looked", "looked", "written", "run", "ended"]
    record = run._measured({"plan": plan}, {})["record"]
    assert all(cell["measured"] for cell in record["cells"])
    assert run.away == []


def test_a_head_that_does_not_come_back_leaves_what_was_measured(matrix, tmp_path):
    plan, whole = matrix
    run = Run(whole)
    run._task.args = {"state": "measured", "plan": plan, "path": str(tmp_path)}
    run.away = ["looked"] * action.MOST_MISSED + ["ended", "written"]
    result = run.run(task_vars={})
    assert result["problem"].startswith(
        "head cannot be reached any more: no route at the ended one. A guard on head starts the server 120 s"
    )
    assert run.calls[-2:] == ["ended", "written"], "once it is known to be away, it is not waited for again"
    SCHEMA.validate(result["record"])
    kept = json.loads((tmp_path / "benchmark.json").read_text())
    assert sum(bool(cell["measured"]) for cell in kept["cells"]) == 2
    page = html_page.page(None, None, None, measurements.benchmark(kept, "it"), None)
    assert "</html>" in page


def test_a_full_disk_of_the_head_leaves_the_record_on_the_controller(matrix, tmp_path, monkeypatch):
    plan, whole = matrix
    run = Run(whole)
    run._task.args = {"state": "measured", "plan": plan, "path": str(tmp_path)}
    answered = run._execute_module

    def full(module_args=None, **rest):
        answer = answered(module_args=module_args, **rest)
        return {"failed": True, "msg": "No space left on device"} if module_args["state"] == "written" else answer

    monkeypatch.setattr(run, "_execute_module", full)
    assert run.run(task_vars={})["problem"] == "written: No space left on device"
    assert json.loads((tmp_path / "benchmark.json").read_text())["id"] == whole.record["id"]


def test_a_server_that_was_started_meanwhile_ends_the_run_and_no_cell_fails(matrix):
    plan, whole = matrix
    run = Run(whole)
    run._task.args = {"state": "measured", "plan": plan}
    run.serves, run.logs = True, ["2.0000 run ended with -15"]
    result = run.run(task_vars={})
    assert "the server of head was started while llama-bench measured" in result["problem"]
    assert not any(cell["skipped"] for cell in result["record"]["cells"])
    assert run.calls.count("run") == 1
    assert "ended" in run.calls


@pytest.mark.parametrize("kept", [0, 1])
def test_a_lease_that_is_lost_ends_the_run_before_it_touches_a_service(matrix, monkeypatch, kept):
    plan, whole = matrix
    run = Run(whole)
    run._task.args = {"state": "measured", "plan": plan}
    lost = {"failed": True, "msg": "This run holds the lease of the cluster no more"}
    answers = iter([{}] * kept)
    monkeypatch.setattr(action.copying, "run", lambda *_arguments: next(answers, lost))
    assert run.run(task_vars={})["problem"] == lost["msg"]
    assert "run" not in run.calls
    assert ("begun" in run.calls) == ("ended" in run.calls) == bool(kept)


def test_what_is_wrong_before_the_beginning_fails_the_task(matrix):
    plan, whole = matrix
    run = Run(whole._replace(request=whole.request._replace(again=("x",))))
    run._task.args = {"state": "measured", "plan": plan}
    with pytest.raises(AnsibleActionFail, match="no benchmark of this matrix was kept"):
        run.run(task_vars={})


def test_a_complete_benchmark_is_followed_by_a_new_one(matrix):
    plan, whole = matrix
    run = Run(whole)
    run._measured({"plan": plan}, {})
    later = whole._replace(record={**whole.record, "id": "20261122-170000-0123abcd"})
    run.matrix = later
    assert run._measured({"plan": plan}, {})["record"]["id"] == later.record["id"]
    assert len(run.kept) == 2


def test_one_cell_is_measured_again_on_request(matrix):
    plan, whole = matrix
    run = Run(whole)
    first = run._measured({"plan": plan}, {})["record"]
    run.calls = []
    run.matrix = whole._replace(request=whole.request._replace(again=("2 hosts/.*/tg128/d64",)))
    second = run._measured({"plan": plan}, {})["record"]
    assert run.calls.count("run") == 1
    assert '"-p" "0" "-n" "128" "-d" "64"' in run.words
    assert second["id"] == first["id"]
    assert len(second["cells"]) == len(first["cells"])


SPOILED = [
    {"key": 7},
    {"measured": {"mean": 1, "deviation": 0, "samples": [0.0], "unit": "t/s"}},
    {"measured": {"mean": 0, "deviation": 0, "samples": [1.0], "unit": "t/s"}},
    {"measured": {"mean": 1, "deviation": 0, "samples": [], "unit": "t/s"}},
    {"measured": {"mean": 1, "deviation": 0, "samples": [1], "unit": "<b>"}},
]


@pytest.mark.parametrize("spoiled", SPOILED)
def test_of_a_record_that_lies_nothing_is_taken_over(matrix, spoiled):
    plan, whole = matrix
    run = Run(whole)
    kept = copy.deepcopy(run._measured({"plan": plan}, {})["record"])
    kept["cells"] = [{**cell, **spoiled} for cell in kept["cells"]]
    kept["cells"][0].pop("key")
    run.kept, run.calls = [{**kept, "ended": None}], []
    record = run._measured({"plan": plan}, {})["record"]
    assert all(cell["measured"]["samples"] for cell in record["cells"])
    assert run.calls.count("run") == 2


LYING = [
    ({"first_s": ["x"], "tokens_per_s": 1.0}, "What head reports of the benchmark is not as"),
    ({"first_s": [0.1], "tokens_per_s": 0.0}, None),
]


@pytest.mark.parametrize("speeds, problem", LYING)
def test_an_answer_without_a_speed_is_none(matrix, monkeypatch, speeds, problem):
    plan, whole = matrix
    run = Run(whole)
    run._task.args = {"state": "measured", "plan": plan}
    answered = run._execute_module
    monkeypatch.setattr(
        run,
        "_execute_module",
        lambda module_args=None, **rest: (
            {"speeds": speeds} if module_args["state"] == "asked" else answered(module_args=module_args, **rest)
        ),
    )
    result = run.run(task_vars={})
    if problem:
        assert problem in result["problem"]
        return
    (cell,) = [cell for cell in result["record"]["cells"] if cell["test"] == "api-tg128"]
    assert cell["skipped"].startswith("no time passed between the first and the last token")


def test_again_without_a_benchmark_is_refused(matrix):
    plan, whole = matrix
    with pytest.raises(Refusal, match="no benchmark of this matrix was kept"):
        Run(whole._replace(request=whole.request._replace(again=("x",))))._measured({"plan": plan}, {})


def test_a_program_that_fails_is_in_the_table_and_the_others_are_measured(matrix):
    plan, whole = matrix
    run = Run(whole)
    run.logs = ["0.1000 err error: unable to load model\n0.2000 run ended with 1"]
    record = run._measured({"plan": plan}, {})["record"]
    failed = [cell for cell in record["cells"] if cell["skipped"]]
    assert len(failed) == 4
    assert {cell["skipped"] for cell in failed} == {"llama-bench ended with status 1: error: unable to load model"}
    assert all(cell["argv"][0].endswith("llama-bench") for cell in failed)
    assert record["ended"]
    SCHEMA.validate(record)


def test_a_program_that_takes_too_long_names_the_limit(matrix):
    plan, whole = matrix
    run = Run(whole._replace(request=whole.request._replace(timeout=0)))
    run.logs = ["0.1000 err loading\n0.2000 run ended with -15"]
    record = run._measured({"plan": plan}, {})["record"]
    (why,) = {cell["skipped"] for cell in record["cells"] if cell["skipped"]}
    assert why == "llama-bench was ended by signal 15: loading (llama_benchmark_timeout is 0, seconds)"


def test_a_program_that_nothing_else_ends_is_stopped_when_its_time_is_over(matrix):
    """supervisor knows no limit."""
    plan, whole = matrix
    run = Run(whole._replace(request=whole.request._replace(timeout=0)))
    run.still, run.logs = [True] * 9, ["0.1000 err loading"] * 9
    record = run._measured({"plan": plan}, {})["record"]
    assert run.calls.count("looked") == run.calls.count("run") == run.calls.count("stopped")
    whys = {cell["skipped"] for cell in record["cells"] if cell["skipped"]}
    assert whys == {"llama-bench was ended: loading (llama_benchmark_timeout is 0, seconds)"}


@pytest.mark.parametrize("listed", [[], ["/srv/other.gguf"]])
def test_a_cluster_that_serves_from_a_hub_is_measured(monkeypatch, listed):
    found = on_the_hub(*listed)
    values = entry.read("llama_cluster", found.hosts)
    plan = make(values, found_on_the_hub(), CATALOGUE, "runtime")
    plan["id"] = "0123456789abcdef"
    run = Run(None)
    asked = []

    def look(module_name=None, module_args=None, **_rest):
        asked.append(module_args["path"])
        return {key: value for key, value in found_on_the_hub().items() if key in ("summary", "closed")}

    monkeypatch.setattr(run, "_execute_module", look)
    monkeypatch.setattr(run, "_look_up_releases", lambda cluster, _catalogue, _vars: cluster, raising=False)
    monkeypatch.setattr(action.inventory, "hosts", lambda *_arguments: ("llama_cluster", found.hosts))
    monkeypatch.setattr(action.inventory, "of_play", lambda _vars: set())
    arguments = {"plan": plan, "facts": {}, "model": found_on_the_hub()}
    matrix = action.ActionModule._matrix(run, arguments, {})
    assert asked == listed
    SCHEMA.validate(matrix.record)
    assert {load.plan["refused"] for load in matrix.loads} == {False}
    assert not [cell["skipped"] for cell in matrix.record["cells"] if cell["skipped"] and cell["parallel"] == 1]
    paths = {name: model["path"] for name, model in matrix.record["models"].items()}
    assert paths == {"b-Q4": HUB, **({"other": "/srv/other.gguf"} if listed else {})}
    measured_paths = {load.plan["model"]["path"] for load in matrix.loads}
    assert measured_paths == set(listed or [HUB])


ELSEWHERE = "https://h.example/n-Q4.gguf"


@pytest.fixture
def from_a_url(monkeypatch):
    """A benchmark of a model that the head does not have yet; the action and its arguments."""
    found = cluster_of(
        "worker1", **MEASURED, llama_benchmark_models=[{"url": [ELSEWHERE]}], llama_benchmark_parallel=[]
    )
    found.hosts["head"]["variables"]["llama_model_token_file"] = "/controller/token"
    plan, _values, _request = planned(found)
    run = Run(None)
    file = {"name": "n-Q4.gguf", "url": ELSEWHERE, "bytes": 1000, "sha256": None, "role": "model"}
    known = {
        "summary": known_answer.summary(16, 128, "f32"),
        "closed": None,
        "source": f"url:{ELSEWHERE}",
        "revision": None,
        "files": [file],
        "sources": [{"role": "model", "source": f"url:{ELSEWHERE}", "revision": None}],
    }
    monkeypatch.setattr(run, "_look_up_releases", lambda cluster, _catalogue, _vars: cluster, raising=False)
    monkeypatch.setattr(action.inventory, "hosts", lambda *_arguments: ("llama_cluster", found.hosts))
    monkeypatch.setattr(action.inventory, "of_play", lambda _vars: set())
    monkeypatch.setattr(run, "_matrix", lambda *arguments: action.ActionModule._matrix(run, *arguments))
    monkeypatch.setattr(action, "POLL_SECONDS", 0)
    monkeypatch.setattr(action.resolver, "found_of", lambda _action, _vars, request, _asked: {**known, "of": request})
    return run, {"state": "measured", "plan": plan, "facts": {}, "model": {}}


@pytest.mark.parametrize("failed", [False, True])
def test_a_model_of_a_url_is_fetched_while_the_server_still_serves(from_a_url, monkeypatch, failed):
    run, arguments = from_a_url
    fetched = []

    def called(_action, _vars, name, given):
        if name.endswith("lease"):
            return {}
        run.calls.append(given["state"])
        fetched.append((name, given))
        return {"failed": True, "msg": "no route to h.example"} if failed else {"changed": True}

    monkeypatch.setattr(action.copying, "run", called)
    run._task.args = arguments
    result = run.run(task_vars={})
    ((name, given),) = fetched
    assert name == "llamacpp.cluster.model"
    assert (given["state"], given["fetched_by"], given["token_file"]) == ("fetched", "head", "/controller/token")
    (file,) = given["files"]
    assert file["url"] == ELSEWHERE
    assert file["path"].startswith(given["folder"] + "/")
    assert result["record"]["models"]["n-Q4"]["path"] == file["path"]
    if failed:
        assert result["problem"] == "n-Q4.gguf cannot be fetched: no route to h.example"
        assert "begun" not in run.calls
        return
    assert run.calls.index("fetched") < run.calls.index("begun")
    SCHEMA.validate(result["record"])
    assert all(cell["measured"] for cell in result["record"]["cells"])
    assert all(file["path"] in cell["argv"] for cell in result["record"]["cells"])


def test_memory_is_that_of_the_longest_test_of_a_load(matrix):
    plan, whole = matrix
    run = Run(whole)
    load = whole.loads[1]
    device = load.plan["placement"][0]["device"]
    whole_log = written_by('"-p" "512" "-n" "128" "-d" "0,64"')
    first = written_by('"-p" "512" "-n" "128" "-d" "0"').replace("2.0000 run ended with 0", "")
    sized = "1.0000 err constructing llama_context\n1.0000 err x: {device} KV buffer size = {mib} MiB\n"
    partial = sized.format(device=device, mib="1.00") + first
    run.logs = [whole_log, partial, partial + sized.format(device=device, mib="2.50") + whole_log]
    run.still = [False, True, False]
    record = run._measured({"plan": plan}, {})["record"]
    sizes = {cell["memory_mib"][0]["measured_mib"] for cell in record["cells"] if cell["key"] in load.keys}
    assert sizes == {2.5}


def test_a_program_that_fails_at_one_depth_leaves_the_others(matrix):
    plan, whole = matrix
    run = Run(whole)
    run.logs = [written_by('"-p" "512" "-n" "128" "-d" "0"').replace("with 0", "with -6")]
    record = run._measured({"plan": plan}, {})["record"]
    failed = [cell for cell in record["cells"] if cell["skipped"]]
    assert {(cell["depth"], cell["skipped"]) for cell in failed} == {
        (64, "llama-bench was ended by signal 6: it said nothing")
    }
    assert len(failed) == 2
    assert record["ended"]


def test_a_run_without_anything_to_measure_stops_nothing(matrix):
    plan, whole = matrix
    cells = [{**cell, "skipped": "it does not fit"} for cell in whole.record["cells"]]
    loads = [load._replace(obstacle="it does not fit") for load in whole.loads]
    run = Run(whole._replace(record={**whole.record, "cells": cells}, loads=loads))
    assert not run._measured({"plan": plan}, {})["changed"]
    assert run.calls == ["found"]


def test_check_mode_measures_nothing(matrix):
    plan, whole = matrix
    run = Run(whole, check=True)
    assert run._measured({"plan": plan}, {})["changed"]
    assert run.calls == ["found"]


def test_a_folder_that_cannot_be_made_is_named(matrix, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AnsibleActionFail, match=r"llama_benchmark_path is .* which cannot be made"):
        action.write(str(tmp_path / "file" / "x"), EXAMPLE)


def test_a_process_outlives_the_module(tmp_path):
    stage.start_detached(["/bin/sh", "-c", f"ps -o sid= -p $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/sid"])
    deadline = time.monotonic() + 10
    while not (tmp_path / "sid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert int((tmp_path / "sid").read_text()) != os.getsid(0)

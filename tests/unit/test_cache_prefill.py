"""Which workers keep tensors, what is put into their caches, and how it gets there."""

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import gguf_files
import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import worker as launcher
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import CachePrefill, PrefillTensor
from ansible_collections.llamacpp.cluster.plugins.modules import cache_prefill as prefill
from conftest import known_answer_of

programs = pytest.mark.programs

SIDE = 2304
"""Of a square matrix of 16-bit floats whose size is above the threshold."""
BYTES = 2 * SIDE * SIDE


@pytest.fixture
def large(pair):
    """A cluster whose model has tensors that caches keep: 68 MiB of 4 layers on two workers."""
    pair.hosts["head"]["variables"]["llama_model_known_answer"] = known_answer_of(4, SIDE, "f16")
    for host in pair.hosts.values():
        host["facts"]["disk_gib"] = 64
    return pair


def workers(plan):
    return {name: worker for name, host in plan["hosts"].items() for worker in host["workers"]}


def test_a_cache_is_on_where_the_disk_has_room(large):
    plan = large.plan()
    for worker in workers(plan).values():
        assert (worker["cache"], worker["cache_why"]) == (True, "the host's disk is large enough")
        assert worker["argv"][-1] == "-c"
        assert worker["environment"]["LLAMA_CACHE"] == "/opt/llamacpp/state/cache/cpu"
    assert [launcher[-2:] for launcher in launchers(plan)] == [["--size", str(BYTES)]] * 2, "of a whole file"


def launchers(plan):
    services = [service for host in plan["hosts"].values() for service in host["services"]]
    return [service["argv"][: service["argv"].index("--")] for service in services if service["kind"] == "worker"]


SMALL = {"known_answer": known_answer_of(4, SIDE, "f16")}
LORA = {"extra_args": ["--lora", "/srv/a.gguf"]}


@pytest.mark.parametrize(
    "auxiliary",
    [
        {"llama_model_draft": "/srv/d.gguf"},
        {"llama_server_extra_args": ["--lora", "/srv/a.gguf"]},
        {
            "llama_model_known_answer": None,
            "llama_models": [{"name": "one", **SMALL}, {"name": "two", **SMALL, **LORA}],
        },
    ],
)
def test_the_launcher_removes_no_tensors_of_auxiliary_models(large, auxiliary):
    large.hosts["head"]["variables"].update(auxiliary)
    assert not [launcher for launcher in launchers(large.plan()) if "--size" in launcher]


@pytest.mark.parametrize(
    "disk, model, why",
    [
        (None, (4, SIDE, "f16"), "the size of the host's disk is unknown"),
        (1, (64, SIDE, "f32"), "the host's disk is smaller than 32 GiB, the size required for this model"),
        (64, (4, 2048, "f16"), "no tensor of the model is larger than 10 MiB"),
    ],
)
def test_a_cache_is_off_where_it_is_useless_or_would_fill_the_disk(large, disk, model, why):
    large.hosts["head"]["variables"]["llama_model_known_answer"] = known_answer_of(*model)
    large.hosts["worker1"]["facts"]["disk_gib"] = disk
    worker = workers(large.plan())["worker1"]
    assert (worker["cache"], worker["cache_why"], worker["prefill"]) == (False, why, None)
    assert "-c" not in worker["argv"]
    assert "LLAMA_CACHE" not in worker["environment"]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_operator_has_the_last_word(large, wanted):
    large.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"cache": wanted}]
    worker = workers(large.plan())["worker1"]
    assert (worker["cache"], bool(worker["prefill"])) == (wanted, wanted)
    assert worker["cache_why"] == "cache is set in llama_worker_endpoints"


def names_of(prefill):
    return cache_prefill.tensor_sizes(typed_json.parse(CachePrefill, prefill).tensors)


def test_each_worker_gets_exactly_its_share(large):
    plan = large.plan()
    prefills = {name: worker["prefill"] for name, worker in workers(plan).items()}
    names = {name: list(names_of(prefill)) for name, prefill in prefills.items()}
    both = names["worker1"] + names["worker2"]
    assert len(both) == len(set(both)) == 4 * 7
    for index, entry in enumerate(plan["placement"]):
        layers = {int(name.split(".")[1]) for name in names[entry["host"]]}
        assert len(layers) == entry["layers"], index
    assert {row["model"] for prefill in prefills.values() for row in prefill["tensors"]} == {plan["model"]["path"]}
    argv = prefills["worker1"]["argv"]
    assert argv[1:] == ["-H", "127.0.0.1", "-d", "CPU", "-c", "-p"]
    assert argv[0] == workers(plan)["worker1"]["argv"][0]


def test_overrides_decide_whose_tensors_are_whose(large):
    variables = large.hosts["head"]["variables"]
    ends = [entry["device"] for entry in large.plan()["placement"]]
    variables["llama_server_override_tensor"] = [r"ffn_up\.weight=" + ends[0], r"blk\.\d\.attn_q\.weight=CPU"]
    plan = large.plan()
    shares = {worker["endpoint"]: names_of(worker["prefill"]) for worker in workers(plan).values()}
    first = next(entry["endpoint"] for entry in plan["placement"] if entry["device"] == ends[0])
    assert [name for name in shares[first] if "ffn_up" in name] == [f"blk.{layer}.ffn_up.weight" for layer in range(4)]
    assert not [name for names in shares.values() for name in names if "attn_q" in name]


def model(folder, seeds, name="model.gguf"):
    """A model file with a large tensor of each seed."""
    tensors = [(f"blk.{index}.ffn_up.weight", (SIDE, SIDE), 1) for index, _seed in enumerate(seeds)]
    data = gguf_files.model(tensors=tensors)
    path = folder / name
    with path.open("wb") as stream:
        stream.write(data[: len(data) - len(seeds) * BYTES])
        for seed in seeds:
            stream.write(bytes([seed]) * BYTES)
    return path


def worker(path, layers, argv=None, **environment):
    program = [sys.executable, str(Path(__file__).with_name("cache_worker.py")), "-H", "127.0.0.1", "-c", "-p"]
    row = PrefillTensor("blk.*.ffn_up.weight", BYTES, tuple(range(layers)), str(path))
    prefill = CachePrefill((row,), tuple(argv or program))
    return cache_prefill.WorkerCache("cpu", {"LLAMA_CACHE": str(path.parent / "cache"), **environment}, prefill)


@programs
def test_a_cache_gets_what_it_lacks_and_the_host_has(tmp_path):
    filled = worker(model(tmp_path, [1, 2, 1]), 3)
    assert cache_prefill.fill_cache(filled, check_mode=True) == 2 * BYTES, "the third is like the first"
    assert not filled.folder.parent.exists()
    assert cache_prefill.fill_cache(filled) == 2 * BYTES
    assert sorted(file.read_bytes()[:1] for file in filled.folder.iterdir()) == [b"\1", b"\2"]
    assert cache_prefill.fill_cache(filled) == 0
    assert launcher.clean_cache(filled.folder, 1 << 40, [BYTES + 1]) == [], "of another model"
    cut = next(filled.folder.iterdir())
    os.truncate(cut, BYTES - 4096)
    assert cache_prefill.fill_cache(filled) == BYTES
    assert cut.stat().st_size == BYTES


def test_a_host_without_the_model_gives_nothing(tmp_path):
    assert cache_prefill.fill_cache(worker(tmp_path / "missing.gguf", 1)) == 0
    assert cache_prefill.missing_tensors(worker(model(tmp_path, [1]), 0)) == [], "others are not of this worker"


def test_a_model_that_cannot_be_read(tmp_path):
    path = model(tmp_path, [1])
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(Refusal, match="is truncated"):
        cache_prefill.fill_cache(worker(path, 1))


@programs
@pytest.mark.parametrize(
    "more, reason",
    [
        ({"FAILS": "1"}, r"program on port \d+ did not start: "),
        ({"VERSION": "9"}, r"uses protocol 9\.0\.0, which is unknown"),
        ({"MEMORY": "1000"}, r"program on port \d+ does not have enough memory for the largest tensor \(10 MiB\)"),
        ({"argv": ["/nowhere"]}, "/nowhere does not run: No such file"),
    ],
)
def test_a_program_that_does_not_take_tensors(tmp_path, more, reason):
    with pytest.raises(Refusal, match=reason):
        cache_prefill.fill_cache(worker(model(tmp_path, [1]), 1, **more))


def test_a_disk_without_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: mock.Mock(free=5 << 20))
    with pytest.raises(Refusal, match=r"has no space for 10 MiB of tensors: 5 MiB are free, and 1024 MiB must stay"):
        cache_prefill.fill_cache(worker(model(tmp_path, [1]), 1))


def test_what_is_no_tensor_of_a_cache_is_left_out(tmp_path):
    path = model(tmp_path, [1])
    filled = worker(path, 1)
    filled.folder.mkdir(parents=True)
    (filled.folder / "0123456789abcdef").write_bytes(bytes(100))
    (filled.folder / ("a" * 16)).symlink_to(path)
    assert len(cache_prefill.missing_tensors(filled)) == 1


@programs
def test_the_module_fills_and_warns(tmp_path, call, monkeypatch):
    path = model(tmp_path, [1])
    planned, failing = (typed_json.dump(one) for one in (worker(path, 1), worker(path, 1, argv=["/nowhere"])))
    warnings = []
    monkeypatch.setattr(AnsibleModule, "warn", lambda _self, text: warnings.append(text))
    assert call(module=prefill, workers=[failing])["changed"] is False
    assert "worker cpu was not filled from the local model: /nowhere does not run" in warnings[0]
    unprepared = call(module=prefill, workers=[planned], account="no-account-yet", check=True)
    assert unprepared["bytes"] == BYTES, "check mode on a host that the run has yet to prepare"
    answer = call(module=prefill, workers=[planned])
    assert (answer["changed"], answer["bytes"]) == (True, BYTES)
    assert call(module=prefill, workers=[planned])["changed"] is False

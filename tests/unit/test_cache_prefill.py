"""Which workers keep tensors, what is put into their caches, and how it gets there."""

import os
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import gguf_files
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import worker as launcher
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import CachePrefill, PrefillTensor
from ansible_collections.llamacpp.cluster.plugins.modules import cache_prefill as prefill
from ansible_collections.llamacpp.cluster.plugins.modules import cache_prefill_info, cache_upload
from cache_worker import CacheWorker
from conftest import known_answer_of
from support.clusters import TREE
from support.hosts import free_port
from test_rpc import Server

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
        assert (worker["cache"], worker["cache_why"]) == (True, "the host's disk has room")
        assert worker["argv"][-1] == "-c"
        assert worker["environment"]["LLAMA_CACHE"] == "/opt/llamacpp/state/cache/cpu"
    assert [launcher[-2:] for launcher in launchers(plan)] == [["--size", str(BYTES)]] * 2, "of a whole file"
    staging = large.plan(staging=True)
    assert not staging["refused"], staging["reasons"]
    for name, worker in workers(staging).items():
        assert (worker["cache"], worker["environment"]) == (True, workers(plan)[name]["environment"])


def launchers(plan):
    services = [service for host in plan["hosts"].values() for service in host["services"]]
    return [service["argv"][: service["argv"].index("--")] for service in services if service["kind"] == "worker"]


@pytest.mark.parametrize(
    "auxiliary",
    [{"llama_model_draft": {"path": "/srv/d.gguf"}}, {"llama_server_extra_args": ["--lora", "/srv/a.gguf"]}],
)
def test_the_launcher_removes_no_tensors_of_auxiliary_models(large, auxiliary):
    large.hosts["head"]["variables"].update(auxiliary)
    assert not [launcher for launcher in launchers(large.plan()) if "--size" in launcher]


@pytest.mark.parametrize(
    "disk, model, why",
    [
        (None, (4, SIDE, "f16"), "the size of the host's disk is not known"),
        (1, (64, SIDE, "f32"), "the host's disk has less than 32 GiB, which is asked for with this model"),
        (64, (4, 2048, "f16"), "no tensor of the model is larger than 10 MiB"),
    ],
)
def test_a_cache_is_off_where_it_is_useless_or_would_fill_the_disk(large, disk, model, why):
    large.hosts["head"]["variables"]["llama_model_known_answer"] = known_answer_of(*model)
    large.hosts["worker1"]["facts"]["disk_gib"] = disk
    worker = workers(large.plan())["worker1"]
    assert (worker["cache"], worker["cache_why"], worker["seed"]) == (False, why, None)
    assert "-c" not in worker["argv"]
    assert "LLAMA_CACHE" not in worker["environment"]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_operator_has_the_last_word(large, wanted):
    large.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"cache": wanted}]
    worker = workers(large.plan())["worker1"]
    assert (worker["cache"], worker["cache_why"]) == (wanted, "llama_worker_endpoints says so")
    assert bool(worker["seed"]) is wanted


BINARY = {**TREE, "source": "binary", "build": 11300}


@pytest.mark.parametrize(
    "release",
    ["b6170", "b8600", "b11500", BINARY],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_caches_are_filled_in_generations_whose_messages_are_known(large, release):
    """A worker whose protocol the plan does not know is asked for it."""
    for host in large.hosts.values():
        host["variables"]["llama_release"] = release
        host["variables"]["llama_accept_advisories"] = ["rpc-vulnerable"]
    for worker in workers(large.plan()).values():
        assert worker["cache"]
        assert worker["seed"]
        assert worker["environment"]["LLAMA_CACHE"] == "/opt/llamacpp/state/cache/cpu"
        assert release is not BINARY or worker["protocol"] is None


def names_of(seed):
    return cache_prefill.names_of(typed_json.parse(CachePrefill, seed).tensors)


def test_each_worker_gets_exactly_its_share(large):
    plan = large.plan()
    seeds = {name: worker["seed"] for name, worker in workers(plan).items()}
    names = {name: list(names_of(seed)) for name, seed in seeds.items()}
    both = names["worker1"] + names["worker2"]
    assert len(both) == len(set(both)) == 4 * 7
    for index, entry in enumerate(plan["placement"]):
        layers = {int(name.split(".")[1]) for name in names[entry["host"]]}
        assert len(layers) == entry["layers"], index
    assert all(seed["bytes"] == len(names[name]) * BYTES for name, seed in seeds.items())
    assert seeds["worker1"]["endpoint"] == "127.0.0.1:50152"
    argv = seeds["worker1"]["argv"]
    assert argv[1:] == ["-H", "127.0.0.1", "-p", "50152", "-d", "CPU", "-c"]
    assert argv[0] == workers(plan)["worker1"]["argv"][0]


def test_overrides_decide_whose_tensors_are_whose(large):
    variables = large.hosts["head"]["variables"]
    ends = [entry["device"] for entry in large.plan()["placement"]]
    variables["llama_server_override_tensor"] = [r"ffn_up\.weight=" + ends[0], r"blk\.\d\.attn_q\.weight=CPU"]
    plan = large.plan()
    seeds = {worker["endpoint"]: names_of(worker["seed"]) for worker in workers(plan).values()}
    first = next(entry["endpoint"] for entry in plan["placement"] if entry["device"] == ends[0])
    assert [name for name in seeds[first] if "ffn_up" in name] == [f"blk.{layer}.ffn_up.weight" for layer in range(4)]
    assert not [name for names in seeds.values() for name in names if "attn_q" in name]


def model(folder, seeds, name="model.gguf", side=SIDE):
    """A model file with a large tensor of each seed."""
    tensors = [(f"blk.{index}.ffn_up.weight", (side, side), 1) for index, _seed in enumerate(seeds)]
    data = gguf_files.model(tensors=tensors)
    header = len(data) - len(seeds) * 2 * side * side
    path = folder / name
    with path.open("wb") as stream:
        stream.write(data[:header])
        for seed in seeds:
            stream.write(bytes([seed]) * (2 * side * side))
    return path


def wanted(path, count):
    row = PrefillTensor("blk.*.ffn_up.weight", BYTES, tuple(range(count)))
    return cache_prefill.describe(str(path), cache_prefill.names_of([row]))


def worker(folder, name="cpu", **environment):
    endpoint = f"127.0.0.1:{free_port()}"
    argv = [
        sys.executable,
        str(Path(__file__).with_name("cache_worker.py")),
        "-H",
        "127.0.0.1",
        "-p",
        endpoint.split(":")[1],
        "-c",
    ]
    environment = {"LLAMA_CACHE": str(folder / name), **environment}
    return cache_prefill.Worker(name, folder / name / "rpc", argv, endpoint, environment, "llama.cpp")


def until(seconds=60):
    return time.monotonic() + seconds


def test_places_are_where_the_bytes_are(tmp_path):
    path = model(tmp_path, [1, 2])
    for value, place in zip((1, 2), gguf.places(str(path)).values()):
        with path.open("rb") as stream:
            stream.seek(place.offset)
            assert stream.read(place.bytes) == bytes([value]) * BYTES


@programs
def test_a_cache_is_filled_from_a_copy_in_as_many_steps_as_there_is_time_for(tmp_path):
    path, filled = model(tmp_path, [1, 2, 1]), worker(tmp_path)
    tensors = wanted(path, 3)
    lacking = cache_prefill.missing(filled, tensors)
    assert len(lacking) == 2, "the third is like the first"
    assert cache_prefill.copies(str(path), lacking) == lacking
    assert cache_prefill.give_here(filled, str(path), lacking, until(0)) == lacking[:1]
    assert cache_prefill.missing(filled, tensors) == lacking[1:]
    assert cache_prefill.give_here(filled, str(path), lacking[1:], until()) == lacking[1:]
    assert cache_prefill.missing(filled, tensors) == []


@programs
def test_a_file_that_was_cut_off_is_written_again(tmp_path):
    path, filled = model(tmp_path, [1]), worker(tmp_path)
    tensors = wanted(path, 1)
    cache_prefill.give_here(filled, str(path), tensors, until())
    (file,) = filled.folder.iterdir()
    os.truncate(file, BYTES - 4096)
    assert cache_prefill.missing(filled, tensors) == tensors
    cache_prefill.give_here(filled, str(path), tensors, until())
    assert file.stat().st_size == BYTES
    assert cache_prefill.missing(filled, tensors) == []


@programs
def test_what_a_cache_beside_it_has_is_linked(tmp_path):
    path, first, second = model(tmp_path, [1, 2]), worker(tmp_path, "one"), worker(tmp_path, "two")
    tensors = wanted(path, 2)
    cache_prefill.give_here(first, str(path), tensors[:1], until())
    assert cache_prefill.link(second, cache_prefill.missing(second, tensors), [first.folder]) == tensors[:1]
    assert cache_prefill.missing(second, tensors) == tensors[1:]
    assert os.path.samefile(*(next(folder.iterdir()) for folder in (first.folder, second.folder)))


def test_another_model_at_the_same_path_is_no_copy(tmp_path):
    path = model(tmp_path, [1, 2])
    (tmp_path / "other").mkdir()
    other = model(tmp_path / "other", [1, 9])
    tensors = wanted(path, 2)
    assert cache_prefill.copies(str(other), tensors) == tensors[:1]
    assert cache_prefill.copies(str(tmp_path / "missing.gguf"), tensors) == []


@pytest.mark.parametrize(
    "prepare, reason",
    [
        (lambda path: path.write_bytes(b"GGUF"), "is not a GGUF file"),
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "is truncated"),
    ],
)
def test_a_model_that_cannot_be_read(tmp_path, prepare, reason):
    path = model(tmp_path, [1])
    prepare(path)
    with pytest.raises(cache_prefill.PrefillError, match=reason):
        wanted(path, 1)


def test_a_model_that_changed_meanwhile(tmp_path):
    path, filled = model(tmp_path, [1]), worker(tmp_path)
    tensors = [wanted(path, 1)[0]._replace(name="blk.7.ffn_up.weight")]
    with pytest.raises(cache_prefill.PrefillError, match=r"has no tensor blk\.7\.ffn_up\.weight"):
        cache_prefill.give_here(filled, str(path), tensors, until())


@programs
def test_a_program_that_ends_or_is_missing(tmp_path):
    path = model(tmp_path, [1])
    with pytest.raises(cache_prefill.PrefillError, match="ended as it started"):
        cache_prefill.give_here(worker(tmp_path, FAILS="1"), str(path), wanted(path, 1), until())
    with pytest.raises(cache_prefill.PrefillError, match="does not run: No such file"):
        cache_prefill.give_here(worker(tmp_path)._replace(argv=["/nowhere"]), str(path), wanted(path, 1), until())


def test_a_disk_without_room(tmp_path, monkeypatch):
    tensors = wanted(model(tmp_path, [1]), 1)
    cache_prefill.check_room(tmp_path / "a" / "b", tensors) if shutil.disk_usage(tmp_path).free > 2 << 30 else None
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: mock.Mock(free=5 << 20))
    with pytest.raises(
        cache_prefill.PrefillError,
        match=r"10 MiB of tensors do not fit into .*, where 5 MiB are free and 1024 MiB stay free",
    ):
        cache_prefill.check_room(tmp_path / "a" / "b", tensors)


@programs
def test_the_head_sends_to_all_workers_at_once_and_one_that_fails_keeps_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_prefill, "SECONDS_TO_START", 1)
    path = model(tmp_path, [1, 2])
    tensors = wanted(path, 2)
    one, two = (Server(CacheWorker((7, 0, 0), folder=tmp_path / name).script) for name in ("one", "two"))
    fork = "llama.cpp"
    nobody = f"127.0.0.1:{free_port()}"
    ends = [f"127.0.0.1:{server.port}" for server in (one, two)]
    answer = cache_prefill.send(
        str(path), [(ends[0], fork, tensors), (ends[1], fork, tensors[1:]), (nobody, fork, tensors)], until()
    )
    assert answer[ends[0]] == tensors
    assert answer[ends[1]] == tensors[1:]
    assert "did not start" in str(answer[nobody])
    assert len(cache_prefill.cached_tensors(tmp_path / "one" / "rpc")) == 2


@pytest.mark.parametrize("fork, version", [("llama.cpp", (9, 0, 0)), ("ik_llama.cpp", (7, 0, 0))])
def test_a_worker_of_a_generation_that_nobody_read(fork, version):
    server = Server(CacheWorker(version).script)
    said = ".".join(map(str, version))
    with pytest.raises(
        cache_prefill.PrefillError, match=f"speaks protocol {said} of {fork}, whose messages are not known"
    ):
        cache_prefill.wait(f"127.0.0.1:{server.port}", fork)


def test_a_folder_with_too_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_prefill, "MOST_FILES", 1)
    for name in "ab":
        (tmp_path / (name * 16)).touch()
    with pytest.raises(cache_prefill.PrefillError, match="has more than 1 files"):
        cache_prefill.cached_tensors(tmp_path)


def test_what_is_no_tensor_of_a_cache_is_left_out(tmp_path):
    (tmp_path / "0123456789abcdef").write_bytes(bytes(100))
    (tmp_path / "model.gguf").write_bytes(bytes(rpc_upload.THRESHOLD + 1))
    (tmp_path / ("a" * 16)).symlink_to(tmp_path / "model.gguf")
    assert cache_prefill.cached_tensors(tmp_path) == {}


def planned_worker(worker, names, name=None):
    seeded = {"fork": "llama.cpp", "argv": worker.argv, "endpoint": worker.endpoint, "tensors": []}
    return {"name": name or worker.name, "environment": dict(worker.environment), "seed": seeded, "names": names}


@programs
def test_the_modules_read_and_fill(tmp_path, call):
    path, filled = model(tmp_path, [1, 2]), worker(tmp_path)
    names = {f"blk.{layer}.ffn_up.weight": BYTES for layer in range(2)}
    tensors = call(module=cache_prefill_info, path=str(path), names=names)["tensors"]
    assert [tensor["name"] for tensor in tensors] == list(names)
    params = {"path": str(path), "tensors": tensors}
    params["workers"] = [planned_worker(filled, list(names))]
    answer = call(module=prefill, check=True, **params)
    assert (answer["changed"], answer["missing"]) == (False, {"cpu": list(names)})
    answer = call(module=prefill, **params)
    assert (answer["changed"], answer["missing"], answer["left_mib"], answer["why"]) == (True, {"cpu": []}, 0, [])
    assert answer["copied_mib"] == 2 * BYTES // (1 << 20)
    assert call(module=prefill, **params)["changed"] is False
    other = worker(tmp_path, "beside")
    params["workers"].append(planned_worker(other, list(names)))
    answer = call(module=prefill, **params)
    assert (answer["linked_mib"], answer["missing"]["beside"]) == (2 * BYTES // (1 << 20), [])


@programs
def test_the_launcher_of_another_model_leaves_what_was_filled(tmp_path, call):
    path, filled = model(tmp_path, [1]), worker(tmp_path)
    tensors = [tensor._asdict() for tensor in wanted(path, 1)]
    params = {"path": str(path), "tensors": tensors}
    params["workers"] = [planned_worker(filled, [tensors[0]["name"]])]
    call(module=prefill, check=True, **params)
    assert not filled.folder.parent.exists()
    assert call(module=prefill, **params)["missing"] == {"cpu": []}
    assert launcher.remove_cut(filled.folder, [BYTES + 1]) == []


@programs
def test_the_module_sends_and_names_what_failed(tmp_path, call, monkeypatch):
    monkeypatch.setattr(cache_prefill, "SECONDS_TO_START", 0.5)
    path = model(tmp_path, [1])
    tensors = [tensor._asdict() for tensor in wanted(path, 1)]
    server = Server(CacheWorker((7, 0, 0), folder=tmp_path).script)
    ends = [f"127.0.0.1:{port}" for port in (server.port, free_port())]
    targets = [{"endpoint": end, "fork": "llama.cpp", "names": [tensors[0]["name"]]} for end in ends]
    answer = call(module=cache_upload, path=str(path), tensors=tensors, targets=targets)
    assert answer["given"] == {ends[0]: [tensors[0]["name"]], ends[1]: []}
    assert answer["why"] == [
        f"The head does not fill a cache: the worker at {ends[1]} did not start: nothing listens there."
    ]


@programs
def test_the_modules_report_why_a_cache_is_not_filled(tmp_path, call, monkeypatch):
    path = model(tmp_path, [1])
    missing = str(tmp_path / "missing.gguf")
    why = call(module=cache_prefill_info, path=missing, names={"x": BYTES})["why"]
    assert why == [f"No cache is filled before the head loads: {missing} cannot be read: No such file or directory."]
    tensors = [tensor._asdict() for tensor in wanted(path, 1)]
    params = {"path": str(path), "tensors": tensors}
    failing = planned_worker(worker(tmp_path, FAILS="1"), [tensors[0]["name"]])
    answer = call(module=prefill, workers=[failing], **params)
    assert answer["missing"] == {"cpu": [tensors[0]["name"]]}
    assert "The cache of the worker cpu is not filled from this host: " in answer["why"][0]
    monkeypatch.setattr(cache_prefill, "link", mock.Mock(side_effect=OSError(28, "No space left on device")))
    assert "No space left on device" in call(module=prefill, workers=[failing], **params)["why"][0]
    monkeypatch.setattr(commands, "work_as", mock.Mock(side_effect=RuntimeError("KeyError: 'x'")))
    assert (
        call(module=prefill, workers=[failing], **params)["msg"]
        == "the caches of workers are not filled: KeyError: 'x'"
    )

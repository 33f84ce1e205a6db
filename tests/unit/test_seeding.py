"""Which workers keep tensors, what is put into their caches, and how it gets there."""

import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from unittest import mock

import gguf_files
import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import worker as launcher
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf
from ansible_collections.llamacpp.cluster.plugins.modules import seed
from cache_worker import CacheWorker
from conftest import known_answer_of
from test_rpc import Server

pytestmark = pytest.mark.programs

SIDE = 2304
"""Of a square matrix of 16-bit floats whose size is above the threshold."""
BYTES = 2 * SIDE * SIDE


@pytest.fixture
def large(pair):
    """A cluster whose model has tensors that caches keep: 68 MiB of 4 layers on two workers."""
    pair.hosts["head"]["variables"]["llama_model_known_answer"] = known_answer_of(4, SIDE, "f16")
    for given in pair.hosts.values():
        given["facts"]["disk_gib"] = 64
    return pair


def workers(plan):
    return {name: worker for name, given in plan["hosts"].items() for worker in given["workers"]}


def test_a_cache_is_on_where_the_disk_has_room(large):
    for worker in workers(large.plan()).values():
        assert (worker["cache"], worker["cache_why"]) == (True, "the host's disk has room")
        assert worker["argv"][-1] == "-c"
        assert worker["environment"]["LLAMA_CACHE"] == "/opt/llamacpp/state/cache/cpu"


def test_the_launcher_knows_how_large_a_whole_file_is(large):
    for given in large.plan()["hosts"].values():
        for service in given["services"]:
            if service["kind"] == "worker":
                launcher = service["argv"][: service["argv"].index("--")]
                assert launcher[-2:] == ["--size", str(BYTES)]


@pytest.mark.parametrize(
    "further", [{"llama_model_draft": {"path": "/srv/d.gguf"}}, {"llama_server_extra_args": ["--lora", "/srv/a.gguf"]}]
)
def test_the_launcher_removes_no_tensors_of_further_models(large, further):
    large.hosts["head"]["variables"].update(further)
    for given in large.plan()["hosts"].values():
        assert not [service for service in given["services"] if "--size" in service["argv"]]


@pytest.mark.parametrize(
    "disk, size, why",
    [
        (None, 4, "the size of the host's disk is not known"),
        (1, 64, "the host's disk has less than 32 GiB, which is asked for with this model"),
    ],
)
def test_a_cache_is_off_where_it_would_fill_the_disk(large, disk, size, why):
    large.hosts["head"]["variables"]["llama_model_known_answer"] = known_answer_of(
        size, SIDE, "f32" if size > 4 else "f16"
    )
    large.hosts["worker1"]["facts"]["disk_gib"] = disk
    worker = workers(large.plan())["worker1"]
    assert (worker["cache"], worker["cache_why"], worker["seed"]) == (False, why, None)
    assert "-c" not in worker["argv"]
    assert "LLAMA_CACHE" not in worker["environment"]


def test_a_small_model_needs_no_cache_and_nothing_is_put_there(large):
    large.hosts["head"]["variables"]["llama_model_known_answer"] = known_answer_of(4, 2048, "f16")
    for worker in workers(large.plan()).values():
        assert (worker["cache"], worker["seed"]) == (False, None)
        assert worker["cache_why"] == "no tensor of the model is larger than 10 MiB"


@pytest.mark.parametrize("wanted", [True, False])
def test_the_operator_has_the_last_word(large, wanted):
    large.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"cache": wanted}]
    worker = workers(large.plan())["worker1"]
    assert (worker["cache"], worker["cache_why"]) == (wanted, "llama_worker_endpoints says so")
    assert bool(worker["seed"]) is wanted


def test_a_release_without_a_cache(large):
    for given in large.hosts.values():
        given["variables"]["llama_release"] = {"source": "git", "ref": "b4900"}
        given["variables"]["llama_accept_advisories"] = ["rpc-vulnerable"]
    plan = large.plan()
    for worker in workers(plan).values():
        assert (worker["cache"], worker["cache_why"]) == (False, "rpc-server of this release has none")


@pytest.mark.parametrize(
    "ref, seeded",
    [("b5200", True), ("b8600", True), ("b9000", True), ("b10300", True), ("b11500", True), ("b5160", False)],
)
def test_a_cache_is_filled_in_generations_that_were_read(large, ref, seeded):
    for given in large.hosts.values():
        given["variables"]["llama_release"] = {"source": "git", "ref": ref}
    for worker in workers(large.plan()).values():
        assert worker["cache"]
        assert bool(worker["seed"]) is seeded


def test_each_worker_gets_exactly_its_share(large):
    plan = large.plan()
    seeds = {name: worker["seed"] for name, worker in workers(plan).items()}
    names = {name: list(cache_prefill.names_of(seed["tensors"])) for name, seed in seeds.items()}
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
    seeds = {worker["endpoint"]: cache_prefill.names_of(worker["seed"]["tensors"]) for worker in workers(plan).values()}
    first = next(entry["endpoint"] for entry in plan["placement"] if entry["device"] == ends[0])
    assert [name for name in seeds[first] if "ffn_up" in name] == [f"blk.{layer}.ffn_up.weight" for layer in range(4)]
    assert not [name for names in seeds.values() for name in names if "attn_q" in name]


def test_the_instances_that_prove_a_release_share_the_cache_of_the_model_that_is_served(large):
    staging = large.plan(staging=True)
    assert not staging["refused"], staging["reasons"]
    for worker in workers(staging).values():
        assert worker["cache"]
        assert worker["argv"][-1] == "-c"
        assert worker["environment"]["LLAMA_CACHE"] == "/opt/llamacpp/state/cache/cpu"


def test_a_cache_outlives_a_release(large):
    before = large.plan()
    for given in large.hosts.values():
        given["variables"]["llama_release"] = {"source": "git", "ref": "b8600"}
    after = large.plan()
    for name, worker in workers(before).items():
        other = workers(after)[name]
        assert other["argv"][0] != worker["argv"][0]
        assert other["environment"]["LLAMA_CACHE"] == worker["environment"]["LLAMA_CACHE"]


def test_the_size_of_a_disk_is_rounded_so_that_it_stays_the_same(tmp_path):
    def disk(size):
        with mock.patch.object(os, "statvfs", return_value=mock.Mock(f_blocks=size, f_frsize=1)):
            return host.disk_gib(str(tmp_path / "missing"))

    assert [disk(gib << 30) for gib in (0, 1, 3, 511, 512, 1000)] == [0, 1, 2, 256, 512, 512]
    with mock.patch.object(os, "statvfs", side_effect=OSError):
        assert host.disk_gib("/") is None


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
    rows = [{"name": "blk.*.ffn_up.weight", "bytes": BYTES, "layers": list(range(count))}]
    return cache_prefill.describe(str(path), cache_prefill.names_of(rows))


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


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


def test_a_cache_is_filled_from_a_copy_and_a_second_time_nothing_is_done(tmp_path):
    path, filled = model(tmp_path, [1, 2, 1]), worker(tmp_path)
    tensors = wanted(path, 3)
    lacking = cache_prefill.missing(filled, tensors)
    assert len(lacking) == 2  # the third is like the first
    own = cache_prefill.copies(str(path), lacking)
    assert own == lacking
    assert cache_prefill.give_here(filled, str(path), own, until()) == lacking
    assert cache_prefill.missing(filled, tensors) == []


def test_it_stops_when_its_time_is_over_and_goes_on_there(tmp_path):
    path, filled = model(tmp_path, [1, 2, 3]), worker(tmp_path)
    tensors = wanted(path, 3)
    assert len(cache_prefill.give_here(filled, str(path), tensors, until(0))) == 1
    left = cache_prefill.missing(filled, tensors)
    assert left == tensors[1:]
    cache_prefill.give_here(filled, str(path), left, until())
    assert cache_prefill.missing(filled, tensors) == []


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


def test_what_a_cache_beside_it_has_is_linked(tmp_path):
    path, first, second = model(tmp_path, [1, 2]), worker(tmp_path, "one"), worker(tmp_path, "two")
    tensors = wanted(path, 2)
    cache_prefill.give_here(first, str(path), tensors[:1], until())
    assert cache_prefill.link(second, cache_prefill.missing(second, tensors), [first.folder]) == tensors[:1]
    assert cache_prefill.missing(second, tensors) == tensors[1:]
    assert os.path.samefile(*(next(folder.iterdir()) for folder in (first.folder, second.folder)))


def test_a_link_replaces_a_file_that_was_cut_off(tmp_path):
    path, first, second = model(tmp_path, [1]), worker(tmp_path, "one"), worker(tmp_path, "two")
    tensors = wanted(path, 1)
    cache_prefill.give_here(first, str(path), tensors, until())
    (file,) = first.folder.iterdir()
    second.folder.mkdir(parents=True)
    (second.folder / file.name).write_bytes(bytes(20 * 1024 * 1024))
    cache_prefill.link(second, tensors, [first.folder])
    assert cache_prefill.missing(second, tensors) == []


def test_another_model_at_the_same_path_is_no_copy(tmp_path):
    path = model(tmp_path, [1, 2])
    (tmp_path / "other").mkdir()
    other = model(tmp_path / "other", [1, 9])
    tensors = wanted(path, 2)
    assert cache_prefill.copies(str(other), tensors) == tensors[:1]
    assert cache_prefill.copies(str(tmp_path / "missing.gguf"), tensors) == []


@pytest.mark.parametrize(
    "prepare, said",
    [
        (lambda path: path.write_bytes(b"GGUF"), "is not a GGUF file"),
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "is truncated"),
    ],
)
def test_a_model_that_cannot_be_read(tmp_path, prepare, said):
    path = model(tmp_path, [1])
    prepare(path)
    with pytest.raises(cache_prefill.SeedError, match=said):
        wanted(path, 1)


def test_a_model_that_changed_meanwhile(tmp_path):
    path, filled = model(tmp_path, [1]), worker(tmp_path)
    tensors = [wanted(path, 1)[0]._replace(name="blk.7.ffn_up.weight")]
    with pytest.raises(cache_prefill.SeedError, match=r"has no tensor blk\.7\.ffn_up\.weight"):
        cache_prefill.give_here(filled, str(path), tensors, until())


def test_a_program_that_ends_or_is_missing(tmp_path):
    path = model(tmp_path, [1])
    with pytest.raises(cache_prefill.SeedError, match="ended as it started"):
        cache_prefill.give_here(worker(tmp_path, FAILS="1"), str(path), wanted(path, 1), until())
    with pytest.raises(cache_prefill.SeedError, match="does not run: No such file"):
        cache_prefill.give_here(worker(tmp_path)._replace(argv=["/nowhere"]), str(path), wanted(path, 1), until())


def test_a_worker_that_does_not_start(monkeypatch):
    monkeypatch.setattr(cache_prefill, "SECONDS_TO_START", 0)
    with pytest.raises(cache_prefill.SeedError, match="did not start: nothing listens there"):
        cache_prefill.wait(f"127.0.0.1:{free_port()}", "llama.cpp")


def test_a_disk_without_room(tmp_path, monkeypatch):
    tensors = wanted(model(tmp_path, [1]), 1)
    cache_prefill.check_room(tmp_path / "a" / "b", tensors) if shutil.disk_usage(tmp_path).free > 2 << 30 else None
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: mock.Mock(free=5 << 20))
    with pytest.raises(
        cache_prefill.SeedError,
        match=r"10 MiB of tensors do not fit into .*, where 5 MiB are free and 1024 MiB stay free",
    ):
        cache_prefill.check_room(tmp_path / "a" / "b", tensors)


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
        cache_prefill.SeedError, match=f"speaks protocol {said} of {fork}, whose messages are not known"
    ):
        cache_prefill.wait(f"127.0.0.1:{server.port}", fork)


def test_where_the_plan_does_not_know_the_protocol_the_worker_says_it(large):
    for given in large.hosts.values():
        release = {
            "source": "binary",
            "url": "https://192.0.2.1/b.tar.gz",
            "checksum": "sha256:" + "b" * 64,
            "build": 11300,
        }
        given["variables"]["llama_release"] = release
    for worker in workers(large.plan()).values():
        assert worker["protocol"] is None
        assert worker["seed"]


def test_a_folder_with_too_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_prefill, "MOST_FILES", 1)
    for name in "ab":
        (tmp_path / (name * 16)).touch()
    with pytest.raises(cache_prefill.SeedError, match="has more than 1 files"):
        cache_prefill.cached_tensors(tmp_path)


def test_what_is_no_tensor_of_a_cache_is_left_out(tmp_path):
    (tmp_path / "0123456789abcdef").write_bytes(bytes(100))
    (tmp_path / "model.gguf").write_bytes(bytes(rpc_upload.THRESHOLD + 1))
    (tmp_path / ("a" * 16)).symlink_to(tmp_path / "model.gguf")
    assert cache_prefill.cached_tensors(tmp_path) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work as another account")
def test_root_does_it_as_the_account(monkeypatch):
    seen = commands.work_as("nobody", lambda: {"user": os.getuid(), "groups": os.getgroups()})
    assert seen["user"] != 0
    assert 0 not in seen["groups"]
    with pytest.raises(RuntimeError, match="PermissionError"):
        commands.work_as("nobody", lambda: {"text": Path("/etc/shadow").read_text()})
    with pytest.raises(KeyError):
        commands.work_as("no-such-account", dict)
    assert commands.work_as(None, lambda: json.loads('{"a": 1}')) == {"a": 1}
    with pytest.raises(RuntimeError, match=r"TypeError: .* is not JSON serializable"):
        commands.work_as("nobody", lambda: {"text": b""})
    monkeypatch.setattr(commands.json, "dumps", lambda _result: '{"result": {"cut')
    with pytest.raises(RuntimeError, match="the process ended"):
        commands.work_as("nobody", dict)


def test_an_exception_has_one_type_whether_the_account_changes_or_not():
    with pytest.raises(RuntimeError, match="ZeroDivisionError: "):
        commands.work_as(None, lambda: {"value": 1 // 0})


@pytest.mark.parametrize("account", [None, *(["nobody"] if os.geteuid() == 0 else [])])
def test_a_refusal_stays_a_sentence(account):
    with pytest.raises((RuntimeError, Refusal), match=r"^the disk does not answer$"):
        commands.work_as(account, mock.Mock(side_effect=Refusal("the disk does not answer")))


@pytest.fixture
def call(monkeypatch):
    """Runs the module."""

    def run(check=False, **params):
        results = []

        def end(_module, **result):
            results.append(result)
            raise SystemExit

        monkeypatch.setattr(seed.AnsibleModule, "exit_json", end)
        monkeypatch.setattr(
            seed.AnsibleModule, "fail_json", lambda module, **result: end(module, failed=True, **result)
        )
        with patch_module_args({**params, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            seed.main()
        return results[0]

    return run


def given_worker(worker, names, name=None):
    seeded = {"fork": "llama.cpp", "argv": worker.argv, "endpoint": worker.endpoint, "tensors": []}
    return {"name": name or worker.name, "environment": dict(worker.environment), "seed": seeded, "names": names}


def test_the_module_describes_fills_and_sends(tmp_path, call):
    path, filled = model(tmp_path, [1, 2]), worker(tmp_path)
    names = {f"blk.{layer}.ffn_up.weight": BYTES for layer in range(2)}
    tensors = call(state="described", path=str(path), names=names)["tensors"]
    assert [tensor["name"] for tensor in tensors] == list(names)
    params = {"state": "filled", "path": str(path), "tensors": tensors, "seconds": 60}
    params["workers"] = [given_worker(filled, list(names))]
    answer = call(check=True, **params)
    assert (answer["changed"], answer["missing"]) == (False, {"cpu": list(names)})
    answer = call(**params)
    assert (answer["changed"], answer["missing"], answer["left_mib"], answer["why"]) == (True, {"cpu": []}, 0, [])
    assert answer["copied_mib"] == 2 * BYTES // (1 << 20)
    assert call(**params)["changed"] is False
    other = worker(tmp_path, "beside")
    params["workers"].append(given_worker(other, list(names)))
    answer = call(**params)
    assert (answer["linked_mib"], answer["missing"]["beside"]) == (2 * BYTES // (1 << 20), [])


def test_the_launcher_of_another_model_leaves_what_was_filled(tmp_path, call):
    path, filled = model(tmp_path, [1]), worker(tmp_path)
    tensors = [tensor._asdict() for tensor in wanted(path, 1)]
    params = {"state": "filled", "path": str(path), "tensors": tensors, "seconds": 60}
    params["workers"] = [given_worker(filled, [tensors[0]["name"]])]
    call(check=True, **params)
    assert not filled.folder.parent.exists()
    assert call(**params)["missing"] == {"cpu": []}
    assert launcher.remove_cut(filled.folder, [BYTES + 1]) == []


def test_the_module_sends_and_says_what_failed(tmp_path, call, monkeypatch):
    monkeypatch.setattr(cache_prefill, "SECONDS_TO_START", 0.5)
    path = model(tmp_path, [1])
    tensors = [tensor._asdict() for tensor in wanted(path, 1)]
    server = Server(CacheWorker((7, 0, 0), folder=tmp_path).script)
    ends = [f"127.0.0.1:{port}" for port in (server.port, free_port())]
    targets = [{"endpoint": end, "fork": "llama.cpp", "names": [tensors[0]["name"]]} for end in ends]
    answer = call(state="sent", path=str(path), tensors=tensors, targets=targets, seconds=60)
    assert answer["given"] == {ends[0]: [tensors[0]["name"]], ends[1]: []}
    assert answer["why"] == [
        f"The head does not fill a cache: the worker at {ends[1]} did not start: nothing listens there."
    ]


def test_the_module_says_why_a_cache_is_not_filled(tmp_path, call, monkeypatch):
    path = model(tmp_path, [1])
    missing = str(tmp_path / "missing.gguf")
    why = call(state="described", path=missing, names={"x": BYTES})["why"]
    assert why == [f"No cache is filled before the head loads: {missing} cannot be read: No such file or directory."]
    tensors = [tensor._asdict() for tensor in wanted(path, 1)]
    params = {"state": "filled", "path": str(path), "tensors": tensors}
    failing = given_worker(worker(tmp_path, FAILS="1"), [tensors[0]["name"]])
    answer = call(workers=[failing], **params)
    assert answer["missing"] == {"cpu": [tensors[0]["name"]]}
    assert "The cache of the worker cpu is not filled from this host: " in answer["why"][0]
    monkeypatch.setattr(cache_prefill, "link", mock.Mock(side_effect=OSError(28, "No space left on device")))
    assert "No space left on device" in call(workers=[failing], **params)["why"][0]
    monkeypatch.setattr(commands, "work_as", mock.Mock(side_effect=RuntimeError("KeyError: 'x'")))
    assert call(workers=[failing], **params)["msg"] == "the caches of workers are not filled: KeyError: 'x'"

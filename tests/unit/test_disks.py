"""How fast the head's disk is read, and what a plan makes of it: the load mode, the predicted load, and how long a run waits."""

import errno
import math
import mmap
import os
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import disks, host
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import entry, rollback, speed
from test_advisories import spark, vulkan_head

linux = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct I/O is of Linux")
MIB = 1 << 20


@pytest.fixture
def small(monkeypatch):
    """Measures with little, so that tests take no time; of so few pages the kernel may keep most for seconds."""
    monkeypatch.setattr(disks, "OWN_BYTES", 4 * MIB)
    monkeypatch.setattr(disks, "LEAST_BYTES", 2 * MIB)
    monkeypatch.setattr(disks, "PIECE", MIB)
    monkeypatch.setattr(disks, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(disks, "_resident", lambda *_: 0)


@linux
def test_a_file_of_ours_is_measured_and_leaves_nothing(small, tmp_path):
    found = disks.measured(f"{tmp_path}/later/model.gguf")
    assert found["folder"] == f"{tmp_path}/later"
    assert found["mapped_gb_per_s"] > 0
    assert found["direct_gb_per_s"] is None or found["direct_gb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@linux
def test_the_model_itself_is_measured_where_it_is_there(small, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "blob.gguf").write_bytes(os.urandom(3 * MIB))
    (tmp_path / "link.gguf").symlink_to(tmp_path / "elsewhere" / "blob.gguf")
    opened = []
    monkeypatch.setattr(
        disks, "_resident", lambda file, _size: opened.append(os.readlink(f"/proc/self/fd/{file}")) or 0
    )
    assert disks.measured(f"{tmp_path}/link.gguf")["folder"] == str(tmp_path)
    assert opened == [str(tmp_path / "elsewhere" / "blob.gguf")]


@linux
def test_a_model_that_stays_in_memory_is_not_measured(small, tmp_path, monkeypatch):
    """As that of a server that has it mapped; then a file of ours is."""
    (tmp_path / "model.gguf").write_bytes(bytes(3 * MIB))
    opened = []

    def resident(file, _size):
        opened.append(os.readlink(f"/proc/self/fd/{file}"))
        return disks.RESIDENT + 1 if opened[-1].endswith("model.gguf") else 0

    monkeypatch.setattr(disks, "_resident", resident)
    assert disks.measured(f"{tmp_path}/model.gguf")
    assert [name.endswith("model.gguf") for name in opened] == [True, True, False]
    monkeypatch.setattr(disks, "_resident", lambda *_: disks.SAMPLES)
    assert disks.measured(f"{tmp_path}/model.gguf") is None


@linux
def test_pages_that_the_kernel_keeps_for_a_moment_are_waited_for(small, tmp_path, monkeypatch):
    looks = iter([disks.SAMPLES, 0])
    monkeypatch.setattr(disks, "_resident", lambda *_: next(looks))
    assert disks.measured(f"{tmp_path}/later/model.gguf")
    assert next(looks, None) is None


@linux
def test_pages_in_memory_are_seen(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    with path.open("rb") as stream:
        stream.read()
        try:
            os.preadv(stream.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as error:
            pytest.skip(f"this file system does not say it: {error}")
        assert disks._resident(stream.fileno(), MIB) == disks.SAMPLES


@linux
def test_without_room_permission_or_direct_io(small, tmp_path, monkeypatch):
    def refuse(*_arguments, **_others):
        raise OSError(errno.EINVAL, "Invalid argument")

    direct = os.open
    monkeypatch.setattr(
        disks.os, "open", lambda path, flags, *more: refuse() if flags & os.O_DIRECT else direct(path, flags, *more)
    )
    assert disks.measured(f"{tmp_path}/model.gguf")["direct_gb_per_s"] is None
    monkeypatch.undo()
    monkeypatch.setattr(disks, "OWN_BYTES", 1 << 60)
    assert disks.measured(f"{tmp_path}/model.gguf") is None
    monkeypatch.setattr(disks, "OWN_BYTES", MIB)
    monkeypatch.setattr(disks.tempfile, "TemporaryFile", refuse)
    assert disks.measured(f"{tmp_path}/model.gguf") is None
    monkeypatch.delattr(disks.os, "O_DIRECT")
    assert disks.measured(f"{tmp_path}/model.gguf") is None


@linux
def test_what_cannot_be_measured_is_no_error(small, tmp_path, monkeypatch):
    for path in (f"{tmp_path}/\0/model.gguf", f"{tmp_path}/\ud800/model.gguf", "model.gguf", ""):
        assert disks.measured(path) is None
    (tmp_path / "model.gguf").write_bytes(os.urandom(3 * MIB))
    monkeypatch.setattr(disks, "_resident", lambda *_: os.truncate(tmp_path / "model.gguf", 1) or 0)
    assert disks.measured(f"{tmp_path}/model.gguf") is None, "it became shorter meanwhile"
    monkeypatch.delattr(disks.os, "RWF_NOWAIT", raising=False)
    monkeypatch.setattr(disks.tempfile, "TemporaryFile", lambda **_others: pytest.fail("nothing is to be written"))
    assert disks.measured(f"{tmp_path}/later/model.gguf") is None


def test_a_slow_disk_is_read_for_some_seconds_alone(monkeypatch):
    now, read = [0.0], []
    monkeypatch.setattr(disks.time, "monotonic", lambda: now[0])

    def piece(offset):
        read.append(offset)
        now[0] += 1.0

    rate = disks._rate(disks.BYTES, piece)
    assert (len(read), rate) == (disks.SECONDS, pytest.approx(disks.PIECE / 1e9))
    assert mmap.PAGESIZE <= disks.PIECE


@pytest.mark.programs
def test_only_the_head_measures_and_only_when_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(host.disks, "measured", lambda model: asked.append(model) or {"folder": "x"})
    monkeypatch.setattr(host.speeds, "measured", dict)
    assert host.facts("user", measure=True)["disk"] is None
    assert host.facts("user", model="/srv/m.gguf")["disk"] is None
    assert host.facts("user", measure=True, model="/srv/m.gguf")["disk"] == {"folder": "x"}
    host.facts("user", measure=True, model="")
    assert asked[0] == "/srv/m.gguf"
    assert asked[1].endswith("/models/model")


def disk(mapped, direct, folder="/opt/llamacpp/models"):
    return {"folder": folder, "mapped_gb_per_s": mapped, "direct_gb_per_s": direct}


def planned(pair, measured, **variables):
    pair.hosts["head"]["facts"]["disk"] = measured
    pair.hosts["head"]["variables"].update(variables)
    return pair.plan()


@pytest.mark.parametrize(
    "measured, mode, rate",
    [
        (None, None, speed.DISK_GB_PER_S),
        (disk(2.0, 6.04), "dio", 6.0),
        (disk(2.0, 2.3), None, 2.0),
        (disk(3.0, 1.0), None, 3.0),
        (disk(3.0, None), None, 3.0),
        (disk(2.0, 6.0, "/srv"), None, speed.DISK_GB_PER_S),
        (disk(2.0, 6.0, "/opt/llamacpp/mod"), None, speed.DISK_GB_PER_S),
        (disk(0, 6.0), None, speed.DISK_GB_PER_S),
    ],
)
def test_the_faster_way_to_read_the_disk_is_planned(pair, measured, mode, rate):
    plan = planned(pair, measured)
    assert (plan["head"]["load_mode"], "dio" in plan["head"]["argv"]) == (mode, mode == "dio")
    assert plan["estimate"]["disk"] == {"gb_per_s": rate, "measured": rate != speed.DISK_GB_PER_S}


@pytest.mark.parametrize("folder", ["/srv/Bob's models", "/srv/#1 50%", "/srv/$x;y"])
def test_the_disk_of_a_model_whose_folder_has_any_name(pair, big_model, folder):
    for name in pair.hosts:
        pair.hosts[name]["facts"]["memory_mib"] = 65536
    pair.model = {"summary": big_model, "closed": None}
    models = {"llama_model_known_answer": None, "llama_model_path": f"{folder}/big.gguf"}
    plan = planned(pair, disk(1.0, None, folder), **models)
    assert plan["estimate"]["disk"] == {"gb_per_s": 1.0, "measured": True}, plan["reasons"]


def test_an_operator_and_traps_come_first(pair):
    plan = planned(pair, disk(1.0, 9.0), llama_server_load_mode="mmap")
    assert (plan["head"]["load_mode"], plan["estimate"]["disk"]["gb_per_s"]) == ("mmap", 1.0)
    for cluster, head, expected in ((vulkan_head(30), "strix0", None), (spark(), "head", "none")):
        path = cluster.hosts[head]["variables"]["llama_model_path"]
        cluster.hosts[head]["facts"]["disk"] = disk(1.0, 9.0, str(Path(path).parent))
        plan = cluster.plan()
        assert (plan["head"]["load_mode"], plan["estimate"]["disk"]["gb_per_s"]) == (expected, 1.0)


def test_a_release_without_direct_io_keeps_its_default(pair):
    for entry_of in pair.hosts.values():
        entry_of["variables"]["llama_release"] = "b6110"
    assert planned(pair, disk(1.0, 9.0))["head"]["load_mode"] is None


def test_a_measured_disk_is_rounded_and_kept(pair):
    first, second = (planned(pair, disk(rate, 9.0)) for rate in (1.234, 1.244))
    assert first["head"] == second["head"]
    assert first["estimate"] == second["estimate"]
    before = {"disk": disk(1.0, 9.0), "rates": None}
    assert entry.with_kept_rates({"disk": None, "rates": {"CPU": 1}}, before) == {
        "disk": disk(1.0, 9.0),
        "rates": {"CPU": 1},
    }


@pytest.mark.parametrize("odd", [1, {"folder": "x"}, disk(-1, 2), disk(1, "fast"), {**disk(1, 2), "folder": "srv"}])
def test_a_disk_that_a_host_cannot_have_is_refused(pair, odd):
    pair.hosts["head"]["facts"]["disk"] = odd
    assert "facts of head" in pair.reason()


def test_a_run_waits_several_times_as_long_as_the_load_is_predicted_to_take(pair, big_model):
    assert pair.plan()["head"]["start_timeout"] == 900
    for name in pair.hosts:
        pair.hosts[name]["facts"]["memory_mib"] = 65536
    pair.hosts["head"]["variables"].update(llama_model_known_answer=None, llama_model_path="/srv/big.gguf")
    pair.model = {"summary": big_model, "closed": None}
    plan = planned(pair, disk(0.2, None, "/srv"))
    assert plan["fits"]
    assert plan["head"]["start_timeout"] == math.ceil(5 * plan["estimate"]["load_s"]) > 900
    slow = planned(pair, disk(0.002, None, "/srv"))
    assert (slow["head"]["start_timeout"], slow["estimate"]["load_limited_by"]) == (86400, "disk of head")
    assert planned(pair, None, llama_server_start_timeout=120)["head"]["start_timeout"] == 120


def test_how_long_a_run_waits_is_no_part_of_what_is_applied(pair):
    plan = pair.plan()
    plan["hosts"] = {name: {**host, "files": []} for name, host in plan["hosts"].items()}
    other = {**plan, "head": {**plan["head"], "start_timeout": 7}}
    assert rollback.identity(plan) == rollback.identity(other)
    assert rollback.identity(plan) != rollback.identity({**plan, "head": {**plan["head"], "load_mode": "dio"}})

"""What launchers write for Prometheus: the table, its text, and the files of real launchers with stand-ins for the programs."""

import json
import os
import re
import signal
import socket
import struct
import sys
import time
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import exporter, metrics, progress, serving
from conftest import SCHEMA, complete
from support.hosts import free_port, write
from support.launched import a_worker, children, lines_until, until

LINE = re.compile(r'(\w+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (-?[0-9.e+-]+)')
"""A sample, as Prometheus's description of its text has it."""


def parsed(text):
    """Name, without the prefix → labels → value."""
    found, kinds = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# "):
            kind, name, rest = line[2:].split(" ", 2)
            kinds.setdefault(name, {})[kind] = rest
            continue
        name, labels, value = LINE.fullmatch(line).groups()
        assert set(kinds[name]) == {"HELP", "TYPE"}
        named = tuple(sorted(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', labels or "")))
        own = found.setdefault(name.removeprefix(metrics.PREFIX), {})
        assert named not in own
        own[named] = float(value)
    return found


def one(found, name, **labels):
    """The value of the only sample with these labels."""
    (value,) = [value for named, value in found[name].items() if labels.items() <= dict(named).items()]
    return value


def test_text_that_nothing_in_a_label_breaks():
    figures, odd = metrics.Figures(), 'a"b\\c\nd' + "x" * 200
    figures.add("state", True, state="serving")
    figures.add("state", False, state="waiting")
    figures.add("state_since_timestamp_seconds", 12.5)
    figures.add("client_connections", 1 << 60)
    figures.add("worker_awaited", None, worker_host=odd, worker="cpu")
    figures.add("worker_round_trip_seconds", float("nan"), worker_host=odd, worker="cpu")
    figures.add("worker_connected", True, worker_host=odd, worker="cpu")
    found = parsed(figures.text())
    assert [*found] == ["state", "state_since_timestamp_seconds", "worker_connected", "client_connections"]
    assert (one(found, "state", state="serving"), one(found, "state", state="waiting")) == (1, 0)
    assert one(found, "client_connections") == 1 << 60
    ((labels,),) = [found["worker_connected"]]
    assert dict(labels)["worker_host"].startswith('a\\"b\\\\c?dxx')
    assert len(dict(labels)["worker_host"]) == metrics.MAX_LABEL_LENGTH + 2


class Exported:
    """A launcher that writes metrics."""

    def __init__(self, cluster, folder="metrics"):
        self.cluster, self.folder = cluster, cluster.folder / folder
        self.description = cluster.folder / "metrics.json"

    def describe(self, service, **own):
        common = {"folder": str(self.folder), "cluster": "llama_cluster", "host": "here"}
        common.update(plan="0123", release="b1")
        self.description.write_text(json.dumps({"services": {service: {**common, **own}}}))
        self.file = self.folder / f"{service}.prom"
        return ["--metrics", self.description, service]

    def head(self, endpoint, how="answers", planned=None, more=()):
        workers = {endpoint: ["other", "cpu"]}
        predicted = {"planned_prompt_tokens_per_second": 3.5, "planned_generation_tokens_per_second": None}
        planned = {"m": planned or predicted}
        extra = self.describe("llamacpp-server", kind="head", workers=workers, planned=planned)
        return self.cluster.head(how, [endpoint], extra, more)

    def found(self):
        return parsed(self.file.read_text())

    def when(self, name, value, **labels):
        def reached():
            found = self.found() if self.file.exists() else {}
            return name in found and one(found, name, **labels) == value and found

        return until(reached)


@pytest.fixture
def exported(cluster):
    made = Exported(cluster)
    made.folder.mkdir()
    return made


@pytest.mark.programs
@pytest.mark.skipif(not progress.ON_LINUX, reason="connections are read from the /proc of Linux")
def test_a_head_says_what_it_knows_and_counts_over_its_starts(exported):
    server, endpoint = a_worker()
    process = exported.head(endpoint)
    found = exported.when("worker_connected", 1)
    assert exported.file.stat().st_mode & 0o777 == 0o644
    assert one(found, "service_info", kind="head", release="b1", plan="0123", service="llamacpp-server") == 1
    assert one(found, "planned_prompt_tokens_per_second", model="m") == 3.5
    assert "planned_generation_tokens_per_second" not in found
    exported.when("state", 1, state="serving")
    found = exported.when("worker_awaited", 0, worker_host="other", worker="cpu")
    assert one(found, "worker_round_trip_seconds") > 0
    assert one(found, "model_loaded", model="m") == 1
    assert one(found, "worker_retransmissions_total") == one(found, "restarts_total", cause="lost_worker") == 0
    assert one(found, "worker_needless_retransmissions_total") == 0
    assert one(found, "started_timestamp_seconds") <= one(found, "updated_timestamp_seconds")
    client = exported.cluster.client(b"GET")
    exported.when("client_connections", 1)
    client.close()
    server.listener.close()
    server.connections[-1].shutdown(socket.SHUT_RDWR)
    assert process.wait(50) == 1
    assert one(exported.found(), "restarts_total", cause="lost_worker") == 1
    again = exported.head(endpoint)
    found = exported.when("worker_awaited", 1)
    assert one(found, "restarts_total", cause="lost_worker") == one(found, "state", state="waiting") == 1
    assert "worker_connected" not in found
    again.send_signal(signal.SIGTERM)
    assert again.wait() == 0
    assert list(exported.folder.iterdir()) == []


@pytest.mark.programs
@pytest.mark.skipif(not progress.ON_LINUX, reason="connections are read from the /proc of Linux")
def test_llama_server_is_asked_for_its_counters_where_it_has_any(exported):
    _server, endpoint = a_worker()
    process = exported.head(endpoint, more=["--metrics"])
    found = exported.when("prompt_tokens_total", 3, model="m")
    assert one(found, "requests_processing") == 2
    assert "generated_tokens_total" not in found
    process.send_signal(signal.SIGTERM)
    process.wait()
    exported.head(endpoint)
    found = exported.when("state", 1, state="serving")
    assert not set(found) & set(metrics.SERVER_METRICS.values())


@pytest.mark.programs
@pytest.mark.skipif(not progress.ON_LINUX, reason="connections are read from the /proc of Linux")
def test_one_that_may_sleep_is_asked_only_where_something_has_moved(exported):
    """Each question puts off its sleep, and clients stay connected, or ask for /health all the time."""
    _server, endpoint = a_worker()
    exported.head(endpoint, "asks its worker", more=["--sleep-idle-seconds", "60", "--metrics"])
    exported.when("state", 1, state="serving")

    def counted():
        found = exported.found()
        return one(found, "prompt_tokens_total") if "prompt_tokens_total" in found else 0

    def steady():
        before = counted()
        time.sleep(1)
        return counted() == before and before

    asked = until(steady)
    client = exported.cluster.client(b"GET")
    exported.when("client_connections", 1)
    time.sleep(1)
    assert counted() == asked
    assert exported.cluster.ask() == b"the answer"
    until(lambda: counted() > asked)
    client.close()


@pytest.mark.programs
@pytest.mark.skipif(not progress.ON_LINUX, reason="connections are read from the /proc of Linux")
def test_a_worker_says_what_it_knows(exported):
    port = free_port()
    program = [sys.executable, exported.cluster.folder / "rpc_server.py", port, "answers"]
    extra = exported.describe("llamacpp-worker-cpu", kind="worker", worker="cpu")
    argv = ["worker", "--port", port, *extra, "--", *program]
    process = exported.cluster.start(*argv)
    lines_until(process, "listens")
    found = exported.when("service_info", 1)
    assert one(found, "started_timestamp_seconds") <= one(found, "updated_timestamp_seconds")
    (program,) = children(process)
    os.kill(program, signal.SIGSTOP)
    assert process.wait(50) == 1
    assert one(exported.found(), "restarts_total", cause="hung") == 1
    again = exported.cluster.start(*argv)
    lines_until(again, "listens")
    (program,) = children(again)
    os.kill(program, signal.SIGKILL)
    assert again.wait(50) == 1
    found = exported.found()
    assert one(found, "restarts_total", cause="hung") == one(found, "restarts_total", cause="ended") == 1
    killed = exported.cluster.start(*argv)
    lines_until(killed, "listens")
    exported.when("restarts_total", 1, cause="ended")
    until(lambda: "started_timestamp_seconds" in exported.found())
    killed.kill()
    killed.wait()
    lines_until(exported.cluster.start(*argv), "listens")
    found = exported.when("restarts_total", 1, cause="killed")
    assert one(found, "restarts_total", cause="hung") == one(found, "restarts_total", cause="ended") == 1


def test_a_folder_that_is_missing_and_a_description_of_others_stop_nothing(exported, monkeypatch, capfd):
    monkeypatch.setattr(exporter, "EXPORT_INTERVAL_SECONDS", 0)
    monkeypatch.setattr(exporter.journal, "LOGGED_KEYS", set())
    exported.folder.rmdir()
    _option, description, service = exported.describe("llamacpp-worker-cpu", kind="worker", worker="cpu")
    for _start in range(2):
        exporter.Exporter(description, service).export_worker()
    exporter.Exporter(description, "another").export_worker()
    said = capfd.readouterr().out
    assert said.count(f"{exported.file} could not be written: No such file or directory") == 1
    assert f"metrics are not written, because {description} does not describe another" in said


def test_a_service_that_a_run_drops_writes_until_it_is_stopped_and_leaves_no_file(exported, monkeypatch):
    monkeypatch.setattr(exporter, "EXPORT_INTERVAL_SECONDS", 0)
    _option, description, service = exported.describe("llamacpp-worker-cpu", kind="worker", worker="cpu")
    exports, file = exporter.Exporter(description, service), exported.file
    exported.describe("llamacpp-worker-gpu", kind="worker", worker="gpu")
    exports.export_worker()
    assert file.exists()
    exports.stop()
    assert list(exported.folder.iterdir()) == []


@pytest.mark.parametrize("length, needless", [(220, 1321), (216, 0)])
def test_of_what_was_sent_again_the_kernel_says_what_had_arrived(length, needless):
    told = bytearray(220)
    struct.pack_into("=I", told, 100, 1433)
    struct.pack_into("=I", told, 216, 1321)
    connection = SimpleNamespace(getsockopt=lambda *_asked: bytes(told[:length]))
    traffic = progress.read_traffic(connection)
    assert (traffic.retransmissions, traffic.needless_retransmissions) == (1433, needless)


CARD, OTHER = "sys/class/drm/renderD128/device", "sys/class/drm/renderD129/device"


@pytest.mark.parametrize(
    "files, found",
    [
        ({}, {"ROCm0": 3200, "Vulkan0": 3200}),
        ({f"{OTHER}/mem_info_vram_used": "5", f"{OTHER}/mem_info_gtt_used": "1"}, {"ROCm0": 3200, "ROCm1": 6}),
        ({f"{OTHER}/vendor": "0x10de"}, {"ROCm0": 3200}),
        ({f"{CARD}/mem_info_vram_used": "nan"}, {}),
    ],
    ids=["one", "two", "another vendor's, which may be Vulkan's first", "not known"],
)
def test_memory_of_amd_s_devices_as_the_kernel_says_it(tmp_path, files, found):
    files = {f"{CARD}/mem_info_vram_used": "200", f"{CARD}/mem_info_gtt_used": "3000", **files}
    read = exporter.MemoryReader(write(tmp_path, files)).read(["ROCm0", "ROCm1", "Vulkan0", "MTL0", "CPU"])
    assert read == found


def test_nvidia_smi_is_asked_where_its_devices_are_planned_and_never_waited_for(tmp_path):
    said = tmp_path / "said"
    sensors = exporter.MemoryReader(tmp_path, ["cat", said])
    assert [sensors.read(["ROCm0"]), sensors.query_thread] == [{}, None]
    said.write_text("1, 1024\nUnable to determine, 1\n2, [N/A]\n3, 1\n")
    assert sensors.read(["CUDA1"]) == {}
    sensors.query_thread.join()
    found = sensors.read(["CUDA0", "CUDA1", "CUDA2", "CUDA3"])
    assert found == {"CUDA1": 1 << 30, "CUDA3": 1 << 20}, "a device that says nothing moves no other one up"
    failing = exporter.MemoryReader(tmp_path, ["sh", "-c", "echo 1, 2; exit 9"])
    failing.read(["CUDA1"])
    failing.query_thread.join()
    assert failing.read(["CUDA1"]) == {"CUDA1": 2 << 20}, "another device has failed"
    assert exporter.MemoryReader(tmp_path, [tmp_path / "missing"]).read(["CUDA0"]) == {}


def test_what_was_counted_before_is_believed_as_far_as_it_is_a_count(exported):
    _file, description, service = exported.describe("llamacpp-server", kind="head")
    (exported.folder / "llamacpp-server.prom").write_text(
        'llamacpp_cluster_restarts_total{service="s",cause="silent"} 7\n'
        'llamacpp_cluster_restarts_total{service="s",cause="colour"} 8\n'
        'llamacpp_cluster_restarts_total{service="s",cause="ended"} 1e9\n'
    )
    restarts = exporter.Exporter(description, service).restarts
    assert restarts == dict.fromkeys(metrics.RESTART_CAUSES["head"], 0) | {"silent": 7}


@pytest.mark.parametrize(
    "without, waiting_for, awaited",
    [((), (), set()), (("one:cpu",), (), {"cpu"}), (("one",), (), {"cpu", "gpu"}), ((), ("192.0.2.2:1",), {"other"})],
)
def test_workers_that_the_head_waits_for_or_serves_without(tmp_path, without, waiting_for, awaited):
    workers = {"192.0.2.1:1": ("one", "cpu"), "192.0.2.1:2": ("one", "gpu"), "192.0.2.2:1": ("two", "other")}
    told = metrics.Description("/metrics", "llama_cluster", "head", "0123", "head", "b1", workers=workers)
    record = serving.HeadRecord(tmp_path)
    record.set_state(serving.FALLBACK, without, waiting_for)
    exported = exporter.Exporter(None, "s")
    exported.description = told._replace(folder="")
    exported.export_head(record)
    found = parsed(exported.snapshot.figures.text())["worker_awaited"]
    assert {dict(labels)["worker"] for labels, value in found.items() if value} == awaited
    assert len(found) == len(workers)


def test_the_plan_has_launchers_write_metrics(pair, tmp_path):
    off = complete(pair.plan())
    for host in pair.hosts.values():
        host["variables"]["llama_metrics"] = "textfile"
    wanted = complete(pair.plan())
    SCHEMA.validate(wanted)
    assert not re.search("metrics|setfacl", json.dumps([host["services"] for host in off["hosts"].values()]))
    folder = "/var/lib/prometheus/node-exporter"
    for name, host in wanted["hosts"].items():
        assert host["metrics"] == folder
        assert {"path": folder, "owner": None, "mode": None} in host["folders"]
        (told,) = [file["content"] for file in host["files"] if file["path"].endswith(f"/{names.METRICS_FILE}")]
        (tmp_path / name).write_text(told)
        for service, before in zip(host["services"], off["hosts"][name]["services"]):
            place = service["argv"].index("--metrics")
            assert service["argv"][place + 1 : place + 3] == [f"{host['prefix']}/metrics.json", service["name"]]
            counts = ["--metrics"] * (service["kind"] == "head")
            assert [*service["argv"][:place], *service["argv"][place + 3 :]] == [*before["argv"], *counts]
            added = set(service["definition"].splitlines()) - set(before["definition"].splitlines())
            assert sorted(added)[1:] == [
                f"ExecStartPre=+-/usr/bin/setfacl --modify user:llamacpp:rwx {folder}",
                f"ReadWritePaths=-{folder}",
            ]
            described = exporter.description_of(tmp_path / name, service["name"])
            assert (described.kind, described.host, described.plan) == (service["kind"], name, wanted["id"])
            assert [*described.driven] == (["CPU"] if described.worker else [])
    head = exporter.description_of(tmp_path / "head", wanted["head"]["service"])
    assert {tuple(worker) for worker in head.workers.values()} == {("worker1", "cpu"), ("worker2", "cpu")}
    ((predicted,),) = [[*head.planned.values()]]
    assert predicted.keys() <= metrics.METRICS_BY_NAME.keys()
    assert predicted["planned_generation_tokens_per_second"] == wanted["estimate"]["generation_tokens_per_s"]
    assert names.METRICS_FILE in names.INSTALLED_ENTRIES


def test_a_folder_that_a_unit_cannot_name_is_refused(pair):
    for folder in ("metrics", "/srv/my metrics", "/srv/%h", "/srv/../etc"):
        pair.hosts["worker1"]["variables"]["llama_metrics_folder"] = folder
        assert f"llama_metrics_folder for worker1 is {folder!r}: use an absolute path" in pair.reason()

"""Workers that the head reaches by RDMA: what is planned, where it is refused, and how a way back to TCP is found."""

import os

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import exporter, metrics, progress, serving
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import server as llama_server
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import evidence
from conftest import complete, definition, typed
from support.clusters import FORK, TREE
from support.verification import checks, healthy, judged, several, subject
from test_judge import with_server

HEAD, WORKER = "192.0.2.10", "192.0.2.11"
ENDPOINT = f"{WORKER}:50052"


@pytest.fixture
def rdma(pair):
    """The head reaches worker1 by RDMA, and worker2 as it is."""
    pair.hosts["head"]["facts"]["rdma"] = [HEAD]
    pair.hosts["worker1"]["facts"]["rdma"] = [WORKER]
    pair.hosts["worker1"]["variables"]["llama_transport"] = "rdma"
    return pair


def test_both_ends_compile_and_open_what_rdma_needs(rdma):
    plan = complete(rdma.accepted())
    hosts = plan["hosts"]
    for name, wanted in (("head", True), ("worker1", True), ("worker2", False)):
        (build,) = hosts[name]["builds"]
        assert build["cmake_options"]["GGML_RPC_RDMA"] == ("ON" if wanted else "OFF")
        assert hosts[name]["tools"].get("ibverbs") == ("libibverbs-dev" if wanted else None)
        unit = definition(hosts[name], hosts[name]["services"][0])
        for line in ("DeviceAllow=char-infiniband_verbs rw", "LimitMEMLOCK=infinity"):
            assert (f"\n{line}\n" in unit) == wanted
    assert [worker.get("rdma") for name in ("worker1", "worker2") for worker in hosts[name]["workers"]] == [True, None]


def test_nothing_else_of_the_plan_follows_from_it(rdma):
    by_rdma = rdma.plan()
    rdma.hosts["worker1"]["variables"]["llama_transport"] = "plain"
    plain = rdma.plan()
    for key in ("placement", "estimate"):
        assert by_rdma[key] == plain[key]
    for name, host in plain["hosts"].items():
        for key in ("firewall", "port_probes"):
            assert by_rdma["hosts"][name][key] == host[key]
    assert "rdma" not in str(plain)
    assert not checks(judged(typed(plain), with_server(healthy(typed(plain)), rdma=0)), "rdma")


def of(name, part, **values):
    return lambda cluster: cluster.hosts[name][part].update(values)


def released(release):
    def change(cluster):
        for host in cluster.hosts.values():
            host["variables"].update(llama_release=release)

    return change


@pytest.mark.parametrize(
    "change, said",
    [
        (
            of("worker1", "facts", rdma=[]),
            "no RDMA device on worker1 has the host's address 192.0.2.11 (/sys/class/infin",
        ),
        (of("head", "facts", rdma=["10.9.0.1"]), "device on head has the host's address 192.0.2.10 (found: 10.9.0.1"),
        (
            of("head", "facts", scope="user", service_manager="systemd_user"),
            "head has no systemd system units, which RDMA needs to lock memory: set llama_host_scope",
        ),
        (of("worker1", "facts", service_manager="supervisor"), "worker1 has no systemd system units"),
        (
            of("worker1", "variables", llama_worker_endpoints=[{"tunnel": "127.0.0.1:60052"}]),
            "tunnel, which RDMA cannot use",
        ),
        (released(FORK), "use llama.cpp with source: pypi, git or archive, or set"),
        (
            released({**TREE, "source": "binary", "build": 11063}),
            "but llama_release for head (binary-bbbbbbbb) is not compiled with RDMA",
        ),
    ],
)
def test_where_it_cannot_work_it_is_refused(rdma, change, said):
    change(rdma)
    assert said in rdma.reason()


def test_a_host_that_was_not_asked_is_planned_as_if_it_had_the_device(rdma):
    for host in rdma.hosts.values():
        host["facts"].pop("rdma", None)
    assert not rdma.plan()["refused"]


def test_a_head_with_several_addresses_needs_a_device_with_that_of_the_link(rdma):
    rdma.hosts["head"]["variables"]["llama_links"] = [{"address": "10.9.0.10/24", "peer": "worker1"}]
    rdma.hosts["worker1"]["variables"]["llama_links"] = [{"address": "10.9.0.11/24"}]
    assert "no RDMA device on worker1 has the host's address 10.9.0.11 (found: 192.0.2.11" in rdma.reason()
    rdma.hosts["worker1"]["facts"]["rdma"] = ["10.9.0.11"]
    assert "no RDMA device on head has the host's address 10.9.0.10" in rdma.reason()
    rdma.hosts["head"]["facts"]["rdma"] = ["10.9.0.10"]
    assert not rdma.plan()["refused"]


@pytest.mark.parametrize("connections, status", [(1, "passed"), (0, "failed")])
def test_a_silent_way_back_to_tcp_is_a_failure(rdma, connections, status):
    plan = typed(rdma.plan())
    report = judged(plan, with_server(healthy(plan), rdma=connections))
    (found,) = checks(report, "rdma")
    assert found.status == status
    assert found.evidence.startswith(f"workers reached over RDMA: {connections} of 1")
    assert (f"planned: {ENDPOINT}" in found.evidence) == (status == "failed")


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """A folder whose open files count as RDMA devices: one is open."""
    monkeypatch.setattr(progress, "RDMA_DEVICE_FOLDER", f"{tmp_path}/")
    with open(tmp_path / "uverbs0", "w") as device:
        yield device


def test_connections_over_rdma_are_the_devices_that_llama_server_has_open(devices):
    assert (
        progress.count_rdma_connections(os.getpid())
        == progress.sample_process(os.getpid(), set(), set()).rdma_connection_count
        == 1
    )
    devices.close()
    assert progress.count_rdma_connections(os.getpid()) == 0
    assert progress.count_rdma_connections(1 << 30) == 0


def test_a_model_has_the_connections_of_its_own_process(rdma, monkeypatch):
    """Beside it are another model, its launcher, a worker, and an instance that proves a release."""
    plan, program = rdma.plan(), "/opt/llamacpp/releases/x/bin/llama-server"
    processes = {
        1: [program, "--port", "8081", "--alias", "one"],
        2: [program, "--port", "8082", "--alias", "two"],
        4: ["/usr/bin/python3", "/opt/llamacpp/runtime/x/runtime.py", "--", program, "--alias", "one"],
        8: ["/opt/llamacpp/releases/x/bin/rpc-server", "--port", "8080"],
        16: [program, "--port", "8080"],
        32: [program, "--port", "18080"],
    }
    monkeypatch.setattr(evidence.processes, "account_processes", lambda _prefix, _account: processes)
    monkeypatch.setattr(progress, "count_rdma_connections", lambda process: process)
    alone = subject(plan)
    models = several(typed(plan), "one", "two").head.models
    asked = [alone, *(alone._replace(head=alone.head._replace(models=(one,))) for one in models)]
    assert [evidence._count_rdma_connections(one, alone.hosts["head"]) for one in asked] == [16, 1, 2]


HELD = progress.TcpSocket("127.0.0.1:50052", ENDPOINT, progress.ESTABLISHED, 0, "held")
QUIET = progress.Traffic(100, 100, 400_000, 400_000)
TOLD = ("connected", "sent_bytes_total", "received_bytes_total")
LOOK = progress.ProcessSample(progress.Activity("S", 0.0, 0, 0), [HELD], {"held": QUIET})


@pytest.mark.parametrize("connections", [0, 1])
def test_bytes_of_tcp_are_not_told_as_those_of_rdma(tmp_path, connections):
    look = LOOK._replace(rdma_connection_count=connections)
    head = llama_server.WatchedServer([], [ENDPOINT], "http://127.0.0.1:1", 1)
    head.last_sample, head.servers, head.loaded_models, head.conversation_values = look, lambda: {"": head}, set, {}
    exported = exporter.Exporter(None, "llamacpp-server")
    workers = {ENDPOINT: ("worker1", "cpu")}
    exported.description = metrics.Description("", "llama_cluster", "head", "0", "head", "b1", workers=workers)
    exported.export_head(serving.HeadRecord(tmp_path), head)
    figures = exported.snapshot.figures
    told = {name: figures.get(f"worker_{name}", worker_host="worker1", worker="cpu") for name in TOLD}
    assert told == {"connected": 1, **dict.fromkeys(TOLD[1:], None if connections else 100)}
    assert progress.load_of(look, [ENDPOINT], 1.0, None).sent == ({} if connections else {ENDPOINT: 100})

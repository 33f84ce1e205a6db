"""Workers that others run: planned with, shaken hands with, and never changed."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import judge
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text
from conftest import typed
from support.verification import checks, judged, subject, unhealthy

WINDOWS = {
    "endpoint": "192.0.2.77:50052",
    "memory_mib": 24000,
    "protocol": "7.0.0",
    "host": "gaming-pc",
    "backend": "cuda",
    "architecture": "8.9",
}


@pytest.fixture
def mixed(pair):
    """Two workers of the cluster and one on Windows."""
    pair.set("head", llama_external_workers=[WINDOWS], llama_accept_advisories=["external-worker"])
    return pair


def given(cluster, **values):
    cluster.hosts["head"]["variables"]["llama_external_workers"] = [{**WINDOWS, **values}]
    return cluster


def test_a_worker_that_others_run_is_planned_with_and_never_changed(mixed):
    plan = mixed.accepted()
    assert list(plan["hosts"]) == ["head", "worker1", "worker2"]
    shares = {entry["host"]: entry for entry in plan["placement"]}
    assert sorted(shares) == ["gaming-pc", "worker1", "worker2"]
    share = shares["gaming-pc"]
    assert (share["endpoint"], share["worker"], share["capacity_mib"]) == ("192.0.2.77:50052", "external0", 24000)
    assert share["exact"] == ["kv_mib"]
    known = {name: value for name, value in WINDOWS.items() if name != "architecture"}
    assert plan["external_workers"] == [{**known, "name": "external0", "used": True}]
    argv = plan["head"]["argv"]
    assert "192.0.2.77:50052" in argv[argv.index("--rpc") + 1].split(",")
    assert "192.0.2.77:50052" in plan["head"]["launcher"]
    assert not any("192.0.2.77" in str(plan["hosts"][name]) for name in ("worker1", "worker2"))


def test_one_of_which_no_protocol_is_declared_speaks_that_of_the_release(mixed):
    (worker,) = given(mixed, protocol=None).accepted()["external_workers"]
    assert worker["protocol"] == "7.0.0"


def test_the_unit_of_the_head_may_talk_to_them(mixed):
    mixed.hosts["head"]["variables"]["llama_server_allowed"] = ["198.51.100.0/24"]
    assert "192.0.2.77" in mixed.plan()["hosts"]["head"]["services"][-1]["allow"]


@pytest.mark.parametrize(
    "device, rate",
    [({}, (486.8, "assumed")), ({"device": "NVIDIA GeForce RTX 5090"}, (1541.1, "table"))],
    ids=["unnamed", "named"],
)
def test_the_speed_of_one_follows_from_the_name_of_its_device(mixed, device, rate):
    known = {one["host"]: one for one in given(mixed, architecture="8.6", **device).plan()["estimate"]["devices"]}
    assert (known["gaming-pc"]["gb_per_s"], known["gaming-pc"]["source"]) == rate


def test_several_on_one_host(mixed):
    mixed.hosts["head"]["variables"]["llama_external_workers"].append({**WINDOWS, "endpoint": "192.0.2.77:50053"})
    plan = mixed.plan()
    assert {"external0", "external1"} < {entry["worker"] for entry in plan["placement"]}
    (advisory,) = [advisory for advisory in plan["advisories"] if advisory["id"] == "external-worker"]
    assert "192.0.2.77:50052 and 192.0.2.77:50053 on gaming-pc" in advisory["message"]


@pytest.mark.parametrize(
    "values, said",
    [
        *[
            ({"endpoint": endpoint}, f"sets endpoint to {endpoint!r}: use the numeric IPv4 address")
            for endpoint in ("pc.local:50052", "192.0.2.77:0", "224.0.0.1:50052")
        ],
        ({"memory_mib": 0}, "sets memory_mib to 0: use 1 or more"),
        ({"protocol": "seven"}, "sets protocol to 'seven': use the version that the worker's rpc-server prints"),
        ({"protocol": "8.0.0"}, "sets protocol to 8.0.0, but pypi-0.3.36 speaks 7.0.0: run that worker with"),
        ({"protocol": "7.1.0"}, "sets protocol to 7.1.0, but pypi-0.3.36 speaks 7.0.0"),
        ({"backend": "opencl"}, "sets backend to 'opencl': use one of cpu, vulkan"),
        ({"host": "a host"}, "sets host to 'a host': use at most 255 letters"),
        ({"host": "worker1"}, "is on worker1, which belongs to this cluster: declare the worker in llama"),
        ({"endpoint": "192.0.2.11:50052"}, "gaming-pc and worker1 both have the worker 192.0.2.11:50052"),
        (
            {"endpoint": "127.0.0.1:8080"},
            "listens on port 8080 of the head, which llama_server_port already uses: let the tunnel listen on",
        ),
    ],
)
def test_what_cannot_be_planned_with(mixed, values, said):
    assert said in given(mixed, **values).reason()


def test_one_endpoint_twice(mixed):
    mixed.hosts["head"]["variables"]["llama_external_workers"] *= 2
    assert "sets endpoint to 192.0.2.77:50052, which another entry already has" in mixed.reason()


def test_the_page_names_them(mixed):
    parts = plan_text.plan_sections(typed(mixed.plan()))
    assert any("gaming-pc" in line and "cuda, external" in line for line in parts["Topology"])
    assert "192.0.2.77:50052: external worker; its clients are unknown" in "\n".join(parts["Open ports"])
    given(mixed, architecture="5.0").hosts["head"]["variables"]["llama_placement"] = "fastest"
    unused = " ".join(line.strip() for line in plan_text.plan_sections(typed(mixed.plan()))["Topology"])
    assert "gaming-pc cuda 192.0.2.77:50052, external" in unused


def test_the_handshake_of_one_that_is_used_is_judged(mixed):
    (_own, _other, check) = checks(judged(typed(mixed.plan())), "handshake")
    assert (check.subject, check.status) == ("192.0.2.77:50052", "failed")
    given(mixed, architecture="5.0").hosts["head"]["variables"]["llama_placement"] = "fastest"
    check = checks(judged(typed(mixed.plan())), "handshake")[-1]
    assert check[2:] == ("not tested", "the head does not use this worker"), "it may serve somebody else"


def test_nobody_here_can_verify_that_their_port_is_closed(mixed):
    check = checks(judged(typed(mixed.plan())), "closed")[-1]
    assert (check.subject, check.status) == ("192.0.2.77:50052", "not tested")
    assert "gaming-pc runs this worker without the collection" in check.evidence


def test_what_to_do_about_one_that_does_not_answer(mixed):
    plan = mixed.plan()
    outside = "the head waits for worker 192.0.2.77:50052: refused, no program listens on this port"
    inside = "the head waits for worker 192.0.2.11:50052: unreachable, no connection was possible"
    start = (
        "This collection does not start external workers (192.0.2.77:50052 on gaming-pc): start them on their hosts, "
        "with a release that uses the head's protocol."
    )
    firewalls = "If the worker's host answers and the worker is running, the network"
    for waits_for, text in (([outside], start), ([inside], firewalls), ([outside, inside], f"{start} {firewalls}")):
        assert judge.advice(subject(plan), unhealthy(waits_for=waits_for)).startswith(text)


@pytest.mark.parametrize("address", ["192.0.2.12", "198.51.100.12"])
def test_a_worker_at_an_address_of_the_cluster_is_refused(mixed, address):
    """Its memory is counted as that of the host."""
    mixed.hosts["worker2"]["variables"]["llama_links"] = [{"address": "198.51.100.12/24", "peer": "nobody"}]
    said = given(mixed, endpoint=f"{address}:50099").reason()
    assert f"llama_external_workers[0] sets endpoint to {address}:50099, an address of worker2" in said

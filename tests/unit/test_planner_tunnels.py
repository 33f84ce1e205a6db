"""Workers that the head reaches through a tunnel."""

import json

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import ServiceState
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text
from conftest import typed
from support.verification import checks, judged, reports

END = "127.128.2.11:50052"
"""On the head, of the tunnel to worker1."""


@pytest.fixture
def tunnelled(pair):
    """worker1 is in another network; a tunnel leads from the head to its two ports."""
    pair.hosts["worker1"].update(ansible_host="far.example")
    pair.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"tunnel": "127.0.0.1:60052"}]
    return pair


def test_a_worker_behind_a_tunnel_listens_on_loopback_of_its_own_host(tunnelled):
    plan = tunnelled.accepted()
    host = plan["hosts"]["worker1"]
    (worker,) = host["workers"]
    assert (worker["endpoint"], worker["listens"]) == ("127.0.0.1:60052", "127.0.0.1:50052")
    assert " ".join(worker["argv"][1:]).startswith("-H 127.0.0.1 -p 50052 ")
    assert (host["firewall"], host["services"][0]["listens"]) == ([], "127.0.0.1:50052")
    assert host["services"][0]["allow"] == ["127.0.0.1", "localhost"]
    assert plan["head"]["argv"][1:3] == ["--rpc", "127.0.0.1:60052,192.0.2.12:50052"]
    assert "127.0.0.1:60052" in plan["head"]["launcher"]
    assert [entry["host"] for entry in plan["placement"]] == ["worker1", "worker2"]
    assert not any("127.0.0.1" in endpoint for own in plan["hosts"].values() for endpoint in own["port_probes"])
    (link, _other) = plan["estimate"]["links"]
    assert (link["kind"], link["measured"]) == ("tunnel", False)
    assert "127.0.0.1:60052" in "\n".join(plan_text.plan_sections(typed(plan))["Topology"])
    first, *_others = checks(judged(typed(plan)), "closed")
    assert first == ("closed", "127.0.0.1:60052", "passed", "the worker listens on loopback only")


def test_a_host_behind_a_tunnel_has_no_link_to_measure(tunnelled):
    tunnelled.hosts["worker1"]["variables"]["llama_links"] = [{"address": "10.0.0.2/24", "interface": "eth1"}]
    assert tunnelled.plan()["links"] == []


@pytest.mark.parametrize(
    "value",
    ["60052", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "192.0.2.1:60052", "localhost:1", ":1"],
)
def test_what_is_no_end_of_a_tunnel(tunnelled, value):
    tunnelled.hosts["worker1"]["variables"]["llama_worker_endpoints"][0]["tunnel"] = value
    assert (
        f"llama_worker_endpoints[0] for worker1 sets tunnel to {value!r}: use the tunnel's listening address and port"
        in tunnelled.reason()
    )


def test_the_head_needs_no_tunnel_to_itself(local):
    local.hosts["here"]["variables"]["llama_worker_endpoints"][0]["tunnel"] = "127.0.0.1:60052"
    assert "the head reaches its own workers without a tunnel: remove tunnel" in local.reason()


@pytest.mark.parametrize(
    "other, port, owner",
    [
        ("worker2", 60052, "the tunnel to cpu on worker1 already uses"),
        ("worker2", 8080, "llama_server_port already uses"),
        ("worker2", 50052, "the head's worker cpu already uses"),
    ],
)
def test_each_tunnel_ends_on_a_port_of_its_own(tunnelled, other, port, owner):
    tunnelled.hosts["head"]["groups"].append("worker")
    tunnelled.hosts[other]["variables"]["llama_worker_endpoints"] = [{"tunnel": f"127.0.0.1:{port}"}]
    said = tunnelled.reason()
    assert "the tunnel to the worker cpu on worker2 listens on port" in said
    assert owner in said


@pytest.fixture
def encrypted(pair):
    """The head reaches worker1 through a tunnel of its launcher's, and worker2 as it is."""
    pair.hosts["worker1"]["variables"]["llama_transport"] = "stunnel"
    return pair


def test_a_worker_behind_stunnel_is_reached_where_it_was_and_listens_on_loopback(encrypted):
    plan = encrypted.accepted()
    host, head = plan["hosts"]["worker1"], plan["hosts"]["head"]
    (worker,) = host["workers"]
    ends = (worker["endpoint"], worker["listens"], worker["tunnel"])
    assert ends == ("127.128.2.11:50052", "127.0.0.1:50052", "192.0.2.11:50052")
    (service,) = host["services"]
    words = " ".join(service["argv"])
    assert " worker --port 50052 --tunnel 192.0.2.11:50052=127.0.0.1:50052 --tunnel-keys /opt/llamacpp/keys " in words
    assert service["allow"] == ["192.0.2.10", "192.0.2.11", "localhost"]
    assert [(rule["port"], rule["address"]) for rule in host["firewall"]] == [(50052, "192.0.2.11")]
    words = " ".join(plan["head"]["launcher"])
    assert words.endswith("--tunnel 127.128.2.11:50052=192.0.2.11:50052 --tunnel-keys /opt/llamacpp/keys")
    assert head["services"][-1]["argv"][: len(plan["head"]["launcher"])] == plan["head"]["launcher"]
    assert {"192.0.2.11", "192.0.2.12"} < set(head["services"][-1]["allow"])
    assert plan["head"]["argv"][2] == "127.128.2.11:50052,192.0.2.12:50052"
    port_probes = plan["hosts"]["worker2"]["port_probes"]
    assert "192.0.2.11:50052" in port_probes
    assert not any(endpoint.startswith("127.") for endpoint in port_probes)


def test_a_plain_transport_leaves_no_trace_in_the_plan(pair):
    plan = pair.plan()
    assert plan["advisories"].pop()["id"] == "rpc-in-clear"
    assert not [word for word in ("tunnel", "127.128", "/keys") if word in json.dumps(plan)]
    for host in pair.hosts.values():
        host["facts"]["toolchain"]["stunnel"] = "/usr/bin/stunnel"
    assert {**pair.plan(), "advisories": []} == plan


def test_both_ends_of_stunnel_have_a_folder_of_keys_and_its_package(encrypted):
    hosts = encrypted.plan()["hosts"]
    for name in ("head", "worker1"):
        assert hosts[name]["tunnel_keys"] == ["/opt/llamacpp/keys/192.0.2.11"]
        assert {"path": "/opt/llamacpp/keys", "owner": "root", "mode": "0755"} in hosts[name]["folders"]
        assert hosts[name]["tools"]["stunnel"] == "stunnel4"
    assert "tunnel_keys" not in hosts["worker2"]
    assert "stunnel" not in hosts["worker2"]["tools"]


def test_without_root_stunnel_has_to_be_there(encrypted):
    encrypted.hosts["worker1"]["facts"].update(scope="user", service_manager="systemd_user")
    encrypted.hosts["worker1"]["facts"]["toolchain"]["stunnel"] = None
    assert "worker1 lacks stunnel, and this run has no root access on that host" in encrypted.reason()


def test_stunnel_costs_a_token_its_share(pair):
    plain, _other = pair.plan()["estimate"]["links"]
    pair.hosts["worker1"]["variables"]["llama_transport"] = "stunnel"
    link, _other = pair.plan()["estimate"]["links"]
    assert link["one_way_ms"] > plain["one_way_ms"]
    assert link["kind"] == plain["kind"]


def test_what_measures_in_place_of_the_server_has_its_tunnels(encrypted):
    plan = typed(encrypted.plan())
    launcher = " ".join(services.launcher_argv(plan, "client", ["program", "job"]))
    ends = "--tunnel 127.128.2.11:50052=192.0.2.11:50052 --tunnel-keys /opt/llamacpp/keys"
    assert launcher == f"/usr/bin/python3 /opt/llamacpp/runtime/runtime-id/runtime.py client {ends} -- program job"
    encrypted.hosts["worker1"]["variables"]["llama_transport"] = "plain"
    assert services.tunnel_mappings(typed(encrypted.plan()).workers) == []


def test_the_head_s_own_workers_need_no_stunnel(local):
    before = local.plan()
    local.hosts["here"]["variables"]["llama_transport"] = "stunnel"
    assert local.plan() == before


def test_stunnel_ends_on_linux(encrypted):
    encrypted.hosts["head"]["facts"].update(
        system="Darwin",
        service_manager="launchd",
        units="/Library/LaunchDaemons",
        distribution={"id": "macos", "version": "15", "family": "darwin"},
    )
    assert "llama_transport for worker1 is stunnel, but each tunnel" in encrypted.reason()


def test_two_workers_whose_ends_would_be_the_same_are_refused(encrypted):
    encrypted.hosts["worker1"].update(ansible_host="10.1.2.3")
    encrypted.hosts["worker2"].update(ansible_host="172.129.2.3")
    encrypted.hosts["worker2"]["variables"]["llama_transport"] = "stunnel"
    assert "both have the worker 127.129.2.3:50052" in encrypted.reason()


@pytest.mark.parametrize(
    "source, status, text",
    [
        (None, "passed", "the controller reaches the host, but not this port"),
        (
            "192.0.2.99",
            "failed",
            "the controller can connect from 192.0.2.99: close the port to all hosts except the head",
        ),
    ],
)
def test_the_open_end_of_stunnel_is_judged_by_who_could_connect(encrypted, source, status, text):
    plan = typed(encrypted.plan())
    report = judged(plan, probes={"192.0.2.11:50052": source})
    first, *_others = checks(report, "closed")
    assert first == ("closed", "192.0.2.11:50052", status, text)
    assert {check.evidence.partition(" tunnel to ")[2] for check in checks(report, "handshake")} >= {first.subject}


@pytest.mark.parametrize(
    "addresses, clients, wrong",
    [
        (("127.0.0.1", "192.0.2.11"), ("127.0.0.1", "192.0.2.10"), None),
        (("127.0.0.1", "127.200.0.9", "192.0.2.11"), ("127.0.0.1",), None),
        (("0.0.0.0", "192.0.2.11"), (), ("closed", "the worker listens on 0.0.0.0, which the plan does not allow")),
        (
            ("127.0.0.1", "192.0.2.11"),
            ("127.0.0.1", "192.0.2.66"),
            ("release", "llamacpp-worker-cpu has a connection from 192.0.2.66, not from the head"),
        ),
    ],
)
def test_a_worker_and_its_tunnel_have_one_port_at_two_addresses(encrypted, addresses, clients, wrong):
    plan = typed(encrypted.plan())
    hosts = reports(plan)
    state = ServiceState("running", None, addresses, clients)
    hosts["worker1"] = hosts["worker1"]._replace(services={"llamacpp-worker-cpu": state})
    failed = judged(plan, hosts=hosts, probes={"192.0.2.11:50052": None}).failed_checks
    assert [(check.name, check.evidence) for check in failed] == ([wrong] if wrong else [])


def test_where_nothing_else_closes_the_port_the_key_does(encrypted):
    encrypted.hosts["worker1"]["facts"]["has_unit_filter"] = False
    plan = typed(encrypted.plan())
    assert not plan.refused
    first, *_others = checks(judged(plan, probes={"192.0.2.11:50052": "192.0.2.99"}), "closed")
    assert first == (
        "closed",
        "192.0.2.11:50052",
        "not tested",
        "the port is reachable from the network; only the tunnel key protects it",
    )
    ports = " ".join(" ".join(plan_text.plan_sections(plan)["Open ports"]).split())
    assert "this collection does not block others (the tunnel key is required as well)" in ports

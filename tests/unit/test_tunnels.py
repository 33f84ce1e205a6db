"""Workers that the head reaches through a tunnel."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from conftest import typed
from support.verification import checks, judged


@pytest.fixture
def tunnelled(pair):
    """worker1 is in another network; a tunnel leads from the head to its two ports."""
    pair.hosts["worker1"].update(ansible_host="far.example")
    pair.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"tunnel": "127.0.0.1:60052"}]
    return pair


def test_a_worker_behind_a_tunnel_listens_on_loopback_of_its_own_host(tunnelled):
    plan = tunnelled.plan()
    assert not plan["refused"], plan["reasons"]
    host = plan["hosts"]["worker1"]
    (worker,) = host["workers"]
    assert (worker["endpoint"], worker["listens"]) == ("127.0.0.1:60052", "127.0.0.1:50052")
    assert " ".join(worker["argv"][1:]).startswith("-H 127.0.0.1 -p 50052 ")
    assert (host["firewall"], host["services"][0]["listens"]) == ([], "127.0.0.1:50052")
    assert host["services"][0]["allow"] == ["127.0.0.1", "localhost"]
    assert plan["head"]["argv"][1:3] == ["--rpc", "127.0.0.1:60052,192.0.2.12:50052"]
    assert "127.0.0.1:60052" in plan["head"]["launcher"]
    assert [entry["host"] for entry in plan["placement"]] == ["worker1", "worker2"]
    assert not any("127.0.0.1" in endpoint for own in plan["hosts"].values() for endpoint in own["knocks"])
    (link, _other) = plan["estimate"]["links"]
    assert (link["kind"], link["measured"]) == ("tunnel", False)
    assert "127.0.0.1:60052" in "\n".join(plan_text.plan_parts(typed(plan))["Topology"])


def test_a_host_behind_a_tunnel_has_no_link_to_measure(tunnelled):
    tunnelled.hosts["worker1"]["variables"]["llama_links"] = [{"address": "10.0.0.2/24", "interface": "eth1"}]
    assert tunnelled.plan()["links"] == []


def test_the_staging_ports_have_a_tunnel_of_their_own(tunnelled):
    plan = tunnelled.plan(staging=True)
    (worker,) = plan["hosts"]["worker1"]["workers"]
    assert (worker["endpoint"], worker["listens"]) == ("127.0.0.1:60152", "127.0.0.1:50152")
    assert plan["head"]["argv"][2].split(",")[0] == "127.0.0.1:60152"


def test_a_port_that_only_a_tunnel_reaches_is_closed(tunnelled):
    first, *_others = checks(judged(typed(tunnelled.plan())), "closed")
    assert first == ("closed", "127.0.0.1:60052", "passed", "listens on loopback only")


@pytest.mark.parametrize(
    "value",
    ["60052", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65500", "192.0.2.1:60052", "localhost:1", ":1"],
)
def test_what_is_no_end_of_a_tunnel(tunnelled, value):
    tunnelled.hosts["worker1"]["variables"]["llama_worker_endpoints"][0]["tunnel"] = value
    assert f"llama_worker_endpoints[0] of worker1 has the tunnel {value!r}: use address and port" in tunnelled.reason()


def test_the_head_needs_no_tunnel_to_itself(local):
    local.hosts["here"]["variables"]["llama_worker_endpoints"][0]["tunnel"] = "127.0.0.1:60052"
    assert "the head reaches its own workers itself: remove tunnel" in local.reason()


@pytest.mark.parametrize(
    "other, port, owner",
    [
        ("worker2", 60052, "the tunnel to cpu of worker1 has"),
        ("worker2", 60152, "the tunnel to cpu of worker1 has"),
        ("worker2", 8080, "llama_server_port has"),
        ("worker2", 8180, "llama_server_staging_port has"),
        ("worker2", 50052, "the worker cpu of the head has"),
        ("worker2", 49952, "the worker cpu of the head has"),
    ],
)
def test_each_tunnel_ends_on_a_port_of_its_own(tunnelled, other, port, owner):
    tunnelled.hosts["head"]["groups"].append("worker")
    tunnelled.hosts[other]["variables"]["llama_worker_endpoints"] = [{"tunnel": f"127.0.0.1:{port}"}]
    said = tunnelled.reason()
    assert "the tunnel to the worker cpu of worker2 ends on port" in said
    assert owner in said

"""The port of the head: for whom it is open, and where clients find it."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.check import report


def opened(pair, *networks, host="192.0.2.10", **variables):
    """A head that serves networks, on a host with a firewall."""
    pair.hosts["head"]["facts"]["firewall"] = "nftables"
    pair.hosts["head"]["variables"].update(
        llama_server_host=host, llama_server_allowed=list(networks), llama_server_api_key_file="/etc/keys", **variables
    )
    return pair


def test_the_server_s_port_is_opened_for_its_networks(pair):
    plan = opened(pair, "198.51.100.0/24", "203.0.113.7").plan()
    assert not plan["refused"], plan["reasons"]
    sources = ["198.51.100.0/24", "203.0.113.7"]
    assert plan["hosts"]["head"]["firewall"] == [
        {"port": 8080, "protocol": "tcp", "sources": sources, "address": "192.0.2.10"}
    ]
    assert (
        "  head  192.0.2.10: 8080 for 198.51.100.0/24, 203.0.113.7; closed to others by nftables"
        in report.plan_page(plan)
    )
    assert opened(pair, *sources).plan(staging=True)["hosts"]["head"]["firewall"] == []
    assert opened(pair, *sources, host="127.0.0.1").plan()["hosts"]["head"]["firewall"] == []
    assert opened(pair).plan()["hosts"]["head"]["firewall"] == []


def test_clients_of_the_server_do_not_reach_a_worker_beside_it(pair):
    pair.hosts["head"]["groups"].append("worker")
    hosts = opened(pair, "198.51.100.0/24").plan()["hosts"]
    beside, server = hosts["head"]["services"]
    assert beside["allow"] == ["127.0.0.1", "localhost"]
    assert "198.51.100.0/24" in server["allow"]


@pytest.mark.parametrize("firewall, filters", [("ufw", False), (None, True)])
def test_who_limits_the_server_s_port(pair, firewall, filters):
    opened(pair, "198.51.100.0/24").hosts["head"]["facts"].update(firewall=firewall, units_filter=filters)
    assert not pair.plan()["refused"]
    pair.hosts["head"]["facts"].update(firewall=None, units_filter=False)
    assert "and no firewall is active there. Start firewalld, ufw or nftables on head" in pair.reason()


def test_a_head_of_which_no_firewall_is_set_up_is_limited_by_its_operator(pair):
    opened(pair, "198.51.100.0/24").hosts["head"]["facts"].update(
        service_manager="launchd", system="Darwin", firewall=None
    )
    reason = pair.reason()
    assert "launchd does not filter addresses. Limit the port with a firewall of your own and accept" in reason
    assert "nftables" not in reason


@pytest.mark.parametrize("value", ["224.0.0.0/4", "0.0.0.0"])
def test_networks_that_nobody_has(pair, value):
    assert f"llama_server_allowed has a value that is not an IPv4 network ({value}" in opened(pair, value).reason()


@pytest.mark.parametrize(
    "address, own, networks, shown",
    [
        ("192.0.2.10", [], ["192.0.2.0/24"], "192.0.2.10"),
        ("192.0.2.10", ["10.0.0.5", "192.0.2.10"], ["10.0.0.0/8"], "10.0.0.5"),
        ("192.0.2.10", ["10.0.0.5"], ["198.51.100.0/24"], "192.0.2.10"),
        ("strix0.lan", ["10.0.0.5"], ["10.0.0.0/8"], "10.0.0.5"),
        ("strix0.lan", [], ["10.0.0.0/8"], "strix0.lan"),
        ("localhost", ["172.17.0.1", "192.0.2.77"], ["192.0.2.0/24"], "192.0.2.77"),
        ("127.0.0.1", ["192.0.2.77"], ["0.0.0.0/0"], "192.0.2.77"),
        ("localhost", [], ["192.0.2.0/24"], "here"),
    ],
)
def test_clients_are_shown_an_address_that_they_reach(local, address, own, networks, shown):
    here = local.hosts["here"]
    here["ansible_host"] = address
    here["facts"]["addresses"] = own
    here["variables"].update(
        llama_server_host="0.0.0.0", llama_server_allowed=networks, llama_server_api_key_file="/etc/keys"
    )
    plan = local.plan()
    assert not plan["refused"], plan["reasons"]
    head = plan["head"]
    assert head["url"] == f"http://{shown}:8080"
    assert head["own_url"] == "http://127.0.0.1:8080"
    assert head["launcher"][head["launcher"].index("--url") + 1] == head["own_url"]
    assert "http://127.0.0.1" not in report.plan_table(plan) + report.plan_page(plan).partition("Commands")[0]


def test_a_link_s_address_counts_as_one_of_the_head_s(pair):
    pair.hosts["head"]["variables"]["llama_links"] = [{"interface": "t0", "address": "198.51.100.1/24"}]
    assert opened(pair, "198.51.100.0/24", host="0.0.0.0").plan()["head"]["url"] == "http://198.51.100.1:8080"

"""Workers that the head reaches through WireGuard: the plan, keys, the files of interfaces, and the verification."""

import base64
import json
import re
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import wireguard
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import addresses, cluster_inputs
from conftest import definition, typed

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    name: base64.b64encode(bytes([number] * 32)).decode() for number, name in enumerate(["head", "worker1", "worker2"])
}
PRIVATE = base64.b64encode(bytes(range(32))).decode()
DEVICES = {
    "networkd": "etc/systemd/network/70-llamacpp-wg-llama.netdev",
    "NetworkManager": "etc/NetworkManager/system-connections/llamacpp-wg-llama.nmconnection",
}


def own(host):
    """The link of WireGuard of a host's part of the plan."""
    (link,) = [link for link in host["links"] if link["kind"] == "wireguard"]
    return link


@pytest.fixture
def secret(pair):
    """All hosts have a kernel with WireGuard and a key. worker1 is reached by it, and worker2 as it is."""
    for name, key in KEYS.items():
        pair.hosts[name]["facts"]["wireguard"] = {"in_kernel": True, "public_key": key}
    pair.hosts["worker1"]["variables"]["llama_transport"] = "wireguard"
    return pair


# ------------------------------------------------------------------------------------------------------------------ plan


def test_a_worker_listens_on_wireguard_for_the_head_alone(secret):
    plan = secret.accepted()
    head, worker = plan["hosts"]["head"], plan["hosts"]["worker1"]
    assert plan["head"]["argv"][2] == "10.227.2.11:50052,192.0.2.12:50052"
    assert worker["services"][0]["listens"] == "10.227.2.11:50052"
    assert worker["services"][0]["allow"] == ["10.227.2.10", "10.227.2.11", "localhost"]
    (peer,) = own(worker)["peers"]
    assert list(peer.values()) == ["head", "10.227.2.10", "192.0.2.10:51852", "192.0.2.11", KEYS["head"]]
    assert [(peer["host"], peer["public_key"]) for peer in own(head)["peers"]] == [("worker1", KEYS["worker1"])]
    rules = [(rule["protocol"], rule["port"], rule["sources"], rule["address"]) for rule in worker["firewall"]]
    inside = [("tcp", port, ["10.227.2.10"], "10.227.2.11") for port in (50052, 50051)]
    assert rules == [*inside, ("udp", 51852, ["192.0.2.10"], "192.0.2.11")]
    assert [rule["sources"] for rule in head["firewall"]] == [["192.0.2.11"]]
    (link, _plain) = plan["estimate"]["links"]
    assert (link["kind"], own(worker)["mtu"], plan["links"]) == ("wireguard", 1420, ["worker1"])
    assert plan["hosts"]["worker2"]["links"] == []


@pytest.mark.parametrize("name, networks", [("head", 1), ("worker1", 1), ("worker2", 0)])
def test_nothing_leaves_by_another_interface_while_that_of_wireguard_is_missing(secret, name, networks):
    host = secret.plan()["hosts"][name]
    (service,) = host["services"]
    line = "ExecStartPre=+/usr/sbin/ip route replace unreachable 10.227.0.0/16 metric 4096 proto kernel\n"
    assert definition(host, service).count(line) == networks


def test_wireguard_goes_over_the_cable_that_joins_head_and_worker(secret):
    cable = {"interface": "eth1", "mtu": 9000, "manage": True}
    secret.hosts["head"]["variables"]["llama_links"] = [{**cable, "address": "10.0.0.1/30", "peer": "worker1"}]
    secret.hosts["worker1"]["variables"]["llama_links"] = [{**cable, "address": "10.0.0.2/30", "peer": "head"}]
    hosts = secret.plan()["hosts"]
    assert own(hosts["head"])["peers"][0]["endpoint"] == "10.0.0.2:51852"
    assert own(hosts["worker1"])["peers"][0]["endpoint"] == "10.0.0.1:51852"
    assert (own(hosts["worker1"])["mtu"], hosts["head"]["services"][0]["allow"][0]) == (8920, "10.227.2.11")


def test_an_entry_of_the_links_says_interface_and_address_itself(secret):
    mine = {"interface": "wg7", "address": "10.9.0.7/24", "manage": True, "kind": "wireguard"}
    secret.hosts["worker1"]["variables"].update(llama_links=[mine], llama_transport="plain")
    secret.hosts["head"]["variables"]["llama_links"] = [{**mine, "address": "10.9.0.1/24"}]
    secret.hosts["worker1"]["facts"]["wireguard"]["public_key"] = None
    plan = secret.plan()
    assert plan["hosts"]["worker1"]["services"][0]["listens"] == "10.9.0.7:50052"
    (peer,) = own(plan["hosts"]["head"])["peers"]
    assert (peer["address"], peer["public_key"]) == ("10.9.0.7", None), "the run has not made it yet"


def test_clusters_on_the_same_hosts_share_neither_interface_nor_port_nor_network(secret):
    first = own(secret.plan()["hosts"]["head"])
    hosts = cluster_inputs.settle("other", secret.hosts)
    cluster = addresses.with_wireguard(cluster_inputs.read("other", hosts))
    second = addresses.wireguard_of(cluster.hosts["head"])
    for key in ("interface", "port", "address"):
        assert first[key] != getattr(second, key)


@pytest.mark.parametrize(
    "facts, said",
    [
        ({"wireguard": {"in_kernel": False}}, "needs the kernel's module wireguard, which 6."),
        ({"service_manager": "supervisor"}, "needs Linux with systemd, and root"),
        ({"scope": "user", "service_manager": "systemd_user"}, "needs Linux with systemd, and root"),
    ],
)
@pytest.mark.parametrize("name", ["head", "worker1"])
def test_a_host_that_cannot_have_wireguard(secret, name, facts, said):
    secret.hosts[name]["facts"].update({"kernel": "6.1.0", **facts})
    refusal = secret.reason()
    assert said in refusal
    assert name in refusal
    assert "set llama_transport" in refusal


def test_two_hosts_with_one_address(secret):
    secret.hosts["worker2"].update(ansible_host="198.51.2.11")
    secret.hosts["worker2"]["variables"]["llama_transport"] = "wireguard"
    said = "worker2 and worker1 both have the address 10.227.2.11 in WireGuard: give one of them another one in 10.227.0.0/16 by"
    assert said in secret.reason()


@pytest.mark.parametrize(
    "name, address", [("worker1", "10.9.0.7/24"), ("worker1", "10.227.2.11/24"), ("head", "10.227.3.10/24")]
)
def test_ends_in_different_networks(secret, name, address):
    wide = {"interface": "wg7", "address": address, "manage": True, "kind": "wireguard"}
    secret.hosts[name]["variables"]["llama_links"] = [wide]
    if address == "10.227.2.11/24":  # the head is in it too
        assert not secret.plan()["refused"]
        secret.hosts["head"].update(ansible_host="192.0.3.10")
    refusal = secret.reason()
    assert f"{address} in WireGuard" in refusal or f"and head {address}" in refusal
    assert "give both an address in 10.227.0.0/16 by an entry of llama_links" in refusal


@pytest.mark.parametrize("name", ["head", "worker2"])
def test_hosts_with_one_key(secret, name):
    secret.hosts["worker2"]["variables"]["llama_transport"] = "wireguard"
    secret.hosts[name]["facts"]["wireguard"]["public_key"] = KEYS["worker1"]
    refusal = secret.reason()
    assert "have the same key of WireGuard" in refusal
    assert "remove /etc/wireguard-llamacpp.key on one of them" in refusal
    secret.hosts[name]["facts"]["wireguard"]["public_key"] = None
    assert not secret.plan()["refused"]


def test_a_tunnel_beside_wireguard(secret):
    secret.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"device": "CPU", "tunnel": "127.0.0.1:60052"}]
    assert "llama_worker_endpoints of worker1 has a tunnel, through which the head would go instead" in secret.reason()


@pytest.mark.parametrize("reached", ["127.0.0.1", "big.example.org"])
def test_a_host_that_is_reached_by_loopback_or_a_name_takes_the_address_of_its_link(secret, reached):
    head = secret.hosts["head"]
    head.update(ansible_host=reached)
    assert re.search("ansible_host of head is .* the network that joins (it with worker1|them)", secret.reason())
    head["variables"]["llama_links"] = [{"address": "192.0.2.10/24"}]
    assert own(secret.plan()["hosts"]["head"])["address"] == "10.227.2.10/16"


@pytest.mark.parametrize(
    "kind, round_trip, gbit", [(None, 0.78, 2.5), ("wireless", 6.48, 0.3), ("thunderbolt", 0.68, 2.5)]
)
def test_wireguard_is_planned_with_the_link_beneath_it(secret, kind, round_trip, gbit):
    secret.hosts["worker1"]["variables"]["llama_links"] = [{"address": "192.0.2.11/24", "kind": kind}] if kind else []
    (link, _plain) = secret.plan()["estimate"]["links"]
    assert (link["kind"], 2 * link["one_way_ms"], link["gbit_per_s"]) == ("wireguard", pytest.approx(round_trip), gbit)


def test_the_plan_says_what_keeps_udp_from_others(secret):
    text = plan_text.plan_page(typed(secret.plan()))
    assert "worker1  192.0.2.11: udp 51852 for 192.0.2.10; WireGuard answers its peers alone" in text
    assert "worker1  10.227.2.11: 50052, 50051 for 10.227.2.10; " in text


# ------------------------------------------------------------------------------------------------------------------ keys


def test_a_public_key_is_as_others_compute_it():
    """As OpenSSL 3.0.19 prints it (``openssl pkey -pubout``), and for other keys ``wg pubkey``."""
    assert wireguard.public_key(PRIVATE) == "j0DFrbaPJWJK5bIU6nZ6bslNgp09e14a0bpvPiE4KF8="
    assert [wireguard.public_key(text) for text in ("no key", "AAAA")] == [None, None]


def test_facts_say_whether_the_kernel_has_it_and_no_private_key(tmp_path):
    def ask(_argv):
        return "insmod /lib/modules/6.1/wireguard.ko\n"

    assert wireguard.of_host(names.DEFAULT, tmp_path, lambda _argv: "") == {"in_kernel": False, "public_key": None}
    assert wireguard.of_host(names.DEFAULT, tmp_path, ask)["in_kernel"]
    (tmp_path / "etc").mkdir()
    key = wireguard.key_file(names.DEFAULT, tmp_path)
    key.write_text(PRIVATE + "\n")
    key.chmod(0o600)
    found = wireguard.of_host(names.DEFAULT, tmp_path, ask)
    assert found["public_key"] == wireguard.public_key(PRIVATE)
    assert PRIVATE not in json.dumps(found)


# ---------------------------------------------------------------------------------------------------------------- verify

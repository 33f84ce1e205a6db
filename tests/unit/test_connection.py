"""Hosts that the inventory names: the address at which they were reached is the one that they are asked for."""

import copy
import ipaddress
import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import connection as reached
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from conftest import FACTS, known_answer_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.hosts import service_plan

LISTING = """1: lo    inet 127.0.0.1/8 scope host lo
1: lo    inet6 ::1/128 scope host
2: eth0    inet 192.0.2.7/24 brd 192.0.2.255 scope global eth0
2: eth0    inet6 fe80::5054:ff:fe12:3456/64 scope link
3: eth1    inet6 2001:db8::9/64 scope global
"""
"""What ``ip -o address`` of iproute2 prints, without the flags."""


@pytest.mark.parametrize(
    "connection, address",
    [
        ("198.51.100.4 50412 192.0.2.7 22", "192.0.2.7"),
        ("::ffff:198.51.100.4 50412 ::ffff:192.0.2.7 22", "192.0.2.7"),
        ("fe80::1%eth0 50412 fe80::5054:ff:fe12:3456%eth0 22", "192.0.2.7"),
        ("2001:db8::1 50412 2001:db8::9 22", None),
        ("2001:db8::1 50412 2001:db8::77 22", None),
        ("UNKNOWN 65535 UNKNOWN 65535", None),
        ("192.0.2.7", None),
        ("", None),
    ],
)
def test_the_address_of_a_connection(connection, address, tmp_path):
    assert reached.reached_address({"SSH_CONNECTION": connection}, tmp_path, lambda _argv: LISTING) == address


def test_sudo_does_not_pass_the_address_on_but_a_process_above_it_has_it(tmp_path, monkeypatch):
    def process(number, parent, environment):
        folder = tmp_path / "proc" / str(number)
        folder.mkdir(parents=True)
        (folder / "status").write_text(f"Name:\tsh\nPPid:\t{parent}\n")
        (folder / "environ").write_text("\0".join(environment))

    process(400, 300, ["PATH=/bin", "SUDO_USER=me", ""])
    process(300, 200, ["HOME=/home/me", "SSH_CONNECTION=198.51.100.4 50412 192.0.2.7 22", ""])
    process(200, 1, ["SSH_CONNECTION=198.51.100.4 50412 192.0.2.99 22"])
    monkeypatch.setattr("os.getppid", lambda: 400)
    assert reached.reached_address({}, tmp_path) == "192.0.2.7"
    (tmp_path / "proc/300/environ").write_text("")
    assert reached.reached_address({}, tmp_path) == "192.0.2.99"
    (tmp_path / "proc/200/environ").write_text("")
    assert reached.reached_address({}, tmp_path) is None


def test_a_name_in_the_inventory_is_enough_for_a_host_that_was_asked(pair):
    for name, address in (("head", "192.0.2.10"), ("worker1", "192.0.2.11")):
        pair.hosts[name].update(
            ansible_host=f"{name}.local", facts={**pair.hosts[name]["facts"], "reached_at": address}
        )
    plan = pair.accepted()
    assert plan["hosts"]["worker1"]["workers"][0]["endpoint"] == "192.0.2.11:50052"
    assert plan["hosts"]["worker2"]["firewall"][0]["sources"] == ["192.0.2.10"]
    read = cluster_inputs.read_cluster("test", copy.deepcopy(pair.hosts)).hosts["worker1"]
    assert read.cached_facts["reached_at"] == "192.0.2.11", "for a run in which it does not answer"
    pair.hosts["worker1"]["facts"]["reached_at"] = "127.0.0.1"
    assert "ansible_host for worker1 is '127.0.0.1'" in pair.reason()
    pair.hosts["worker1"]["facts"]["reached_at"] = None
    assert "ansible_host for worker1 is 'worker1.local'" in pair.reason()
    assert "not needed for hosts reached over SSH" in pair.reason()


def test_an_address_in_the_inventory_counts_whatever_the_host_says(pair):
    before = pair.plan()
    pair.hosts["worker1"]["facts"]["reached_at"] = "192.0.2.99"
    assert pair.plan() == before
    read = cluster_inputs.read_cluster("test", cluster_inputs.checked_hosts("test", pair.hosts)).hosts["worker1"]
    assert "reached_at" not in read.cached_facts


@pytest.mark.parametrize("connection, address", [("ssh", "192.0.2.11"), ("local", None)])
def test_on_the_controller_itself_it_is_the_connection_of_somebody_else(connection, address):
    told = {
        "groups": {"llama_cluster": ["a"], "llama_head": ["a"]},
        "hostvars": {"a": {"ansible_connection": connection, "llama_model_known_answer": known_answer_of()}},
    }
    _name, hosts = inventory.cluster_hosts(told, {"a": {"facts": {**FACTS, "cached": {}, "reached_at": "192.0.2.11"}}})
    assert hosts["a"]["facts"]["reached_at"] == address


NONE = (
    *("1.2.3.4/99", "1.2.3.4/24", "٣.٣.٣.٣", "0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255", "999.1.1.1"),
    *("01.2.3.4", "1.2.3", "::1", "worker1.lan"),
)


@pytest.mark.parametrize("address", NONE)
def test_what_a_host_says_is_an_address_of_one_host(pair, address):
    end = {"name": "eth0", "kind": "ethernet", "addresses": [address]}
    for said in ({"reached_at": address}, {"addresses": [address]}, {"rdma": [address]}, {"interfaces": [end]}):
        with pytest.raises(typed_json.Mismatch, match=next(iter(said))):
            facts.parse_facts({**pair.hosts["worker1"]["facts"], **said})


@pytest.mark.parametrize("address", [NONE[0], *NONE[2:]])
def test_no_operators_address_of_many_or_no_hosts_gets_into_a_plan(pair, address):
    pair.hosts["worker1"].update(ansible_host=address)
    assert f"ansible_host for worker1 is '{address}'" in pair.reason()
    pair.hosts["worker1"]["variables"]["llama_links"] = [{"address": address}]
    assert "llama_links[0].address for worker1" in pair.reason()


def test_what_is_no_address_is_no_part_of_a_plan():
    rules = FirewallRule(1, ("1.2.3.4/99",), "1.2.3.4"), FirewallRule(1, (), "٣.٣.٣.٣")
    services = service_plan(["x"], "1.2.3.4:1", allow=("1.2.3.4/99",)), service_plan(["x"], "1.2.3.4:99999")
    for part, place in zip((*rules, *services), ("sources", "address", "allow", "listens")):
        with pytest.raises(typed_json.Mismatch, match=place):
            typed_json.parse(type(part), typed_json.dump(part))


OCTETS = st.integers(0, 300).map(str) | st.sampled_from(["", "٣", "01", " 1", "1 ", "-1", "1/24", "0x1"])


@settings(deadline=None)
@given(st.lists(OCTETS, min_size=4, max_size=4), st.sampled_from(["", "/0", "/24", "/33", "/٣", "/", "\n"]))
@example(["0"] * 4, "")
def test_addresses_are_those_that_python_reads(octets, end):
    text = ".".join(octets) + end
    try:
        read = ipaddress.IPv4Interface(text)
        assert str(read.ip) == text.partition("/")[0]
    except ValueError:
        assert not re.fullmatch(validation.NETWORK_PATTERN, text)
        return
    assert re.fullmatch(validation.NETWORK_PATTERN, text)
    many = read.ip.is_multicast or read.ip.is_reserved or read.ip in ipaddress.IPv4Network("0.0.0.0/8")
    form = validation.HOST_CIDR_PATTERN if "/" in text else validation.HOST_IP_PATTERN
    assert bool(re.fullmatch(form, text)) != many


@pytest.mark.parametrize("character", ["\ufffe", "\uffff", "\U0001fffe", "\U0010ffff", "\ufdd0", "\ud800", "\u2028"])
def test_what_is_no_character_is_refused_like_a_control_character(character):
    assert not validation.is_plain(f"a{character}")
    assert validation.is_plain("aä\U0001f600\ufffd\ufdcf")

import configparser
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import CommandError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import applying, configuration, inspection
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan
from ansible_collections.llamacpp.cluster.plugins.modules import link as link_module
from conftest import Cluster, known_answer_of

DATA = Path(__file__).parent / "data" / "links"
PATHS = {
    "networkd": "etc/systemd/network/70-llamacpp-eth1.network",
    "NetworkManager": "etc/NetworkManager/system-connections/llamacpp-eth1.nmconnection",
}


def link(**values):
    return LinkPlan("eth1", "10.99.0.12/24", mtu=9000, peer="head", manage=True)._replace(**values)


class Machine:
    """A host as a tree of files, with a runner that notes commands and does what the managers do with our files."""

    def __init__(self, root):
        self.root, self.commands, self.broken = root, [], set()
        self.manager = "networkd"
        self.addresses = {"lo": ["127.0.0.1/8", "::1/128"]}
        self.add("eth0", "10.1.0.2/24").add("eth1")
        self.write(
            "proc/net/route",
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
            "eth0\t00000000\t0100010A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
            "eth0\t0000010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n",
        )

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def add(self, name, *addresses, driver=None, **files):
        self.addresses[name] = list(addresses)
        index = len(self.addresses)
        values = {"type": "1", "mtu": "1500", "speed": "10000", "carrier": "1", "address": f"02:00:00:00:00:0{index}"}
        for file, text in {"ifindex": str(index), **values, **files}.items():
            self.write(f"sys/class/net/{name}/{file}", text + "\n")
        if driver:
            place = self.root / "sys/bus/thunderbolt/drivers" / driver
            place.mkdir(parents=True, exist_ok=True)
            (self.root / f"sys/class/net/{name}/device").mkdir()
            (self.root / f"sys/class/net/{name}/device/driver").symlink_to(place)
        return self

    def remove(self, name):
        del self.addresses[name]
        shutil.rmtree(self.root / f"sys/class/net/{name}")

    def configure(self, name):
        """As a manager does: the interface gets what the files of ours say of it."""
        for text in self.installed().values():
            ((interface, address),) = configuration.HEADER_PATTERN.findall(text)
            if interface == name and name in self.addresses:
                self.addresses[name] = [address]
                for mtu in re.findall(r"(?i)^mtu(?:bytes)?=(\d+)$", text, re.M):
                    self.write(f"sys/class/net/{name}/mtu", f"{mtu}\n")

    def run(self, argv):
        if argv[:3] == ["ip", "-json", "address"]:
            entries = [
                {"ifname": name, "addr_info": [dict(zip(("local", "prefixlen"), entry.split("/"))) for entry in held]}
                for name, held in self.addresses.items()
            ]
            return json.dumps(entries)
        if argv[:4] == ["ip", "-json", "route", "get"]:
            return json.dumps([{"dst": argv[4], "dev": "eth0"}])
        if argv[:2] == ["systemctl", "is-active"]:
            name = {"NetworkManager": "NetworkManager", "systemd-networkd": "networkd"}[argv[2]]
            if name != self.manager:
                raise CommandError(argv, "inactive", 3)
            return "active\n"
        self.commands.append(" ".join(argv))
        if self.commands[-1] in self.broken:
            raise CommandError(argv, "no", 1)
        if argv[:2] == ["networkctl", "reconfigure"]:
            self.configure(argv[2])
        if argv[0] == "nmcli" and "up" in argv:
            self.configure(argv[-1])
        if argv[:3] == ["ip", "address", "del"]:
            self.addresses[argv[5]].remove(argv[3])
        return ""

    @property
    def system(self):
        system = System(root=self.root)
        system.run = self.run
        return system

    def inspect(self):
        return inspection.inspect(self.system)

    def apply(self, *wanted, check=False):
        self.commands.clear()
        return applying.apply_links(list(wanted), check, self.system)

    def differs(self, *wanted):
        return configuration.has_changes(list(wanted), self.system)

    def installed(self):
        paths = [path for place in PATHS.values() for path in (self.root / place).parent.glob("*llamacpp-*")]
        return {f"/{path.relative_to(self.root)}": path.read_text() for path in paths}

    def refuse(self, *wanted):
        """The sentence with which the links are refused; nothing has been changed then."""
        before = self.files()
        with pytest.raises(Refusal) as caught:
            self.apply(*wanted)
        assert (self.files(), self.commands) == (before, [])
        return str(caught.value)

    def files(self):
        return {
            str(path.relative_to(self.root)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
            for path in self.root.rglob("*")
            if path.is_file()
        }


MANAGERS = ["networkd", "NetworkManager"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setattr(commands, "find", lambda program: None)
    monkeypatch.setattr(applying, "CONFIGURE_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(applying, "POLL_SECONDS", 0.001)
    return Machine(tmp_path)


@pytest.fixture(params=MANAGERS)
def any_manager(machine, request):
    """The machine under each manager."""
    machine.manager = request.param
    return machine


def test_what_a_host_has(machine):
    machine.add("thunderbolt0", "10.98.0.1/30", "fe80::1/64", driver="thunderbolt-net", mtu="65520")
    machine.add("br0").add("veth1234").add("eth2", driver="e1000e")
    for port in ("veth1234", "eth2"):
        (machine.root / f"sys/class/net/{port}/master").symlink_to("../br0")
    found = machine.inspect()
    assert (found.manager, found.protected_names) == ("networkd", {"eth0"})
    assert list(found.interfaces) == ["br0", "eth0", "eth1", "eth2", "thunderbolt0"], "no port of a container"
    assert found.interfaces["eth0"] == (("10.1.0.2/24",), 1500, "02:00:00:00:00:02")
    assert found.interfaces["thunderbolt0"] == (("10.98.0.1/30",), 65520, "02:00:00:00:00:04")


def test_a_host_where_there_is_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setattr(commands, "find", lambda program: None)
    assert inspection.inspect(System(root=tmp_path)) == (None, {}, frozenset())


def test_interfaces_where_ssh_arrives_are_protected(machine, monkeypatch):
    machine.addresses["eth1"] = ["10.5.0.1/24"]
    machine.add("eth2", "2001:db8::5/64").add("eth3")
    for connection, expected in (
        ("10.5.0.9 40000 10.5.0.1 22", {"eth0", "eth1"}),
        ("2001:db8::9 40000 2001:db8::5 22", {"eth0", "eth2"}),
        ("fe80::9%eth3 40000 fe80::5%eth3 22", {"eth0", "eth3"}),
        ("$(reboot) 1 -x 22", {"eth0"}),
        ("too short", {"eth0"}),
    ):
        monkeypatch.setenv("SSH_CONNECTION", connection)
        assert machine.inspect().protected_names == expected
    monkeypatch.delenv("SSH_CONNECTION")
    # sudo takes the variable away; the shell above it still has it.
    above = f"proc/{os.getppid()}/environ"
    machine.write(above, "A=b\0SSH_CONNECTION=10.5.0.9 40000 10.5.0.1 22\0")
    assert machine.inspect().protected_names == {"eth0", "eth1"}


def test_ports_of_a_bridge_and_ipv6_routes_are_protected(machine):
    machine.add("bond0").add("eth2").add("eth3").add("br0")
    (machine.root / "sys/class/net/br0/lower_bond0").symlink_to("../bond0")
    (machine.root / "sys/class/net/bond0/lower_eth2").symlink_to("../eth2")
    zero = "0" * 32
    machine.write(
        "proc/net/ipv6_route",
        f"{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003      br0\n"
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo\n"
        f"fe800000000000000000000000000000 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001     eth3\n",
    )
    assert machine.inspect().protected_names == {"bond0", "br0", "eth0", "eth2"}


SECTIONS = {
    "networkd": {
        "Match": {"Name": "eth1"},
        "Link": {"RequiredForOnline": "no", "MTUBytes": "9000"},
        "Network": {
            **{"Address": "10.99.0.12/24", "DHCP": "no", "LinkLocalAddressing": "ipv6", "IPv6AcceptRA": "no"},
            "ConfigureWithoutCarrier": "yes",
        },
    },
    "NetworkManager": {
        "ethernet": {"mtu": "9000"},
        "ipv4": {"method": "manual", "address1": "10.99.0.12/24", "never-default": "true"},
        "ipv6": {"method": "link-local", "never-default": "true"},
    },
}


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_file_of_a_manager(machine, manager):
    machine.manager = manager
    machine.apply(link())
    ((path, text),) = machine.installed().items()
    assert path == "/" + PATHS[manager]
    parser = configparser.RawConfigParser()
    parser.optionxform = str
    parser.read_string(text)
    assert {name: dict(parser[name]) for name in SECTIONS[manager]} == SECTIONS[manager]
    assert "eth1" in (parser["connection"]["interface-name"] if "connection" in parser else text)
    machine.apply(link(mtu=None))
    assert "mtu" not in machine.installed()[path].lower()
    machine.apply(link())
    assert machine.installed() == {path: text}, "its UUID stays"


def test_the_protected_interface_is_refused(machine, monkeypatch):
    assert "eth0 carries the connection that Ansible uses" in machine.refuse(link(interface="eth0"))
    machine.apply(link())
    monkeypatch.setenv("SSH_CONNECTION", "10.99.0.11 40000 10.99.0.12 22")
    assert "eth1 carries the connection that Ansible uses" in machine.refuse()


def test_what_cannot_be_configured_is_refused(machine):
    machine.add("eth2")
    other = link(interface="eth2", address="10.99.0.13/16")
    assert "is in the same network as 10.1.0.2/24 on eth0" in machine.refuse(link(address="10.1.0.200/25"))
    assert "is in the same network as 10.99.0.12/24 on eth1" in machine.refuse(link(), other)
    assert "no interface eth9 (available: eth0, eth1, eth2)" in machine.refuse(link(), link(interface="eth9"))
    assert "this host has no interface ../eth1" in machine.refuse(link(interface="../eth1"))
    machine.addresses["eth1"] = ["10.55.0.1/24"]
    assert "eth1 already has the address 10.55.0.1/24" in machine.refuse(link())
    machine.manager = None
    assert "neither NetworkManager nor systemd-networkd runs" in machine.refuse(link())
    assert machine.apply(link(manage=False)) == ("", "")


def test_a_file_of_others_under_the_name_of_a_link_is_refused_and_stays(any_manager):
    machine, file = any_manager, PATHS[any_manager.manager]
    machine.write(file, "[Match]\nName=eth9\n")
    assert f"eth1 is configured by /{file}, which this collection did not create" in machine.refuse(link())
    before = machine.files()
    assert machine.apply() == ("", "")
    assert machine.files() == before


COMMANDS = {
    "networkd": ["networkctl reload", "networkctl reconfigure eth1"],
    "NetworkManager": ["nmcli connection reload", "nmcli --wait 0.1 connection up llamacpp-eth1 ifname eth1"],
}


def test_apply_twice_and_take_back(any_manager):
    """Check mode changes nothing and reports the same; the second run finds nothing to do; an empty list leaves no trace."""
    machine = any_manager
    bare = machine.files()
    reported = machine.apply(link(), check=True)
    assert (machine.files(), machine.commands) == (bare, [])
    assert machine.differs(link())
    assert machine.apply(link()) == reported
    assert reported[0] == "eth1 has no address, mtu 1500\n"
    assert reported[1].startswith(f"eth1 has 10.99.0.12/24, mtu 9000\n--- /{PATHS[machine.manager]}\n")
    assert machine.commands == COMMANDS[machine.manager]
    file = machine.root / PATHS[machine.manager]
    assert file.stat().st_mode & 0o777 == (0o644 if machine.manager == "networkd" else 0o600)
    assert (machine.addresses["eth1"], machine.addresses["eth0"]) == (["10.99.0.12/24"], ["10.1.0.2/24"])

    now = machine.files()
    before, after = machine.apply(link())
    assert before == after
    assert (machine.files(), machine.commands) == (now, [])
    assert not machine.differs(link())
    assert machine.differs()

    before, after = machine.apply(check=True)
    assert (before, after) == (reported[1].partition("\n")[2], "")
    assert machine.files() == now
    machine.apply()
    assert "ip address del 10.99.0.12/24 dev eth1" in machine.commands
    assert machine.addresses["eth1"] == []
    assert machine.files().keys() == bare.keys()
    assert machine.apply() == ("", "")
    assert not machine.differs()


@pytest.mark.parametrize("change", ["address", "mtu", "file"])
def test_drift_is_found_and_corrected(any_manager, change):
    machine = any_manager
    machine.addresses["eth1"] = ["169.254.3.4/16"]
    machine.apply(link())
    file = machine.root / PATHS[machine.manager]
    if change == "address":
        machine.addresses["eth1"] = []
    elif change == "mtu":
        machine.write("sys/class/net/eth1/mtu", "1500\n")
    else:
        file.write_text(file.read_text() + "# edited\n")
    before, after = machine.apply(link())
    assert before != after
    before, after = machine.apply(link())
    assert before == after


def test_another_address_and_no_mtu_any_more(any_manager):
    machine = any_manager
    machine.apply(link())
    moved = link(address="10.99.0.40/24", mtu=None)
    before, after = machine.apply(moved)
    assert before.startswith("eth1 has 10.99.0.12/24\n")
    assert after.startswith("eth1 has 10.99.0.40/24\n")
    assert machine.addresses["eth1"] == ["10.99.0.40/24"]
    assert not machine.differs(moved)


def test_only_the_link_that_changes_is_configured_anew(any_manager):
    machine = any_manager
    machine.add("eth2")
    other = link(interface="eth2", address="10.98.0.1/30", mtu=None)
    machine.apply(link(), other)
    for changed in ([link(address="10.99.0.40/24"), other], [other]):
        machine.apply(*changed)
        assert not [command for command in machine.commands if "eth2" in command]
    assert (machine.addresses["eth1"], machine.addresses["eth2"]) == ([], ["10.98.0.1/30"])


def test_what_is_left_of_a_manager_or_an_interface_that_went_is_taken_back(machine):
    machine.apply(link())
    machine.manager = "NetworkManager"
    machine.apply(link(address="10.99.0.40/24"))
    assert list(machine.installed()) == ["/" + PATHS["NetworkManager"]]
    machine.manager = None
    machine.apply()
    assert (machine.installed(), machine.addresses["eth1"]) == ({}, [])
    machine.manager = "networkd"
    machine.apply(link())
    machine.remove("eth1")
    machine.apply()
    assert machine.installed() == {}


def test_network_manager_waits_for_the_other_end(machine):
    machine.manager = "NetworkManager"
    machine.write("sys/class/net/eth1/carrier", "0\n")
    machine.apply(link())
    assert machine.commands == ["nmcli connection reload"]
    before, after = machine.apply(link())
    assert before == after


def test_an_interface_that_does_not_take_it_is_an_error(machine, monkeypatch):
    monkeypatch.setattr(machine, "configure", lambda name: machine.addresses.update(eth1=["10.99.0.12/24"]))
    with pytest.raises(Refusal, match=r"0.1 seconds after the change, eth1 has 10.99.0.12/24, mtu 1500"):
        machine.apply(link())
    assert machine.differs(link())


def test_a_command_that_fails_is_an_error(any_manager):
    first = COMMANDS[any_manager.manager][0]
    any_manager.broken.add(first)
    with pytest.raises(Refusal, match=f"{first} failed: no"):
        any_manager.apply(link())


def test_the_module_takes_the_links_of_a_plan(monkeypatch, call):
    """With nothing where the operator says nothing."""
    given = {"interface": "eth1", "address": "198.51.100.2/30", "manage": True}
    cluster = Cluster().add("head", "head", llama_model_known_answer=known_answer_of())
    links = cluster.add("worker", "worker", llama_links=[given]).plan()["hosts"]["worker"]["links"]
    monkeypatch.setattr(applying, "apply_links", lambda wanted, _check, _system: ("", repr(wanted)))
    assert call(module=link_module, links=links)["changed"]

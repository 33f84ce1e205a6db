import configparser
import json
import os
import pwd
import re
import shutil
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import CommandError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import (
    configuration,
    inspection,
    network_files,
    problems,
    throughput,
)
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
        self.manager, self.unmanaged = "networkd", False
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

    def by_networkd(self, name, file, text=""):
        index = (self.root / f"sys/class/net/{name}/ifindex").read_text().strip()
        self.write(f"run/systemd/netif/links/{index}", f"# private\nADMIN_STATE=configured\nNETWORK_FILE={file}\n")
        return self.write(file.lstrip("/"), text)

    def thunderbolt(self, name, authorized, uuid="c0010000-0070-7f18-2368-d2a8f1a2b101"):
        folder = f"sys/bus/thunderbolt/devices/{name}"
        for file, text in {"unique_id": uuid, "device_name": "Dock", "tx_speed": "20.0 Gb/s", "tx_lanes": "2"}.items():
            self.write(f"{folder}/{file}", text + "\n")
        if authorized is not None:
            self.write(f"{folder}/authorized", f"{authorized}\n")
        return self

    def remove(self, name):
        del self.addresses[name]
        shutil.rmtree(self.root / f"sys/class/net/{name}")

    def configure(self, name):
        """As a manager does: the interface gets what the files of ours say of it."""
        for each in network_files.links_of(network_files.installed(self.system)):
            if each.interface == name and name in self.addresses:
                self.addresses[name] = [each.address]
                if each.mtu:
                    self.write(f"sys/class/net/{name}/mtu", f"{each.mtu}\n")

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
        if argv[:3] == ["nmcli", "-g", "GENERAL.STATE"]:
            return "10 (unmanaged)\n" if self.unmanaged else "100 (connected)\n"
        self.commands.append(" ".join(argv))
        if self.commands[-1] in self.broken:
            raise CommandError(argv, "no", 1)
        if argv[:2] == ["networkctl", "reconfigure"]:
            self.configure(argv[2])
        if argv[0] == "nmcli" and "up" in argv:
            self.configure(argv[-1])
        if argv[:3] == ["ip", "address", "del"]:
            self.addresses[argv[5]].remove(argv[3])
        if argv[:4] == ["ip", "link", "set", "dev"]:
            self.write(f"sys/class/net/{argv[4]}/mtu", argv[6] + "\n")
        return ""

    @property
    def system(self):
        system = System(root=self.root)
        system.run = self.run
        return system

    def inspect(self):
        return inspection.inspect(self.system)

    def problems(self, *wanted):
        return problems.problems(list(wanted), self.inspect(), self.system)

    def apply(self, *wanted, check=False):
        self.commands.clear()
        return configuration.apply(list(wanted), check, self.system)

    def differs(self, *wanted):
        return configuration.differs(list(wanted), self.system)

    def installed(self):
        return network_files.installed(self.system)

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


def machine_of(tmp_path, monkeypatch):
    programs: set[str] = set()
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setattr(commands, "find", lambda program: program if program in programs else None)
    monkeypatch.setattr(configuration, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(configuration, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(problems.os, "geteuid", lambda: 0)
    made = Machine(tmp_path)
    made.programs = programs
    return made


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return machine_of(tmp_path, monkeypatch)


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
    machine.thunderbolt("0-0", 1).thunderbolt("0-1", None).thunderbolt("0-301", 0)
    machine.write("sys/bus/thunderbolt/devices/0-1.0/key", "network").write("sys/bus/thunderbolt/devices/domain0/x", "")
    found = machine.inspect()
    assert (found.manager, found.protected, found.ssh) == ("networkd", {"eth0"}, ())
    assert list(found.interfaces) == ["br0", "eth0", "eth1", "eth2", "thunderbolt0"], "no port of a container"
    assert found.interfaces["eth0"] == (("10.1.0.2/24",), 1500, "02:00:00:00:00:02")
    assert found.interfaces["thunderbolt0"] == (("10.98.0.1/30",), 65520, "02:00:00:00:00:04")
    uuid = "c0010000-0070-7f18-2368-d2a8f1a2b101"
    authorised = {"0-0": True, "0-1": None, "0-301": False}
    assert found.thunderbolt == tuple((name, "Dock", uuid, known) for name, known in authorised.items())


def test_a_host_where_there_is_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_CONNECTION", raising=False)

    system = System(root=tmp_path)
    monkeypatch.setattr(commands, "find", lambda program: None)
    found = inspection.inspect(system)
    assert found == (None, {}, frozenset(), (), ())


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
        assert machine.inspect().protected == expected
    monkeypatch.delenv("SSH_CONNECTION")
    # sudo takes the variable away; the shell above it still has it.
    above = f"proc/{os.getppid()}/environ"
    machine.write(above, "A=b\0SSH_CONNECTION=10.5.0.9 40000 10.5.0.1 22\0")
    assert machine.inspect().protected == {"eth0", "eth1"}


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
    assert machine.inspect().protected == {"bond0", "br0", "eth0", "eth2"}


def parsed(text):
    parser = configparser.RawConfigParser()
    parser.optionxform = str
    parser.read_string(text)
    return parser


def planned(link, manager):
    """The file that configures a link."""
    (found,) = network_files.planned([link], manager, names.DEFAULT).items()
    assert found[0] == "/" + PATHS[manager]
    return found[1]


def test_a_file_of_networkd():
    parser = parsed(planned(link(), "networkd"))
    assert dict(parser["Match"]) == {"Name": "eth1"}
    assert dict(parser["Link"]) == {"RequiredForOnline": "no", "MTUBytes": "9000"}
    assert dict(parser["Network"]) == {
        "Address": "10.99.0.12/24",
        "DHCP": "no",
        "LinkLocalAddressing": "ipv6",
        "IPv6AcceptRA": "no",
        "ConfigureWithoutCarrier": "yes",
    }
    assert "MTUBytes" not in planned(link(mtu=None), "networkd")


def test_a_profile_of_network_manager():
    parser = parsed(planned(link(), "NetworkManager"))
    assert parser["connection"]["interface-name"] == "eth1"
    assert parser["connection"]["id"] == "llamacpp-eth1"
    assert dict(parser["ethernet"]) == {"mtu": "9000"}
    assert dict(parser["ipv4"]) == {"method": "manual", "address1": "10.99.0.12/24", "never-default": "true"}
    assert dict(parser["ipv6"]) == {"method": "link-local", "never-default": "true"}
    assert planned(link(), "NetworkManager") == planned(link(), "NetworkManager"), "its UUID stays"
    assert "mtu" not in planned(link(mtu=None), "NetworkManager")


def test_nothing_speaks_against_a_good_link(any_manager):
    for good in (link(), link(mtu=None, peer=None, address="10.99.0.0/31"), link(interface="eth0", manage=False)):
        assert any_manager.problems(good) == []
    any_manager.addresses["eth1"] = ["169.254.3.4/16"]
    assert any_manager.problems(link()) == []


INVALID = {
    "interface": ["eth 1", "../eth1", "eth1\n[Network]", "-eth1", "eth*", "..", "", "a" * 16, None],
    "address": [
        *("10.99.0.12", "10.99.0.999/24", "10.99.0.12/255.255.255.0", "10.99.0.12/32", "10.99.0.12/024", "0.0.0.0/0"),
        *("10.99.0.0/24", "10.99.0.255/24", "127.0.0.1/8", "224.0.0.1/24", "fe80::1/64", None),
        "10.99.0.12/24\nGateway=10.99.0.1",
    ],
    "mtu": [68, 70000, True, "9000\nDNS=10.0.0.1"],
    "thunderbolt": ["", "Dock", "C0010000-0070-7F18-2368-D2A8F1A2B101", "0-1\n", "--all", "0-1/..", 7],
}


def test_hostile_and_wrong_values_are_refused(machine):
    for field, value in ((field, value) for field, values in INVALID.items() for value in values):
        for manage in (True, False):
            sentence = machine.refuse(link(manage=manage, **{field: value}))
            assert sentence.startswith("llama_links: ")
            assert repr(value) in sentence


def test_the_protected_interface_is_refused(machine, monkeypatch):
    assert "eth0 carries the connection that Ansible uses" in machine.refuse(link(interface="eth0"))
    machine.apply(link())
    monkeypatch.setenv("SSH_CONNECTION", "10.99.0.11 40000 10.99.0.12 22")
    assert "eth1 carries the connection that Ansible uses, and its address 10.99.0.12/24" in machine.refuse()


def test_one_bad_link_keeps_all_from_being_configured(machine):
    missing = link(interface="eth9", address="10.98.0.1/24")
    assert "no interface eth9 (it has eth0, eth1)" in machine.refuse(link(), missing)


def test_an_interface_that_is_no_cable_is_refused(machine):
    machine.add("wlan0").add("tun0", type="65534").add("br0").add("eth5", driver="x")
    (machine.root / "sys/class/net/wlan0/wireless").mkdir()
    (machine.root / "sys/class/net/br0/bridge").mkdir()
    (machine.root / "sys/class/net/eth5/master").symlink_to("../br0")
    for name in ("wlan0", "tun0", "br0"):
        assert f"{name} is not an Ethernet or Thunderbolt interface" in machine.refuse(link(interface=name))
    assert "eth5 is part of br0" in machine.refuse(link(interface="eth5"))


def test_a_host_without_manager_or_ip_or_root_is_refused(machine, monkeypatch):
    machine.manager = None
    assert "neither NetworkManager nor systemd-networkd runs" in machine.refuse(link())
    machine.manager = "networkd"
    run = machine.run
    monkeypatch.setattr(machine, "run", lambda argv: "" if argv[0] == "ip" else run(argv))
    machine.write("proc/net/route", "")
    assert "install iproute2" in machine.refuse(link())
    monkeypatch.setattr(problems.os, "geteuid", lambda: 1000)
    assert "needs root" in machine.refuse(link())
    assert machine.problems(link(manage=False)) == []


def test_networks_that_overlap_are_refused(machine, monkeypatch):
    machine.add("eth2")
    other = link(interface="eth2", address="10.99.0.13/16")
    assert "is in the same network as 10.1.0.2/24 of eth0" in machine.refuse(link(address="10.1.0.200/25"))
    assert "is in the same network as 10.99.0.12/24 of eth1" in machine.refuse(link(), other)
    assert "eth1 is named by two links" in machine.refuse(link(), link(address="10.98.0.1/24"))
    monkeypatch.setenv("SSH_CONNECTION", "10.99.0.77 40000 10.1.0.2 22")
    assert "contains 10.99.0.77, from which Ansible is connected" in machine.refuse(link())


def test_an_interface_in_use_is_refused(machine):
    machine.addresses["eth1"] = ["10.55.0.1/24"]
    assert "eth1 is already in use with address 10.55.0.1/24" in machine.refuse(link())
    machine.addresses["eth1"] = []
    machine.write("etc/network/interfaces.d/cable", "auto eth1\niface eth1 inet dhcp\n")
    assert "eth1 is already configured by /etc/network/interfaces.d/cable" in machine.refuse(link())
    (machine.root / "etc/network/interfaces.d/cable").unlink()
    machine.manager, machine.unmanaged = "NetworkManager", True
    assert "NetworkManager does not manage eth1" in machine.refuse(link())


@pytest.mark.parametrize(
    "file, text, refused",
    [
        ("/etc/systemd/network/80-lan.network", "[Match]\nName=e*\n[Network]\nDHCP=yes\n", False),
        ("/etc/systemd/network/80-lan.network", "[Network]\nAddress=10.77.0.1/24\n", True),
        ("/etc/systemd/network/80-lan.network", "[Network]\nAddress=10.99.0.12/24\nAddress=2001:db8::1/64\n", False),
        ("/etc/systemd/network/10-lan.network", "[Match]\nName=e*\n[Network]\nDHCP=yes\n", True),
        ("/run/systemd/network/10-netplan-eth1.network", "[Network]\nDHCP=yes\n", True),
    ],
)
def test_foreign_files_of_networkd(machine, file, text, refused):
    machine.by_networkd("eth1", file, text)
    if refused:
        assert f"eth1 is already configured by {file}" in machine.refuse(link())
    else:
        machine.apply(link())


@pytest.mark.parametrize(
    "text, refused",
    [
        ("[connection]\ninterface-name=eth1\n[ipv4]\nmethod=manual\naddress1=10.66.0.1/24,10.66.0.254\n", True),
        ("[connection]\nid=x\n[ethernet]\nmac-address=02:00:00:00:00:03\n[ipv4]\naddresses=10.66.0.1/24\n", True),
        ("[connection]\ninterface-name=eth1\n[ipv4]\nmethod=manual\naddress1=10.99.0.12/24\n", False),
        ("[connection]\ninterface-name=eth1\n[ipv4]\nmethod=auto\n", False),
        ("[connection]\ninterface-name=eth2\n[ipv4]\naddress1=10.66.0.1/24\n", False),
        ("this is no profile", False),
    ],
)
def test_foreign_profiles_of_network_manager(machine, text, refused):
    machine.manager = "NetworkManager"
    machine.write("run/NetworkManager/system-connections/a b.nmconnection", text)
    if refused:
        assert "configured by /run/NetworkManager/system-connections/a b.nmconnection" in machine.refuse(link())
    else:
        machine.apply(link())


def test_a_file_of_others_under_the_name_of_a_link_is_refused_and_stays(any_manager):
    machine, file = any_manager, PATHS[any_manager.manager]
    machine.write(file, "[Match]\nName=eth9\n")
    assert f"eth1 is already configured by /{file}" in machine.refuse(link())
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
    assert reported[0] == "eth1: no address, mtu 1500\n"
    assert reported[1].startswith(f"eth1: 10.99.0.12/24, mtu 9000\n--- /{PATHS[machine.manager]} 06")
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
    assert (before, after) == (reported[1], "eth1: no address, mtu 1500\n")
    assert machine.files() == now
    machine.apply()
    assert "ip address del 10.99.0.12/24 dev eth1" in machine.commands
    assert machine.addresses["eth1"] == []
    assert {path: kept[0] for path, kept in machine.files().items()} == {path: kept[0] for path, kept in bare.items()}
    assert machine.apply() == ("", "")
    assert not machine.differs()


@pytest.mark.parametrize("change", ["address", "mtu", "file", "mode"])
def test_drift_is_found_and_corrected(any_manager, change):
    machine = any_manager
    machine.apply(link())
    file = machine.root / PATHS[machine.manager]
    if change == "address":
        machine.addresses["eth1"] = []
    elif change == "mtu":
        machine.write("sys/class/net/eth1/mtu", "1500\n")
    elif change == "file":
        file.write_text(file.read_text() + "# edited\n")
    else:
        file.chmod(0o666)
    before, after = machine.apply(link())
    assert before != after
    before, after = machine.apply(link())
    assert before == after


def test_another_address_and_no_mtu_any_more(any_manager):
    machine = any_manager
    machine.apply(link())
    before, after = machine.apply(link(address="10.99.0.40/24", mtu=None))
    assert before.startswith("eth1: 10.99.0.12/24, mtu 9000\n")
    assert after.startswith("eth1: 10.99.0.40/24, mtu 1500\n")
    assert machine.inspect().interfaces["eth1"][:2] == (("10.99.0.40/24",), 1500)
    before, after = machine.apply(link(address="10.99.0.40/24", mtu=None))
    assert before == after


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
    _before, after = machine.apply(link())
    assert after.startswith("eth1: 10.99.0.12/24 as soon as the other end is connected\n")
    assert machine.commands == ["nmcli connection reload"]
    before, after = machine.apply(link())
    assert before == after


def test_an_interface_that_does_not_take_it_is_an_error(machine, monkeypatch):
    monkeypatch.setattr(machine, "configure", lambda name: machine.addresses.update(eth1=["10.99.0.12/24"]))
    with pytest.raises(Refusal, match=r"eth1: 10.99.0.12/24, mtu 1500 \(wanted: eth1: 10.99.0.12/24, mtu 9000\)"):
        machine.apply(link())
    assert machine.differs(link())


def test_a_command_that_fails_is_an_error(any_manager):
    first = COMMANDS[any_manager.manager][0]
    any_manager.broken.add(first)
    with pytest.raises(Refusal, match=f"«{first}» failed: no"):
        any_manager.apply(link())


DOCK = "c0010000-0070-7f18-2368-d2a8f1a2b101"


@pytest.mark.parametrize("named, boltctl", [(DOCK, True), (DOCK, False), ("0-1", True)])
def test_thunderbolt_devices_that_a_link_names_are_authorised(machine, boltctl, named, monkeypatch):
    """Constructed from the kernel's documentation of sysfs: the interface comes when the dock between the hosts is authorised."""
    machine.thunderbolt("0-0", 1).thunderbolt("0-1", 0).thunderbolt("0-3", None)
    machine.thunderbolt("1-1", 0, "d1030000-0090-8f18-23c5-b11c6cd30923")
    wanted = link(interface="thunderbolt0", mtu=65520, thunderbolt=named)
    authorized = machine.root / "sys/bus/thunderbolt/devices/0-1/authorized"
    plain = machine.run

    def run(argv):
        if argv[0] == "boltctl":
            authorized.write_text("1")
        if authorized.read_text() == "1" and "thunderbolt0" not in machine.addresses:
            machine.add("thunderbolt0", driver="thunderbolt-net")
        return plain(argv)

    monkeypatch.setattr(machine, "run", run)
    monkeypatch.setattr(configuration.time, "sleep", lambda seconds: machine.inspect())
    if boltctl:
        machine.programs.add("boltctl")
    before, after = machine.apply(wanted, check=True)
    assert before.startswith("thunderbolt 0-1: authorized 0\nthunderbolt0: missing\n")
    assert after.startswith("thunderbolt 0-1: authorized 1\nthunderbolt0: 10.99.0.12/24, mtu 65520\n")
    assert authorized.read_text() == "0\n"
    machine.apply(wanted)
    assert authorized.read_text() == "1"
    enrolled = [command for command in machine.commands if command.startswith("boltctl")]
    assert enrolled == [f"boltctl enroll --policy auto {DOCK}"] * (boltctl and named == DOCK)
    assert (machine.root / "sys/bus/thunderbolt/devices/1-1/authorized").read_text() == "0\n"
    assert machine.addresses["thunderbolt0"] == ["10.99.0.12/24"]
    before, after = machine.apply(wanted)
    assert before == after


def test_thunderbolt_devices_that_no_managed_link_names_stay_as_they_are(machine):
    machine.thunderbolt("0-1", 0)
    machine.apply(link(interface="thunderbolt0", manage=False, thunderbolt=DOCK))
    machine.apply(link())
    unnamed = machine.refuse(link(interface="thunderbolt0"))
    assert re.search(f"no interface thunderbolt0.*Dock.*waits.*add «thunderbolt: {DOCK}» to", unnamed)
    assert (machine.root / "sys/bus/thunderbolt/devices/0-1/authorized").read_text() == "0\n"


def test_an_interface_that_does_not_come_after_authorising_is_refused(machine):
    machine.thunderbolt("0-1", 0)
    with pytest.raises(Refusal, match="no interface thunderbolt0"):
        machine.apply(link(interface="thunderbolt0", thunderbolt=DOCK))
    assert machine.installed() == {}


def test_a_recorded_measurement():
    sent, pinged = (DATA / "iperf3.json").read_text(), (DATA / "ping.txt").read_text()
    assert throughput.parse(sent, pinged) == (14390, 0.066, "")
    assert throughput.parse((DATA / "iperf3_refused.json").read_text(), "") == (None, None, "")
    speed = '{{"end": {{"sum_received": {{"bits_per_second": {}}}}}}}'
    odd = [speed.format(number) for number in ('"fast"', "[]", "null", "NaN", "1e999", "9" * 400)]
    for nonsense in ("", "[]", "null", "{", "[" * 99999, '{"end": {}}', '{"end": []}', '{"end": 1}', *odd):
        assert throughput.parse(nonsense, "round-trip min/avg/max = 0.1/0.2/0.3 ms\n") == (None, 0.2, "")


class Recorded:
    """iperf3 and ping as they were recorded; iperf3 refuses as often as it is told."""

    def __init__(self, refusals=0, silent=False):
        self.refusals, self.silent, self.commands, self.accounts = refusals, silent, [], {}

    def __call__(self, argv, _seconds, account=None):
        self.commands.append(argv)
        self.accounts[argv[0]] = account
        if argv[0] == "ping" and self.silent:
            raise CommandError(argv, "", 1)
        if argv[0] == "iperf3" and self.refusals:
            self.refusals -= 1
            raise CommandError(argv, (DATA / "iperf3_refused.json").read_text(), 1)
        return (DATA / {"ping": "ping.txt", "iperf3": "iperf3.json"}[argv[0]]).read_text()


def measured(port=50152, lacking=(), **options):
    runner = Recorded(**options)
    return throughput.measure("10.99.0.12", port, 3, lacking, None, runner), runner.commands


@pytest.fixture
def tools(machine, monkeypatch):
    machine.programs |= {"iperf3", "ping"}
    monkeypatch.setattr(throughput.time, "sleep", lambda seconds: None)
    return machine.programs


def test_measure(tools):
    found, ran = measured(refusals=2)
    assert found == (14390, 0.066, "")
    assert ran[0][:5] == ["iperf3", "--client", "10.99.0.12", "--port", "50152"]
    assert measured(port=None)[0] == (None, 0.066, "")
    runner = Recorded()
    throughput.measure("10.99.0.12", 50152, 3, [], "llamacpp", runner)
    assert runner.accounts == {"iperf3": "llamacpp", "ping": None}


def test_measure_reports_what_was_not_measured(tools, monkeypatch):
    monkeypatch.setattr(throughput, "CONNECT_SECONDS", 0)
    found, _ran = measured(refusals=99, silent=True)
    assert found[:2] == (None, None)
    assert found.detail.startswith("not measured: iperf3 to 10.99.0.12:50152 failed: unable to connect to server")
    assert found.detail.endswith("Connection refused, 10.99.0.12 does not answer ping")
    lacking = ["worker1", "head"]
    assert measured(port=None, lacking=lacking)[0] == (None, 0.066, "iperf3 is not installed on worker1 and head")
    silent = measured(port=None, lacking=lacking, silent=True)[0]
    assert silent.detail == "not measured: 10.99.0.12 does not answer ping"
    tools.discard("iperf3")
    assert measured()[0] == (None, 0.066, f"not measured: iperf3 is not installed on {os.uname().nodename}")
    tools.discard("ping")
    assert "ping is not installed" in measured(port=None)[0].detail


def listened(account, unit):
    ran = []

    def run(argv, seconds, account=None):
        ran.append((argv, seconds, account))

    throughput.listen("10.99.0.12", 50152, "10.99.0.11", 50, account, unit, run)
    return ran[0]


def test_iperf3_listens_once_as_the_account_of_services_and_a_unit_lets_in_the_head_alone(tools):
    words = ["--server", "--one-off", "--bind", "10.99.0.12", "--port", "50152"]
    assert listened("llamacpp", unit=False) == (["iperf3", *words], 50, "llamacpp")
    argv, _seconds, _account = listened("llamacpp", unit=True)
    assert argv[-len(words) :] == words
    assert {"--wait", "--collect", "--uid=llamacpp"} < set(argv)
    given = dict(word.split("=", 2)[1:] for word in argv if word.startswith("--property="))
    assert given == {**throughput.LISTENING, "IPAddressAllow": "10.99.0.11", "RuntimeMaxSec": "50"}


@pytest.mark.skipif(os.geteuid() != 0, reason="another account needs root")
def test_root_runs_a_command_as_another_account():
    assert commands.run(["id", "-un"], 5, account="nobody") == "nobody\n"
    assert commands.run(["id", "-G"], 5, account="nobody").split() == [str(pwd.getpwnam("nobody").pw_gid)]
    with pytest.raises(Refusal, match="the account llamacpp-none is missing on this host"):
        commands.run(["id"], 5, account="llamacpp-none")


def test_the_module_takes_the_links_of_a_plan(monkeypatch, call):
    """With nothing where the operator says nothing."""
    given = {"interface": "eth1", "address": "198.51.100.2/30", "manage": True}
    cluster = Cluster().add("head", "head", llama_model_known_answer=known_answer_of())
    links = cluster.add("worker", "worker", llama_links=[given]).plan()["hosts"]["worker"]["links"]
    monkeypatch.setattr(configuration, "apply", lambda wanted, _check, _system: ("", repr(wanted)))
    assert call(module=link_module, links=links)["changed"]

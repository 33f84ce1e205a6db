import configparser
import json
import os
import pwd
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import links
from ansible_collections.llamacpp.cluster.plugins.modules import link as link_module
from conftest import Cluster, known_answer_of

DATA = Path(__file__).parent / "data" / "links"
PATHS = {
    "networkd": "etc/systemd/network/70-llamacpp-eth1.network",
    "NetworkManager": "etc/NetworkManager/system-connections/llamacpp-eth1.nmconnection",
}


def link(**values):
    return {"interface": "eth1", "address": "10.99.0.12/24", "mtu": 9000, "peer": "head", "manage": True, **values}


class Machine:
    """A host as a tree of files, with a runner that notes commands and does what the managers do with our files."""

    def __init__(self, root):
        self.root, self.commands, self.broken = root, [], set()
        self.manager, self.unmanaged = "networkd", False
        self.addresses = {"lo": ["127.0.0.1/8", "::1/128"]}
        self.write(
            "proc/net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        )
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

    def configure(self, name):
        """As a manager does: the interface gets what the files of ours say of it."""
        for interface, address, mtu in links.MARK.findall("".join(links.ours(self.root).values())):
            if interface == name and name in self.addresses:
                self.addresses[name] = [address]
                if mtu != "-":
                    self.write(f"sys/class/net/{name}/mtu", mtu + "\n")

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
                raise links.LinkError("inactive")
            return "active\n"
        if argv[:3] == ["nmcli", "-g", "GENERAL.STATE"]:
            return "10 (unmanaged)\n" if self.unmanaged else "100 (connected)\n"
        self.commands.append(" ".join(argv))
        if self.commands[-1] in self.broken:
            raise links.LinkError(f"{self.commands[-1]} failed: no")
        if argv[:2] == ["networkctl", "reconfigure"]:
            self.configure(argv[2])
        if argv[0] == "nmcli" and "up" in argv:
            self.configure(argv[-1])
        if argv[:3] == ["ip", "address", "del"]:
            self.addresses[argv[5]].remove(argv[3])
        if argv[:4] == ["ip", "link", "set", "dev"]:
            self.write(f"sys/class/net/{argv[4]}/mtu", argv[6] + "\n")
        return ""

    def facts(self):
        return links.facts(self.root, self.run)

    def problems(self, *wanted):
        return links.problems(list(wanted), self.facts(), self.root, self.run)

    def apply(self, *wanted, check=False):
        self.commands.clear()
        return links.apply(list(wanted), check, self.root, self.run)

    def files(self):
        return {
            str(path.relative_to(self.root)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
            for path in self.root.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def machine(tmp_path, monkeypatch):
    programs: set[str] = set()
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setattr(links, "installed", programs.__contains__)
    monkeypatch.setattr(links, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(links.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(links.os, "geteuid", lambda: 0)
    made = Machine(tmp_path)
    made.programs = programs
    return made


@pytest.fixture(params=["networkd", "NetworkManager"])
def any_manager(machine, request):
    """The machine under each manager."""
    machine.manager = request.param
    return machine


# -------------------------------------------------------------------------------------------------------------- facts


def test_facts_of_a_host(machine):
    machine.add("thunderbolt0", "10.98.0.1/30", "fe80::1/64", driver="thunderbolt-net", mtu="65520", speed="-1")
    machine.thunderbolt("0-0", 1).thunderbolt("0-1", None).thunderbolt("0-301", 0)
    machine.write("sys/bus/thunderbolt/devices/0-1.0/key", "network").write("sys/bus/thunderbolt/devices/domain0/x", "")
    found = machine.facts()
    assert found == machine.facts()
    assert found["manager"] == "networkd"
    assert found["management"] == ["eth0"]
    assert found["interfaces"]["eth0"] == {
        "addresses": ["10.1.0.2/24"],
        "mtu": 1500,
        "speed_mbit": 10000,
        "driver": None,
        "mac": "02:00:00:00:00:02",
    }
    assert found["interfaces"]["thunderbolt0"] == {
        "addresses": ["10.98.0.1/30"],
        "mtu": 65520,
        "speed_mbit": None,
        "driver": "thunderbolt-net",
        "mac": "02:00:00:00:00:04",
    }
    assert [(device["name"], device["authorized"]) for device in found["thunderbolt"]] == [
        ("0-0", 1),
        ("0-1", None),
        ("0-301", 0),
    ]
    assert found["thunderbolt"][1] == {
        "name": "0-1",
        "device": "Dock",
        "uuid": "c0010000-0070-7f18-2368-d2a8f1a2b101",
        "authorized": None,
        "tx_speed": "20.0 Gb/s",
        "rx_speed": None,
        "tx_lanes": 2,
        "rx_lanes": None,
    }


def test_facts_where_there_is_nothing(tmp_path):
    def nothing(argv):
        raise links.LinkError("no such program")

    assert links.facts(tmp_path, nothing) == {"manager": None, "interfaces": {}, "management": [], "thunderbolt": []}


def test_facts_of_this_host_are_the_same_each_time():
    found = links.facts()
    assert found == links.facts()
    assert "lo" not in found["interfaces"]


def test_ports_of_containers_are_no_interfaces(machine):
    machine.add("br0").add("veth1234").add("eth2", driver="e1000e")
    for port in ("veth1234", "eth2"):
        (machine.root / f"sys/class/net/{port}/master").symlink_to("../br0")
    assert list(machine.facts()["interfaces"]) == ["br0", "eth0", "eth1", "eth2"]


@pytest.mark.parametrize("active", ["networkd", "NetworkManager", None])
def test_the_manager(machine, active):
    machine.manager = active
    assert links.manager(machine.run) == active


def test_management_is_where_ssh_arrives(machine, monkeypatch):
    machine.addresses["eth1"] = ["10.5.0.1/24"]
    machine.add("eth2", "2001:db8::5/64").add("eth3")
    for connection, expected in (
        ("10.5.0.9 40000 10.5.0.1 22", ["eth0", "eth1"]),
        ("2001:db8::9 40000 2001:db8::5 22", ["eth0", "eth2"]),
        ("fe80::9%eth3 40000 fe80::5%eth3 22", ["eth0", "eth3"]),
        ("$(reboot) 1 -x 22", ["eth0"]),
        ("too short", ["eth0"]),
    ):
        monkeypatch.setenv("SSH_CONNECTION", connection)
        assert machine.facts()["management"] == expected


def test_management_is_found_through_sudo(machine):
    """sudo takes SSH_CONNECTION away; the shell above it still has it."""
    own, above = os.getpid(), 4711
    machine.addresses["eth1"] = ["10.5.0.1/24"]
    machine.write(f"proc/{own}/environ", "PATH=/bin\0").write(f"proc/{own}/stat", f"{own} (a) b) S {above} 1 1")
    machine.write(f"proc/{above}/environ", "A=b\0SSH_CONNECTION=10.5.0.9 40000 10.5.0.1 22\0")
    assert links.ssh_connection(machine.root, {}) == ["10.5.0.9", "10.5.0.1"]
    assert machine.facts()["management"] == ["eth0", "eth1"]


def test_management_holds_the_ports_of_a_bridge_and_ipv6_routes(machine):
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
    assert machine.facts()["management"] == ["bond0", "br0", "eth0", "eth2"]


# ------------------------------------------------------------------------------------------------------------- wanted


def test_files_of_networkd():
    files = links.wanted([link(), link(interface="eth2", manage=False)], "networkd")
    assert list(files) == ["/" + PATHS["networkd"]]
    parser = configparser.RawConfigParser()
    parser.optionxform = str
    parser.read_string(files["/" + PATHS["networkd"]])
    assert dict(parser["Match"]) == {"Name": "eth1"}
    assert dict(parser["Link"]) == {"RequiredForOnline": "no", "MTUBytes": "9000"}
    assert dict(parser["Network"]) == {
        "Address": "10.99.0.12/24",
        "DHCP": "no",
        "LinkLocalAddressing": "ipv6",
        "IPv6AcceptRA": "no",
        "ConfigureWithoutCarrier": "yes",
    }
    assert "MTUBytes" not in "".join(links.wanted([link(mtu=None)], "networkd").values())


def test_files_of_network_manager():
    files = links.wanted([link()], "NetworkManager")
    assert list(files) == ["/" + PATHS["NetworkManager"]]
    parser = configparser.RawConfigParser()
    parser.read_string(files["/" + PATHS["NetworkManager"]])
    assert parser["connection"]["interface-name"] == "eth1"
    assert parser["connection"]["id"] == "llamacpp-eth1"
    assert dict(parser["ethernet"]) == {"mtu": "9000"}
    assert dict(parser["ipv4"]) == {"method": "manual", "address1": "10.99.0.12/24", "never-default": "true"}
    assert dict(parser["ipv6"]) == {"method": "link-local", "never-default": "true"}
    assert files == links.wanted([link()], "NetworkManager")
    assert "mtu" not in "".join(links.wanted([link(mtu=None)], "NetworkManager").values())


def test_no_files_without_managed_links():
    for manager in PATHS:
        assert links.wanted([link(manage=False), {"interface": "eth2", "address": "10.9.0.1/24"}], manager) == {}
    assert links.wanted([link()], None) == {}


# ----------------------------------------------------------------------------------------------------------- problems


def test_nothing_speaks_against_a_good_link(any_manager):
    assert any_manager.problems(link()) == []
    assert any_manager.problems(link(mtu=None, peer=None, address="10.99.0.0/31")) == []
    assert any_manager.problems(link(interface="eth0", manage=False)) == []


@pytest.mark.parametrize("manage", [True, False])
@pytest.mark.parametrize(
    "value",
    [
        {"interface": "eth 1"},
        {"interface": "../eth1"},
        {"interface": "eth1\n[Network]"},
        {"interface": "-eth1"},
        {"interface": "eth*"},
        {"interface": ".."},
        {"interface": ""},
        {"interface": "a" * 16},
        {"interface": None},
        {"address": "10.99.0.12"},
        {"address": "10.99.0.999/24"},
        {"address": "10.99.0.12/255.255.255.0"},
        {"address": "10.99.0.12/32"},
        {"address": "10.99.0.12/024"},
        {"address": "0.0.0.0/0"},
        {"address": "10.99.0.0/24"},
        {"address": "10.99.0.255/24"},
        {"address": "127.0.0.1/8"},
        {"address": "224.0.0.1/24"},
        {"address": "fe80::1/64"},
        {"address": "10.99.0.12/24\nGateway=10.99.0.1"},
        {"address": None},
        {"mtu": 68},
        {"mtu": 70000},
        {"mtu": True},
        {"mtu": "9000\nDNS=10.0.0.1"},
    ],
)
def test_hostile_and_wrong_values_are_refused(machine, value, manage):
    before = machine.files()
    (sentence,) = machine.problems(link(manage=manage, **value))
    assert sentence.startswith("llama_links: ")
    assert repr(next(iter(value.values()))) in sentence or str(next(iter(value.values()))) in sentence
    with pytest.raises(links.LinkError, match="llama_links"):
        machine.apply(link(manage=manage, **value))
    assert (machine.files(), machine.commands) == (before, [])


def refuse(machine, *wanted):
    """The sentence with which the links are refused; nothing has been changed then."""
    before = machine.files()
    with pytest.raises(links.LinkError) as caught:
        machine.apply(*wanted)
    assert (machine.files(), machine.commands) == (before, [])
    return str(caught.value)


def test_the_management_interface_is_refused(any_manager):
    assert "eth0 carries the connection that Ansible uses" in refuse(any_manager, link(interface="eth0"))


def test_one_bad_link_keeps_all_from_being_configured(any_manager):
    assert "no interface eth9 (it has eth0, eth1)" in refuse(
        any_manager, link(), link(interface="eth9", address="10.98.0.1/24")
    )


def test_taking_back_what_ansible_is_connected_through_is_refused(any_manager, monkeypatch):
    any_manager.apply(link())
    monkeypatch.setenv("SSH_CONNECTION", "10.99.0.11 40000 10.99.0.12 22")
    assert "eth1 carries the connection that Ansible uses, and its address 10.99.0.12/24" in refuse(any_manager)


def test_an_interface_that_is_no_cable_is_refused(machine):
    machine.add("wlan0").add("tun0", type="65534").add("br0").add("eth5", driver="x")
    (machine.root / "sys/class/net/wlan0/wireless").mkdir()
    (machine.root / "sys/class/net/br0/bridge").mkdir()
    (machine.root / "sys/class/net/eth5/master").symlink_to("../br0")
    for name in ("wlan0", "tun0", "br0"):
        assert f"{name} is not an Ethernet or Thunderbolt interface" in refuse(machine, link(interface=name))
    assert "eth5 is part of br0" in refuse(machine, link(interface="eth5"))


def test_a_host_without_manager_or_ip_or_root_is_refused(machine, monkeypatch):
    machine.manager = None
    assert "neither NetworkManager nor systemd-networkd runs" in refuse(machine, link())
    machine.manager = "networkd"
    machine.addresses = {}
    assert "install iproute2" in refuse(machine, link())
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    assert "needs root" in refuse(machine, link())
    assert machine.problems(link(manage=False)) == []


def test_networks_that_overlap_are_refused(machine, monkeypatch):
    machine.add("eth2")
    assert "is in the same network as 10.1.0.2/24 of eth0" in refuse(machine, link(address="10.1.0.200/25"))
    assert "is in the same network as 10.99.0.12/24 of eth1" in refuse(
        machine, link(), link(interface="eth2", address="10.99.0.13/16")
    )
    assert "eth1 is named by two links" in refuse(machine, link(), link(address="10.98.0.1/24"))
    monkeypatch.setenv("SSH_CONNECTION", "10.99.0.77 40000 10.1.0.2 22")
    assert "contains 10.99.0.77, from which Ansible is connected" in refuse(machine, link())


def test_an_interface_in_use_is_refused(any_manager):
    any_manager.addresses["eth1"] = ["10.55.0.1/24"]
    assert "eth1 is already in use with address 10.55.0.1/24" in refuse(any_manager, link())
    any_manager.addresses["eth1"] = ["169.254.3.4/16"]
    assert any_manager.problems(link()) == []
    any_manager.addresses["eth1"] = ["10.99.0.12/24"]
    assert any_manager.problems(link()) == []


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
        assert f"eth1 is already configured by {file}" in refuse(machine, link())
    else:
        machine.apply(link())


def test_an_interface_that_netplan_configures_is_refused(machine):
    machine.by_networkd("eth1", "/run/systemd/network/10-netplan-cable.network", "[Network]\nDHCP=yes\n")
    assert "configured by /run/systemd/network/10-netplan-cable.network" in refuse(machine, link())
    machine.by_networkd("eth1", "/run/systemd/network/10-netplan-eth1.network", "[Network]\nDHCP=yes\n")
    assert "configured by /run/systemd/network/10-netplan-eth1.network" in refuse(machine, link())


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
        assert "configured by /run/NetworkManager/system-connections/a b.nmconnection" in refuse(machine, link())
    else:
        machine.apply(link())


def test_an_interface_that_network_manager_leaves_alone_is_refused(machine):
    machine.manager, machine.unmanaged = "NetworkManager", True
    assert "NetworkManager does not manage eth1" in refuse(machine, link())


@pytest.mark.parametrize("file", ["interfaces", "interfaces.d/cable"])
def test_interfaces_of_ifupdown_are_refused(any_manager, file):
    any_manager.write(f"etc/network/{file}", "auto eth1\niface eth1 inet dhcp\n")
    assert f"eth1 is already configured by /etc/network/{file}" in refuse(any_manager, link())


# -------------------------------------------------------------------------------------------------------------- apply


COMMANDS = {
    "networkd": ["networkctl reload", "networkctl reconfigure eth1"],
    "NetworkManager": ["nmcli connection reload", "nmcli --wait 0.1 connection up llamacpp-eth1 ifname eth1"],
}


def test_apply_twice_and_take_back(any_manager, request):
    """Check mode changes nothing and tells the same; the second run finds nothing to do; an empty list leaves no trace."""
    machine = any_manager
    bare = machine.files()
    told = machine.apply(link(), check=True)
    assert (machine.files(), machine.commands) == (bare, [])
    assert links.differs([link()], machine.facts(), machine.root)

    assert machine.apply(link()) == told
    assert told[0] == "eth1: no address, mtu 1500\n"
    assert told[1].startswith(f"eth1: 10.99.0.12/24, mtu 9000\n--- /{PATHS[machine.manager]} 06")
    assert machine.commands == COMMANDS[machine.manager]
    file = machine.root / PATHS[machine.manager]
    assert file.stat().st_mode & 0o777 == (0o644 if machine.manager == "networkd" else 0o600)
    assert machine.addresses["eth1"] == ["10.99.0.12/24"]
    assert machine.addresses["eth0"] == ["10.1.0.2/24"]

    now = machine.files()
    before, after = machine.apply(link())
    assert before == after
    assert (machine.files(), machine.commands) == (now, [])
    assert not links.differs([link()], machine.facts(), machine.root)
    assert links.differs([], machine.facts(), machine.root)

    before, after = machine.apply(check=True)
    assert before == told[1]
    assert after == "eth1: no address, mtu 1500\n"
    assert machine.files() == now
    machine.apply()
    assert "ip address del 10.99.0.12/24 dev eth1" in machine.commands
    assert machine.addresses["eth1"] == []
    left = {path: kept[0] for path, kept in machine.files().items() if not path.startswith("run/NetworkManager")}
    assert left == {path: kept[0] for path, kept in bare.items()}
    assert machine.apply() == ("", "")


@pytest.mark.parametrize("change", ["address", "mtu", "file", "mode"])
def test_drift_is_found_and_mended(any_manager, change):
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
    assert machine.addresses["eth1"] == ["10.99.0.40/24"]
    assert machine.facts()["interfaces"]["eth1"]["mtu"] == 1500
    before, after = machine.apply(link(address="10.99.0.40/24", mtu=None))
    assert before == after


def test_only_the_link_that_changes_is_configured_anew(any_manager):
    machine = any_manager
    machine.add("eth2")
    other = link(interface="eth2", address="10.98.0.1/30", mtu=None)
    machine.apply(link(), other)
    machine.apply(link(address="10.99.0.40/24"), other)
    assert not [command for command in machine.commands if "eth2" in command]
    machine.apply(other)
    assert not [command for command in machine.commands if "eth2" in command]
    assert (machine.addresses["eth1"], machine.addresses["eth2"]) == ([], ["10.98.0.1/30"])


def test_files_for_a_manager_that_went_are_taken_back(machine):
    machine.apply(link())
    machine.manager = "NetworkManager"
    machine.apply(link(address="10.99.0.40/24"))
    assert list(links.ours(machine.root)) == ["/" + PATHS["NetworkManager"]]
    machine.manager = None
    machine.apply()
    assert links.ours(machine.root) == {}
    assert machine.addresses["eth1"] == []


def test_a_link_whose_interface_went_is_taken_back(machine):
    machine.apply(link())
    del machine.addresses["eth1"]
    for path in (machine.root / "sys/class/net/eth1").iterdir():
        path.unlink()
    (machine.root / "sys/class/net/eth1").rmdir()
    machine.apply()
    assert links.ours(machine.root) == {}


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
    with pytest.raises(
        links.LinkError, match=r"eth1: 10.99.0.12/24, mtu 1500 \(wanted: eth1: 10.99.0.12/24, mtu 9000\)"
    ):
        machine.apply(link())
    assert links.differs([link()], machine.facts(), machine.root)


def test_a_command_that_fails_is_an_error(any_manager, request):
    first = COMMANDS[any_manager.manager][0]
    any_manager.broken.add(first)
    with pytest.raises(links.LinkError, match=f"{first} failed: no"):
        any_manager.apply(link())


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(old, new):
        raise OSError(28, "no space left")

    monkeypatch.setattr(links.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        links._write_files({}, {"/a/b": "text"}, tmp_path)
    assert list((tmp_path / "a").iterdir()) == []


# -------------------------------------------------------------------------------------------------------- thunderbolt


DOCK = "c0010000-0070-7f18-2368-d2a8f1a2b101"


@pytest.mark.parametrize("named", [DOCK, "0-1"])
@pytest.mark.parametrize("boltctl", [True, False])
def test_thunderbolt_devices_that_a_link_names_are_authorised(machine, boltctl, named, monkeypatch):
    """Constructed from the kernel's documentation of sysfs: the interface comes when the dock between the hosts is authorised."""
    machine.thunderbolt("0-0", 1).thunderbolt("0-1", 0).thunderbolt("0-3", None)
    stranger = "d1030000-0090-8f18-23c5-b11c6cd30923"
    machine.thunderbolt("1-1", 0, stranger)
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
    monkeypatch.setattr(links.time, "sleep", lambda seconds: machine.facts())
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
    notes = links.notes([wanted], machine.root)
    assert len(notes) == 1
    assert f"«thunderbolt: {stranger}»" in notes[0]
    assert machine.addresses["thunderbolt0"] == ["10.99.0.12/24"]
    before, after = machine.apply(wanted)
    assert before == after


@pytest.mark.parametrize(
    "other",
    [
        {"manage": False, "thunderbolt": DOCK},
        {"interface": "eth1", "thunderbolt": None},
    ],
)
def test_thunderbolt_devices_are_left_alone_where_no_managed_link_names_them(machine, other):
    machine.thunderbolt("0-1", 0)
    own = link(**{"interface": "thunderbolt0", "address": "10.98.0.1/24", **other})
    machine.apply(own)
    assert (machine.root / "sys/bus/thunderbolt/devices/0-1/authorized").read_text() == "0\n"
    assert links.notes([own], machine.root) == []


def test_a_device_that_waits_is_reported_with_the_line_that_names_it(machine):
    machine.thunderbolt("0-1", 0)
    with pytest.raises(links.LinkError, match=f"no interface thunderbolt0.*Dock.*waits.*add «thunderbolt: {DOCK}» to"):
        machine.apply(link(interface="thunderbolt0"))
    assert (machine.root / "sys/bus/thunderbolt/devices/0-1/authorized").read_text() == "0\n"


@pytest.mark.parametrize("value", ["", "Dock", DOCK.upper(), f"{DOCK}\n", "--all", "0-1/..", 7])
def test_a_thunderbolt_device_is_named_by_uuid_or_route(machine, value):
    with pytest.raises(links.LinkError, match="is neither the UUID nor the route of a device"):
        machine.apply(link(thunderbolt=value))


def test_an_interface_that_does_not_come_after_authorising_is_refused(machine):
    machine.thunderbolt("0-1", 0)
    with pytest.raises(links.LinkError, match="no interface thunderbolt0"):
        machine.apply(link(interface="thunderbolt0", thunderbolt=DOCK))
    assert links.ours(machine.root) == {}


# ------------------------------------------------------------------------------------------------ commands, measurement


def test_commands_that_are_not_there_or_fail():
    with pytest.raises(links.LinkError, match="no-such-program is not installed"):
        links.run(["no-such-program"])
    with pytest.raises(links.LinkError, match=r"ls /no/such/folder failed: .*No such file"):
        links.run(["ls", "/no/such/folder"])
    assert links.run(["echo", "$(id)"]) == "$(id)\n"


def test_what_was_recorded_of_a_measurement():
    sent, pinged = (DATA / "iperf3.json").read_text(), (DATA / "ping.txt").read_text()
    assert links.parse_measurement(sent, pinged) == {"mbit_per_second": 14390, "round_trip_ms": 0.066}
    assert links.parse_measurement((DATA / "iperf3_refused.json").read_text(), "") == {
        "mbit_per_second": None,
        "round_trip_ms": None,
    }
    speed = '{{"end": {{"sum_received": {{"bits_per_second": {}}}}}}}'
    odd = [speed.format(number) for number in ('"fast"', "[]", "null", "NaN", "1e999", "9" * 400)]
    for nonsense in ("", "[]", "null", "{", "[" * 99999, '{"end": {}}', '{"end": []}', '{"end": 1}', *odd):
        assert links.parse_measurement(nonsense, "round-trip min/avg/max = 0.1/0.2/0.3 ms\n") == {
            "mbit_per_second": None,
            "round_trip_ms": 0.2,
        }


class Recorded:
    """iperf3 and ping as they were recorded; iperf3 refuses as often as it is told."""

    def __init__(self, refusals=0, silent=False):
        self.refusals, self.silent, self.commands = refusals, silent, []

    def __call__(self, argv):
        self.commands.append(argv)
        if argv[0] == "ping" and self.silent:
            raise links.LinkError("ping failed:")
        if argv[0] == "iperf3" and self.refusals:
            self.refusals -= 1
            raise links.LinkError(f"iperf3 failed: {(DATA / 'iperf3_refused.json').read_text()}")
        return (DATA / {"ping": "ping.txt", "iperf3": "iperf3.json"}[argv[0]]).read_text()


@pytest.fixture
def tools(machine):
    machine.programs |= {"iperf3", "ping"}
    return machine.programs


def test_measure(tools):
    runner = Recorded(refusals=2)
    assert links.measure("10.99.0.12", 50152, 3, [], runner) == {
        "mbit_per_second": 14390,
        "round_trip_ms": 0.066,
        "detail": "",
    }
    assert runner.commands[0][:5] == ["iperf3", "--client", "10.99.0.12", "--port", "50152"]


def test_measure_says_what_was_not_measured(tools, monkeypatch):
    monkeypatch.setattr(links, "CONNECT_SECONDS", 0)
    found = links.measure("10.99.0.12", 50152, 3, [], Recorded(refusals=99, silent=True))
    assert (found["mbit_per_second"], found["round_trip_ms"]) == (None, None)
    assert found["detail"].startswith("not measured: iperf3 to 10.99.0.12:50152 says: unable to connect to server")
    assert found["detail"].endswith("Connection refused, 10.99.0.12 does not answer ping")
    assert links.measure("10.99.0.12", None, 3, [], Recorded())["detail"] == ""
    tools.discard("iperf3")
    found = links.measure("10.99.0.12", 50152, 3, [], Recorded())
    assert found["detail"] == f"not measured: iperf3 is not installed on {os.uname().nodename}"
    assert found["round_trip_ms"] == 0.066
    tools.discard("ping")
    assert "ping is not installed" in links.measure("10.99.0.12", None, 3, [], Recorded())["detail"]


def test_measure_says_where_iperf3_is_not_installed_unless_there_is_worse_to_say(tools):
    lacking = ["worker1", "head"]
    found = links.measure("10.99.0.12", None, 3, lacking, Recorded())
    assert found == {
        "mbit_per_second": None,
        "round_trip_ms": 0.066,
        "detail": "iperf3 is not installed on worker1 and head",
    }
    found = links.measure("10.99.0.12", None, 3, lacking, Recorded(silent=True))
    assert found["detail"] == "not measured: 10.99.0.12 does not answer ping"


@pytest.mark.parametrize("values", [("-c", 50152, 3), ("worker", 50152, 3), ("10.0.0.1", 0, 3), ("10.0.0.1", 5, 999)])
def test_measure_refuses_what_is_no_address_or_port(tools, values):
    runner = Recorded()
    with pytest.raises(ValueError, match=r"."):
        links.measure(*values, [], runner)
    assert runner.commands == []


def listened(account, unit):
    ran = []
    links.listen("10.99.0.12", 50152, "10.99.0.11", 50, account, unit, lambda *arguments: ran.append(arguments))
    return ran[0]


def test_iperf3_listens_once_as_the_account_of_services(tools):
    argv, seconds, account = listened("llamacpp", unit=False)
    assert argv == ["iperf3", "--server", "--one-off", "--bind", "10.99.0.12", "--port", "50152"]
    assert (seconds, account) == (50, "llamacpp")


def test_a_unit_lets_in_the_head_alone_and_ends_by_itself(tools):
    argv, _seconds = listened("llamacpp", unit=True)
    server = argv.index("--one-off") - 2
    assert argv[server + 2 :] == ["--one-off", "--bind", "10.99.0.12", "--port", "50152"]
    assert {"--wait", "--collect", "--uid=llamacpp"} < set(argv[:server])
    given = [word.split("=", 2)[1:] for word in argv[:server] if word.startswith("--property=")]
    assert dict(given) == {**links.LISTENING, "IPAddressAllow": "10.99.0.11", "RuntimeMaxSec": "50"}


def test_iperf3_sends_as_the_account_of_services(tools):
    sender, runner = Recorded(), Recorded()
    links.measure("10.99.0.12", 50152, 3, [], runner, sender)
    assert {argv[0] for argv in sender.commands} == {"iperf3"}
    assert {argv[0] for argv in runner.commands} == {"ping"}


@pytest.mark.skipif(os.geteuid() != 0, reason="another account needs root")
def test_root_runs_a_command_as_another_account():
    assert links.run(["id", "-un"], account="nobody") == "nobody\n"
    assert links.run(["id", "-G"], account="nobody").split() == [str(pwd.getpwnam("nobody").pw_gid)]
    with pytest.raises(links.LinkError, match="the account llamacpp-none is missing on this host"):
        links.run(["id"], account="llamacpp-none")


def test_the_module_takes_the_links_of_a_plan(monkeypatch, capsys):
    """With nothing where the operator says nothing."""
    given = {"interface": "eth1", "address": "198.51.100.2/30", "manage": True}
    cluster = Cluster().add("head", "head", llama_model_known_answer=known_answer_of())
    planned = cluster.add("worker", "worker", llama_links=[given]).plan()["hosts"]["worker"]["links"]
    monkeypatch.setattr(links, "apply", lambda wanted, _check, owner: ("", repr(wanted)))
    with patch_module_args({"links": planned}), pytest.raises(SystemExit):
        link_module.main()
    assert json.loads(capsys.readouterr().out)["changed"]

"""Which interfaces a host has, and what kind of link each one is."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import interfaces

IP = """\
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: enp1s0    inet 192.0.2.11/24 brd 192.0.2.255 scope global dynamic enp1s0\\       valid_lft 3000sec preferred_lft 3000sec
2: enp1s0    inet 0.0.0.0/24 scope global secondary enp1s0\\       valid_lft forever preferred_lft forever
2: enp1s0    inet 192.0.2.99/24 scope global secondary enp1s0\\       valid_lft forever preferred_lft forever
3: thunderbolt0    inet 169.254.205.206/16 scope link noprefixroute thunderbolt0\\       valid_lft forever preferred_lft forever
4: veth7@if2    inet 172.17.0.1/16 scope global veth7\\       valid_lft forever preferred_lft forever
5: wlan0    inet 192.0.2.50/24 scope global wlan0\\       valid_lft forever preferred_lft forever
6: ib0    inet 198.51.100.9/24 scope global ib0\\       valid_lft forever preferred_lft forever
"""
PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:5e:00:53:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:5e:00:53:02

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:5e:00:53:03
"""
IFCONFIG = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
en0: flags=8863<UP,BROADCAST> mtu 1500
\tinet6 fe80::1%en0 prefixlen 64 scopeid 0x4
\tinet 192.0.2.20 netmask 0xffffff00 broadcast 192.0.2.255
en1: flags=8863<UP,BROADCAST> mtu 1500
\tstatus: inactive
bridge0: flags=8863<UP,BROADCAST> mtu 1500
\tinet 10.99.0.1 netmask 0xffffff00 broadcast 10.99.0.255
"""
IPV4 = "0000:0000:0000:0000:0000:ffff:"


def card(root, name, driver="virtio_net", device="0000:01:00.0", **files):
    """An interface with hardware, as sysfs shows it."""
    place = root / "sys/devices" / device
    place.mkdir(parents=True, exist_ok=True)
    (root / "sys/drivers" / driver).mkdir(parents=True, exist_ok=True)
    if not (place / "driver").exists():
        (place / "driver").symlink_to(root / "sys/drivers" / driver)
    folder = root / "sys/class/net" / name
    folder.mkdir(parents=True)
    (folder / "device").symlink_to(place)
    for file, text in {"type": "1", **files}.items():
        (folder / file).write_text(text + "\n")


@pytest.mark.parametrize(
    "device, routers, kind",
    [
        ("0-1.0", {"0-0": 4}, "usb4"),
        ("0-1.0", {"0-0": 3}, "thunderbolt"),
        ("1-3.0", {"0-0": 4, "1-0": 3}, "thunderbolt"),
        ("thunderbolt-net", {"0-0": 4}, "usb4"),
        ("0-1.0", {}, "thunderbolt"),
    ],
)
def test_interfaces_of_linux(tmp_path, monkeypatch, device, routers, kind):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    card(tmp_path, "enp1s0")
    card(tmp_path, "thunderbolt0", "thunderbolt-net", device)
    card(tmp_path, "wlan0", "iwlwifi", "0000:02:00.0", phy80211="")
    card(tmp_path, "ib0", "mlx5_core", "0000:03:00.0", type="32")
    card(tmp_path, "enp9s0", "igc", "0000:04:00.0")
    (tmp_path / "sys/class/net/veth7").mkdir()
    for name, generation in routers.items():
        folder = tmp_path / "sys/bus/thunderbolt/devices" / name
        folder.mkdir(parents=True)
        (folder / "generation").write_text(f"{generation}\n")
    assert interfaces.interfaces(tmp_path, lambda argv: IP) == [
        {"name": "enp1s0", "kind": "ethernet", "addresses": ["192.0.2.11", "192.0.2.99"]},
        {"name": "ib0", "kind": "infiniband", "addresses": ["198.51.100.9"]},
        {"name": "thunderbolt0", "kind": kind, "addresses": ["169.254.205.206"]},
        {"name": "wlan0", "kind": "wireless", "addresses": ["192.0.2.50"]},
    ]


def test_addresses_of_rdma_devices(tmp_path):
    """As a kernel with soft-RoCE shows them, and another port, at which RPC does not look."""
    for port, entries in (
        (1, ("fe80:0000:0000:0000:5054:00ff:fe12:3456", IPV4 + "0a09:0001", IPV4 + "e000:0001", "0" * 39)),
        (2, (IPV4 + "0a09:0002",)),
    ):
        for index, entry in enumerate(entries):
            path = tmp_path / f"sys/class/infiniband/rxe0/ports/{port}/gids/{index}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(entry + "\n")
    assert interfaces.rdma_addresses(tmp_path) == ["10.9.0.1"]
    assert interfaces.rdma_addresses(tmp_path / "none") == []


def test_interfaces_of_macos(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert interfaces.interfaces(ask=lambda argv: PORTS if argv[0] == "networksetup" else IFCONFIG) == [
        {"name": "bridge0", "kind": "thunderbolt", "addresses": ["10.99.0.1"]},
        {"name": "en0", "kind": "ethernet", "addresses": ["192.0.2.20"]},
    ]


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_a_host_without_the_programs_tells_nothing(tmp_path, monkeypatch, system):
    monkeypatch.setattr("platform.system", lambda: system)
    assert interfaces.interfaces(tmp_path, lambda argv: "") == []


@pytest.mark.parametrize(
    "printed, known",
    [
        ({"ip": IP}, ["169.254.205.206", "172.17.0.1", "192.0.2.11", "192.0.2.50", "192.0.2.99", "198.51.100.9"]),
        ({"ifconfig": IFCONFIG}, ["10.99.0.1", "192.0.2.20"]),
        ({}, []),
    ],
)
def test_addresses_of_a_host(printed, known):
    assert interfaces.addresses(lambda argv: printed.get(argv[0], "")) == known

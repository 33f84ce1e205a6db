"""Attempts to connect: to real listeners, to one whose queue is full and answers nobody, and to nothing."""

import contextlib
import socket

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import port_probes

ARP_HEADER = "IP address       HW type     Flags       HW address            Mask     Device\n"


@pytest.fixture
def arp(tmp_path):
    """The kernel's table, in which 127.0.0.1 has answered and 127.0.0.3 has not."""
    path = tmp_path / "arp"
    path.write_text(
        f"{ARP_HEADER}127.0.0.1        0x1         0x2         02:00:00:00:00:01     *        eth0\n"
        "127.0.0.3        0x1         0x0         00:00:00:00:00:00     *        eth0\n"
    )
    return path


@contextlib.contextmanager
def listener(address="127.0.0.1", full=False):
    """The endpoint of one that listens; a full queue answers nobody else."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((address, 0), backlog=0))
        for _number in range(2 if full else 0):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"{address}:{server.getsockname()[1]}"


DIRECT, ROUTED = "lo 0000007F 00000000 0001 0 0 0 000000FF", "eth0 0000007F 010200C0 0003 0 0 0 000000FF"
DEFAULT, NARROW = "eth0 00000000 010200C0 0003 0 0 0 00000000", "wg0 0100007F 00000000 0001 0 0 0 FFFFFFFF"
"""Lines of the kernel's table of routes: to 127.0.0.0/8 with and without the router 192.0.2.1, to all others, and to 127.0.0.1."""


def probed(endpoint, arp, addresses=("192.0.2.1",), routes=(DEFAULT, DIRECT)):
    table = arp.with_name("route")
    table.write_text("Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n" + "\n".join(routes))
    return port_probes.results(port_probes.begin([endpoint], addresses), arp, table)


def test_a_port_that_is_open(arp):
    with listener() as endpoint:
        assert probed(endpoint, arp) == [(endpoint, "127.0.0.1", True)]


@pytest.mark.programs
def test_a_port_that_does_not_answer_is_closed_where_its_host_is_in_the_same_network(arp):
    with listener(full=True) as endpoint:
        assert probed(endpoint, arp) == [(endpoint, "127.0.0.1", False)]
    for address in ("127.0.0.2", "127.0.0.3"):
        with listener(address, full=True) as endpoint:
            assert probed(endpoint, arp) == []


def test_a_port_that_refuses_is_closed(tmp_path):
    with listener() as endpoint:
        pass
    assert probed(endpoint, tmp_path / "none") == [(endpoint, "127.0.0.1", False)]


@pytest.mark.parametrize(
    "routes, counts",
    [
        ([DEFAULT, DIRECT], True),
        ([NARROW, ROUTED], True),
        ([ROUTED, DEFAULT], False),
        ([DEFAULT], False),
        ([], False),
        (["x"], False),
        (["lo zz"], False),
    ],
)
def test_who_refuses_is_the_host_only_without_a_router_in_between(tmp_path, routes, counts):
    with listener() as endpoint:
        pass
    refused = [(endpoint, "127.0.0.1", False)]
    assert probed(endpoint, tmp_path / "none", routes=routes) == (refused if counts else [])


def test_where_the_kernel_shows_no_routes_a_port_that_refuses_says_nothing(tmp_path):
    with listener() as endpoint:
        pass
    begun = port_probes.begin([endpoint], ["192.0.2.1"])
    assert port_probes.results(begun, tmp_path / "none", tmp_path / "missing") == []


def test_a_port_of_the_host_itself_is_probed_from_another_address(tmp_path):
    addresses = ["127.0.0.1", "127.0.0.9"]
    with listener() as endpoint:
        assert probed(endpoint, tmp_path / "none", addresses) == [(endpoint, "127.0.0.9", True)]
        assert probed(endpoint, tmp_path / "none", addresses[:1]) == []
    assert probed(endpoint, tmp_path / "none", addresses) == []
    with listener(full=True) as endpoint:
        assert probed(endpoint, tmp_path / "none", addresses) == [(endpoint, "127.0.0.9", False)]


def test_a_host_whose_addresses_are_not_known_probes_nothing(arp):
    """As where the program ip is missing: an own endpoint would look like one of another host, and be open."""
    with listener() as endpoint:
        assert probed(endpoint, arp, addresses=()) == []


def test_an_address_without_a_route_says_nothing(tmp_path):
    assert probed("255.255.255.255:9", tmp_path / "none") == []

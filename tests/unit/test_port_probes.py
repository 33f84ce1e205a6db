"""Attempts to connect: to real listeners, to one whose queue is full and answers nobody, and to nothing."""

import contextlib
import socket

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import verify
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import port_probes


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


def probed(endpoint, addresses=("192.0.2.1",)):
    return port_probes.probe_endpoints([endpoint], addresses)


def test_a_port_that_is_open_and_one_that_refuses():
    with listener() as endpoint:
        assert probed(endpoint) == ((endpoint, "127.0.0.1", True),)
    assert probed(endpoint) == ((endpoint, "127.0.0.1", False),)


@pytest.mark.programs
def test_a_port_that_does_not_answer_is_closed_where_another_one_of_the_host_does(monkeypatch):
    with listener(full=True) as endpoint, listener() as other, listener(full=True) as silent:
        for port, found in ((other, ((endpoint, "127.0.0.1", False),)), (silent, ())):
            monkeypatch.setattr(port_probes, "REFERENCE_PORT", int(port.rsplit(":", 1)[1]))
            assert probed(endpoint) == found
        assert verify._probe("127.0.0.1", endpoint) == verify.UNREACHABLE


def test_a_port_of_the_host_itself_is_probed_from_another_address():
    addresses = ["127.0.0.1", "127.0.0.9"]
    with listener() as endpoint:
        assert probed(endpoint, addresses) == ((endpoint, "127.0.0.9", True),)
        assert probed(endpoint, addresses[:1]) == ()
    assert probed(endpoint, addresses) == (), "nothing listens, so nothing is known"
    with listener(full=True) as endpoint:
        assert probed(endpoint, addresses) == ((endpoint, "127.0.0.9", False),)


def test_what_says_nothing():
    """An address without a route; and a host whose addresses are not known, whose own endpoint would look like one of another host."""
    assert probed("255.255.255.255:9") == ()
    with listener() as endpoint:
        assert probed(endpoint, addresses=()) == ()

"""The handshake against a scripted server, one script for each generation and for each thing that is no worker."""

import contextlib
import errno
import io
import socket
import struct
import threading
import time
from unittest import mock

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
from cache_worker import CacheWorker
from hypothesis import given, settings
from hypothesis import strategies as st

GIB = 1 << 30


def reply(payload):
    return struct.pack("<Q", len(payload)) + payload


class Listener(socket.socket):
    """Ends accept() when it is closed: a thread that goes on waiting there takes connections of the next listener with its number."""

    def close(self):
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)
        super().close()


class Server(threading.Thread):
    """Accepts connections one after the other and lets ``script(socket)`` handle each; counts those left open by the client."""

    def __init__(self, script, port=0):
        super().__init__(daemon=True)
        self.script = script
        self.listener = Listener(fileno=socket.create_server(("127.0.0.1", port)).detach())
        self.port = self.listener.getsockname()[1]
        self.connections = []
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                client, _address = self.listener.accept()
                self.connections.append(client)
                with contextlib.suppress(OSError):
                    self.script(client)

    def all_closed_by_client(self):
        """Whether each connection ends when the server reads on; one that the script closed itself counts as closed."""
        for client in self.connections:
            if client.fileno() < 0:
                continue
            try:
                client.settimeout(2)
                while client.recv(4096):
                    pass
            except socket.timeout:
                return False
            except OSError:
                continue
        return True


def worker(version, devices=((3 * GIB, 4 * GIB),)):
    """A worker of the given protocol, which closes the connection on a HELLO of another size, as the real one does."""
    return CacheWorker(version, devices=devices).script


def probe(script, **options):
    server = Server(script)
    try:
        found = rpc.probe("127.0.0.1", server.port, timeout=options.pop("timeout", 5), **options)
        assert server.all_closed_by_client()
        return found
    finally:
        server.listener.close()


@pytest.mark.parametrize("version", [(3, 5, 2), (7, 0, 0), (8, 1, 0)])
def test_every_generation_answers(version):
    found = probe(worker(version, devices=((GIB, 2 * GIB), (5 * GIB, 6 * GIB))))
    assert (found.state, found.protocol) == ("ok", ".".join(map(str, version)))
    assert found.devices == (rpc.WorkerDevice(1024, 2048), rpc.WorkerDevice(5120, 6144))


@pytest.mark.parametrize(
    "head, own, state",
    [
        ("7.0.0", (7, 0, 3), "ok"),
        ("7.1.0", (7, 0, 3), "ok"),
        ("6.0.0", (7, 0, 3), "protocol_mismatch"),
        ("8.0.0", (7, 0, 3), "protocol_mismatch"),
        ("3.5.0", (3, 6, 1), "protocol_mismatch"),
    ],
)
def test_protocol_of_the_head(head, own, state):
    found = probe(worker(own), protocol=head)
    assert found.state == state
    assert state == "ok" or f"it uses protocol {'.'.join(map(str, own))}, but the head uses {head}" in found.detail


def test_silent_when_bytes_drip_slower_than_the_deadline():
    def drip(client):
        for byte in reply(bytes(28)):
            client.sendall(bytes([byte]))
            time.sleep(0.1)

    assert probe(drip, timeout=0.5).state == "silent"


def test_refused():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert rpc.probe("127.0.0.1", port).state == "refused"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(worker((7, 0, 0), devices=((1, 1),) * 65), id="too many devices"),
        pytest.param(lambda client: client.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n"), id="ssh"),
        pytest.param(lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), id="http"),
        pytest.param(lambda client: client.close(), id="closes"),
        pytest.param(lambda client: client.sendall(struct.pack("<Q", 1 << 62)), id="endless reply"),
        pytest.param(
            lambda client: (
                client.recv(9 + 24, socket.MSG_WAITALL),
                client.sendall(reply(bytes([7, 0, 0]) + bytes(25))),
                client.recv(9, socket.MSG_WAITALL),
                client.close(),
            ),
            id="only shakes hands",
        ),
    ],
)
def test_not_rpc(script):
    assert probe(script).state == "not_rpc"


def test_a_server_that_closes_and_then_refuses_is_no_worker():
    def close_all(client):
        server.listener.close()
        client.close()

    server = Server(close_all)
    assert rpc.probe("127.0.0.1", server.port).state == "not_rpc"


def test_a_worker_without_a_device_cannot_be_used():
    assert probe(worker((7, 0, 0), devices=())).state == "no_device"


@pytest.mark.parametrize("verb", ["connect", "sendall", "recv"])
@pytest.mark.parametrize("error", [OSError(errno.EHOSTUNREACH, "No route to host"), socket.timeout("timed out")])
def test_a_worker_that_the_network_does_not_reach_or_loses_is_unreachable(monkeypatch, verb, error):
    lost = mock.Mock(**{f"{verb}.side_effect": error})
    connect = mock.Mock(side_effect=error if verb == "connect" else [lost])
    monkeypatch.setattr(rpc.socket, "create_connection", connect)
    found = rpc.probe("192.0.2.1", 50052)
    silent = isinstance(error, socket.timeout) and verb != "connect"
    assert found.state == ("silent" if silent else "unreachable")
    assert silent or error.args[-1] in found.detail
    assert lost.close.called == (verb != "connect")


@pytest.mark.parametrize("address, port", [("worker1", 50052), ("::1", 50052), ("127.0.0.1", 0), ("127.0.0.1", 70000)])
def test_endpoints_that_cannot_be(address, port):
    with pytest.raises(ValueError, match=r"Expected 4 octets|not a TCP port|Only decimal"):
        rpc.probe(address, port)


ANYTHING = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=32).map(reply),
    st.sampled_from([reply(bytes([7, 0, 0]) + bytes(25)), reply(bytes([1, 0, 0])), reply(struct.pack("<I", 1))]),
    st.integers(0, 2**64 - 1).map(lambda number: struct.pack("<Q", number)),
    st.tuples(*(st.integers(0, 2**64 - 1),) * 2).map(lambda pair: reply(struct.pack("<QQ", *pair))),
)


@settings(deadline=None)
@given(st.lists(ANYTHING, max_size=8), st.sampled_from([None, "7.0.0", "3.6.1"]))
def test_whatever_answers_a_handshake_has_a_state(parts, protocol):
    def connect(*_where, **_options):
        return mock.Mock(recv=io.BytesIO(b"".join(parts)).read)

    with mock.patch.object(rpc.socket, "create_connection", side_effect=connect):
        found = rpc.probe("192.0.2.1", 50052, protocol=protocol)
    assert found.state in {"ok", "protocol_mismatch", "no_device", "silent", "unreachable", "not_rpc"}
    assert (found.state == "ok") == (found.detail == "")
    assert found.state != "ok" or (found.devices and all(device.total_mib >= 0 for device in found.devices))

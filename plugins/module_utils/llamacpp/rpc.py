# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks a llama.cpp RPC worker who it is: handshake, devices and their memory.

A worker serves one client at a time, so every function here closes its connection before it returns, and nothing here
may be used against a worker that a head holds. The wire format is that of ggml-rpc.cpp: little-endian,
``u8 command | u64 size | payload`` there and ``u64 size | payload`` back.
"""

import ipaddress
import socket
import struct
import time
from typing import NamedTuple, Optional, Union

HELLO = 14
DEVICE_COUNT = 15
GET_DEVICE_MEMORY = 11

HELLO_PLAIN_TCP = bytes(24)
"""Connection capabilities, which llama.cpp sends and ik_llama.cpp does not; zeros ask for plain TCP."""

MAX_DEVICES = 64
MIB = 1024 * 1024


class WorkerDevice(NamedTuple):
    """Memory of a device that a worker lends."""

    free_mib: int
    total_mib: int


class Handshake(NamedTuple):
    """What a worker answered."""

    state: str
    """of those that ``probe`` names"""
    detail: str
    protocol: Optional[str] = None
    devices: tuple[WorkerDevice, ...] = ()


class Closed(Exception):
    """The other side ended the connection before its reply was complete."""


class Foreign(Exception):
    """The other side sent something that is no reply of an RPC worker."""


class Connection:
    """To a worker, until a moment of time.monotonic."""

    def __init__(self, address: str, port: int, deadline: float) -> None:
        self.deadline = deadline
        try:
            self.socket = socket.create_connection((address, port), timeout=self._left())
        except socket.timeout as error:
            raise OSError("the attempt of a connection timed out") from error

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise socket.timeout("timed out")
        return left

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_ignored: object) -> None:
        self.socket.close()

    def _receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            self.socket.settimeout(self._left())
            try:
                part = self.socket.recv(size - len(received))
            except ConnectionError as error:
                raise Closed from error
            if not part:
                raise Closed
            received += part
        return received

    def send(self, data: Union[bytes, memoryview]) -> None:
        self.socket.settimeout(self._left())
        try:
            self.socket.sendall(data)
        except ConnectionError as error:
            raise Closed from error

    def ask(self, command: int, payload: bytes, reply_sizes: tuple[int, ...]) -> bytes:
        """Sends one command and returns its reply, which must have one of the given sizes."""
        self.send(struct.pack("<BQ", command, len(payload)) + payload)
        start = self._receive(8)
        (size,) = struct.unpack("<Q", start)
        if size not in reply_sizes:
            raise Foreign(f"its reply to command {command} starts with {start!r}, which no RPC worker sends")
        return self._receive(size)


def _devices(connection: Connection) -> tuple[WorkerDevice, ...]:
    (count,) = struct.unpack("<I", connection.ask(DEVICE_COUNT, b"", (4,)))
    if count > MAX_DEVICES:
        raise Foreign(f"it reports {count} devices")
    devices = []
    for index in range(count):
        free, total = struct.unpack("<QQ", connection.ask(GET_DEVICE_MEMORY, struct.pack("<I", index), (16,)))
        devices.append(WorkerDevice(free // MIB, total // MIB))
    return tuple(devices)


def _converse(address: str, port: int, deadline: float, hello: bytes) -> Handshake:
    with Connection(address, port, deadline) as connection:
        reply = connection.ask(HELLO, hello, (3, 28))
        version = tuple(reply[:3])
        try:
            devices = _devices(connection)
        except Closed as error:
            raise Foreign("it answered the handshake, then closed the connection when asked for its devices") from error
    return Handshake("ok", "", ".".join(map(str, version)), devices)


def compatible(client: str, server: str) -> bool:
    """Whether a head that speaks protocol ``client`` accepts a worker that speaks ``server`` (ggml-rpc.cpp, check_server_version)."""
    client_major, client_minor = (int(part) for part in client.split(".")[:2])
    server_major, server_minor = (int(part) for part in server.split(".")[:2])
    return client_major == server_major and server_minor <= client_minor


def place_of(endpoint: str) -> tuple[str, int]:
    """:raises ValueError: it is not ADDRESS:PORT, with a numeric IPv4 address."""
    address, port = endpoint.rsplit(":", 1)
    if not 0 < int(port) < 65536:
        raise ValueError(f"{port} is not a TCP port")
    return str(ipaddress.IPv4Address(address)), int(port)


def probe(address: str, port: int, timeout: float = 5.0, protocol: Optional[str] = None) -> Handshake:
    """Shakes hands with the worker at ``address:port`` and asks for its devices.

    :param address: numeric IPv4 address; workers listen on nothing else.
    :param timeout: seconds for the whole conversation, however slowly the other side sends.
    :param protocol: version that a head speaks (``7.0.0``); without it any version is accepted.
    :returns: with state one of

        - ``ok``: a worker that a head can use;
        - ``protocol_mismatch``: a worker of another generation;
        - ``no_device``: a worker that lends nothing;
        - ``silent``: accepted, but no answer in time: held by a client, hung, or something else altogether;
        - ``refused``: nothing listens there;
        - ``unreachable``: no way there, no answer to the connection attempt, or a connection that the network lost;
        - ``not_rpc``: something else answers.
    :raises ValueError: the address is not a numeric IPv4 address, or the port is none.
    """
    place_of(f"{address}:{port}")
    deadline = time.monotonic() + timeout
    connected = False
    try:
        # A worker of ik_llama.cpp (protocol 3) closes the connection on a HELLO with a payload, one of llama.cpp on one without.
        for hello in (HELLO_PLAIN_TCP, b""):
            try:
                reply = _converse(address, port, deadline, hello)
                break
            except Closed:
                connected = True
        else:
            return Handshake("not_rpc", "it closes the connection on every known form of the handshake")
    except Foreign as error:
        return Handshake("not_rpc", str(error))
    except ConnectionRefusedError:
        if connected:
            return Handshake("not_rpc", "it closed the connection on the handshake and accepts no other")
        return Handshake("refused", "nothing listens there")
    except socket.timeout:
        return Handshake(
            "silent",
            f"it accepted the connection and did not answer within {timeout:g} s: held by a client, hung, or not an RPC worker",
        )
    except OSError as error:
        return Handshake("unreachable", f"no connection was possible, or it was lost: {error.strerror or error}")
    if protocol and reply.protocol and not compatible(protocol, reply.protocol):
        detail = f"it speaks protocol {reply.protocol}, the head speaks {protocol}"
        return reply._replace(state="protocol_mismatch", detail=detail)
    if not reply.devices:
        return reply._replace(state="no_device", detail="it is a worker without a device")
    return reply

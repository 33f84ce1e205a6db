# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Client for llama.cpp RPC workers: handshake, devices and their memory.

A worker serves one client at a time. Every function here therefore closes its connection before it returns; never call one for a worker in use by a head.
The wire format is that of ggml-rpc.cpp: little-endian, ``u8 command | u64 size | payload`` for requests and ``u64 size | payload`` for replies.
"""

import ipaddress
import socket
import struct
import time
from typing import NamedTuple, Optional, Union

HELLO = 14
GET_DEVICE_COUNT = 15
GET_DEVICE_MEMORY = 11

HELLO_PLAIN_TCP = bytes(24)
"""Connection capabilities, which only llama.cpp sends; zeros request plain TCP."""

MAX_WORKER_DEVICES = 64
MIB = 1024 * 1024


class WorkerDevice(NamedTuple):
    free_mib: int
    total_mib: int


class Handshake(NamedTuple):
    """Result of a handshake with a worker."""

    state: str
    """state, as described in ``probe``"""
    detail: str
    protocol: Optional[str] = None
    devices: tuple[WorkerDevice, ...] = ()


class ConnectionClosed(Exception):
    """Error if the peer closes the connection before its reply is complete."""


class InvalidReply(Exception):
    """Error if the peer's reply is not that of an RPC worker."""


class Connection:
    """Connection to a worker with a deadline on the clock of time.monotonic."""

    def __init__(self, address: str, port: int, deadline: float) -> None:
        self.deadline = deadline
        try:
            self.socket = socket.create_connection((address, port), timeout=self._remaining_seconds())
        except socket.timeout as error:
            raise OSError("the connection attempt timed out") from error

    def _remaining_seconds(self) -> float:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise socket.timeout("timed out")
        return seconds

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_ignored: object) -> None:
        self.socket.close()

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self.socket.settimeout(self._remaining_seconds())
            try:
                chunk = self.socket.recv(size - len(data))
            except ConnectionError as error:
                raise ConnectionClosed from error
            if not chunk:
                raise ConnectionClosed
            data += chunk
        return data

    def send(self, data: Union[bytes, memoryview]) -> None:
        self.socket.settimeout(self._remaining_seconds())
        try:
            self.socket.sendall(data)
        except ConnectionError as error:
            raise ConnectionClosed from error

    def ask(self, command: int, payload: bytes, reply_sizes: tuple[int, ...]) -> bytes:
        """Send a command and return its reply, which must have one of these sizes."""
        self.send(struct.pack("<BQ", command, len(payload)) + payload)
        header = self._receive(8)
        (size,) = struct.unpack("<Q", header)
        if size not in reply_sizes:
            raise InvalidReply(f"its reply to command {command} starts with {header!r}, unlike replies of RPC workers")
        return self._receive(size)


def _request_devices(connection: Connection) -> tuple[WorkerDevice, ...]:
    (count,) = struct.unpack("<I", connection.ask(GET_DEVICE_COUNT, b"", (4,)))
    if count > MAX_WORKER_DEVICES:
        raise InvalidReply(f"it reports {count} devices, more than {MAX_WORKER_DEVICES}")
    devices = []
    for index in range(count):
        free, total = struct.unpack("<QQ", connection.ask(GET_DEVICE_MEMORY, struct.pack("<I", index), (16,)))
        devices.append(WorkerDevice(free // MIB, total // MIB))
    return tuple(devices)


def _shake_hands(address: str, port: int, deadline: float, hello_payload: bytes) -> Handshake:
    with Connection(address, port, deadline) as connection:
        reply = connection.ask(HELLO, hello_payload, (3, 28))
        version = tuple(reply[:3])
        try:
            devices = _request_devices(connection)
        except ConnectionClosed as error:
            raise InvalidReply("it closed the connection when asked for its devices") from error
    return Handshake("ok", "", ".".join(map(str, version)), devices)


def is_compatible(head_protocol: str, worker_protocol: str) -> bool:
    """Return whether a head accepts a worker with these protocols (ggml-rpc.cpp, check_server_version)."""
    head_major, head_minor = (int(part) for part in head_protocol.split(".")[:2])
    worker_major, worker_minor = (int(part) for part in worker_protocol.split(".")[:2])
    return head_major == worker_major and worker_minor <= head_minor


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return the address and the port of an endpoint ADDRESS:PORT.

    :raises ValueError: the endpoint has another form, or its address is not a numeric IPv4 address.
    """
    address, port = endpoint.rsplit(":", 1)
    if not 0 < int(port) < 65536:
        raise ValueError(f"{port} is not a TCP port")
    return str(ipaddress.IPv4Address(address)), int(port)


def probe(address: str, port: int, timeout: float = 5.0, protocol: Optional[str] = None) -> Handshake:
    """Perform the handshake with the worker at ``address:port`` and request its devices.

    :param address: numeric IPv4 address: workers listen on no other kind of address.
    :param timeout: seconds for the whole exchange, however slowly the peer sends.
    :param protocol: protocol version of the head (``7.0.0``); None accepts any version.
    :returns: a handshake whose state is one of

        - ``ok``: a worker that a head can use;
        - ``protocol_mismatch``: a worker with an incompatible protocol;
        - ``no_device``: a worker without devices;
        - ``silent``: it accepted the connection but did not answer in time: it is busy, has hung, or is not a worker;
        - ``refused``: nothing listens there;
        - ``unreachable``: no route, no answer to the connection attempt, or a lost connection;
        - ``not_rpc``: another program answers.
    :raises ValueError: the address is not a numeric IPv4 address, or the port is invalid.
    """
    parse_endpoint(f"{address}:{port}")
    deadline = time.monotonic() + timeout
    was_connected = False
    try:
        # A worker of ik_llama.cpp (protocol 3) closes the connection after a HELLO with a payload, a worker of llama.cpp after one without.
        for hello_payload in (HELLO_PLAIN_TCP, b""):
            try:
                handshake = _shake_hands(address, port, deadline, hello_payload)
                break
            except ConnectionClosed:
                was_connected = True
        else:
            return Handshake("not_rpc", "it closed the connection after every known handshake")
    except InvalidReply as error:
        return Handshake("not_rpc", str(error))
    except ConnectionRefusedError:
        if was_connected:
            return Handshake("not_rpc", "it closed the connection after the handshake, and now refuses connections")
        return Handshake("refused", "no program listens on this port")
    except socket.timeout:
        return Handshake(
            "silent",
            f"it accepted the connection but did not answer within {timeout:g} s: it is serving another client, has hung, or is not an RPC worker",
        )
    except OSError as error:
        return Handshake("unreachable", f"the connection failed or was lost: {error.strerror or error}")
    if protocol and handshake.protocol and not is_compatible(protocol, handshake.protocol):
        detail = f"it uses protocol {handshake.protocol}, but the head uses {protocol}"
        return handshake._replace(state="protocol_mismatch", detail=detail)
    if not handshake.devices:
        return handshake._replace(state="no_device", detail="the worker has no device")
    return handshake

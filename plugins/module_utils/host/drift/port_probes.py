# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether ports that are to be closed to this host are closed: it tries to connect, and sends nothing."""

from __future__ import annotations

import errno
import select
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import PortProbe

SECONDS = 0.3
"""How long a host that is reached may take to answer. The answer of a port that is open comes at once."""
ARP = Path("/proc/net/arp")
ANSWERED = 0x2
"""Flag of an address in ARP that has answered."""
ROUTES = Path("/proc/net/route")
"""Addresses in it are hexadecimal, as the processor stores them."""


class Attempt(NamedTuple):
    """A connection that is under way."""

    endpoint: str
    socket: socket.socket
    inside: bool
    """Whether it comes from another address of the host itself."""
    begun: float


def begin(endpoints: Sequence[str], addresses: Sequence[str]) -> list[Attempt]:
    """Tries all at the same time. The host's own endpoints are tried from another address of the host, if it has one.

    :param addresses: of this host, without loopback. Where none is known, nothing is tried: a unit lets its own host's address in.
    """
    attempts: list[Attempt] = []
    for endpoint in endpoints if addresses else ():
        address, port = endpoint.rsplit(":", 1)
        inside, others = address in addresses, [other for other in addresses if other != address]
        if inside and not others:
            continue
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        if inside:
            connection.bind((others[0], 0))
        if connection.connect_ex((address, int(port))) in (0, errno.EINPROGRESS):
            attempts.append(Attempt(endpoint, connection, inside, time.monotonic()))
        else:
            connection.close()
    return attempts


def results(attempts: Sequence[Attempt], arp: Path = ARP, routes: Path = ROUTES) -> list[PortProbe]:
    """Of those attempts that say something: one that is not answered does so where ARP knows the other host, since it is in the same network
    then, and one that is refused where no router is in between, which may refuse in the name of the host."""
    found = []
    for attempt in attempts:
        with attempt.socket as connection:
            status = _wait(attempt)
            source, address = connection.getsockname()[0], attempt.endpoint.rsplit(":", 1)[0]
        closed = status != errno.ECONNREFUSED if attempt.inside else _is_reached(status, address, arp, routes)
        if status == 0 or closed:
            found.append(PortProbe(attempt.endpoint, source, status == 0))
    return found


def _wait(attempt: Attempt) -> int | None:
    """0 where it is connected, or the number of the error; None without an answer."""
    poll = select.poll()
    poll.register(attempt.socket, select.POLLOUT)
    if not poll.poll(1000 * max(0.0, attempt.begun + SECONDS - time.monotonic())):
        return None
    return attempt.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _is_reached(status: int | None, address: str, arp: Path, routes: Path) -> bool:
    if status == errno.ECONNREFUSED:
        return _has_no_router(address, routes)
    with suppress(OSError):
        rows = [line.split() for line in arp.read_text().splitlines()[1:]]
        return any(row[0] == address and int(row[2], 16) & ANSWERED for row in rows)
    return False


def _has_no_router(address: str, routes: Path) -> bool:
    """Whether the most specific route to an address leads to it directly; a tunnel does too, where ARP knows nobody."""
    with suppress(OSError, ValueError, IndexError):
        wanted = _number(socket.inet_aton(address).hex(), "big")
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
        fitting = [(_number(row[7]), _number(row[2])) for row in rows if wanted & _number(row[7]) == _number(row[1])]
        return bool(fitting) and not max(fitting)[1]
    return False


def _number(text: str, order: Literal["little", "big"] = sys.byteorder) -> int:
    return int.from_bytes(bytes.fromhex(text), order)

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks whether ports that should be closed to this host are closed. A probe connects without sending anything."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import address_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import PortProbe

ANSWER_TIMEOUT_SECONDS = 0.3
"""Time limit for all answers. An open port answers at once."""
REFERENCE_PORT = 22
"""Port on the same address: if it answers, the host is reachable, and a silent port is closed."""


def probe_endpoints(
    endpoints: Iterable[str], addresses: Collection[str], seconds: float = ANSWER_TIMEOUT_SECONDS
) -> tuple[PortProbe, ...]:
    """Probe all endpoints at once; skip addresses that may be unreachable. The host's own endpoints are probed from another of its addresses,
    if any; a refused connection to them proves nothing, because the program may not be running.

    :param addresses: addresses of this host, without loopback. Without them, nothing is probed, because the packet filter of a unit accepts its own host.
    """
    targets = {*endpoints} if addresses else set()
    reference_endpoints = {f"{address_of(endpoint)}:{REFERENCE_PORT}" for endpoint in targets}
    with ExitStack() as stack:
        connections = list(_start_connections(sorted(targets | reference_endpoints), addresses, stack))
        deadline = time.monotonic() + seconds
        results = [
            (endpoint, connection.getsockname()[0], _wait(connection, deadline)) for endpoint, connection in connections
        ]
    live_ips = {address_of(endpoint) for endpoint, _source, status in results if status in (0, errno.ECONNREFUSED)}
    return tuple(
        PortProbe(endpoint, source, status == 0)
        for endpoint, source, status in results
        if endpoint in targets
        and (status != errno.ECONNREFUSED if address_of(endpoint) in addresses else address_of(endpoint) in live_ips)
    )


def _start_connections(
    endpoints: Iterable[str], addresses: Collection[str], stack: ExitStack
) -> Iterator[tuple[str, socket.socket]]:
    for endpoint in endpoints:
        address, port = endpoint.rsplit(":", 1)
        sources = [source for source in addresses if source != address]
        connection = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        connection.setblocking(False)
        if address in addresses and not sources:
            continue
        if address in addresses:
            connection.bind((sources[0], 0))
        if connection.connect_ex((address, int(port))) in (0, errno.EINPROGRESS):
            yield endpoint, connection


def _wait(connection: socket.socket, deadline: float) -> int | None:
    """Return 0 if the socket is connected, or the error number; None without an answer."""
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
        return None
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

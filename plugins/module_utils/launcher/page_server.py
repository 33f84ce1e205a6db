# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Serves one page in a thread of the launcher. It requires llama-server's keys, and uses its certificate."""

from __future__ import annotations

import base64
import hmac
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, page

CLIENT_SECONDS = 5.0
"""Timeout of a handshake, of a request and of sending an answer."""
WRONG_KEY_SECONDS = 1.0
"""Delay of the answer to a wrong key."""
RETRY_SECONDS = 10.0
MAX_CLIENTS, MAX_REQUEST_BYTES = 16, 8192
"""Limits of simultaneous clients and of a request. Further clients wait in the kernel, and use no descriptor."""
SUFFIXES = ("", ".local", ".lan", ".internal", ".home.arpa")
"""Suffixes of a host's name in its network. Nobody can register a name with one of them."""
FOREIGN_NAME_TEXT = (
    "The page is not served under this name, which may be a stranger's. Open it at an address of its host, by the host's own name, "
    "or by its name in the inventory. With llama_server_api_key_file any name works."
)
HEADERS = (
    f"Content-Security-Policy: {page.POLICY}",
    "Cache-Control: no-store",
    "X-Content-Type-Options: nosniff",
    "Referrer-Policy: no-referrer",
    "Connection: close",
)


class PageAccess(NamedTuple):
    """Address of the page, and its access control."""

    address: str
    port: int
    api_keys: Sequence[str] = ()
    """Keys, one of which a client must send; empty if none is required."""
    certificate: str = ""
    tls_key: str = ""
    """Files for TLS; empty for HTTP."""
    names: Sequence[str] = ()
    """Names of its host. Without keys the page is served only under these names and addresses, so that a foreign page whose name points here cannot read
    it."""


def start(access: PageAccess, current: Callable[[], str]) -> None:
    """Start the server and return at once. Errors are logged and stop nothing.

    :param current: returns the page.
    """
    threading.Thread(target=_listen, args=(access, current), daemon=True).start()


def _listen(access: PageAccess, current: Callable[[], str]) -> None:
    def listen() -> tuple[socket.socket, ssl.SSLContext | None]:
        context = None
        if access.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(access.certificate, access.tls_key)
        return socket.create_server((access.address, access.port)), context

    while not (opened := journal.run_safely(f"the page is not served at {access.address}:{access.port}", listen)):
        time.sleep(RETRY_SECONDS)
    keys = [key.encode("utf-8", "surrogateescape") for key in access.api_keys]
    host_names = [name.lower() + suffix for name in (*access.names, "localhost") for suffix in SUFFIXES]
    serve = partial(_serve, *opened, partial(_reply, keys=keys, host_names=host_names, current=current))
    for _number in range(MAX_CLIENTS):
        threading.Thread(target=serve, daemon=True).start()


def _serve(listener: socket.socket, context: ssl.SSLContext | None, reply: Callable[[bytes], bytes]) -> None:

    def serve_client() -> bool:
        client, _address = listener.accept()
        with client, suppress(OSError):
            client.settimeout(CLIENT_SECONDS)
            with context.wrap_socket(client, server_side=True) if context else client as connection:
                _answer(connection, reply)
        return True

    while True:
        if not journal.run_safely("a request for the page failed", serve_client):
            time.sleep(WRONG_KEY_SECONDS)


def _answer(connection: socket.socket, reply: Callable[[bytes], bytes]) -> None:
    """:raises OSError: the client is too slow, or has gone."""
    request, deadline = b"", time.monotonic() + CLIENT_SECONDS
    while b"\r\n\r\n" not in request:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(MAX_REQUEST_BYTES)
        request += part
        if not part or len(request) > MAX_REQUEST_BYTES:
            return
    connection.settimeout(CLIENT_SECONDS)
    connection.sendall(reply(request))


def _reply(request: bytes, keys: Sequence[bytes], host_names: Sequence[str], current: Callable[[], str]) -> bytes:
    first, *lines = request.split(b"\r\n")
    fields = {name.strip().lower(): value.strip() for name, _colon, value in (line.partition(b":") for line in lines)}
    if keys and not _has_key(fields.get(b"authorization", b""), keys):
        time.sleep(WRONG_KEY_SECONDS * (b"authorization" in fields))
        asks = 'WWW-Authenticate: Basic realm="the API key as the password", charset="UTF-8"'
        return _message("401 Unauthorized", "The password is an API key of the server.", asks)
    if not keys and not _is_host_name(fields.get(b"host", b"").decode("latin-1"), host_names):
        return _message("421 Misdirected Request", FOREIGN_NAME_TEXT)
    if first.split(b" ")[:2] != [b"GET", b"/"]:
        return _message("404 Not Found", "The only page is /")
    return _message("200 OK", current(), "Content-Type: text/html; charset=utf-8")


def _message(status: str, text: str, *headers: str) -> bytes:
    body = text.encode()
    lines = (f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", *HEADERS, "", "")
    return "\r\n".join(lines).encode() + body


def _is_host_name(host_field: str, host_names: Sequence[str]) -> bool:
    """Return whether a client has asked for an address or for one of these names."""
    host = re.sub(r":\d*$", "", host_field).lower()
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.rstrip(".") in host_names
    return True


def _has_key(authorization: bytes, keys: Sequence[bytes]) -> bool:
    """Return whether a client sends a key, as a bearer token or as a browser's password."""
    scheme, _space, password = authorization.partition(b" ")
    if scheme.lower() == b"basic":
        with suppress(ValueError):
            password = base64.b64decode(password, validate=True).partition(b":")[2]
    return any(hmac.compare_digest(password, key) for key in keys)

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""HTTP requests to llama-server with limits on time and size."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable

MAX_REPLY_BYTES = 1 << 20
WRONG_CERTIFICATE_MESSAGE = "the server does not present the configured certificate: run site.yml to restart it"
TIMEOUT_TEXT = "no complete answer within"
KEY_ENCODING = ("utf-8", "surrogateescape")
"""Encoding and error handler that convert any API key from bytes to text and back."""


def first_certificate(text: str) -> bytes:
    """Return the first certificate in a PEM file as DER.

    :raises ValueError: the file contains no certificate.
    """
    pem_match = re.search(f"{ssl.PEM_HEADER}.*?{ssl.PEM_FOOTER}", text, re.DOTALL)
    if not pem_match:
        raise ValueError("the file contains no certificate in PEM format")
    return ssl.PEM_cert_to_DER_cert(pem_match[0])


POOLING_PATHS = {
    **dict.fromkeys(("--reranking", "--rerank"), "/v1/rerank"),
    **dict.fromkeys(("--embeddings", "--embedding"), "/v1/embeddings"),
}
"""Option of llama-server → path that it serves instead of generating text."""


def pooling_path(argv: Sequence[str]) -> str | None:
    """Return the path that a llama-server for embeddings or reranking serves; None if it generates text."""
    return next((path for word, path in POOLING_PATHS.items() if word in argv), None)


def pooling_request(text: str) -> dict[str, Any]:
    """Return a request body that suits both embeddings and reranking."""
    return {"input": text, "query": text, "documents": [text]}


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind((names.LOOPBACK, 0))
        return int(listener.getsockname()[1])


class Reply(NamedTuple):
    """HTTP reply. Without a reply, ``status`` is 0 and ``text`` is the reason."""

    status: int
    text: str


def has_page(reply: Reply) -> bool:
    """Return whether llama-server answered GET / with its chat page. It refuses clients that do not read gzip (415); without a page it answers 404."""
    return reply.status in (200, 415)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(
    address: str,
    path: str,
    seconds: float,
    body: Mapping[str, Any] | None = None,
    key: str | None = None,
    veto: Callable[[], str | None] = lambda: None,
    certificate: bytes | None = None,
) -> Reply:
    """Return the reply of an HTTP server, at most MAX_REPLY_BYTES, within a total time of ``seconds``.

    :param address: host and port, or the path of a Unix socket.
    :param veto: function that is called once the connection is open, and returns a reason to send nothing, or None.
    :param certificate: certificate in DER form that the server must present over HTTPS. Its names and its issuer are not checked.
    """
    headers: dict[str, Any] = {
        "Content-Type": "application/json",
        **({"Authorization": b"Bearer " + key.encode(*KEY_ENCODING)} if key else {}),
    }
    connection_type = _UnixConnection if address.startswith("/") else http.client.HTTPConnection
    connection = connection_type(address, timeout=seconds)
    timer: threading.Timer | None = None
    deadline = time.monotonic() + seconds
    try:
        connection.connect()
        sockets = [connection.sock]
        timer = threading.Timer(seconds, _interrupt_connection, (sockets,))
        timer.daemon = True
        timer.start()
        reason = veto() or (_start_tls(connection, sockets, certificate) if certificate else None)
        if reason:
            return Reply(0, reason)
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        reply = connection.getresponse()
        text = reading.read_reply(reply, MAX_REPLY_BYTES).decode("utf-8", "replace")
        if time.monotonic() < deadline:
            return Reply(reply.status, text)
        raise socket.timeout("timed out")
    except (OSError, http.client.HTTPException, ValueError) as error:
        has_timed_out = isinstance(error, socket.timeout) or time.monotonic() >= deadline
        return Reply(0, f"{TIMEOUT_TEXT} {seconds:g} s" if has_timed_out else printable(error))
    finally:
        if timer:
            timer.cancel()
        connection.close()


def _start_tls(connection: http.client.HTTPConnection, sockets: list[socket.socket], certificate: bytes) -> str | None:
    """Start TLS on an open connection. Return an error if the server does not present this certificate, otherwise None.

    :param sockets: list that receives the TLS socket before the handshake.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    tls_socket = context.wrap_socket(connection.sock, do_handshake_on_connect=False)
    connection.sock = tls_socket
    sockets.append(tls_socket)
    tls_socket.do_handshake()
    if tls_socket.getpeercert(binary_form=True) == certificate:
        return None
    return WRONG_CERTIFICATE_MESSAGE


def _interrupt_connection(sockets: list[socket.socket]) -> None:
    """Interrupt any wait for the server, including the TLS handshake."""
    with suppress(OSError):
        socket.socket.shutdown(sockets[-1], socket.SHUT_RDWR)

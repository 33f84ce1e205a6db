# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What llama-server replies over HTTP, within limits of time and size."""

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

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable

REPLY_BYTES = 1 << 20
OTHER_CERTIFICATE = "it shows another certificate than the one that is configured: run site.yml, which restarts it"
LATE = "no complete answer within"
KEY_TEXT = ("utf-8", "surrogateescape")
"""How the bytes of an API key, whatever they are, become text and bytes again."""


def first_certificate(text: str) -> bytes:
    """The certificate of a server, the first one of a file in PEM form, as it shows it.

    :raises ValueError: there is none.
    """
    block = re.search(f"{ssl.PEM_HEADER}.*?{ssl.PEM_FOOTER}", text, re.DOTALL)
    if not block:
        raise ValueError("it holds no certificate in PEM form")
    return ssl.PEM_cert_to_DER_cert(block[0])


WITHOUT_TEXT = {
    **dict.fromkeys(("--reranking", "--rerank"), "/v1/rerank"),
    **dict.fromkeys(("--embeddings", "--embedding"), "/v1/embeddings"),
}
"""Option of a llama-server that makes no text → what it answers instead."""


def instead_of_text(argv: Sequence[str]) -> str | None:
    """What a llama-server answers that makes embeddings; None of one that makes text."""
    return next((path for word, path in WITHOUT_TEXT.items() if word in argv), None)


def question_without_text(text: str) -> dict[str, Any]:
    """For embeddings, and for reranking."""
    return {"input": text, "query": text, "documents": [text]}


class Reply(NamedTuple):
    """``status`` is 0 where there is no reply; ``text`` is why then."""

    status: int
    text: str


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

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
    objection: Callable[[], str | None] = lambda: None,
    certificate: bytes | None = None,
) -> Reply:
    """What an HTTP server replies within so many seconds altogether, however slowly it sends, up to a mebibyte.

    :param address: host and port, or the path of a Unix socket.
    :param objection: asked once the connection stands, before anything is sent: why nothing may be.
    :param certificate: the one that the server has to show, in DER form; then HTTPS is spoken. Its names and its authority do not count.
    """
    headers: dict[str, Any] = {
        "Content-Type": "application/json",
        **({"Authorization": b"Bearer " + key.encode(*KEY_TEXT)} if key else {}),
    }
    kind = _UnixConnection if address.startswith("/") else http.client.HTTPConnection
    connection = kind(address, timeout=seconds)
    timer: threading.Timer | None = None
    deadline = time.monotonic() + seconds
    try:
        connection.connect()
        held = [connection.sock]
        timer = threading.Timer(seconds, _hang_up, (held,))
        timer.daemon = True
        timer.start()
        reason = objection() or (_secure(connection, held, certificate) if certificate else None)
        if reason:
            return Reply(0, reason)
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        reply = connection.getresponse()
        text = reply.read(REPLY_BYTES).decode("utf-8", "replace")
        if time.monotonic() < deadline:
            return Reply(reply.status, text)
        raise socket.timeout("timed out")
    except (OSError, http.client.HTTPException, ValueError) as error:
        late = isinstance(error, socket.timeout) or time.monotonic() >= deadline
        return Reply(0, f"{LATE} {seconds:g} s" if late else printable(error))
    finally:
        if timer:
            timer.cancel()
        connection.close()


def _secure(connection: http.client.HTTPConnection, held: list[socket.socket], certificate: bytes) -> str | None:
    """Speaks TLS over a connection that stands; why its server is not the one that has this certificate and its key, or None.

    :param held: gets the socket that takes the connection over, before anything is waited for.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    secured = context.wrap_socket(connection.sock, do_handshake_on_connect=False)
    connection.sock = secured
    held.append(secured)
    secured.do_handshake()
    if secured.getpeercert(binary_form=True) == certificate:
        return None
    return OTHER_CERTIFICATE


def _hang_up(held: list[socket.socket]) -> None:
    """Ends what waits for the other side, in the handshake of TLS too."""
    with suppress(OSError):
        socket.socket.shutdown(held[-1], socket.SHUT_RDWR)

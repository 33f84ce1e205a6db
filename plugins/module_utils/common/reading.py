# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What others wrote, files and replies: read within limits, and parsed as JSON of a known form."""

from __future__ import annotations

import errno
import http.client
import json
import math
import os
import platform
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable

DISK_SECONDS = 60.0
REPLY_BYTES = 1 << 20
OTHER_CERTIFICATE = "it shows another certificate than the one that is configured: run site.yml, which restarts it"
LATE = "no complete answer within"
KEY_TEXT = ("utf-8", "surrogateescape")
"""How the bytes of an API key, whatever they are, become text and bytes again."""
DIGITS = 20


class NotAFileError(OSError):
    """A path leads to something else than a regular file."""


def open_file(path: str | Path, follow: bool = False) -> IO[bytes]:
    """A file to read from. Whoever owns its folder may have replaced it: nothing is waited for, and links are followed only where asked for.

    :raises OSError: it does not exist; NotAFileError where it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read(path: Path, limit: int, follow: bool = False) -> bytes:
    """The first bytes of a file; ``follow`` and errors as of ``open_file``."""
    with open_file(path, follow) as stream:
        return stream.read(limit)


def end_of(path: Path, size: int) -> str:
    """The last bytes of a file as text; empty where it cannot be read, or ``open_file`` refuses it."""
    try:
        with open_file(path) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
            return stream.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


class TooSlowError(Exception):
    """Work took too long; the message ends a sentence that names what is read."""


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What ``work`` gives or raises. It is left behind in a thread of its own when it takes longer: looking up a name, a reply that
    comes byte by byte, or a network mount whose server is gone, cannot be stopped otherwise.

    :raises TooSlowError: it takes longer.
    """
    result: dict[str, Any] = {}

    def run() -> None:
        try:
            result["value"] = work()
        except Exception as error:
            result["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TooSlowError(f"could not be read within {seconds:g} s")
    if "error" in result:
        raise result["error"]
    return result["value"]


def from_disk(path: str | Path, work: Callable[[], Any], seconds: float = DISK_SECONDS) -> Any:
    """What ``work`` gives or raises, which reads there.

    :raises Refusal: it takes longer, as on a network mount whose server is gone.
    """
    try:
        return within(seconds, work)
    except TooSlowError as error:
        raise Refusal(f"{path} on {platform.node()} {error}: check the disk or network mount that holds it") from None


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object that a file of at most so many bytes holds.

    :raises OSError: as ``read``.
    :raises ValueError: it is larger, or as ``parse``.
    """
    data = read(path, limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit} bytes")
    return parse(data)


def parse(text: str | bytes) -> dict[str, Any]:
    """A JSON object, of which every part can be counted with, printed and written again.

    :raises ValueError: it is something else, is nested too deep for Python, or holds a number that is not finite or a string that is no text.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:DIGITS]} is not a finite number")
    return float(text)


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"{text[:DIGITS]}… has more than {DIGITS} digits")
    return int(text)


def first_certificate(text: str) -> bytes:
    """The certificate of a server, the first one of a file in PEM form, as it shows it.

    :raises ValueError: there is none.
    """
    block = re.search(f"{ssl.PEM_HEADER}.*?{ssl.PEM_FOOTER}", text, re.DOTALL)
    if not block:
        raise ValueError("it holds no certificate in PEM form")
    return ssl.PEM_cert_to_DER_cert(block[0])


class Reply(NamedTuple):
    """``status`` is 0 where there is no reply; ``text`` is why then."""

    status: int
    text: str


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

    :param objection: asked once the connection stands, before anything is sent: why nothing may be.
    :param certificate: the one that the server has to show, in DER form; then HTTPS is spoken. Its names and its authority do not count.
    """
    headers: dict[str, Any] = {
        "Content-Type": "application/json",
        **({"Authorization": b"Bearer " + key.encode(*KEY_TEXT)} if key else {}),
    }
    connection = http.client.HTTPConnection(address, timeout=seconds)
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

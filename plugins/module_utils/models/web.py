# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to web servers: headers of models by HTTP ranges, and small answers.

Nothing that a server says is trusted: each reply is held against what was asked for, before its body is read.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import string
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from ansible.module_utils.urls import Request
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf

TOKEN_FILE = "llama_model_token_file"
MAX_REDIRECTS = 5
SECONDS_OF_SILENCE = 20

WHY = {
    404: "does not exist (HTTP 404): correct the URL",
    416: "is empty, or shorter than its server reported before (HTTP 416): use another file",
    429: "is requested too often (HTTP 429): wait some minutes, or give a token",
}
PASSING = (408, 429)
"""Refusals of a server that are over after a while, beside its own errors."""


class RemoteError(gguf.GGUFError):
    """The server does not give what is needed; the message ends a sentence that begins with the URL, and says what to do.

    :param status: of HTTP; 0 where there was no reply, or a wrong one.
    :param passes: whether the same request may succeed a moment later.
    :param reason: what Hugging Face names as the cause.
    """

    def __init__(self, message: str, status: int = 0, passes: bool = False, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.passes, self.reason = status, passes, reason


def explain(error: RemoteError, token: str | None) -> str:
    """The message of an error where a token may help.

    :param token: that was sent.
    """
    if error.status not in (401, 403):
        return str(error)
    licence = "and accept the model's licence on its page with the account of that token"
    remedy = f"the token of {TOKEN_FILE} is not entitled to it" if token else f"give a token with {TOKEN_FILE}"
    return f"needs permission (HTTP {error.status}): {remedy}, {licence}"


def shown(url: str) -> str:
    """A URL for messages: without what may be a secret."""
    try:
        parts = urlsplit(url)
        return validation.printable(urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")))
    except ValueError:
        return validation.printable(url.partition("?")[0])


def same_server(url: str, other: str) -> bool:
    """Whether a token for one URL may go to another."""
    return _origin(url) == _origin(other)


def _origin(url: str) -> tuple[Any, ...]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _redirect_target(url: str, location: str | None) -> str:
    if not location:
        raise RemoteError("is redirected, but its server gives no address: use the URL of the file itself")
    # As urllib itself does: servers send spaces and letters beyond ASCII as they are, which http.client reads as Latin-1.
    target = quote(urljoin(url, location), string.punctuation, "iso-8859-1")
    allowed = ("https",) if urlsplit(url).scheme == "https" else ("http", "https")
    if urlsplit(target).scheme not in allowed:
        raise RemoteError(
            f"is redirected to {shown(target)}, but only {' or '.join(allowed)} is followed: use the URL of the file itself"
        )
    return target


def _error_of(error: Exception) -> RemoteError:
    """What a request failed of, as a sentence."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, (socket.timeout, TimeoutError)):
        return RemoteError("has a server that did not answer in time: try again, or use another server", passes=True)
    if isinstance(error, http.client.IncompleteRead):
        return RemoteError("was cut off: its server sent less than it announced; try again", passes=True)
    if isinstance(error, (http.client.InvalidURL, ValueError)):
        return RemoteError(f"is not a URL ({validation.printable(error)}): correct it")
    text = validation.printable(reason) or type(reason).__name__
    passes = not isinstance(reason, ssl.SSLCertVerificationError)
    return RemoteError(
        f"cannot be read ({text}): check the server, its name, the network and https_proxy", passes=passes
    )


@contextmanager
def _as_sentence() -> Iterator[None]:
    """Raises what a request fails of as a RemoteError."""
    try:
        yield
    except RemoteError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _error_of(error) from error


def answer(url: str, headers: Mapping[str, str], token: str | None = None, silence: float | None = None) -> Any:
    """What a server answers to GET, its body not read yet. Redirects are followed, and their bodies are not read at all.

    :param silence: seconds that it may be silent, then and while its body is read, in place of SECONDS_OF_SILENCE.
    :raises RemoteError: it gives none, refuses, or takes too long.
    """
    target = url
    for _redirect in range(MAX_REDIRECTS + 1):
        with _as_sentence():
            if urlsplit(target).scheme not in ("http", "https"):
                raise RemoteError("is not the URL of a web server: use one that begins with http:// or https://")
            try:
                own = same_server(target, url)
                permission = {"Authorization": f"Bearer {token}"} if token and own else {}
                client = Request(
                    follow_redirects="none",
                    decompress=False,
                    use_netrc=False,
                    timeout=silence or SECONDS_OF_SILENCE,
                )
                return client.open("GET", target, headers={**headers, **permission})
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in (301, 302, 303, 307, 308):
                        raise refused(error.code, error.headers.get("X-Error-Code") or "") from error
                    target = _redirect_target(target, error.headers.get("Location"))
    raise RemoteError(f"is redirected more than {MAX_REDIRECTS} times: use the URL of the file itself")


def content(url: str, headers: Mapping[str, str], limit: int, token: str | None = None) -> bytes:
    """All of a small answer.

    :raises RemoteError: as ``answer``, and where it has more bytes.
    """
    with _as_sentence(), answer(url, headers, token) as reply:
        data: bytes = reply.read(limit + 1)
    if len(data) > limit:
        raise RemoteError(f"is longer than {limit >> 10} KiB, so it is something else: use another server")
    return data


def refused(status: int, reason: str) -> RemoteError:
    """What a server means by a status."""
    remedy = "try again later" if status >= 500 else "open the URL in a browser"
    why = WHY.get(status, f"is not available (HTTP {status}): {remedy}")
    return RemoteError(why, status=status, passes=status in PASSING or status >= 500, reason=reason)


class RemoteFile:
    """A file on a web server, as :func:`gguf.read_headers` takes it."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """:raises RemoteError: the server does not give parts of the file."""
        self.url, self.token = url, token
        self.size: int | None = None
        self.first = self._range(0, gguf.FIRST_CHUNK)

    def read(self, offset: int, count: int) -> bytes:
        if offset + count <= len(self.first):
            return self.first[offset : offset + count]
        return self._range(offset, count)

    def close(self) -> None:
        self.first = b""

    def _range(self, offset: int, count: int) -> bytes:
        headers = {"Range": f"bytes={offset}-{offset + count - 1}", "Accept-Encoding": "identity"}
        with _as_sentence(), answer(self.url, headers, self.token) as reply:
            size, expected = _range_of(reply, offset, count)
            if self.size not in (None, size):
                raise RemoteError(f"changed while it was read, from {self.size} to {size} bytes: try again")
            self.size = size
            data: bytes = reply.read(expected)
        if len(data) != expected:
            raise RemoteError(f"was cut off: its server announced {expected} bytes and sent {len(data)}; try again")
        return data


def _range_of(reply: Any, offset: int, count: int) -> tuple[int, int]:
    """Size of the file, and bytes of the body that a reply to a range request has.

    :raises RemoteError: it is not a reply to that request.
    """
    if reply.headers.get_content_type() == "text/html":
        raise RemoteError(
            "is a web page, not a file: use the URL of the download; on Hugging Face it has /resolve/ where the page has /blob/"
        )
    text = reply.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})", text)
    packed = reply.headers.get("Content-Encoding", "identity") != "identity"
    first, last, size = map(int, match.groups()) if match else (-1, -1, -1)
    if reply.status != 206 or packed or first != offset or last != min(offset + count, size) - 1:
        raise RemoteError(
            f"has a server that does not send parts of files (HTTP {reply.status}, Content-Range {gguf.short(text)} to bytes {offset} to "
            f"{offset + count - 1}): use a server with ranges, or download the file and use its path"
        )
    return size, last - first + 1


def read_model(url: str, token: str | None = None) -> gguf.ModelHeader:
    """The headers of a model.

    :param url: of its file, or of the first one of its parts, beside which the others lie.
    :param token: is sent to its server as a bearer token, and not to where it redirects.
    :raises GGUFError: the file cannot be read or served; the message ends a sentence that begins with its URL.
    """
    if token and not re.fullmatch(r"[!-~]+", token):
        raise RemoteError(
            f"is requested with a token that has spaces, line ends or letters beyond ASCII: correct {TOKEN_FILE}"
        )
    with _as_sentence():
        first = unquote(urlsplit(url).path.rpartition("/")[2])
    return gguf.read_headers(first, lambda name: RemoteFile(beside(url, name), token))


def beside(url: str, name: str) -> str:
    """The URL of a file in the same folder of a server; of the same file it stays as it is."""
    parts = urlsplit(url)
    folder, _slash, own = parts.path.rpartition("/")
    return url if unquote(own) == name else urlunsplit(parts._replace(path=f"{folder}/{quote(name)}"))

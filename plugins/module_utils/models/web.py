# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to web servers: headers of models with range requests, and small answers.

No server is trusted: each reply is compared with its request before its body is read.
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf

TOKEN_FILE_VARIABLE = "llama_model_token_file"
MAX_REDIRECTS = 5
MAX_SILENCE_SECONDS = 20

STATUS_TEXTS = {
    404: "does not exist (HTTP 404): correct the URL",
    416: "is empty, or shorter than the server reported before (HTTP 416): use another file",
    429: "was requested too often (HTTP 429): wait a few minutes, or set llama_model_token_file",
}
TEMPORARY_STATUSES = (408, 429)
"""Statuses of temporary failures, in addition to server errors."""


class RemoteError(gguf.GGUFError):
    """A server failed to send the data. The message is the end of a sentence that begins with the URL, and names a remedy.

    :param status: HTTP status; 0 without a valid reply.
    :param is_transient: whether the same request may soon succeed.
    :param reason: cause named by Hugging Face.
    """

    def __init__(self, message: str, status: int = 0, is_transient: bool = False, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.is_transient, self.reason = status, is_transient, reason


def explain_error(error: RemoteError, token: str | None) -> str:
    """Return the message of an error that a token may fix."""
    if error.status not in (401, 403):
        return str(error)
    advice = "and accept the model's licence on its page with the account that owns the token"
    remedy = f"use a token that has access in {TOKEN_FILE_VARIABLE}" if token else f"set {TOKEN_FILE_VARIABLE}"
    return f"needs permission (HTTP {error.status}): {remedy}, {advice}"


def printable_url(url: str) -> str:
    """Return a URL for messages, without possible secrets."""
    try:
        parts = urlsplit(url)
        return validation.printable(urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")))
    except ValueError:
        return validation.printable(url.partition("?")[0])


def same_server(url: str, other_url: str) -> bool:
    """Return whether two URLs have the same server, so a token for one may be sent to the other."""
    return _origin(url) == _origin(other_url)


def _origin(url: str) -> tuple[Any, ...]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _redirect_target(url: str, location: str | None) -> str:
    if not location:
        raise RemoteError("is redirected, but the server does not say where: use the URL of the file itself")
    # Like urllib: servers send spaces and letters beyond ASCII unquoted, which http.client reads as Latin-1.
    target = quote(urljoin(url, location), string.punctuation, "iso-8859-1")
    schemes = ("https",) if urlsplit(url).scheme == "https" else ("http", "https")
    if urlsplit(target).scheme not in schemes:
        raise RemoteError(
            f"is redirected to {printable_url(target)}, which does not begin with {' or '.join(schemes)}: use the URL of the file itself"
        )
    return target


def _remote_error_of(error: Exception) -> RemoteError:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, (socket.timeout, TimeoutError)):
        return RemoteError(
            "was not received: its server did not answer in time; try again, or use another server", is_transient=True
        )
    if isinstance(error, http.client.IncompleteRead):
        return RemoteError("was cut off: the server sent less than it announced; try again", is_transient=True)
    if isinstance(error, (http.client.InvalidURL, ValueError)):
        return RemoteError(f"is not a URL ({validation.printable(error)}): correct it")
    text = validation.printable(reason) or type(reason).__name__
    is_transient = not isinstance(reason, ssl.SSLCertVerificationError)
    return RemoteError(
        f"cannot be read ({text}): check the server, its name, the network and https_proxy", is_transient=is_transient
    )


@contextmanager
def _convert_errors() -> Iterator[None]:
    """Raise failures of requests as RemoteError."""
    try:
        yield
    except RemoteError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _remote_error_of(error) from error


def open_url(url: str, headers: Mapping[str, str], token: str | None = None, silence_s: float | None = None) -> Any:
    """Return a server's answer to GET with its body unread. Follow redirects without reading their bodies.

    :param silence_s: time limit for a silent server, instead of MAX_SILENCE_SECONDS.
    :raises RemoteError: the server does not answer, refuses, or takes too long.
    """
    target = url
    for _redirect in range(MAX_REDIRECTS + 1):
        with _convert_errors():
            if urlsplit(target).scheme not in ("http", "https"):
                raise RemoteError("is not the URL of a web server: use a URL that begins with http:// or https://")
            try:
                may_authorize = same_server(target, url)
                authorization = {"Authorization": f"Bearer {token}"} if token and may_authorize else {}
                client = Request(
                    follow_redirects="none", decompress=False, use_netrc=False, timeout=silence_s or MAX_SILENCE_SECONDS
                )
                return client.open("GET", target, headers={**headers, **authorization})
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in (301, 302, 303, 307, 308):
                        raise status_error(error.code, error.headers.get("X-Error-Code") or "") from error
                    target = _redirect_target(target, error.headers.get("Location"))
    raise RemoteError(f"is redirected more than {MAX_REDIRECTS} times: use the URL of the file itself")


def fetch_content(url: str, headers: Mapping[str, str], max_bytes: int, token: str | None = None) -> bytes:
    """Return the whole body of a small answer.

    :raises RemoteError: as for ``open_url``, and if the answer is too long.
    """
    with _convert_errors(), open_url(url, headers, token) as reply:
        data = reading.read_reply(reply, max_bytes + 1)
    if len(data) > max_bytes:
        raise RemoteError(f"is longer than {max_bytes >> 10} KiB, the limit for such answers: use another server")
    return data


def status_error(status: int, reason: str) -> RemoteError:
    remedy = "try again later" if status >= 500 else "open the URL in a browser"
    text = STATUS_TEXTS.get(status, f"is not available (HTTP {status}): {remedy}")
    return RemoteError(text, status=status, is_transient=status in TEMPORARY_STATUSES or status >= 500, reason=reason)


class RemoteFile:
    """A file on a web server for :func:`gguf.read_headers`."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """:raises RemoteError: the server does not send ranges of the file."""
        self.url, self.token = url, token
        self.size: int | None = None
        self.first_chunk = self._read_range(0, gguf.FIRST_CHUNK_BYTES)

    def read(self, offset: int, count: int) -> bytes:
        if offset + count <= len(self.first_chunk):
            return self.first_chunk[offset : offset + count]
        return self._read_range(offset, count)

    def close(self) -> None:
        self.first_chunk = b""

    def _read_range(self, offset: int, count: int) -> bytes:
        headers = {"Range": f"bytes={offset}-{offset + count - 1}", "Accept-Encoding": "identity"}
        with _convert_errors(), open_url(self.url, headers, self.token) as reply:
            size, body_bytes = _checked_sizes(reply, offset, count)
            if self.size not in (None, size):
                raise RemoteError(f"changed from {self.size} to {size} bytes while it was read: try again")
            self.size = size
            data = reading.read_reply(reply, body_bytes)
        if len(data) != body_bytes:
            raise RemoteError(f"was cut off: the server announced {body_bytes} bytes but sent {len(data)}; try again")
        return data


def _checked_sizes(reply: Any, offset: int, count: int) -> tuple[int, int]:
    """Return the size of the file and of the body of a reply to a range request.

    :raises RemoteError: the reply does not match the request.
    """
    if reply.headers.get_content_type() == "text/html":
        raise RemoteError(
            "is a web page, not a file: use the download URL (on Hugging Face, /resolve/ instead of /blob/)"
        )
    content_range = reply.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})", content_range)
    is_compressed = reply.headers.get("Content-Encoding", "identity") != "identity"
    first_byte, last_byte, size = map(int, match.groups()) if match else (-1, -1, -1)
    if reply.status != 206 or is_compressed or first_byte != offset or last_byte != min(offset + count, size) - 1:
        raise RemoteError(
            f"is on a server that ignores range requests (HTTP {reply.status}, Content-Range {gguf.quote(content_range)} for bytes {offset} to "
            f"{offset + count - 1}): use a server that supports range requests, or download the file and set its path"
        )
    return size, last_byte - first_byte + 1


def read_header(url: str, token: str | None = None) -> gguf.ModelHeader:
    """Return the header of a model, from the headers of all its parts.

    :param url: URL of its file, or of its first part; the other parts are in the same folder.
    :param token: bearer token for its server, but not for redirects to other servers.
    :raises GGUFError: the file cannot be read or served; the message is the end of a sentence that begins with its URL.
    """
    if token and not re.fullmatch(r"[!-~]+", token):
        raise RemoteError(
            f"is requested with a token that contains spaces, line breaks or non-ASCII characters: correct {TOKEN_FILE_VARIABLE}"
        )
    with _convert_errors():
        first_name = unquote(urlsplit(url).path.rpartition("/")[2])
    return gguf.read_headers(first_name, lambda name: RemoteFile(sibling_url(url, name), token))


def sibling_url(url: str, name: str) -> str:
    """Return the URL of a file in the same folder; the URL itself for the same name."""
    parts = urlsplit(url)
    folder, _slash, file_name = parts.path.rpartition("/")
    return url if unquote(file_name) == name else urlunsplit(parts._replace(path=f"{folder}/{quote(name)}"))

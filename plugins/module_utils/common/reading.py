# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read files of other accounts within limits, and parse JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

PARSE_ERRORS = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""Errors that invalid JSON, or JSON of another structure, causes."""
READ_TIMEOUT_SECONDS = 60.0
MAX_DIGITS = 20


class NotAFileError(OSError):
    """Error for a path that is not a regular file."""


def open_file(path: str | Path, follows_links: bool = False) -> IO[bytes]:
    """Open a file for reading. The owner of its folder may have replaced it, so opening never blocks, and follows links only on request.

    :raises OSError: the file does not exist; NotAFileError: the path is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_start(path: Path, max_bytes: int, follows_links: bool = False) -> bytes:
    """Return the first ``max_bytes`` of a file; see ``open_file``."""
    with open_file(path, follows_links) as stream:
        return stream.read(max_bytes)


def read_tail(path: Path, max_bytes: int) -> str:
    """Return the last ``max_bytes`` of a file as text; empty if it cannot be read."""
    try:
        with open_file(path) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - max_bytes))
            return stream.read(max_bytes).decode("utf-8", "replace")
    except OSError:
        return ""


class TooSlowError(Exception):
    """Timeout; the message is the end of a sentence about a file or address."""


def run_within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return the result of ``work``. Work that takes longer is abandoned in a thread, because name lookups, slow replies and dead network mounts
    cannot be interrupted.

    :raises TooSlowError: the work takes longer.
    """
    result: dict[str, Any] = {}

    def run_work() -> None:
        try:
            result["value"] = work()
        except Exception as error:
            result["error"] = error

    thread = threading.Thread(target=run_work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TooSlowError(f"could not be read within {seconds:g} s")
    if "error" in result:
        raise result["error"]
    return result["value"]


def read_reply(reply: Any, max_bytes: int) -> bytes:
    """Return at most ``max_bytes`` of an HTTP reply. Its method ``read`` would return everything after a chunk of negative length."""
    data = bytearray(max_bytes)
    return bytes(memoryview(data)[: reply.readinto(data)])


def run_disk_work(path: str | Path, work: Callable[[], Any], seconds: float = READ_TIMEOUT_SECONDS) -> Any:
    """Return the result of ``work``, which reads this path.

    :raises Refusal: the work takes longer, for example because of a dead network mount.
    """
    try:
        return run_within(seconds, work)
    except TooSlowError as error:
        raise Refusal(
            f"{path} on {platform.node()} {error}: check the disk or network mount that holds this file"
        ) from None


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file of at most ``max_bytes``.

    :raises OSError: the file cannot be read.
    :raises ValueError: the file is larger or invalid; see ``parse``.
    """
    data = read_start(path, max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes} bytes")
    return parse(data)


def parse(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object whose values are safe to compute with, print and write.

    :raises ValueError: the text is not a JSON object, is nested too deeply for Python, or has an infinite number or an invalid string.
    """
    try:
        value = json.loads(text, parse_constant=_parse_number, parse_float=_parse_number, parse_int=_parse_integer)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _parse_number(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:MAX_DIGITS]} is not a finite number")
    return float(text)


def _parse_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"{text[:MAX_DIGITS]}… has more than {MAX_DIGITS} digits")
    return int(text)

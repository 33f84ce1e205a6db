# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What others wrote: read within limits, and parsed as JSON of a known form."""

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

DISK_SECONDS = 60.0
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

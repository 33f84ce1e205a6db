# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head's launcher remembers from one start to the next, and reports of itself: state/serving.json. And the fallbacks that it may serve on."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = "serving.json"
WAITING, LOADING, SERVING, ASLEEP, FALLBACK = STATES = "waiting", "loading", "serving", "asleep", "fallback"
SILENT = "silent"
"""The record says that llama-server serves, and llama-server does not answer."""
WORDS = {
    SILENT: "does not answer as a server",
    FALLBACK: "serves on a fallback",
    ASLEEP: "asleep (a request wakes it)",
}
"""States that people are shown in other words."""
LAST = 20
TEXT = 500
"""Characters of one line that are kept."""
FILE_BYTES = 256 * 1024
FALLBACKS_BYTES = 4 * 1024 * 1024
LARGEST = 1 << 53
"""No count and no clock goes beyond it."""
WRITE_SECONDS, LOAD_SECONDS = 10.0, 2.0
"""The file is written so often, and while a model is loaded."""


class Kept(NamedTuple):
    """What one start leaves for the next."""

    restarts: int = 0
    last: tuple[dict[str, Any], ...] = ()


class Fallback(NamedTuple):
    name: str
    without: str
    """The worker that may be away, as ADDRESS:PORT."""
    workers: tuple[str, ...]
    argv: tuple[str, ...]


def read_file(path: Path, limit: int) -> bytes:
    """:raises OSError, ValueError: it cannot be read, is a link or a pipe, or is longer than the limit."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        text = file.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"it is longer than {limit} bytes")
    return text


def read_json(path: Path, limit: int) -> Any:
    """:raises OSError, ValueError: as of read_file, or it is not JSON."""
    try:
        return json.loads(read_file(path, limit))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_kept(path: Path) -> Kept:
    """What the last start left; nothing where the file has another form."""
    try:
        told = read_json(path, FILE_BYTES)
        last = [{"time": _count(line["time"]), "text": str(line["text"])[:TEXT]} for line in told["last"]]
        return Kept(_count(told["restarts"]), tuple(last[-LAST:]))
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return Kept()


def _count(value: Any) -> int:
    if not 0 <= value <= LARGEST:
        raise ValueError("it is neither a count nor a time")
    return int(value)


class Record:
    """Writes the file, at each change of the state and every ten seconds. A full disk stops nothing."""

    def __init__(self, folder: Path, write: Callable[[Path, dict], bool], say: Callable[[str], None]) -> None:
        self.path = folder / FILE
        self.kept = read_kept(self.path)
        self._write_file = write
        self._say = say
        self.state = WAITING
        self.since = time.time()
        self.without: Sequence[str] = ()
        self.waiting_for: Sequence[str] = ()
        self.load: Mapping[str, Any] | None = None
        self.written = 0.0

    def set(self, state: str, without: Sequence[str] = (), waiting_for: Sequence[str] = ()) -> None:
        """Writes the file if something differs from what it says, or it was written long ago."""
        now = time.monotonic()
        if (state, without, waiting_for) != (self.state, self.without, self.waiting_for) or not self.written:
            self.since = self.since if state == self.state else time.time()
            self.state, self.without, self.waiting_for = state, without, waiting_for
            self.load = None
            self._write(now)
        elif now - self.written >= WRITE_SECONDS:
            self._write(now)

    def loading(self, load: Mapping[str, Any]) -> None:
        """Notes how far the model is loaded.

        :param load: the fields of loading.Load.
        """
        self.load = load
        now = time.monotonic()
        if now - self.written >= LOAD_SECONDS:
            self._write(now)

    def note(self, text: str) -> None:
        """Says one line, and keeps it."""
        self._say(text)
        line = {"time": int(time.time()), "text": text[:TEXT]}
        self.kept = self.kept._replace(last=(*self.kept.last, line)[-LAST:])
        self._write(time.monotonic())

    def ended(self) -> None:
        """Counts a restart of llama-server."""
        self.state, self.since, self.without, self.load = WAITING, time.time(), (), None
        self.kept = self.kept._replace(restarts=self.kept.restarts + 1)
        self._write(time.monotonic())

    def _write(self, now: float) -> None:
        self._write_file(
            self.path,
            {
                **self.kept._asdict(),
                "schema": 1,
                "time": int(time.time()),
                "process": os.getpid(),
                "state": self.state,
                "since": int(self.since),
                "without": list(self.without),
                "waiting_for": list(self.waiting_for),
                "load": self.load and dict(self.load),
            },
        )
        self.written = now


def read_fallbacks(path: Path) -> list[Fallback]:
    """:raises OSError, ValueError: it cannot be read, or is not a list of fallbacks."""
    told = read_json(path, FALLBACKS_BYTES)
    try:
        return [
            Fallback(entry["name"], entry["without"], tuple(entry["workers"]), tuple(entry["argv"])) for entry in told
        ]
    except (KeyError, TypeError):
        raise ValueError("it is not a list of {name, without, workers, argv}") from None


def fitting(fallbacks: Collection[Fallback], away: Collection[str], ready: Collection[str]) -> Fallback | None:
    """The first fallback without one of the workers that are away, all of whose workers shook hands."""
    for fallback in fallbacks:
        if fallback.without in away and all(endpoint in ready for endpoint in fallback.workers):
            return fallback
    return None

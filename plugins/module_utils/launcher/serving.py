# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head's launcher remembers from one start to the next, and reports of itself: state/serving.json. And the fallbacks that it may serve on.

A service manager starts the launcher anew after each end of llama-server, so how long it has to wait before the next start is in the file too.
"""

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
"""A state that a server says that serves and does not answer."""
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
LONGEST_WAIT = 60
SETTLED_SECONDS = 30
"""For each so many seconds for which llama-server serves, one of its ends is forgotten."""
RECENT_SECONDS = 120
DAY = 86400
STEADY_SECONDS, LONGEST_STEADY_SECONDS = 30, 1800


class Kept(NamedTuple):
    """What one start leaves for the next."""

    on_fallback: int = 0
    """When it last served on a fallback."""
    restarts: int = 0
    failures: int = 0
    """Ends of llama-server that nobody asked for, and that are not forgotten yet."""
    ended: int = 0
    returns: Mapping[str, int] = {}
    """Worker or host → how often the head returned to it from a fallback, as far as that is not forgotten yet."""
    silences: tuple[int, ...] = ()
    """When llama-server was ended since nothing moved, within the last day."""
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
    """What the last start left; nothing where the file says nothing that can be believed."""
    try:
        told = read_json(path, FILE_BYTES)
        if not isinstance(told, dict):
            return Kept()
        counted = ("on_fallback", "restarts", "failures", "ended")
        numbers = {name: _count(told.get(name, 0)) for name in counted}
        last = [{"time": _count(line["time"]), "text": str(line["text"])[:TEXT]} for line in told.get("last", [])]
        noted = told.get("returns")
        returns = {str(name): _count(number) for name, number in noted.items()} if isinstance(noted, dict) else {}
        silences = tuple(_count(when) for when in told.get("silences", []))
        return Kept(**numbers, returns=returns, silences=silences[-LAST:], last=tuple(last[-LAST:]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return Kept()


def _count(value: Any) -> int:
    if not 0 <= value <= LARGEST:
        raise ValueError("it is no count and no time")
    return int(value)


def wait_before_start(kept: Kept, now: float) -> float:
    """Seconds that are left of 1, 2, 4 … up to 60, one step further for each end that nobody asked for. A clock that was set back adds none."""
    if not kept.failures:
        return 0.0
    wait = min(LONGEST_WAIT, 2 ** (min(kept.failures, LONGEST_WAIT) - 1))
    return min(wait, max(0.0, kept.ended + wait - now))


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
        self.served_since: float | None = None

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

    def served(self, now: float) -> None:
        """Notes that llama-server serves now, and forgets one of its ends, and one return from a fallback, for every SETTLED_SECONDS."""
        self.served_since = now if self.served_since is None else self.served_since
        if now - self.served_since >= SETTLED_SECONDS:
            self.served_since = now
            forgotten = self.state != FALLBACK
            returns = {name: number - forgotten for name, number in self.kept.returns.items() if number > forgotten}
            self.kept = self.kept._replace(failures=max(0, self.kept.failures - 1), returns=returns)

    def note(self, text: str) -> None:
        """Says one line, and keeps it."""
        self._say(text)
        line = {"time": int(time.time()), "text": text[:TEXT]}
        self.kept = self.kept._replace(last=(*self.kept.last, line)[-LAST:])
        self._write(time.monotonic())

    def ended(self, silent: bool = False) -> None:
        """Counts an end of llama-server that nobody asked for."""
        kept, now = self.kept, int(time.time())
        self.state, self.since, self.without, self.load = WAITING, time.time(), (), None
        silences = [when for when in kept.silences if now - when < DAY] + ([now] if silent else [])
        self.kept = kept._replace(
            restarts=kept.restarts + 1, failures=kept.failures + 1, ended=now, silences=tuple(silences)
        )
        self._write(time.monotonic())

    def returned(self) -> None:
        returns = {**self.kept.returns, **{name: self.kept.returns.get(name, 0) + 1 for name in self.without}}
        self.kept = self.kept._replace(returns=returns, restarts=self.kept.restarts + 1, on_fallback=0)

    @property
    def served_on_fallback(self) -> bool:
        """Whether the start before this one served on a fallback just now."""
        return 0 <= time.time() - self.kept.on_fallback < RECENT_SECONDS

    @property
    def steady(self) -> float:
        """Seconds for which the worker that is away has to answer before it is used: one that comes and goes longer each time, whatever others did."""
        returns = max((self.kept.returns.get(name, 0) for name in self.without), default=0)
        return min(LONGEST_STEADY_SECONDS, STEADY_SECONDS * 2 ** min(returns, 10))

    def _write(self, now: float) -> None:
        if self.state == FALLBACK:
            self.kept = self.kept._replace(on_fallback=int(time.time()))
        kept = self.kept._asdict()
        self._write_file(
            self.path,
            {
                **kept,
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

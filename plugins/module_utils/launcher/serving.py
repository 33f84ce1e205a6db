# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head's launcher remembers from one start to the next, and reports of itself: state/serving.json. And the fallbacks that it may serve on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, loading
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc

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


def read_kept(path: Path) -> Kept:
    """What the last start left."""
    return journal.read_back(path, _kept) or Kept()


def _kept(told: Any) -> Kept:
    last = [{"time": _count(line["time"]), "text": str(line["text"])[:TEXT]} for line in told["last"][-LAST:]]
    return Kept(_count(told["restarts"]), tuple(last))


def _count(value: Any) -> int:
    if not 0 <= value <= LARGEST:
        raise ValueError("it is neither a count nor a time")
    return int(value)


class Record:
    """Writes the file, at each change of the state and every ten seconds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.kept = read_kept(self.path)
        self.state = WAITING
        self.since = time.time()
        self.without: Sequence[str] = ()
        self.waiting_for: Sequence[str] = ()
        self.load: loading.Load | None = None
        self.written = -math.inf

    def set(
        self,
        state: str,
        without: Sequence[str] = (),
        waiting_for: Sequence[str] = (),
        load: loading.Load | None = None,
    ) -> None:
        """:param load: how far the model is loaded."""
        changed = (state, without, waiting_for) != (self.state, self.without, self.waiting_for)
        self.since = self.since if state == self.state else time.time()
        self.state, self.without, self.waiting_for, self.load = state, without, waiting_for, load
        if changed or time.monotonic() - self.written >= (LOAD_SECONDS if load else WRITE_SECONDS):
            self._write()

    def note(self, text: str) -> None:
        """Says one line, and keeps it."""
        journal.say(text)
        line = {"time": int(time.time()), "text": text[:TEXT]}
        self.kept = self.kept._replace(last=(*self.kept.last, line)[-LAST:])
        self._write()

    def ended(self) -> None:
        """Counts a restart of llama-server."""
        self.kept = self.kept._replace(restarts=self.kept.restarts + 1)
        self.written = -math.inf
        self.set(WAITING)

    def _write(self) -> None:
        told = {
            **self.kept._asdict(),
            "schema": 1,
            "time": int(time.time()),
            "process": os.getpid(),
            "state": self.state,
            "since": int(self.since),
            "without": list(self.without),
            "waiting_for": list(self.waiting_for),
            "load": self.load and {**self.load._asdict(), "sent": dict(self.load.sent)},
        }
        journal.write_state(self.path, told)
        self.written = time.monotonic()


def read_fallbacks(path: Path) -> list[Fallback] | None:
    """None where it is not a list of fallbacks."""
    return journal.read_back(path, lambda told: [_fallback(**entry) for entry in told])


def _fallback(name: str, without: str, workers: Sequence[str], argv: Sequence[str]) -> Fallback:
    for endpoint in (without, *workers):
        rpc.place_of(endpoint)
    if not all(isinstance(word, str) for word in (name, *argv)):
        raise TypeError
    return Fallback(name, without, tuple(workers), tuple(argv))

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The head's record, state/serving.json, which survives restarts of its launcher, and the fallbacks that it may use."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, loading
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc

RECORD_FILE = "serving.json"
WAITING, LOADING, SERVING, ASLEEP, FALLBACK = STATES = "waiting", "loading", "serving", "asleep", "fallback"
SILENT = "silent"
"""State of a server that should answer and does not."""
STATE_TEXTS = {SILENT: "gives no valid answer", FALLBACK: "serves on a fallback", ASLEEP: "asleep (a request wakes it)"}
"""Texts of states, if they differ from their names."""
MAX_EVENTS = 20
MAX_EVENT_LENGTH = 500
MAX_NUMBER = 1 << 53
"""Largest count or time in a valid record."""
WRITE_SECONDS, LOADING_WRITE_SECONDS = 10.0, 2.0
"""Seconds between two writes: normally, and while a model is loaded."""


def describe_absence(workers: Iterable[str]) -> str:
    return f"the head serves without {', '.join(workers) or 'a worker'}"


def describe_wait(workers: Mapping[str, tuple[str, str]], endpoints: Iterable[str]) -> str:
    """:param workers: endpoint → host and worker."""
    return f"the head waits for worker {', '.join(worker_name(workers, endpoint) for endpoint in endpoints)}"


def worker_name(workers: Mapping[str, tuple[str, str]], endpoint: str) -> str:
    return f"{':'.join(workers[endpoint])} ({endpoint})" if endpoint in workers else endpoint


class History(NamedTuple):
    """Part of the record that survives a restart."""

    restarts: int = 0
    last: tuple[dict[str, Any], ...] = ()


class FallbackCommand(NamedTuple):
    name: str
    without: str
    """The absent worker, as ADDRESS:PORT."""
    workers: tuple[str, ...]
    argv: tuple[str, ...]


def read_history(path: Path) -> History:
    return journal.read_back(path, _parse_history) or History()


def _parse_history(record: Any) -> History:
    last_events = [
        {"time": _parse_number(event["time"]), "text": str(event["text"])[:MAX_EVENT_LENGTH]}
        for event in record["last"][-MAX_EVENTS:]
    ]
    return History(_parse_number(record["restarts"]), tuple(last_events))


def _parse_number(value: Any) -> int:
    if not 0 <= value <= MAX_NUMBER:
        raise ValueError("the number is neither a count nor a time")
    return int(value)


class HeadRecord:
    """Writes the record at each change of the state and every ten seconds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RECORD_FILE
        self.history = read_history(self.path)
        self.state = WAITING
        self.state_start_time = time.time()
        self.unused_workers: Sequence[str] = ()
        self.absent_workers: Sequence[str] = ()
        self.load: loading.LoadCounters | None = None
        self.last_write_time = -math.inf

    def set_state(
        self,
        state: str,
        unused_workers: Sequence[str] = (),
        absent_workers: Sequence[str] = (),
        load: loading.LoadCounters | None = None,
    ) -> None:
        is_changed = (state, unused_workers, absent_workers) != (self.state, self.unused_workers, self.absent_workers)
        self.state_start_time = self.state_start_time if state == self.state else time.time()
        self.state, self.load = state, load
        self.unused_workers, self.absent_workers = unused_workers, absent_workers
        if is_changed or time.monotonic() - self.last_write_time >= (LOADING_WRITE_SECONDS if load else WRITE_SECONDS):
            self._write()

    def log(self, text: str) -> None:
        """Log an event and add it to the record."""
        journal.log(text)
        event = {"time": int(time.time()), "text": text[:MAX_EVENT_LENGTH]}
        self.history = self.history._replace(last=(*self.history.last, event)[-MAX_EVENTS:])
        self._write()

    def count_restart(self) -> None:
        self.history = self.history._replace(restarts=self.history.restarts + 1)
        self.last_write_time = -math.inf
        self.set_state(WAITING)

    def _write(self) -> None:
        content = {
            **self.history._asdict(),
            "schema": 1,
            "time": int(time.time()),
            "process": os.getpid(),
            "state": self.state,
            "since": int(self.state_start_time),
            "without": list(self.unused_workers),
            "waiting_for": list(self.absent_workers),
            "load": self.load and {**self.load._asdict(), "sent": dict(self.load.sent)},
        }
        journal.write_state(self.path, content)
        self.last_write_time = time.monotonic()


def read_fallbacks(path: Path) -> list[FallbackCommand] | None:
    """Return the fallbacks; None if the file is invalid."""
    return journal.read_back(path, lambda fallbacks: [_parse_fallback(**fields) for fields in fallbacks])


def _parse_fallback(name: str, without: str, workers: Sequence[str], argv: Sequence[str]) -> FallbackCommand:
    for endpoint in (without, *workers):
        rpc.parse_endpoint(endpoint)
    if not all(isinstance(word, str) for word in (name, *argv)):
        raise TypeError
    return FallbackCommand(name, without, tuple(workers), tuple(argv))

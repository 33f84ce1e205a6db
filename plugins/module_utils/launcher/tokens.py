# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many tokens llama-server computed within the last hour, over its starts: its counters, which begin anew at each start, noted every five minutes
in state/tokens.json."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "tokens.json"
METRICS_OPTION = "--metrics"
COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "prompt_s": "prompt_seconds_total",
    "generated_tokens": "tokens_predicted_total",
    "generation_s": "tokens_predicted_seconds_total",
}
"""Counters since the start of llama-server → their names in its /metrics (tools/server/README.md of build 11063, server.cpp of ik_llama.cpp 4840).
A request counts when it ends."""
HOUR = 3600
EVERY_SECONDS, AGAIN_SECONDS = 300.0, 30.0
"""Between two notes, and after a question that was not answered: llama-server answers between two batches."""
KEPT_SECONDS, MOST_NOTES = 2 * HOUR, 64
FILE_BYTES = 64 * 1024
LARGEST = 1 << 53
"""No counter and no clock goes beyond it."""


def counters(text: str) -> dict[str, float]:
    """COUNTERS from the text of llama-server's /metrics; empty where one of them is missing."""
    found = {}
    for name, shown in COUNTERS.items():
        match = re.search(
            rf"^llamacpp:{shown}(?:\{{[^}}\n]*\}})? (\d{{1,15}}(?:\.\d{{1,9}})?(?:e\+?\d{{1,2}})?)\r?$", text, re.M
        )
        if match:
            found[name] = float(match.group(1))
    return found if len(found) == len(COUNTERS) else {}


def of_last_hour(notes: Sequence[Mapping[str, Any]], now: float) -> dict[str, float] | None:
    """What was counted since the last note that is an hour old: COUNTERS, and ``seconds``, the time that this covers. None without notes.

    :param notes: ``time``, ``start`` and COUNTERS, the newest last. Of those with the same start the counters go on.
    """
    begin = int(now) - HOUR
    found = dict.fromkeys(COUNTERS, 0.0)
    since = now
    for start in dict.fromkeys(note["start"] for note in notes):
        own = [note for note in notes if note["start"] == start]
        base = next((note for note in reversed(own) if note["time"] <= begin), own[0])
        since = min(since, base["time"])
        for name in COUNTERS:
            found[name] += max(0.0, own[-1][name] - base[name])
    return {**found, "seconds": max(0, int(now - since))} if notes else None


class Notes:
    """Those of one start of llama-server, after those that earlier ones left."""

    def __init__(self, folder: Path, kept: Sequence[Mapping[str, Any]], write: Callable[[Path, dict], bool]) -> None:
        self.path = folder / FILE
        self.kept = list(kept)
        self._write_file = write
        self.start: int | None = None
        self.next = 0.0

    def look(self, ask: Callable[[], str], now: float) -> None:
        """Notes the counters of a server that serves, if that is due.

        :param ask: returns the text of /metrics, or nothing.
        :param now: of a clock that only goes forward.
        """
        if now < self.next:
            return
        if self.start is None:
            self.start = int(time.time())
            counted = dict.fromkeys(COUNTERS, 0.0)
        else:
            counted = counters(ask())
        self.next = now + (EVERY_SECONDS if counted else AGAIN_SECONDS)
        if counted:
            self._note({"time": int(time.time()), "start": self.start, **counted})

    def _note(self, note: dict[str, Any]) -> None:
        recent = [old for old in self.kept if 0 <= note["time"] - old["time"] < KEPT_SECONDS]
        self.kept = [*recent, note][-MOST_NOTES:]
        self._write_file(self.path, {"schema": 1, "process": os.getpid(), "notes": self.kept})


def kept_notes(told: Any) -> list[dict[str, Any]]:
    """Notes of a file; none where it says nothing that can be believed."""
    try:
        notes = [
            {"time": int(note["time"]), "start": int(note["start"]), **{name: float(note[name]) for name in COUNTERS}}
            for note in told["notes"][-MOST_NOTES:]
        ]
    except (KeyError, TypeError, ValueError, OverflowError):
        return []
    return notes if all(0 <= number <= LARGEST for note in notes for number in note.values()) else []

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What services of the launcher say and write down. Nothing of it is worth a service: on a full or read-only disk, or where nobody reads the log,
it goes on without, and says so."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

INCOMPLETE = "llamacpp: this log is incomplete"
"""Stands in a log of which a part could not be written."""
SYSTEMD = "NOTIFY_SOCKET"
"""Variable by which systemd says where it is told that a service gets on; it listens to the process alone that it started."""
READER_SECONDS = 5.0
"""So long a reader of the log may take for one part of it, however slowly it reads, before the log goes on without it."""


class Log:
    """Where lines go. Nobody waits or ends for a full disk, nor for a reader that is gone or stands still."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.missing = 0
        self.incomplete = False
        self.lock = threading.Lock()

    def write(self, data: bytes) -> str | None:
        """Writes what can be written now, after a line that says how much could not be before; the reason, the first time that there is one."""
        with self.lock:
            gap = f"\n{INCOMPLETE}: {self.missing} bytes are missing here\n".encode() if self.missing else b""
            left, reason = gap + data, None
            deadline = time.monotonic() + (0 if self.missing else READER_SECONDS)
            try:
                while left and not reason:
                    seconds = max(0.0, deadline - time.monotonic())
                    if select.select([], [self.descriptor], [], seconds)[1]:
                        left = left[os.write(self.descriptor, left[: select.PIPE_BUF]) :]
                    else:
                        reason = "nobody reads it"
            except OSError as error:
                reason = str(error.strerror)
            self.missing = self.missing + len(data) if len(left) > len(data) else len(left)
            first, self.incomplete = not self.incomplete, self.incomplete or bool(reason)
            return reason if first else None


SERVICE_LOG = Log(1)
"""The standard output: a journal, a pipe to supervisor, or a file."""


def say(text: str) -> None:
    SERVICE_LOG.write(f"llamacpp: {text}\n".encode("utf-8", "replace"))


SAID: set[str] = set()


def say_once(text: str) -> None:
    if text not in SAID:
        SAID.add(text)
        say(text)


def write_state(path: Path, content: dict) -> bool:
    return replace(path, json.dumps(content))


def replace(path: Path, text: str, mode: int | None = None) -> bool:
    """Replaces a file of the launcher's as a whole; says why where it cannot."""
    partial = path.with_name(path.name + ".new")
    try:
        partial.unlink(missing_ok=True)
        with partial.open("x") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
        partial.replace(path)
    except OSError as error:
        say_once(f"{path} could not be written: {error.strerror}")
        return False
    return True


def alive() -> None:
    """Tells systemd that the launcher gets on. It ends one that is silent for WatchdogSec, with its program: nobody else would notice that it is stopped."""
    place = os.environ.get(SYSTEMD, "")
    if place:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.setblocking(False)
            systemd.sendto(b"WATCHDOG=1", "\0" + place[1:] if place.startswith("@") else place)

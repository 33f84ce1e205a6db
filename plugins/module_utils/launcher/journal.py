# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What services of the launcher say and write down. A full or read-only disk stops none of them."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

SYSTEMD = "NOTIFY_SOCKET"
"""Variable with the socket at which systemd waits for signs of life, of the process alone that it started."""
OUTPUT = 1
"""The standard output: a journal, a pipe to supervisor, or a file."""
LOCK = threading.Lock()


def write(data: bytes) -> None:
    """Adds to the log of the service."""
    with LOCK, suppress(OSError):
        while data:
            data = data[os.write(OUTPUT, data) :]


def say(text: str) -> None:
    write(f"llamacpp: {text}\n".encode("utf-8", "replace"))


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
    """Tells systemd that the launcher works. systemd ends a launcher that is silent for WatchdogSec, together with its program."""
    place = os.environ.get(SYSTEMD, "")
    if place:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.setblocking(False)
            systemd.sendto(b"WATCHDOG=1", "\0" + place[1:] if place.startswith("@") else place)

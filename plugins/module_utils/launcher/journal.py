# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log, files and watchdog of the launcher's services. Neither a full disk nor an unexpected file stops a service."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

NOTIFY_VARIABLE = "NOTIFY_SOCKET"
"""Environment variable with the socket on which systemd waits for signs of life from the process that it started."""
OUTPUT_DESCRIPTOR = 1
"""Standard output: a journal, a pipe to supervisor, or a file."""
OUTPUT_LOCK = threading.Lock()
START_LOG_FILE = "start.log"
MAX_START_LOG_BYTES = 8 * 1024 * 1024
MAX_FILE_BYTES = 4 * 1024 * 1024
"""Size limit of a file that the launcher reads back."""


def write(data: bytes) -> None:
    with OUTPUT_LOCK, suppress(OSError):
        while data:
            data = data[os.write(OUTPUT_DESCRIPTOR, data) :]


def log(text: str) -> None:
    write(f"llamacpp: {text}\n".encode("utf-8", "replace"))


LOGGED_KEYS: set[str] = set()


def log_once(text: str, key: str = "") -> None:
    """:param key: the part of the text that never changes; empty for the whole text."""
    if (key or text) not in LOGGED_KEYS:
        LOGGED_KEYS.add(key or text)
        log(text)


def run_safely(failure_text: str, action: Callable[[], Result]) -> Result | None:
    """Return the result of ``action``, or None after logging its exception: monitoring a service must never stop it."""
    try:
        return action()
    except Exception as error:
        key = f"{failure_text}: {type(error).__name__}"
        log_once(f"{key}, {error}", key)
        return None


def read_back(path: Path, parse: Callable[[Any], Result], decode: Callable[[bytes], Any] = json.loads) -> Result | None:
    """Return the result of ``parse`` for a file's content. Return None if the file is missing, a link, a pipe, too long or invalid."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            data = file.read(MAX_FILE_BYTES + 1)
        return parse(decode(data)) if len(data) <= MAX_FILE_BYTES else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


class StartLog:
    """File with the beginning of llama-server's output since its start; write errors are ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.remaining_bytes = MAX_START_LOG_BYTES
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self.descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            log(f"{path} could not be written: {error.strerror}")
            self.descriptor = os.open(os.devnull, os.O_WRONLY)

    def __enter__(self) -> StartLog:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.descriptor)

    def write(self, data: bytes) -> None:
        with suppress(OSError):
            self.remaining_bytes -= os.write(self.descriptor, data[: self.remaining_bytes])


def write_state(path: Path, content: dict) -> bool:
    return replace_file(path, json.dumps(content))


def replace_file(path: Path, text: str, mode: int | None = None) -> bool:
    """Replace a file of the launcher atomically; log an error."""
    partial_path = path.with_name(path.name + ".new")
    try:
        partial_path.unlink(missing_ok=True)
        with partial_path.open("x") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
        partial_path.replace(path)
    except OSError as error:
        log_once(f"{path} could not be written: {error.strerror}")
        return False
    return True


def notify_watchdog() -> None:
    """Tell systemd that the launcher works. systemd kills a launcher that is silent for WatchdogSec, together with its program."""
    address = os.environ.get(NOTIFY_VARIABLE, "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as watchdog_socket:
            watchdog_socket.setblocking(False)
            watchdog_socket.sendto(b"WATCHDOG=1", "\0" + address[1:] if address.startswith("@") else address)

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lock files. An account that can open a lock file, even for reading, can hold the lock forever, so other accounts have no access."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.2


def open_file(path: Path) -> int:
    """Open a lock file, inaccessible to other accounts if its file system has modes.

    :raises OSError: it is a link, cannot be opened, or belongs to neither this account nor the owner of its folder.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    status = os.fstat(lock)
    if status.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid):
        os.close(lock)
        raise PermissionError(
            errno.EPERM, f"this file belongs to uid {status.st_uid}, which could hold the lock forever", str(path)
        )
    with suppress(OSError):
        os.fchmod(lock, 0o600)
    return lock


def take(lock: int, seconds: float = 0) -> bool:
    """Lock an open file until this process and its children close it. Return False if another process holds the lock for longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(POLL_SECONDS)


def is_held(path: Path) -> bool:
    if not path.exists():
        return False
    lock = open_file(path)
    try:
        return not take(lock)
    finally:
        os.close(lock)

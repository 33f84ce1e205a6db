# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lock files. An account that can open a lock file, even for reading, can hold the lock forever, so other accounts have no access."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

POLL_SECONDS = 0.2
HOST_LOCK_SECONDS = 600


class BusyError(Refusal):
    """Another process holds the lock."""


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


@contextmanager
def hold(path: Path, seconds: float = 0) -> Iterator[int]:
    """Hold the lock of a file during a block, and yield its descriptor.

    :raises BusyError: other processes hold it for longer than ``seconds``.
    :raises OSError: see ``open_file``.
    """
    lock = open_file(path)
    try:
        if not take(lock, seconds):
            raise BusyError(
                f"{path} has been locked for more than {seconds:g} s by {holders_text(path)} on this host: wait until the lock is released, or stop its "
                "holder, then run the playbook again"
            )
        yield lock
    finally:
        os.close(lock)


def is_held(path: Path) -> bool:
    try:
        with hold(path) if path.exists() else nullcontext():
            return False
    except BusyError:
        return True


@contextmanager
def hold_host_lock(prefix: str) -> Iterator[None]:
    """Hold the lock of a host during a block, so that only one process changes it at a time: a killed run's last task may still be running. A folder
    without this collection's mark has no lock.

    :raises BusyError: another process holds it for too long.
    """
    with ExitStack() as stack:
        if files.is_marked(Path(prefix)):
            with ignore_read_only():
                stack.enter_context(hold(Path(prefix, names.HOST_LOCK), HOST_LOCK_SECONDS))
        yield


@contextmanager
def ignore_read_only() -> Iterator[None]:
    """Ignore errors from a read-only disk: services must be stopped there too."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def find_holders(path: Path) -> list[int]:
    """Return the processes that hold the lock and are visible to this account (Linux; empty on other systems)."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                if os.path.samefile(link, path) and "lock:" in (process / "fdinfo" / link.name).read_text():
                    processes.append(int(process.name))
                    break
    return sorted(processes)


def holders_text(path: Path) -> str:
    """Return the processes that hold the lock, for a message: 'process 12 and process 13'."""
    return " and ".join(f"process {process}" for process in find_holders(path)) or "a process"

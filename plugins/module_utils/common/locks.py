# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that one process at a time holds. Any account that can open such a file, even only to read it, can hold it for good, so other accounts may not."""

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
HOST_SECONDS = 600


class BusyError(Refusal):
    """Another process holds the lock."""


def open_file(path: Path) -> int:
    """The file of a lock as a descriptor, closed to other accounts where its file system has modes.

    :raises OSError: it is a link, or cannot be opened, or belongs to an account that is neither this one nor the owner of its folder.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    status = os.fstat(lock)
    if status.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid):
        os.close(lock)
        raise PermissionError(
            errno.EPERM, f"it belongs to uid {status.st_uid}, who could hold this lock for good", str(path)
        )
    with suppress(OSError):
        os.fchmod(lock, 0o600)
    return lock


def take(lock: int, seconds: float = 0) -> bool:
    """Locks an open file until it is closed, here and in the processes that inherit it; False where others hold it for longer than that."""
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
    """Holds the lock of a file meanwhile; its descriptor.

    :raises BusyError: other processes hold it for longer than ``seconds``.
    :raises OSError: see ``open_file``.
    """
    lock = open_file(path)
    try:
        if not take(lock, seconds):
            raise BusyError(
                f"{shown_holders(path)} on this host holds {path} for more than {seconds:g} s: wait until it ends, or end it, and run the playbook again"
            )
        yield lock
    finally:
        os.close(lock)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock now."""
    try:
        with hold(path) if path.exists() else nullcontext():
            return False
    except BusyError:
        return True


@contextmanager
def hold_host(prefix: str) -> Iterator[None]:
    """Holds the lock of a host meanwhile: one process changes it at a time, and a run that is killed leaves its last task at work. In a folder without this
    collection's mark there is none.

    :param prefix: of the installation.
    :raises BusyError: another process holds it for too long.
    """
    with ExitStack() as stack:
        if files.is_marked(Path(prefix)):
            with unless_read_only():
                stack.enter_context(hold(Path(prefix, names.CHANGES_LOCK), HOST_SECONDS))
        yield


@contextmanager
def unless_read_only() -> Iterator[None]:
    """Goes on without what is not done on a disk that went read-only: services are stopped there all the same."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def holders(path: Path) -> list[int]:
    """Processes that have the lock, as far as this account may see them (Linux; empty elsewhere)."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                if os.path.samefile(link, path) and "lock:" in (process / "fdinfo" / link.name).read_text():
                    found.append(int(process.name))
                    break
    return sorted(found)


def shown_holders(path: Path) -> str:
    """Processes that have the lock, for a message: «process 12 and process 13»."""
    return " and ".join(f"process {number}" for number in holders(path)) or "a process"

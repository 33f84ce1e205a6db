# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Locks that a block of code holds, and errors that name their holders."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

LOCK_TIMEOUT_SECONDS = 600


class BusyError(Refusal):
    """Another process holds the lock."""


@contextmanager
def hold(path: Path, seconds: float = 0) -> Iterator[int]:
    """Hold the lock of a file during a block, and yield its descriptor.

    :raises BusyError: other processes hold it for longer than ``seconds``.
    :raises OSError: see ``files.open_lock``.
    """
    lock = files.open_lock(path)
    try:
        if not files.take_lock(lock, seconds):
            raise BusyError(
                f"{path} has been locked for more than {seconds:g} s by {holders_text(path)} on this host: wait until the lock is released, or stop its "
                "holder, then run the playbook again"
            )
        yield lock
    finally:
        os.close(lock)


@contextmanager
def hold_host_lock(prefix: str) -> Iterator[None]:
    """Hold the lock of a host during a block, so that only one process changes it at a time: a killed run's last task may still be running. A folder
    without this collection's mark has no lock.

    :raises BusyError: another process holds it for too long.
    """
    with ExitStack() as stack:
        if files.is_marked(Path(prefix)):
            with ignore_read_only():
                stack.enter_context(hold(Path(prefix, names.HOST_LOCK_FILE), LOCK_TIMEOUT_SECONDS))
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
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for link in (folder / "fd").iterdir():
                if os.path.samefile(link, path) and "lock:" in (folder / "fdinfo" / link.name).read_text():
                    pids.append(int(folder.name))
                    break
    return sorted(pids)


def holders_text(path: Path) -> str:
    """Return the processes that hold the lock, for a message: 'process 12 and process 13'."""
    return " and ".join(f"process {pid}" for pid in find_holders(path)) or "a process"

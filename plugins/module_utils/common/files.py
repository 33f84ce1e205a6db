# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of the host, and the primitives of lock files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names

POLL_SECONDS = 0.2
TEMPORARY_PREFIX = ".llamacpp-"
"""Prefix of the names of temporary files."""


def text_of(path: Path) -> str:
    """Return the content of a file; empty if it is missing or unreadable."""
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return stream_sha256(stream)


def stream_sha256(stream: IO[bytes]) -> str:
    """Return the hash of the unread rest of a stream."""
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def replace_file(target: Path, text: str, mode: int, owner: int | None = None) -> None:
    """Replace a file atomically: even after a power failure, it contains either the old or the new text. Surrogates become the original bytes.

    :param owner: uid of the owner; None for this process's uid.
    :raises OSError: ``target`` is unchanged, and the error names it.
    """
    try:
        _write_and_rename(target, text, mode, owner)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error


def _write_and_rename(target: Path, text: str, mode: int, owner: int | None) -> None:
    descriptor, temporary_path = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, mode)
            if owner is not None:
                os.fchown(descriptor, owner, -1)
            os.fsync(descriptor)
        os.replace(temporary_path, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary_path)
        raise
    sync(target.parent)


def is_marked(folder: Path) -> bool:
    """Return whether this collection created a folder, as root or as this account: another account could have forged the mark."""
    try:
        statuses = (os.stat(folder), os.lstat(folder / names.MARKER_FOLDER))
    except OSError:
        return False
    return all(stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid()) for status in statuses)


def existing_ancestor(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def sync(*paths: Path) -> None:
    """Flush files, and the entries of folders, to the disk. Skip links.

    :raises OSError: the error names the path.
    """
    for path in paths:
        if path.is_symlink():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # network and shared file systems cannot sync folders
                raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(descriptor)


def open_lock(path: Path) -> int:
    """Open a lock file. An account that can open it, even for reading, can hold the lock forever, so other accounts have no access.

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


def take_lock(lock: int, seconds: float = 0) -> bool:
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


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    lock = open_lock(path)
    try:
        return not take_lock(lock)
    finally:
        os.close(lock)

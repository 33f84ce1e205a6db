# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of the host."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names

TEMPORARY = ".llamacpp-"
"""How the names of files begin that are not whole yet."""


def text_of(path: Path) -> str:
    """Content of a file; empty if it is missing or not readable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return sha256_of(stream)


def sha256_of(stream: IO[bytes]) -> str:
    """Of what is left of a stream."""
    digest = hashlib.sha256()
    while part := stream.read(1 << 20):
        digest.update(part)
    return digest.hexdigest()


def free_bytes() -> int:
    """Memory that nothing uses, not even as a cache; 0 where that is not known."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def read_ahead(paths: Iterable[Path], room: int) -> None:
    """Asks the kernel to read files into its page cache, in this order, until one has more bytes than there is room for. One that cannot be
    read is left out: whoever needs it says so."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    continue
                room -= status.st_size
                if room < 0:
                    return
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)


def replace_file(target: Path, text: str, mode: int, owner: int | None = None) -> None:
    """Whoever reads the file finds the old text or the new one, whole, even after a power cut. What was read with surrogateescape goes back
    as it was.

    :param owner: number of its account; None is this process's.
    :raises OSError: names ``target``, which is as before.
    """
    try:
        _replace(target, text, mode, owner)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error


def _replace(target: Path, text: str, mode: int, owner: int | None) -> None:
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=target.parent)
    try:
        with os.fdopen(handle, "w", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fchmod(handle, mode)
            if owner is not None:
                os.fchown(handle, owner, -1)
            os.fsync(handle)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync(target.parent)


def is_marked(folder: Path) -> bool:
    """Whether this collection made a folder, for root or for this account: in a folder of another account the mark may be anybody's."""
    try:
        places = (os.stat(folder), os.lstat(folder / names.FOLDER_MARK))
    except OSError:
        return False
    return all(stat.S_ISDIR(place.st_mode) and place.st_uid in (0, os.geteuid()) for place in places)


def existing(folder: Path) -> Path:
    """The folder, or the first one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def sync(*paths: Path) -> None:
    """Brings files, and the names in folders, to the disk. What a link leads to is left out.

    :raises OSError: names the path.
    """
    for path in paths:
        if path.is_symlink():
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # file systems of networks and virtual machines cannot do that for a folder
                raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(handle)

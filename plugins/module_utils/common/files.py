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
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
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

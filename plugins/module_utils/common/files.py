# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of the host."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".llamacpp-"
"""How the names of files begin that are not whole yet."""


def text_of(path: Path) -> str:
    """Content of a file; empty if it is missing or not readable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def replace_file(target: Path, text: str, mode: int) -> None:
    """Whoever reads the file finds the old text or the new one, whole, even after a power cut. What was read with surrogateescape goes back
    as it was.

    :raises OSError: names ``target``, which is as before.
    """
    try:
        _replace(target, text, mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error


def _replace(target: Path, text: str, mode: int) -> None:
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=target.parent)
    try:
        with os.fdopen(handle, "w", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fchmod(handle, mode)
            os.fsync(handle)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems of networks and virtual machines cannot do that for a folder
            raise
    finally:
        os.close(folder)

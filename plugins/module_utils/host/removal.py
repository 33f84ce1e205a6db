# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Removes files below a folder into which other accounts may write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


def remove_below(prefix: str, *steps: str) -> None:
    """Removes a file or folder below the prefix, if there is one, without following a link."""
    *folders, name = steps
    with suppress(FileNotFoundError), _open_folder(prefix, folders) as folder:
        _remove_at(folder, name)


@contextmanager
def _open_folder(prefix: str, steps: Sequence[str]) -> Iterator[int]:
    """A folder below the prefix, opened step by step without following a link."""
    handle = os.open(prefix, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for step in steps:
            inner = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _remove_at(folder: int, name: str) -> None:
    """Removes a file, or a folder with all that it holds; of a link the link alone."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)
        return
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        for inside in os.listdir(inner):
            _remove_at(inner, inside)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=folder)

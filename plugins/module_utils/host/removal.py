# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Removes files below a folder into which other accounts may write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names


def may_follow(folder: Path) -> bool:
    """Whether a folder is that of models, in a prefix into which no other account writes."""
    above = folder.parent.stat()
    return folder.name == names.MODELS and above.st_uid in (0, os.geteuid()) and not above.st_mode & 0o022


def remove_below(prefix: str, *steps: str) -> None:
    """Removes a file or folder below the prefix, if there is one, without following a link."""
    *folders, name = steps
    with suppress(FileNotFoundError), _open_folder(prefix, folders) as folder:
        _remove_at(folder, name)


@contextmanager
def _open_folder(prefix: str, steps: Sequence[str]) -> Iterator[int]:
    """A folder below the prefix, opened step by step without following a link, but of models."""
    handle = os.open(prefix, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for index, step in enumerate(steps):
            follow = index == 0 and may_follow(Path(prefix, step))
            inner = os.open(step, os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW), dir_fd=handle)
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

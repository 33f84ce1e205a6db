# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A file that is not whole yet: NAME.part beside its place. Its sha256 grows with it."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sync
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.model_files import ModelFile

PIECE = 1 << 20
FLAGS = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def check_places(files: Iterable[ModelFile], folder: Path) -> None:
    """:raises Refusal: a file, its part or its record is not below the folder: by its path, or by a symbolic link."""
    root = os.path.realpath(folder)
    for path in (path for file in files for path in (file.path, file.part, file.record)):
        real = os.path.realpath(path)
        if os.path.commonpath([real, root]) != root or real == root:
            raise Refusal(
                f"{path} leads to {real}, out of {folder}: remove the symbolic link, or let {folder} itself be the link to the disk that has room; "
                "nothing was written"
            )


def create(path: Path) -> None:
    """An empty file, or the one that is there."""
    os.close(os.open(path, os.O_WRONLY | FLAGS, 0o644))


class PartialFile:
    """NAME.part, open until the end of a ``with`` statement."""

    def __init__(self, path: Path) -> None:
        """:raises Refusal: it is something else than a regular file."""
        try:
            descriptor = os.open(path, os.O_RDWR | FLAGS, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Refusal(f"{path} is a symbolic link: remove it, and run the playbook again") from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise Refusal(f"{path} is not a regular file: remove it, and run the playbook again")
        os.fchmod(descriptor, 0o644)
        self.path, self._stream = path, os.fdopen(descriptor, "r+b", buffering=0)
        self._digest, self.count = hashlib.sha256(), 0
        """``count`` is how many bytes were read or written."""

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    @property
    def size(self) -> int:
        return os.fstat(self._stream.fileno()).st_size

    @property
    def sha256(self) -> str:
        """Of what was read and written."""
        return self._digest.hexdigest()

    def truncate(self, size: int) -> None:
        """What follows is written from there."""
        self._stream.truncate(size)
        self._stream.seek(size)

    def resume(self, report: Callable[[int], None]) -> None:
        """Reads what is there already.

        :param report: gets ``count`` after each piece.
        """
        while piece := self._stream.read(PIECE):
            self._digest.update(piece)
            self.count += len(piece)
            report(self.count)

    def write(self, data: bytes) -> None:
        """:raises OSError: names the part."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._stream.write(left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._digest.update(data)
        self.count += len(data)

    def move_to(self, target: Path) -> None:
        """Lets it take its place, whole even after a power cut."""
        os.fsync(self._stream.fileno())
        os.replace(self.path, target)
        sync(target.parent)

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast the disk that holds the model is read: by mapped pages, and past the page cache (O_DIRECT), as llama.cpp's load modes do it."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import existing

BYTES, LEAST_BYTES = 512 << 20, 128 << 20
"""Of a file at most, the first half by mapped pages and the second half past them: what was read one way may be in a cache below. And at least."""
OWN_BYTES = 256 << 20
"""Of a file of ours, where the model is not there yet."""
PIECE = 16 << 20
SECONDS = 3.0
"""For each way."""
ROOM = 4
"""So many times as much as a file of ours has to be free."""
MOST_FILES = 10_000
SAMPLES, RESIDENT = 16, 2
"""Pages that are looked at, and how many of them may still be in memory after the kernel was asked to drop them."""
PAUSES = (0.0, 0.1, 0.3, 0.6)
"""Seconds before each time that it is asked."""
MAP_POPULATE = 0x8000
"""As llama-mmap.cpp maps a model (0.3.36); Python names it from 3.10 on. The same on x86 and ARM."""


def measured(model: str) -> dict | None:
    """``folder`` of the model, and ``mapped_gb_per_s`` and ``direct_gb_per_s`` (None where the file system has no O_DIRECT) of its disk. None where
    that cannot be measured: not on Linux, with a Python that was built for an older one, without room or permission.

    :param model: path of its file; where it does not exist yet, the first of its folders that does is measured. An operator may have set anything.
    """
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "RWF_NOWAIT") or not os.path.isabs(model):
        return None
    try:
        for opened in (_model_in, _own_in):
            with opened(existing(Path(os.path.realpath(model)).parent)) as file:
                rates = _rates(file) if file is not None else None
            if rates:
                return {"folder": os.path.dirname(model), "mapped_gb_per_s": rates[0], "direct_gb_per_s": rates[1]}
    except (OSError, ValueError):  # also of a file that became shorter meanwhile, and of a path that is none
        pass
    return None


@contextmanager
def _model_in(folder: Path) -> Iterator[int | None]:
    """The largest model of a folder and those below it, opened; None where none is large enough. Links are not followed."""
    largest, path, seen = LEAST_BYTES, None, 0
    for place, _folders, names in os.walk(folder):
        for name in names:
            seen += 1
            if name.endswith(".gguf") and seen <= MOST_FILES:
                with suppress(OSError):
                    found = os.lstat(os.path.join(place, name))
                    if stat.S_ISREG(found.st_mode) and found.st_size >= largest:
                        largest, path = found.st_size, os.path.join(place, name)
        if seen > MOST_FILES:
            break
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW) if path else None
    try:
        yield file
    finally:
        if file is not None:
            os.close(file)


@contextmanager
def _own_in(folder: Path) -> Iterator[int | None]:
    """A file of ours in a folder, which is gone when it is closed, however this ends; None without room."""
    if shutil.disk_usage(folder).free < ROOM * OWN_BYTES:
        yield None
        return
    with tempfile.TemporaryFile(dir=folder) as stream:
        for _piece in range(OWN_BYTES // PIECE):
            stream.write(os.urandom(PIECE))
        stream.flush()
        os.fsync(stream.fileno())
        yield stream.fileno()


def _rates(file: int) -> tuple[float, float | None] | None:
    """Bytes (1e9) per second by mapped pages and by O_DIRECT; None where pages stay in memory, as those of a model that is served do."""
    half = min(os.fstat(file).st_size, BYTES) // 2 // PIECE * PIECE
    os.posix_fadvise(file, 0, 2 * half, os.POSIX_FADV_RANDOM)  # a look at a page reads no others
    if not _dropped(file, half):
        return None
    direct = _direct(file, half)
    os.posix_fadvise(file, 0, 2 * half, os.POSIX_FADV_SEQUENTIAL)
    return _rate(half, lambda offset: _map(file, offset)), direct


def _dropped(file: int, size: int) -> bool:
    """Whether the kernel has dropped the pages of a file from memory. It keeps those for a moment that were written just now."""
    for pause in PAUSES:
        time.sleep(pause)
        os.posix_fadvise(file, 0, 2 * size, os.POSIX_FADV_DONTNEED)
        if _resident(file, size) <= RESIDENT:
            return True
    return False


def _resident(file: int, size: int) -> int:
    """How many of SAMPLES pages can be read without waiting for a disk."""
    found, page = 0, bytearray(mmap.PAGESIZE)
    for sample in range(SAMPLES):
        offset = size * sample // SAMPLES // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            found += os.preadv(file, [page], offset, os.RWF_NOWAIT) > 0
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
    return found


def _rate(size: int, read: Callable[[int], object]) -> float:
    """Bytes (1e9) per second, over at most SECONDS."""
    began, done = time.monotonic(), 0
    while done < size and (not done or time.monotonic() - began < SECONDS):
        read(done)
        done += PIECE
    return done / max(time.monotonic() - began, 1e-6) / 1e9


def _map(file: int, offset: int) -> None:
    mmap.mmap(file, PIECE, mmap.MAP_SHARED | MAP_POPULATE, mmap.PROT_READ, offset=offset).close()


def _direct(file: int, size: int) -> float | None:
    """Of the second half; None where the file system has no O_DIRECT."""
    try:
        past = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, PIECE) as buffer:
            return _rate(size, lambda offset: os.preadv(past, [buffer], size + offset))
    except OSError:
        return None
    finally:
        os.close(past)

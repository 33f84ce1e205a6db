# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast the memory of a host is, as its processor reads it."""

from __future__ import annotations

import ctypes
import os
import threading
import time

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import hardware

PIECE = 64 << 20
"""Bytes that each thread reads over and over: more than caches hold."""
STEPS = 4
"""In which a piece is read: so often its bytes are counted."""
MOST_THREADS = 64
SECONDS = 4.0
"""In one second, 30 to 45 GB/s were found of the same memory on two virtual cores, and 40 to 43 in four (docs/performance.md)."""
WINDOW = 0.2
"""Seconds, the fastest of which count: in the others some other program had a processor, as the run that measures itself."""


def _read(piece: ctypes.Array[ctypes.c_char], end: float, counts: list[int], index: int) -> None:
    """Counts the bytes that one thread reads until then. The C library looks for a zero that is not there, with the widest instructions it has.

    :param piece: is kept by the thread, which goes on where others could not be started.
    """
    search, start = ctypes.CDLL(None).memchr, ctypes.addressof(piece)
    search.restype, search.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    while True:
        for step in range(STEPS):
            if time.monotonic() >= end:
                return
            search(start + step * (PIECE // STEPS), 0, PIECE // STEPS)
            counts[index] += PIECE // STEPS


def memory_gb_per_s(threads: int, seconds: float) -> float:
    """Bytes (1e9) per second that so many threads read together in the best of windows."""
    pieces = [ctypes.create_string_buffer(PIECE) for _thread in range(threads)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    counts, fastest, before, then = [0] * threads, 0.0, 0, time.monotonic()
    end = then + seconds
    running = [threading.Thread(target=_read, args=(piece, end, counts, index)) for index, piece in enumerate(pieces)]
    for thread in running:
        thread.start()
    while then < end:
        time.sleep(min(WINDOW, seconds))
        now, read = time.monotonic(), sum(counts)
        fastest, before, then = max(fastest, (read - before) / (now - then)), read, now
    for thread in running:
        thread.join()
    return fastest / 1e9


def measured() -> dict[str, dict] | None:
    """Device, as workers name it → ``name``, by which it is known later that it is the same one, and ``gb_per_s`` of its memory. None where
    there is no memory or no thread left to measure with, or nothing was read."""
    try:
        rate = memory_gb_per_s(min(os.cpu_count() or 1, MOST_THREADS), SECONDS)
    except (MemoryError, RuntimeError):
        return None
    return {"CPU": {"name": hardware.cpu()["model"], "gb_per_s": rate}} if rate >= units.LEAST_GB_PER_S else None

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast the memory of a host is, as its processor reads it."""

from __future__ import annotations

import ctypes
import os
import threading
import time

from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import hardware

PIECE = 64 << 20
"""Bytes that each thread reads over and over: more than caches hold."""
MOST_THREADS = 64
SECONDS = 1.0


def _read(start: int, end: float) -> int:
    """Bytes that one thread reads until then. The C library looks for a zero that is not there, with the widest instructions it has."""
    search = ctypes.CDLL(None).memchr
    search.restype, search.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    read = 0
    while time.monotonic() < end:
        search(start, 0, PIECE)
        read += PIECE
    return read


def memory_gb_per_s(threads: int, seconds: float) -> float:
    """Bytes (1e9) per second that so many threads read together."""
    pieces = [ctypes.create_string_buffer(PIECE) for _thread in range(threads)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    counts = [0] * threads
    begin = time.monotonic()

    def count(index: int) -> None:
        counts[index] = _read(ctypes.addressof(pieces[index]), begin + seconds)

    running = [threading.Thread(target=count, args=(index,)) for index in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(counts) / (time.monotonic() - begin) / 1e9


def measured() -> dict[str, dict]:
    """Device, as workers name it → ``name``, by which it is known later that it is the same one, and ``gb_per_s`` of its memory."""
    return {
        "CPU": {
            "name": hardware.cpu()["model"],
            "gb_per_s": memory_gb_per_s(min(os.cpu_count() or 1, MOST_THREADS), SECONDS),
        }
    }

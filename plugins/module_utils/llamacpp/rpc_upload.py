# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gives tensors to an RPC worker that keeps a cache, which writes them into it, and knows which files of a cache are which tensors.

The wire form is that of ggml-rpc.cpp, read in the trees of llama-cpp-python 0.3.36 and of b11549.
A worker names a file by a hash of the whole tensor, which takes Python too long. So a tensor and a file are compared by their samples instead. A
wrong guess does no harm: the head asks for each tensor by the hash, and sends what is not there.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc

THRESHOLD = 10 * rpc.MIB
"""Bytes. Larger tensors are kept in caches (HASH_THRESHOLD of ggml-rpc.cpp, the same in all trees)."""

ALLOC_BUFFER, GET_ALIGNMENT, BUFFER_GET_BASE, SET_TENSOR = 0, 1, 3, 6
DEVICE = struct.pack("<I", 0)
"""The first one of a worker, as requests name it."""
I8 = 24
"""GGML_TYPE_I8: a tensor of bytes."""
CHUNK = 4 * rpc.MIB

FIRST_SAMPLE = 256 * 1024
"""Bytes. The known-answer model's tensors differ in their first rows alone."""
SAMPLES, SAMPLE = 7, 4096
"""How many further samples, and the bytes of each; the last one is the end of the tensor."""


class TransferError(Exception):
    """Tensors cannot be given to a worker; the message ends a sentence that names it."""


KNOWN = ("7", "8")
"""Major versions of llama.cpp's protocol whose messages have this form. Of others nobody read the trees."""
SOURCES = 10
"""GGML_MAX_SRC."""
CACHED = b"\1"
"""Flag of a tensor that belongs into the cache."""


def cache_of(environment: Mapping[str, str]) -> str:
    """The folder in which a worker with this environment keeps tensors."""
    return f"{environment['LLAMA_CACHE']}/rpc"


def rows(size: int) -> int:
    """Into how many rows a tensor of bytes is divided, whose lengths are numbers of 32 bits."""
    return -(-size >> 30)


def _tensor(buffer: int, base: int, size: int) -> bytes:
    """struct rpc_tensor of so many bytes at the beginning of a buffer."""
    count = rows(size)
    row = -(-size // count)
    shape = struct.pack("<4I", row, count, 1, 1)
    steps = struct.pack("<4I", 1, row, *(min(size, (1 << 32) - 1),) * 2)
    operation = bytes(4 + 64 + 4)
    return (
        struct.pack("<QIQ", 1, I8, buffer)
        + shape
        + steps
        + operation
        + bytes(8 * SOURCES + 8 + 8)
        + struct.pack("<Q", base)
        + b"prefill".ljust(64, b"\0")
        + bytes(4)
    )


def set_tensor_head(buffer: int, base: int, size: int) -> bytes:
    """What comes before the bytes of a tensor in SET_TENSOR."""
    message = _tensor(buffer, base, size) + CACHED + bytes(8)
    return struct.pack("<BQ", SET_TENSOR, len(message) + size) + message


class Worker:
    """A connection to a worker through which tensors are given to it. Everything that it took for them is free when the connection ends."""

    def __init__(self, address: str, port: int, largest: int, seconds: float) -> None:
        """
        :param largest: bytes of the largest tensor.
        :param seconds: for all of them.
        :raises TransferError: it cannot be reached, or does not take part.
        """
        with _reported():
            self.connection = rpc.Connection(address, port, time.monotonic() + seconds)
            try:
                self._begin(largest)
            except BaseException:
                self.connection.socket.close()
                raise

    def _begin(self, largest: int) -> None:
        self.connection.ask(rpc.HELLO, rpc.HELLO_PLAIN_TCP, (3, 28))
        request = DEVICE + struct.pack("<Q", largest + rows(largest))
        self.buffer, size = struct.unpack("<QQ", self.connection.ask(ALLOC_BUFFER, request, (16,)))
        if not self.buffer or size < largest:
            raise TransferError(f"has no memory for its largest tensor ({largest // rpc.MIB} MiB)")
        (self.base,) = struct.unpack("<Q", self.connection.ask(BUFFER_GET_BASE, struct.pack("<Q", self.buffer), (8,)))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_ignored: object) -> None:
        self.connection.socket.close()

    def give(self, stream: IO[bytes], offset: int, size: int) -> None:
        """Gives it the tensor of ``size`` bytes at ``offset`` of a file; returns when it is in the cache.

        :raises TransferError: it does not arrive.
        """
        with _reported():
            self.connection.send(set_tensor_head(self.buffer, self.base, size))
            stream.seek(offset)
            left = size
            while left:
                chunk = stream.read(min(CHUNK, left))
                if not chunk:
                    raise TransferError("did not get all of a tensor: the model became shorter while it was read")
                self.connection.send(chunk)
                left -= len(chunk)
            self.connection.ask(GET_ALIGNMENT, DEVICE, (8,))


@contextmanager
def _reported() -> Iterator[None]:
    """Turns what may happen to a connection into the end of a sentence."""
    try:
        yield
    except rpc.Closed as error:
        raise TransferError("closed the connection: its log says why") from error
    except (rpc.Foreign, OSError) as error:
        raise TransferError(f"does not answer as a worker: {error}") from error


def fingerprint(stream: IO[bytes], offset: int, size: int) -> str:
    """A short name for ``size`` bytes at ``offset`` of a file, from their number and samples of them.

    :raises EOFError: the file is shorter.
    """
    ends = [size * (index + 1) // SAMPLES for index in range(SAMPLES)]
    places = [(0, min(size, FIRST_SAMPLE)), *((max(end - SAMPLE, 0), min(SAMPLE, end)) for end in ends)]
    digest = hashlib.sha256(str(size).encode())
    for begin, count in places:
        stream.seek(offset + begin)
        data = stream.read(count)
        if len(data) != count:
            raise EOFError
        digest.update(data)
    return digest.hexdigest()[:32]

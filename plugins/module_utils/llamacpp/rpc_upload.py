# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Upload tensors to an RPC worker, which writes them into its cache, and recognise cached tensors.

The wire format is that of ggml-rpc.cpp in llama-cpp-python 0.3.36 and b11549.
A worker names each cache file after a hash of the whole tensor, which is too slow to compute in Python. Tensors and files are therefore compared by slices.
A wrong guess is harmless: the head asks the worker for each hash, and sends the tensors that are missing.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc

CACHE_THRESHOLD = 10 * rpc.MIB
"""Size in bytes above which tensors are cached (HASH_THRESHOLD of ggml-rpc.cpp, the same in all trees)."""

ALLOC_BUFFER, GET_ALIGNMENT, BUFFER_GET_BASE, SET_TENSOR = 0, 1, 3, 6
FIRST_DEVICE = struct.pack("<I", 0)
"""Index of a worker's first device in requests."""
I8_TYPE = 24
"""GGML_TYPE_I8: a tensor of bytes."""
CHUNK_BYTES = 4 * rpc.MIB

FIRST_SLICE_BYTES = 256 * 1024
"""Bytes of the first slice: tensors of the known-answer model differ only in their first rows."""
SLICE_COUNT, SLICE_BYTES = 7, 4096
"""Number of further slices, and their size in bytes; the last one is the end of the tensor."""


class TransferError(Exception):
    """Failure of an upload to a worker; the message is the end of a sentence that names the worker."""


SUPPORTED_MAJORS = ("7", "8")
"""Major versions of llama.cpp's protocol with these messages. Other versions were not reviewed."""
MAX_SOURCES = 10
"""GGML_MAX_SRC."""
CACHE_FLAG = b"\1"
"""Flag that makes the worker cache a tensor."""


def cache_path(environment: Mapping[str, str]) -> str:
    """Return the folder in which a worker with this environment caches tensors."""
    return f"{environment['LLAMA_CACHE']}/rpc"


def count_rows(size: int) -> int:
    """Return the number of rows of a byte tensor, whose dimensions are limited to 32 bits."""
    return -(-size >> 30)


def _pack_tensor(buffer: int, base: int, size: int) -> bytes:
    """Return struct rpc_tensor for ``size`` bytes at the start of a buffer."""
    row_count = count_rows(size)
    row_bytes = -(-size // row_count)
    shape = struct.pack("<4I", row_bytes, row_count, 1, 1)
    strides = struct.pack("<4I", 1, row_bytes, *(min(size, (1 << 32) - 1),) * 2)
    operation = bytes(4 + 64 + 4)
    return (
        struct.pack("<QIQ", 1, I8_TYPE, buffer)
        + shape
        + strides
        + operation
        + bytes(8 * MAX_SOURCES + 8 + 8)
        + struct.pack("<Q", base)
        + b"prefill".ljust(64, b"\0")
        + bytes(4)
    )


def pack_set_tensor_header(buffer: int, base: int, size: int) -> bytes:
    """Return a SET_TENSOR message without the bytes of the tensor."""
    message = _pack_tensor(buffer, base, size) + CACHE_FLAG + bytes(8)
    return struct.pack("<BQ", SET_TENSOR, len(message) + size) + message


class UploadConnection:
    """Connection for uploads to a worker, which frees the memory of the upload when the connection closes."""

    def __init__(self, address: str, port: int, largest_size: int, seconds: float) -> None:
        """Connect to the worker and allocate a buffer.

        :param largest_size: bytes of the largest tensor.
        :param seconds: time limit for all tensors.
        :raises TransferError: the worker cannot be reached, or answers unexpectedly.
        """
        with _connection_errors():
            self.connection = rpc.Connection(address, port, time.monotonic() + seconds)
            try:
                self._allocate(largest_size)
            except BaseException:
                self.connection.socket.close()
                raise

    def _allocate(self, largest_size: int) -> None:
        self.connection.ask(rpc.HELLO, rpc.HELLO_PLAIN_TCP, (3, 28))
        request = FIRST_DEVICE + struct.pack("<Q", largest_size + count_rows(largest_size))
        self.buffer, size = struct.unpack("<QQ", self.connection.ask(ALLOC_BUFFER, request, (16,)))
        if not self.buffer or size < largest_size:
            raise TransferError(f"does not have enough memory for the largest tensor ({largest_size // rpc.MIB} MiB)")
        (self.base,) = struct.unpack("<Q", self.connection.ask(BUFFER_GET_BASE, struct.pack("<Q", self.buffer), (8,)))

    def __enter__(self) -> UploadConnection:
        return self

    def __exit__(self, *_ignored: object) -> None:
        self.connection.socket.close()

    def upload_tensor(self, stream: IO[bytes], offset: int, size: int) -> None:
        """Upload the tensor of ``size`` bytes at ``offset`` of a file, and return when it is in the cache.

        :raises TransferError: the upload fails.
        """
        with _connection_errors():
            self.connection.send(pack_set_tensor_header(self.buffer, self.base, size))
            stream.seek(offset)
            bytes_left = size
            while bytes_left:
                chunk = stream.read(min(CHUNK_BYTES, bytes_left))
                if not chunk:
                    raise TransferError(
                        "received only part of a tensor: the model file was truncated during the transfer"
                    )
                self.connection.send(chunk)
                bytes_left -= len(chunk)
            self.connection.ask(GET_ALIGNMENT, FIRST_DEVICE, (8,))


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Convert errors of a connection to TransferError."""
    try:
        yield
    except rpc.ConnectionClosed as error:
        raise TransferError("closed the connection: see its log") from error
    except (rpc.InvalidReply, OSError) as error:
        raise TransferError(f"did not give a valid answer: {error}") from error


def fingerprint(stream: IO[bytes], offset: int, size: int) -> str:
    """Return a fingerprint of ``size`` bytes at ``offset`` of a file: a hash of their number and of slices.

    :raises EOFError: the file is shorter.
    """
    ends = [size * (index + 1) // SLICE_COUNT for index in range(SLICE_COUNT)]
    slices = [(0, min(size, FIRST_SLICE_BYTES)), *((max(end - SLICE_BYTES, 0), min(SLICE_BYTES, end)) for end in ends)]
    digest = hashlib.sha256(str(size).encode())
    for start, count in slices:
        stream.seek(offset + start)
        data = stream.read(count)
        if len(data) != count:
            raise EOFError
        digest.update(data)
    return digest.hexdigest()[:32]

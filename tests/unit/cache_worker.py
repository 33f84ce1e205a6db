"""A worker, as the generations of ggml-rpc.cpp write their messages. It names files by another hash, which nobody may rely on."""

import contextlib
import hashlib
import os
import socket
import struct
import sys
from pathlib import Path

BASE = 1 << 20
HELLO, ALLOC, ALIGNMENT, BASE_OF, DEVICES, MEMORY, SET = 14, 0, 1, 3, 15, 11, 6


def take(client, count):
    data = b""
    while len(data) < count:
        part = client.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return data


def reply(client, payload):
    client.sendall(struct.pack("<Q", len(payload)) + payload)


class CacheWorker:
    """:param version: of its protocol.
    :param folder: LLAMA_CACHE; None where it keeps nothing.
    :param devices: free and all bytes of each.
    """

    def __init__(self, version, folder=None, memory=1 << 40, devices=((1 << 30, 1 << 30),)):
        self.version, self.memory, self.devices = version, memory, devices
        self.folder = folder and Path(folder) / "rpc"
        self.device = 4
        self.hello = 24 if version[0] >= 4 else 0
        self.given = []
        self.size = 0

    def script(self, client):
        with contextlib.suppress(EOFError, OSError):
            while True:
                command, size = struct.unpack("<BQ", take(client, 9))
                self.answer(client, command, size)
        client.close()

    def answer(self, client, command, size):
        if command == SET:
            return self.keep(client, size)
        payload = take(client, size)
        if command == HELLO and size == self.hello:
            return reply(client, bytes(self.version) + (bytes(25) if self.version[0] >= 4 else b""))
        if command == ALLOC and size == self.device + 8:
            (self.size,) = struct.unpack("<Q", payload[-8:])
            fits = self.size <= self.memory
            return reply(client, struct.pack("<QQ", 77 if fits else 0, self.size if fits else 0))
        if command == BASE_OF and payload == struct.pack("<Q", 77):
            return reply(client, struct.pack("<Q", BASE))
        if command == ALIGNMENT and size == self.device:
            return reply(client, struct.pack("<Q", 32))
        if command == DEVICES and self.device:
            return reply(client, struct.pack("<I", len(self.devices)))
        if command == MEMORY and size == self.device:
            return reply(client, struct.pack("<QQ", *self.devices[int.from_bytes(payload, "little")]))
        raise EOFError

    def keep(self, client, size):
        """What rpc_server::deserialize_tensor and set_tensor check, and the cache of those that the flag names."""
        fixed = struct.Struct("<QIQ4I4II64si")
        _id, kind, buffer, *rest = fixed.unpack(take(client, fixed.size))
        shape, steps = rest[:4], rest[4:8]
        pointers = take(client, 8 * 10 + 16)
        (data,) = struct.unpack("<Q", take(client, 8))
        take(client, 64 + 4)
        flag = take(client, 1) == b"\1"
        (offset,) = struct.unpack("<Q", take(client, 8))
        header = fixed.size + len(pointers) + 8 + 68 + 1 + 8
        declared = shape[0] + (shape[1] - 1) * steps[1]
        if kind != 24 or buffer != 77 or any(pointers) or data != BASE or offset:
            raise EOFError
        if steps[0] != 1 or shape[2:] != [1, 1] or declared > self.size or size - header > declared:
            raise EOFError
        tensor = take(client, size - header)
        self.given.append(tensor)
        if self.folder and flag:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / hashlib.sha256(tensor).hexdigest()[:16]).write_bytes(tensor)
        return None


def main():
    """As the program of a release: ``-H ADDRESS -p PORT``, and LLAMA_CACHE in the environment."""
    words = sys.argv
    if os.environ.get("FAILS"):
        sys.exit(1)
    folder = os.environ["LLAMA_CACHE"] if "-c" in words else None
    version, memory = int(os.environ.get("VERSION", 7)), int(os.environ.get("MEMORY", 1 << 40))
    worker = CacheWorker((version, 0, 0), folder=folder, memory=memory)
    with socket.create_server((words[words.index("-H") + 1], int(words[words.index("-p") + 1]))) as listener:
        while True:
            worker.script(listener.accept()[0])


if __name__ == "__main__":
    main()

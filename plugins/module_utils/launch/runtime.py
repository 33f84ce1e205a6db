# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The launcher of services, the one program of this collection that stays on a host. It works without a controller.

For the head it waits until every worker shakes hands, writes down what they said, starts llama-server, keeps the log of this
start, ends llama-server when a worker is lost, and writes down how it ended; the service manager then starts it anew. For a worker with a cache of
tensors, from which llama.cpp never removes anything, it keeps that cache below its limit. It is installed beside a copy of
rpc.py and needs nothing but Python 3.9.

llama-server does not reconnect to a worker, and an idle one does not even notice that a worker died. So on Linux its
connections are read from /proc once a second; elsewhere it ends by itself at the next request.

Nothing that is written here is worth a service: on a full or read-only disk, or where nobody reads the log, it goes on without, and says so.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import re
import select
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

try:
    from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
except ImportError:
    rpc = importlib.import_module("rpc")  # as installed on a host

HANDSHAKES = "handshakes.json"
START_LOG = "start.log"
ENDS = "ends.json"
START_LOG_BYTES = 8 * 1024 * 1024
LAST_BYTES = 4096
ENDS_BYTES = 64 * 1024
"""More than the last bytes of a log take as JSON."""
LAST_LINES = 20
INCOMPLETE = "llamacpp: this log is incomplete"
"""Stands in a log of which a part could not be written."""
READER_SECONDS = 5.0
"""So long a reader of the log may take for one part of it, however slowly it reads, before the log goes on without it."""
HEALTH_SECONDS = 2.0
LOST_AFTER_POLLS = 2
PRUNE_SECONDS = 300
PR_SET_PDEATHSIG = 1
ESTABLISHED = 1


class Log:
    """Where lines go. Nobody waits or ends for a full disk, nor for a reader that is gone or stands still."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.missing = 0
        self.incomplete = False
        self.lock = threading.Lock()

    def write(self, data: bytes) -> str | None:
        """Writes what can be written now, after a line that says how much could not be before; the reason, the first time that there is one."""
        with self.lock:
            gap = f"\n{INCOMPLETE}: {self.missing} bytes are missing here\n".encode() if self.missing else b""
            left, reason = gap + data, None
            deadline = time.monotonic() + (0 if self.missing else READER_SECONDS)
            try:
                while left and not reason:
                    seconds = max(0.0, deadline - time.monotonic())
                    if select.select([], [self.descriptor], [], seconds)[1]:
                        left = left[os.write(self.descriptor, left[: select.PIPE_BUF]) :]
                    else:
                        reason = "nobody reads it"
            except OSError as error:
                reason = str(error.strerror)
            self.missing = self.missing + len(data) if len(left) > len(data) else len(left)
            first, self.incomplete = not self.incomplete, self.incomplete or bool(reason)
            return reason if first else None


SERVICE_LOG = Log(1)
"""The standard output: a journal, a pipe to supervisor, or a file."""


def say(text: str) -> None:
    SERVICE_LOG.write(f"llamacpp: {text}\n".encode("utf-8", "replace"))


SAID: set[str] = set()


def say_once(text: str) -> None:
    if text not in SAID:
        SAID.add(text)
        say(text)


def shake_hands(
    endpoints: list[str], protocol: str | None, timeout: float, note: Callable[[dict], object], pause: float = 1.0
) -> dict:
    """Waits until every worker answers; returns their answers.

    A worker whose release does not fit is waited for like one that is not there yet: it is probably being replaced.

    :param note: called with ``{endpoint: last answer of rpc.probe}`` whenever one of them has changed.
    """
    answers: dict = {}
    while True:
        for endpoint in endpoints:
            before = answers.get(endpoint, {}).get("state")
            if before == "ok":
                continue
            address, port = endpoint.rsplit(":", 1)
            answers[endpoint] = rpc.probe(address, int(port), timeout, protocol)
            if answers[endpoint]["state"] != before:
                note(answers)
                if answers[endpoint]["state"] != "ok":
                    say(f"waiting for worker {endpoint}: {answers[endpoint]['state']}, {answers[endpoint]['detail']}")
        if all(answer["state"] == "ok" for answer in answers.values()):
            return answers
        time.sleep(pause)


def write_state(path: Path, content: dict) -> bool:
    """Replaces a file of the launcher's as a whole; says why where it cannot."""
    partial = path.with_name(path.name + ".new")
    try:
        partial.write_text(json.dumps(content))
        partial.replace(path)
    except OSError as error:
        say_once(f"{path} could not be written: {error.strerror}")
        return False
    return True


def write_handshakes(state: Path, answers: dict) -> bool:
    """Older answers would be believed in place of these, so they go where these cannot be written; False then."""
    path = state / HANDSHAKES
    written = write_state(path, {"time": int(time.time()), "process": os.getpid(), "workers": answers})
    if not written:
        with suppress(OSError):
            path.unlink()
    return written


def write_end(state: Path, how: str, said: str) -> None:
    """Counts the ends of llama-server, over all starts of the launcher, with how the last one came and the last lines of its log."""
    try:
        with open(os.open(state / ENDS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            number = int(json.loads(file.read(ENDS_BYTES))["number"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        number = 0
    write_state(state / ENDS, {"number": number + 1, "how": how, "log": said.splitlines()[-LAST_LINES:]})


def connections(tcp_table: str, inodes: set[str], endpoints: list[str]) -> set[str]:
    """The endpoints to which a process that holds the socket inodes has an established connection.

    :param tcp_table: text of /proc/net/tcp.
    """
    connected = set()
    for line in tcp_table.splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) == ESTABLISHED and fields[9] in inodes:
            address, port = fields[2].split(":")
            numeric = socket.inet_ntoa(struct.pack("=I", int(address, 16)))
            connected.add(f"{numeric}:{int(port, 16)}")
    return connected & set(endpoints)


def socket_inodes(process: int) -> set[str]:
    inodes = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def healthy(url: str) -> bool:
    """Whether llama-server answers that it serves, within two seconds altogether, however slowly something else sends. Whose certificate it shows
    is no matter here: nothing is told to it."""
    scheme, place = url.split("://", 1)
    address, port = place.rsplit(":", 1)
    deadline = time.monotonic() + HEALTH_SECONDS
    said = b""
    try:
        with _connected(scheme, address, int(port), deadline) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: llamacpp\r\nConnection: close\r\n\r\n")
            while b"\n" not in said and len(said) < 256 and (left := deadline - time.monotonic()) > 0:
                connection.settimeout(left)
                part = connection.recv(256)
                if not part:
                    break
                said += part
    except OSError:
        pass
    return bool(re.match(rb"HTTP/1\.\d 200\b", said))


def _connected(scheme: str, address: str, port: int, deadline: float) -> socket.socket:
    connection = socket.create_connection((address, port), HEALTH_SECONDS)
    if scheme != "https":
        return connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection.settimeout(max(deadline - time.monotonic(), 0.01))  # of the whole handshake
    return context.wrap_socket(connection)


class Head:
    """One llama-server process and what is watched about it."""

    def __init__(self, argv: list[str], endpoints: list[str], url: str, state: Path) -> None:
        self.endpoints = endpoints
        self.url = url
        self.ready = False
        self.missing = 0
        self.last = b""
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )
        self.relay = threading.Thread(target=self._relay, args=(state / START_LOG,), daemon=True)
        self.relay.start()

    def _relay(self, path: Path) -> None:
        """Passes the output on to the service's log, and keeps the beginning of this start in a file, and its end in memory.

        It reads to the end whatever becomes of these: llama-server stands still once its output is full.
        """
        pipe = cast(IO[bytes], self.process.stdout).fileno()
        room = START_LOG_BYTES
        with _open_start_log(path) as file:
            start_log = Log(file.fileno())
            while part := os.read(pipe, 65536):
                reason = start_log.write(part[:room])
                room -= len(part[:room])
                if reason:
                    _mark_incomplete(file.fileno())
                    say(f"{path} is incomplete: {reason}")
                self.last = (self.last + part)[-LAST_BYTES:]
                reason = SERVICE_LOG.write(part)
                if reason:
                    start_log.write(f"llamacpp: the log of the service is incomplete: {reason}\n".encode())

    def lost_workers(self) -> list[str]:
        """Workers whose connection is gone, seen twice in a row after the server had become ready."""
        if not sys.platform.startswith("linux"):
            return []
        if not self.ready:
            self.ready = healthy(self.url)
            return []
        try:
            inodes = socket_inodes(self.process.pid)
            connected = connections(Path("/proc/net/tcp").read_text(), inodes, self.endpoints)
        except OSError:
            return []
        lost = [endpoint for endpoint in self.endpoints if endpoint not in connected]
        self.missing = self.missing + 1 if lost else 0
        return lost if self.missing >= LOST_AFTER_POLLS else []

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _open_start_log(path: Path) -> IO[bytes]:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        say(f"{path} could not be written: {error.strerror}")
        return open(os.devnull, "wb", buffering=0)


def _mark_incomplete(descriptor: int) -> None:
    """Says so at the end of the file, in place of what stands there: on a full disk there is no other room."""
    mark = f"\n{INCOMPLETE}\n".encode()
    with suppress(OSError):
        os.pwrite(descriptor, mark, max(0, os.fstat(descriptor).st_size - len(mark)))


def _end_with_parent() -> None:
    """A llama-server whose launcher was killed would keep the port and the workers."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ended_how(status: int) -> str:
    """What the return code of a process says of its end."""
    return f"with status {status}" if status >= 0 else f"by signal {-status}"


def _asked_to_stop(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def run(
    argv: list[str],
    endpoints: list[str],
    url: str,
    state: Path,
    protocol: str | None,
    timeout: float,
    pause: float = 1.0,
) -> int:
    """Waits, starts and watches; returns the exit status of the service: 0 only when it was asked to stop."""
    signal.signal(signal.SIGTERM, _asked_to_stop)
    signal.signal(signal.SIGINT, _asked_to_stop)
    with suppress(OSError):  # a folder that is missing still is said by what cannot be written there
        state.mkdir(exist_ok=True)
    write_handshakes(state, {})
    answers = shake_hands(endpoints, protocol, timeout, lambda answers: write_handshakes(state, answers), pause)
    try:
        head = Head(argv, endpoints, url, state)
    except OSError as error:
        write_end(state, f"before it began, {error}", "")
        say(f"llama-server could not be started: {error}")
        time.sleep(pause)
        return 1
    how = ""
    recorded = False
    try:
        while head.process.poll() is None:
            recorded = recorded or write_handshakes(state, answers)
            time.sleep(pause)
            lost = head.lost_workers()
            if lost:
                how = f"since it had lost worker {', '.join(lost)}"
                say(f"lost worker {', '.join(lost)}: restarting llama-server")
                head.stop()
    except SystemExit:
        head.stop()
        head.relay.join(timeout=5)
        raise
    head.relay.join(timeout=5)
    how = how or ended_how(head.process.returncode)
    say(f"llama-server ended {how}")
    write_end(state, how, head.last.decode("utf-8", "replace"))
    time.sleep(pause)
    return 1


def prune(folder: Path, limit: int) -> list[str]:
    """Removes files, those that were used longest ago first, until the folder holds no more than so many bytes; returns their names."""
    files = []
    for place, _folders, inside in os.walk(folder):
        for name in inside:
            path = Path(place, name)
            try:
                found = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    held = sum(size for _used, size, _path in files)
    removed, reason = [], None
    for _used, size, path in sorted(files):
        if held <= limit:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror
            continue
        held -= size
        removed.append(path.name)
    if reason:
        say(f"{folder} could not be brought below {limit // rpc.MIB} MiB: {reason}")
    return removed


def _bound(cache: Path, limit: int) -> None:
    removed = prune(cache, limit)
    if removed:
        say(f"removed {len(removed)} files from {cache} to keep it below {limit // rpc.MIB} MiB")


def run_worker(argv: list[str], cache: Path, limit: int, pause: float = PRUNE_SECONDS) -> int:
    """Runs a worker and keeps its cache below the limit in bytes; returns the exit status of the service."""
    signal.signal(signal.SIGTERM, _asked_to_stop)
    signal.signal(signal.SIGINT, _asked_to_stop)
    _bound(cache, limit)
    # A worker has to go on ignoring SIGPIPE, which a connection that was given up would end it with.
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent, restore_signals=False)
    try:
        while process.poll() is None:
            try:
                process.wait(timeout=pause)
            except subprocess.TimeoutExpired:
                _bound(cache, limit)
    except SystemExit:
        process.terminate()
        process.wait()
        raise
    say(f"the worker ended with status {process.returncode}")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs llama.cpp's programs as services.")
    parts = parser.add_subparsers(dest="part", required=True)
    head = parts.add_parser("head", help="wait for the workers, then run llama-server and watch it")
    head.add_argument(
        "--worker", action="append", default=[], metavar="ADDRESS:PORT", help="a worker that must answer first"
    )
    head.add_argument("--protocol", help="RPC protocol that this head speaks")
    head.add_argument("--timeout", type=float, default=5.0, help="seconds for one handshake")
    head.add_argument("--url", required=True, help="where llama-server answers")
    head.add_argument("--state", required=True, type=Path, help="folder for the handshakes and the log of this start")
    worker = parts.add_parser("worker", help="run a worker and bound its cache of tensors")
    worker.add_argument("--cache", required=True, type=Path, help="folder of the cache")
    worker.add_argument("--limit-mib", required=True, type=int, help="what the cache may hold")
    for part in (head, worker):
        part.add_argument("argv", nargs="+", help="the program and its arguments, after --")
    options = parser.parse_args()
    if options.part == "worker":
        return run_worker(options.argv, options.cache, options.limit_mib * rpc.MIB)
    return run(options.argv, options.worker, options.url, options.state, options.protocol, options.timeout)


if __name__ == "__main__":
    raise SystemExit(main())

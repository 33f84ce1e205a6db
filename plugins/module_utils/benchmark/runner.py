# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a program that measures, on the head, and says when it wrote each line. On request it reaches the workers through a proxy that delays.

python3 measuring.py --log FILE [--latency-ms L[,L]…] [--bandwidth-mbit B] [--proxy ADDRESS:PORT]… -- PROGRAM ARGUMENT…
python3 measuring.py --guard FILE --silence S --again S
Each line of the log is ``SECONDS KIND TEXT``: ``out`` and ``err`` of the program, ``run`` of this file. Of several latencies, each repetition of llama-bench
with --progress has the next one, and the log says which. As a guard it carries out the commands in a file once
nobody has touched that for so many seconds, the last one again after so many more until it succeeds, and ends where the file is removed. Needs the
standard library alone.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 18
WAITING_BYTES = 64 << 20
"""Of one direction of a connection, that are on their way at most."""
END_SECONDS = 10
"""For the program to end by itself after SIGTERM."""
GUARD_SECONDS = 1.0
"""Between two looks of the guard at its file."""
LOG_BYTES, LINE_BYTES = 256 << 20, 64 << 10
"""Of the log, after which the program is ended, and of a line, which is divided there."""
STAMP_BYTES = 16
"""Of a line, beside what the program writes."""
SWITCH_SECONDS = 0.0002
"""After so long a thread lets another one run that waits: the delays are not much longer."""
REPETITION = re.compile(r"llama-bench: benchmark ([0-9]{1,9})/[0-9]+: (?:prompt|generation) run ([0-9]{1,9})/[0-9]+")
"""What llama-bench --progress says before each repetition (tools/llama-bench/llama-bench.cpp), and not before a warm-up."""


class Log:
    """Writes the lines, from several threads."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._lock, self._began, self._left = stream, threading.Lock(), time.monotonic(), LOG_BYTES

    def write(self, kind: str, text: str) -> None:
        """:raises OSError: it cannot be written, or is full; what is said of the run itself still has room."""
        with self._lock:
            self._left -= len(text) + STAMP_BYTES
            if self._left < 0 and kind != "run":
                raise OSError(errno.EFBIG, f"it has more than {LOG_BYTES >> 20} MiB")
            if not self._stream.closed:
                self._stream.write(f"{time.monotonic() - self._began:.4f} {kind} {text}\n")
                self._stream.flush()


class Latency:
    """What each direction of a link adds. Several of them take turns with the repetitions: what slows a host down for longer than a few of
    these slows down all of them alike."""

    def __init__(self, turns: Sequence[float]) -> None:
        """:param turns: seconds; the first is that of the load, too."""
        self._turns, self.now = turns, turns[0]

    def follow(self, line: str, log: Log) -> None:
        """Takes the next one where a line begins a repetition."""
        begun = REPETITION.match(line) if len(self._turns) > 1 else None
        if begun:
            self.now = self._turns[(int(begun[2]) - 1) % len(self._turns)]
            log.write("run", f"benchmark {begun[1]}, repetition {begun[2]}: {1000 * self.now:g} ms are added")


class Link:
    """One direction of a connection. What enters it leaves it after it was carried, at so many bits per second, and after the latency; what
    follows does not wait for the latency of what is before it."""

    def __init__(self, source: socket.socket, target: socket.socket, latency: Latency, rate: float | None) -> None:
        """:param rate: bytes per second."""
        self._source, self._target, self._latency, self._rate = source, target, latency, rate
        self._waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(WAITING_BYTES // CHUNK)
        self.bytes = self.messages = 0

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=work, daemon=True) for work in (self._take, self._give)]
        for thread in threads:
            thread.start()
        return threads

    def _take(self) -> None:
        free = 0.0
        data = b"-"
        while data:
            try:
                data = self._source.recv(CHUNK)
            except OSError:
                data = b""
            now = time.monotonic()
            free = max(now, free) + len(data) / self._rate if self._rate else now
            self.bytes, self.messages = self.bytes + len(data), self.messages + bool(data)
            self._waiting.put((free + self._latency.now, data))

    def _give(self) -> None:
        data = b"-"
        while data:
            due, data = self._waiting.get()
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            try:
                if data:
                    self._target.sendall(data)
            except OSError:
                break
        for end in (self._source, self._target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RD if end is self._source else socket.SHUT_WR)
        while data:
            _due, data = self._waiting.get()


class Proxy:
    """Listens on a loopback port and brings each connection to one worker."""

    def __init__(self, target: str, latency: Latency, rate: float | None, log: Log) -> None:
        self.target, self._latency, self._rate, self._log = target, latency, rate, log
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                near, _address = self._listener.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        address, port = self.target.rsplit(":", 1)
        try:
            far = socket.create_connection((address, int(port)), 10)
        except OSError as error:
            self._log.write("run", f"{self.target} cannot be reached: {error}")
            near.close()
            return
        for end in (near, far):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        links = [Link(near, far, self._latency, self._rate), Link(far, near, self._latency, self._rate)]
        for thread in [thread for link in links for thread in link.start()]:
            thread.join()
        for end in (near, far):
            end.close()
        sent, received = links
        self._log.write(
            "run",
            f"{self.target} was sent {sent.bytes} bytes in {sent.messages} parts and sent {received.bytes} in {received.messages}",
        )


def with_proxies(words: Iterable[str], proxies: Iterable[Proxy]) -> list[str]:
    """A command line that reaches the workers through the proxies."""
    words = list(words)
    for proxy in proxies:
        words = [
            ",".join(proxy.endpoint if part == proxy.target else part for part in word.split(",")) for word in words
        ]
    return words


def _copy(stream: IO[str], kind: str, log: Log, child: subprocess.Popen[str], latency: Latency) -> None:
    """Writes each line, and ends the program where that is not possible: its figures would be lost, and a full pipe would stop it for good."""
    try:
        while line := stream.readline(LINE_BYTES):
            latency.follow(line, log)
            log.write(kind, line.rstrip("\n"))
    except OSError as error:
        sys.stderr.write(f"the log cannot be written: {error}\n")
        child.kill()


def run(argv: list[str], proxies: list[Proxy], log: Log, latency: Latency) -> int:
    """Runs the program to its end; its status, negative after a signal."""
    for proxy in proxies:
        log.write("run", f"{proxy.endpoint} leads to {proxy.target}")
        proxy.start()
    argv = with_proxies(argv, proxies)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, text=True, errors="replace", **pipes)

    def end(_number: int, _frame: object) -> None:
        child.terminate()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
    streams = ((child.stdout, "out"), (child.stderr, "err"))
    readers = [threading.Thread(target=_copy, args=(stream, kind, log, child, latency)) for stream, kind in streams]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    status = child.wait()
    for proxy in proxies:
        proxy.close()
    with suppress(OSError):
        log.write("run", f"ended with {status}")
    return status


def be_punctual() -> None:
    """Lets sleeps end when they are due: Linux may make them 50 µs longer, and Python lets another thread wait for 5 ms."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1")


def guard(path: Path, silence: float, again: float) -> int:
    """Carries out the commands in the file once nobody touches it any more, the last one until it succeeds, and removes the file. Who touches it
    meanwhile, even while a command runs, lets it wait again; who removes it ends it. Another guard of the same file waits for none.

    :param again: seconds between two tries of the last command.
    """
    with path.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        *before, last = json.load(stream)
        while (touched := _wait_for_silence(path, stream, silence)) is not None:
            for command in before:
                _succeeds(command)
            while (unwatched := _touched(path, stream) == touched) and not _succeeds(last):
                time.sleep(again)
            if unwatched and _touched(path, stream) == touched:
                path.unlink(missing_ok=True)
    return 0


def _touched(path: Path, stream: IO[str]) -> int | None:
    """When the file that is open was touched, in nanoseconds; None once it is gone or replaced."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns if status.st_ino == os.fstat(stream.fileno()).st_ino else None


def _wait_for_silence(path: Path, stream: IO[str], silence: float) -> int | None:
    """Waits until nobody has touched the file for so many seconds, whoever sets the clock meanwhile; when that was, or None where it is gone."""
    last = _touched(path, stream)
    since = time.monotonic() - max(0.0, time.time() - (last or 0) / 1e9)
    while last is not None and time.monotonic() - since < silence:
        time.sleep(GUARD_SECONDS)
        before, last = last, _touched(path, stream)
        since = since if last == before else time.monotonic()
    return last


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, check=False).returncode == 0
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--guard"]:
        return guard(Path(arguments[1]), float(arguments[3]), float(arguments[5]))
    own, program = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", required=True)
    parser.add_argument("--latency-ms", default="0")
    parser.add_argument("--bandwidth-mbit", type=float)
    parser.add_argument("--proxy", action="append", default=[])
    given = parser.parse_args(own)
    be_punctual()
    rate = given.bandwidth_mbit * 1e6 / 8 if given.bandwidth_mbit else None
    latency = Latency([float(each) / 1000 for each in given.latency_ms.split(",")])
    Path(given.log).parent.mkdir(parents=True, exist_ok=True)
    with open(given.log, "w", encoding="utf-8", errors="replace") as stream:
        log = Log(stream)
        return run(program, [Proxy(target, latency, rate, log) for target in given.proxy], log, latency)


if __name__ == "__main__":
    raise SystemExit(1 if main(sys.argv[1:]) else 0)

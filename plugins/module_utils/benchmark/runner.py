# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs programs that measure one after the other on the head, in place of its server. On request they reach the workers through a proxy that delays.

python3 runner.py JOB
JOB is JSON: ``timeout``, seconds of each program, and ``loads``, each with ``argv``, ``environment``, ``log``, and the endpoints of ``workers`` that are
reached through a proxy that adds ``latency_ms``. Each line of a log is ``SECONDS KIND TEXT``: ``out`` and ``err`` of the program, ``run`` of this file.
Needs the standard library alone.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

CHUNK = 1 << 18
WAITING_BYTES = 64 << 20
"""Of one direction of a connection, that are on their way at most."""
LOG_BYTES, LINE_BYTES = 256 << 20, 64 << 10
"""Of a log, after which the program is ended, and of a line, which is divided there."""
STAMP_BYTES = 16
"""Of a line, beside what the program writes."""
SWITCH_SECONDS = 0.0002
"""A thread runs for this long before a waiting one gets its turn: a delay grows by little more."""


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


class Link:
    """One direction of a connection. What enters it leaves it after the latency; what follows does not wait for the latency of what is before it."""

    def __init__(self, source: socket.socket, target: socket.socket, latency: float) -> None:
        """:param latency: seconds that it adds."""
        self._source, self._target, self._latency = source, target, latency
        self._waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(WAITING_BYTES // CHUNK)

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=work, daemon=True) for work in (self._receive, self._send)]
        for thread in threads:
            thread.start()
        return threads

    def _receive(self) -> None:
        data = b"-"
        while data:
            try:
                data = self._source.recv(CHUNK)
            except OSError:
                data = b""
            self._waiting.put((time.monotonic() + self._latency, data))

    def _send(self) -> None:
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

    def __init__(self, target: str, latency: float, log: Log) -> None:
        self.target, self._latency, self._log = target, latency, log
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        log.write("run", f"{self.endpoint} leads to {target}")
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
            self._log.write("err", f"{self.target} cannot be reached: {error}")
            near.close()
            return
        for end in (near, far):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        links = [Link(near, far, self._latency), Link(far, near, self._latency)]
        for thread in [thread for link in links for thread in link.start()]:
            thread.join()
        for end in (near, far):
            end.close()


def with_proxies(words: Iterable[str], proxies: Iterable[Proxy]) -> list[str]:
    """A command line that reaches the workers through the proxies."""
    endpoints = {proxy.target: proxy.endpoint for proxy in proxies}
    return [",".join(endpoints.get(part, part) for part in word.split(",")) for word in words]


class Load(NamedTuple):
    """A program that measures."""

    argv: list[str]
    environment: dict[str, str]
    log: str
    workers: list[str]
    latency_ms: float


class Runner:
    """Runs the programs of a job. The first SIGTERM ends the one that runs, and the job."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._child = timeout, None  # type: float, subprocess.Popen[str] | None
        self.ends = False

    def end(self, *_signal: object) -> None:
        self.ends = True
        if self._child:
            self._child.terminate()

    def run(self, load: Load) -> None:
        """Runs one program to its end, or until its time is over."""
        Path(load.log).parent.mkdir(parents=True, exist_ok=True)
        with open(load.log, "w", encoding="utf-8", errors="replace") as stream:
            log = Log(stream)
            proxies = [Proxy(worker, load.latency_ms / 1000, log) for worker in load.workers]
            status = self._run(load, with_proxies(load.argv, proxies), log)
            for proxy in proxies:
                proxy.close()
            with suppress(OSError):
                log.write("run", f"ended with {status}")

    def _run(self, load: Load, argv: list[str], log: Log) -> int:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        environment = {**os.environ, **load.environment}
        try:
            child = subprocess.Popen(argv, env=environment, text=True, errors="replace", **pipes)
        except OSError as error:
            log.write("err", f"{argv[0]} cannot be started: {error.strerror}")
            return 1
        self._child = child
        limit = threading.Timer(self._timeout, self._give_up, (child, log))
        streams = ((child.stdout, "out"), (child.stderr, "err"))
        readers = [threading.Thread(target=_copy, args=(stream, kind, log, child)) for stream, kind in streams]
        for thread in (limit, *readers):
            thread.start()
        if self.ends:
            child.terminate()
        for thread in readers:
            thread.join()
        status = child.wait()
        limit.cancel()
        return status

    def _give_up(self, child: subprocess.Popen[str], log: Log) -> None:
        log.write("err", f"its {self._timeout:g} seconds are over")
        child.kill()


def _copy(stream: IO[str], kind: str, log: Log, child: subprocess.Popen[str]) -> None:
    """Writes each line, and ends the program where that is not possible: its figures would be lost, and a full pipe would stop it for good."""
    try:
        while line := stream.readline(LINE_BYTES):
            log.write(kind, line.rstrip("\n"))
    except OSError as error:
        sys.stderr.write(f"the log cannot be written: {error}\n")
        child.kill()


def be_punctual() -> None:
    """Lets sleeps end when they are due: Linux may make them 50 µs longer, and Python lets another thread wait for 5 ms."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1")


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    be_punctual()
    runner = Runner(job["timeout"])
    signal.signal(signal.SIGTERM, runner.end)
    for load in job["loads"]:
        if not runner.ends:
            runner.run(Load(**load))


if __name__ == "__main__":
    main(sys.argv[1])

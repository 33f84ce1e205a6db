# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs programs that measure one after the other on the head, in place of its server. On request they reach the workers through a proxy that delays.

python3 runner.py JOB
JOB is JSON: ``timeout``, seconds of each program, and ``loads``, each with ``argv``, ``environment``, ``log``, and the endpoints of ``workers`` that are
reached through the proxy, with its ``latencies_ms``: each repetition of llama-bench with --progress has the next one. Each line of a log is
``SECONDS KIND TEXT``: ``out`` and ``err`` of the program, ``run`` of this file. Needs the standard library alone.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

CHUNK = 1 << 18
WAITING_BYTES = 64 << 20
"""Of one direction of a connection, that are on their way at most."""
LOG_BYTES, LINE_BYTES = 256 << 20, 64 << 10
"""Of a log, after which the program is ended, and of a line, which is divided there."""
READY_SECONDS = 0.2
"""After so long llama-server is asked again whether it is ready."""
STAMP_BYTES = 16
"""Of a line, beside what the program writes."""
SWITCH_SECONDS = 0.0002
"""After so long a thread lets another one run that waits: the delays are not much longer."""
REPETITION = re.compile(r"llama-bench: benchmark [0-9]{1,9}/[0-9]+: (?:prompt|generation) run ([0-9]{1,9})/[0-9]+")
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
    """Seconds that each direction of a link adds. Several of them take turns with the repetitions: what slows a host down for longer than a few of
    these slows down all of them alike."""

    def __init__(self, turns: Sequence[float]) -> None:
        """:param turns: the first is that of the load, too."""
        self._turns, self.now = turns, turns[0] if turns else 0.0

    def follow(self, line: str, log: Log) -> None:
        """Takes the next one where a line begins a repetition."""
        begun = REPETITION.match(line) if len(self._turns) > 1 else None
        if begun:
            self.now = self._turns[(int(begun[1]) - 1) % len(self._turns)]
            log.write("run", "repetition")


class Link:
    """One direction of a connection. What enters it leaves it after the latency; what follows does not wait for the latency of what is before it."""

    def __init__(self, source: socket.socket, target: socket.socket, latency: Latency) -> None:
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
            self._waiting.put((time.monotonic() + self._latency.now, data))

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

    def __init__(self, target: str, latency: Latency, log: Log) -> None:
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
    latencies_ms: list[float]
    asks: dict[str, Any] | None = None
    """What a llama-server is asked: ``port``, ``text`` that it continues, numbers of tokens to be ``generated``, and ``repetitions``."""


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
            log, latency = Log(stream), Latency([each / 1000 for each in load.latencies_ms])
            proxies = [Proxy(worker, latency, log) for worker in load.workers]
            status = self._run(load, with_proxies(load.argv, proxies), log, latency)
            for proxy in proxies:
                proxy.close()
            with suppress(OSError):
                log.write("run", f"ended with {status}")

    def _run(self, load: Load, argv: list[str], log: Log, latency: Latency) -> int:
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
        readers = [threading.Thread(target=_copy, args=(stream, kind, log, child, latency)) for stream, kind in streams]
        problems: list[str] = []
        asking = [threading.Thread(target=_ask, args=(load.asks, log, child, problems))] if load.asks else []
        for thread in (limit, *readers, *asking):
            thread.start()
        if self.ends:
            child.terminate()
        for thread in (*readers, *asking):
            thread.join()
        with suppress(OSError):
            for problem in problems:
                log.write("err", problem)
        status = child.wait()
        limit.cancel()
        return status

    def _give_up(self, child: subprocess.Popen[str], log: Log) -> None:
        log.write("err", f"its time is over: llama_benchmark_timeout is {self._timeout:g}, seconds")
        child.kill()


def _ask(asks: dict[str, Any], log: Log, child: subprocess.Popen[str], problems: list[str]) -> None:
    """Asks llama-server as soon as it is ready, and ends it. Its answers become lines as llama-bench writes them, with the tokens that were predicted and
    accepted. Each question has a seed of its own: what was answered once could be predicted as a whole."""
    opener, url = urllib.request.build_opener(urllib.request.ProxyHandler({})), f"http://127.0.0.1:{asks['port']}"
    try:
        while child.poll() is None:
            with suppress(OSError):
                opener.open(f"{url}/health").close()
                break
            time.sleep(READY_SECONDS)
        for tokens in asks["generated"]:
            found = []
            for seed in range(asks["repetitions"]):
                question = {"prompt": asks["text"], "n_predict": tokens, "ignore_eos": True, "cache_prompt": False}
                with opener.open(f"{url}/completion", json.dumps({**question, "seed": seed}).encode()) as answer:
                    found.append(json.load(answer)["timings"])
            speeds = [float(timings["predicted_per_second"]) for timings in found]
            row = {"n_prompt": 0, "n_gen": tokens, "samples_ts": speeds, "avg_ts": statistics.fmean(speeds)}
            row["stddev_ts"] = statistics.stdev(speeds) if len(speeds) > 1 else 0.0
            for name, key in (("drafted", "draft_n"), ("accepted", "draft_n_accepted")):
                row[name] = sum(timings.get(key, 0) for timings in found)
            log.write("out", json.dumps(row))
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"llama-server does not answer as it should: {error!r}")
    child.terminate()


def _copy(stream: IO[str], kind: str, log: Log, child: subprocess.Popen[str], latency: Latency) -> None:
    """Writes each line, and ends the program where that is not possible: its figures would be lost, and a full pipe would stop it for good."""
    try:
        while line := stream.readline(LINE_BYTES):
            latency.follow(line, log)
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

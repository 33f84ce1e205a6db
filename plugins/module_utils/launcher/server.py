# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs llama-server, and detects its faults and those of its workers.

llama-server does not reconnect to a worker, and an idle one does not even notice that a worker died. So on Linux it is sampled once a second
(progress.py); elsewhere it exits at the next request.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, NamedTuple, cast
from urllib.parse import quote, urlsplit

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, loading, progress, tunnel

LOG_TAIL_BYTES = 4096
STOP_SECONDS = 2.0
"""An orderly exit took 0.1 s (0.3.36). With a request in progress it sometimes took more than 10 s ('cleaning up before exit'). No client gets an answer
then, so killing it loses nothing."""
HEALTH_TIMEOUT_SECONDS = 2.0
HEALTH_POLL_SECONDS, MAX_UNHEALTHY_SECONDS = 10.0, 60.0
MIN_LOSS_SAMPLES = 2
MIN_RETRANSMISSIONS, UNACKNOWLEDGED_SECONDS = 4, 20.0
"""Number of retransmissions (the fourth comes after 3 s) and how long it must persist: together as long as the keepalive of an idle connection.
Retransmissions alone prove little: on a link that is down there are two per second."""
MAX_SILENCE_S = 600.0
"""The slowest prompt on record ran at 3.14 tokens per second (field notes), so llama.cpp's default batch of 512 tokens takes 163 s. During that time a
worker computes, and no byte moves."""
KEY_FILE_OPTION = "--api-key-file"
KEY_ENCODING = ("utf-8", "surrogateescape")
"""Encoding of keys, which llama-server reads as bytes."""
MAX_ANSWER_BYTES = 4 * 1024 * 1024
ONE_TOKEN_BODY = json.dumps({"prompt": "1", "n_predict": 1, "cache_prompt": False})
"""Body of the smallest request that makes llama-server compute."""
SLEEP_OPTION = "--sleep-idle-seconds"
METRICS_OPTION, METRICS_TIMEOUT_SECONDS = "--metrics", 0.2
"""Option that enables metrics, and timeout for reading them. An idle llama-server answers at once."""
METRIC_LINE_PATTERN = re.compile(
    r"^llamacpp:([a-z_]{1,60})(?:\{[^}\n]*\})? (\d{1,15}(?:\.\d{1,9})?(?:e\+?\d{1,2})?)\r?$", re.MULTILINE
)
RPC_OPTION, PORT_OPTION, ALIAS_OPTION = "--rpc", "--port", "--alias"
"""Options that the router passes to its children (server-models.cpp of 0.3.36)."""
SPAWN_LINE_PATTERN = re.compile(rb"spawning server instance with name=(.+) on port ([0-9]+)$")
"""Line that the router logs before it starts a child."""
CHILD_LINE_PATTERN = re.compile(rb"\[ *([0-9]+)\] ")
"""Beginning of a line that the router relays: the port of its child."""
MAX_LINE_BYTES = 65536
CHILD_URL_PREFIX = "http://127.0.0.1:"
ASLEEP_MARK, AWAKE_MARK, SLEEP_LINE = b'"is_sleeping":true', b'"is_sleeping":false', "server is entering sleeping state"
"""Marks in an answer of /props and in the log (tools/server of 0.3.36)."""
MAX_LOAD_SECONDS = 86400.0


def parse_metrics(text: str) -> dict[str, float]:
    """Return llama-server's counters and gauges, without their prefix, from its /metrics."""
    return {name: float(value) for name, value in METRIC_LINE_PATTERN.findall(text)}


def connected_endpoints(sockets: list[progress.TcpSocket], endpoints: list[str]) -> set[str]:
    return {sock.peer for sock in sockets if sock.state == progress.ESTABLISHED} & set(endpoints)


def is_healthy(url: str) -> bool:
    """Return whether llama-server reports that it serves. The request contains no secret, so the certificate is not checked."""
    with suppress(OSError, http.client.HTTPException), closing(_connection(url, HEALTH_TIMEOUT_SECONDS)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def _connection(base_url: str, timeout_s: float) -> http.client.HTTPConnection:
    address = urlsplit(base_url)
    if address.scheme != "https":
        return http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(address.hostname or "", address.port, timeout=timeout_s, context=context)


def _authorization_headers(argv: list[str]) -> dict[str, bytes]:
    """Return a header with the first API key, if llama-server requires one.

    :raises OSError: the file cannot be read.
    """
    keys = keys_of(Path(_option_value(argv, KEY_FILE_OPTION))) if KEY_FILE_OPTION in argv[:-1] else []
    return {"Authorization": b"Bearer " + keys[0].encode(*KEY_ENCODING)} if keys else {}


def keys_of(path: Path) -> list[str]:
    """:raises OSError: the file cannot be read."""
    return [key for line in path.read_text(*KEY_ENCODING).split("\n") if (key := line.strip())]


class ServerRequest(threading.Thread):
    """Request in a thread. llama-server answers when it has computed a batch, freed its model, or loaded it again; until then each request uses one of
    its threads."""

    def __init__(
        self, base_url: str, path: str, headers: Mapping[str, bytes], wait_s: float = 0.0, body: str = ""
    ) -> None:
        """:param wait_s: seconds to wait for the answer."""
        super().__init__(daemon=True)
        self.base_url, self.path, self.headers, self.body, self.reply = base_url, path, headers, body, b""
        self.connection: http.client.HTTPConnection | None = None
        self.is_cancelled = False
        self.start()
        self.join(wait_s)

    def run(self) -> None:
        with (
            suppress(OSError, http.client.HTTPException),
            closing(_connection(self.base_url, MAX_LOAD_SECONDS)) as connection,
        ):
            self.connection = connection
            headers = {"Content-Type": b"application/json", **self.headers}
            connection.request("POST" if self.body else "GET", self.path, self.body or None, headers)
            self.reply = connection.getresponse().read(MAX_ANSWER_BYTES)

    def cancel(self) -> None:
        """Close the connection: llama-server drops a request that it has not begun."""
        self.is_cancelled = True
        if self.connection and self.connection.sock:
            with suppress(OSError):
                self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.join(1.0)


class Fault(NamedTuple):
    """Reason to stop llama-server."""

    finding: str
    workers: Sequence[str] = ()
    is_silent: bool = False
    """Whether only its duration distinguishes the fault from slow work."""
    is_return: bool = False
    """Whether nothing is wrong: the head returns from a fallback."""
    model: str = ""
    """Model whose process was killed; empty if llama-server has to be stopped."""

    @property
    def cause(self) -> str:
        cause = "model_lost_worker" if self.model else "lost_worker"
        return "returned" if self.is_return else cause if self.workers else "silent" if self.is_silent else "stopped"

    @property
    def exit_text(self) -> str:
        reason = "because the launcher stopped it"
        return f"after losing worker {', '.join(self.workers)}" if self.workers else f"{reason}: {self.finding}"


class WatchedServer:
    """One llama-server process that serves a model, and its monitoring."""

    tunnels = tunnel.NO_TUNNELS

    def __init__(self, argv: list[str], endpoints: list[str], base_url: str, silence_s: float, pid: int = 0) -> None:
        clock = time.monotonic()
        self.pid = pid
        self.argv = argv
        self.endpoints = endpoints
        self.base_url = base_url
        self.silence_s = silence_s
        self.headers: Mapping[str, bytes] = {}
        """Headers with the API key that llama-server has read; its file may change later."""
        with suppress(OSError):
            self.headers = _authorization_headers(argv)
        self.is_ready = False
        self.health: tuple[bool, float] = (False, 0.0)
        self.is_asleep = False
        """Whether it has freed its model and disconnected from its workers (--sleep-idle-seconds), until it has loaded the model again."""
        self.props_request: ServerRequest | None = None
        self.metrics_request: ServerRequest | None = None
        self.metrics: dict[str, float] = {}
        self.metrics_request_time = 0.0
        """Time of the last request for metrics."""
        self.loss_samples = 0
        self.keepalive_inodes: set[str] = set()
        self.timers = progress.ConditionTimer()
        self.idle_timer = progress.IdleTimer(silence_s / 5, clock)
        self.token_request: ServerRequest | None = None
        self.start_time = clock
        self.last_sample: progress.ProcessSample | None = None
        self.load: loading.LoadCounters | None = None
        """Progress of loading, until it is ready; None if the kernel reports nothing."""

    def take_sample(self) -> progress.ProcessSample | None:
        """Return a sample of llama-server; None if the kernel reports nothing."""
        if not progress.ON_LINUX:
            return None
        ports = {progress.port_of(endpoint) for endpoint in self.endpoints}
        try:
            return self.tunnels.with_outer_traffic(progress.sample_process(self.pid, self.keepalive_inodes, ports))
        except OSError:
            return None

    def update(self, clock: float) -> progress.ProcessSample | None:
        """Update its health, its sample and the progress of loading; return the sample."""
        if not self.is_ready or clock - self.health[1] >= HEALTH_POLL_SECONDS:
            self.health = (is_healthy(self.base_url), clock)
            self.is_ready = self.is_ready or self.health[0]
        self.last_sample = sample = self.take_sample()
        if sample:
            self.load = (
                None if self.is_ready else progress.load_of(sample, self.endpoints, clock - self.start_time, self.load)
            )
        return sample

    def fault(self) -> Fault | None:
        """Return the fault of llama-server or its workers."""
        clock = time.monotonic()
        sample = self.update(clock)
        if sample is None:
            return None
        suspended_seconds = self.timers.seconds("stopped", sample.activity.state == "T", clock)
        if suspended_seconds >= progress.MAX_SUSPENDED_SECONDS:
            return Fault(f"llama-server has been suspended (SIGSTOP) for {suspended_seconds:.0f} s")
        self._update_sleep(sample, clock)
        return self._detect_worker_loss(sample, clock) or self._detect_stall(sample, clock)

    def has_clients(self) -> bool:
        """Return whether a client may wait for an answer."""
        sample = self.take_sample()
        return sample is None or bool(self.client_connections(sample))

    def client_connections(self, sample: progress.ProcessSample) -> list[progress.TcpSocket]:
        """Return connections of clients. llama-server closes connections without a request after 5 s (cpp-httplib)."""
        port = progress.port_of(self.base_url)
        return [
            sock
            for sock in sample.sockets
            if sock.state == progress.ESTABLISHED and progress.port_of(sock.address) == port
        ]

    def listens(self, sample: progress.ProcessSample) -> bool:
        """Return whether llama-server itself listens on its port: no other process may receive a key."""
        port = progress.port_of(self.base_url)
        return any(sock.state == progress.LISTEN and progress.port_of(sock.address) == port for sock in sample.sockets)

    def _update_sleep(self, sample: progress.ProcessSample, clock: float) -> None:
        """Ask whether it sleeps, if its connections indicate a change. In 0.3.36, the request neither wakes it nor keeps it awake."""
        if SLEEP_OPTION not in self.argv or not self.is_ready:
            return
        if self.props_request is None:
            peers = connected_endpoints(sample.sockets, self.endpoints)
            differs = bool(peers or self.client_connections(sample)) if self.is_asleep else peers != set(self.endpoints)
            is_due = not self.endpoints and self.timers.seconds("no props request", True, clock) >= HEALTH_POLL_SECONDS
            if not (differs or is_due) or not self.listens(sample):
                return
            self.timers.seconds("no props request", False, clock)
            self.props_request = ServerRequest(self.base_url, "/props", self.headers, HEALTH_TIMEOUT_SECONDS)
        if not self.props_request.is_alive():
            reply, self.props_request = self.props_request.reply, None
            self.is_asleep = ASLEEP_MARK in reply or (self.is_asleep and AWAKE_MARK not in reply)

    def update_metrics(self) -> None:
        """Request its metrics, if they are enabled. The request postpones its sleep (0.3.36), so a server that may sleep is only asked after activity:
        a connected client may be idle, or request only /health."""
        can_ask = self.is_ready and not self.is_asleep and not self.props_request and METRICS_OPTION in self.argv
        is_due = SLEEP_OPTION not in self.argv or self.idle_timer.last_activity_time > self.metrics_request_time
        if self.metrics_request is None and can_ask and is_due and self.last_sample and self.listens(self.last_sample):
            self.metrics_request_time = time.monotonic()
            self.metrics_request = ServerRequest(self.base_url, "/metrics", self.headers, METRICS_TIMEOUT_SECONDS)
        if self.metrics_request and not self.metrics_request.is_alive():
            text, self.metrics_request = self.metrics_request.reply.decode("utf-8", "replace"), None
            self.metrics.update(parse_metrics(text))

    def _detect_worker_loss(self, sample: progress.ProcessSample, clock: float) -> Fault | None:
        """Return a fault if a worker's connection is missing in two samples of a ready server, or its host does not acknowledge data."""
        workers = []
        for sock in sample.sockets:
            is_unacknowledged = sock.peer in self.endpoints and sock.retransmissions >= MIN_RETRANSMISSIONS
            if self.timers.seconds(f"unacknowledged {sock.peer}", is_unacknowledged, clock) >= UNACKNOWLEDGED_SECONDS:
                workers.append(sock.peer)
        if workers:
            return Fault(f"lost worker {', '.join(workers)}, whose host does not acknowledge data", workers)
        peers = connected_endpoints(sample.sockets, self.endpoints)
        has_model = self.is_ready and not self.is_asleep and not self.props_request
        workers = [endpoint for endpoint in self.endpoints if endpoint not in peers] if has_model else []
        self.loss_samples = self.loss_samples + 1 if workers else 0
        return Fault(f"lost worker {', '.join(workers)}", workers) if self.loss_samples >= MIN_LOSS_SAMPLES else None

    def _detect_stall(self, sample: progress.ProcessSample, clock: float) -> Fault | None:
        """Return a fault if llama-server has work, and nothing has moved for the configured time."""
        idle_s = self.idle_timer.seconds(sample, self.endpoints, clock)
        has_client = bool(self.client_connections(sample))
        unhealthy_s = self.timers.seconds("unhealthy", self.is_ready and not self.health[0] and not has_client, clock)
        if min(unhealthy_s, idle_s) >= MAX_UNHEALTHY_SECONDS:
            return Fault(
                f"llama-server has made no progress and not answered /health for {unhealthy_s:.0f} s", is_silent=True
            )
        is_observable = bool(sample.traffic) or not self.endpoints
        is_loading = not self.is_ready or self.props_request is not None
        stalled_s = min(
            idle_s,
            self.timers.seconds("busy", is_observable and (is_loading or (has_client and not self.is_asleep)), clock),
        )
        if stalled_s < self.silence_s / 2:
            self.token_request = None
            return None
        if is_loading:
            return (
                Fault(f"loading has made no progress for {stalled_s:.0f} s", is_silent=True)
                if stalled_s >= self.silence_s
                else None
            )
        workers = [
            sock.peer
            for sock in sample.sockets
            if sock.peer in self.endpoints and sock.inode in sample.traffic and sample.traffic[sock.inode].awaits_answer
        ]
        if not workers and self._generates_token(sample):
            self.idle_timer.last_activity_time = clock
        elif stalled_s >= self.silence_s:
            subject = (
                f"llama-server gets no answer from worker {', '.join(workers)}"
                if workers
                else "llama-server does not answer a client"
            )
            return Fault(f"{subject}, and there has been no progress for {stalled_s:.0f} s", is_silent=True)
        return None

    def _generates_token(self, sample: progress.ProcessSample) -> bool:
        """Request a single token, and return whether llama-server generated it: a client with an open connection may be idle."""
        if self.token_request is None and self.listens(sample):
            self.token_request = ServerRequest(self.base_url, "/completion", self.headers, body=ONE_TOKEN_BODY)
        if self.token_request is None or self.token_request.is_alive():
            return False
        reply, self.token_request = self.token_request.reply, None
        return bool(reply)


def model_log_path(state_folder: Path, name: str) -> Path:
    """Return the log of the last load of one of several models."""
    return state_folder / f"{quote(name, safe='')}.{journal.START_LOG_FILE}"


class Head(WatchedServer):
    """The llama-server that the launcher starts."""

    def __init__(
        self, argv: list[str], endpoints: list[str], base_url: str, state_folder: Path, silence_s: float = MAX_SILENCE_S
    ) -> None:
        super().__init__(argv, endpoints, base_url, silence_s)
        self.log_tail = b""
        self.on_output: Callable[[bytes], None] = lambda _output: None
        """Callback for each chunk of the output."""
        self.conversation_values: Mapping[str, float] = {}
        """Metrics of saved conversations."""
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != journal.NOTIFY_VARIABLE},
            preexec_fn=progress.die_with_parent,
        )
        self.pid = self.process.pid
        self.relay = threading.Thread(target=self._relay, args=(state_folder / journal.START_LOG_FILE,), daemon=True)
        self.relay.start()

    def _relay(self, path: Path) -> None:
        """Copy the output to the service's log, its beginning to a file, and its end to memory.

        It keeps reading even if writing fails: llama-server stalls once the pipe is full.
        """
        pipe_descriptor = cast(IO[bytes], self.process.stdout).fileno()
        with journal.StartLog(path) as start_log:
            while chunk := os.read(pipe_descriptor, 65536):
                self.record_output(start_log, chunk)
                self.on_output(chunk)
                self.log_tail = (self.log_tail + chunk)[-LOG_TAIL_BYTES:]
                journal.write(chunk)

    def record_output(self, start_log: journal.StartLog, chunk: bytes) -> None:
        start_log.write(chunk)

    def servers(self) -> dict[str, WatchedServer]:
        """Return the process of each model; a single model has no name."""
        return {"": self}

    def loaded_models(self) -> set[str] | None:
        """Return the models in memory; None if that is unknown."""
        return {name for name, server in self.servers().items() if server.is_ready and not server.is_asleep}

    def kill(self) -> None:
        """Kill it at once: an orderly exit asks each worker to free its buffers, and one that hangs does not answer."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        progress.stop_process(self.process, STOP_SECONDS)


class Router(Head):
    """A llama-server that starts a child, another llama-server, for each requested model. Only the children use the workers."""

    def __init__(self, argv: list[str], url: str, state_folder: Path, silence_s: float) -> None:
        self.children: dict[int, WatchedServer] = {}
        self.state_folder = state_folder
        self.logs_by_port: dict[bytes, journal.StartLog] = {}
        """Port of a child → log of its start."""
        self.partial_line = b""
        """Incomplete last line of the output."""
        for path in state_folder.glob(f"*.{journal.START_LOG_FILE}"):
            with suppress(OSError):
                path.unlink()
        super().__init__(argv, [], url, state_folder, silence_s)

    def fault(self) -> Fault | None:
        """Return a fault of the router, or kill the process of a model with a fault: the router starts it again on request."""
        fault = super().fault()
        if fault or not progress.ON_LINUX:
            return fault
        processes = progress.children_of(self.pid)
        self.children = {
            pid: self.children.get(pid) or self._new_child(pid, argv)
            for pid, argv in processes.items()
            if ALIAS_OPTION in argv[:-1]
        }
        for pid, child in self.children.items():
            if fault := child.fault():
                _kill(pid, child.argv)
                return fault._replace(model=_option_value(child.argv, ALIAS_OPTION))
        self.load = next((child.load for child in self.children.values() if child.load), None)
        self.is_asleep = all(child.is_asleep for child in self.children.values())
        return None

    def record_output(self, start_log: journal.StartLog, chunk: bytes) -> None:
        """Copy the output of children to the logs of their models."""
        *complete_lines, incomplete_line = (self.partial_line + chunk).split(b"\n")
        lines, self.partial_line = [line + b"\n" for line in complete_lines], incomplete_line
        if len(incomplete_line) > MAX_LINE_BYTES:
            lines, self.partial_line = [*lines, incomplete_line], b""
        for line in lines:
            spawn_match, child_match = SPAWN_LINE_PATTERN.search(line.rstrip()), CHILD_LINE_PATTERN.match(line)
            if spawn_match and not child_match:
                self._begin_log(*spawn_match.groups())
            (self.logs_by_port.get(child_match[1], start_log) if child_match else start_log).write(line)

    def _begin_log(self, name: bytes, port: bytes) -> None:
        path = model_log_path(self.state_folder, name.decode("utf-8", "replace"))
        for old_port in [old_port for old_port, log in self.logs_by_port.items() if log.path == path]:
            self.logs_by_port.pop(old_port).close()
        self.logs_by_port[port] = journal.StartLog(path)

    def _new_child(self, pid: int, argv: list[str]) -> WatchedServer:
        endpoints = _option_value(argv, RPC_OPTION).split(",") if RPC_OPTION in argv else []
        child = WatchedServer(argv, endpoints, CHILD_URL_PREFIX + _option_value(argv, PORT_OPTION), self.silence_s, pid)
        child.tunnels = self.tunnels
        return child

    def servers(self) -> dict[str, WatchedServer]:
        return {_option_value(child.argv, ALIAS_OPTION): child for child in self.children.values()}

    def loaded_models(self) -> set[str] | None:
        return super().loaded_models() if progress.ON_LINUX else None

    def kill(self) -> None:
        super().kill()
        self._kill_children()

    def stop(self) -> None:
        super().stop()
        self._kill_children()

    def _kill_children(self) -> None:
        """Kill children that hang; the others exit with the router."""
        for pid, child in self.children.items():
            _kill(pid, child.argv)


def _kill(pid: int, argv: list[str]) -> None:
    """Kill a process, unless its number now belongs to another process."""
    if progress.argv_of(pid) == argv:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _option_value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]

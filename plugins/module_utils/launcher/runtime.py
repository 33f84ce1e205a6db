# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Launcher of services, the only program of this collection that stays on a host. It works without a controller.

For a head, it waits until every worker shakes hands, records the handshakes, starts llama-server and keeps the log of this start. It stops
llama-server when a worker is lost or nothing moves, records how it exited, and exits itself; the service manager starts it again. If a worker stays absent, it
serves on a fallback. It restarts a worker that is suspended or does not notice that its client is gone, and keeps a worker's tensor cache below its
limit, because llama.cpp never removes anything from it. It runs the llama-servers of a proof in the head's sandbox. It is installed with copies of the
other modules of this folder, rpc.py, words.py and units.py, and needs only Python 3.9.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import select
import socket
import socketserver
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE_PARTS = ["ansible_collections", "llamacpp", "cluster", "plugins", "module_utils"]
if not __package__:  # on a host all modules are in one folder
    for package in [
        *itertools.accumulate(PACKAGE_PARTS, "{}.{}".format),
        *(".".join((*PACKAGE_PARTS, folder)) for folder in ("common", "launcher", "llamacpp")),
    ]:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [os.path.dirname(os.path.abspath(__file__))]

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import (  # noqa: E402  # requires the packages above
    conversations,
    exporter,
    journal,
    page,
    progress,
    server,
    serving,
    tunnel,
    worker,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc, words  # noqa: E402  # requires the packages above

HANDSHAKE_TIMEOUT_SECONDS, SAMPLE_SECONDS = 5.0, 1.0
"""Time limit of a handshake, and seconds between two samples of llama-server."""
HANDSHAKES_FILE = "handshakes.json"
EXITS_FILE = "ends.json"
RELEASE_RECORD_FILE = "manifest.json"
MAX_LAST_LINES, MAX_ERROR_LINES = 20, 5
HANDSHAKE_TTL_SECONDS = 30.0
"""Seconds for which the handshake of an unused worker stays valid."""
EARLY_PAUSE_SECONDS, EARLY_PHASE_SECONDS = 0.25, 10.0
"""Pause between the first handshakes, and how long it applies; stunnel logs each failed handshake."""
RETURN_POLL_SECONDS, PROBE_TIMEOUT_SECONDS = 5.0, 2.0
MIN_STABLE_SECONDS = 30.0
"""Seconds that a worker must answer before the head returns to it from a fallback."""
PROOF_NICENESS, PROOF_STOP_SECONDS, PROOF_IDLE_SECONDS = 10, 5.0, 30
"""Priority of a proof's programs, seconds that a program has to exit, and seconds without a client after which their launcher exits."""
NO_ANSWER = rpc.Handshake("", "")
Handshakes = Mapping[str, rpc.Handshake]
"""Last answer of each worker, by endpoint."""


def ask_worker(endpoint: str, protocol: str | None, timeout_s: float) -> rpc.Handshake:
    """Shake hands with an unused worker."""
    journal.notify_watchdog()
    return rpc.probe(*rpc.parse_endpoint(endpoint), timeout_s, protocol)


def write_handshakes(state_folder: Path, answers: Handshakes) -> bool:
    """Write the answers; return whether they were written. If not, remove the file, so that older answers are not trusted."""
    path = state_folder / HANDSHAKES_FILE
    workers = {
        endpoint: {**answer._asdict(), "devices": [device._asdict() for device in answer.devices]}
        for endpoint, answer in answers.items()
    }
    is_written = journal.write_state(path, {"time": int(time.time()), "process": os.getpid(), "workers": workers})
    if not is_written:
        with suppress(OSError):
            path.unlink()
    return is_written


def record_exit(state_folder: Path, exit_text: str, log: str) -> None:
    """Count the exits of llama-server over all starts of the launcher; record the last exit and the end of its log."""
    exit_count = journal.read_back(state_folder / EXITS_FILE, lambda record: int(record["number"])) or 0
    journal.write_state(state_folder / EXITS_FILE, {"number": exit_count + 1, "how": exit_text, "log": last_lines(log)})


def last_lines(log: str) -> list[str]:
    """Return the last lines of a log, errors first: help texts and backtraces may follow them."""
    lines = log.splitlines()
    errors = [line for line in lines if re.search("error|failed", line, re.IGNORECASE)][-MAX_ERROR_LINES:]
    return [*errors, *(line for line in lines[-MAX_LAST_LINES:] if line not in errors)]


class HeadSettings(NamedTuple):
    endpoints: Sequence[str]
    """Endpoints of the plan's workers."""
    url: str
    state_folder: Path
    protocol: str | None = None
    fallbacks_path: Path | None = None
    fallback_after: float = 60.0
    """Seconds to wait for a worker."""
    silence_s: float = server.MAX_SILENCE_S
    is_router: bool = False
    """Whether llama-server is a router that starts one process for each model."""
    conversations: Sequence[int] = ()
    """Fields of conversations.StoreSettings; empty if none are kept."""


class StartChoice(NamedTuple):
    """Command line and workers of one start of llama-server."""

    argv: Sequence[str]
    endpoints: Sequence[str]
    answers: Handshakes
    fallback: serving.FallbackCommand | None = None

    @property
    def unused_workers(self) -> tuple[str, ...]:
        return (self.fallback.name,) if self.fallback else ()


class HeadRun:
    """One run of a head: waits for the workers, starts llama-server, and watches it."""

    def __init__(
        self,
        argv: Sequence[str],
        settings: HeadSettings,
        metrics_exporter: exporter.Exporter = worker.NO_EXPORTER,
        tunnels: tunnel.Tunnels = tunnel.NO_TUNNELS,
    ) -> None:
        self.argv = argv
        self.settings = settings
        self.exporter = metrics_exporter
        self.tunnels = tunnels
        self.record = serving.HeadRecord(settings.state_folder)
        self.return_timer = progress.ConditionTimer()
        self.last_handshake_time = 0.0
        """Time of the last handshakes with absent workers."""
        self.store: conversations.SlotStore | None = None

    def wait_for_workers(self) -> StartChoice:
        """Return the full plan when all of its workers have shaken hands, or a fallback when one stays absent. A router starts without absent workers:
        other models may not need them. A worker with an unsuitable release counts as absent, because it is probably being replaced."""
        settings, start_time = self.settings, time.monotonic()
        answers: dict[str, rpc.Handshake] = {}
        answer_times: dict[str, float] = {}
        while True:
            journal.notify_watchdog()
            self.tunnels.maintain()
            for endpoint in settings.endpoints:
                last_state = answers.get(endpoint, NO_ANSWER).state
                if last_state == "ok" and time.monotonic() - answer_times[endpoint] < HANDSHAKE_TTL_SECONDS:
                    continue
                answers[endpoint] = self._ask_worker(endpoint, last_state)
                answer_times[endpoint] = time.monotonic()
                if answers[endpoint].state != last_state:
                    write_handshakes(settings.state_folder, answers)
                self.record.set_state(serving.WAITING, absent_workers=tuple(_absent_workers(answers)))
                self.exporter.export_head(self.record)
            absent_workers = _absent_workers(answers)
            if absent_workers and time.monotonic() - start_time >= settings.fallback_after:
                if settings.fallbacks_path and (choice := self._choose_fallback(settings.fallbacks_path, answers)):
                    return choice
                if settings.is_router:
                    self.record.log(
                        f"no answer from worker {', '.join(absent_workers)}: requests for models that need it fail until it is back"
                    )
                    absent_workers = []
            if not absent_workers:
                return StartChoice(self.argv, settings.endpoints, answers)
            is_early = time.monotonic() - start_time < EARLY_PHASE_SECONDS
            time.sleep(min(SAMPLE_SECONDS, EARLY_PAUSE_SECONDS) if is_early else SAMPLE_SECONDS)

    def _ask_worker(self, endpoint: str, last_state: str) -> rpc.Handshake:
        """Shake hands with a worker; log why it is not ready, if that has changed."""
        answer = ask_worker(endpoint, self.settings.protocol, HANDSHAKE_TIMEOUT_SECONDS)
        if answer.state not in ("ok", "refused", last_state):
            answer = answer._replace(detail=self.tunnels.explain(endpoint, answer.detail))
        if answer.state not in ("ok", last_state):
            journal.log(f"waiting for worker {endpoint}: {answer.state}, {answer.detail}")
        return answer

    def _probe(self, endpoints: Sequence[str]) -> dict[str, rpc.Handshake]:
        return {endpoint: ask_worker(endpoint, self.settings.protocol, PROBE_TIMEOUT_SECONDS) for endpoint in endpoints}

    def _choose_fallback(self, path: Path, answers: Handshakes) -> StartChoice | None:
        fallbacks = serving.read_fallbacks(path)
        if fallbacks is None:
            journal.log_once(f"{path} cannot be read: run site.yml")
            return None
        unasked_workers = {worker for fallback in fallbacks for worker in fallback.workers} - set(answers)
        answers = {**answers, **self._probe(sorted(unasked_workers))}
        absent_workers = _absent_workers(answers)
        usable_fallbacks = (
            entry for entry in fallbacks if entry.without in absent_workers and not {*entry.workers} & {*absent_workers}
        )
        fallback = next(usable_fallbacks, None)
        if fallback is None:
            return None
        self.record.log(
            f"no answer from worker {', '.join(absent_workers)}: starting llama-server without {fallback.name}"
        )
        used_answers = {worker: answers[worker] for worker in fallback.workers}
        return StartChoice(fallback.argv, fallback.workers, used_answers, fallback)

    def serve(self, choice: StartChoice) -> None:
        record, settings = self.record, self.settings
        record.set_state(serving.LOADING, choice.unused_workers)
        argv = words.adapt_argv(choice.argv)
        store = self.store = conversations.open_store(argv, settings.state_folder, settings.conversations, record.log)
        try:
            if settings.is_router:
                head: server.Head = server.Router(argv, settings.url, settings.state_folder, settings.silence_s)
            else:
                head = server.Head(
                    argv, list(choice.endpoints), settings.url, settings.state_folder, settings.silence_s
                )
        except (OSError, ValueError) as error:
            record.log(f"llama-server could not be started: {error}")
            self._record_exit("start_failed", f"before start-up: {error}", "")
            return
        self.exporter.note_start()
        head.tunnels = self.tunnels
        if store:
            store.head, head.conversation_values, head.on_output = head, store.record, store.watch_output
        try:
            fault = self._watch(head, choice)
        except SystemExit:
            self._stop(head)
            head.relay.join(timeout=5)
            raise
        head.kill()
        head.relay.join(timeout=5)
        if fault and fault.is_return:
            record.count_restart()
            self.exporter.note_exit(fault.cause)
            return
        exit_text = fault.exit_text if fault else progress.describe_exit(head.process.returncode)
        if not fault:
            record.log(f"llama-server exited {exit_text}: restarting it")
        self._record_exit(fault.cause if fault else "ended", exit_text, head.log_tail.decode("utf-8", "replace"))

    def _stop(self, head: server.Head) -> None:
        if self.store:
            journal.run_safely("conversations are not kept", self.store.save_now)
        head.stop()

    def _record_exit(self, cause: str, exit_text: str, log: str) -> None:
        record_exit(self.settings.state_folder, exit_text, log)
        self.record.count_restart()
        self.exporter.note_exit(cause)
        self.exporter.export_head(self.record)

    def _watch(self, head: server.Head, choice: StartChoice) -> server.Fault | None:
        """Watch llama-server until it exits or a fault requires stopping it; return the fault."""
        is_recorded = False
        while head.process.poll() is None:
            journal.notify_watchdog()
            self.tunnels.maintain()
            is_recorded = is_recorded or write_handshakes(self.settings.state_folder, choice.answers)
            with suppress(subprocess.TimeoutExpired):
                head.process.wait(SAMPLE_SECONDS)
                continue
            fault = journal.run_safely("llama-server cannot be monitored", head.fault)
            if self.store and not fault:
                fault = journal.run_safely("conversations are not kept", self.store.fault)
            if fault and fault.model:
                self.record.log(f"{fault.finding}: stopping model {fault.model}; the next request loads it again")
                self.exporter.count_restart(fault.cause)
            elif fault:
                self.record.log(f"{fault.finding}: restarting llama-server")
                return fault
            if head.load:
                self.record.set_state(serving.LOADING, choice.unused_workers, load=head.load)
            elif head.is_ready:
                serving_state = serving.ASLEEP if head.is_asleep else serving.SERVING
                self.record.set_state(serving.FALLBACK if choice.fallback else serving_state, choice.unused_workers)
            self.exporter.export_head(self.record, head)
            if not head.is_ready:
                continue
            choice = self._update_handshakes(head, choice)
            if choice.fallback and journal.run_safely(
                "the head cannot return from its fallback", partial(self._may_return, head, choice)
            ):
                self.record.log(f"worker {choice.fallback.without} is back: restarting llama-server with all workers")
                self._stop(head)
                return server.Fault("the worker is back", is_return=True)
        return None

    def _update_handshakes(self, head: server.Head, choice: StartChoice) -> StartChoice:
        """Shake hands with workers that were absent when a router was started and that no model uses."""
        clock = time.monotonic()
        used_workers = {endpoint for watched_server in head.servers().values() for endpoint in watched_server.endpoints}
        absent_workers = [endpoint for endpoint in _absent_workers(choice.answers) if endpoint not in used_workers]
        if not absent_workers or clock - self.last_handshake_time < RETURN_POLL_SECONDS:
            return choice
        self.last_handshake_time = clock
        answers = self._probe(absent_workers)
        for endpoint in answers.keys() - set(_absent_workers(answers)):
            self.record.log(f"worker {endpoint} is back")
        choice = choice._replace(answers={**choice.answers, **answers})
        write_handshakes(self.settings.state_folder, choice.answers)
        return choice

    def _may_return(self, head: server.Head, choice: StartChoice) -> bool:
        """Return whether all workers of the full plan have answered for long enough and no client waits. Do not ask workers in use."""
        clock = time.monotonic()
        if clock - self.last_handshake_time >= RETURN_POLL_SECONDS:
            self.last_handshake_time = clock
            unused_workers = [endpoint for endpoint in self.settings.endpoints if endpoint not in choice.endpoints]
            self.return_timer.seconds("back", not _absent_workers(self._probe(unused_workers)), clock)
        all_answering_since = self.return_timer.start_times.get("back", clock)
        return clock - all_answering_since >= MIN_STABLE_SECONDS and not head.has_clients()


def _absent_workers(answers: Handshakes) -> list[str]:
    return [endpoint for endpoint, answer in answers.items() if answer.state != "ok"]


def run_head(
    argv: Sequence[str],
    settings: HeadSettings,
    metrics_exporter: exporter.Exporter = worker.NO_EXPORTER,
    tunnels: tunnel.Tunnels = tunnel.NO_TUNNELS,
) -> int:
    """Wait for the workers, run llama-server and watch it; return the service's exit status: 0 only after a request to stop."""
    progress.exit_on_signals()
    with suppress(OSError):  # if the folder is still missing, the failed writes report it
        settings.state_folder.mkdir(exist_ok=True)
    write_handshakes(settings.state_folder, {})
    head_run = HeadRun(argv, settings, metrics_exporter, tunnels)
    try:
        head_run.serve(head_run.wait_for_workers())
    except SystemExit:
        metrics_exporter.stop()
        raise
    return 1


def serve_page(endpoint: str, argv: Sequence[str], metrics_exporter: exporter.Exporter) -> None:
    """Serve the page with llama-server's keys and certificate, unless the keys cannot be read.

    :param endpoint: ADDRESS:PORT.
    :param argv: command line of llama-server.
    """
    option_values = dict(zip(argv, argv[1:]))
    key_file = option_values.get(server.KEY_FILE_OPTION)
    keys = journal.run_safely("the page is not served", lambda: server.keys_of(Path(key_file))) if key_file else []
    if key_file and not keys:
        journal.log(f"the page is not served: {key_file} contains no key")
        return
    address, port = endpoint.rsplit(":", 1)
    tls_files = option_values.get("--ssl-cert-file", ""), option_values.get("--ssl-key-file", "")
    host = socket.gethostname()
    description = metrics_exporter.description
    host_names = {host, host.partition(".")[0], description.host if description else host}
    access = page.PageAccess(address, int(port), keys or (), *tls_files, tuple(host_names))
    chat_page_port = chat_port(argv)
    page.start_server(access, lambda: page.render(metrics_exporter.snapshot, time.time(), chat_page_port))


def chat_port(argv: Sequence[str]) -> str:
    """Return the port of llama-server's chat page; empty if the page is off, or the release has no page."""
    has_chat_page = journal.read_back(Path(argv[0]).parent.parent / RELEASE_RECORD_FILE, lambda record: record["page"])
    is_chat_off = not has_chat_page or {"--no-ui", "--no-webui", "--webui"}.intersection(argv)
    return "" if is_chat_off else dict(zip(argv, argv[1:])).get(server.PORT_OPTION, "")


class ProgramHandler(socketserver.StreamRequestHandler):
    """Serves a connection of a proof. A line with argv, environment and log path starts a program, whose exit status is the answer. The program is
    stopped when the client disconnects. A client that sends nothing keeps the launcher alive."""

    def handle(self) -> None:
        line = self.rfile.readline()
        if not line:
            return
        argv, environment, log_path = json.loads(line)
        with open(log_path, "wb") as log:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(argv, env=environment, preexec_fn=progress.die_with_parent, **streams)
        while process.poll() is None and not select.select([self.connection], [], [], 0.1)[0]:
            pass
        progress.stop_process(process, PROOF_STOP_SECONDS)
        with suppress(OSError):
            self.wfile.write(str(process.returncode).encode())


def run_programs(socket_path: Path, tunnels: tunnel.Tunnels) -> int:
    """Run the programs of a proof with low priority. The proof connects to this socket."""
    progress.exit_on_signals()
    with suppress(OSError):  # a sandbox may forbid it; its unit sets the priority
        os.setpriority(os.PRIO_PROCESS, 0, PROOF_NICENESS)
    with suppress(FileNotFoundError):
        socket_path.unlink()
    idle_seconds = 0
    with socketserver.ThreadingUnixStreamServer(str(socket_path), ProgramHandler) as socket_server:
        socket_server.timeout, socket_server.daemon_threads = 1.0, True
        while idle_seconds < PROOF_IDLE_SECONDS:
            socket_server.handle_request()
            tunnels.maintain()
            idle_seconds = 0 if threading.active_count() > 1 else idle_seconds + 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs llama.cpp's programs as services.")
    subparsers = parser.add_subparsers(dest="command", required=True)
    head_parser = subparsers.add_parser("head", help="wait for the workers, then run and monitor llama-server")
    head_parser.add_argument("--worker", action="append", default=[], dest="endpoints", help="ADDRESS:PORT of a worker")
    head_parser.add_argument("--protocol", help="RPC protocol version of this head")
    head_parser.add_argument("--url", required=True, help="address of llama-server")
    head_parser.add_argument(
        "--state", dest="state_folder", required=True, type=Path, help="folder for this run's handshake results and log"
    )
    head_parser.add_argument("--fallbacks", dest="fallbacks_path", type=Path, help="file with the fallbacks")
    head_parser.add_argument("--fallback-after", type=float, default=60.0, help="seconds to wait for an absent worker")
    head_parser.add_argument(
        "--silence", dest="silence_s", type=float, default=server.MAX_SILENCE_S, help="maximum seconds without progress"
    )
    head_parser.add_argument("--conversations", type=int, nargs=4, default=(), help="settings for saved conversations")
    head_parser.add_argument("--router", dest="is_router", action="store_true", help="run one process for each model")
    head_parser.add_argument("--page", default="", help="ADDRESS:PORT of the status page")
    worker_parser = subparsers.add_parser("worker", help="run and monitor a worker, and limit its tensor cache")
    worker_parser.add_argument("--port", default="", help="port of the worker (required for monitoring it)")
    worker_parser.add_argument("--cache", type=Path, help="folder of the tensor cache")
    worker_parser.add_argument("--limit-mib", type=int, default=0, help="size limit of the cache")
    worker_parser.add_argument("--size", type=int, action="append", default=[], help="size of a tensor in the cache")
    for subparser in (head_parser, worker_parser):
        subparser.add_argument("--metrics", nargs=2, help="file that describes services, and the name of this service")
    client_parser = subparsers.add_parser("client", help="run a program through the head's tunnels")
    proof_parser = subparsers.add_parser("prove", help="run the programs that a proof requests through a socket")
    for subparser in (head_parser, worker_parser, client_parser, proof_parser):
        subparser.add_argument("--tunnel", action="append", default=[], help="ends of a tunnel, as ACCEPT=CONNECT")
        subparser.add_argument("--tunnel-keys", type=Path, default=Path(), help="folder with the tunnel keys")
        subparser.add_argument("argv", nargs="+", help="the program and its arguments, after --")
    options = parser.parse_args()
    tunnels_to_run = tunnel.parse_tunnels(options.tunnel, options.tunnel_keys, is_head_end=options.command != "worker")
    with tunnel.Tunnels(tunnels_to_run) as tunnels:
        return _run_command(options, tunnels)


def _run_command(options: argparse.Namespace, tunnels: tunnel.Tunnels) -> int:
    if options.command == "client":
        return tunnel.run_through_tunnels(options.argv, tunnels)
    if options.command == "prove":
        return run_programs(Path(options.argv[0]), tunnels)
    page_endpoint = options.page if options.command == "head" else ""
    metrics_exporter = worker.NO_EXPORTER
    if options.metrics:
        metrics_exporter = exporter.Exporter(Path(options.metrics[0]), options.metrics[1])
    if options.command == "worker":
        limit_bytes = options.limit_mib * rpc.MIB
        return worker.run_worker(
            options.argv, options.cache, limit_bytes, options.port, options.size, metrics_exporter, tunnels
        )
    if page_endpoint:
        serve_page(page_endpoint, options.argv, metrics_exporter)
    excluded_options = ("command", "argv", "page", "metrics", "tunnel", "tunnel_keys")
    settings = HeadSettings(**{name: value for name, value in vars(options).items() if name not in excluded_options})
    return run_head(options.argv, settings, metrics_exporter, tunnels)


if __name__ == "__main__":
    raise SystemExit(main())

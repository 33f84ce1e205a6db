# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The launcher of services, the one program of this collection that stays on a host. It works without a controller.

For the head it waits until every worker shakes hands, writes down what they said, starts llama-server, keeps the log of this
start, ends llama-server when a worker is lost or nothing moves, and writes down how it ended; the service manager then starts it anew. Where
a worker stays away, it serves on a fallback. It ends a worker that is stopped or does not notice that its client has gone. A worker's cache of
tensors, from which llama.cpp never removes anything, it keeps below its limit. It is installed beside copies of the
other modules of this folder and of rpc.py, and needs nothing but Python 3.9.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

try:
    from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import (
        exporter,
        journal,
        page,
        page_server,
        progress,
        server,
        serving,
        tunnel,
        worker,
    )
    from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
except ImportError:  # as installed on a host
    exporter, page, page_server, progress, rpc, journal, serving, server, tunnel, worker = (
        importlib.import_module(name)
        for name in (
            "exporter",
            "page",
            "page_server",
            "progress",
            "rpc",
            "journal",
            "serving",
            "server",
            "tunnel",
            "worker",
        )
    )

HANDSHAKES = "handshakes.json"
START_LOG = server.START_LOG
ENDS = "ends.json"
ENDS_BYTES = 64 * 1024
"""More than the last bytes of a log take as JSON."""
LAST_LINES = 20
PORT_TAKEN = "couldn't bind HTTP server socket"
"""What llama-server ends with (tools/server/server.cpp of build 6170, server-http.cpp of 11063)."""
CLOSED_SECONDS = 60.0
"""So long Linux keeps the port of a connection that a server has closed (TIME_WAIT). Meanwhile only a server that sets the same option as the
one before can listen there: SO_REUSEPORT in builds like 6170, SO_REUSEADDR in later ones (#21056)."""
FRESH_SECONDS = 30.0
"""So long the handshake of a worker that nobody uses is believed."""
ASK_AGAIN_SECONDS = 0.25
RETURN_EVERY, RETURN_TIMEOUT = 5.0, 2.0
"""So often workers that are away are asked whether they are back."""
ASLEEP_EVERY = 30.0
"""So often the workers of a llama-server that sleeps are asked."""
Answers = Mapping[str, rpc.Handshake]
"""Endpoint of a worker → its last answer."""


def ask_worker(endpoint: str, protocol: str | None, timeout: float) -> rpc.Handshake:
    """Nobody may use the worker."""
    journal.alive()
    address, port = endpoint.rsplit(":", 1)
    return rpc.probe(address, int(port), timeout, protocol)


def shake_hands(
    endpoints: list[str],
    protocol: str | None,
    timeout: float,
    note: Callable[[Answers], object],
    pause: float = 1.0,
    enough: Callable[[Answers], object] = lambda answers: False,
    tunnels: tunnel.Tunnels = tunnel.NONE,
) -> Answers:
    """Waits until every worker answers; returns their answers.

    A worker whose release does not fit is waited for like one that is not there yet: it is probably being replaced.

    :param note: called with the last answer of each endpoint whenever one of them has changed.
    :param enough: called with the same after each round; ends the wait where it says so.
    """
    answers: dict[str, rpc.Handshake] = {}
    asked: dict[str, float] = {}
    while True:
        journal.alive()
        for endpoint in endpoints:
            before = answers[endpoint].state if endpoint in answers else ""
            if before == "ok" and time.monotonic() - asked[endpoint] < FRESH_SECONDS:
                continue
            answers[endpoint] = ask_worker(endpoint, protocol, timeout)
            asked[endpoint] = time.monotonic()
            state, detail, *_rest = answers[endpoint]
            if state not in ("ok", "refused", before):
                detail = tunnels.explained(endpoint, detail)
                answers[endpoint] = answers[endpoint]._replace(detail=detail)
            if state != before:
                note(answers)
                if state != "ok":
                    journal.say(f"waiting for worker {endpoint}: {state}, {detail}")
        if all(answer.state == "ok" for answer in answers.values()) or enough(answers):
            return answers
        time.sleep(pause)


def write_handshakes(state: Path, answers: Answers) -> bool:
    """Older answers would be believed in place of these, so they go where these cannot be written; False then."""
    path = state / HANDSHAKES
    workers = {
        endpoint: {**answer._asdict(), "devices": [device._asdict() for device in answer.devices]}
        for endpoint, answer in answers.items()
    }
    written = journal.write_state(path, {"time": int(time.time()), "process": os.getpid(), "workers": workers})
    if not written:
        with suppress(OSError):
            path.unlink()
    return written


def last_log(state: Path) -> list[str]:
    """The last lines of llama-server's log before its last end; none where they are not known."""
    try:
        lines = serving.read_json(state / ENDS, ENDS_BYTES)["log"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return list(map(str, lines)) if isinstance(lines, list) else []


def held_by_closed_connections(port: int) -> bool:
    """Whether Linux keeps closed connections of a port on which nobody listens."""
    try:
        links = progress.links_of(progress.TCP_TABLE.read_text())
    except (OSError, ValueError, IndexError):
        return False
    states = {link.state for link in links if link.local.endswith(f":{port}")}
    return progress.TIME_WAIT in states and progress.LISTEN not in states


def write_end(state: Path, how: str, said: str) -> None:
    """Counts the ends of llama-server, over all starts of the launcher, with how the last one came and the last lines of its log."""
    try:
        number = int(serving.read_json(state / ENDS, ENDS_BYTES)["number"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        number = 0
    journal.write_state(state / ENDS, {"number": number + 1, "how": how, "log": said.splitlines()[-LAST_LINES:]})


class Settings(NamedTuple):
    """What an operator may set about healing."""

    fallbacks: Path | None = None
    fallback_after: float = 60.0
    """Seconds for which a worker is waited for."""
    silence: float = server.SILENCE_SECONDS
    router: bool = False
    """Whether the program is to start others, one for each model."""


DEFAULTS = Settings()


class Chosen(NamedTuple):
    """With what llama-server is started."""

    argv: list[str]
    endpoints: list[str]
    answers: Answers
    fallback: serving.Fallback | None = None

    @property
    def without(self) -> tuple[str, ...]:
        return (self.fallback.name,) if self.fallback else ()


class Start:
    """One start of the launcher of a head: waits for the workers, starts llama-server, and watches it."""

    def __init__(
        self,
        chosen: Chosen,
        url: str,
        state: Path,
        protocol: str | None,
        timeout: float,
        pause: float,
        settings: Settings,
        exports: exporter.Exporter = worker.NOT_EXPORTED,
        tunnels: tunnel.Tunnels = tunnel.NONE,
    ) -> None:
        self.full = chosen
        self.tunnels = tunnels
        self.url = url
        self.state = state
        self.protocol = protocol
        self.timeout = timeout
        self.pause = pause
        self.settings = settings
        self.record = serving.Record(state, journal.write_state, journal.say)
        self.exports = exports
        self.back = progress.Lasting()
        self.asked = self.asked_asleep = 0.0
        self.away: set[str] = set()
        """Workers that did not answer when llama-server slept and they were asked last."""

    def _set(self, state: str, without: Sequence[str] = (), waiting_for: Sequence[str] = ()) -> None:
        """Of a head whose llama-server does not run."""
        self.record.set(state, without, waiting_for)
        self.exports.of_head(self.record)

    def wait(self) -> None:
        """Waits until another start of llama-server is due."""
        record = self.record
        left = serving.wait_before_start(record.kept, time.time())
        if left >= 1:
            journal.say(f"llama-server ended {record.kept.failures} times in a row: the next start is in {left:.0f} s")
        until = time.monotonic() + left
        while time.monotonic() < until:
            journal.alive()
            self._set(serving.WAITING)
            time.sleep(min(self.pause, max(0.0, until - time.monotonic())))
        if record.kept.failures and any(PORT_TAKEN in line for line in last_log(self.state)):
            self._wait_for_port()

    def _wait_for_port(self) -> None:
        port = urlsplit(self.url).port or 0
        if not held_by_closed_connections(port):
            return
        self.record.note(
            f"port {port} is kept by closed connections of the server before: llama-server starts when it is free, within a minute"
        )
        until = time.monotonic() + CLOSED_SECONDS + self.pause
        while held_by_closed_connections(port) and time.monotonic() < until:
            journal.alive()
            self._set(serving.WAITING)
            time.sleep(self.pause)

    def choose(self) -> Chosen:
        """The full plan when all of its workers shook hands, a fallback when one of them stays away. A router is started without them: models that take
        turns may not need them."""
        began = time.monotonic()
        patience = 0.0 if self.record.served_on_fallback else self.settings.fallback_after
        found: list[Chosen] = []

        def note(answers: Answers) -> None:
            write_handshakes(self.state, answers)
            waiting = tuple(endpoint for endpoint, answer in answers.items() if answer.state != "ok")
            self._set(serving.WAITING, waiting_for=waiting)

        def enough(answers: Answers) -> bool:
            self.tunnels.keep()
            self._set(serving.WAITING, waiting_for=self.record.waiting_for)
            waited = time.monotonic() - began
            if self.settings.fallbacks and waited >= patience:
                found.extend(self._fallback(self.settings.fallbacks, answers))
            return bool(found) or (self.settings.router and waited >= patience)

        pause = min(self.pause, ASK_AGAIN_SECONDS)
        answers = shake_hands(self.full.endpoints, self.protocol, self.timeout, note, pause, enough, self.tunnels)
        away = [endpoint for endpoint, answer in answers.items() if answer.state != "ok"]
        if away and not found:
            self.record.note(f"worker {', '.join(away)} stays away: models that use it fail until it is back")
        return found[0] if found else self.full._replace(answers=answers)

    def _fallback(self, path: Path, answers: Answers) -> list[Chosen]:
        """The fallback that fits now, if there is one."""
        try:
            fallbacks = serving.read_fallbacks(path)
        except (OSError, ValueError) as error:
            journal.say_once(f"{path} gives no fallback: {error}")
            return []
        others = {worker for fallback in fallbacks for worker in fallback.workers} - set(answers)
        asked = {worker: ask_worker(worker, self.protocol, RETURN_TIMEOUT) for worker in sorted(others)}
        answers = {**answers, **asked}
        away = [endpoint for endpoint, answer in answers.items() if answer.state != "ok"]
        fallback = serving.fitting(fallbacks, away, {endpoint for endpoint in answers if endpoint not in away})
        if fallback is None:
            return []
        workers = list(fallback.workers)
        shaken = {worker: answers[worker] for worker in workers}
        self.record.note(f"worker {', '.join(away)} stays away: llama-server is started without {fallback.name}")
        return [Chosen(list(fallback.argv), workers, shaken, fallback)]

    def serve(self, chosen: Chosen) -> None:
        """Runs llama-server until it ends."""
        record = self.record
        silence = self.settings.silence * 2 ** min(len(record.kept.silences), 3)
        record.set(serving.LOADING, chosen.without)
        try:
            if self.settings.router:
                head: server.Head = server.Router(chosen.argv, self.url, self.state, silence)
            else:
                head = server.Head(chosen.argv, chosen.endpoints, self.url, self.state, silence)
        except (OSError, ValueError) as error:
            write_end(self.state, f"before it began, {error}", "")
            record.note(f"llama-server could not be started: {error}")
            record.ended()
            self._count("start_failed")
            return
        self.exports.begins()
        head.tunnels = self.tunnels
        try:
            fault = self._watch(head, chosen)
        except SystemExit:
            head.stop()
            head.relay.join(timeout=5)
            raise
        head.kill()
        head.relay.join(timeout=5)
        if fault and fault.wanted:
            record.returned()
            record.set(serving.WAITING)
            self._count(fault.cause)
            return
        how = fault.how if fault else progress.ended_how(head.process.returncode)
        if not fault:
            record.note(f"llama-server ended {how}: it is started again")
        record.ended(silent=bool(fault and fault.silent))
        self._count(fault.cause if fault else "ended")
        write_end(self.state, how, head.last.decode("utf-8", "replace"))

    def _count(self, cause: str) -> None:
        self.exports.ended(cause)
        self.exports.of_head(self.record)

    def _watch(self, head: server.Head, chosen: Chosen) -> server.Fault | None:
        """Until llama-server ends, or has to; why, where it did not end by itself."""
        recorded = False
        while head.process.poll() is None:
            journal.alive()
            self.tunnels.keep()
            recorded = recorded or write_handshakes(self.state, chosen.answers)
            with suppress(subprocess.TimeoutExpired):
                head.process.wait(self.pause)
                continue
            fault = head.fault() or self._lost_asleep(head, chosen)
            if fault and fault.model:
                self.record.note(f"{fault.saw}: model {fault.model} is ended, and the next question loads it again")
                self.exports.count(fault.cause)
            elif fault:
                self.record.note(f"{fault.saw}: llama-server is started again")
                return fault
            if head.load:
                self.record.set(serving.LOADING, chosen.without)
                self.record.loading(head.load._asdict())
            elif head.ready:
                serves = serving.ASLEEP if head.asleep else serving.SERVING
                self.record.set(serving.FALLBACK if chosen.fallback else serves, chosen.without)
            self.exports.of_head(self.record, head)
            if not head.ready:
                continue
            self.record.served(time.monotonic())
            chosen = self._shake_hands_again(head, chosen)
            if chosen.fallback and self._may_return(head, chosen):
                self.record.note(f"worker {chosen.fallback.without} is back: llama-server is started with all workers")
                head.stop()
                return server.Fault("the worker is back", wanted=True)
        return None

    def _shake_hands_again(self, head: server.Head, chosen: Chosen) -> Chosen:
        """With what workers say now that were away when a router was started, and that no model holds."""
        now = time.monotonic()
        held = {endpoint for watched in head.models().values() for endpoint in watched.endpoints}
        away = [name for name, answer in chosen.answers.items() if answer.state != "ok" and name not in held]
        if not away or now - self.asked < RETURN_EVERY:
            return chosen
        self.asked = now
        answers = {name: ask_worker(name, self.protocol, RETURN_TIMEOUT) for name in away}
        for name in [name for name, answer in answers.items() if answer.state == "ok"]:
            self.record.note(f"worker {name} is back")
        chosen = chosen._replace(answers={**chosen.answers, **answers})
        write_handshakes(self.state, chosen.answers)
        return chosen

    def _lost_asleep(self, head: server.Head, chosen: Chosen) -> server.Fault | None:
        """Workers that twice in a row did not answer while llama-server sleeps, and so holds none: a request that wakes it would abort it. A
        router goes on."""
        now = time.monotonic()
        if not head.asleep or head.props or self.settings.router:
            self.away = set()
        elif now - self.asked_asleep >= (RETURN_EVERY if self.away else ASLEEP_EVERY):
            answers = {endpoint: ask_worker(endpoint, self.protocol, RETURN_TIMEOUT) for endpoint in chosen.endpoints}
            before, self.asked_asleep = self.away, now
            self.away = {endpoint for endpoint, answer in answers.items() if answer.state != "ok"}
            if lost := sorted(before & self.away):
                return server.Fault(f"lost worker {', '.join(lost)} while llama-server slept", lost)
        return None

    def _may_return(self, head: server.Head, chosen: Chosen) -> bool:
        """Whether all workers of the full plan have answered for long enough and nobody waits for an answer. Workers in use are not asked."""
        now = time.monotonic()
        if now - self.asked >= RETURN_EVERY:
            self.asked = now
            away = [endpoint for endpoint in self.full.endpoints if endpoint not in chosen.endpoints]
            answers = [ask_worker(endpoint, self.protocol, RETURN_TIMEOUT) for endpoint in away]
            self.back.seconds("back", all(answer.state == "ok" for answer in answers), now)
        since = self.back.since.get("back", now)
        return now - since >= self.record.steady and not head.busy()


def run(
    argv: list[str],
    endpoints: list[str],
    url: str,
    state: Path,
    protocol: str | None,
    timeout: float,
    pause: float = 1.0,
    settings: Settings = DEFAULTS,
    exports: exporter.Exporter = worker.NOT_EXPORTED,
    tunnels: tunnel.Tunnels = tunnel.NONE,
) -> int:
    """Waits, starts and watches; returns the exit status of the service: 0 only when it was asked to stop."""
    progress.end_when_asked()
    with suppress(OSError):  # a folder that is missing still is said by what cannot be written there
        state.mkdir(exist_ok=True)
    write_handshakes(state, {})
    start = Start(Chosen(argv, endpoints, {}), url, state, protocol, timeout, pause, settings, exports, tunnels)
    try:
        start.wait()
        start.serve(start.choose())
        return 1
    except SystemExit:
        exports.stop()
        raise


def open_page(place: str, argv: list[str], exports: exporter.Exporter) -> None:
    """Has the page served, behind the keys and the certificate of llama-server; not at all where these cannot be read.

    :param place: ADDRESS:PORT.
    :param argv: of llama-server.
    """

    def value(option: str) -> str:
        return next((after for word, after in zip(argv, argv[1:]) if word == option), "")

    address, port = place.rsplit(":", 1)
    try:
        file = value(server.API_KEYS)
        known = server.keys_of(Path(file)) if file else []
        if file and not known:
            raise ValueError(f"{file} has no key")
    except (OSError, ValueError) as error:
        journal.say(f"no page is served: {error}")
        return
    tls = value("--ssl-cert-file"), value("--ssl-key-file")
    page_server.start(page_server.Door(address, int(port), known, *tls), lambda: page.of(exports.shown, time.time()))


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
    head.add_argument("--fallbacks", type=Path, metavar="FILE", help="what to serve on when a worker stays away")
    head.add_argument("--fallback-after", type=float, default=60.0, metavar="SECONDS", help="when it stays away")
    head.add_argument(
        "--silence",
        type=float,
        default=server.SILENCE_SECONDS,
        metavar="SECONDS",
        help="when a server that works has to move",
    )
    head.add_argument("--router", action="store_true", help="the program starts others, one for each model")
    head.add_argument("--page", default="", metavar="ADDRESS:PORT", help="where it shows how the cluster is")
    lender = parts.add_parser("worker", help="run a worker, watch it, and bound its cache of tensors")
    lender.add_argument("--port", default="", help="where it listens; without it the worker is not watched")
    lender.add_argument("--cache", type=Path, help="folder of the cache")
    lender.add_argument("--limit-mib", type=int, default=0, help="what the cache may hold")
    lender.add_argument(
        "--size", type=int, action="append", default=[], metavar="BYTES", help="of a tensor that the cache may hold"
    )
    for part in (head, lender):
        part.add_argument(
            "--metrics",
            nargs=2,
            metavar=("FILE", "SERVICE"),
            help="what describes the metrics that it writes, and its name",
        )
    client = parts.add_parser("client", help="run a program that needs the tunnels of a head")
    for part in (head, lender, client):
        part.add_argument(
            "--tunnel", action="append", default=[], metavar="ACCEPT=CONNECT", help="ends, ADDRESS:PORT each"
        )
        part.add_argument(
            "--tunnel-keys", type=Path, metavar="FOLDER", help="of tunnels, which another launcher keeps without it"
        )
        part.add_argument("argv", nargs="+", help="the program and its arguments, after --")
    options = parser.parse_args()
    keys = options.tunnel_keys
    ends = tunnel.of_words(options.tunnel, keys or Path(), client=options.part != "worker")
    with tunnel.Tunnels(ends, keeps=keys is not None) as tunnels:
        return _run_part(options, tunnels)


def _run_part(options: argparse.Namespace, tunnels: tunnel.Tunnels) -> int:
    if options.part == "client":
        return tunnel.run(options.argv, tunnels)
    place = options.page if options.part == "head" else ""
    exports = worker.NOT_EXPORTED
    if options.metrics:
        exports = exporter.Exporter(Path(options.metrics[0]), options.metrics[1], bool(place))
    if options.part == "worker":
        return worker.run(
            options.argv,
            options.cache,
            options.limit_mib * rpc.MIB,
            port=options.port,
            sizes=options.size,
            exports=exports,
            tunnels=tunnels,
        )
    settings = Settings(options.fallbacks, options.fallback_after, options.silence, options.router)
    if place:
        open_page(place, options.argv, exports)
    return run(
        options.argv,
        options.worker,
        options.url,
        options.state,
        options.protocol,
        options.timeout,
        settings=settings,
        exports=exports,
        tunnels=tunnels,
    )


if __name__ == "__main__":
    raise SystemExit(main())

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The launcher of services, the one program of this collection that stays on a host. It works without a controller.

For the head it waits until every worker shakes hands, writes down what they said, starts llama-server, keeps the log of this start, ends llama-server
when a worker is lost or nothing moves, writes down how it ended, and ends: the service manager starts it again. Where a worker stays away, it serves
on a fallback. It ends a worker that is stopped or does not notice that its client has gone. It keeps a worker's cache of tensors, from which
llama.cpp never removes anything, below its limit. It is installed beside copies of the other modules of this folder, rpc.py, words.py and units.py,
and needs nothing but Python 3.9.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

PACKAGES = ["ansible_collections", "llamacpp", "cluster", "plugins", "module_utils"]
if not __package__:  # as installed on a host, where all modules lie in one folder
    for name in [
        *itertools.accumulate(PACKAGES, "{}.{}".format),
        *(".".join((*PACKAGES, each)) for each in ("common", "launcher", "llamacpp")),
    ]:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [os.path.dirname(os.path.abspath(__file__))]

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import (  # noqa: E402  # only now can these be found there
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc, words  # noqa: E402  # the same

HANDSHAKES = "handshakes.json"
ENDS = "ends.json"
LAST_LINES = 20
FRESH_SECONDS = 30.0
"""So long the handshake of a worker that nobody uses is believed."""
ASK_AGAIN_SECONDS, OFTEN_SECONDS = 0.25, 10.0
"""So often a worker is asked at first; stunnel logs each time that it is away."""
RETURN_EVERY, RETURN_TIMEOUT = 5.0, 2.0
STEADY_SECONDS = 30.0
"""So long a worker has to answer before the head returns to it from a fallback."""
NOT_ASKED = rpc.Handshake("", "")
Answers = Mapping[str, rpc.Handshake]
"""Endpoint of a worker → its last answer."""


def ask_worker(endpoint: str, protocol: str | None, timeout: float) -> rpc.Handshake:
    """Nobody may use the worker."""
    journal.alive()
    return rpc.probe(*rpc.place_of(endpoint), timeout, protocol)


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


def write_end(state: Path, how: str, said: str) -> None:
    """Counts the ends of llama-server, over all starts of the launcher, with how the last one came and the last lines of its log."""
    number = journal.read_back(state / ENDS, lambda told: int(told["number"])) or 0
    journal.write_state(state / ENDS, {"number": number + 1, "how": how, "log": said.splitlines()[-LAST_LINES:]})


class Settings(NamedTuple):
    """How a head is served."""

    endpoints: Sequence[str]
    """Of the workers of the plan."""
    url: str
    """Where llama-server answers."""
    state: Path
    """Folder for what the launcher writes down."""
    protocol: str | None = None
    timeout: float = 5.0
    """Seconds for one handshake."""
    pause: float = 1.0
    """Seconds between two looks at llama-server."""
    fallbacks: Path | None = None
    fallback_after: float = 60.0
    """Seconds for which a worker is waited for."""
    silence: float = server.SILENCE_SECONDS
    router: bool = False
    """Whether llama-server starts others, one for each model."""


class Chosen(NamedTuple):
    """With what llama-server is started."""

    argv: Sequence[str]
    endpoints: Sequence[str]
    answers: Answers
    fallback: serving.Fallback | None = None

    @property
    def without(self) -> tuple[str, ...]:
        return (self.fallback.name,) if self.fallback else ()


class Start:
    """One start of the launcher of a head: waits for the workers, starts llama-server, and watches it."""

    def __init__(
        self,
        argv: Sequence[str],
        settings: Settings,
        exports: exporter.Exporter = worker.NOT_EXPORTED,
        tunnels: tunnel.Tunnels = tunnel.NONE,
    ) -> None:
        self.argv = argv
        self.settings = settings
        self.exports = exports
        self.tunnels = tunnels
        self.record = serving.Record(settings.state)
        self.back = progress.Lasting()
        self.asked = 0.0
        """When workers that are away were asked last."""

    def choose(self) -> Chosen:
        """The full plan when all of its workers shook hands, or a fallback when one of them stays away. A router is started without them: other models may
        not need them. A worker whose release does not fit is waited for like one that is not there yet: it is probably being replaced."""
        settings, began = self.settings, time.monotonic()
        answers: dict[str, rpc.Handshake] = {}
        asked: dict[str, float] = {}
        while True:
            journal.alive()
            self.tunnels.keep()
            for endpoint in settings.endpoints:
                before = answers.get(endpoint, NOT_ASKED).state
                if before == "ok" and time.monotonic() - asked[endpoint] < FRESH_SECONDS:
                    continue
                answers[endpoint] = self._greet(endpoint, before)
                asked[endpoint] = time.monotonic()
                if answers[endpoint].state != before:
                    write_handshakes(settings.state, answers)
                self.record.set(serving.WAITING, waiting_for=tuple(_away(answers)))
                self.exports.of_head(self.record)
            away = _away(answers)
            if away and time.monotonic() - began >= settings.fallback_after:
                if settings.fallbacks and (found := self._fallback(settings.fallbacks, answers)):
                    return found
                if settings.router:
                    self.record.note(f"worker {', '.join(away)} stays away: models that use it fail until it is back")
                    away = []
            if not away:
                return Chosen(self.argv, settings.endpoints, answers)
            often = time.monotonic() - began < OFTEN_SECONDS
            time.sleep(min(settings.pause, ASK_AGAIN_SECONDS) if often else settings.pause)

    def _greet(self, endpoint: str, before: str) -> rpc.Handshake:
        """Asks a worker; says what keeps the head from it, where that has changed."""
        answer = ask_worker(endpoint, self.settings.protocol, self.settings.timeout)
        if answer.state not in ("ok", "refused", before):
            answer = answer._replace(detail=self.tunnels.explained(endpoint, answer.detail))
        if answer.state not in ("ok", before):
            journal.say(f"waiting for worker {endpoint}: {answer.state}, {answer.detail}")
        return answer

    def _ask(self, endpoints: Sequence[str]) -> dict[str, rpc.Handshake]:
        return {endpoint: ask_worker(endpoint, self.settings.protocol, RETURN_TIMEOUT) for endpoint in endpoints}

    def _fallback(self, path: Path, answers: Answers) -> Chosen | None:
        """The fallback that fits now, if there is one."""
        fallbacks = serving.read_fallbacks(path)
        if fallbacks is None:
            journal.say_once(f"{path} gives no fallback: run site.yml")
            return None
        others = {worker for fallback in fallbacks for worker in fallback.workers} - set(answers)
        answers = {**answers, **self._ask(sorted(others))}
        away = _away(answers)
        fitting = (one for one in fallbacks if one.without in away and not {*one.workers} & {*away})
        fallback = next(fitting, None)
        if fallback is None:
            return None
        self.record.note(f"worker {', '.join(away)} stays away: llama-server is started without {fallback.name}")
        used = {worker: answers[worker] for worker in fallback.workers}
        return Chosen(fallback.argv, fallback.workers, used, fallback)

    def serve(self, chosen: Chosen) -> None:
        """Runs llama-server until it ends."""
        record, settings = self.record, self.settings
        record.set(serving.LOADING, chosen.without)
        argv = words.command_line_of_build(chosen.argv)
        try:
            if settings.router:
                head: server.Head = server.Router(argv, settings.url, settings.state, settings.silence)
            else:
                head = server.Head(argv, list(chosen.endpoints), settings.url, settings.state, settings.silence)
        except (OSError, ValueError) as error:
            record.note(f"llama-server could not be started: {error}")
            self._ended("start_failed", f"before it began, {error}", "")
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
        if fault and fault.returns:
            record.ended()
            self.exports.ended(fault.cause)
            return
        how = fault.how if fault else progress.ended_how(head.process.returncode)
        if not fault:
            record.note(f"llama-server ended {how}: it is started again")
        self._ended(fault.cause if fault else "ended", how, head.last.decode("utf-8", "replace"))

    def _ended(self, cause: str, how: str, said: str) -> None:
        write_end(self.settings.state, how, said)
        self.record.ended()
        self.exports.ended(cause)
        self.exports.of_head(self.record)

    def _watch(self, head: server.Head, chosen: Chosen) -> server.Fault | None:
        """Until llama-server ends, or has to; why, where it did not end by itself."""
        recorded = False
        while head.process.poll() is None:
            journal.alive()
            self.tunnels.keep()
            recorded = recorded or write_handshakes(self.settings.state, chosen.answers)
            with suppress(subprocess.TimeoutExpired):
                head.process.wait(self.settings.pause)
                continue
            fault = journal.spared("llama-server is not watched", head.fault)
            if fault and fault.model:
                self.record.note(f"{fault.saw}: model {fault.model} is ended, and the next question loads it again")
                self.exports.count(fault.cause)
            elif fault:
                self.record.note(f"{fault.saw}: llama-server is started again")
                return fault
            if head.load:
                self.record.set(serving.LOADING, chosen.without, load=head.load)
            elif head.ready:
                serves = serving.ASLEEP if head.asleep else serving.SERVING
                self.record.set(serving.FALLBACK if chosen.fallback else serves, chosen.without)
            self.exports.of_head(self.record, head)
            if not head.ready:
                continue
            chosen = self._shake_hands_again(head, chosen)
            if chosen.fallback and journal.spared("no return is tried", partial(self._may_return, head, chosen)):
                self.record.note(f"worker {chosen.fallback.without} is back: llama-server is started with all workers")
                head.stop()
                return server.Fault("the worker is back", returns=True)
        return None

    def _shake_hands_again(self, head: server.Head, chosen: Chosen) -> Chosen:
        """With what workers say now that were away when a router was started, and that no model holds."""
        now = time.monotonic()
        held = {endpoint for watched in head.models().values() for endpoint in watched.endpoints}
        away = [endpoint for endpoint in _away(chosen.answers) if endpoint not in held]
        if not away or now - self.asked < RETURN_EVERY:
            return chosen
        self.asked = now
        answers = self._ask(away)
        for endpoint in answers.keys() - set(_away(answers)):
            self.record.note(f"worker {endpoint} is back")
        chosen = chosen._replace(answers={**chosen.answers, **answers})
        write_handshakes(self.settings.state, chosen.answers)
        return chosen

    def _may_return(self, head: server.Head, chosen: Chosen) -> bool:
        """Whether all workers of the full plan have answered for long enough and nobody waits for an answer. Workers in use are not asked."""
        now = time.monotonic()
        if now - self.asked >= RETURN_EVERY:
            self.asked = now
            unused = [endpoint for endpoint in self.settings.endpoints if endpoint not in chosen.endpoints]
            self.back.seconds("back", not _away(self._ask(unused)), now)
        since = self.back.since.get("back", now)
        return now - since >= STEADY_SECONDS and not head.busy()


def _away(answers: Answers) -> list[str]:
    return [endpoint for endpoint, answer in answers.items() if answer.state != "ok"]


def run(
    argv: Sequence[str],
    settings: Settings,
    exports: exporter.Exporter = worker.NOT_EXPORTED,
    tunnels: tunnel.Tunnels = tunnel.NONE,
) -> int:
    """Waits, starts and watches; returns the exit status of the service, which only ends with 0 when it is asked to stop."""
    progress.end_when_asked()
    with suppress(OSError):  # a folder that is missing still is said by what cannot be written there
        settings.state.mkdir(exist_ok=True)
    write_handshakes(settings.state, {})
    start = Start(argv, settings, exports, tunnels)
    try:
        start.serve(start.choose())
    except SystemExit:
        exports.stop()
        raise
    return 1


def open_page(place: str, argv: Sequence[str], exports: exporter.Exporter) -> None:
    """Has the page served, behind the keys and the certificate of llama-server; not at all where these cannot be read.

    :param place: ADDRESS:PORT.
    :param argv: of llama-server.
    """
    said = dict(zip(argv, argv[1:]))
    file = said.get(server.API_KEYS)
    known = journal.spared("no page is served", lambda: server.keys_of(Path(file))) if file else []
    if file and not known:
        journal.say(f"no page is served: {file} has no key")
        return
    address, port = place.rsplit(":", 1)
    tls = said.get("--ssl-cert-file", ""), said.get("--ssl-key-file", "")
    host = socket.gethostname()
    own = {host, host.partition(".")[0], exports.told.host if exports.told else host}
    door = page_server.Door(address, int(port), known or (), *tls, tuple(own))
    page_server.start(door, lambda: page.of(exports.shown, time.time()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs llama.cpp's programs as services.")
    parts = parser.add_subparsers(dest="part", required=True)
    head = parts.add_parser("head", help="wait for the workers, then run llama-server and watch it")
    head.add_argument(
        "--worker",
        action="append",
        default=[],
        dest="endpoints",
        metavar="ADDRESS:PORT",
        help="one that must answer first",
    )
    head.add_argument("--protocol", help="RPC protocol that this head speaks")
    head.add_argument("--timeout", type=float, default=5.0, help="seconds for one handshake")
    head.add_argument("--url", required=True, help="where llama-server answers")
    head.add_argument("--state", required=True, type=Path, help="folder for the handshakes and the log of this start")
    head.add_argument("--fallbacks", type=Path, metavar="FILE", help="what to serve on when a worker stays away")
    head.add_argument("--fallback-after", type=float, default=60.0, metavar="SECONDS", help="when it stays away")
    head.add_argument(
        "--silence", type=float, default=server.SILENCE_SECONDS, help="when a server that works has to move"
    )
    head.add_argument("--router", action="store_true", help="llama-server starts others, one for each model")
    head.add_argument("--page", default="", metavar="ADDRESS:PORT", help="where it shows how the cluster is")
    lender = parts.add_parser("worker", help="run a worker, watch it, and bound its cache of tensors")
    lender.add_argument("--port", default="", help="where it listens; without it the worker is not watched")
    lender.add_argument("--cache", type=Path, help="folder of the cache")
    lender.add_argument("--limit-mib", type=int, default=0, help="what the cache may hold")
    lender.add_argument("--size", type=int, action="append", default=[], help="bytes of a tensor that it may hold")
    for part in (head, lender):
        part.add_argument(
            "--metrics", nargs=2, metavar=("FILE", "SERVICE"), help="what describes its metrics, and its name"
        )
    client = parts.add_parser("client", help="run a program that needs the tunnels of a head")
    for part in (head, lender, client):
        part.add_argument(
            "--tunnel", action="append", default=[], metavar="ACCEPT=CONNECT", help="ends, ADDRESS:PORT each"
        )
        part.add_argument(
            "--tunnel-keys", type=Path, default=Path(), metavar="FOLDER", help="with the keys of its tunnels"
        )
        part.add_argument("argv", nargs="+", help="the program and its arguments, after --")
    options = parser.parse_args()
    ends = tunnel.of_words(options.tunnel, options.tunnel_keys, client=options.part != "worker")
    with tunnel.Tunnels(ends) as tunnels:
        return _run_part(options, tunnels)


def _run_part(options: argparse.Namespace, tunnels: tunnel.Tunnels) -> int:
    if options.part == "client":
        return tunnel.run(options.argv, tunnels)
    place = options.page if options.part == "head" else ""
    exports = worker.NOT_EXPORTED
    if options.metrics:
        exports = exporter.Exporter(Path(options.metrics[0]), options.metrics[1])
    if options.part == "worker":
        limit = options.limit_mib * rpc.MIB
        watched = {"port": options.port, "sizes": options.size, "exports": exports, "tunnels": tunnels}
        return worker.run(options.argv, options.cache, limit, **watched)
    if place:
        open_page(place, options.argv, exports)
    others = ("part", "argv", "page", "metrics", "tunnel", "tunnel_keys")
    settings = Settings(**{name: value for name, value in vars(options).items() if name not in others})
    return run(options.argv, settings, exports, tunnels)


if __name__ == "__main__":
    raise SystemExit(main())

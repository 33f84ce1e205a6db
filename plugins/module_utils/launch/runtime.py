# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The launcher of services, the one program of this collection that stays on a host. It works without a controller.

For the head it waits until every worker shakes hands, writes down what they said, starts llama-server, keeps the log of this
start, ends llama-server when a worker is lost or nothing moves, and writes down how it ended; the service manager then starts it anew. Where
a worker stays away, it serves on a fallback. It ends a worker that is stopped or does not notice that its client has gone. A worker's cache of
tensors, from which llama.cpp never removes anything, it keeps below its limit. It is installed beside copies of
rpc.py, progress.py and serving.py, and needs nothing but Python 3.9.

llama-server does not reconnect to a worker, and an idle one does not even notice that a worker died. So on Linux both programs
are looked at once a second (progress.py); elsewhere llama-server ends by itself at the next request.

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
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, cast

try:
    from ansible_collections.llamacpp.cluster.plugins.module_utils.launch import progress, serving
    from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
except ImportError:  # as installed on a host
    progress, serving, rpc = (importlib.import_module(name) for name in ("progress", "serving", "rpc"))

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
ON_LINUX = sys.platform.startswith("linux")
FRESH_SECONDS = 30.0
"""So long the handshake of a worker that nobody uses is believed."""
STOPPED_SECONDS = 5.0
"""Nobody needs a service that a signal has stopped; a debugger's stop is another state."""
UNACKNOWLEDGED = 7
"""Retransmissions: 0.2 + 0.4 + … + 12.8 s, 25 s in a local network, like the keepalive of an idle connection."""
SILENCE_SECONDS = 300.0
"""The slowest prompt on record is 3.14 tokens per second (field notes), so that a batch of 512 tokens, llama.cpp's default, takes 163 s. For that
time a worker computes, and no byte moves."""
HEALTH_EVERY, HEALTH_LOST_SECONDS = 10.0, 60.0
GONE_SECONDS, SAYS_NOTHING_SECONDS, HOLDS_SECONDS = 30.0, 30.0, 60.0
SHORT_TALK = 65536
"""Bytes. A client that has given a worker a part of a model has sent more."""
RETURN_EVERY, RETURN_TIMEOUT = 5.0, 2.0
API_KEYS = "--api-key-file"


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


def ask_worker(endpoint: str, protocol: str | None, timeout: float) -> dict:
    """The answer of rpc.probe. Nobody may use the worker."""
    address, port = endpoint.rsplit(":", 1)
    return rpc.probe(address, int(port), timeout, protocol)


def shake_hands(
    endpoints: list[str],
    protocol: str | None,
    timeout: float,
    note: Callable[[dict], object],
    pause: float = 1.0,
    enough: Callable[[dict], object] = lambda answers: False,
) -> dict:
    """Waits until every worker answers; returns their answers.

    A worker whose release does not fit is waited for like one that is not there yet: it is probably being replaced.

    :param note: called with ``{endpoint: last answer of rpc.probe}`` whenever one of them has changed.
    :param enough: called with the same after each round; ends the wait where it says so.
    """
    answers: dict = {}
    asked: dict[str, float] = {}
    while True:
        for endpoint in endpoints:
            before = answers.get(endpoint, {}).get("state")
            if before == "ok" and time.monotonic() - asked[endpoint] < FRESH_SECONDS:
                continue
            answers[endpoint] = ask_worker(endpoint, protocol, timeout)
            asked[endpoint] = time.monotonic()
            if answers[endpoint]["state"] != before:
                note(answers)
                if answers[endpoint]["state"] != "ok":
                    say(f"waiting for worker {endpoint}: {answers[endpoint]['state']}, {answers[endpoint]['detail']}")
        if all(answer["state"] == "ok" for answer in answers.values()) or enough(answers):
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
        number = int(serving.read_json(state / ENDS, ENDS_BYTES)["number"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        number = 0
    write_state(state / ENDS, {"number": number + 1, "how": how, "log": said.splitlines()[-LAST_LINES:]})


def connections(tcp_table: str, inodes: Collection[str], endpoints: list[str]) -> set[str]:
    """The endpoints to which a process that holds the socket inodes has an established connection.

    :param tcp_table: text of /proc/net/tcp.
    """
    return connected([link for link in progress.links_of(tcp_table) if link.inode in inodes], endpoints)


def connected(links: list[progress.Link], endpoints: list[str]) -> set[str]:
    return {link.remote for link in links if link.state == progress.ESTABLISHED} & set(endpoints)


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


def ask_for_a_token(url: str, argv: list[str]) -> socket.socket:
    """Sends the smallest request that makes llama-server compute; the caller reads the answer.

    :param argv: of llama-server, which names the file of the API keys.
    """
    scheme, place = url.split("://", 1)
    address, port = place.rsplit(":", 1)
    key = ""
    if API_KEYS in argv[:-1]:
        key = (Path(argv[argv.index(API_KEYS) + 1]).read_text().splitlines() or [""])[0]
    body = json.dumps({"prompt": "1", "n_predict": 1, "cache_prompt": False})
    head = [
        "POST /completion HTTP/1.1",
        "Host: llamacpp",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    head += ["Connection: close", *([f"Authorization: Bearer {key}"] if key else []), "", body]
    connection = _connected(scheme, address, int(port), time.monotonic() + HEALTH_SECONDS)
    connection.sendall("\r\n".join(head).encode())
    return connection


class Fault(NamedTuple):
    """Why llama-server is ended."""

    saw: str
    lost: Sequence[str] = ()
    """Workers whose connection is gone."""
    silent: bool = False
    """Whether only time tells it from something slow."""
    wanted: bool = False
    """Whether nothing is wrong."""

    @property
    def how(self) -> str:
        return f"since it had lost worker {', '.join(self.lost)}" if self.lost else f"by its launcher: {self.saw}"


class Head:
    """One llama-server process and what is watched about it."""

    def __init__(
        self, argv: list[str], endpoints: list[str], url: str, state: Path, silence: float = SILENCE_SECONDS
    ) -> None:
        now = time.monotonic()
        self.argv = argv
        self.endpoints = endpoints
        self.url = url
        self.silence = silence
        self.ready = False
        self.health: tuple[bool, float] = (False, 0.0)
        """The last answer, and when it was asked for."""
        self.missing = 0
        self.kept_alive: set[str] = set()
        self.lasting = progress.Lasting()
        self.stillness = progress.Stillness(silence / 5, now)
        self.question: socket.socket | None = None
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

    def look(self) -> progress.Look | None:
        """What the kernel says of llama-server; None where it says nothing."""
        if not ON_LINUX:
            return None
        ports = {progress.port_of(endpoint) for endpoint in self.endpoints}
        try:
            return progress.look_at(self.process.pid, self.kept_alive, ports)
        except OSError:
            return None

    def fault(self) -> Fault | None:
        """What is wrong with llama-server or its workers."""
        now = time.monotonic()
        self._ask_health(now)
        look = self.look()
        if look is None:
            return None
        stopped = self.lasting.seconds("stopped", look.activity.state == "T", now)
        if stopped >= STOPPED_SECONDS:
            return Fault(f"llama-server has been stopped by a signal for {stopped:.0f} s")
        return self._lost_workers(look) or self._stands_still(look, now)

    def busy(self) -> bool:
        """Whether a client waits for an answer, as far as is known."""
        look = self.look()
        return look is None or self._has_client(look)

    def _has_client(self, look: progress.Look) -> bool:
        """llama-server closes connections without a request after 5 s (cpp-httplib)."""
        port = progress.port_of(self.url)
        return any(link.state == progress.ESTABLISHED and progress.port_of(link.local) == port for link in look.links)

    def _ask_health(self, now: float) -> None:
        if not self.ready or now - self.health[1] >= HEALTH_EVERY:
            self.health = (healthy(self.url), now)
            self.ready = self.ready or self.health[0]

    def _lost_workers(self, look: progress.Look) -> Fault | None:
        """Workers whose connection is gone, seen twice in a row after the server had become ready, or whose host does not acknowledge."""
        unreached = [
            link.remote
            for link in look.links
            if link.remote in self.endpoints and link.retransmissions >= UNACKNOWLEDGED
        ]
        if unreached:
            return Fault(f"lost worker {', '.join(unreached)}, whose host acknowledges nothing", unreached)
        present = connected(look.links, self.endpoints)
        lost = [endpoint for endpoint in self.endpoints if endpoint not in present] if self.ready else []
        self.missing = self.missing + 1 if lost else 0
        return Fault(f"lost worker {', '.join(lost)}", lost) if self.missing >= LOST_AFTER_POLLS else None

    def _stands_still(self, look: progress.Look, now: float) -> Fault | None:
        """Whether something is wanted of llama-server, and nothing has moved for the set time."""
        still = self.stillness.seconds(look, self.endpoints, now)
        client = self._has_client(look)
        mute = self.lasting.seconds("mute", self.ready and not self.health[0] and not client, now)
        if min(mute, still) >= HEALTH_LOST_SECONDS:
            return Fault(f"llama-server has not answered /health for {mute:.0f} s, and nothing moves", silent=True)
        seen = bool(look.traffic) or not self.endpoints
        quiet = min(still, self.lasting.seconds("wanted", seen and (client or not self.ready), now))
        if quiet < self.silence / 2:
            self._forget_question()
            return None
        if not self.ready:
            return (
                Fault(f"nothing has moved for {quiet:.0f} s of loading", silent=True) if quiet >= self.silence else None
            )
        awaited = [
            link.remote
            for link in look.links
            if link.remote in self.endpoints and link.inode in look.traffic and look.traffic[link.inode].awaits_answer
        ]
        if self._answers(look):
            self.stillness.since = now
            self._forget_question()
        elif quiet >= self.silence:
            blamed = (
                f"worker {', '.join(awaited)} owes an answer" if awaited else "llama-server does not answer a client"
            )
            return Fault(f"{blamed}, and nothing has moved for {quiet:.0f} s", silent=True)
        return None

    def _answers(self, look: progress.Look) -> bool:
        """Asks for one token, once, and says whether an answer is there: a client that keeps a connection open may want nothing."""
        try:
            if self.question is None:
                port = progress.port_of(self.url)
                if any(link.state == progress.LISTEN and progress.port_of(link.local) == port for link in look.links):
                    self.question = ask_for_a_token(self.url, self.argv)
                return False
            self.question.setblocking(False)
            self.question.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            self._forget_question()
            return False
        return True

    def _forget_question(self) -> None:
        if self.question:
            self.question.close()
        self.question = None

    def kill(self) -> None:
        """At once: an orderly end asks each worker to free its buffers, and one that hangs does not answer."""
        self.process.kill()
        self.process.wait()

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
    if ON_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ended_how(status: int) -> str:
    """What the return code of a process says of its end."""
    return f"with status {status}" if status >= 0 else f"by signal {-status}"


def _asked_to_stop(_number: int, _frame: object) -> None:
    raise SystemExit(0)


class Settings(NamedTuple):
    """What an operator may set about healing."""

    fallbacks: Path | None = None
    fallback_after: float = 60.0
    """Seconds for which a worker is waited for."""
    silence: float = SILENCE_SECONDS


DEFAULTS = Settings()


class Chosen(NamedTuple):
    """With what llama-server is started."""

    argv: list[str]
    endpoints: list[str]
    answers: dict
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
    ) -> None:
        self.full = chosen
        self.url = url
        self.state = state
        self.protocol = protocol
        self.timeout = timeout
        self.pause = pause
        self.settings = settings
        self.record = serving.Record(state, write_state, say)
        self.back = progress.Lasting()
        self.asked = 0.0

    def wait(self) -> None:
        """Waits until another start of llama-server is due."""
        record = self.record
        left = serving.wait_before_start(record.kept, time.time())
        if left >= 1:
            say(f"llama-server ended {record.kept.failures} times in a row: the next start is in {left:.0f} s")
        until = time.monotonic() + left
        while time.monotonic() < until:
            record.set(serving.WAITING)
            time.sleep(min(self.pause, max(0.0, until - time.monotonic())))

    def choose(self) -> Chosen:
        """The full plan when all of its workers shook hands, a fallback when one of them stays away."""
        began = time.monotonic()
        patience = 0.0 if self.record.served_on_fallback else self.settings.fallback_after
        found: list[Chosen] = []

        def note(answers: dict) -> None:
            write_handshakes(self.state, answers)
            waiting = tuple(endpoint for endpoint, answer in answers.items() if answer["state"] != "ok")
            self.record.set(serving.WAITING, waiting_for=waiting)

        def enough(answers: dict) -> bool:
            self.record.set(serving.WAITING, waiting_for=self.record.waiting_for)
            if self.settings.fallbacks and time.monotonic() - began >= patience:
                found.extend(self._fallback(self.settings.fallbacks, answers))
            return bool(found)

        answers = shake_hands(self.full.endpoints, self.protocol, self.timeout, note, self.pause, enough)
        return found[0] if found else self.full._replace(answers=answers)

    def _fallback(self, path: Path, answers: dict) -> list[Chosen]:
        """The fallback that fits now, if there is one."""
        try:
            fallbacks = serving.read_fallbacks(path)
        except (OSError, ValueError) as error:
            say_once(f"{path} gives no fallback: {error}")
            return []
        away = [endpoint for endpoint, answer in answers.items() if answer["state"] != "ok"]
        others = {worker for fallback in fallbacks for worker in fallback.workers} - set(answers)
        more = {worker: ask_worker(worker, self.protocol, RETURN_TIMEOUT) for worker in sorted(others)}
        fallback = serving.fitting(fallbacks, away, {**answers, **more})
        if fallback is None:
            return []
        workers = list(fallback.workers)
        shaken = {worker: {**answers, **more}[worker] for worker in workers}
        self.record.note(f"worker {', '.join(away)} stays away: llama-server is started without {fallback.name}")
        return [Chosen(list(fallback.argv), workers, shaken, fallback)]

    def serve(self, chosen: Chosen) -> None:
        """Runs llama-server until it ends."""
        record = self.record
        silence = self.settings.silence * 2 ** min(len(record.kept.silences), 3)
        record.set(serving.LOADING, chosen.without)
        try:
            head = Head(chosen.argv, chosen.endpoints, self.url, self.state, silence)
        except OSError as error:
            write_end(self.state, f"before it began, {error}", "")
            record.note(f"llama-server could not be started: {error}")
            record.ended()
            return
        try:
            fault = self._watch(head, chosen)
        except SystemExit:
            head.stop()
            head.relay.join(timeout=5)
            raise
        head.relay.join(timeout=5)
        if fault and fault.wanted:
            record.returned()
            record.set(serving.WAITING)
            return
        how = fault.how if fault else ended_how(head.process.returncode)
        if not fault:
            record.note(f"llama-server ended {how}: it is started again")
        record.ended(silent=bool(fault and fault.silent))
        write_end(self.state, how, head.last.decode("utf-8", "replace"))

    def _watch(self, head: Head, chosen: Chosen) -> Fault | None:
        """Until llama-server ends; why it was ended, where it did not end by itself."""
        recorded = False
        while head.process.poll() is None:
            recorded = recorded or write_handshakes(self.state, chosen.answers)
            time.sleep(self.pause)
            fault = head.fault()
            if fault:
                self.record.note(f"{fault.saw}: llama-server is started again")
                head.kill()
                return fault
            if not head.ready:
                continue
            self.record.set(serving.FALLBACK if chosen.fallback else serving.SERVING, chosen.without)
            self.record.served(time.monotonic())
            if chosen.fallback and self._may_return(head, chosen):
                self.record.note(f"worker {chosen.fallback.without} is back: llama-server is started with all workers")
                head.stop()
                return Fault("the worker is back", wanted=True)
        return None

    def _may_return(self, head: Head, chosen: Chosen) -> bool:
        """Whether all workers of the full plan have answered for long enough and nobody waits for an answer. Workers in use are not asked."""
        now = time.monotonic()
        if now - self.asked >= RETURN_EVERY:
            self.asked = now
            away = [endpoint for endpoint in self.full.endpoints if endpoint not in chosen.endpoints]
            answers = [ask_worker(endpoint, self.protocol, RETURN_TIMEOUT) for endpoint in away]
            self.back.seconds("back", all(answer["state"] == "ok" for answer in answers), now)
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
) -> int:
    """Waits, starts and watches; returns the exit status of the service: 0 only when it was asked to stop."""
    signal.signal(signal.SIGTERM, _asked_to_stop)
    signal.signal(signal.SIGINT, _asked_to_stop)
    with suppress(OSError):  # a folder that is missing still is said by what cannot be written there
        state.mkdir(exist_ok=True)
    write_handshakes(state, {})
    start = Start(Chosen(argv, endpoints, {}), url, state, protocol, timeout, pause, settings)
    start.wait()
    start.serve(start.choose())
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


class Guard:
    """What is watched about a worker. A worker serves one client, so one that holds it for nothing keeps everybody else away."""

    def __init__(self, process: int, port: str) -> None:
        self.process = process
        self.port = port
        self.kept_alive: set[str] = set()
        self.lasting = progress.Lasting()

    def fault(self) -> str | None:
        """Why the worker has to be ended. Connections that hold it for nothing are closed on the way."""
        try:
            look = progress.look_at(self.process, self.kept_alive, {self.port})
        except OSError:
            return None
        now = time.monotonic()
        stopped = self.lasting.seconds("stopped", look.activity.state == "T", now)
        if stopped >= STOPPED_SECONDS:
            return f"the worker has been stopped by a signal for {stopped:.0f} s"
        own = [link for link in look.links if progress.port_of(link.local) == self.port]
        gone = [link for link in own if link.state == progress.CLOSE_WAIT]
        ignored = self.lasting.seconds("gone", bool(gone), now)
        if ignored >= GONE_SECONDS:
            return f"the worker has not noticed for {ignored:.0f} s that its client {gone[0].remote} has gone"
        others_wait = any(link.state == progress.LISTEN and link.received for link in own)
        held = self.lasting.seconds("others wait", others_wait, now)
        for link in own:
            if link.inode in look.traffic and _holds_for_nothing(look.traffic[link.inode], held):
                self._hang_up(link)
        return None

    def _hang_up(self, link: progress.Link) -> None:
        with suppress(OSError, KeyError):
            with progress.lent(self.process, progress.descriptors(self.process)[link.inode]) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            say(f"client {link.remote} held the worker and asked it for nothing: its connection is closed")


def _holds_for_nothing(traffic: progress.Traffic, others_wait: float) -> bool:
    """Whether a client has said nothing at all, or next to nothing while others have waited for as long.

    :param others_wait: seconds for which somebody has waited for the worker.
    """
    if not traffic.received:
        return traffic.since_received >= SAYS_NOTHING_SECONDS * 1000
    silent = min(traffic.since_received / 1000, others_wait)
    return traffic.received < SHORT_TALK and silent >= HOLDS_SECONDS


def run_worker(
    argv: list[str], cache: Path | None, limit: int, pause: float = PRUNE_SECONDS, port: str = "", look: float = 1.0
) -> int:
    """Runs a worker, and keeps its cache below the limit in bytes; returns the exit status of the service.

    :param port: at which the worker listens; empty where nobody watches it.
    :param look: seconds between two looks at it.
    """
    signal.signal(signal.SIGTERM, _asked_to_stop)
    signal.signal(signal.SIGINT, _asked_to_stop)
    if cache:
        _bound(cache, limit)
    # A worker has to go on ignoring SIGPIPE, which a connection that was given up would end it with.
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent, restore_signals=False)
    guard = Guard(process.pid, port) if port and ON_LINUX else None
    bounded = time.monotonic()
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(look, pause) if guard else pause)
            fault = guard.fault() if guard and process.poll() is None else None
            if fault:
                say(f"{fault}: it is started again")
                process.kill()
                process.wait()
                return 1
            if cache and process.poll() is None and time.monotonic() - bounded >= pause:
                _bound(cache, limit)
                bounded = time.monotonic()
    except SystemExit:
        process.terminate()
        process.wait()
        raise
    say(f"the worker ended {ended_how(process.returncode)}")
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
    head.add_argument("--fallbacks", type=Path, metavar="FILE", help="what to serve on when a worker stays away")
    head.add_argument("--fallback-after", type=float, default=60.0, metavar="SECONDS", help="when it stays away")
    head.add_argument(
        "--silence", type=float, default=SILENCE_SECONDS, metavar="SECONDS", help="when a server that works has to move"
    )
    worker = parts.add_parser("worker", help="run a worker, watch it, and bound its cache of tensors")
    worker.add_argument("--port", default="", help="where it listens; without it the worker is not watched")
    worker.add_argument("--cache", type=Path, help="folder of the cache")
    worker.add_argument("--limit-mib", type=int, default=0, help="what the cache may hold")
    for part in (head, worker):
        part.add_argument("argv", nargs="+", help="the program and its arguments, after --")
    options = parser.parse_args()
    if options.part == "worker":
        return run_worker(options.argv, options.cache, options.limit_mib * rpc.MIB, port=options.port)
    settings = Settings(options.fallbacks, options.fallback_after, options.silence)
    return run(
        options.argv, options.worker, options.url, options.state, options.protocol, options.timeout, settings=settings
    )


if __name__ == "__main__":
    raise SystemExit(main())

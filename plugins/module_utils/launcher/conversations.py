# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps conversations on the head's disk, so that they survive a restart: saves the slots of llama-server, and restores them after loading.

The files are llama-server's own (``--slot-save-path``; read in build 11063, tried with 11669). It accepts those of the same build, model and settings
only, so their names begin with a key of these. A file that is being restored has another name until that is done: if llama-server hangs or crashes, the
next start deletes the file instead of trying it again.
"""

from __future__ import annotations

import array
import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, server

METRICS = KEPT_FILES, RESTORED_TOKENS, SAVED_SECONDS = (
    "conversations_kept",
    "conversation_tokens_restored_total",
    "conversation_seconds_saved_total",
)
PAUSED_UNTIL = "paused_until"
OPTION, FOLDER, RECORD = "--slot-save-path", "conversations", "conversations.json"
"""Option of llama-server; folder and record in the launcher's state."""
KEPT, NEW, TRIED = ".slot", ".new", ".tried"
"""Endings of files: saved, being saved, being restored."""
IDLE_SECONDS, STOP_SECONDS, PAUSE_SECONDS, FOREIGN_SECONDS = 10.0, 15.0, 3600.0, 30 * 86400.0
"""Idle time after which a slot is saved, time for all slots before a stop (service managers wait 20 s), pause after a save or restore that hung, and age
at which files with another key are deleted."""
FEWEST_TOKENS = 256
"""Shorter conversations are soon computed again; a verification reads 200 tokens."""
BUSY_SECONDS = 0.05
"""Processor time of llama-server between two samples from which it was busy."""
DISK_SHARE = 0.05
"""Part of the disk that stays free."""
SAME_SHARE = 0.9
"""Part of an older file's tokens with which a newer file must begin to replace it."""
WAKES = re.compile(rb"exiting sleeping state|model loaded")
"""Lines that llama-server logs when it takes requests again. It restores before it computes a prompt, since it reads the shorter request first."""
HEADER_BYTES, LIST_WORDS = 12, 4
"""Magic, version and number of words before the tokens of a file; words before the first token in that list."""
HARMLESS = frozenset(
    "--rpc --device --override-tensor --tensor-split --host --port --n-gpu-layers --threads --cache-ram --ctx-checkpoints --sleep-idle-seconds --load-mode "
    "--api-key-file --ssl-cert-file --ssl-key-file --fit --log-verbosity --metrics --no-repack --batch-size --ubatch-size --alias --model --ctx-size "
    f"--parallel {OPTION}".split()
)
"""Options that do not change what a file contains. The model, and the context of a slot, are in the key in another way."""


class Limits(NamedTuple):
    mib: int
    """Size of all files."""
    full_mib: int
    """Size of a file whose context is full."""
    seconds: int
    """Time for one save or restore."""
    computing_seconds: int
    """Predicted time to compute a full context."""


def key_of(argv: Sequence[str]) -> str:
    """Return a name for everything that decides whether llama-server can read a file.

    :raises OSError: the model's file cannot be read.
    """
    pairs: list[list[str]] = []
    for word in argv:
        if not pairs or re.match("--?[A-Za-z]", word):
            pairs.append([])
        pairs[-1].append(word)
    values = {pair[0]: pair[1] for pair in pairs if len(pair) > 1}
    model = os.stat(values["--model"])
    context = int(values["--ctx-size"]) // int(values["--parallel"])
    rest = [pair for pair in pairs if pair[0] not in HARMLESS]
    identity = json.dumps([rest, values["--model"], model.st_size, model.st_mtime_ns, context])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def open_keeper(argv: list[str], state: Path, limits: Sequence[int], log: Callable[[str], None]) -> Keeper | None:
    """Return the keeper of a command line; None if no conversations are kept. The folder goes too then, and without a folder the option goes."""
    folder = state / FOLDER
    if not limits and folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        log(f"conversations are not kept any more: {folder} was deleted")
    if not limits or OPTION not in argv:
        return None
    try:
        return Keeper(argv, state, Limits(*limits), log)
    except (OSError, ValueError, LookupError) as error:
        log(f"conversations are not kept: {error}")
        if not folder.is_dir():
            place = argv.index(OPTION)
            del argv[place : place + 2]
        return None


def _tokens_of(path: Path) -> array.array:
    """Return the tokens of a file. They end with those of its pictures, if there are any."""
    with path.open("rb") as file:
        count = int.from_bytes(file.read(HEADER_BYTES)[8:], "little")
        return array.array("i", file.read(4 * min(count, units.MIB)))[LIST_WORDS:]


def _begins_with(tokens: array.array, older: array.array) -> bool:
    """Return whether a conversation continues an older one."""
    return tokens[: math.ceil(SAME_SHARE * len(older))] == older[: math.ceil(SAME_SHARE * len(older))]


class Keeper:
    """Saves and restores the slots of one llama-server, in one thread at a time."""

    def __init__(self, argv: Sequence[str], state: Path, limits: Limits, log: Callable[[str], None]) -> None:
        """:raises OSError: the folder or the model cannot be read."""
        self.folder, self.record, self.limits, self.write_log = state / FOLDER, state / RECORD, limits, log
        self.key = key_of(argv)
        self.slots, self.context = (int(argv[argv.index(word) + 1]) for word in ("--parallel", "--ctx-size"))
        sleep = float(argv[argv.index(server.SLEEP) + 1]) if server.SLEEP in argv else math.inf
        self.pause = min(IDLE_SECONDS, sleep / 3)
        self.head: server.Head | None = None
        self.job: threading.Thread | None = None
        self.deadline = math.inf
        self.counts, self.paused_until = dict.fromkeys(METRICS, 0.0), 0.0
        self.is_restored = False
        self.seen: dict[int, tuple[Any, ...]] = {}
        self.saved: dict[int, tuple[Any, ...]] = {}
        self.tokens: dict[Path, array.array] = {}
        self.logged: set[str] = set()
        self.asked_at, self.processor_seconds, self.is_pending = 0.0, 0.0, False
        self.folder.mkdir(mode=0o700, exist_ok=True)
        record = journal.read_back(
            self.record, lambda record: {name: float(record[name]) for name in (*METRICS, PAUSED_UNTIL)}
        )
        self.paused_until = (record or {}).pop(PAUSED_UNTIL, 0.0)
        self.counts.update(record or {})
        for path in [*self.folder.glob(f"*{NEW}"), *self.folder.glob(f"*{TRIED}")]:
            if path.suffix == TRIED:
                self.log("a conversation could not be restored before llama-server ended: its file was deleted")
            path.unlink()

    def log(self, text: str) -> None:
        if text not in self.logged:
            self.logged.add(text)
            self.write_log(text)

    def notice(self, output: bytes) -> None:
        """Restore as soon as llama-server says that it has loaded its model."""
        if WAKES.search(output):
            self._start(self._restore, self.slots)

    def fault(self) -> server.Fault | None:
        """Start what is due; return a fault if a save or restore has taken too long."""
        head, clock = self.head, time.monotonic()
        if self.job and self.job.is_alive():
            if clock < self.deadline:
                return None
            self.paused_until = time.time() + PAUSE_SECONDS
            self._write_record()
            hung = f"saving or restoring a conversation took more than {self.limits.seconds} s"
            return server.Fault(f"{hung}, so none are kept for {PAUSE_SECONDS / 60:.0f} minutes", silent=True)
        if not head or not head.ready or head.asleep:
            return None
        if not self.is_restored:
            self._start(self._restore, self.slots)
        elif clock - self.asked_at >= self.pause and (self._was_busy(head) or self.is_pending):
            self.asked_at, self.is_pending = clock, False
            self._start(self._save, self.slots)
        return None

    def save_now(self) -> None:
        """Save every changed slot, because llama-server is about to be stopped."""
        if self.head and self.head.ready and not self.head.asleep:
            if self.job:
                self.job.join(STOP_SECONDS)
            self._start(partial(self._save, True), self.slots)
        if self.job:
            self.job.join(STOP_SECONDS)

    def _was_busy(self, head: server.Head) -> bool:
        """Return whether llama-server may have computed something since the last call. Asking for slots keeps it awake, so this must not be always true."""
        sample = head.last_sample
        if sample is None:
            return server.SLEEP not in head.argv
        used, self.processor_seconds = sample.activity.seconds - self.processor_seconds, sample.activity.seconds
        return used >= BUSY_SECONDS or bool(head.clients(sample))

    def _start(self, action: Callable[[], None], slots: int) -> None:
        if self.paused_until > time.time() or (self.job and self.job.is_alive()):
            return
        self.is_restored = True
        self.deadline = time.monotonic() + self.limits.seconds * slots
        self.job = threading.Thread(target=journal.run_safely, args=("conversations are not kept", action), daemon=True)
        self.job.start()

    def _post(self, slot: int, action: str, path: Path) -> server.ServerRequest | None:
        return self._request(f"/slots/{slot}?action={action}", json.dumps({"filename": path.name}))

    def _request(self, path: str, body: str = "") -> server.ServerRequest | None:
        """Send a request, unless another process has taken the port: it must not receive a key."""
        head = self.head
        sample = head.take_sample() if head else None
        if not head or (sample and not head.listens(sample)):
            return None
        return server.ServerRequest(head.url, path, head.headers, body=body)

    def _answer(self, request: server.ServerRequest | None) -> Any:
        """Return the answer; None without one."""
        if not request:
            return None
        request.join(self.limits.seconds)
        with suppress(ValueError):
            return json.loads(request.reply)
        return None

    def _restore(self) -> None:
        """Restore the newest conversations, all at once: a request of a client that waits for the model comes after these."""
        began, requests, tokens = time.monotonic(), [], 0
        own_paths = [path for path in self._paths() if path.name.startswith(self.key)]
        for slot, path in enumerate(reversed(own_paths[-self.slots :])):
            tried = path.with_suffix(TRIED)
            path.replace(tried)
            requests.append((path, tried, self._post(slot, "restore", tried)))
        for path, tried, request in requests:
            answer = self._answer(request)
            restored = answer.get("n_restored", 0) if isinstance(answer, dict) else 0
            if restored:
                tried.replace(path)
                self.tokens[path] = _tokens_of(path)
                tokens += restored
            elif answer:
                tried.unlink()
                self.log(f"a conversation was not restored, and its file deleted: {_reason(answer)}")
        if tokens:
            predicted = self.limits.computing_seconds * tokens * self.slots / self.context
            self.counts[RESTORED_TOKENS] += tokens
            self.counts[SAVED_SECONDS] += max(0.0, predicted - (time.monotonic() - began))
            self.write_log(f"{tokens} tokens of conversations were restored in {time.monotonic() - began:.1f} s")
        self._write_record()

    def _save(self, at_once: bool = False) -> None:
        """Save each slot that has changed and rests.

        :param at_once: save also slots that have only just changed.
        """
        slots = self._answer(self._request("/slots"))
        for slot in slots if isinstance(slots, list) else []:
            number, tokens = slot["id"], slot.get("n_prompt_tokens") or 0
            state = (slot.get("id_task"), tokens)
            rests = at_once or self.seen.get(number) == state
            self.seen[number] = state
            if slot["is_processing"] or tokens < FEWEST_TOKENS or self.saved.get(number) == state:
                continue
            if rests:
                self.saved[number] = state
                self._save_slot(number, tokens)
            else:
                self.is_pending = True
        self._write_record()

    def _save_slot(self, slot: int, tokens: int) -> None:
        if not self._make_room(self.limits.full_mib * units.MIB * tokens * self.slots // self.context + units.MIB):
            self.log(f"a conversation of {tokens} tokens is not kept: {self.folder} has no room for it")
            return
        new = self.folder / f"{self.key}-{slot}{NEW}"
        answer = self._answer(self._post(slot, "save", new))
        if not isinstance(answer, dict) or not answer.get("n_saved"):
            self.log(f"a conversation was not saved to {self.folder}: {_reason(answer)}")
            with suppress(OSError):
                new.unlink()
            return
        new.chmod(0o600)
        saved_tokens, path = _tokens_of(new), self.folder / f"{self.key}-{time.time_ns()}{KEPT}"
        new.replace(path)
        for other in [other for other, older in self.tokens.items() if _begins_with(saved_tokens, older)]:
            del self.tokens[other]
            other.unlink(missing_ok=True)
        self.tokens[path] = saved_tokens
        self._make_room(0)

    def _paths(self) -> list[Path]:
        """Return the saved files in the order in which they may be deleted: with another key first, then the oldest."""
        paths = self.folder.glob(f"*{KEPT}")
        return sorted(paths, key=lambda path: (path.name.startswith(self.key), path.stat().st_mtime))

    def _make_room(self, size: int) -> bool:
        """Delete files until there is room for this many further bytes; return False and delete none if there cannot be."""
        paths, disk = self._paths(), shutil.disk_usage(self.folder)
        sizes = {path: path.stat().st_size for path in paths}
        used = sum(sizes.values())
        room = min(self.limits.mib * units.MIB, used + disk.free - int(DISK_SHARE * disk.total)) - size
        if room < 0:
            return not size
        oldest = time.time() - FOREIGN_SECONDS
        for path in paths:
            is_stale = not path.name.startswith(self.key) and path.stat().st_mtime < oldest
            if used > room or is_stale:
                path.unlink()
                self.tokens.pop(path, None)
                used -= sizes.pop(path)
        return True

    def _write_record(self) -> None:
        self.counts[KEPT_FILES] = sum(path.name.startswith(self.key) for path in self.folder.glob(f"*{KEPT}"))
        journal.write_state(self.record, {**self.counts, PAUSED_UNTIL: self.paused_until})


def _reason(answer: Any) -> str:
    """Return the reason in an answer of llama-server."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message") if isinstance(error, dict) else "llama-server did not answer")[:200]

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps conversations on the head's disk, so that they survive a restart: saves the slots of llama-server, and restores them after loading.

The files are llama-server's own (``--slot-save-path``; read in build 11063, tried with 11669). It accepts those of the same build, model and settings
only, so their names begin with a key of these.
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
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, metrics, progress, server

KEPT_FILES, RESTORED_TOKENS, SAVED_SECONDS = metrics.CONVERSATIONS
PAUSE = "paused_until"
OPTION, FOLDER, RECORD = "--slot-save-path", "conversations", "conversations.json"
"""Option of llama-server; folder and record in the launcher's state."""
NEW, KEPT, TRIED = ".new", ".slot", ".tried"
"""Endings of files: being saved; saved; being restored."""
IDLE_SECONDS, STOP_SECONDS, PAUSE_SECONDS = 10.0, 15.0, 3600.0
"""Idle time after which a slot is saved; time for saving before a stop, of which service managers allow 20 s; pause after a save or restore that hung."""
FEWEST_TOKENS = 256
"""Shorter conversations are soon computed again; a verification reads 200 tokens."""
BUSY_SECONDS, DISK_SHARE, SAME_SHARE = 0.05, 0.05, 0.9
"""Processor time between two samples from which llama-server was busy; part of the disk that stays free; part of an older file's tokens with which a newer
one must begin to replace it."""
STATE_LINE = re.compile(rb"(?m)^\S+ I srv .*: (?:server is (entering|exiting) sleeping state|model loaded)$")
"""Lines that llama-server logs when it frees its model and before it takes requests again. A restore comes before a prompt that waits too, because
llama-server reads the shorter request sooner."""
HEADER_BYTES, LIST_WORDS = 12, 4
"""Bytes of a file before its list of tokens, which end with the number of words; words of the list before the first token."""
HARMLESS = frozenset(
    "--rpc --device --override-tensor --tensor-split --host --port --n-gpu-layers --threads --cache-ram --ctx-checkpoints --sleep-idle-seconds --load-mode "
    "--api-key-file --ssl-cert-file --ssl-key-file --fit --log-verbosity --metrics --no-repack --batch-size --ubatch-size --alias --model --ctx-size "
    f"--parallel {OPTION}".split()
)
"""Options that do not change the content of a file, or stand in the key in another way."""


class Limits(NamedTuple):
    mib: int
    """Size of all files."""
    full_mib: int
    """Size of a file whose context is full."""
    seconds: int
    """Time in which nothing moves, after which a save or restore hangs."""
    computing_seconds: int
    """Predicted time to compute a full context."""


def key_of(argv: Sequence[str]) -> str:
    """Return a name for everything that decides whether llama-server can read a file.

    :raises OSError: the model's file cannot be read.
    """
    values, words, counts = dict(zip(argv, argv[1:])), [], True
    for word in argv:
        counts = word not in HARMLESS if re.match("--?[A-Za-z]", word) else counts
        words += [word] * counts
    model, context = os.stat(values["--model"]), int(values["--ctx-size"]) // int(values["--parallel"])
    identity = json.dumps([words, values["--model"], model.st_size, model.st_mtime_ns, context])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def open_keeper(argv: list[str], state: Path, limits: Sequence[int], log: Callable[[str], None]) -> Keeper | None:
    """Return the keeper for a command line; None if no conversations are kept. Then the folder is deleted; without a folder, the option is removed."""
    folder = state / FOLDER
    if not limits and folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        log(f"conversations are no longer kept: {folder} was deleted")
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


def _tokens_of(path: Path) -> array.array[int]:
    """Return the tokens of a file, and the data of its pictures behind them."""
    with path.open("rb") as file:
        count = int.from_bytes(file.read(HEADER_BYTES)[8:], "little")
        return array.array("i", file.read(4 * min(count, units.MIB)))[LIST_WORDS:]


def _continues(tokens: array.array[int], older_tokens: array.array[int]) -> bool:
    length = math.ceil(SAME_SHARE * len(older_tokens))
    return tokens[:length] == older_tokens[:length]


def _reason(answer: Any) -> str:
    """Return the reason in an answer of llama-server."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message") if isinstance(error, dict) else "llama-server did not answer")[:200]


class Keeper:
    """Saves and restores the slots of one llama-server, in one thread at a time."""

    def __init__(self, argv: Sequence[str], state: Path, limits: Limits, log: Callable[[str], None]) -> None:
        """:raises OSError: the folder or the model cannot be read, or the folder cannot be written."""
        self.folder, self.record, self.limits, self.log = state / FOLDER, state / RECORD, limits, lru_cache(log)
        self.key = key_of(argv)
        self.slots, self.context = (int(argv[argv.index(word) + 1]) for word in ("--parallel", "--ctx-size"))
        sleep = float(argv[argv.index(server.SLEEP) + 1]) if server.SLEEP in argv else math.inf
        self.pause = min(IDLE_SECONDS, sleep / 3)
        self.head: server.Head | None = None
        self.job: threading.Thread | None = None
        self.timer = progress.IdleTimer(limits.seconds / 5, 0)
        self.is_restored = self.is_pending = False
        self.last_check_time = self.processor_seconds = 0.0
        self.seen: dict[int, tuple[Any, ...]] = {}
        """Slot → its last task and its number of tokens, when it was last looked at."""
        self.saved: dict[int, tuple[Any, ...]] = {}
        self.tokens: dict[Path, array.array[int]] = {}
        """Tokens of the files that were saved or restored since the start."""
        self.counts = dict.fromkeys((*metrics.CONVERSATIONS, PAUSE), 0.0)
        self.counts.update(
            journal.read_back(self.record, lambda record: {name: float(record[name]) for name in [*self.counts]}) or {}
        )
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._paths(NEW, TRIED):
            if path.suffix == TRIED:
                self.log("llama-server exited while it restored a conversation: deleted the conversation's file")
            path.unlink()

    def notice(self, output: bytes) -> None:
        """Restore as soon as llama-server logs that it has loaded its model, if nothing was restored since it freed it."""
        for line in STATE_LINE.finditer(output):
            if line[1] == b"entering" and self.head:
                self.head.asleep, self.is_restored = True, False
            elif not self.is_restored:
                self._start(self._restore)

    def fault(self) -> server.Fault | None:
        """Start what is due; return a fault if a save or restore hangs."""
        head, clock = self.head, time.monotonic()
        if not head or not head.ready:
            return None
        if self.job and self.job.is_alive():
            sample, limit = head.last_sample, self.limits.seconds
            if not sample or self.timer.seconds(sample, head.endpoints, clock) < limit:
                return None
            self.counts[PAUSE] = time.time() + PAUSE_SECONDS
            journal.write_state(self.record, self.counts)
            pause = f"so none are kept for {PAUSE_SECONDS / 60:.0f} minutes"
            return server.Fault(f"saving or restoring a conversation has hung for {limit} s, {pause}", is_silent=True)
        if head.asleep:
            return None
        if not self.is_restored:
            self._start(self._restore)
        elif clock - self.last_check_time >= self.pause and (self._was_busy(head) or self.is_pending):
            self.last_check_time, self.is_pending = clock, False
            self._start(self._save)
        return None

    def save_now(self) -> None:
        """Save every changed slot, because llama-server is about to be stopped."""
        for action in (None, partial(self._save, True)):
            if action and self.head and self.head.ready and not self.head.asleep:
                self._start(action)
            if self.job:
                self.job.join(STOP_SECONDS / 2)

    def _was_busy(self, head: server.Head) -> bool:
        """Return whether llama-server may have computed since the last call. An idle one must not be asked for its slots, or it would never sleep."""
        sample = head.last_sample
        if sample is None:
            return server.SLEEP not in head.argv
        used_seconds, self.processor_seconds = sample.activity.seconds - self.processor_seconds, sample.activity.seconds
        return used_seconds >= BUSY_SECONDS or head.idle_timer.since > self.last_check_time

    def _start(self, action: Callable[[], None]) -> None:
        if self.counts[PAUSE] < time.time() and not (self.job and self.job.is_alive()):
            self.is_restored, self.timer = True, progress.IdleTimer(self.limits.seconds / 5, time.monotonic())
            failure = "conversations are not kept"
            self.job = threading.Thread(target=journal.run_safely, args=(failure, action), daemon=True)
            self.job.start()

    def _request(self, place: str, file: Path | None = None) -> server.ServerRequest | None:
        """Send a request, unless another process has taken the port: it must not receive a key."""
        head, body = self.head, json.dumps({"filename": file.name}) if file else ""
        if not head or (head.last_sample and head.ready and not head.listens(head.last_sample)):
            return None
        return server.ServerRequest(head.url, f"/slots{place}", head.headers, body=body)

    def _slots(self) -> list[dict[str, Any]]:
        answer = self._answer(self._request(""))
        return answer if isinstance(answer, list) else []

    def _answer(self, request: server.ServerRequest | None, slot: int | None = None) -> Any:
        """Return the answer; None without one. A request for a slot that computes would wait for its end, and restore an older state then: cancel it."""
        while request and request.is_alive():
            request.join(None if slot is None else 1.0)
            if request.is_alive() and any(entry["id"] == slot and entry["is_processing"] for entry in self._slots()):
                request.cancel()
        with suppress(ValueError):
            return json.loads(request.reply) if request else None

    def _restore(self) -> None:
        """Restore the newest conversations, all at once: a request of a client that waits for the model comes after these."""
        start_time, tokens, requests = time.monotonic(), 0, []
        own_paths = [path for path in self._paths(KEPT) if path.name.startswith(self.key) and self._is_whole(path)]
        for slot, kept_path in enumerate(reversed(own_paths[-self.slots :])):
            tried_path = kept_path.replace(kept_path.with_suffix(TRIED))
            requests.append((kept_path, tried_path, self._request(f"/{slot}?action=restore", tried_path)))
        for slot, (kept_path, tried_path, request) in enumerate(requests):
            answer = self._answer(request, slot)
            if answer and not answer.get("n_restored"):
                tried_path.unlink()
                self.log(f"a conversation was not restored, and its file was deleted: {_reason(answer)}")
            elif answer or (request and request.is_cancelled):
                tried_path.replace(kept_path)
                self.tokens[kept_path] = _tokens_of(kept_path)
                tokens += answer["n_restored"] if answer else 0
        if tokens:
            seconds, full_slot_tokens = time.monotonic() - start_time, self.context / self.slots
            self.counts[RESTORED_TOKENS] += tokens
            self.counts[SAVED_SECONDS] += max(0.0, self.limits.computing_seconds * tokens / full_slot_tokens - seconds)
            self.log(f"{tokens} tokens of conversations were restored in {seconds:.1f} s")
        self._make_room(0)

    def _save(self, at_once: bool = False) -> None:
        """Save each slot that has changed and rests.

        :param at_once: save also slots that have only just changed.
        """
        for slot in self._slots():
            number, tokens = slot["id"], slot.get("n_prompt_tokens") or 0
            state = (slot.get("id_task"), tokens)
            is_at_rest, self.seen[number] = at_once or self.seen.get(number) == state, state
            self.is_pending = self.is_pending or slot["is_processing"] or not is_at_rest
            if slot["is_processing"] or tokens < FEWEST_TOKENS or self.saved.get(number) == state:
                continue
            if is_at_rest:
                self.saved[number] = state
                self._save_slot(number, tokens)

    def _save_slot(self, slot: int, tokens: int) -> None:
        if not self._make_room(self.limits.full_mib * units.MIB * tokens * self.slots // self.context + units.MIB):
            self.log(f"a conversation of {tokens} tokens is not kept: {self.folder} has no space for it")
            return
        target = self.folder / f"{self.key}-{slot}{NEW}"
        answer = self._answer(self._request(f"/{slot}?action=save", target), slot)
        if not answer or not answer.get("n_saved"):
            self.log(f"a conversation was not saved in {self.folder}: {_reason(answer)}")
            with suppress(OSError):
                target.unlink()
            return
        target.chmod(0o600)
        count, path = (
            _tokens_of(target),
            target.with_name(f"{self.key}-{time.time_ns()}-{target.stat().st_size}{KEPT}"),
        )
        target.replace(path)
        for file in [file for file, prefix in self.tokens.items() if _continues(count, prefix)]:
            del self.tokens[file]
            file.unlink(missing_ok=True)
        self.tokens[path] = count
        self._make_room(0)

    def _is_whole(self, path: Path) -> bool:
        """Return whether a file has the size in its name; delete it otherwise, since llama-server of build 11063 aborts with a truncated one."""
        is_whole = path.stem.endswith(f"-{path.stat().st_size}")
        if not is_whole:
            path.unlink()
            self.log("a conversation was not restored: its file was truncated and has been deleted")
        return is_whole

    def _paths(self, *endings: str) -> list[Path]:
        """Return the files with these endings in the order in which they may be deleted: first those with another key, then the oldest."""
        paths = [path for path in self.folder.iterdir() if path.suffix in endings]
        return sorted(paths, key=lambda path: (path.name.startswith(self.key), path.stat().st_mtime))

    def _make_room(self, size: int) -> bool:
        """Delete files until there is room for so many further bytes; delete none and return False if there cannot be."""
        paths, disk = self._paths(KEPT), shutil.disk_usage(self.folder)
        sizes = {path: path.stat().st_size for path in paths}
        used_bytes = sum(sizes.values())
        room = min(self.limits.mib * units.MIB, used_bytes + disk.free - int(DISK_SHARE * disk.total)) - size
        if room < 0 < size:
            return False
        for path in paths:
            if used_bytes > room:
                path.unlink()
                self.tokens.pop(path, None)
                used_bytes -= sizes.pop(path)
        self.counts[KEPT_FILES] = sum(path.name.startswith(self.key) for path in sizes)
        journal.write_state(self.record, self.counts)
        return True

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keeps conversations on the head's disk, so that they survive a restart: saves the slots of llama-server, and restores them after loading.

llama-server writes the files itself (``--slot-save-path``; read in build 11063, tried with 11669). It accepts only files of the same build, model and
settings, so their names begin with a hash of these.
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

FILES_METRIC, TOKENS_METRIC, SECONDS_METRIC = metrics.CONVERSATION_METRIC_NAMES
PAUSE_END_KEY = "paused_until"
SLOT_PATH_OPTION, CONVERSATIONS_FOLDER, RECORD_FILE = "--slot-save-path", "conversations", "conversations.json"
"""Option of llama-server; folder and record file in the launcher's state folder."""
NEW_SUFFIX, SAVED_SUFFIX, TRIED_SUFFIX = ".new", ".slot", ".tried"
"""Suffixes of files: being saved; saved; being restored."""
IDLE_SECONDS, STOP_SECONDS, PAUSE_SECONDS = 10.0, 15.0, 3600.0
"""Idle time after which a slot is saved; time limit for saving before a stop (service managers allow 20 s); pause after a save or restore has hung."""
MIN_TOKENS = 256
"""Shorter conversations are quick to recompute; a verification reads 200 tokens."""
BUSY_SECONDS, FREE_SHARE, PREFIX_SHARE = 0.05, 0.05, 0.9
"""Processor time between two samples that shows a busy llama-server; share of the disk to keep free; share of an older file's tokens that a newer file
must begin with to replace it."""
STATE_LINE_PATTERN = re.compile(rb"(?m)^\S+ I srv .*: (?:server is (entering|exiting) sleeping state|model loaded)$")
"""Lines that llama-server logs when it frees its model and before it takes requests again. A restore overtakes a waiting prompt, because
llama-server reads the shorter request sooner."""
HEADER_BYTES, LIST_HEADER_WORDS = 12, 4
"""Bytes of a file's header, which ends with the word count of the token list; words of this list before the first token."""
NEUTRAL_OPTIONS = frozenset(
    "--rpc --device --override-tensor --tensor-split --host --port --n-gpu-layers --threads --cache-ram --ctx-checkpoints --sleep-idle-seconds --load-mode "
    "--api-key-file --ssl-cert-file --ssl-key-file --fit --log-verbosity --metrics --no-repack --batch-size --ubatch-size --alias --model --ctx-size "
    f"--parallel {SLOT_PATH_OPTION}".split()
)
"""Options that do not change the content of a file, or that the key includes in another form."""


class StoreSettings(NamedTuple):
    max_mib: int
    """Size limit of all files together."""
    slot_mib: int
    """Size of a file whose context is full."""
    timeout_s: int
    """Time without any progress after which a save or restore counts as hung."""
    computing_seconds: int
    """Predicted time to compute a full context."""


def file_prefix(argv: Sequence[str]) -> str:
    """Return a hash of everything that decides whether llama-server can read a file.

    :raises OSError: the model's file cannot be read.
    """
    options, relevant_words, is_relevant = dict(zip(argv, argv[1:])), [], True
    for word in argv:
        is_relevant = word not in NEUTRAL_OPTIONS if re.match("--?[A-Za-z]", word) else is_relevant
        relevant_words += [word] * is_relevant
    model_status, context = os.stat(options["--model"]), int(options["--ctx-size"]) // int(options["--parallel"])
    identity = json.dumps([relevant_words, options["--model"], model_status.st_size, model_status.st_mtime_ns, context])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def open_store(argv: list[str], root: Path, settings: Sequence[int], log: Callable[[str], None]) -> SlotStore | None:
    """Return the slot store of a command line. If no conversations are kept, delete the folder. If the folder cannot be created, remove the option."""
    folder = root / CONVERSATIONS_FOLDER
    if not settings and folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        log(f"conversations are no longer kept: {folder} was deleted")
    if not settings or SLOT_PATH_OPTION not in argv:
        return None
    try:
        return SlotStore(argv, root, StoreSettings(*settings), log)
    except (OSError, ValueError, LookupError) as error:
        log(f"conversations are not kept: {error}")
        if not folder.is_dir():
            position = argv.index(SLOT_PATH_OPTION)
            del argv[position : position + 2]
        return None


def _tokens_of(path: Path) -> array.array[int]:
    """Return the tokens of a file, followed by the data of its images."""
    with path.open("rb") as file:
        token_count = int.from_bytes(file.read(HEADER_BYTES)[8:], "little")
        data = file.read(4 * min(token_count, units.MIB))
        return array.array("i", data[: len(data) // 4 * 4])[LIST_HEADER_WORDS:]


def _continues(tokens: array.array[int], older_tokens: array.array[int]) -> bool:
    length = math.ceil(PREFIX_SHARE * len(older_tokens))
    return tokens[:length] == older_tokens[:length]


def _error_text_of(answer: Any) -> str:
    """Return the reason in an answer of llama-server."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message") if isinstance(error, dict) else "llama-server did not answer")[:200]


class SlotStore:
    """Saves and restores the slots of one llama-server, in one thread at a time."""

    def __init__(self, argv: Sequence[str], root: Path, settings: StoreSettings, log: Callable[[str], None]) -> None:
        """:raises OSError: the folder or the model cannot be read, or the folder cannot be written."""
        self.folder, self.record_path = root / CONVERSATIONS_FOLDER, root / RECORD_FILE
        self.settings, self.log = settings, lru_cache(log)
        self.prefix = file_prefix(argv)
        self.slot_count, self.context = (int(argv[argv.index(option) + 1]) for option in ("--parallel", "--ctx-size"))
        sleep_seconds = float(argv[argv.index(server.SLEEP_OPTION) + 1]) if server.SLEEP_OPTION in argv else math.inf
        self.check_interval_s = min(IDLE_SECONDS, sleep_seconds / 3)
        self.head: server.Head | None = None
        self.job_thread: threading.Thread | None = None
        self.idle_timer = progress.IdleTimer(settings.timeout_s / 5, 0)
        self.is_restored = self.has_pending_slots = False
        self.last_check_time = self.last_processor_seconds = 0.0
        self.last_states: dict[int, tuple[Any, ...]] = {}
        """Slot → its last task and its token count at the last inspection."""
        self.saved_states: dict[int, tuple[Any, ...]] = {}
        self.token_lists: dict[Path, array.array[int]] = {}
        """Tokens of the files that were saved or restored since the start."""
        self.record = dict.fromkeys((*metrics.CONVERSATION_METRIC_NAMES, PAUSE_END_KEY), 0.0)
        self.record.update(
            journal.read_back(self.record_path, lambda data: {name: float(data[name]) for name in [*self.record]}) or {}
        )
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._paths(NEW_SUFFIX, TRIED_SUFFIX):
            if path.suffix == TRIED_SUFFIX:
                self.log("deleted a saved conversation, because llama-server exited while restoring it")
            path.unlink()

    def watch_output(self, output: bytes) -> None:
        """Restore conversations when llama-server logs that it has loaded its model, unless they were restored since it freed the model."""
        for line in STATE_LINE_PATTERN.finditer(output):
            if line[1] == b"entering" and self.head:
                self.head.is_asleep, self.is_restored = True, False
            elif not self.is_restored:
                self._start_job(self._restore)

    def fault(self) -> server.Fault | None:
        """Start a save or restore that is due; return a fault if one hangs."""
        head, clock = self.head, time.monotonic()
        if not head or not head.is_ready:
            return None
        if self.job_thread and self.job_thread.is_alive():
            sample, limit_s = head.last_sample, self.settings.timeout_s
            if not sample or self.idle_timer.seconds(sample, head.endpoints, clock) < limit_s:
                return None
            self.record[PAUSE_END_KEY] = time.time() + PAUSE_SECONDS
            journal.write_state(self.record_path, self.record)
            note = f"nothing is saved for the next {PAUSE_SECONDS / 60:.0f} minutes"
            return server.Fault(f"saving or restoring a conversation has hung for {limit_s} s: {note}", is_silent=True)
        if head.is_asleep:
            return None
        if not self.is_restored:
            self._start_job(self._restore)
        elif clock - self.last_check_time >= self.check_interval_s and (self._was_busy(head) or self.has_pending_slots):
            self.last_check_time, self.has_pending_slots = clock, False
            self._start_job(self._save)
        return None

    def save_now(self) -> None:
        """Save every changed slot, because llama-server is about to be stopped."""
        for action in (None, partial(self._save, True)):
            if action and self.head and self.head.is_ready and not self.head.is_asleep:
                self._start_job(action)
            if self.job_thread:
                self.job_thread.join(STOP_SECONDS / 2)

    def _was_busy(self, head: server.Head) -> bool:
        """Return whether llama-server may have computed since the last call. Do not ask an idle server for its slots: it would never sleep."""
        sample = head.last_sample
        if sample is None:
            return server.SLEEP_OPTION not in head.argv
        total_seconds = sample.activity.processor_seconds
        used_seconds, self.last_processor_seconds = total_seconds - self.last_processor_seconds, total_seconds
        return used_seconds >= BUSY_SECONDS or head.idle_timer.last_activity_time > self.last_check_time

    def _start_job(self, action: Callable[[], None]) -> None:
        if self.record[PAUSE_END_KEY] < time.time() and not (self.job_thread and self.job_thread.is_alive()):
            self.is_restored, self.idle_timer = True, progress.IdleTimer(self.settings.timeout_s / 5, time.monotonic())
            failure_text = "conversations are not kept"
            self.job_thread = threading.Thread(target=journal.run_safely, args=(failure_text, action), daemon=True)
            self.job_thread.start()

    def _request(self, subpath: str, file: Path | None = None) -> server.ServerRequest | None:
        """Send a request, unless another process has taken the port: it must not receive a key."""
        head, body = self.head, json.dumps({"filename": file.name}) if file else ""
        if not head or (head.last_sample and head.is_ready and not head.listens(head.last_sample)):
            return None
        return server.ServerRequest(head.base_url, f"/slots{subpath}", head.headers, body=body)

    def _read_slots(self) -> list[dict[str, Any]]:
        answer = self._await_answer(self._request(""))
        return answer if isinstance(answer, list) else []

    def _await_answer(self, request: server.ServerRequest | None, slot: int | None = None) -> Any:
        """Return the answer, or None. Cancel a request for a busy slot: it would wait until the slot is idle, and then restore an older state."""
        while request and request.is_alive():
            request.join(None if slot is None else 1.0)
            if request.is_alive() and any(row["id"] == slot and row["is_processing"] for row in self._read_slots()):
                request.cancel()
        with suppress(ValueError):
            return json.loads(request.reply) if request else None

    def _restore(self) -> None:
        """Restore the newest conversations with simultaneous requests, so that they overtake a client that waits for the model."""
        start_time, tokens, requests = time.monotonic(), 0, []
        own_paths = [
            path for path in self._paths(SAVED_SUFFIX) if path.name.startswith(self.prefix) and self._is_complete(path)
        ]
        for slot, saved_path in enumerate(reversed(own_paths[-self.slot_count :])):
            tried_path = saved_path.replace(saved_path.with_suffix(TRIED_SUFFIX))
            requests.append((saved_path, tried_path, self._request(f"/{slot}?action=restore", tried_path)))
        for slot, (saved_path, tried_path, request) in enumerate(requests):
            answer = self._await_answer(request, slot)
            if answer and not answer.get("n_restored"):
                tried_path.unlink()
                self.log(f"deleted a saved conversation that could not be restored: {_error_text_of(answer)}")
            elif answer or (request and request.is_cancelled):
                tried_path.replace(saved_path)
                self.token_lists[saved_path] = _tokens_of(saved_path)
                tokens += answer["n_restored"] if answer else 0
        if tokens:
            seconds, slot_context = time.monotonic() - start_time, self.context / self.slot_count
            self.record[TOKENS_METRIC] += tokens
            self.record[SECONDS_METRIC] += max(0.0, self.settings.computing_seconds * tokens / slot_context - seconds)
            self.log(f"restored {tokens} tokens of conversations in {seconds:.1f} s")
        self._evict(0)

    def _save(self, is_stopping: bool = False) -> None:
        """Save each slot that has changed and is idle; before a stop also slots that have only just changed."""
        for row in self._read_slots():
            slot, tokens = row["id"], row.get("n_prompt_tokens") or 0
            state = (row.get("id_task"), tokens)
            is_idle, self.last_states[slot] = is_stopping or self.last_states.get(slot) == state, state
            self.has_pending_slots = self.has_pending_slots or row["is_processing"] or not is_idle
            if row["is_processing"] or tokens < MIN_TOKENS or self.saved_states.get(slot) == state:
                continue
            if is_idle:
                self.saved_states[slot] = state
                self._save_slot(slot, tokens)

    def _save_slot(self, slot: int, tokens: int) -> None:
        if not self._evict(self.settings.slot_mib * units.MIB * tokens * self.slot_count // self.context + units.MIB):
            self.log(f"a conversation of {tokens} tokens was not saved: it does not fit into {self.folder}")
            return
        new_path = self.folder / f"{self.prefix}-{slot}{NEW_SUFFIX}"
        answer = self._await_answer(self._request(f"/{slot}?action=save", new_path), slot)
        if not answer or not answer.get("n_saved"):
            self.log(f"a conversation was not saved in {self.folder}: {_error_text_of(answer)}")
            with suppress(OSError):
                new_path.unlink()
            return
        new_path.chmod(0o600)
        saved_tokens = _tokens_of(new_path)
        path = new_path.with_name(f"{self.prefix}-{time.time_ns()}-{new_path.stat().st_size}{SAVED_SUFFIX}")
        new_path.replace(path)
        for old_path in [old_path for old_path, ids in self.token_lists.items() if _continues(saved_tokens, ids)]:
            del self.token_lists[old_path]
            old_path.unlink(missing_ok=True)
        self.token_lists[path] = saved_tokens
        self._evict(0)

    def _is_complete(self, path: Path) -> bool:
        """Return whether a file has the size in its name; delete a truncated file, because llama-server of build 11063 aborts when it reads one."""
        is_complete = path.stem.endswith(f"-{path.stat().st_size}")
        if not is_complete:
            path.unlink()
            self.log("deleted a truncated file: its conversation cannot be restored")
        return is_complete

    def _paths(self, *suffixes: str) -> list[Path]:
        """Return the files with these suffixes in the order of deletion: files with another key first, then the oldest."""
        paths = [path for path in self.folder.iterdir() if path.suffix in suffixes]
        return sorted(paths, key=lambda path: (path.name.startswith(self.prefix), path.stat().st_mtime))

    def _evict(self, size: int) -> bool:
        """Delete files until this number of bytes is free; if that is impossible, delete nothing and return False."""
        paths, disk = self._paths(SAVED_SUFFIX), shutil.disk_usage(self.folder)
        sizes = {path: path.stat().st_size for path in paths}
        used_bytes = sum(sizes.values())
        max_bytes = min(self.settings.max_mib * units.MIB, used_bytes + disk.free - int(FREE_SHARE * disk.total)) - size
        if max_bytes < 0 < size:
            return False
        for path in paths:
            if used_bytes > max_bytes:
                path.unlink()
                self.token_lists.pop(path, None)
                used_bytes -= sizes.pop(path)
        self.record[FILES_METRIC] = sum(path.name.startswith(self.prefix) for path in sizes)
        journal.write_state(self.record_path, self.record)
        return True

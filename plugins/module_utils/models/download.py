# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a model get from a web server, or in pieces from the controller, onto this host.

A file grows beside its place, as NAME.part, and takes its place when its size and its sha256 are right. The record beside the files is written last.
What is recorded and was not changed since is not read again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, locks, reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import existing, replace_file, sha256, sync
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import amount
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, downloaded, web

AT_ONCE = 4
PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0)
"""Seconds before each attempt in a row that brings no byte; after the last one it is given up."""
PIECE = 1 << 20
FETCH, CHECK = "fetch", "check"
"""What is done with a file: bytes come, or those that are here are read."""
SAID: dict[str, Any] = {
    "file": Text(),
    "step": (FETCH, CHECK),
    **dict.fromkeys(("files", "done", "total", "rate"), Number()),
}
"""How far all files are."""
SAID_SECONDS = 1.0
RATE_SECONDS = 15.0
"""Over which the rate is taken."""
SHORTER = 416
"""Status of HTTP where a file ends before what is asked for."""
TOKEN_SECONDS = 60
WAIT_SECONDS = 1800
"""How long another process may have the lock and get nowhere."""


# ------------------------------------------------------------------------------------------------------- before it is fetched


def check_places(files: Iterable[downloaded.File], folder: Path) -> None:
    """:raises Refusal: a file, or its part, is not below the folder: by its path, or by a symbolic link."""
    root = os.path.realpath(folder)
    for file in files:
        for path in (file.path, downloaded.part_of(file.path), file.record):
            real = os.path.realpath(path)
            if os.path.commonpath([real, root]) != root or real == root:
                raise Refusal(
                    f"{path} leads to {real}, out of {folder}: remove the symbolic link, or let {folder} itself be the link to the disk that has room; "
                    "nothing was written"
                )


def check_room(needs: Iterable[downloaded.Need], folder: Path) -> None:
    """:raises Refusal: what is left of all files does not fit beside what is there."""
    rooms: dict[int, tuple[Path, int]] = {}
    for need in needs:
        place = existing(need.file.path.parent)
        device = os.stat(place).st_dev
        rooms[device] = (place, rooms.get(device, (place, 0))[1] + need.file.bytes - need.have)
    for place, wanted in rooms.values():
        room = os.statvfs(place)
        free = room.f_bavail * room.f_frsize
        if wanted > free:
            raise Refusal(
                f"The model's files need {amount(wanted)} more on {errors.file_system(str(place))}, which has {amount(free)} left: free "
                f"{amount(wanted - free)} there, or let {folder} be on another disk, and run the playbook again. Nothing was written"
            )


@contextmanager
def alone(folder: Path) -> Iterator[int]:
    """The lock of the folder, as a descriptor; another process that fetches is waited for as long as it gets on.

    :raises Refusal: it gets nowhere.
    """
    path = folder / downloaded.LOCK
    lock = locks.open_file(path)
    try:
        seen, since = b"", time.monotonic()
        while not locks.take(lock, SAID_SECONDS):
            said = os.pread(lock, download_record.RECORD_BYTES, 0)
            if said != seen:
                seen, since = said, time.monotonic()
            elif time.monotonic() - since > WAIT_SECONDS:
                raise Refusal(
                    f"{locks.shown_holders(path)} on this host fetches models (it holds {path}), and got nowhere for {WAIT_SECONDS // 60} minutes: end it, "
                    "and run the playbook again"
                )
        yield lock
    finally:
        os.close(lock)


class Progress:
    """How far all files are. It is kept in the file of the lock, where whoever shows it reads it."""

    def __init__(self, lock: int, needs: Iterable[downloaded.Need]) -> None:
        self._lock, self._mutex = lock, threading.Lock()
        self._files = {need.file.path: (need.have, need.file.bytes, FETCH) for need in needs}
        self._seen: list[tuple[float, int]] = []
        self.say()

    def at(self, file: downloaded.File, count: int, step: str = FETCH) -> None:
        with self._mutex:
            self._files[file.path] = (count, file.bytes, step)

    def say(self) -> None:
        """Writes it down; where that fails, nothing but a line on a screen is lost."""
        with self._mutex:
            done = sum(entry[0] for entry in self._files.values())
            total = sum(entry[1] for entry in self._files.values())
            open_files = [(path.name, step) for path, (have, size, step) in self._files.items() if have < size]
        now = time.monotonic()
        self._seen = [*(pair for pair in self._seen if now - pair[0] <= RATE_SECONDS), (now, done)]
        begun, before = self._seen[0]
        spent = now - begun
        rate = (done - before) / spent if spent > 0 else 0
        name, step = next(
            ((name, step) for name, step in open_files if step != FETCH), (open_files or [("", FETCH)])[0]
        )
        text = json.dumps(
            {
                "file": name,
                "step": step,
                "files": len(open_files),
                "done": done,
                "total": total,
                "rate": max(0, round(rate)),
            }
        )
        with suppress(OSError):
            os.ftruncate(self._lock, os.pwrite(self._lock, text.encode(), 0))


def parse_progress(text: str) -> dict[str, Any] | None:
    """What ``Progress.say`` wrote; None where that is nothing, not whole, or has another form: its host may write anything there."""
    with suppress(ValueError):
        said = reading.parse(text)
        return None if validation.mismatch("it", said, SAID) else {key: said[key] for key in SAID}
    return None


# ----------------------------------------------------------------------------------------------------------------- one file


class Stopped(Exception):
    """Another file cannot be fetched; what came of this one is kept."""


class _Part:
    """NAME.part of a file, whose hash grows with it."""

    def __init__(self, file: downloaded.File, fresh: bool) -> None:
        path = downloaded.part_of(file.path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Refusal(f"{path} is a symbolic link: remove it, and run the playbook again") from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise Refusal(f"{path} is not a regular file: remove it, and run the playbook again")
        self.file, self.path, self.digest, self.count = file, path, hashlib.sha256(), 0
        self.stream: BinaryIO = os.fdopen(descriptor, "r+b", buffering=0)
        os.fchmod(descriptor, 0o644)
        if fresh or file.sha256 is None or os.fstat(descriptor).st_size > file.bytes:
            self.stream.truncate(0)

    def resume(self, say: Callable[[int], None]) -> None:
        """Reads what is there already."""
        while piece := self.stream.read(PIECE):
            self.digest.update(piece)
            self.count += len(piece)
            say(self.count)

    def write(self, data: bytes) -> None:
        """:raises OSError: names the part."""
        left = memoryview(data)
        try:
            while left:
                left = left[self.stream.write(left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.digest.update(data)
        self.count += len(data)

    def place(self) -> None:
        """Lets a whole part take its place. Until there is a record, a part of that says that the folder is of a download."""
        os.fsync(self.stream.fileno())
        if not self.file.record.exists():
            mark = downloaded.part_of(self.file.record)
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644))
        os.replace(self.path, self.file.path)
        sync(self.path.parent)


def take_token(pipe: str) -> str:
    """The token that the controller writes into a named pipe, which is made here: so it lies in no file.

    :raises Refusal: it does not come.
    """
    os.mkfifo(pipe, 0o600)
    stream = os.open(
        pipe, os.O_RDWR | os.O_CLOEXEC
    )  # with both ends neither opening nor reading depends on who else has it
    try:
        token = b""
        while not token.endswith(b"\n"):
            if not select.select([stream], [], [], TOKEN_SECONDS)[0]:
                raise Refusal(
                    "The token of llama_model_token_file did not come: run the playbook again, or set llama_model_fetched_by: controller"
                )
            token += os.read(stream, PIECE)
        return token.decode().strip()
    finally:
        os.close(stream)
        os.unlink(pipe)


class RefusedError(Refusal):
    """A server does not give the rest of a file. ``replaced`` is whether it has another one by now."""

    def __init__(self, message: str, replaced: bool) -> None:
        super().__init__(message)
        self.replaced = replaced


def receive(
    file: downloaded.File,
    token: str | None,
    offset: int,
    take: Callable[[bytes], None],
    pause: Callable[[float], object],
) -> None:
    """Hands the rest of a file on, piece by piece. A connection that breaks is made again, as often as it takes while bytes arrive,
    and no slower than remote.SLOWEST.

    :raises RefusedError: the server does not give it.
    """
    download, in_vain = web.Download(file.url, file.bytes, token), 0
    while offset < file.bytes:
        before, waited = offset, download.waited
        try:
            for piece in download.rest(before):
                take(piece)
                offset += len(piece)
        except web.RemoteError as error:
            in_vain = 0 if offset - before > web.SLOWEST * (download.waited - waited) else in_vain + 1
            if not error.passes or in_vain >= len(PAUSES):
                replaced = error.status == SHORTER or download.size not in (None, file.bytes)
                raise RefusedError(f"{_source(file)} {why(error, token)}.", replaced) from error
            pause(PAUSES[in_vain])


class _Fetcher:
    def __init__(self, token: str | None, tokens_for: str | None, progress: Progress) -> None:
        """:param tokens_for: URL of the server that gets the token."""
        self.token, self.tokens_for, self.progress = token, tokens_for, progress
        self.stop = threading.Event()

    def fetch(self, need: downloaded.Need) -> str:
        """Brings a file to its place; returns its sha256.

        :raises Refusal: it cannot be had, or is not what was planned.
        :raises Stopped: others could not be had.
        """
        file = need.file
        if need.unchecked:
            if self._read(file.path, file) == file.sha256:
                self.progress.at(file, file.bytes)
                return file.sha256
            self.progress.at(file, 0)
        for fresh in (False, True):
            part = _Part(file, fresh)
            with part.stream:
                part.resume(lambda count: self._on(file, count, CHECK))
                begun = part.count
                self._receive(file, part)
                digest = part.digest.hexdigest()
                if file.sha256 in (None, digest):
                    part.place()
                    return digest
                os.unlink(part.path)
            if not begun or file.sent:
                break
        raise Refusal(
            f"{_source(file)} has the sha256 {digest}, planned is {file.sha256}: what was fetched is removed. Run the playbook again; where that "
            "goes on, the file was replaced at its source, or its checksum is wrong"
        )

    def _on(self, file: downloaded.File, count: int, step: str = FETCH) -> None:
        if self.stop.is_set():
            raise Stopped
        self.progress.at(file, count, step)

    def _read(self, path: Path, file: downloaded.File) -> str:
        digest, count = hashlib.sha256(), 0
        with reading.open_file(path, follow=True) as stream:
            while piece := stream.read(PIECE):
                digest.update(piece)
                count += len(piece)
                self._on(file, min(count, file.bytes - 1), CHECK)
        return digest.hexdigest()

    def _receive(self, file: downloaded.File, part: _Part) -> None:
        """The rest of a file."""
        if file.sent:
            if part.count < file.bytes:
                raise Refusal(
                    f"{part.path} has {part.count} of {file.bytes} bytes, and the controller sends the rest: run the playbook again"
                )
            return

        def take(piece: bytes) -> None:
            part.write(piece)
            self._on(file, part.count)

        token = self._token(file.url)
        try:
            receive(file, token, part.count, take, self.stop.wait)
        except RefusedError as error:
            raise Refusal(f"{error} {_kept(part, error.replaced)}") from error

    def _token(self, url: str) -> str | None:
        return self.token if self.tokens_for and web.same_server(url, self.tokens_for) else None


def _source(file: downloaded.File) -> str:
    return web.shown(file.url)


def _kept(part: _Part, replaced: bool) -> str:
    unknown = part.file.sha256 is None
    if replaced or unknown or not part.count:
        with suppress(OSError):
            os.unlink(part.path)
        why = ": its checksum is not known, so the next run begins anew" if unknown and not replaced else ""
        return f"What was fetched of it is removed{why}" if part.count else "Nothing of it was fetched"
    return f"{amount(part.count)} of {amount(part.file.bytes)} are kept: the next run goes on there"


def why(error: web.RemoteError, token: str | None) -> str:
    """What a server's answer means, as the end of a sentence that begins with the URL."""
    if error.status in (401, 403):
        remedy = (
            "the token of llama_model_token_file is not entitled to it: accept the model's licence on its page with the account of that token"
            if token
            else "accept the model's licence on its page, and set llama_model_token_file to a file with a token of that account"
        )
        return f"needs permission (HTTP {error.status}): {remedy}"
    return str(error).replace("set the option token", "set llama_model_token_file")


# ------------------------------------------------------------------------------------------------------------- all the files


def fetch(
    files: Sequence[downloaded.File], folder: Path, records: Sequence[Mapping[str, Any]], token: str | None
) -> dict[str, str]:
    """Brings all files to their places, several at once, and writes the records; returns path → sha256 of all.

    :param records: their ``path``, and what is to stand there beside what was found of the files.
    :raises Refusal: one of them cannot be had, or there is no room; what has come is kept.
    """
    check_places(files, folder)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with alone(folder) as lock:
        needs = downloaded.compare(files)
        check_room(needs, folder)
        for need in needs:
            need.file.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fetcher = _Fetcher(token, downloaded.token_server(files, records), Progress(lock, needs))
        digests = _fetch_all(needs, fetcher)
        known = {record: downloaded.read_record(record) for record in {file.record for file in files}}
        entries = {file.path: digests.get(file.path) or known[file.record][str(file.path)]["sha256"] for file in files}
        _record(files, {str(record["path"]): downloaded.content(record) for record in records}, entries)
    return {str(path): digest for path, digest in entries.items()}


def _fetch_all(needs: Sequence[downloaded.Need], fetcher: _Fetcher) -> dict[Path, str]:
    with ThreadPoolExecutor(max_workers=AT_ONCE) as threads:
        jobs = {threads.submit(fetcher.fetch, need): need.file for need in needs}
        try:
            left = set(jobs)
            while left:
                done, left = wait(left, timeout=SAID_SECONDS, return_when=FIRST_EXCEPTION)
                fetcher.progress.say()
                for job in done:
                    job.result()
        except BaseException:
            fetcher.stop.set()
            for job in jobs:
                job.cancel()
            raise
        return {file.path: job.result() for job, file in jobs.items()}


def _record(
    files: Iterable[downloaded.File], contents: Mapping[str, Mapping[str, Any]], digests: Mapping[Path, str]
) -> None:
    """Writes each record whose text is another one."""
    checked: dict[Path, dict[str, Any]] = {}
    for file in files:
        entry = {"bytes": file.bytes, "sha256": digests[file.path], "modified": int(os.stat(file.path).st_mtime)}
        checked.setdefault(file.record, {})[str(file.path)] = entry
    for path, entries in checked.items():
        text = json.dumps({**contents.get(str(path), {}), downloaded.CHECKED: entries}, indent=1, sort_keys=True) + "\n"
        if _text_of(path, len(text.encode())) != text:
            replace_file(path, text, 0o644)
        downloaded.part_of(path).unlink(missing_ok=True)


def _text_of(path: Path, size: int) -> str | None:
    """Of a file of this size; None where there is none."""
    with suppress(OSError):
        return reading.read(path, size + 1).decode("utf-8", "replace")
    return None


# ---------------------------------------------------------------------------------------------------- what the controller sends


class Held(NamedTuple):
    """What is here of a file that the controller sends."""

    bytes: int
    sha256: str | None
    """Where it was asked for."""


def held(file: downloaded.File, folder: Path, with_digest: bool) -> Held:
    """What the part of a file holds; nothing of one that is too long."""
    check_places([file], folder)
    count = downloaded.size_of(downloaded.part_of(file.path)) or 0
    if not count or count > file.bytes:
        return Held(0, None)
    return Held(count, sha256(downloaded.part_of(file.path)) if with_digest else None)


def append(file: downloaded.File, folder: Path, piece: Path, offset: int, sha256: str) -> int:
    """Adds a piece to the part of a file, which has ``offset`` bytes then; returns how many it has after that.

    :raises Refusal: the piece is damaged, or the part has not as many bytes.
    """
    check_places([file], folder)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with alone(folder):
        file.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        part = _Part(file._replace(sha256=sha256), fresh=offset == 0)
        with part.stream, reading.open_file(piece) as sent:
            if part.stream.seek(0, os.SEEK_END) < offset:
                raise Refusal(
                    f"{part.path} has less than {offset} bytes: another run fetches it; run the playbook again"
                )
            part.stream.truncate(offset)
            part.stream.seek(offset)
            try:
                while data := sent.read(PIECE):
                    part.write(data)
                if part.digest.hexdigest() != sha256:
                    raise Refusal(f"{piece} is not what the controller sent: run the playbook again")
            except BaseException:
                part.stream.truncate(offset)
                raise
        return offset + part.count

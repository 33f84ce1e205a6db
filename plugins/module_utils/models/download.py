# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings the files of a model onto this host, one after the other.

A file grows beside its place, as NAME.part, and takes its place when its size and its sha256 are right. The record beside the files is written last.
What is recorded and was not changed since is not read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, locks, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import existing, replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import amount
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import model_files, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.model_files import ModelFile, PendingFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.partial_file import (
    PIECE,
    PartialFile,
    check_places,
    create,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import DownloadRecordPlan

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0)
"""Seconds before each attempt in a row that brings less than ENOUGH; after the last one the file is given up."""
ENOUGH = web.SLOWEST * web.SECONDS_OF_SILENCE
"""Bytes of a connection that is worth another one."""
DOWNLOAD, CHECK = "fetch", "check"
"""What is done with a file: bytes come, or those that are here are read."""
PROGRESS_SECONDS = 1.0
SHORTER = 416
"""Status of HTTP where a file ends before what is asked for."""
TOKEN_FILE = "llama_model_token_file"
TOKEN_SECONDS = 60
WAIT_SECONDS = 1800
"""How long another process may have the lock without progress."""


def check_room(waiting: Iterable[PendingFile], folder: Path) -> None:
    """:raises Refusal: what is left of all files does not fit beside what is there."""
    rooms: dict[int, tuple[Path, int]] = {}
    for file, present, _in_place in waiting:
        place = existing(file.path.parent)
        device = os.stat(place).st_dev
        rooms[device] = (place, rooms.get(device, (place, 0))[1] + file.bytes - present)
    for place, needed in rooms.values():
        room = os.statvfs(place)
        free = room.f_bavail * room.f_frsize
        if needed > free:
            raise Refusal(
                f"The model's files need {amount(needed)} more on {errors.file_system(str(place))}, which has {amount(free)} left: free "
                f"{amount(needed - free)} there, or let {folder} be on another disk, and run the playbook again. Nothing was written"
            )


@contextmanager
def exclusive(folder: Path) -> Iterator[int]:
    """The lock of the folder, as a descriptor; another process that downloads is waited for as long as it makes progress.

    :raises Refusal: it makes none.
    """
    path = folder / model_files.LOCK
    lock = locks.open_file(path)
    try:
        last, since = b"", time.monotonic()
        while not locks.take(lock, PROGRESS_SECONDS):
            text = os.pread(lock, reading.REPLY_BYTES, 0)
            if text != last:
                last, since = text, time.monotonic()
            elif time.monotonic() - since > WAIT_SECONDS:
                raise Refusal(
                    f"{locks.shown_holders(path)} on this host downloads models (it holds {path}), without progress for {WAIT_SECONDS // 60} minutes: "
                    "end it, and run the playbook again"
                )
        yield lock
    finally:
        os.close(lock)


def take_token(pipe: str) -> str:
    """The token that the controller writes into a named pipe, which is made here: so it lies in no file.

    :raises Refusal: it does not come.
    """
    os.mkfifo(pipe, 0o600)
    # With both ends neither opening nor reading depends on who else has it.
    stream = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
    try:
        token = b""
        while not token.endswith(b"\n"):
            if not select.select([stream], [], [], TOKEN_SECONDS)[0]:
                raise Refusal(
                    f"The token of {TOKEN_FILE} did not come: run the playbook again, or set llama_model_fetched_by: controller"
                )
            token += os.read(stream, PIECE)
        return token.decode().strip()
    finally:
        os.close(stream)
        os.unlink(pipe)


# ------------------------------------------------------------------------------------------------------------------- progress


class ProgressReport(NamedTuple):
    """How far all files are."""

    file: str
    """Name of the one that is worked at."""
    step: Annotated[str, (DOWNLOAD, CHECK)]
    files: int
    """How many are not whole yet."""
    done: int
    """Bytes."""
    total: int
    """Bytes."""


class Progress:
    """Writes how far all files are into the file of the lock, where whoever shows it reads it."""

    def __init__(self, lock: int, waiting: Sequence[PendingFile]) -> None:
        self._lock, self._written = lock, -PROGRESS_SECONDS
        self._files = {file.path: (present, file.bytes) for file, present, _in_place in waiting}
        if waiting:
            self.update(waiting[0].file, waiting[0].present_bytes)

    def update(self, file: ModelFile, count: int, step: str = DOWNLOAD) -> None:
        """Notes how many bytes of a file are there or read; written once a second."""
        self._files[file.path] = (count, file.bytes)
        if time.monotonic() - self._written < PROGRESS_SECONDS:
            return
        self._written = time.monotonic()
        files = sum(done < total for done, total in self._files.values())
        done, total = (sum(numbers) for numbers in zip(*self._files.values()))
        report = ProgressReport(file.path.name, step, files, done, total)
        # Where this fails, nothing but a line on a screen is lost.
        with suppress(OSError):
            os.ftruncate(self._lock, os.pwrite(self._lock, json.dumps(typed_json.dump(report)).encode(), 0))


def parse_progress(text: str) -> ProgressReport | None:
    """What ``Progress`` wrote; None where that is nothing, not whole, or has another form: its host may write anything there."""
    with suppress(ValueError):
        data = reading.parse(text)
        return None if typed_json.problem("it", data, ProgressReport) else typed_json.parse(ProgressReport, data)
    return None


# ------------------------------------------------------------------------------------------------------------------- one file


class SourceError(Refusal):
    """A server does not give the rest of a file. ``replaced`` is whether it has another one by now."""

    def __init__(self, message: str, replaced: bool) -> None:
        super().__init__(message)
        self.replaced = replaced


def receive(file: ModelFile, token: str | None, offset: int, take: Callable[[bytes], None]) -> None:
    """Hands the rest of a file on, piece by piece. A connection that breaks is made again, as often as it takes while bytes arrive.

    :raises SourceError: the server does not give it.
    """
    failures = 0
    while offset < file.bytes:
        before = offset
        try:
            for piece in web.download(file.url, offset, file.bytes, token):
                take(piece)
                offset += len(piece)
        except web.RemoteError as error:
            failures = 0 if offset - before >= ENOUGH else failures + 1
            if not error.passes or failures >= len(PAUSES):
                replaced = isinstance(error, web.ReplacedError) or error.status == SHORTER
                reason = web.explain(error, TOKEN_FILE, token)
                raise SourceError(f"{web.shown(file.url)} {reason}.", replaced) from error
            time.sleep(PAUSES[failures])


def _complete(waiting: PendingFile, token: str | None, progress: Progress) -> str:
    """Brings a file to its place; its sha256.

    :raises Refusal: its source does not give it, or gives something else than was planned.
    """
    file = waiting.file
    if waiting.in_place:
        digest = _digest_of(file, progress)
        if digest == file.sha256:
            return digest
        if file.sent:
            os.unlink(file.path)
            raise _mismatch(file, digest)
        progress.update(file, 0)
    for fresh in (False, True):
        with PartialFile(file.part) as part:
            if fresh or file.sha256 is None or part.size > file.bytes:
                part.truncate(0)
            part.resume(lambda count: progress.update(file, count, CHECK))
            resumed = part.count
            _receive(file, token, part, progress)
            if file.sha256 in (None, part.sha256):
                _place(file, part)
                return part.sha256
            os.unlink(part.path)
        if not resumed or file.sent:
            break
    raise _mismatch(file, part.sha256)


def _mismatch(file: ModelFile, digest: str) -> Refusal:
    return Refusal(
        f"{web.shown(file.url)} has the sha256 {digest}, planned is {file.sha256}: what was downloaded is removed. Run the playbook again; if that "
        "fails in the same way, the file was replaced at its source, or its checksum is wrong"
    )


def _digest_of(file: ModelFile, progress: Progress) -> str:
    digest, count = hashlib.sha256(), 0
    with reading.open_file(file.path, follow=True) as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
            count += len(piece)
            progress.update(file, min(count, file.bytes), CHECK)
    return digest.hexdigest()


def _receive(file: ModelFile, token: str | None, part: PartialFile, progress: Progress) -> None:
    if file.sent and part.count < file.bytes:
        raise Refusal(
            f"{part.path} has {part.count} of {file.bytes} bytes, and the controller sends the rest: run the playbook again"
        )

    def take(piece: bytes) -> None:
        part.write(piece)
        progress.update(file, part.count)

    try:
        receive(file, token, part.count, take)
    except SourceError as error:
        raise Refusal(f"{error} {_outcome(file, part, error.replaced)}") from error


def _outcome(file: ModelFile, part: PartialFile, replaced: bool) -> str:
    """What becomes of a part whose rest does not come."""
    if part.count and file.sha256 and not replaced:
        return f"{amount(part.count)} of {amount(file.bytes)} are kept: the next run continues there"
    with suppress(OSError):
        os.unlink(part.path)
    if not part.count:
        return "Nothing of it was downloaded"
    reason = "" if replaced else ": its checksum is not known, so the next run starts again"
    return f"What was downloaded of it is removed{reason}"


def _place(file: ModelFile, part: PartialFile) -> None:
    """Until there is a record, a part of that says that the folder is of a download."""
    if not file.record.exists():
        create(model_files.part_of(file.record))
    part.move_to(file.path)


# -------------------------------------------------------------------------------------------------------------- all the files


def download(
    files: Sequence[ModelFile], folder: Path, records: Sequence[DownloadRecordPlan], token: str | None
) -> dict[str, str]:
    """Brings all files to their places, and writes the records; path → sha256 of all.

    :raises Refusal: one of them cannot be had, or there is no room; what has come is kept.
    """
    check_places(files, folder)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with exclusive(folder) as lock:
        waiting = model_files.pending(files)
        check_room(waiting, folder)
        for file, _present, _in_place in waiting:
            file.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        server, progress = model_files.token_server(files, records), Progress(lock, waiting)
        pending = {one.file.path for one in waiting}
        digests = {
            file.path: model_files.checked_files(file.record)[str(file.path)]["sha256"]
            for file in files
            if file.path not in pending
        }
        for one in waiting:
            same = server and web.same_server(one.file.url, server)
            digests[one.file.path] = _complete(one, token if same else None, progress)
        contents = {record.path: model_files.content(record) for record in records}
        for record in dict.fromkeys(file.record for file in files):
            own = [file for file in files if file.record == record]
            _write_record(record, contents.get(str(record), {}), own, digests)
    return {str(path): digest for path, digest in digests.items()}


def _write_record(
    path: Path, content: Mapping[str, Any], files: Iterable[ModelFile], digests: Mapping[Path, str]
) -> None:
    """Writes a record whose text is another one."""
    checked = {
        str(file.path): {
            "bytes": file.bytes,
            "sha256": digests[file.path],
            "modified": int(os.stat(file.path).st_mtime),
        }
        for file in files
    }
    text = json.dumps({**content, model_files.CHECKED: checked}, indent=1, sort_keys=True) + "\n"
    current = None
    with suppress(OSError):
        current = reading.read(path, len(text.encode()) + 1)
    if current != text.encode():
        replace_file(path, text, 0o644)
    model_files.part_of(path).unlink(missing_ok=True)

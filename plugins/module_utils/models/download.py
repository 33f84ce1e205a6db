# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Downloads the files of a model onto this host with curl, one after the other.

A file grows beside its place, as NAME.part, and takes its place when its size and its sha256 are right. The record beside the files is written last.
What is recorded and was not changed since is not read again.
"""

import errno
import json
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    errors,
    files,
    locks,
    typed_json,
    validation,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import amount
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, model_files, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.download_record import Record, StoredFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.model_files import PendingFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import KnownAnswerPlan, ModelFilePlan

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0)
"""Seconds before each attempt in a row that brings less than ENOUGH; after the last one the file is given up."""
ENOUGH = 64 << 10
"""Bytes more than before: a connection that brings them is worth another one."""
OPTIONS = (
    *("silent", "show-error", "fail", "location", "globoff", "max-redirs = 5", "connect-timeout = 60"),
    *(
        "speed-limit = 4096",
        "speed-time = 60",
        "continue-at = -",
        'write-out = "%{http_code}"',
        'proto = "=http,https"',
    ),
)
REFUSED_STATUS, NOT_WRITTEN, NO_RANGES = 22, 23, 33
"""What curl returns where the server answers with an error, the disk takes no more, or the server sends whole files only."""
PASSING = (5, 6, 7, 16, 18, 28, 35, 52, 55, 56, 92)
"""What it returns where the same request may succeed a moment later: names, connections and time limits."""


class ModelArguments(NamedTuple):
    """Of the module ``model``."""

    files: tuple[ModelFilePlan, ...] = ()
    folder: str = ""
    known_answer: Optional[KnownAnswerPlan] = None
    """in place of files: size of the known-answer model"""
    path: Annotated[str, "path"] = ""
    """of the known-answer model"""
    token_file: Optional[str] = None
    """on the controller"""
    token: Optional[str] = None
    """what is in that file"""


def check_room(waiting: Iterable[PendingFile], folder: Path) -> None:
    """:raises Refusal: what is left of all files does not fit beside what is there."""
    place, needed = files.existing(folder), sum((one.file.bytes or 0) - one.present_bytes for one in waiting)
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        raise Refusal(
            f"The model's files need {amount(needed)} more on {errors.file_system(str(place))}, which has {amount(free)} left: free "
            f"{amount(needed - free)} there, or let {folder} be on another disk, and run the playbook again. Nothing was written"
        )


def download(wanted: Sequence[ModelFilePlan], folder: Path, token: Optional[str], seconds: float) -> None:
    """Brings all files to their places, and writes the records.

    :param seconds: that another download is waited for.
    :raises Refusal: one of them cannot be had, or there is no room; what has come is kept.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locks.hold(folder / model_files.LOCK, seconds) as lock:
        waiting = model_files.pending(wanted)
        check_room(waiting, folder)
        server = _token_server(wanted)
        for file in (one.file for one in waiting):
            Path(file.path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            same = server and web.same_server(str(file.url), server)
            _complete(file, token if same else None, lock)
        for place in dict.fromkeys(Path(file.path).parent for file in wanted):
            _write_record(place, [file for file in wanted if Path(file.path).parent == place])


def _complete(file: ModelFilePlan, token: Optional[str], lock: int) -> None:
    """Brings a file to its place.

    :raises Refusal: its source does not give it, or gives something else than was planned.
    """
    path, part = Path(file.path), model_files.part_of(file)
    if model_files.size_of(path) == file.bytes and (model_files.is_copied(file) or file.sha256):
        if file.sha256 in (None, files.sha256(path)):
            return
        path.unlink()
    if model_files.is_copied(file):
        raise Refusal(f"{path} is not the file of the controller that was planned: run the playbook again")
    if file.sha256 is None or (model_files.size_of(part) or 0) > (file.bytes or 0):
        part.unlink(missing_ok=True)
    resumed = model_files.size_of(part)
    _receive(file, part, token, lock)
    problem = _problem_of(file, part)
    if problem and resumed:
        part.unlink()
        _receive(file, part, token, lock)
        problem = _problem_of(file, part)
    if problem:
        part.unlink()
        raise Refusal(
            f"{web.shown(str(file.url))} {problem}: what was downloaded is removed. Run the playbook again; if that fails in the same way, the file was "
            "replaced at its source, or its checksum is wrong"
        )
    files.sync(part)
    part.replace(path)
    files.sync(path.parent)


def _problem_of(file: ModelFilePlan, part: Path) -> str:
    """Why what came is not what was planned; empty where it is."""
    size = model_files.size_of(part)
    if size != file.bytes:
        return f"has {size} bytes, planned are {file.bytes}"
    digest = files.sha256(part) if file.sha256 else None
    return "" if digest == file.sha256 else f"has the sha256 {digest}, planned is {file.sha256}"


def _receive(file: ModelFilePlan, part: Path, token: Optional[str], lock: int) -> None:
    """Downloads what the part lacks. A connection that breaks is made again, as often as it takes while bytes arrive.

    :raises Refusal: the server does not give it.
    """
    planned = file.bytes or 0
    failures, most = 0, model_files.size_of(part) or 0
    while (model_files.size_of(part) or 0) < planned:
        problem, passes = _run_curl(file, part, token, lock)
        if not problem:
            return
        size = model_files.size_of(part) or 0
        failures = 0 if size - most >= ENOUGH else failures + 1
        most = max(most, size)
        if not passes or failures >= len(PAUSES):
            kept = f" {amount(size)} of {amount(planned)} are kept: the next run continues there." * part.exists()
            raise Refusal(f"{web.shown(str(file.url))} {problem}.{kept}".rstrip("."))
        time.sleep(PAUSES[failures])


def _run_curl(file: ModelFilePlan, part: Path, token: Optional[str], lock: int) -> tuple[str, bool]:
    """What a connection failed of, empty where it did not, and whether another one may succeed. The token goes to curl alone, by its input."""
    try:
        done = subprocess.run(
            ["curl", "--disable", "--config", "-"],
            input=_configuration(file, part, token),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            pass_fds=[lock],
        )
    except FileNotFoundError:
        raise Refusal("The model is downloaded with curl, which this host lacks: install it") from None
    status = int(done.stdout[-3:] or 0) if done.stdout[-3:].isascii() and done.stdout[-3:].isdigit() else 0
    if done.returncode == REFUSED_STATUS:
        error = web.refused(status, "")
        return web.explain(error, token), error.passes
    if done.returncode == NOT_WRITTEN:
        raise OSError(errno.ENOSPC, "curl could not write all of it", str(part))
    if done.returncode == NO_RANGES:
        part.unlink(missing_ok=True)
        return "cannot be continued, since its server sends whole files only: what came is removed", True
    why = validation.printable(done.stderr.strip()) or f"curl ended with {done.returncode}"
    return (f"cannot be downloaded ({why})" if done.returncode else ""), done.returncode in PASSING


def _configuration(file: ModelFilePlan, part: Path, token: Optional[str]) -> str:
    """What curl reads from its input."""
    secure = str(file.url).startswith("https:")
    given = {
        "url": str(file.url),
        "output": str(part),
        "max-filesize": str(file.bytes),
        "proto-redir": "=https" if secure else "=http,https",
        **({"oauth2-bearer": token} if token else {}),
    }
    quoted = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in given.items()]
    return "\n".join([*OPTIONS, *quoted, ""])


def _write_record(folder: Path, own: Iterable[ModelFilePlan]) -> None:
    """Writes what the files of a folder are."""
    stored = (
        StoredFile(file.name, file.bytes or 0, file.sha256, int(os.stat(file.path).st_mtime), file.revision)
        for file in own
    )
    text = json.dumps(typed_json.dump(Record(tuple(stored))), indent=1) + "\n"
    path = folder / download_record.RECORD
    if not path.is_file() or files.text_of(path) != text:
        files.replace_file(path, text, 0o644)


def _token_server(wanted: Iterable[ModelFilePlan]) -> Optional[str]:
    """A URL of the only server that a token is for: that of the first file."""
    return next((file.url for file in wanted if not model_files.is_copied(file)), None)

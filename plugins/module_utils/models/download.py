# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Downloads the files of a model to this host with curl, one after another.

A file is downloaded as NAME.part in its folder, and gets its final name when its size and SHA-256 match. The record in the folder is written last.
Recorded files that have not changed since are not read again.
"""

import errno
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import parse_count, size_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, model_files, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.download_record import DownloadRecord, StoredFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.model_files import PendingFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import KnownAnswerPlan, ModelFilePlan

RETRY_PAUSES_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0)
"""Pauses before consecutive attempts after less than MIN_PROGRESS_BYTES of progress; after the last attempt the download fails."""
MIN_PROGRESS_BYTES = 64 << 10
"""Minimum progress of a connection that resets the count of failures."""
CURL_OPTIONS = (
    *("silent", "show-error", "fail", "location", "globoff", "max-redirs = 5", "connect-timeout = 60"),
    *("speed-limit = 4096", "speed-time = 60", "continue-at = -"),
    *('write-out = "%{http_code}"', 'proto = "=http,https"'),
)
HTTP_ERROR, WRITE_ERROR, RANGE_ERROR = 22, 23, 33
"""Exit statuses of curl: the server answered with an error, the disk is full, or the server only sends whole files."""
OVERSIZE_ERRORS = (63, -signal.SIGXFSZ)
"""Exit statuses of curl after more bytes than planned; before 8.4 curl does not count bytes without a Content-Length."""
TEMPORARY_ERRORS = (5, 6, 7, 16, 18, 28, 35, 52, 55, 56, 92)
"""Exit statuses of curl after which the same request may succeed: failed lookups and connections, and timeouts."""


class ModelArguments(NamedTuple):
    files: tuple[ModelFilePlan, ...] = ()
    folder: str = ""
    known_answer: Optional[KnownAnswerPlan] = None
    """size of the known-answer model, instead of files"""
    path: Annotated[str, "path"] = ""
    """path of the known-answer model"""
    token_file: Optional[str] = None
    """path on the controller"""
    token: Optional[str] = None
    """content of that file"""


def check_free_space(pending_files: Iterable[PendingFile], folder: Path) -> None:
    """:raises Refusal: the missing bytes of all files together do not fit on the disk."""
    existing_folder, needed_bytes = (
        files.existing_ancestor(folder),
        sum((pending.file.bytes or 0) - pending.present_bytes for pending in pending_files),
    )
    file_system = os.statvfs(existing_folder)
    free_bytes = file_system.f_bavail * file_system.f_frsize
    if needed_bytes > free_bytes:
        raise Refusal(
            f"The model's files need {size_text(needed_bytes)} more on {errors.mount_point(str(existing_folder))}, which has {size_text(free_bytes)} free: "
            f"free another {size_text(needed_bytes - free_bytes)}, or move {folder} to another disk, and run the playbook again. Nothing was downloaded"
        )


def download_files(plans: Sequence[ModelFilePlan], folder: Path, token: Optional[str], seconds: float) -> None:
    """Download all files and write the records.

    :param seconds: time to wait for another download to finish.
    :raises Refusal: a file cannot be downloaded, or the disk is too small; partial files are kept.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locks.hold(folder / model_files.LOCK_FILE, seconds) as lock:
        pending_files = model_files.pending_files(plans)
        check_free_space(pending_files, folder)
        server_url = _token_server_url(plans)
        for file in (pending_file.file for pending_file in pending_files):
            Path(file.path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            is_token_server = server_url and web.same_server(str(file.url), server_url)
            _fetch_file(file, token if is_token_server else None, lock)
        for folder_path in dict.fromkeys(Path(file.path).parent for file in plans):
            _write_record(folder_path, [file for file in plans if Path(file.path).parent == folder_path])


def _fetch_file(file: ModelFilePlan, token: Optional[str], lock: int) -> None:
    """Download a file and give it its final name.

    :raises Refusal: its source does not send the file, or sends unexpected content.
    """
    path, part_path = Path(file.path), model_files.part_path(file)
    if model_files.size_of(path) == file.bytes and (model_files.is_copied(file) or file.sha256):
        if file.sha256 in (None, files.sha256(path)):
            return
        path.unlink()
    if model_files.is_copied(file):
        raise Refusal(f"{path} does not match the controller's copy in the plan: run the playbook again")
    if file.sha256 is None or (model_files.size_of(part_path) or 0) > (file.bytes or 0):
        part_path.unlink(missing_ok=True)
    resumed_bytes = model_files.size_of(part_path)
    _fetch_rest(file, part_path, token, lock)
    problem = _find_mismatch(file, part_path)
    if problem and resumed_bytes:
        part_path.unlink()
        _fetch_rest(file, part_path, token, lock)
        problem = _find_mismatch(file, part_path)
    if problem:
        part_path.unlink()
        raise Refusal(
            f"{web.printable_url(str(file.url))} {problem}: the download was removed. Run the playbook again. If the download fails in the same way, the "
            "file was replaced at its source, or the checksum is wrong"
        )
    files.sync(part_path)
    part_path.replace(path)
    files.sync(path.parent)


def _find_mismatch(file: ModelFilePlan, part_path: Path) -> str:
    """Return how a download differs from the plan; empty if it matches."""
    size = model_files.size_of(part_path)
    if size != file.bytes:
        return f"has {size} bytes instead of the planned {file.bytes}"
    digest = files.sha256(part_path) if file.sha256 else None
    return "" if digest == file.sha256 else f"has the sha256 {digest} instead of the planned {file.sha256}"


def _fetch_rest(file: ModelFilePlan, part_path: Path, token: Optional[str], lock: int) -> None:
    """Download the missing bytes. Reconnect as long as there is progress.

    :raises Refusal: the server does not send them.
    """
    planned_bytes = file.bytes or 0
    failure_count, largest_size = 0, model_files.size_of(part_path) or 0
    while (model_files.size_of(part_path) or 0) < planned_bytes:
        problem, is_retryable = _run_curl(file, part_path, token, lock)
        if not problem:
            return
        size = model_files.size_of(part_path) or 0
        failure_count = 0 if size - largest_size >= MIN_PROGRESS_BYTES else failure_count + 1
        largest_size = max(largest_size, size)
        if not is_retryable or failure_count >= len(RETRY_PAUSES_SECONDS):
            note = f" {size_text(size)} of {size_text(planned_bytes)} were kept for the next run." * part_path.exists()
            raise Refusal(f"{web.printable_url(str(file.url))} {problem}.{note}".rstrip("."))
        time.sleep(RETRY_PAUSES_SECONDS[failure_count])


def _run_curl(file: ModelFilePlan, part_path: Path, token: Optional[str], lock: int) -> tuple[str, bool]:
    """Return why an attempt failed (empty on success), and whether another attempt may succeed. curl receives the token on its standard input."""
    try:
        curl = subprocess.run(
            ["curl", "--disable", "--config", "-"],
            input=_curl_configuration(file, part_path, token),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            pass_fds=[lock],
            preexec_fn=partial(_limit_file_size, file.bytes or 0),
        )
    except FileNotFoundError:
        raise Refusal("curl is missing on this host, and downloads need it: install it") from None
    http_status = parse_count(curl.stdout[-3:]) or 0
    if curl.returncode == HTTP_ERROR:
        error = web.status_error(http_status, "")
        return web.explain_error(error, token), error.is_transient
    if curl.returncode == WRITE_ERROR:
        raise OSError(errno.ENOSPC, "curl could not write the file", str(part_path))
    if curl.returncode in OVERSIZE_ERRORS:
        part_path.unlink(missing_ok=True)
        return f"is larger than the planned {file.bytes} bytes and was removed: run the playbook again", False
    if curl.returncode == RANGE_ERROR:
        part_path.unlink(missing_ok=True)
        return "cannot be resumed, because the server sends whole files only: the partial file was removed", True
    reason = validation.printable(curl.stderr.strip()) or f"curl exited with status {curl.returncode}"
    return (f"cannot be downloaded ({reason})" if curl.returncode else ""), curl.returncode in TEMPORARY_ERRORS


def _limit_file_size(size: int) -> None:
    with suppress(ValueError):  # the process already has a smaller limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _curl_configuration(file: ModelFilePlan, part_path: Path, token: Optional[str]) -> str:
    is_https = str(file.url).startswith("https:")
    settings = {
        "url": str(file.url),
        "output": str(part_path),
        "max-filesize": str(file.bytes),
        "proto-redir": "=https" if is_https else "=http,https",
        **({"oauth2-bearer": token} if token else {}),
    }
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    return "\n".join([*CURL_OPTIONS, *lines, ""])


def _write_record(folder: Path, plans: Iterable[ModelFilePlan]) -> None:
    stored_files = (
        StoredFile(file.name, file.bytes or 0, file.sha256, int(os.stat(file.path).st_mtime), file.revision)
        for file in plans
    )
    text = json.dumps(typed_json.dump(DownloadRecord(tuple(stored_files))), indent=1) + "\n"
    path = folder / download_record.RECORD_FILE
    if not path.is_file() or files.text_of(path) != text:
        files.replace_file(path, text, 0o644)


def _token_server_url(plans: Iterable[ModelFilePlan]) -> Optional[str]:
    """Return a URL of the only server that may receive the token: the server of the first downloaded file."""
    return next((file.url for file in plans if not model_files.is_copied(file)), None)

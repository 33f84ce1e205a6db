# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Delivers a model's files to a host: copies files from the controller, lets the host download the others in the background, and shows progress."""

import itertools
import os
import shlex
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import duration_text, parse_count, size_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Size
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import model_files, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.download import ModelArguments
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, BackgroundJob, failure_reason
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub

display = Display()

DOWNLOAD_LIMIT_SECONDS = 14 * 86400
MAX_SILENCE_SECONDS = 3600
"""Maximum time without progress: verifying a large file takes long, and the host gives up on a server earlier."""
PROGRESS_INTERVAL_SECONDS = 10
FIRST_PAUSES_SECONDS = (0.5, 1, 1, 2, 5)
"""Seconds before the first polls of a download. A progress line appears every PROGRESS_INTERVAL_SECONDS."""


class MissingFile(NamedTuple):
    """File that a host lacks, or has in part."""

    path: str
    present_bytes: Size


def deliver(action: Action, arguments: ModelArguments) -> dict:
    """Deliver the files, and return the result of the module ``model``."""
    model_arguments = arguments._replace(token_file=None)
    result = action.run_in_check_mode(**typed_json.dump(model_arguments))
    if result.get("failed") or not result.get("changed"):
        return result
    fetch_list = typed_json.parse_report(action.host, "its model files", tuple[MissingFile, ...], result.get("fetch"))
    present_bytes_by_path = {file.path: file.present_bytes for file in fetch_list}
    pending_files = [file for file in model_arguments.files if file.path in present_bytes_by_path]
    for file in pending_files:
        display.display(_announcement(action.host, file, present_bytes_by_path[file.path]))
    if action.check_mode:
        return result
    for file in pending_files:
        if model_files.is_copied(file):
            _copy(action, file)
    if arguments.token_file:
        inventory_folder = action.variables.get("inventory_dir") or ""
        model_arguments = model_arguments._replace(
            token=hub.read_token(os.path.join(inventory_folder, os.path.expanduser(arguments.token_file)))
        )
    progress = DownloadProgress(action, [file for file in pending_files if not model_files.is_copied(file)])
    pauses = itertools.chain(FIRST_PAUSES_SECONDS, itertools.repeat(PROGRESS_INTERVAL_SECONDS))
    remedy = "Run the playbook again to continue the download."
    job = BackgroundJob("download", DOWNLOAD_LIMIT_SECONDS, MAX_SILENCE_SECONDS, pauses, progress.show, remedy)
    answer = action.run_in_background(job, **typed_json.dump(model_arguments))
    return answer if answer.get("failed") else {**answer, **result}


def _announcement(host: str, file: ModelFilePlan, present_bytes: int) -> str:
    """Return a line with the origin of a file and the size of its missing part."""
    missing_bytes = (file.bytes or 0) - present_bytes
    present_note = f", {size_text(present_bytes)} already present" if missing_bytes and present_bytes else ""
    verb = "copy" if model_files.is_copied(file) else "download"
    remaining_work = (
        f"{size_text(missing_bytes)} to {verb} from {web.printable_url(str(file.url))}{present_note}"
        if missing_bytes
        else "to be verified"
    )
    return f"  [{host}] {file.name}: {remaining_work}"


def _copy(action: Action, file: ModelFilePlan) -> None:
    """Copy a file from the controller like ``ansible.builtin.copy``."""
    folder = str(Path(file.path).parent)
    result = action.run_module("ansible.builtin.file", path=folder, state="directory", mode="0755")
    if not result.get("failed"):
        result = action.copy(_local_path(file), file.path)
    if result.get("failed"):
        raise AnsibleActionFail(
            f"{_local_path(file)} on the controller could not be copied to {file.path}: {failure_reason(result)}"
        )


class DownloadProgress:
    """Shows, every PROGRESS_INTERVAL_SECONDS, how much a host has downloaded."""

    def __init__(self, action: Action, files: Collection[ModelFilePlan]) -> None:
        self._action, self._names = action, [file.name for file in files]
        self._total_bytes = sum(file.bytes or 0 for file in files)
        paths = shlex.join(path for file in files for path in (file.path, str(model_files.part_path(file))))
        self._size_command = f"wc -c {paths} 2>/dev/null | tail -n 1"
        self._last_report: tuple[float, int] | None = None

    def show(self, _seconds: float) -> str:
        """Show a line if one is due; return a text that changes with the progress."""
        if not self._names:
            return ""
        output = self._action.run_command(self._size_command).get("stdout", "")
        present_bytes = min(parse_count((output.split() or [""])[0]) or 0, self._total_bytes)
        now = time.monotonic()
        last_time, last_bytes = self._last_report or (now, present_bytes)
        if now - last_time >= PROGRESS_INTERVAL_SECONDS - 1:
            rate = (present_bytes - last_bytes) / (now - last_time)
            text = progress_text(self._names, present_bytes, self._total_bytes, rate)
            display.display(f"  [{self._action.host}] {text}")
        if not self._last_report or now - last_time >= PROGRESS_INTERVAL_SECONDS - 1:
            self._last_report = (now, present_bytes)
        return str(present_bytes)


def progress_text(names: Collection[str], done_bytes: int, total_bytes: int, rate: float) -> str:
    """Return a text with the first file, the amounts done and in total, the rate (bytes/s) and the remaining time."""
    subject = next(iter(names)) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    if done_bytes >= total_bytes:
        return f"{subject}: checking"
    rate_text = (
        f"{size_text(rate)}/s, {duration_text((total_bytes - done_bytes) / rate)} left"
        if rate > 0
        else "waiting for data"
    )
    return f"{subject}: {size_text(done_bytes)} of {size_text(total_bytes)}, {rate_text}"


def _local_path(file: ModelFilePlan) -> str:
    """Return the path of a file to copy on the controller."""
    return unquote(urlsplit(str(file.url)).path)

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings the files of a model onto a host: compares, copies what the controller has, lets the host download the rest in the background, and shows how
far that is."""

from __future__ import annotations

import itertools
import os
import shlex
import time
from collections.abc import Collection
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import amount, duration
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import model_files, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.download import ModelArguments
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, Job, why
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub

display = Display()

LIMIT_SECONDS = 14 * 86400
SILENCE_SECONDS = 3600
"""Without progress: a large file is checked meanwhile, and the host itself gives up a server earlier."""
LINE_SECONDS = 10
PAUSES = (0.5, 1, 1, 2, 5)
"""Seconds before the first looks at a download; it is shown every LINE_SECONDS."""


def run(action: Action, arguments: ModelArguments) -> dict:
    """The result of the module ``model`` for files that are fetched."""
    wanted = arguments._replace(token_file=None)
    result = action.foresee(**typed_json.dump(wanted))
    if result.get("failed") or not result.get("changed"):
        return result
    present = {row["path"]: row["have"] for row in result["fetch"]}
    pending = [file for file in wanted.files if file.path in present]
    for file in pending:
        display.display(_announcement(action.host, file, present[file.path]))
    if action.check_mode:
        return result
    for file in pending:
        if model_files.is_copied(file):
            _copy(action, file)
    if arguments.token_file:
        base = action.variables.get("inventory_dir") or ""
        wanted = wanted._replace(token=hub.read_token(os.path.join(base, os.path.expanduser(arguments.token_file))))
    progress = Progress(action, [file for file in pending if not model_files.is_copied(file)])
    pauses = itertools.chain(PAUSES, itertools.repeat(LINE_SECONDS))
    lost = "Run the playbook again, which continues there."
    job = Job("download", LIMIT_SECONDS, SILENCE_SECONDS, pauses, progress.show, lost)
    done = action.background(job, **typed_json.dump(wanted))
    return done if done.get("failed") else {**done, **result}


def _announcement(host: str, file: ModelFilePlan, have: int) -> str:
    """What comes from where, in a line for a person."""
    left = (file.bytes or 0) - have
    present = f", {amount(have)} of it are there" if left and have else ""
    how = "copy" if model_files.is_copied(file) else "download"
    what = f"{amount(left)} to {how} from {web.printable_url(str(file.url))}{present}" if left else "to be checked"
    return f"  [{host}] {file.name}: {what}"


def _copy(action: Action, file: ModelFilePlan) -> None:
    """Copies a file of the controller as ``ansible.builtin.copy`` does."""
    folder = str(Path(file.path).parent)
    result = action.module("ansible.builtin.file", path=folder, state="directory", mode="0755")
    if not result.get("failed"):
        result = action.copy(_local_path(file), file.path)
    if result.get("failed"):
        raise AnsibleActionFail(
            f"{_local_path(file)} of the controller could not be copied to {file.path}: {why(result)}"
        )


class Progress:
    """Looks every LINE_SECONDS how much of its files a host has, and shows it."""

    def __init__(self, action: Action, downloaded: Collection[ModelFilePlan]) -> None:
        self._action, self._names = action, [file.name for file in downloaded]
        self._total = sum(file.bytes or 0 for file in downloaded)
        places = shlex.join(place for file in downloaded for place in (file.path, str(model_files.part_of(file))))
        self._command = f"wc -c {places} 2>/dev/null | tail -n 1"
        self._last: tuple[float, int] | None = None

    def show(self, _seconds: float) -> str:
        """A text that changes with the progress."""
        if not self._names:
            return ""
        done = min(int((self._action.command(self._command).get("stdout", "").split() or [0])[0]), self._total)
        now = time.monotonic()
        since, before = self._last or (now, done)
        if now - since >= LINE_SECONDS - 1:
            rate = (done - before) / (now - since)
            display.display(f"  [{self._action.host}] {sentence(self._names, done, self._total, rate)}")
        if not self._last or now - since >= LINE_SECONDS - 1:
            self._last = (now, done)
        return str(done)


def sentence(names: Collection[str], done: int, total: int, rate: float) -> str:
    """File, GB of GB, rate and remaining time."""
    what = next(iter(names)) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    if done >= total:
        return f"{what}: checked"
    speed = f"{amount(rate)}/s, {duration((total - done) / rate)} left" if rate > 0 else "waiting for data"
    return f"{what}: {amount(done)} of {amount(total)}, {speed}"


def _local_path(file: ModelFilePlan) -> str:
    """On the controller, of a file that is copied."""
    return unquote(urlsplit(str(file.url)).path)

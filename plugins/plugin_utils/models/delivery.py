# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings the files of a model onto a host: compares, sends what the controller has, lets the host download the rest in the background, and shows how far
that is."""

from __future__ import annotations

import itertools
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import amount, duration
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, model_files, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.model_files import ModelFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelArguments
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, Job
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub, sender

display = Display()

LIMIT_SECONDS = 14 * 86400
SILENCE_SECONDS = download.WAIT_SECONDS + 600
"""Without progress: the host itself gives up earlier, on a server and on another process."""
LINE_SECONDS = 10
PAUSES = (0.5, 1, 1, 2, 5)
"""Seconds before the first looks at a download; it is shown every LINE_SECONDS."""
HAND_OVER = """
import os, stat, sys, time
for _ in range(100):
    try:
        pipe = os.open(sys.argv[1], os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        break
    except OSError:
        time.sleep(0.1)
else:
    sys.exit("the download has not made its pipe yet")
status = os.fstat(pipe)
if stat.S_ISFIFO(status.st_mode) and status.st_uid == os.geteuid():
    os.write(pipe, sys.stdin.buffer.read())
"""
"""Writes its input into the pipe that a download makes: never into a file, nor into what another account made."""


class PendingRow(NamedTuple):
    """A file that is not whole on the host."""

    path: str
    bytes: int
    have: int


class Comparison(NamedTuple):
    """What the module ``model`` reports in check mode."""

    fetch: tuple[PendingRow, ...]
    python: str


def run(action: Action, arguments: ModelArguments) -> dict:
    """The result of the module ``model``."""
    wanted = arguments._replace(token_file=None)
    result = action.foresee(**typed_json.dump(wanted))
    if result.get("failed") or not result.get("changed"):
        return result
    host, files = action.host, _files(wanted)
    comparison = _read_comparison(host, result)
    for line in announcements(host, comparison, files):
        display.display(line)
    if action.check_mode:
        return result
    base = action.variables.get("inventory_dir") or ""
    token_file = arguments.token_file
    token = hub.read_token(os.path.join(base, os.path.expanduser(token_file))) if token_file else None
    wanted = _send(action, wanted, comparison, token)
    lookout = Lookout(action, host, wanted.folder)
    if token and not all(file.sent for file in files):
        wanted = wanted._replace(token_pipe=lookout.offer(token, comparison.python))
    pauses = itertools.chain(PAUSES, itertools.repeat(LINE_SECONDS))
    lost = "Run the playbook again, which continues there."
    job = Job("download", LIMIT_SECONDS, SILENCE_SECONDS, pauses, lookout.show, lost)
    done = action.background(job, **typed_json.dump(wanted))
    return done if done.get("failed") else {**done, **result}


def _read_comparison(host: str, result: Any) -> Comparison:
    problem = typed_json.problem("", result, Comparison)
    if problem:
        raise AnsibleActionFail(validation.not_possible(host, f"{problem.where.lstrip('.')} {problem.why}"))
    return typed_json.parse(Comparison, result)


def _files(wanted: ModelArguments) -> list[ModelFile]:
    return model_files.of_plan(wanted.files, wanted.records, wanted.fetched_by == "controller")


def _with_checksum(wanted: ModelArguments, file: ModelFile, digest: str) -> ModelArguments:
    files = [planned._replace(sha256=digest) if planned.path == str(file.path) else planned for planned in wanted.files]
    return wanted._replace(files=tuple(files))


def announcements(host: str, comparison: Comparison, files: Sequence[ModelFile]) -> Iterator[str]:
    """What is downloaded and from where, in lines for a person."""
    by_path = {str(file.path): file for file in files}
    for row in comparison.fetch:
        if row.path not in by_path:
            continue
        file, left = by_path[row.path], row.bytes - row.have
        present = f", {amount(row.have)} of it are there" if left and row.have else ""
        what = f"{amount(left)} to download from {web.shown(file.url)}{present}" if left else "to be checked"
        yield f"  [{host}] {file.name}: {what}"


def _send(action: Action, wanted: ModelArguments, comparison: Comparison, token: str | None) -> ModelArguments:
    """Sends the files that the host does not get itself; returns the arguments with their checksums."""
    rows = {row.path: row for row in comparison.fetch}
    unknown = [file for file in _files(wanted) if file.local_path and not file.sha256 and str(file.path) in rows]
    for file in unknown:
        display.display(
            f"  [{action.host}] {file.name}: its checksum is computed, to continue where an earlier run stopped"
        )
        wanted = _with_checksum(wanted, file, sender.checksum(file))
    if unknown:
        result = action.foresee(**typed_json.dump(wanted))
        rows = {row.path: row for row in _read_comparison(action.host, result).fetch}
    files = _files(wanted)
    server = model_files.token_server(files, wanted.records)
    for file in files:
        row = rows.get(str(file.path))
        if file.sent and row:
            own = token if server and web.same_server(file.url, server) else None
            work = sender.Sender(action, os.path.dirname(wanted.folder), Line(action.host).show)
            wanted = _with_checksum(wanted, file, work.send(file, row.have, own))
    return wanted


class Line:
    """Shows progress every LINE_SECONDS."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._last: tuple[float, int] | None = None

    def show(self, report: download.ProgressReport) -> None:
        now = time.monotonic()
        shown, before = self._last or (now, report.done)
        self._last = (shown, before)
        if now - shown >= LINE_SECONDS - 1:
            display.display(f"  [{self._host}] {sentence(report, (report.done - before) / (now - shown))}")
            self._last = (now, report.done)


def sentence(report: download.ProgressReport, rate: float) -> str:
    """File, GB of GB, rate and remaining time."""
    more = f" and {report.files - 1} more" if report.files > 1 else ""
    doing = f"checks {report.file}{more}" if report.step == download.CHECK else f"{report.file}{more}"
    speed = ", waiting for data"
    if rate > 0:
        speed = f", {amount(rate)}/s, {duration((report.total - report.done) / rate)} left"
    return validation.printable(f"{doing}: {amount(report.done)} of {amount(report.total)}{speed}")


class Lookout:
    """Looks at a download in the background of the host, and hands the token over to it."""

    def __init__(self, action: Action, host: str, folder: str) -> None:
        self._action, self._line = action, Line(host)
        self._command = f"head -c 4000 {shlex.quote(f'{folder}/{model_files.LOCK}')}"
        self._handover: tuple[str, bytes] | None = None

    def offer(self, token: str, python: str) -> str:
        """The named pipe that the download reads the token from.

        :param python: of the host.
        """
        pipe = f"/tmp/llamacpp-{secrets.token_hex(16)}"
        self._handover = shlex.join([python, "-c", HAND_OVER, pipe]), f"{token}\n".encode()
        return pipe

    def show(self, _seconds: float) -> str:
        """A text that changes with the progress."""
        if self._handover:
            command, data = self._handover
            if self._action.command(command, data)["rc"] == 0:
                self._handover = None
        reply = self._action.command(self._command)
        report = download.parse_progress(reply.get("stdout", ""))
        if report:
            self._line.show(report)
        return f"{report.step} {report.done}" if report else ""

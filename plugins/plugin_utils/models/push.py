# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gets the files of a model onto a host, and shows how far that is: the host fetches them in the background, or gets them in pieces from here."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import ansible.constants as C
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import amount, duration
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, downloaded, web
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import background, copying, lease_renewal
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub

display = Display()

PIECE = 256 << 20
"""Bytes that are sent at once: they lie twice on the host until they are added to the file."""
LIMIT_SECONDS = 14 * 86400
SILENCE_SECONDS = download.WAIT_SECONDS + 600
"""Without progress: the host itself gives up earlier, on a server and on another process."""
LINE_SECONDS = 10
PAUSES = (0.5, 1, 1, 2, 5)
"""Seconds before the first looks at a download; it is shown every LINE_SECONDS."""
COMPARED = {
    "fetch": [{"path": validation.Text(longest=4096), "bytes": validation.Number(), "have": validation.Number()}],
    "bytes": validation.Number(),
    "python": validation.Text(longest=4096),
}
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
HELD = {"bytes": validation.Number(), "sha256": validation.Maybe(validation.Text(r"[0-9a-f]{64}"))}


def run(action: ActionBase, task_vars: dict) -> dict:
    """The result of the module model with ``state: fetched``."""
    arguments = dict(action._task.args)
    token_file = arguments.pop("token_file", None)
    compared = action._execute_module(module_args={**arguments, "state": "compared"}, task_vars=task_vars)
    if compared.get("failed") or not compared.get("changed"):
        return compared
    host = task_vars["inventory_hostname"]
    _check(host, compared, COMPARED)
    planned = downloaded.of_plan(
        arguments["files"], arguments.get("records", ()), arguments.get("fetched_by") == "controller"
    )
    for line in announcements(host, compared, planned):
        display.display(line)
    if action._task.check_mode:
        return compared
    token = _token(token_file, task_vars) if token_file else None
    wanted = {row["path"] for row in compared["fetch"]}
    sender = _Sender(action, task_vars, arguments, token)
    digests = {str(file.path): sender.send(file) for file in planned if file.sent and str(file.path) in wanted}
    files = [{**file, "sha256": digests.get(file["path"]) or file["sha256"]} for file in arguments["files"]]
    folder = arguments["folder"]
    shown = Line(host)
    pipe = f"/tmp/llamacpp-{secrets.token_hex(16)}" if token and not all(file.sent for file in planned) else None
    handed = False

    def show(_seconds: float) -> str:
        nonlocal handed
        if pipe and token and not handed:
            command = shlex.join([compared["python"], "-c", HAND_OVER, pipe])
            handed = action._low_level_execute_command(command, sudoable=True, in_data=f"{token}\n".encode())["rc"] == 0
        said = action._low_level_execute_command(
            f"head -c 4000 {shlex.quote(f'{folder}/{downloaded.LOCK}')}", sudoable=True
        )
        progress = download.parse_progress(said.get("stdout", ""))
        if progress:
            more = f" and {progress['files'] - 1} more" if progress["files"] > 1 else ""
            shown.show(progress["file"] + more, progress["step"], progress["done"], progress["total"], progress["rate"])
        return f"{progress['step']} {progress['done']}" if progress else ""

    pauses = itertools.chain(PAUSES, itertools.repeat(LINE_SECONDS))
    lost = "Run the playbook again, which goes on there."
    result = background.run(
        action,
        task_vars,
        {**arguments, "files": files, "token_pipe": pipe},
        background.Work("download", os.path.dirname(folder), LIMIT_SECONDS, SILENCE_SECONDS, pauses, show, lost),
    )
    return result if result.get("failed") else {**result, **compared}


def announcements(host: str, compared: dict, planned: list[downloaded.File]) -> Iterator[str]:
    """What is fetched and from where, in lines for a person."""
    for row in compared["fetch"]:
        file = next((file for file in planned if str(file.path) == row["path"]), None)
        if not file:
            continue
        left = row["bytes"] - row["have"]
        there = f", {amount(row['have'])} of it are there" if left and row["have"] else ""
        what = f"{amount(left)} to fetch from {web.shown(file.url)}{there}" if left else "to be checked"
        yield f"  [{host}] {file.name}: {what}"


class Line:
    """Shows a download every LINE_SECONDS."""

    def __init__(self, host: str) -> None:
        self.host, self.last = host, time.monotonic()

    def show(self, name: str, step: str, done: int, total: int, rate: float) -> None:
        now = time.monotonic()
        if now - self.last < LINE_SECONDS - 1:
            return
        self.last = now
        display.display(f"  [{self.host}] {sentence(name, step, done, total, rate)}")


def sentence(name: str, step: str, done: int, total: int, rate: float) -> str:
    """How far it is: file, GB of GB, rate and remaining time."""
    counted = f"{amount(done)} of {amount(total)}"
    doing = f"checks {name}: " if step == download.CHECK else f"{name}: "
    speed = f", {amount(rate)}/s, {duration((total - done) / rate)} left" if rate else ", waiting for data"
    return validation.printable(doing + counted + speed)


def _check(host: str, result: dict, form: dict) -> None:
    problem = validation.mismatch("", {key: result.get(key) for key in form}, form)
    if problem:
        raise AnsibleActionFail(validation.not_possible(host, f"{problem.where} {problem.why}"))


def _token(path: str, task_vars: dict) -> str | None:
    try:
        return hub.read_token(os.path.join(task_vars.get("inventory_dir") or "", os.path.expanduser(path)))
    except Refusal as error:
        raise AnsibleActionFail(str(error)) from None


class _Sender:
    """Sends files of the controller, or files that it fetches, to the host. No whole file is kept here meanwhile."""

    def __init__(self, action: ActionBase, task_vars: dict, arguments: dict, token: str | None) -> None:
        self.action, self.task_vars, self.arguments, self.token = action, task_vars, arguments, token
        records = arguments.get("records", ())
        self.token_server = downloaded.token_server(downloaded.of_plan(arguments["files"], records), records)
        self.host = task_vars["inventory_hostname"]
        self.line = Line(self.host)
        self.lease = lease_renewal.Renewal(action, task_vars, os.path.dirname(arguments["folder"]))

    def send(self, file: downloaded.File) -> str:
        """Sends what the host lacks of a file; returns its sha256."""
        try:
            return self._send(file)
        except Refusal as error:
            raise AnsibleActionFail(f"{str(error).rstrip('.')}. Run the playbook again, which goes on there") from None
        except OSError as error:
            raise AnsibleActionFail(f"On the controller: {errors.sentence(error, tempfile.gettempdir())}") from None

    def _send(self, file: downloaded.File) -> str:
        local = Path(unquote(urlsplit(file.url).path)) if file.url.startswith(downloaded.OF_CONTROLLER) else None
        size = reading.from_disk(local, local.stat).st_size if local else file.bytes
        if size != file.bytes:
            raise Refusal(f"{local} has {size} bytes, and had {file.bytes} when it was planned")
        offset, digest = self._begin(file, local)
        begun, started = offset, time.monotonic()
        with tempfile.TemporaryDirectory(dir=C.DEFAULT_LOCAL_TMP) as folder:
            piece = _Piece(Path(folder, "piece"))

            def take(data: bytes) -> None:
                nonlocal offset
                digest.update(data)
                piece.write(data)
                if piece.count >= PIECE or offset + piece.count == file.bytes:
                    offset = self._ship(file, piece, offset)
                    rate = (offset - begun) / (time.monotonic() - started)
                    self.line.show(file.name, download.FETCH, offset, file.bytes, rate)

            if local:
                _read(local, offset, file.bytes - offset, take)
            else:
                same = self.token_server and web.same_server(file.url, self.token_server)
                download.receive(file, self.token if same else None, offset, take, time.sleep)
        return file.sha256 or digest.hexdigest()

    def _begin(self, file: downloaded.File, local: Path | None):
        """How many bytes the host keeps of those that it has, and a hash that has read them where nobody else says what the whole file's is."""
        digest = hashlib.sha256()
        held = self._ask(file, state="held", digest=file.sha256 is None)
        offset = min(held["bytes"], file.bytes)
        if file.sha256 or not offset:
            return offset, digest
        if local:
            _read(local, 0, offset, digest.update)
            if digest.hexdigest() == held["sha256"]:
                return offset, digest
        return 0, hashlib.sha256()

    def _ship(self, file: downloaded.File, piece: _Piece, offset: int) -> int:
        """Sends a piece; returns how many bytes the host has then."""
        action, shell = self.action, self.action._connection._shell
        sha256 = piece.end()
        self.lease.renew_in_time()
        folder = shell.tmpdir or action._make_tmp_path()
        target = shell.join_path(folder, "piece")
        try:
            action._transfer_file(str(piece.path), target)
        except AnsibleError as error:
            raise AnsibleActionFail(
                f"A piece of {file.name} could not be sent to {target} ({copying.why({'msg': str(error)})}): it needs {PIECE >> 20} MiB there "
                "(remote_tmp of Ansible). Run the playbook again, which goes on there"
            ) from error
        action._fixup_perms2((folder, target))
        held = self._ask(file, state="received", piece={"path": target, "offset": offset, "sha256": sha256})
        if held["bytes"] != offset + piece.count:
            raise Refusal(f"{self.host} has {held['bytes']} bytes of {file.name}, and {offset + piece.count} were sent")
        piece.begin()
        return int(held["bytes"])

    def _ask(self, file: downloaded.File, **more) -> dict:
        given = next(entry for entry in self.arguments["files"] if entry["path"] == str(file.path))
        result = self.action._execute_module(
            module_args={**self.arguments, "files": [given], **more}, task_vars=self.task_vars
        )
        if result.get("failed"):
            raise AnsibleActionFail(validation.printable(str(result.get("msg") or f"{self.host} gave no reason")))
        _check(self.host, result, {"held": HELD})
        return result["held"]


class _Piece:
    """A file of this controller that is sent next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin()

    def begin(self) -> None:
        self.count, self.digest, self.stream = 0, hashlib.sha256(), self.path.open("wb")

    def write(self, data: bytes) -> None:
        self.stream.write(data)
        self.digest.update(data)
        self.count += len(data)

    def end(self) -> str:
        """Its sha256."""
        self.stream.close()
        return self.digest.hexdigest()


def _read(path: Path, offset: int, count: int, take: Callable[[bytes], object]) -> None:
    """Hands on so many bytes of a file, from there."""
    with reading.from_disk(path, partial(path.open, "rb")) as stream:
        stream.seek(offset)
        while count and (data := reading.from_disk(path, partial(stream.read, min(download.PIECE, count)))):
            take(data)
            count -= len(data)

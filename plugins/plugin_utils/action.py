# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the action plugins have in common: arguments, calls of a host, and work in its background. Nothing else in the collection uses what ansible-core
keeps to action plugins."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

JOB = r"j?\d{1,20}\.\d{1,10}"
"""Name of an asynchronous job, as ansible-core 2.19 gives it: a number of the controller, and the process on the host."""
INTERNAL = ("finished", "started", "ansible_job_id", "results_file", "stdout", "stderr", "stdout_lines", "stderr_lines")
"""What Ansible adds to the result of such a job."""
ControllerPath = Annotated[str, "path"]
"""An argument that is a path on the controller."""


class Job(NamedTuple):
    """What a module does in the background of a host, and how it is waited for."""

    name: str
    """For messages: «build»."""
    limit_seconds: int
    """For all of it. The host itself ends it then."""
    silence_seconds: int
    """How long it may show no progress."""
    pauses: Iterable[float]
    """Seconds before each time that it is asked whether it has ended; without an end."""
    show: Callable[[float], str]
    """Called each time that it has not, with the seconds since its start; returns a text that changes with its progress."""
    lost: str
    """Ends the message where it is waited for no longer."""


class Action(ActionBase):
    """An action plugin of the collection: ``perform`` does its work, and a Refusal there fails the task with its message."""

    _supports_check_mode = True
    TRANSFERS_FILES = False
    ARGUMENTS: ClassVar[type]
    """A NamedTuple with the arguments."""

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        self.variables = task_vars
        try:
            _checked, arguments = self.validate_argument_spec(typed_json.specification(self.ARGUMENTS))
            return self.perform(typed_json.parse(self.ARGUMENTS, arguments))
        except Refusal as refusal:
            raise AnsibleActionFail(str(refusal)) from None

    def perform(self, arguments: Any) -> dict:
        """The result of the task.

        :param arguments: an ARGUMENTS.
        """
        raise NotImplementedError

    @property
    def check_mode(self) -> bool:
        return bool(self._task.check_mode)

    @property
    def host(self) -> str:
        """Name of the host of this task."""
        return self.variables["inventory_hostname"]

    def module(self, name: str = "", /, **arguments: Any) -> dict:
        """What a module returns on the host: that of the task, where no other is named."""
        named = {"module_name": name} if name else {}
        return self._execute_module(module_args=arguments, task_vars=self.variables, **named)

    def foresee(self, **arguments: Any) -> dict:
        """What the task's module returns in check mode."""
        before, self._task.check_mode = self._task.check_mode, True
        try:
            return self.module(**arguments)
        finally:
            self._task.check_mode = before

    def command(self, text: str, data: bytes | None = None) -> dict:
        """Runs a command of the host's shell, with ``become`` where the task has it: ``rc``, ``stdout`` and ``stderr``.

        :param data: its input.
        """
        stdin = {} if data is None else {"in_data": data}
        return self._low_level_execute_command(text, sudoable=True, **stdin)

    def leave(self, prefix: str, name: str, value: Any) -> None:
        """Writes a record as JSON below the prefix, unless it is None. A host that cannot be written on is no reason to fail."""
        if value is None:
            return
        partial, path = (shlex.quote(f"{prefix}/{one}") for one in (f"{files.TEMPORARY}{name}", name))
        content = json.dumps(typed_json.dump(value)) + "\n"
        answer = self.command(f"umask 022 && cat > {partial} && mv {partial} {path}", content.encode())
        if answer["rc"]:
            why_not = validation.printable(answer["stderr"])
            Display().warning(f"{name} could not be recorded on {self.host}, for status and the next plan: {why_not}")

    def action(self, name: str, /, **arguments: Any) -> dict:
        """What another action plugin returns."""
        task = self._task.copy()
        task.args = arguments
        return self._shared_loader_obj.action_loader.get(
            name,
            task=task,
            connection=self._connection,
            play_context=self._play_context,
            loader=self._loader,
            templar=self._templar,
            shared_loader_obj=self._shared_loader_obj,
        ).run(task_vars=self.variables)

    def copy(self, source: str, target: str) -> dict:
        """Copies a file of the controller to the host as ``ansible.builtin.copy`` does."""
        return self.action("ansible.legacy.copy", src=source, dest=target, mode="0644")

    def fetch(self, source: str, target: str) -> dict:
        """Copies a file of the host to the controller as ``ansible.builtin.fetch`` does."""
        return self.action("ansible.legacy.fetch", src=source, dest=target, flat=True)

    def transfer(self, source: str, name: str) -> str:
        """Copies a file of the controller into the task's temporary folder on the host; returns its path there.

        :raises AnsibleError: it could not be sent. The message names the path.
        """
        shell = self._connection._shell
        folder = shell.tmpdir or self._make_tmp_path()
        target = shell.join_path(folder, name)
        self._transfer_file(source, target)
        self._fixup_perms2((folder, target))
        return target

    def find_file(self, path: str) -> str:
        """A file of the controller, beside the inventory or where Ansible looks for files.

        :raises AnsibleError: it is not there.
        """
        beside = os.path.join(self.variables.get("inventory_dir") or "", os.path.expanduser(path))
        return beside if os.path.isabs(beside) and os.path.exists(beside) else self._find_needle("files", path)

    def background(self, job: Job, /, **arguments: Any) -> dict:
        """The result of the task's module, once it has ended in the background of the host."""
        self._task.async_val = job.limit_seconds
        try:
            begun = self._execute_module(module_args=arguments, task_vars=self.variables, wrap_async=True)
        finally:
            self._task.async_val = 0
        if begun.get("failed"):
            return begun
        if not re.fullmatch(JOB, str(begun.get("ansible_job_id"))):
            raise AnsibleActionFail(
                f"{self.host} did not start the {job.name} in the background "
                f"({validation.printable(str(begun.get('msg') or 'it names no job'))}): run the playbook again"
            )
        folder = self.get_shell_option("async_dir", default="~/.ansible_async")
        ask = partial(self.module, "ansible.builtin.async_status", jid=begun["ansible_job_id"], _async_dir=folder)
        status = self._wait(begun["ansible_job_id"], ask, job)
        ask(mode="cleanup")
        return {key: value for key, value in status.items() if key not in INTERNAL}

    def _wait(self, identity: str, ask: Callable[[], dict[str, Any]], job: Job) -> dict:
        started = moved = time.monotonic()
        seen = ""
        for pause in job.pauses:
            time.sleep(pause)
            status = ask()
            if status.get("finished"):
                return status
            if status.get("failed"):
                raise AnsibleActionFail(
                    f"The connection to the {job.name} was lost: {validation.printable(str(status.get('msg')))}. {job.lost}"
                )
            now, shown = time.monotonic(), job.show(time.monotonic() - started)
            if shown != seen:
                seen, moved = shown, now
            if now - min(moved, started + job.limit_seconds) > job.silence_seconds:
                raise AnsibleActionFail(
                    f"{self.host} has not ended the {job.name} (job {identity}), and shows no progress for "
                    f"{job.silence_seconds // 60} minutes or takes longer than {job.limit_seconds // 3600} h: end what still runs of it there, or "
                    f"restart that host. {job.lost}"
                )
        raise AssertionError("pauses have no end")


def why(result: dict) -> str:
    """Why a call has failed: ansible-core 2.19 and newer hand over a chain of events in place of a message."""
    texts = [str(result["msg"])] if result.get("msg") else []
    event = getattr(result.get("exception"), "event", None)
    while event:
        texts.append(event.msg)
        event = getattr(event.chain, "event", None)
    return validation.printable(": ".join(dict.fromkeys(text.rstrip(".") for text in texts))) or "no reason was given"

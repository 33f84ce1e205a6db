# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Base class of the action plugins: arguments, calls to a host, and background jobs. Only this module uses ansible-core's interfaces for action plugins."""

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

JOB_ID_PATTERN = r"j?\d{1,20}\.\d{1,10}"
"""Pattern of asynchronous job IDs in ansible-core 2.19: a number from the controller and the process ID on the host."""
ASYNC_RESULT_KEYS = (
    *("finished", "started", "ansible_job_id", "results_file"),
    *("stdout", "stderr", "stdout_lines", "stderr_lines"),
)
"""Keys that Ansible adds to the result of an asynchronous job."""
POLLS_PER_CHECK = 15
"""Polls per check of a job's process: a host that was restarted knows the job, but no longer runs it."""
ControllerPath = Annotated[str, "path"]
"""Argument that is a path on the controller."""


class BackgroundJob(NamedTuple):
    """A module that runs in the background on a host, and how the controller waits for it."""

    name: str
    """Name in messages, like 'build'."""
    limit_seconds: int
    """Time limit after which the host itself stops the job."""
    silence_seconds: int
    """Maximum time without progress."""
    pauses_seconds: Iterable[float]
    """Seconds before each poll of the job; an endless iterable."""
    describe_progress: Callable[[float], str]
    """Called after each poll of a running job with the seconds since its start; returns a text that changes with its progress."""
    remedy: str
    """Last sentence of the message when the controller stops waiting."""


class Action(ActionBase):
    """Base of the collection's action plugins: ``perform`` does the work, and a Refusal raised there fails the task with its message."""

    _supports_check_mode = True
    TRANSFERS_FILES = False
    ARGUMENTS: ClassVar[type]
    """NamedTuple with the arguments."""

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        self.variables = task_vars
        try:
            _result, arguments = self.validate_argument_spec(typed_json.specification(self.ARGUMENTS))
            return self.perform(typed_json.parse(self.ARGUMENTS, arguments))
        except Refusal as refusal:
            raise AnsibleActionFail(str(refusal)) from None

    def perform(self, arguments: Any) -> dict:
        """Return the result of the task."""
        raise NotImplementedError

    @property
    def check_mode(self) -> bool:
        return bool(self._task.check_mode)

    @property
    def host(self) -> str:
        return self.variables["inventory_hostname"]

    def run_module(self, name: str = "", /, **arguments: Any) -> dict:
        """Return the result of a module on the host: the task's own module unless another is named."""
        name_arguments = {"module_name": name} if name else {}
        return self._execute_module(module_args=arguments, task_vars=self.variables, **name_arguments)

    def run_in_check_mode(self, **arguments: Any) -> dict:
        """Return the result of the task's module in check mode."""
        check_mode, self._task.check_mode = self._task.check_mode, True
        try:
            return self.run_module(**arguments)
        finally:
            self._task.check_mode = check_mode

    def run_command(self, command: str, stdin: bytes | None = None) -> dict:
        """Run a command in the host's shell, with ``become`` if the task uses it; return ``rc``, ``stdout`` and ``stderr``."""
        input_arguments = {} if stdin is None else {"in_data": stdin}
        return self._low_level_execute_command(command, sudoable=True, **input_arguments)

    def write_record(self, prefix: str, name: str, value: Any) -> None:
        """Write a record as JSON below the prefix, unless it is None. A failure to write only causes a warning."""
        if value is None:
            return
        partial_path, path = (shlex.quote(f"{prefix}/{file}") for file in (f"{files.TEMPORARY_PREFIX}{name}", name))
        content = json.dumps(typed_json.dump(value)) + "\n"
        result = self.run_command(f"umask 022 && cat > {partial_path} && mv {partial_path} {path}", content.encode())
        if result["rc"]:
            reason = validation.printable(result["stderr"])
            Display().warning(f"{self.host} could not write {name}, which later runs read: {reason}")

    def run_action(self, name: str, /, **arguments: Any) -> dict:
        """Return the result of another action plugin."""
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
        """Copy a file from the controller to the host like ``ansible.builtin.copy``."""
        return self.run_action("ansible.legacy.copy", src=source, dest=target, mode="0644")

    def fetch(self, source: str, target: str) -> dict:
        """Copy a file from the host to the controller like ``ansible.builtin.fetch``."""
        return self.run_action("ansible.legacy.fetch", src=source, dest=target, flat=True)

    def copy_to_tmp(self, source: str, name: str) -> str:
        """Copy a file from the controller to the task's temporary folder on the host; return its path there."""
        shell = self._connection._shell
        folder = shell.tmpdir or self._make_tmp_path()
        target = shell.join_path(folder, name)
        self._transfer_file(source, target)
        self._fixup_perms2((folder, target))
        return target

    def find_file(self, path: str) -> str:
        """Return the path of a file on the controller, next to the inventory or in Ansible's search path."""
        candidate_path = os.path.join(self.variables.get("inventory_dir") or "", os.path.expanduser(path))
        return (
            candidate_path
            if os.path.isabs(candidate_path) and os.path.exists(candidate_path)
            else self._find_needle("files", path)
        )

    def run_in_background(self, job: BackgroundJob, /, **arguments: Any) -> dict:
        """Return the result of the task's module, which runs in the background on the host."""
        self._task.async_val = job.limit_seconds
        try:
            reply = self._execute_module(module_args=arguments, task_vars=self.variables, wrap_async=True)
        finally:
            self._task.async_val = 0
        if reply.get("failed"):
            return reply
        if not re.fullmatch(JOB_ID_PATTERN, str(reply.get("ansible_job_id"))):
            raise AnsibleActionFail(
                f"{self.host} did not start the {job.name} in the background "
                f"({validation.printable(str(reply.get('msg') or 'its answer has no job ID'))}): run the playbook again"
            )
        folder = self.get_shell_option("async_dir", default="~/.ansible_async")
        poll = partial(self.run_module, "ansible.builtin.async_status", jid=reply["ansible_job_id"], _async_dir=folder)
        try:
            status = self._wait(reply["ansible_job_id"], poll, job)
            poll(mode="cleanup")
        except AnsibleConnectionFailure as error:
            reason = validation.printable(str(error))
            raise AnsibleActionFail(f"{self.host} disconnected during the {job.name}: {reason}. {job.remedy}") from None
        if status.get("failed") and "data" in status:  # async_wrapper returned a traceback instead of a result
            reason = "".join(str(status.get("stderr") or status["data"]).strip().splitlines()[-1:])
            status["msg"] = (
                f"the process was killed or crashed without a result{': ' * bool(reason)}{reason}. Check the host's kernel log (dmesg) for out-of-memory "
                "kills, then run the playbook again"
            )
        return {key: value for key, value in status.items() if key not in ASYNC_RESULT_KEYS}

    def _wait(self, job_id: str, poll: Callable[[], dict[str, Any]], job: BackgroundJob) -> dict:
        start_time = progress_time = time.monotonic()
        last_progress = ""
        pattern = shlex.quote(f"[a]sync_wrapper.py {job_id.split('.')[0]} ")
        for poll_count, pause_seconds in enumerate(job.pauses_seconds, 1):
            time.sleep(pause_seconds)
            is_gone = not poll_count % POLLS_PER_CHECK and self.run_command(f"pgrep -f {pattern}").get("rc") == 1
            status = poll()
            if status.get("finished"):
                return status
            if is_gone:
                raise AnsibleActionFail(
                    f"{self.host}: the {job.name} (job {job_id}) disappeared without a result. {job.remedy}"
                )
            if status.get("failed"):
                raise AnsibleActionFail(
                    f"{self.host}: the {job.name} (job {job_id}) has no readable status: {validation.printable(str(status.get('msg')))}. {job.remedy}"
                )
            now, progress = time.monotonic(), job.describe_progress(time.monotonic() - start_time)
            if progress != last_progress:
                last_progress, progress_time = progress, now
            if now - min(progress_time, start_time + job.limit_seconds) > job.silence_seconds:
                raise AnsibleActionFail(
                    f"{self.host}: the {job.name} (job {job_id}) made no progress for {job.silence_seconds // 60} minutes, or took longer than "
                    f"{job.limit_seconds // 60} minutes: stop its remaining processes on that host, or restart the host. {job.remedy}"
                )
        raise AssertionError("pauses must be endless")


def failure_reason(result: dict) -> str:
    """Return the reason why a call failed: ansible-core 2.19 and newer return a chain of events instead of a message."""
    texts = [str(result["msg"])] if result.get("msg") else []
    event = getattr(result.get("exception"), "event", None)
    while event:
        texts.append(event.msg)
        event = getattr(event.chain, "event", None)
    return validation.printable(": ".join(dict.fromkeys(text.rstrip(".") for text in texts))) or "no reason given"

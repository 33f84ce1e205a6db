# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A module that runs in the background of the host, for action plugins that show how far it is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import lease_renewal

JOB = r"j?\d{1,20}\.\d{1,10}"
"""Name of an asynchronous job, as ansible-core 2.19 gives it: a number of the controller, and the process on the host."""
INTERNAL = ("finished", "started", "ansible_job_id", "results_file", "stdout", "stderr", "stdout_lines", "stderr_lines")
"""What Ansible adds to the result of such a job."""


class Work(NamedTuple):
    """What the module does, and how it is waited for."""

    name: str
    """For messages: «build»."""
    prefix: str
    """Of the installation on the host, for the cluster's lease."""
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


def run(action: ActionBase, task_vars: dict, arguments: dict, work: Work) -> dict:
    """The result of the action's module, once it has ended."""
    action._task.async_val = work.limit_seconds
    try:
        job = action._execute_module(module_args=arguments, task_vars=task_vars, wrap_async=True)
    finally:
        action._task.async_val = 0
    if job.get("failed"):
        return job
    if not re.fullmatch(JOB, str(job.get("ansible_job_id"))):
        raise AnsibleActionFail(
            f"{task_vars['inventory_hostname']} did not start the {work.name} in the background "
            f"({validation.printable(str(job.get('msg') or 'it names no job'))}): run the playbook again"
        )
    query = {
        "jid": job["ansible_job_id"],
        "_async_dir": action.get_shell_option("async_dir", default="~/.ansible_async"),
    }
    status = _wait(action, task_vars, query, work)
    action._execute_module(
        module_name="ansible.builtin.async_status", module_args={**query, "mode": "cleanup"}, task_vars=task_vars
    )
    return {key: value for key, value in status.items() if key not in INTERNAL}


def _wait(action: ActionBase, task_vars: dict, query: dict, work: Work) -> dict:
    started = moved = time.monotonic()
    seen, lease = "", lease_renewal.Renewal(action, task_vars, work.prefix)
    for pause in work.pauses:
        time.sleep(pause)
        status = action._execute_module(
            module_name="ansible.builtin.async_status", module_args=query, task_vars=task_vars
        )
        if status.get("finished"):
            return status
        if status.get("failed"):
            raise AnsibleActionFail(
                f"The connection to the {work.name} was lost: {validation.printable(str(status.get('msg')))}. {work.lost}"
            )
        lease.renew_in_time()
        now, shown = time.monotonic(), work.show(time.monotonic() - started)
        if shown != seen:
            seen, moved = shown, now
        if now - min(moved, started + work.limit_seconds) > work.silence_seconds:
            raise AnsibleActionFail(
                f"{task_vars['inventory_hostname']} has not ended the {work.name} (job {query['jid']}), and shows no progress for "
                f"{work.silence_seconds // 60} minutes or takes longer than {work.limit_seconds // 3600} h: end what still runs of it there, or restart "
                f"that host. {work.lost}"
            )
    raise AssertionError("pauses have no end")

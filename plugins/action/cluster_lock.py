# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tells the module which run this is, and takes over the lock of a finished run of this controller."""

import getpass
import os
import socket
import uuid
from pathlib import Path

from ansible import context
from ansible.errors import AnsibleConnectionFailure
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.cluster_lock import LockArguments, Run
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action

LONGEST_NAME = 120

display = Display()


class ActionModule(Action):
    ARGUMENTS = LockArguments

    def perform(self, arguments: LockArguments) -> dict:
        run = describe_run(os.getppid(), context.CLIARGS.get("args") or [])
        lock_arguments = arguments._replace(run=typed_json.dump(run))
        try:
            result = self.module(**lock_arguments._asdict())
            holder = result.get("holder")
            if holder and has_ended(typed_json.parse_report(self.host, "the lock of its cluster", Run, holder)):
                result = self.module(**lock_arguments._replace(ended=holder)._asdict())
        except AnsibleConnectionFailure:  # ignore_unreachable has no effect with run_once
            display.warning(
                "The head cannot be reached, so the cluster could not be locked: do not run another playbook meanwhile."
            )
            return {"changed": False}
        if result.get("taken_from"):
            display.display(f"  [{self.host}] took over from {validation.printable(result['taken_from'])}")
        return result


def describe_run(process: int, playbooks: list[str]) -> Run:
    return Run(
        user=getpass.getuser()[:LONGEST_NAME],
        controller=socket.gethostname()[:LONGEST_NAME],
        machine=_machine(),
        process=process,
        playbook=", ".join(Path(name).name for name in playbooks)[:LONGEST_NAME],
    )


def _machine() -> str:
    """Return an identity that no other controller has, even with the same host name: the boot of its system, and in a container its namespace of processes."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # macOS
        return f"{uuid.getnode():x}"


def has_ended(run: Run) -> bool:
    """Return whether a run was one of this controller, and has ended. False if that is unknown."""
    if run.machine != _machine():
        return False
    try:
        os.kill(run.process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False

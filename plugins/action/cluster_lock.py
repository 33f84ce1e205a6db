# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Passes this run's identity to the module, and takes over the lock of a finished run of this controller."""

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

MAX_NAME_LENGTH = 120

display = Display()


class ActionModule(Action):
    ARGUMENTS = LockArguments

    def perform(self, arguments: LockArguments) -> dict:
        run = run_identity(os.getppid(), context.CLIARGS.get("args") or [])
        lock_arguments = arguments._replace(run=typed_json.dump(run))
        try:
            result = self.run_module(**lock_arguments._asdict())
            holder = result.get("holder")
            if holder and has_ended(typed_json.parse_report(self.host, "the lock of its cluster", Run, holder)):
                result = self.run_module(**lock_arguments._replace(ended=holder)._asdict())
        except AnsibleConnectionFailure:  # ignore_unreachable has no effect with run_once
            display.warning(
                "The head cannot be reached, so the cluster could not be locked: do not run another playbook until this one finishes."
            )
            return {"changed": False}
        if result.get("taken_from"):
            display.display(f"  [{self.host}] took over the lock of {validation.printable(result['taken_from'])}")
        return result


def run_identity(pid: int, playbooks: list[str]) -> Run:
    return Run(
        user=getpass.getuser()[:MAX_NAME_LENGTH],
        controller=socket.gethostname()[:MAX_NAME_LENGTH],
        machine=_controller_identity(),
        pid=pid,
        playbook=", ".join(Path(path).name for path in playbooks)[:MAX_NAME_LENGTH],
    )


def _controller_identity() -> str:
    """Return an identity of this controller that is unique even if host names are equal: the boot ID, and the process namespace in a container."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # macOS
        return f"{uuid.getnode():x}"


def has_ended(run: Run) -> bool:
    """Return whether a run belongs to this controller and has ended. False if that is unknown."""
    if run.machine != _controller_identity():
        return False
    try:
        os.kill(run.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adds to a lease what the controller knows of its run, renews it while the run goes on, and gives it back when that has ended."""

from __future__ import annotations

import os
import shlex
import signal
import time
from contextlib import suppress

from ansible import context
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import lease
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import run_identity

display = Display()

RENEWAL_SECONDS, POLL_SECONDS = 30, 0.5
RELEASE_TRIES = 3
LEASE = "llamacpp.cluster.lease"
"""The module; a task of another plugin may have it run, too."""


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        try:
            if arguments.get("state") == "located":
                asked = {name: arguments[name] for name in ("scope", "cluster")}
                return self._execute_module("llamacpp.cluster.host_info", module_args=asked, task_vars=task_vars)
            return self._decided(arguments, task_vars)
        except AnsibleConnectionFailure:  # ignore_unreachable has no effect with run_once
            display.warning(
                "The head cannot be reached: nothing keeps another run from changing this cluster at the same time."
            )
            return {"changed": False}

    def _decided(self, arguments: dict, task_vars: dict) -> dict:
        mine = run_identity.run(os.getppid(), context.CLIARGS.get("args") or [])
        arguments["run"] = mine
        result = self._execute_module(LEASE, module_args=arguments, task_vars=task_vars)
        holder = result.get("holder")
        begins = arguments.get("state", "held") == "held"
        if begins and holder and not validation.mismatch("", holder, lease.HOLDER) and run_identity.has_ended(holder):
            arguments["ended"] = holder["run"]
            result = self._execute_module(LEASE, module_args=arguments, task_vars=task_vars)
        if result.get("taken_from"):
            display.display(
                f"  [{task_vars['inventory_hostname']}] took over from {validation.printable(result['taken_from'])}"
            )
        if result.pop("held", False) and begins:
            self._keep(f"{arguments['prefix']}/{names.LEASE}", mine)
        return result

    def _keep(self, path: str, mine: dict) -> None:
        """Starts the process that renews the lease. It belongs to nobody, so that it outlives a run that is killed."""
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        try:
            if not os.fork():
                os.setsid()
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                display.verbosity = 0
                self._renew(path, mine)
        finally:
            os._exit(0)

    def _renew(self, path: str, mine: dict) -> None:
        renewed = time.monotonic()
        while run_identity.start_of(mine["process"]) == mine["started"]:
            time.sleep(POLL_SECONDS)
            if time.monotonic() - renewed >= RENEWAL_SECONDS:
                renewed = time.monotonic()
                self._on_head(path, mine, "touch -c")
        for _try in range(RELEASE_TRIES):
            if self._on_head(path, mine, "rm -f"):
                return
            time.sleep(POLL_SECONDS)

    def _on_head(self, path: str, mine: dict, command: str) -> bool:
        """Runs a command on the lease, if it is still this run's; whether the head answered."""
        file = shlex.quote(path)
        with suppress(Exception):
            done = self._low_level_execute_command(
                f"if grep -qs {mine['run']} {file}; then {command} {file}; fi", sudoable=True
            )
            return done.get("rc") == 0
        return False

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adds to a lease what the controller knows of its run, and takes over the lease of a run of this controller that has ended."""

from __future__ import annotations

import os

from ansible import context
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import lease
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import run_identity

display = Display()


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        try:
            if arguments.get("state") == "located":
                place = {name: arguments[name] for name in ("scope", "cluster")}
                return self._execute_module("llamacpp.cluster.host_info", module_args=place, task_vars=task_vars)
            return self._lease(arguments, task_vars)
        except AnsibleConnectionFailure:  # ignore_unreachable has no effect with run_once
            display.warning(
                "The head cannot be reached: nothing keeps another run from changing this cluster at the same time."
            )
            return {"changed": False}

    def _lease(self, arguments: dict, task_vars: dict) -> dict:
        arguments["run"] = run_identity.current(os.getppid(), context.CLIARGS.get("args") or [])
        result = self._execute_module(module_args=arguments, task_vars=task_vars)
        holder = result.get("holder")
        acquires = arguments.get("state", "acquired") == "acquired"
        if acquires and holder and not validation.mismatch("", holder, lease.HOLDER) and run_identity.has_ended(holder):
            arguments["ended"] = holder["run"]
            result = self._execute_module(module_args=arguments, task_vars=task_vars)
        if result.get("taken_from"):
            display.display(
                f"  [{task_vars['inventory_hostname']}] took over from {validation.printable(result['taken_from'])}"
            )
        return result

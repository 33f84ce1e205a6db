# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hands each host its own part of a plan to record."""

from __future__ import annotations

from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import plan_record


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        plan = arguments.pop("plan", None)
        if plan is not None:
            name = task_vars["inventory_hostname"]
            sources = [file["source"] for file in plan["hosts"][name]["files"] if "source" in file]
            arguments["record"] = plan_record.record(plan, name, {path: Path(path).read_text() for path in sources})
        return self._execute_module(module_args=arguments, task_vars=task_vars)

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hands each host its own part of a plan to record."""

from __future__ import annotations

from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import plan_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        plan = arguments.pop("plan", None)
        if plan is not None:
            plan, name = typed_json.parse(Plan, plan), task_vars["inventory_hostname"]
            contents = {file.source: Path(file.source).read_text() for file in plan.hosts[name].files if file.source}
            arguments["record"] = typed_json.dump(plan_record.record(plan, name, contents))
        return self._execute_module(module_args=arguments, task_vars=task_vars)

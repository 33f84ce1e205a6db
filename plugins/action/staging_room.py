# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides whether the instances of a plan for the staging ports can be started. Everything that it takes is an argument of the task."""

from __future__ import annotations

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import staging


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _checked, arguments = self.validate_argument_spec(
            argument_spec={"plan": {"type": "dict", "required": True}, "answers": {"type": "dict", "required": True}}
        )
        refused = arguments["plan"]["refused"]
        plan = typed_json.parse(Refused if refused else Plan, arguments["plan"])
        try:
            answers = changes.check({} if refused else plan.hosts, arguments["answers"])
        except Refusal as refusal:
            raise AnsibleActionFail(str(refusal)) from None
        obstacles = staging.obstacles(plan, answers)
        return {"changed": False, "obstacles": [validation.printable(text) for text in obstacles]}

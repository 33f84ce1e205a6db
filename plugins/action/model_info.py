# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds a model on the controller and reads its headers, wherever it is."""

from __future__ import annotations

from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import resolver

SPECIFICATION = {
    "prefix": {"type": "path"},
    "account": {"type": "str"},
    "timeout": {"type": "int", "default": 120},
}


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        return find(self, task_vars)


def find(action: ActionBase, task_vars: dict) -> dict:
    """What the module returns."""
    _checked, arguments = action.validate_argument_spec(argument_spec=SPECIFICATION)
    try:
        request = model_inputs.request_of(inventory.variables_of(task_vars))
    except Refusal:
        return {"changed": False}  # planning refuses it, and says so in the plan
    try:
        return resolver.resolve(action, task_vars, request, resolver.Options(**arguments))
    except Refusal as refusal:
        return {"changed": False, "refused": str(refusal)}  # in the plan as well, where a program reads it

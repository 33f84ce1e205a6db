# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fails unless the instances on the staging ports have proven the release. Everything that it takes is an argument of the task."""

from __future__ import annotations

from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import release_proof


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _checked, arguments = self.validate_argument_spec(
            argument_spec={
                **{name: {"type": "dict", "required": True} for name in ("plan", "errors")},
                "report": {"type": "dict", "default": {}},
            }
        )
        why = release_proof.failure(arguments["plan"], arguments["errors"], arguments["report"])
        return {"changed": False, **({"failed": True, "msg": why} if why else {})}

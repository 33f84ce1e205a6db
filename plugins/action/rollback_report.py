# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reports how a rollback ended. Everything that it takes is an argument of the task."""

from __future__ import annotations

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import rollback_report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action

display = Display()


class ActionModule(Action):
    SPEC = {
        "state": {"type": "str", "choices": ["served", "failed"], "required": True},
        **{key: {"type": "dict", "default": {}} for key in ("target", "reasons")},
        **{key: {"type": "str", "default": ""} for key in ("release", "id", "why_not")},
        "lost": {"type": "list", "elements": "str", "default": []},
    }

    def perform(self, arguments: dict) -> dict:
        target, reasons, lost = arguments["target"], arguments["reasons"], arguments["lost"]
        if arguments["state"] == "served":
            display.warning(rollback_report.served(target, arguments["release"], self.check_mode))
            return {"changed": False}
        if not arguments["id"]:
            return {"failed": True, "msg": rollback_report.failed_rollback(target, reasons, lost)}
        failure = rollback_report.Failure(
            arguments["id"], arguments["release"], reasons, lost, target or None, arguments["why_not"]
        )
        return {"failed": True, "msg": rollback_report.failed_change(failure)}

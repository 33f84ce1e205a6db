# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits for the server, judges the cluster, and shows the result."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils import report, verification

display = Display()

STARTS_BEFORE_GIVING_UP = 3
FIRST_WAIT = 5.0
WAIT = 8.0


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        path = arguments.pop("path", None)
        plan = arguments["plan"]
        drifts = {
            name: (task_vars["hostvars"][name].get("llama_compared") or {}).get("drift") for name in plan["hosts"]
        }
        patience = plan["head"]["start_timeout"] if verification.may_become_healthy(plan, drifts) else 0
        found = self._collect(arguments, plan, patience, task_vars)
        if "evidence" not in found:
            return found
        drifts[plan["head"]["host"]] = found["evidence"]["drift"]
        judged = verification.judge(plan, drifts, found["evidence"])
        if path:
            Path(path).write_text(json.dumps(judged, indent=2) + "\n")
        display.display(report.checks_table(judged["checks"]) + "\n")
        result = {"changed": False, "report": judged, "evidence": found["evidence"]}
        failed = [check for check in judged["checks"] if check["status"] == "failed"]
        if failed:
            result["failed"] = True
            result["msg"] = "The cluster does not do what was planned. " + " ".join(
                f"{check['name']} of {check['subject']}: {check['evidence']}." for check in failed
            )
            if not found["evidence"]["health"]["healthy"]:
                result["msg"] += " The server's log ends in:\n" + "\n".join(found["evidence"]["log"])
        return result

    def _collect(self, arguments: dict, plan: dict, patience: float, task_vars: dict) -> dict:
        started = time.monotonic()
        processes: set[int] = set()
        wait = FIRST_WAIT
        while True:
            found = self._execute_module(module_args={**arguments, "wait": wait}, task_vars=task_vars)
            if found.get("failed") or found["evidence"]["health"]["healthy"]:
                return found
            processes.update(found["evidence"]["processes"])
            elapsed = time.monotonic() - started
            if len(processes) >= STARTS_BEFORE_GIVING_UP or elapsed >= patience:
                return found
            display.display(
                f"  [{plan['head']['host']}] llama-server: {found['evidence']['health']['said']}, {elapsed:.0f} s"
            )
            wait = WAIT

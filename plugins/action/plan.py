# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes the plan on the controller, writes it, and shows it to a person."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils import planning, report, runtime, workers
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory

display = Display()

RUNTIME = Path(runtime.__file__)


def runtime_files() -> list[str]:
    """The runtime as it is installed on the head: runtime.py and what it needs beside it."""
    return [str(RUNTIME), str(RUNTIME.with_name("rpc.py"))]


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _checked, arguments = self.validate_argument_spec(
            argument_spec={
                "model": {"type": "dict"},
                "path": {"type": "path"},
                "quiet": {"type": "bool", "default": False},
            }
        )
        cluster, hosts = inventory.hosts(task_vars)
        for host in hosts.values():
            host["facts"] = workers.known(host["facts"], host["variables"]["llama_hardware"])
        files = runtime_files()
        digest = hashlib.sha256(b"".join(Path(name).read_bytes() for name in files)).hexdigest()[:12]
        plan = planning.make(cluster, hosts, (arguments["model"] or {}).get("summary"), inventory.packages(), digest)
        if arguments["path"]:
            Path(arguments["path"]).write_text(json.dumps(plan, indent=2) + "\n")
        if not arguments["quiet"] and not plan["refused"]:
            display.display(report.plan_table(plan))
        for advisory in plan.get("advisories", []):
            display.warning(
                f"{advisory['id']} ({advisory['severity']}{', accepted' if advisory['accepted'] else ''}): {advisory['message']} {advisory['remedy']}"
            )
        if plan["refused"]:
            return {
                "failed": True,
                "plan": plan,
                "msg": "The plan is refused, nothing was changed. "
                + " ".join(
                    reason[0].upper() + reason[1:] + "." * (not reason.endswith(".")) for reason in plan["reasons"]
                ),
            }
        return {"changed": False, "plan": plan, "runtime_files": files}

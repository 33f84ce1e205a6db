# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fetches sources on the controller, and shows how far the build on the host is."""

from __future__ import annotations

import shlex
import time

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils import building
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import sources
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.copying import copy

display = Display()

POLL_SECONDS = 5
LIMIT_SECONDS = 6 * 3600


class ActionModule(ActionBase):
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        if arguments.get("state") == "fetched":
            path, changed = sources.fetch(arguments["release"])
            return {"changed": changed, "path": str(path)}
        found = self._execute_module(module_args=arguments, task_vars=task_vars)
        if found.get("failed") or not found.get("changed") or self._task.check_mode:
            return found
        archive, _fetched = sources.fetch(arguments["release"])
        arguments["archive"] = self._copy(str(archive), arguments["cache"], task_vars)
        return self._build(arguments, task_vars)

    def _copy(self, archive: str, cache: str, task_vars: dict) -> str:
        target = f"{cache}/sources/{archive.rsplit('/', 1)[1]}"
        result = copy(self, task_vars, archive, target)
        if result.get("failed"):
            raise AnsibleActionFail(f"The source could not be copied to {target}: {result.get('msg')}")
        return target

    def _build(self, arguments: dict, task_vars: dict) -> dict:
        """Runs the module in the background and shows its log's last step until it ends."""
        self._task.async_val = LIMIT_SECONDS
        try:
            job = self._execute_module(module_args=arguments, task_vars=task_vars, wrap_async=True)
        finally:
            self._task.async_val = 0
        if job.get("failed"):
            return job
        log = building.log_path(arguments["cache"], arguments["build"]["id"])
        query = {
            "jid": job["ansible_job_id"],
            "_async_dir": self.get_shell_option("async_dir", default="~/.ansible_async"),
        }
        started = time.monotonic()
        while True:
            time.sleep(POLL_SECONDS)
            status = self._execute_module(
                module_name="ansible.builtin.async_status", module_args=query, task_vars=task_vars
            )
            if status.get("finished"):
                break
            if status.get("failed"):
                raise AnsibleActionFail(
                    f"The build was lost: {status.get('msg')}. Run it again; it goes on where it was. Log on the host: {log}"
                )
            last = self._low_level_execute_command(
                f"grep -E '{building.STEP_LINES}' {shlex.quote(log)} | tail -n 1 | cut -c 1-60", sudoable=True
            )
            where = building.step(last.get("stdout", "").strip())
            display.display(
                f"  [{task_vars['inventory_hostname']}] {arguments['build']['id']}: {where}, {time.monotonic() - started:.0f} s"
            )
        self._execute_module(
            module_name="ansible.builtin.async_status", module_args={**query, "mode": "cleanup"}, task_vars=task_vars
        )
        for internal in (
            "finished",
            "started",
            "ansible_job_id",
            "results_file",
            "stdout",
            "stderr",
            "stdout_lines",
            "stderr_lines",
        ):
            status.pop(internal, None)
        return status

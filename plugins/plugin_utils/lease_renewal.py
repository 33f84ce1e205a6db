# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Renewal of the cluster's lease while an action plugin waits for a long task."""

from __future__ import annotations

import os
import time

from ansible import context
from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import run_identity

RENEWAL_SECONDS = 600
LEASE = "llamacpp.cluster.lease"


def renew(action: ActionBase, task_vars: dict, prefix: str) -> dict:
    """What the module ``lease`` returns for this run on the action's host."""
    run = run_identity.current(os.getppid(), context.CLIARGS.get("args") or [])
    arguments = {"prefix": prefix, "state": "renewed", "run": run}
    return action._execute_module(module_name=LEASE, module_args=arguments, task_vars=task_vars)


class Renewal:
    """Renews the lease where the action's host is the head, as often as is needed. A lost lease is an error of the next task that needs it."""

    def __init__(self, action: ActionBase, task_vars: dict, prefix: str) -> None:
        self._action, self._task_vars, self._prefix = action, task_vars, prefix
        self._renewed = time.monotonic()

    def renew_in_time(self) -> None:
        if time.monotonic() - self._renewed >= RENEWAL_SECONDS:
            self._renewed = time.monotonic()
            renew(self._action, self._task_vars, self._prefix)

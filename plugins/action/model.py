# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds a model on the controller and reads its headers, wherever it is, and gets its files onto the host."""

from __future__ import annotations

from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import push, resolver


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        if self._task.args.get("state") == "fetched":
            return push.run(self, task_vars)
        return resolver.run(self, task_vars)

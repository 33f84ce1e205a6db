# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings the files of a model onto the host."""

from __future__ import annotations

from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import delivery


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        return delivery.run(self, task_vars)

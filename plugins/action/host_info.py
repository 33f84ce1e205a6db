# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks a host, unless it has said already how it differs from its part of the plan."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import kept_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostInfoArguments
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class ActionModule(Action):
    ARGUMENTS = HostInfoArguments

    def perform(self, arguments: HostInfoArguments) -> dict:
        known = arguments.compared
        if known and arguments.plan and known.get("digest") == kept_plan.digest(arguments.plan):
            return {"changed": False, "drift": known.get("drift")}
        return self.module(**typed_json.dump(arguments._replace(compared=None)))

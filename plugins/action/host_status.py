# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Asks a host how it is, unless it has said that already, compared with the same part of the plan."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import kept_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.status.types import Arguments
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        known = arguments.known
        if known and arguments.plan and known.get("digest") == kept_plan.digest(arguments.plan):
            return {"changed": False, "drift": known.get("drift"), "condition": known.get("condition")}
        return self.module(**typed_json.dump(arguments._replace(known=None)))

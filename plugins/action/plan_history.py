# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hands each host its own part of a plan to record."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import plan_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class ActionModule(Action):
    def perform(self, arguments: dict) -> dict:
        plan = arguments.pop("plan", None)
        if plan is not None:
            plan, name = typed_json.parse(Plan, plan), self.host
            contents = {file.source: Path(file.source).read_text() for file in plan.hosts[name].files if file.source}
            arguments["record"] = typed_json.dump(plan_record.record(plan, name, contents))
        return self.module(arguments)

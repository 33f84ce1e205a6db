# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hands each host its own part of a plan to record."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import plan_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class Arguments(NamedTuple):
    state: str
    prefix: str
    plan: Plan | None = None
    id: str | None = None


def _text(file: FilePlan) -> str | None:
    """Of a file of the controller; None of a program, whose path on the host is that of this version alone."""
    return None if file.mode == "0755" else Path(str(file.source)).read_text()


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        plan, record = arguments.plan, None
        if plan:
            files = plan.hosts[self.host].files
            contents = {file.source: _text(file) for file in files if file.source}
            record = typed_json.dump(plan_record.record(plan, self.host, contents))
        return self.module(state=arguments.state, prefix=arguments.prefix, id=arguments.id, record=record)

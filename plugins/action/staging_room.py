# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides whether the instances of a plan for the staging ports can be started. Everything that it takes is an argument of the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import staging
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class Arguments(NamedTuple):
    plan: Mapping[str, Any]
    """A Plan, or a Refused."""
    answers: Mapping[str, Any]


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        record: type[Plan | Refused] = Refused if arguments.plan["refused"] else Plan
        plan = typed_json.parse(record, arguments.plan)
        answers = changes.read(plan.hosts if isinstance(plan, Plan) else {}, arguments.answers)
        obstacles = staging.obstacles(plan, answers)
        hosts = {} if isinstance(plan, Refused) else plan.hosts
        workers = [f"{name}:{worker.name}" for name, host in hosts.items() for worker in host.workers if worker.used]
        return {
            "changed": False,
            "workers": workers,
            "obstacles": [validation.printable(text) for text in obstacles],
        }

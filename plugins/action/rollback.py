# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides on the controller what a rollback has to do on each host."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import rollback
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class RollbackArguments(NamedTuple):
    answers: Mapping[str, Any]
    heads: tuple[str, ...]
    failed_plan_id: str = ""
    lost_hosts: tuple[str, ...] = ()


class ActionModule(Action):
    ARGUMENTS = RollbackArguments

    def perform(self, arguments: RollbackArguments) -> dict:
        reports = {name: answer["kept_plans"] for name, answer in arguments.answers.items() if answer.get("kept_plans")}
        hosts = rollback.parse_kept_plans(reports)
        head, target = rollback.choose_target(hosts, arguments.heads, arguments.failed_plan_id)
        steps = rollback.host_steps(hosts, head, target, arguments.lost_hosts)
        details = {
            "release": validation.printable(target.release),
            "differing_variables": rollback.differing_variables(hosts, target),
        }
        uninvolved_hosts = sorted(set(hosts) - set(target.hosts) - set(steps["heads"]))
        return {
            "changed": False,
            "target": {"id": target.id, "head": head, "uninvolved_hosts": uninvolved_hosts, **details},
            **steps,
        }

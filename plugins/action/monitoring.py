# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the monitoring files of a cluster into a folder on the controller."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.monitoring import files


class MonitoringArguments(NamedTuple):
    plan: Mapping[str, Any]
    facts: Mapping[str, Any]
    path: ControllerPath


class ActionModule(Action):
    ARGUMENTS = MonitoringArguments

    def perform(self, arguments: MonitoringArguments) -> dict:
        if arguments.plan["refused"]:
            raise Refusal(
                f"The plan is refused, so no monitoring files were written: {' '.join(arguments.plan['reasons'])}"
            )
        cluster, hosts = inventory.cluster_hosts(self.variables, arguments.facts)
        hostvars = self.variables["hostvars"]
        plan, groups = typed_json.parse(Plan, arguments.plan), self.variables["groups"]
        if len(inventory.replicas(groups, cluster)) > 1:
            plan = plan._replace(cluster=f"{cluster}-{plan.head.host}")
        balancer_endpoints = {
            name: f"{files.address_of(name, hostvars[name], {})}:{hostvars[name].get('llama_balancer_metrics_port', 8404)}"
            for name in groups.get(inventory.BALANCER_GROUP, ())
            if name in groups[cluster]
        }
        addresses = {name: files.address_of(name, hostvars[name], host["facts"] or {}) for name, host in hosts.items()}
        texts = files.monitoring_files(plan, addresses) | files.balancer_files(cluster, balancer_endpoints)
        output.write_folder("llama_monitoring_path", arguments.path, texts)
        folder = validation.printable(os.path.abspath(os.path.expanduser(arguments.path)))
        Display().display(f"  Wrote {', '.join(sorted(texts))} to {folder}.")
        return {"changed": False}

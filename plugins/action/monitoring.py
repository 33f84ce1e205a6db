# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What monitoring writes on hosts, and in a folder of the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.monitoring import files


class Arguments(NamedTuple):
    plan: Mapping[str, Any]
    facts: Mapping[str, Any]
    monitors: Mapping[str, Any] = {}
    path: ControllerPath | None = None


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        if arguments.plan["refused"]:
            raise Refusal(f"The plan is refused, so there is nothing to watch: {' '.join(arguments.plan['reasons'])}")
        for name, answer in arguments.monitors.items():
            if not answer.get("facts"):
                raise Refusal(
                    f"{name} of the group llama_monitoring could not be reached: bring it up, or take it out of the group."
                )
            cluster_inputs.check_facts(name, answer["facts"])
        _cluster, hosts = inventory.hosts(self.variables, arguments.facts)
        facts = {name: answer["facts"] for name, answer in arguments.monitors.items()}
        facts.update((name, host["facts"] or {}) for name, host in hosts.items())
        variables, known = self.variables["hostvars"], inventory.packages()["monitoring"]
        families = {name: known.get(given.get("distribution", {}).get("family")) for name, given in facts.items()}
        monitors = [*arguments.monitors]
        found = files.watch(
            typed_json.parse(Plan, arguments.plan),
            {
                name: inventory.variables_of(self.variables, name)["llama_monitoring_retention_days"]
                for name in monitors
            },
            {name: files.address_of(name, variables[name], given) for name, given in facts.items()},
            {name: files.Packages(**given) if given else None for name, given in families.items()},
            [address for answer in arguments.monitors.values() for address in answer["facts"].get("addresses", ())],
        )
        if arguments.path:
            output.write_folder("llama_monitoring_path", arguments.path, found.texts)
        if found.left and monitors:
            Display().warning(
                f"Install node exporter on {', '.join(found.left)}, which {', '.join(monitors)} asks: runs do that on Debian, as root and with systemd alone."
            )
        return {"changed": False, "hosts": typed_json.dump(found.hosts), "monitors": typed_json.dump(found.monitors)}

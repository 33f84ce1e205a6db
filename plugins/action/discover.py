# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Proposes an inventory from what hosts report, writes it, and plans it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ansible import context
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.action import plan as plan_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.discovery import Discovered, FoundModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import facts_of
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import discovery, discovery_text, inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath, why

CONNECTION = (
    *("ansible_host", "ansible_port", "ansible_user", "ansible_connection", "ansible_python_interpreter"),
    *("ansible_ssh_private_key_file", "ansible_ssh_common_args", "ansible_ssh_extra_args"),
    *("ansible_become", "ansible_become_user", "ansible_become_method"),
)
"""What the inventory gets of how Ansible reaches a host: no secret."""
COMMAND_LINE = {"ansible_user": "remote_user", "ansible_ssh_private_key_file": "private_key_file"}
"""Of these, what the command line of ansible-playbook may say in their place."""
DECIDED = ("llama_links", "llama_worker_endpoints", "llama_model_")
"""How variables begin that are not taken over."""


class Arguments(NamedTuple):
    path: ControllerPath
    facts: Mapping[str, Any]
    found: Mapping[str, Any]
    report: ControllerPath | None = None


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        path = Path(arguments.path).expanduser().absolute()
        if path.exists():
            raise Refusal(
                f"llama_discover_inventory is {str(path)!r}, which exists: move it away, or give another path"
            )
        machines, lost, answers = self._machines(arguments)

        def plan(proposal: discovery.Proposal) -> Plan | Refused:
            return plan_action.make(self.find_file, proposal.task_vars, answers, _report(proposal.model))

        proposal, planned = discovery.choose(machines, plan)
        text = discovery_text.inventory(proposal, lost, planned)
        if not self.check_mode:
            with suppress(OSError):  # writing says why
                path.parent.mkdir(parents=True, exist_ok=True)
            output.write("llama_discover_inventory", str(path), text)
        output.show_plan(planned, (), arguments.report)
        written = f"{path} {'would be' if self.check_mode else 'is'} written"
        if planned.refused:
            return {"failed": True, "msg": f"{written}, and its plan is refused: the page above says why."}
        without = f" It leaves out {', '.join(lost)}, and says why." if lost else ""
        Display().display(f"{written}: look at it, and run site.yml -i {path}.{without}")
        return {"changed": not self.check_mode, "plan": typed_json.dump(planned)}

    def _machines(
        self, arguments: Arguments
    ) -> tuple[list[discovery.Machine], dict[str, str], dict[str, Mapping[str, Any]]]:
        """Those that answered or are declared; why others are left out; and what the first ones answered, by their names."""
        hostvars = self.variables["hostvars"]
        lost: dict[str, str] = {}
        variables: dict[str, dict[str, Any]] = {}
        for name, result in arguments.facts.items():
            given = _given(hostvars[name])
            failed = next((why(each) for each in (result, arguments.found.get(name) or {}) if each.get("msg")), "")
            if (result.get("facts") and not failed) or "llama_hardware" in given:
                variables[inventory.plain(name)] = given
            else:
                lost[inventory.plain(name)] = failed.removeprefix("Task failed: ") or "it said nothing"
        if not variables:
            said = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
            raise Refusal(f"no host could be asked, so there is no inventory ({said})")
        groups = {key: [*variables] for key in ("llama_cluster", "llama_workers")}
        _cluster, hosts = inventory.hosts({"groups": groups, "hostvars": variables}, arguments.facts)
        asked = [
            discovery.Machine(name, given, facts_of(hosts[name]["facts"]), _discovered(name, arguments.found.get(name)))
            for name, given in variables.items()
        ]
        machines = discovery.named(asked, [*variables, *lost])
        answers = {machine.name: arguments.facts[name] for machine, name in zip(machines, variables)}
        return machines, lost, answers


def _given(variables: Mapping[str, Any]) -> dict[str, Any]:
    """What the operator gave for a host that the inventory takes over."""
    names = [*CONNECTION, *(name for name in inventory.specification() if not name.startswith(DECIDED))]
    given = {name: variables.get(name) for name in names}
    given["ansible_port"] = given["ansible_port"] or variables.get("ansible_ssh_port")  # add_host calls it so
    for name, option in COMMAND_LINE.items() if given["ansible_connection"] != "local" else ():
        given[name] = given[name] or context.CLIARGS.get(option)
    return inventory.plain({name: value for name, value in given.items() if value is not None})


def _discovered(name: str, result: Mapping[str, Any] | None) -> Discovered:
    """What a host says of its links and models.

    :raises Refusal: it is not as discovery_info reports it.
    """
    found = typed_json.reported(name, "links and models", Discovered, (result or {}).get("discovered") or {})
    for model in found.models:
        try:
            header_summary.parse(model.summary)
        except typed_json.Mismatch as error:
            raise typed_json.not_as_read(name, f"the model {model.name}", error) from None
    return found


def _report(model: FoundModel | None) -> dict[str, Any]:
    """What model_info would report of a model."""
    if not model:
        return {}
    found = {"summary": model.summary, "closed": model.closed}
    file = {"name": os.path.basename(model.file), "path": model.file, "bytes": model.layer_bytes}
    return {**found, "files": [{**file, "role": host_types.MODEL}]} if model.kind == "ollama" else found

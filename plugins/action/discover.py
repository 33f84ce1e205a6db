# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Proposes an inventory from the hosts' reports, writes it, and makes its plan."""

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
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.discovery import Discovery, FoundModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import parse_facts
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import discovery, discovery_text, inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath, failure_reason

CONNECTION_VARIABLES = (
    *("ansible_host", "ansible_port", "ansible_user", "ansible_connection", "ansible_python_interpreter"),
    *("ansible_ssh_private_key_file", "ansible_ssh_common_args", "ansible_ssh_extra_args"),
    *("ansible_become", "ansible_become_user", "ansible_become_method"),
)
"""Connection variables that the inventory keeps: none of them is secret."""
COMMAND_LINE_OPTIONS = {"ansible_user": "remote_user", "ansible_ssh_private_key_file": "private_key_file"}
"""Options of ansible-playbook that may replace these variables."""
IGNORED_PREFIXES = ("llama_links", "llama_worker_endpoints", "llama_model_")
"""Prefixes of variables that the inventory does not keep."""


class DiscoverArguments(NamedTuple):
    path: ControllerPath
    facts: Mapping[str, Any]
    found: Mapping[str, Any]
    report: ControllerPath | None = None


class ActionModule(Action):
    ARGUMENTS = DiscoverArguments

    def perform(self, arguments: DiscoverArguments) -> dict:
        path = Path(arguments.path).expanduser().absolute()
        if path.exists():
            raise Refusal(
                f"llama_discover_inventory is {str(path)!r}, which already exists: move that file, or choose another path"
            )
        machines, omissions, answers = self._select_hosts(arguments)

        def plan_proposal(proposal: discovery.Proposal) -> Plan | Refused:
            return plan_action.make_plan(self.find_file, proposal.task_vars, answers, _model_report(proposal.model))

        proposal, plan = discovery.choose_proposal(machines, plan_proposal)
        text = discovery_text.inventory_text(proposal, omissions, plan)
        if not self.check_mode:
            with suppress(OSError):  # output.write reports the reason
                path.parent.mkdir(parents=True, exist_ok=True)
            output.write("llama_discover_inventory", str(path), text)
        output.show_plan(plan, (), arguments.report)
        outcome = f"{path} {'would be' if self.check_mode else 'has been'} written"
        if plan.refused:
            return {"failed": True, "msg": f"{outcome}, but its plan is refused: see the plan above for the reasons."}
        omission_note = (
            f" Comments in the inventory explain why it leaves out {', '.join(omissions)}." if omissions else ""
        )
        Display().display(f"{outcome}: check it, then run site.yml -i {path}.{omission_note}")
        return {"changed": not self.check_mode, "plan": typed_json.dump(plan)}

    def _select_hosts(
        self, arguments: DiscoverArguments
    ) -> tuple[list[discovery.Machine], dict[str, str], dict[str, Mapping[str, Any]]]:
        """Return the hosts that answered or are declared, the reasons for omitting other hosts, and the answers of the included hosts."""
        hostvars = self.variables["hostvars"]
        omissions: dict[str, str] = {}
        variables_by_host: dict[str, dict[str, Any]] = {}
        for name, result in arguments.facts.items():
            host_variables = _operator_variables(hostvars[name])
            problem = next(
                (failure_reason(answer) for answer in (result, arguments.found.get(name) or {}) if answer.get("msg")),
                "",
            )
            if (result.get("facts") and not problem) or "llama_hardware" in host_variables:
                variables_by_host[inventory.strip_origin(name)] = host_variables
            else:
                omissions[inventory.strip_origin(name)] = problem.removeprefix("Task failed: ") or "no answer"
        if not variables_by_host:
            reason_text = "; ".join(f"{name}: {reason}" for name, reason in omissions.items())
            raise Refusal(f"no host could be examined, so no inventory was written: {reason_text}")
        groups = {key: [*variables_by_host] for key in ("llama_cluster", "llama_workers")}
        _cluster, hosts = inventory.cluster_hosts({"groups": groups, "hostvars": variables_by_host}, arguments.facts)
        candidates = [
            discovery.Machine(
                name, host_variables, parse_facts(hosts[name]["facts"]), _read_findings(name, arguments.found.get(name))
            )
            for name, host_variables in variables_by_host.items()
        ]
        machines = discovery.name_machines(candidates, [*variables_by_host, *omissions])
        answers = {machine.name: arguments.facts[name] for machine, name in zip(machines, variables_by_host)}
        return machines, omissions, answers


def _operator_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a host that the operator has set and the inventory keeps."""
    names = [
        *CONNECTION_VARIABLES,
        *(name for name in inventory.specification() if not name.startswith(IGNORED_PREFIXES)),
    ]
    values = {name: variables.get(name) for name in names}
    values["ansible_port"] = values["ansible_port"] or variables.get("ansible_ssh_port")  # add_host uses this name
    for name, option in COMMAND_LINE_OPTIONS.items() if values["ansible_connection"] != "local" else ():
        values[name] = values[name] or context.CLIARGS.get(option)
    return inventory.strip_origin({name: value for name, value in values.items() if value is not None})


def _read_findings(name: str, result: Mapping[str, Any] | None) -> Discovery:
    findings = typed_json.parse_report(name, "links and models", Discovery, (result or {}).get("discovered") or {})
    for model in findings.models:
        try:
            header_summary.parse(model.summary)
        except typed_json.Mismatch as error:
            raise typed_json.refusal_of_report(name, f"the model {model.name}", error) from None
    return findings


def _model_report(model: FoundModel | None) -> dict[str, Any]:
    if not model:
        return {}
    report = {"summary": model.summary, "unreadable_path": model.unreadable_path}
    file = {"name": os.path.basename(model.file), "path": model.file, "bytes": model.layer_bytes}
    return {**report, "files": [{**file, "role": host_types.MODEL}]} if model.kind == "ollama" else report

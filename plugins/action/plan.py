# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes the plan on the controller, writes it and shows it."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import matrix
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, units
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import teardown
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc, words
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import speed_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import completion, planner, what_fits
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, model_source
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions, inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text, what_fits_text
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources

display = Display()

LAUNCHER_FILES = [
    completion.RuntimeFile(path.name, path.read_bytes(), str(path))
    for path in (
        *sorted(Path(str(runtime.__file__)).parent.glob("[!_]*.py")),
        *(Path(str(module.__file__)) for module in (units, rpc, words)),
    )
]
"""Files of the launcher to install on hosts: runtime.py and the modules that it needs."""


class PlanArguments(NamedTuple):
    facts: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    path: ControllerPath | None = None
    empty: bool = False
    what_fits: bool = False
    page: bool = False
    show: bool = True
    report: ControllerPath | None = None


class ActionModule(Action):
    ARGUMENTS = PlanArguments

    def perform(self, arguments: PlanArguments) -> dict:
        if arguments.empty:
            cluster = inventory.cluster_group(self.variables)
            return {"changed": False, "plan": teardown.empty_plan(arguments.facts, cluster)}
        if arguments.what_fits:
            return self._show_what_fits(arguments)
        plan = make_plan(self.find_file, self.variables, arguments.facts, arguments.model)
        plan_json = typed_json.dump(plan)
        if not arguments.show:
            return {"changed": False, "plan": plan_json}
        if arguments.path:
            output.write("llama_plan_path", arguments.path, json.dumps(plan_json, indent=2) + "\n")
        if arguments.page:  # plan_diff shows a plan that is not refused
            if plan.refused:
                output.show_plan(plan, (), arguments.report)
        elif isinstance(plan, Plan):
            if not plan.refused:
                display.display(plan_text.plan_summary(plan))
            for advisory in plan.advisories:
                suffix = ", accepted" if advisory.accepted else ""
                display.warning(f"{advisory.id} ({advisory.severity}{suffix}): {advisory.message} {advisory.remedy}")
        if plan.refused:
            reason_text = " ".join(reason.rstrip(".") + "." for reason in plan.reasons)
            return {"failed": True, "msg": f"The plan is refused, and nothing was changed: {reason_text}"}
        return {"changed": False, "plan": plan_json}

    def _show_what_fits(self, arguments: PlanArguments) -> dict:
        query = what_fits.parse_query("llama_what_fits", self.variables["llama_what_fits"])
        fit_results = compare_models(self.find_file, self.variables, arguments.facts, query)
        display.display(what_fits_text.text_of(fit_results, query))
        result = {"models": typed_json.dump(fit_results)}
        if arguments.path:
            output.write("llama_plan_path", arguments.path, json.dumps(result, indent=2) + "\n")
        return {"changed": False, **result}


def make_plan(
    find_file: Callable[[str], str], task_vars: dict, facts: Mapping[str, Any], model_report: Mapping[str, Any]
) -> Plan | Refused:
    launcher_digest = hashlib.sha256(b"".join(file.content for file in LAUNCHER_FILES)).hexdigest()[:12]
    try:
        cluster_name, hosts = inventory.cluster_hosts(task_vars, facts, inventory.play_variables(task_vars))
        catalogue = cluster_inputs.make_catalogue(inventory.packages())
        cluster = cluster_inputs.read_cluster(cluster_name, hosts)
        # Refuse an impossible benchmark now, not when it starts.
        matrix.sweep_of(hosts[cluster.head]["variables"])
        cluster = model_source.with_reports(sources.look_up(find_file, cluster, catalogue), model_report)
        plan = planner.make_plan(cluster, catalogue, launcher_digest)
        if isinstance(plan, Refused) or plan.refused:
            return plan
        cached_facts = {name: host.cached_facts for name, host in cluster.hosts.items()}
        plan = completion.complete_plan(plan, LAUNCHER_FILES, definitions.definition, cached_facts)
        return speed_record.correct_plan(plan, inventory.measured_speed(facts, cluster.head))
    except Refusal as refusal:
        return planner.refused_plan(inventory.cluster_group(task_vars), refusal)


def compare_models(
    find_file: Callable[[str], str], task_vars: dict, facts: Mapping[str, Any], query: what_fits.FitQuery
) -> list[what_fits.FitResult]:
    """Return the models that the cluster in a task's inventory could serve."""
    offers = what_fits.offers_of(inventory.published_models(), query.models)
    cluster_name, hosts = inventory.cluster_hosts(task_vars, facts, inventory.play_variables(task_vars))
    catalogue = cluster_inputs.make_catalogue(inventory.packages())
    cluster = cluster_inputs.read_cluster(cluster_name, hosts, what_fits.ANY_MODEL)
    cluster = sources.look_up(find_file, cluster, catalogue)
    return what_fits.fit_models(cluster, offers, catalogue, query)

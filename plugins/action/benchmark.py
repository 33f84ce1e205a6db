# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans a benchmark, runs it on the head, shows its progress, and writes the results."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import command_line, job, matrix, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import speed_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, model_source, turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions, inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath, failure_reason
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources

display = Display()

POLL_SECONDS = 10.0
EXIT_SECONDS = 60
"""Seconds that a program has to exit after its time limit."""


class PlannedLoad(NamedTuple):
    """A load that can be measured, with its plan and its command line."""

    hosts: tuple[str, ...]
    plan: Plan
    argv: Sequence[str]


class BenchmarkArguments(NamedTuple):
    plan: Plan
    facts: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    path: ControllerPath | None = None
    state: Annotated[str, ("absent",)] | None = None


class ActionModule(Action):
    ARGUMENTS = BenchmarkArguments

    def perform(self, arguments: BenchmarkArguments) -> dict:
        self._plan = arguments.plan.per_model()[0]
        self._head_name = self._plan.head.host
        self._head_plan = self._plan.hosts[self._head_name]
        if arguments.state:
            return self._call_module(state=arguments.state)
        loads = self._plan_loads(arguments)
        self._show(
            f"{len(self._benchmark.cells)} cells, {sum(bool(cell.skipped) for cell in self._benchmark.cells)} of which cannot be measured"
        )
        if loads and not self.check_mode:
            try:
                self._start_job(loads)
                self._collect_results(loads)
            finally:
                self._finish_job(loads, arguments.path)
        return {"changed": bool(loads), "record": typed_json.dump(self._benchmark)}

    def _show(self, text: str) -> None:
        display.display(f"  [{self._head_name}] benchmark: {text}")

    def _plan_loads(self, arguments: BenchmarkArguments) -> list[PlannedLoad]:
        """Return the loads that can be measured, using the first of several models. Create the record with all cells.

        :raises Refusal: a variable is wrong, or the release lacks llama-bench.
        """
        served_plan = self._plan
        play_variables = inventory.play_variables(self.variables)
        cluster_name, hosts = inventory.cluster_hosts(self.variables, arguments.facts, play_variables)
        first_model = next(iter(turns.read_entries(hosts[self._head_name]["variables"])), None)
        if first_model:
            hosts = {**hosts, self._head_name: {**hosts[self._head_name], "variables": first_model.variables}}
        model_report = turns.report_of(arguments.model, first_model.name) if first_model else arguments.model
        catalogue = cluster_inputs.make_catalogue(inventory.packages())
        cluster = model_source.with_reports(cluster_inputs.read_cluster(cluster_name, hosts), model_report)
        cluster = sources.look_up(self.find_file, cluster, catalogue)
        sweep = matrix.sweep_of(hosts[self._head_name]["variables"])
        if not any(options.BENCH in build.targets for build in served_plan.hosts[self._head_name].builds):
            remedy = "set llama_benchmark_programs to true, run site.yml, then run this playbook again"
            if not served_plan.release.mainline:
                remedy = f"select a release of llama.cpp, because {served_plan.release.ref} of {served_plan.release.fork} cannot be measured"
            raise Refusal(f"the release on {self._head_name} has no {options.BENCH}: {remedy}")
        if self._head_plan.service_manager not in job.BENCHMARK_MANAGERS:
            raise Refusal(
                f"{self._head_name} runs services under {self._head_plan.service_manager}, but a benchmark needs systemd or supervisor: use a head with either"
            )
        loads: list[PlannedLoad] = []
        cells: list[types.Cell] = []
        for host_names in matrix.loads_of(sweep, served_plan):
            plan = _make_plan(matrix.cluster_for_load(cluster, host_names, sweep, served_plan), catalogue)
            skip_reason = matrix.skip_reason(plan, served_plan, host_names)
            if isinstance(plan, Plan) and not skip_reason:
                loads.append(PlannedLoad(host_names, plan, command_line.argv_of(plan, sweep)))
            cells += matrix.cells_of(host_names, sweep, plan, skip_reason)
        self._benchmark = types.Benchmark(
            schema=types.SCHEMA,
            cluster=served_plan.cluster,
            time=int(time.time()),
            plan=served_plan.id or "",
            release=f"llama.cpp {served_plan.release.ref}, commit {served_plan.release.commit}",
            model=served_plan.model.name,
            cells=tuple(cells),
        )
        return loads

    def _start_job(self, loads: Sequence[PlannedLoad]) -> None:
        limit_seconds = (command_line.MAX_PROGRAM_SECONDS + EXIT_SECONDS) * len(loads)
        definition = definitions.definition(self._head_plan, _service_of(loads), limit_seconds)
        self._call_module(state="started", definition=definition)

    def _finish_job(self, loads: Sequence[PlannedLoad], path: str | None) -> None:
        try:
            self._call_module(state="absent")
        finally:
            markdown = benchmark_table.as_markdown(self._benchmark)
            display.display("\n" + markdown)
            if path:
                text = json.dumps(typed_json.dump(self._benchmark), indent=1) + "\n"
                output.write_folder("llama_benchmark_path", path, {"benchmark.json": text, "benchmark.md": markdown})
        self._record_speed(loads)

    def _collect_results(self, loads: Sequence[PlannedLoad]) -> None:
        """Collect the measurements of the programs until all of them have exited.

        :raises AnsibleActionFail: the job was stopped early.
        """
        start_time, is_running = time.monotonic(), True
        while is_running:
            answer = self._call_module(programs=len(loads))
            progress = typed_json.parse_report(self._head_name, "the benchmark", types.BenchmarkProgress, answer)
            is_running = progress.running
            for load, program in zip(loads, progress.programs):
                self._add_results(load, program)
            if is_running:
                self._show(f"{time.monotonic() - start_time:.0f} s")
                time.sleep(POLL_SECONDS)
        if not all(cell.is_done for cell in self._benchmark.cells):
            raise AnsibleActionFail(
                f"the benchmark on {self._head_name} ended early: someone stopped it, started the server, or restarted the host. Run this playbook again "
                "to start over."
            )

    def _add_results(self, load: PlannedLoad, program: types.ProgramProgress) -> None:
        """Add results to the record and show new results. Add the reason to cells that a finished program did not measure."""
        speeds, cells = {(result.test, result.depth): result.speed for result in program.results}, []
        for cell in self._benchmark.cells:
            if cell.hosts == load.hosts and not cell.is_done:
                cell = cell._replace(measured=speeds.get((cell.test, cell.depth)))
                if program.status is not None and not cell.measured:
                    skip_reason = f"llama-bench exited with status {program.status}: {program.log_end or 'no output'}"
                    cell = cell._replace(skipped=skip_reason)
                if cell.is_done:
                    self._show(f"{cell.name}: {benchmark_table.speed_text(cell) or f'not measured, {cell.skipped}'}")
            cells.append(cell)
        self._benchmark = self._benchmark._replace(cells=tuple(cells))

    def _record_speed(self, loads: Sequence[PlannedLoad]) -> None:
        """Record the measured generation speed of the serving devices on the head, for the next plan."""
        served_devices = {device.device for device in self._plan.estimate.devices}
        for load in loads:
            if {device.device for device in load.plan.estimate.devices} == served_devices:
                cells = [cell for cell in self._benchmark.cells if cell.hosts == load.hosts and not cell.depth]
                speeds = [cell.measured.mean for cell in cells if cell.measured and cell.test.startswith("tg")]
                record = speed_record.new_record(load.plan, next(iter(speeds), None))
                self.write_record(self._head_plan.prefix, names.SPEED_FILE, record)

    def _call_module(self, **arguments: Any) -> dict:
        answer = self.run_module(host=typed_json.dump(installation.planned_paths(self._head_plan)), **arguments)
        if answer.get("failed"):
            raise AnsibleActionFail(f"the benchmark on {self._head_name} failed: {failure_reason(answer)}")
        return answer


def _make_plan(cluster: Cluster, catalogue: Any) -> Plan | Refused:
    try:
        return planner.make_plan(cluster, catalogue, "")
    except Refusal as refusal:
        return planner.refused_plan(cluster.name, refusal)


def _service_of(loads: Sequence[PlannedLoad]) -> ServicePlan:
    """Return the service that measures the loads, in the sandbox of the head's service."""
    first_plan, head = loads[0].plan, loads[0].plan.head.host
    host = first_plan.hosts[head]
    head_services = [service for load in loads for service in load.plan.hosts[head].services if service.kind == "head"]
    script = command_line.script_of(host.state, [(load.argv, load.plan.head.environment) for load in loads])

    def combine(permission: str, no_limit: Any = "") -> Any:
        """Return the combined permissions of one kind; unlimited if one of the heads has no limit."""
        values = [getattr(service, permission) for service in head_services]
        return no_limit if no_limit in values else tuple(sorted({element for value in values for element in value}))

    argv: Sequence[str] = ["/bin/sh", "-c", script]
    if services.tunnel_mappings(first_plan.workers):
        argv = services.launcher_argv(first_plan, "client", argv)
    service = services.temporary_service(
        head_services[0], job.SERVICE_NAME, f"benchmark of cluster {first_plan.cluster}", argv
    )
    return service._replace(homes=combine("homes", None), devices=combine("devices"), allow=combine("allow", ()))

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans what a benchmark measures, has the head measure it, shows how far it is, and writes the table."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import (
    command_line,
    job,
    matrix,
    types,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import place as places
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import speed_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions, inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath, why
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources

display = Display()

POLL_SECONDS = 10.0
END_SECONDS = 60
"""That a program may take to end when its time is over."""


class PlannedLoad(NamedTuple):
    """A load that can be measured, with its plan and its command line."""

    hosts: tuple[str, ...]
    plan: Plan
    argv: Sequence[str]


class Arguments(NamedTuple):
    plan: Plan
    facts: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    path: ControllerPath | None = None
    state: Annotated[str, ("absent",)] | None = None


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        self._plan = arguments.plan.each()[0]
        self._name = self._plan.head.host
        self._host = self._plan.hosts[self._name]
        if arguments.state:
            return self._call(state=arguments.state)
        loads = self._loads(arguments)
        self._show(
            f"{len(self._record.cells)} cells, {sum(bool(cell.skipped) for cell in self._record.cells)} not possible"
        )
        if loads and not self.check_mode:
            try:
                self._start(loads)
                self._follow(loads)
            finally:
                self._end(loads, arguments.path)
        return {"changed": bool(loads), "record": typed_json.dump(self._record)}

    def _show(self, text: str) -> None:
        display.display(f"  [{self._name}] benchmark: {text}")

    def _loads(self, arguments: Arguments) -> list[PlannedLoad]:
        """What can be measured, of several models that take turns with the first. Makes the record, with all cells.

        :raises Refusal: a variable is wrong, or the release has no program that measures.
        """
        served = self._plan
        name, hosts = inventory.hosts(self.variables, arguments.facts, inventory.of_play(self.variables))
        first = next(iter(turns.overlays(hosts[self._name]["variables"])), None)
        if first:
            hosts = {**hosts, self._name: {**hosts[self._name], "variables": first.variables}}
        model = turns.found_of(arguments.model, first.name) if first else arguments.model
        catalogue = cluster_inputs.catalogue(inventory.packages())
        cluster = sources.look_up(self.find_file, cluster_inputs.read(name, hosts), catalogue)
        request = matrix.request_of(hosts[self._name]["variables"])
        if not any(options.MEASURING in build.targets for build in served.hosts[self._name].builds):
            fix = "set llama_benchmark_programs to true, run site.yml, and then this playbook again"
            if not served.release.mainline:
                fix = f"only releases of llama.cpp can be measured, and {served.release.ref} is one of {served.release.fork}"
            raise Refusal(f"the release on {self._name} has no {options.MEASURING}: {fix}")
        if self._host.service_manager not in job.MANAGERS:
            raise Refusal(
                f"{self._name} runs its services by {self._host.service_manager}, and a benchmark needs systemd or supervisor: use a head with one of them"
            )
        loads: list[PlannedLoad] = []
        cells: list[types.Cell] = []
        for names_of in matrix.loads_of(request, served):
            plan = _plan_of(matrix.cluster_of(cluster, names_of, request, served), model, catalogue)
            obstacle = matrix.obstacle(plan, served, names_of)
            if isinstance(plan, Plan) and not obstacle:
                loads.append(PlannedLoad(names_of, plan, command_line.argv_of(plan, request)))
            cells += matrix.cells_of(names_of, request, plan, obstacle)
        self._record = types.Benchmark(
            schema=types.SCHEMA,
            cluster=served.cluster,
            time=int(time.time()),
            plan=served.id or "",
            release=f"llama.cpp {served.release.ref}, commit {served.release.commit}",
            model=served.model.name,
            cells=tuple(cells),
        )
        return loads

    def _start(self, loads: Sequence[PlannedLoad]) -> None:
        seconds = (command_line.LOAD_SECONDS + END_SECONDS) * len(loads)
        self._call(state="started", definition=definitions.definition(self._host, _service_of(loads), seconds))

    def _end(self, loads: Sequence[PlannedLoad], path: str | None) -> None:
        """Has the server serve again, and leaves what was measured."""
        try:
            self._call(state="absent")
        finally:
            table = benchmark_table.as_markdown(self._record)
            display.display("\n" + table)
            if path:
                data = json.dumps(typed_json.dump(self._record), indent=1) + "\n"
                output.write_folder("llama_benchmark_path", path, {"benchmark.json": data, "benchmark.md": table})
        self._keep_speed(loads)

    def _follow(self, loads: Sequence[PlannedLoad]) -> None:
        """Takes what the programs measure, until all of them have ended.

        :raises AnsibleActionFail: the job was ended before.
        """
        began, running = time.monotonic(), True
        while running:
            answer = self._call(programs=len(loads))
            progress = typed_json.reported(self._name, "the benchmark", types.BenchmarkProgress, answer)
            running = progress.running
            for one, program in zip(loads, progress.programs):
                self._update(one, program)
            if running:
                self._show(f"{time.monotonic() - began:.0f} s")
                time.sleep(POLL_SECONDS)
        if not all(cell.is_done for cell in self._record.cells):
            raise AnsibleActionFail(
                f"the benchmark on {self._name} was ended while llama-bench measured: somebody stopped it or started the server, or the host "
                "restarted. Run this playbook again, which begins anew."
            )

    def _update(self, one: PlannedLoad, program: types.Program) -> None:
        """Takes figures into the record and shows new ones; what lacks one when the program has ended gets the reason."""
        speeds, cells = {(found.test, found.depth): found.speed for found in program.results}, []
        for cell in self._record.cells:
            if cell.hosts == one.hosts and not cell.is_done:
                cell = cell._replace(measured=speeds.get((cell.test, cell.depth)))
                if program.status is not None and not cell.measured:
                    why_not = f"llama-bench ended with status {program.status}: {program.said or 'it wrote nothing'}"
                    cell = cell._replace(skipped=why_not)
                if cell.is_done:
                    self._show(f"{cell.name}: {benchmark_table.speed(cell) or f'not measured, {cell.skipped}'}")
            cells.append(cell)
        self._record = self._record._replace(cells=tuple(cells))

    def _keep_speed(self, loads: Sequence[PlannedLoad]) -> None:
        """Leaves the measured generation of the devices that serve on the head, for the next plan."""
        served = {device.device for device in self._plan.estimate.devices}
        for one in loads:
            if {device.device for device in one.plan.estimate.devices} == served:
                cells = [cell for cell in self._record.cells if cell.hosts == one.hosts and not cell.depth]
                speeds = [cell.measured.mean for cell in cells if cell.measured and cell.test.startswith("tg")]
                record = speed_record.of_plan(one.plan, next(iter(speeds), None))
                self.leave(self._host.prefix, names.MEASURED_SPEED, record)

    def _call(self, **arguments: Any) -> dict:
        """What the module returns on the head.

        :raises AnsibleActionFail: with what it says.
        """
        answer = self.module(host=typed_json.dump(places.place_in(self._host)), **arguments)
        if answer.get("failed"):
            raise AnsibleActionFail(f"benchmark on {self._name}: {why(answer)}")
        return answer


def _plan_of(cluster: Cluster, model: Mapping[str, Any], catalogue: Any) -> Plan | Refused:
    try:
        return planner.make(cluster, model, catalogue, "")
    except Refusal as refusal:
        return planner.refused(cluster.name, refusal)


def _service_of(loads: Sequence[PlannedLoad]) -> ServicePlan:
    """The service that measures what would be served, with the limits of the head's own."""
    first = loads[0].plan
    host = first.hosts[first.head.host]
    heads = [service for one in loads for service in one.plan.hosts[first.head.host].services if service.kind == "head"]
    script = command_line.script_of(host.state, [(one.argv, one.plan.head.environment) for one in loads])

    def union(field: str, unlimited: Any = "") -> Any:
        """What the service may use of one kind; everything where one of the heads may."""
        values = [getattr(service, field) for service in heads]
        return unlimited if unlimited in values else tuple(sorted({entry for value in values for entry in value}))

    return heads[0]._replace(
        name=job.NAME,
        temporary=True,
        description=f"benchmark of cluster {first.cluster}",
        argv=services.behind_tunnels(first, ["/bin/sh", "-c", script]),
        environment={},
        reads=(),
        after=(),
        credentials={},
        homes=union("homes", None),
        devices=union("devices"),
        allow=union("allow", ()),
    )

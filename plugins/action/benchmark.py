# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans what a benchmark measures, has the head measure it, shows how far it is, and writes the table."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import (
    command_line,
    job,
    matrix,
    results,
    runner,
    types,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import speed_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelArguments, ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, ModelRequest
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import (
    definitions,
    inventory,
    output,
)
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath, why
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import resolver
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources

display = Display()

POLL_SECONDS = 10.0
MOST_MISSED = 10
"""Calls of the head that may fail one after the other because it cannot be reached: it measures without the controller."""
END_SECONDS = 60
"""That a program may take to end, beside its own limit."""


class PlannedLoad(NamedTuple):
    """A load of a model with its plan and its command line; of one that cannot be measured that is empty."""

    load: matrix.Load
    plan: Plan
    argv: Sequence[str]
    keys: frozenset[str]
    asks: dict[str, Any] | None = None


class Matrix(NamedTuple):
    """All that is measured."""

    request: matrix.Request
    loads: list[PlannedLoad]
    record: types.Benchmark
    """With every cell, none of them measured."""
    token_file: str | None
    """On the controller, for servers of models."""


class Inputs(NamedTuple):
    """What loads are planned from."""

    name: str
    hosts: Mapping[str, Any]
    catalogue: Any
    cluster: Cluster
    request: matrix.Request

    def with_values(self, values: Mapping[str, Any]) -> Cluster:
        """The cluster with other variables of its head.

        :raises Refusal: they are not valid.
        """
        hosts = inventory.with_values(self.hosts, self.cluster.head, values)
        return cluster_inputs.read(self.name, hosts)._replace(releases=self.cluster.releases)


class Arguments(NamedTuple):
    plan: Plan
    facts: Mapping[str, Any]
    model: Mapping[str, Any] = {}
    path: ControllerPath | None = None


class ActionModule(Action):
    ARGUMENTS = Arguments
    AGAIN = "Run this playbook again, which goes on with what is missing."

    def perform(self, arguments: Arguments) -> dict:
        arguments = self._of_one_model(arguments)
        self._head = Head(self, arguments.plan)
        whole = self._matrix(arguments)
        self._record = self._resumed(whole)
        remaining = sum(not cell.is_done for cell in self._record.cells)
        display.display(
            f"  [{self._head.name}] benchmark {self._record.id}: {len(self._record.cells)} cells, {remaining} of them to measure, "
            f"{sum(bool(cell.skipped) for cell in self._record.cells)} not possible"
        )
        problem = "" if self.check_mode else self._measure(whole, arguments.path)
        # A task that fails shows all that it returns on the screen, and the page needs the record.
        result = {"changed": bool(remaining), "record": typed_json.dump(self._record)}
        return {**result, "problem": problem} if problem else result

    def _of_one_model(self, arguments: Arguments) -> Arguments:
        """What is measured of several models that take turns: one, as if it were alone.

        :raises Refusal: there is none of the name that is asked for.
        """
        self._cluster, self._hosts = inventory.hosts(self.variables, arguments.facts, inventory.of_play(self.variables))
        name = arguments.plan.head.host
        entry = turns.measured(self._hosts[name]["variables"])
        if not entry:
            return arguments
        self._hosts = {**self._hosts, name: {**self._hosts[name], "variables": entry.variables}}
        plans = zip(arguments.plan.head.models or (), arguments.plan.each())
        plan = next(plan for model, plan in plans if model.name == entry.name)
        return arguments._replace(plan=plan, model=turns.found_of(arguments.model, entry.name))

    def _measure(self, whole: Matrix, path: str | None) -> str:
        """Measures what is left; why that was not possible, or nothing."""
        problems = []
        try:
            self._run_job(whole)
        except (Refusal, AnsibleActionFail) as failure:
            problems.append(str(failure))
        finally:
            if not problems and all(cell.is_done for cell in self._record.cells):
                self._record = self._record._replace(ended=int(time.time()))
            try:
                self._head.call("benchmark_job", state="absent", record=typed_json.dump(self._record))
            except AnsibleActionFail as failure:
                problems.append(
                    f"{failure}. systemd starts the server when the job ends; the next run of this playbook ends it at once."
                )
            self._keep_speed(whole)
            if path:
                texts = {"benchmark.json": json.dumps(typed_json.dump(self._record), indent=1) + "\n"}
                texts["benchmark.md"] = benchmark_table.as_markdown(self._record)
                output.write_folder("llama_benchmark_path", path, texts)
        display.display("\n" + benchmark_table.as_markdown(self._record))
        return " ".join(problems)

    def _keep_speed(self, whole: Matrix) -> None:
        """Leaves the measured speed of what serves on the head, for the next plan."""
        served = {device.device for device in self._head.plan.estimate.devices}
        for one in whole.loads:
            cells = [cell for cell in self._record.cells if cell.key in one.keys and cell.test.startswith("tg")]
            speed = next(
                (cell.measured for cell in cells if cell.measured and not cell.depth and cell.latency_ms is None), None
            )
            if speed and {device.device for device in one.plan.estimate.devices} == served:
                record = speed_record.of_plan(one.plan, speed.mean)
                problem = record and self.leave(self._head.host.prefix, names.MEASURED_SPEED, record)
                if problem:
                    display.warning(
                        f"the next plan does not count with the measured speed, since the head cannot keep it: {problem}"
                    )
                return

    # -------------------------------------------------------------------------------------------------------- matrix

    def _inputs(self) -> Inputs:
        """:raises Refusal: a variable is wrong, or the release has no program that measures."""
        served = self._head.plan
        name, hosts = self._cluster, self._hosts
        catalogue = cluster_inputs.catalogue(inventory.packages())
        cluster = sources.look_up(self.find_file, cluster_inputs.read(name, hosts), catalogue)
        request = matrix.request_of(hosts[cluster.head]["variables"])
        program = options.MEASURING[served.release.fork or options.MAINLINE]
        if not any(program in build.targets for build in served.hosts[cluster.head].builds):
            raise Refusal(
                f"the release on {cluster.head} has no {program}: set llama_benchmark_programs to true, run site.yml, and then this playbook again"
            )
        return Inputs(name, hosts, catalogue, cluster, request)

    def _matrix(self, arguments: Arguments) -> Matrix:
        """:raises Refusal: as of _inputs."""
        served, inputs = self._head.plan, self._inputs()
        cluster, request = inputs.cluster, inputs.request
        variants = [(matrix.settings_of(values), inputs.with_values(values)) for values in request.variants]
        reports = {matrix.name_of(model): self._read_model(model) for model in request.models}
        reports = reports or {matrix.name_of(cluster.model): arguments.model}
        loads: list[PlannedLoad] = []
        cells: list[types.Cell] = []
        first: dict[str, matrix.Load] = {}
        for load, smaller in matrix.loads_of(request, variants, served):
            plan = plan_of(smaller, reports[matrix.name_of(load.model)], inputs.catalogue)
            why, argv = matrix.obstacle(plan, served, load), []
            if isinstance(plan, Plan) and not why:
                argv = command_line.argv_of(plan, load, request.repetitions)
                same = first.setdefault(f"{argv} {load.latencies_ms} {plan.head.environment}", load)
                program = PurePosixPath(argv[0]).name
                why = None if same is load else f"{program} gets the same command line as with {dict(same.settings)}"
            new = matrix.cells_of(load, plan, why)
            if isinstance(plan, Plan):
                keys = frozenset(cell.key for cell in new)
                asks = matrix.asks_of(plan, load, request.repetitions)
                loads.append(PlannedLoad(load, plan, () if why else argv, keys, asks=asks))
            cells += new
        models = dict.fromkeys(reports, "")
        models.update({matrix.name_of(one.load.model): one.plan.model.path for one in loads})
        return Matrix(request, loads, record_of(served, inputs, cells, models), cluster.model.token_file)

    def _read_model(self, model: ModelRequest) -> Mapping[str, Any]:
        """What the module model reports of a model. A generated one is written on the head first.

        :raises Refusal: it is not there, or not readable.
        """
        host = self._head.host
        if not model.known_answer:
            try:
                return resolver.resolve(self, model, resolver.Options(host.prefix, host.account))
            except Refusal as refusal:
                raise Refusal(f"llama_benchmark_models: {refusal}") from None
        path = known_answer.path_of(host.prefix, *model.known_answer)
        result = {}
        if not self.check_mode:
            result = self.action("llamacpp.cluster.known_answer", path=path, **model.known_answer._asdict())
        if result.get("failed"):
            raise Refusal(f"llama_benchmark_models: {why(result)}")
        return {}

    def _resumed(self, whole: Matrix) -> types.Benchmark:
        """The record of an earlier run that measures the same and was cut off, with what was measured after that; else a new one."""
        new = whole.record
        data = self._head.call("benchmark_info", same=new.id[-8:]).get("record")
        try:
            before = types.read(data, "the last benchmark") if data else None
        except Refusal:
            before = None
        if not before or before.ended or before.id[-8:] != new.id[-8:]:
            return new
        known = {cell.key: cell for cell in before.cells}
        for one in whole.loads:
            cells = [known[key] for key in one.keys if key in known]
            for log in {cell.log for cell in cells if cell.log and not cell.measured}:
                _running, written = self._head.progress(log)
                filled = results.fill([cell for cell in cells if cell.log == log], written, one.load.latencies_ms)
                known.update({cell.key: cell for cell in filled})
        measured = {key: cell for key, cell in known.items() if cell.measured}
        return new._replace(id=before.id, time=before.time).with_cells(measured)

    # ------------------------------------------------------------------------------------------------------- measure

    def _unfinished(self, keys: Iterable[str]) -> list[types.Cell]:
        """Those of these cells that are not done."""
        return [cell for cell in self._record.cells if cell.key in keys and not cell.is_done]

    def _update(self, cells: Iterable[types.Cell]) -> None:
        """Takes cells into the record, and shows those that are done now: of those that lack a figure for one reason, the first."""
        known = {cell.key: cell for cell in self._record.cells}
        for cell in cells:
            said = {other.skipped for other in known.values() if other.skipped}
            if cell.is_done and not known[cell.key].is_done and cell.skipped not in said:
                speed = benchmark_table.speed(cell) if cell.measured else f"not measured: {cell.skipped}"
                display.display(f"  [{self._head.name}] {cell.key}: {speed}")
            known[cell.key] = cell
        self._record = self._record.with_cells(known)

    def _run_job(self, whole: Matrix) -> None:
        """Measures in place of the server."""
        loads = [one for one in whole.loads if one.argv and self._unfinished(one.keys)]
        if not loads:
            return
        self._fetch(loads, whole.token_file)
        host, timeout = self._head.host, whole.request.timeout
        logs = [
            f"{host.state}/{names.BENCHMARKS}/{self._record.id}/{time.time():.0f}-{n:04}.log" for n in range(len(loads))
        ]
        for one, log in zip(loads, logs):
            self._update(cell._replace(argv=tuple(one.argv), log=log) for cell in self._unfinished(one.keys))
        if host.service_manager not in job.SYSTEMD:
            display.warning(
                f"{host.service_manager} on {self._head.name} does not start the server by itself: where this run is killed, that is stopped until "
                "site.yml, start.yml or this playbook runs again."
            )
        service = _service_of([one.plan for one in loads])
        self._head.call(
            "benchmark_job",
            state="started",
            record=typed_json.dump(self._record),
            job={"timeout": timeout, "loads": [_load_of(one, log)._asdict() for one, log in zip(loads, logs)]},
            definition=definitions.definition(host, service, (timeout + END_SECONDS) * len(loads)),
            runner=Path(runner.__file__).read_text(),
        )
        for one, log in zip(loads, logs):
            self._follow(one, log)

    def _fetch(self, loads: Sequence[PlannedLoad], token_file: str | None) -> None:
        """Gets models that are not on the head yet there, while the server still serves.

        :raises AnsibleActionFail: one of them could not be fetched.
        """
        for path, model in {one.plan.model.path: one.plan.model for one in loads}.items():
            if not model.records:
                continue
            folder = str(PurePosixPath(model.records[0].path).parent.parent)
            wanted = ModelArguments(model.files, folder, model.records, token_file)
            result = self.action("llamacpp.cluster.model", **typed_json.dump(wanted))
            if result.get("failed"):
                raise AnsibleActionFail(f"{PurePosixPath(path).name} cannot be fetched: {why(result)}")

    def _follow(self, one: PlannedLoad, log: str) -> None:
        """Takes what a program measures, until it has ended.

        :raises AnsibleActionFail: the job was ended before.
        """
        began, latencies, program = time.monotonic(), one.load.latencies_ms, PurePosixPath(one.argv[0]).name
        while True:
            self._head.check_run()
            running, written = self._head.progress(log)
            self._update(results.fill([cell for cell in self._record.cells if cell.log == log], written, latencies))
            if written.status is not None:
                why = results.failure_of(written, one.argv, latencies)
                self._update(cell._replace(skipped=why) for cell in self._unfinished(one.keys))
                return
            if not running:
                raise AnsibleActionFail(
                    f"the benchmark on {self._head.name} was ended while {program} measured: somebody stopped it or started the server, or the host "
                    f"restarted. {self.AGAIN}"
                )
            doing = "loads" if written.load_s is None else "measures"
            display.display(f"  [{self._head.name}] {program} {doing}, {time.monotonic() - began:.0f} s")
            time.sleep(POLL_SECONDS)


class Head:
    """The head, on which everything is measured."""

    def __init__(self, action: ActionModule, plan: Plan) -> None:
        self._action, self._run = action, os.getppid()
        self.plan = plan
        self.name = plan.head.host
        self.host = plan.hosts[self.name]
        self._host = typed_json.dump(self.host._replace(files=()))

    def check_run(self) -> None:
        """This process is another one than the run's, and outlives it where that is killed.

        :raises AnsibleActionFail: the run has ended.
        """
        if os.getppid() != self._run:
            raise AnsibleActionFail("the run of the playbook was ended; what is missing is measured by the next one")

    def call(self, name: str, **arguments: Any) -> dict:
        """What a module returns there. It is called again where the head cannot be reached.

        :raises AnsibleActionFail: with what the module says, or why the head cannot be reached.
        """
        missed = 0
        while True:
            try:
                answer = self._action.module(f"llamacpp.cluster.{name}", host=self._host, **arguments)
            except AnsibleConnectionFailure as failure:
                missed += 1
                if missed == MOST_MISSED:
                    raise AnsibleActionFail(f"{self.name} cannot be reached any more: {failure}") from None
                time.sleep(POLL_SECONDS)
                continue
            if answer.get("failed"):
                raise AnsibleActionFail(f"{name} on {self.name}: {why(answer)}")
            return answer

    def progress(self, log: str) -> tuple[bool, results.Log]:
        """Whether the job runs, and what one of its programs has written."""
        answer = self.call("benchmark_info", log=log)
        return answer.get("running") is True, results.read(str(answer.get("lines")))


def plan_of(cluster: Cluster, model: Mapping[str, Any], catalogue: Any) -> Plan | Refused:
    try:
        return planner.make(cluster, model, catalogue, "")
    except Refusal as refusal:
        return planner.refused(cluster.name, refusal)


def record_of(served: Plan, inputs: Inputs, cells: Sequence[types.Cell], models: Mapping[str, str]) -> types.Benchmark:
    """A new record of these cells.

    :param models: name → path on the head.
    """
    now = int(time.time())
    identity = matrix.identity(served, cells, inputs.request.repetitions, models)
    return types.Benchmark(
        schema=types.SCHEMA,
        cluster=served.cluster,
        id=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{identity}",
        time=now,
        ended=None,
        plan=served.id or "",
        release=matrix.release_of(served),
        hosts=matrix.machines(inputs.cluster, served),
        models=models,
        cells=tuple(cells),
    )


def _load_of(one: PlannedLoad, log: str) -> runner.Load:
    """What the runner needs of a load."""
    latencies = list(one.load.latencies_ms)
    workers = [entry.endpoint for entry in one.plan.placement if entry.endpoint] if latencies else []
    environment = dict(one.plan.head.environment)
    return runner.Load(list(one.argv), environment, log, workers, latencies, one.asks)


def _service_of(plans: Sequence[Plan]) -> ServicePlan:
    """The service that measures what these plans would serve, with the limits of the head's own."""
    host = plans[0].hosts[plans[0].head.host]
    heads = [service for plan in plans for service in plan.hosts[plan.head.host].services if service.kind == "head"]
    folder = f"{host.prefix}/{names.BENCHMARKS}"

    def union(field: str, unlimited: Any = "") -> Any:
        """What the service may use of one kind; everything where one of the heads may."""
        values = [getattr(service, field) for service in heads]
        return unlimited if unlimited in values else tuple(sorted({entry for value in values for entry in value}))

    return heads[0]._replace(
        name=names.of(plans[0].cluster).service("benchmark"),
        temporary=True,
        description=f"benchmark of cluster {plans[0].cluster}",
        argv=services.behind_tunnels(plans[0], [str(host.python), f"{folder}/{job.RUNNER}", f"{folder}/{job.JOB}"]),
        environment={},
        reads=(),
        after=(),
        credentials={},
        homes=union("homes", None),
        devices=union("devices"),
        allow=union("allow", ()),
    )

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measures each device of the cluster with the machinery of benchmarks, and keeps what follows for the plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.action import benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import command_line, matrix, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, calibration
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Device

display = Display()
MOST_SECONDS = 600
"""Of one program."""


class Measured(NamedTuple):
    """A device, and those of its host that are the same kind."""

    host: str
    keys: tuple[str, ...]
    """As calibration.key names them."""
    name: str
    device: str
    endpoint: str | None
    trials: tuple[calibration.Trial, ...]

    @property
    def label(self) -> str:
        return f"{self.name or self.device} of {self.host}{' behind its worker' * bool(self.endpoint)}"

    @property
    def kind(self) -> tuple[str, str]:
        """Its name, and what llama.cpp calls those that the same backend drives."""
        return self.name, self.device.rstrip("0123456789")

    @property
    def is_by_itself(self) -> bool:
        """Whether it is measured as those of its kind behind workers compute. A processor's llama-server takes other threads and kernels than its worker."""
        return not self.endpoint and self.device != backends.CPU.device


class ActionModule(benchmark.ActionModule):
    def perform(self, arguments: benchmark.Arguments) -> dict:
        served = arguments.plan
        if served.release.fork or served.release.generation < command_line.DEVICES_SINCE:
            raise Refusal(
                f"the llama-bench of {served.release.ref} cannot measure one device by itself: use llama.cpp of b{command_line.DEVICES_SINCE} or later"
            )
        result = super().perform(arguments)
        record = result.pop("record")
        rates = {
            host: calibration.readable(found)
            for host, found in (arguments.facts[served.head.host]["facts"].get("calibrations") or {}).items()
        }
        problems = [result["problem"]] if "problem" in result else []
        speeds = self._speeds(typed_json.parse(types.Benchmark, record))
        release = calibration.Measured("", time.strftime("%Y-%m-%d"), served.release.ref, served.release.generation)
        alone: dict[tuple[str, str], tuple[calibration.Rates, calibration.Speeds]] = {}
        for one in [] if self.check_mode else self._measured:
            try:
                found = calibration.fit(release._replace(name=one.name), speeds.get(one, {}))
                if one.is_by_itself:
                    alone[one.kind] = found, speeds[one]
                elif one.kind in alone:
                    found = calibration.behind_worker(*alone[one.kind], found, speeds[one])
            except Refusal as refusal:
                problems.append(f"{one.label}: {refusal}.")
                continue
            display.display(f"  [{self._head.name}] {one.label}: {_sentence(found)}")
            rates.setdefault(one.host, {}).update(dict.fromkeys(one.keys, typed_json.dump(found)))
        if not self.check_mode:
            self._head.call("calibration", rates=rates)
        return {"changed": result["changed"], "rates": rates, **({"problem": " ".join(problems)} if problems else {})}

    def _speeds(
        self, record: types.Benchmark
    ) -> Mapping[Measured, Mapping[calibration.Trial, Mapping[str, Sequence[float]]]]:
        found: dict[Measured, dict[calibration.Trial, dict[str, Sequence[float]]]] = {}
        for cell in record.cells:
            if cell.measured:
                one, trial = self._of_key[cell.key]
                found.setdefault(one, {}).setdefault(trial, {})[f"{cell.test[:2]}{cell.depth or ''}"] = (
                    cell.measured.samples
                )
        return found

    def _matrix(self, arguments: benchmark.Arguments) -> benchmark.Matrix:
        """:raises Refusal: as of _inputs."""
        served, inputs = self._head.plan, self._inputs()
        report = model_source.report_of(arguments.model)
        self._measured = list(_devices(served, inputs.cluster, model_source.summary_of(inputs.cluster.model, report)))
        self._of_key: dict[str, tuple[Measured, calibration.Trial]] = {}
        loads, cells, plan = [], [], _reaching(served, self._measured)
        for one in self._measured:
            for place, trial in enumerate(one.trials):
                tests = dict(zip(("pp", "tg"), trial.tests))
                load = matrix.Load((one.host,), "", inputs.cluster.model, {}, (), (), (), (0,))
                argv = command_line.of_device(served, self._path(trial), trial, one.device, one.endpoint)
                new = [
                    types.Cell(
                        f"{one.label}/{trial.name}/{test}{tokens}/d{depth}",
                        (one.host,),
                        one.device,
                        trial.name,
                        {},
                        None,
                        f"{test}{tokens}",
                        depth,
                        None,
                        None,
                        (),
                    )
                    for test, tokens in tests.items()
                    if tokens
                    for depth in trial.depths
                ]
                self._of_key.update({cell.key: (one, trial) for cell in new})
                keys, needed = frozenset(cell.key for cell in new), place < len(calibration.NEEDED)
                loads.append(benchmark.PlannedLoad(load, _seeing(plan, one), argv, keys, one.label, needed))
                cells += new
        models = {cell.model: "" for cell in cells}
        request = inputs.request._replace(timeout=MOST_SECONDS)
        return benchmark.Matrix(request, loads, benchmark.record_of(served, inputs, cells, models), None)

    def _path(self, trial: calibration.Trial) -> str:
        return f"{self._head.host.prefix}/{names.BENCHMARKS}/{trial.name}.gguf"

    def _fetch(self, loads: Sequence[benchmark.PlannedLoad], token_file: str | None) -> None:
        """Writes the models while the server still serves."""
        models = {self._of_key[key][1] for one in loads for key in one.keys}
        self._head.call("calibration", models=sorted(map(list, models)))


def _devices(served: Plan, cluster: Cluster, summary: model_source.ModelSummary | None) -> Iterator[Measured]:
    """Those of the head that hold a part of the model, or that its programs can drive, and those of workers that the collection manages."""
    head, lent = served.head.host, {entry.device for entry in served.placement if entry.endpoint}
    own = [entry.device for entry in served.estimate.devices if entry.device not in lent]
    ways: list[tuple[str, str, str, str | None]] = [
        (head, device, backends.CPU.name if device == backends.CPU.device else "", None) for device in own
    ]
    programs = next(
        (build.backend for build in served.hosts[head].builds if f"/{build.id}/" in served.head.argv[0]), ""
    )
    ways += [
        (head, worker.device, worker.backend, None)
        for worker in served.hosts[head].workers
        if worker.backend == programs != backends.CPU.name and worker.device not in own
    ]
    ways += [
        (name, worker.device, worker.backend, worker.endpoint)
        for name, host in served.hosts.items()
        for worker in host.workers
    ]
    alike: dict[tuple[str, str, str], list[tuple[str, str, str | None]]] = {}
    for host, device, backend, endpoint in ways:
        facts = cluster.hosts[host].facts
        accelerator = devices.accelerator_of(facts, device)
        name = accelerator.name if accelerator else str(facts.cpu.get("model", ""))
        alike.setdefault((host, name, calibration.key("", endpoint)), []).append((device, backend, endpoint))
    sums = calibration.sums_of(summary.named_tensors, cost_model.active_share(summary)) if summary else {}
    order = sorted(sums, key=lambda kind: -sums[kind].read)
    dense, experts = ([kind for kind, of_experts in order if of_experts == wanted] for wanted in (False, True))
    alone: set[tuple[str, str]] = set()
    for (host, name, _way), found in alike.items():
        device, backend, endpoint = found[0]
        planned = Device(host, backend, device, device, 0, {})
        rate = cost_model.rate_of(planned, cluster.hosts[host].facts, served.release.generation).prompt_gflops
        keys = tuple(calibration.key(device, endpoint) for device, _backend, endpoint in found)
        one = Measured(host, keys, name, device, endpoint, ())
        trials = calibration.trials(dense, experts, rate, bool(endpoint), bool(endpoint) and one.kind in alone)
        alone |= {one.kind} if one.is_by_itself else set()
        yield one._replace(trials=tuple(trials))


def _reaching(plan: Plan, measured: Sequence[Measured]) -> Plan:
    """The plan, of which the head's service may reach these workers and open these devices too."""
    addresses = {one.endpoint.rsplit(":", 1)[0] for one in measured if one.endpoint}
    host = plan.hosts[plan.head.host]
    files = {path for one in measured for backend in _lends(plan, one) for path in backends.device_files(backend)}
    services = tuple(
        service._replace(
            allow=tuple(sorted({*service.allow, *addresses})) if service.allow else service.allow,
            devices=tuple(sorted({*service.devices, *files})),
        )
        if service.kind == "head"
        else service
        for service in host.services
    )
    return plan._replace(hosts={**plan.hosts, plan.head.host: host._replace(services=services)})


def _lends(plan: Plan, one: Measured) -> set[str]:
    """The backend of a device that the head lends to itself, where it is measured without its worker."""
    workers = () if one.endpoint else plan.hosts[plan.head.host].workers
    return {worker.backend for worker in workers if worker.device == one.device}


def _seeing(plan: Plan, one: Measured) -> Plan:
    """The plan, whose llama-server sees such a device as its worker does."""
    environment = dict(plan.head.environment)
    for backend in _lends(plan, one):
        record, hiding = backends.RECORDS[backend], backends.hiding(backend)
        if hiding:
            environment.pop(hiding.variable, None)
        if record.bus_order:
            environment.update([record.bus_order])
    return plan._replace(head=plan.head._replace(environment=environment))


def _sentence(rates: calibration.Rates) -> str:
    figures = [
        (", ".join(f"{kind} {rate:g}" for kind, rate in found.items()), unit)
        for found, unit in ((rates.gb_per_s, "GB/s"), (rates.prompt_gflops, "GFLOPS in prompts"))
    ]
    figures += [(f"{rates.node_us:g}", "µs a node"), (f"{rates.visit_ms:g}", "ms a visit")]
    return "; ".join(f"{figure} {unit}" for figure, unit in figures) + f"; repetitions differ by {rates.spread:.0%}"

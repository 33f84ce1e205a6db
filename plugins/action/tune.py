# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Searches for settings of the server that are faster than the plan's, by rounds of benchmarks, and writes them into a file."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import command_line, matrix, tuning, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_table


class ActionModule(benchmark.ActionModule):
    AGAIN = "Run this playbook again, which begins anew."

    def perform(self, arguments: benchmark.Arguments) -> dict:
        arguments = self._of_one_model(arguments)
        self._head, self._model = benchmark.Head(self, arguments.plan), arguments.model
        inputs = self._inputs()
        variables = inputs.hosts[inputs.cluster.head]["variables"]
        self._path, self._wanted = arguments.path, variables["llama_tune_for"]
        self._from = inputs._replace(request=tuning.request_of(variables, inputs.request))
        self._loads: dict[str, benchmark.PlannedLoad] = {}
        self._tried: dict[str, tuning.Tried] = {}
        self._skipped: dict[str, str] = {}
        self._until = time.monotonic() + 60 * variables["llama_tune_minutes"]
        self._add({})
        own = self._loads.get(tuning.OWN)
        cores = int(inputs.cluster.places[self._head.name].facts.cpu["cores"])
        for settings in tuning.candidates(own.plan, cores, self._from.request) if own else ():
            self._add(settings)
        shown = "" if self._path else "; what is found is only shown, since llama_benchmark_path is not set"
        self._show(f"{len(self._loads)} settings to measure, {len(self._skipped)} not possible{shown}")
        if self.check_mode:
            return {"changed": bool(own)}
        if own:
            self._search()
        tried = list(self._tried.values())
        if not tried or not tried[0].turns:
            why = self._skipped.get(tuning.OWN, tuning.OVER)
            raise Refusal(f"the plan's own settings cannot be measured: {why}")
        self._show(self._write(tuning.MORE if self._is_over() else ""))
        top = tuning.best(tuning.gains(tried))
        return {"changed": True, "settings": top.settings if top else {}}

    def _write(self, early: str) -> str:
        """Writes what was found so far; what is to be shown of it: all where no folder is given, nothing where there is nothing.

        :param early: as of tuning.sentence.
        """
        tried = list(self._tried.values())
        if not tried[0].turns:
            return ""
        text = tuning.as_yaml(self._record, self._wanted, tried, self._skipped, early)
        if not self._path:
            return f"\n{text}"
        output.write_folder("llama_benchmark_path", self._path, {"tuned.yml": text})
        return tuning.sentence(tuning.gains(tried), early)

    def _show(self, text: str) -> None:
        benchmark.display.display(f"  [{self._head.name}] tune: {text}")

    def _is_over(self) -> bool:
        return time.monotonic() > self._until

    def _add(self, settings: tuning.Settings, name: str = "") -> None:
        """Plans the cluster as it would serve with these settings, and takes that among the loads, or notes why it is not possible."""
        served, request, name = self._head.plan, self._from.request, name or tuning.name_of(settings)
        cluster = self._from.with_values(settings)
        plan = benchmark.plan_of(cluster, self._model, self._from.catalogue)
        hosts = tuple(matrix.hosts_with_layers(plan if isinstance(plan, Plan) else served))
        backend, texts = cluster.server.backend or matrix.serving_backend(served), matrix.settings_of(settings)
        text = (request.text or "") if matrix.SPECULATION in settings or name == tuning.ASKED else ""
        tests = ((), request.generated, (0,)) if text else (request.prompts, request.generated, request.depths)
        load = matrix.Load(hosts, backend, cluster.model, texts, (), *tests, text)
        why, argv = matrix.obstacle(plan, served, load), []
        if isinstance(plan, Plan) and not why:
            argv = command_line.argv_of(plan, load, request.repetitions)
            same = [other for other, one in self._loads.items() if one.argv == argv]
            why = f"the program that measures gets the same command line as with {same[0]}" if same else None
            why = why or tuning.loss(served, plan)
        if why or not isinstance(plan, Plan):
            self._skipped[name] = str(why)
            return
        if text and name != tuning.ASKED and tuning.ASKED not in self._loads:
            self._add({}, tuning.ASKED)
        asks = matrix.asks_of(plan, load, request.repetitions)
        self._loads[name] = benchmark.PlannedLoad(load, plan, argv, frozenset(), asks=asks)
        if name != tuning.ASKED:
            self._tried[name] = tuning.Tried(settings, {})

    def _search(self) -> None:
        """Measures in rounds, each time those that may still be the best, until the minutes are over.

        :raises AnsibleActionFail: that was not possible.
        """
        first, names = 0, list(self._loads)
        for turns in tuning.TURNS:
            self._measure_turns(names, range(first, first + turns))
            first += turns
            if self._is_over() or not self._tried[tuning.OWN].turns:
                return
            chosen = tuning.chosen(tuning.gains(list(self._tried.values())))
            for settings in chosen:
                if tuning.name_of(settings) not in {**self._loads, **self._skipped}:
                    self._add(settings)
            names = [tuning.OWN, *(name for name in map(tuning.name_of, chosen) if name in self._loads)]
            if len(names) == 1:
                return

    def _measure_turns(self, names: Sequence[str], turns: Sequence[int]) -> None:
        """Measures each of these settings once in each turn.

        :raises AnsibleActionFail: that was not possible.
        """
        asked = [tuning.ASKED] if any(self._loads[name].load.text for name in names) else []
        names = [*asked, *(name for name in names if name != tuning.ASKED)]
        parts = [(turn, name, self._loads[name]) for turn in turns for name in names]
        cells: list[types.Cell] = []
        loads: list[benchmark.PlannedLoad] = []
        for turn, _name, one in parts:
            way = "/llama-server" if one.load.text else ""
            planned = matrix.cells_of(one.load, one.plan, None)
            new = [cell._replace(key=f"{cell.key}{way}/turn {turn}") for cell in planned]
            loads.append(one._replace(keys=frozenset(cell.key for cell in new)))
            cells += new
        inputs, plan = self._from, self._loads[tuning.OWN].plan
        models = {matrix.name_of(inputs.cluster.model): plan.model.path}
        self._record = benchmark.record_of(self._head.plan, inputs, cells, models)
        whole = benchmark.Matrix(inputs.request, loads, self._record, inputs.cluster.model.token_file)
        problem = self._measure(whole, None)
        for (turn, name, one), load in zip(parts, loads):
            mine, by = (
                [cell for cell in self._record.cells if cell.key in load.keys],
                " of the text" * bool(one.load.text),
            )
            speeds = {benchmark_table.test_of(cell) + by: cell.measured.mean for cell in mine if cell.measured}
            if len(speeds) == len(mine):
                tried = self._tried[tuning.OWN if name == tuning.ASKED else name]
                turned = {**tried.turns, turn: {**tried.turns.get(turn, {}), **speeds}}
                self._tried[tuning.name_of(tried.settings)] = tried._replace(turns=turned)
            failed = [cell.skipped for cell in mine if cell.skipped and cell.skipped != tuning.OVER]
            self._skipped.update(dict.fromkeys([name], failed[0]) if failed else {})
        text = self._write(tuning.CUT)
        if problem:
            self._show(text or "nothing was found")
            raise AnsibleActionFail(problem)

    def _follow(self, one: benchmark.PlannedLoad, log: str) -> None:
        """As a benchmark, until the minutes are over: what is not measured then is not waited for, and ends with the job."""
        if self._is_over():
            self._update(cell._replace(skipped=tuning.OVER) for cell in self._unfinished(one.keys))
            return
        super()._follow(one, log)

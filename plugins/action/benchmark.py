# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans what a benchmark measures, has the head measure it, shows how far it is, and writes the tables."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.action import plan as planning
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import matrix as benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import records, results, runner
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.takeover import RUNNER, SILENCE_SECONDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner as cluster_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import ModelRequest
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import copying, definitions, inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import resolver
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import benchmark_tables

display = Display()

POLL_SECONDS, SHOW_SECONDS = 5.0, 10.0
MOST_MISSED = 10
"""Calls of the head that may fail one after the other; the guard on the head waits longer than one alone takes."""
FORMS: dict[str, dict] = {
    "found": {"benchmarks": [{"id": validation.Text(records.ID), "complete": bool}]},
    "asked": {"speeds": {"first_s": [validation.Number(real=True)], "tokens_per_s": validation.Number(real=True)}},
    "looked": {"runs": bool, "serves": bool},
}
"""State of the module → what it answers, beside a record and the lines of a log, which count by themselves."""


class Load(NamedTuple):
    """A load of a model as it is planned."""

    setup: benchmark.Setup
    plan: dict
    keys: list[str]
    obstacle: str | None


class Matrix(NamedTuple):
    """All that is measured."""

    request: benchmark.Request
    loads: list[Load]
    record: dict
    """With every cell, none of them measured."""
    vocabulary: int


class ActionModule(planning.ActionModule):
    _record: dict | None = None
    """What is measured so far."""
    _token_file: str | None = None
    """On the controller, for servers of models."""

    def run(self, tmp=None, task_vars=None):
        arguments = dict(self._task.args)
        if arguments.get("state") != "measured":
            return self._execute_module(module_args=arguments, task_vars=task_vars)
        try:
            return self._measured(arguments, task_vars)
        except (Refusal, AnsibleActionFail) as failure:
            if not self._record:
                raise AnsibleActionFail(str(failure)) from None
            # A task that fails shows all that it returns on the screen, and the page needs the record.
            return {"changed": True, "record": self._record, "problem": str(failure)}

    def _measured(self, arguments: dict, task_vars: dict) -> dict:
        matrix = self._matrix(arguments, task_vars)
        self._head = Head(self, arguments["plan"], task_vars)
        record = self._continued(matrix)
        path = arguments.get("path")
        left = [cell for cell in record["cells"] if not results.is_done(cell)]
        display.display(
            f"  [{self._head.name}] benchmark {record['id']}: {len(record['cells'])} cells, {len(left)} of them to measure, "
            f"{sum(bool(cell['skipped']) for cell in record['cells'])} not possible"
        )
        if self._task.check_mode:
            return {"changed": bool(left), "record": record}
        self._record = record
        try:
            self._ask_all(matrix)
            self._run_all(matrix)
            if all(map(results.is_done, record["cells"])):
                record["ended"] = int(time.time())
        finally:
            record["fits"], record["visits"] = results.fits(record["cells"]), results.visits(record["cells"])
            try:
                if left:
                    self._head.call("written", prefix=self._head.own["prefix"], record=record)
            except AnsibleActionFail as failure:  # why the rest was not measured, if it was not, is not to be lost
                display.warning(f"{self._head.name} does not keep all of the benchmark: {failure}")
            finally:
                if path:
                    write(path, record)
        display.display("\n" + benchmark_tables.as_markdown(record))
        return {"changed": bool(left), "record": record}

    # -------------------------------------------------------------------------------------------------------- matrix

    def _matrix(self, arguments: dict, task_vars: dict) -> Matrix:
        """:raises Refusal: a variable is wrong, or the release has no program that measures."""
        served = arguments["plan"]
        name, hosts = inventory.hosts(task_vars, arguments["facts"], inventory.of_play(task_vars))
        catalogue = cluster_inputs.catalogue(inventory.packages())
        cluster = self._look_up_releases(cluster_inputs.read(name, hosts), catalogue, task_vars)
        request = benchmark.request_of(hosts[cluster.head]["variables"])
        program = options.MEASURING[_fork(served)]
        if not any(program in build["targets"] for build in served["hosts"][cluster.head]["builds"]):
            raise Refusal(
                f"the release on {cluster.head} has no {program}: set llama_benchmark_programs to true, run site.yml, and then this playbook again"
            )
        self._token_file = cluster.model.token_file
        benchmark.check_names(request.models, cluster.model, served["model"]["path"])
        found = {benchmark.name_of(cluster.model): arguments.get("model") or {}}
        for model in request.models:
            if benchmark.name_of(model) not in found:
                found[benchmark.name_of(model)] = self._look_at(model, served, task_vars)
        paths = {benchmark.name_of(cluster.model): served["model"]["path"]}
        loads, cells = [], benchmark.asked_cells(request, cluster, served)
        for setup in benchmark.setups_of(request, cluster, served):
            plan = self._planned(benchmark.cluster_of(cluster, setup), found[benchmark.name_of(setup.model)], catalogue)
            obstacle = benchmark.obstacle(plan, served, setup)
            own = benchmark.cells_of(setup, plan, _fork(served), obstacle)
            loads.append(Load(setup, plan, [cell["key"] for cell in own], obstacle))
            cells += own
            if not plan["refused"]:
                paths.setdefault(benchmark.name_of(setup.model), plan["model"]["path"])
        models = {
            name: _described(model, found[name], paths.get(name, name))
            for name, model in ((benchmark.name_of(model), model) for model in (cluster.model, *request.models))
        }
        used = {name: model for name, model in models.items() if name in {cell["model"] for cell in cells}}
        record = {
            "schema": benchmark.SCHEMA,
            "cluster": served["cluster"],
            "id": f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{benchmark.identity(served, cells, request.repetitions, used)}",
            "time": int(time.time()),
            "ended": None,
            "plan": served["id"],
            "release": {
                **{key: served["release"][key] for key in ("ref", "id", "build", "commit", "protocol")},
                "fork": _fork(served),
            },
            "hosts": benchmark.machines(cluster, served, lambda host: _link(served, host)),
            "models": used,
            "cells": cells,
            "fits": [],
            "visits": [],
        }
        return Matrix(
            request,
            loads,
            record,
            _vocabulary(cluster.model, found[benchmark.name_of(cluster.model)]),
        )

    def _look_at(self, model: Any, served: dict, task_vars: dict) -> dict:
        """What is found of a model, as the module model returns it. A generated one is written on the head first.

        :raises Refusal: it is not there, or not readable.
        """
        own = served["hosts"][served["head"]["host"]]
        if model.known_answer:
            if not self._task.check_mode:
                path = known_answer.path_of(own["prefix"], *model.known_answer)
                result = copying.run(
                    self, task_vars, "llamacpp.cluster.known_answer", {"path": path, **model.known_answer._asdict()}
                )
                if result.get("failed"):
                    raise Refusal(copying.why(result))
            return {}
        account = {"account": own["account"]} if own["account"] else {}
        if not model.source.path:
            asked = {**resolver.DEFAULTS, **account, "prefix": own["prefix"]}
            return resolver.found_of(self, task_vars, model, asked)
        asked = {"path": model.source.path, **account}
        result = self._execute_module("llamacpp.cluster.gguf_info", module_args=asked, task_vars=task_vars)
        if result.get("failed"):
            raise Refusal(f"llama_benchmark_models: {copying.why(result)}")
        return result

    def _planned(self, cluster: Any, model: dict, catalogue: Any) -> dict:
        try:
            return typed_json.dump(cluster_plan.make(cluster, model, catalogue, ""))
        except Refusal as refusal:
            return typed_json.dump(cluster_plan.refused(cluster.name, refusal))

    def _continued(self, matrix: Matrix) -> dict:
        """The record of an earlier run that measures the same and was cut off, or of which cells are asked for again; else a new one."""
        found = self._head.call("found", prefix=self._head.own["prefix"])
        same = [kept for kept in found["benchmarks"] if kept["id"][-8:] == matrix.record["id"][-8:]]
        again = matrix.request.again
        if not same or (same[0]["complete"] and not again):
            if again:
                raise Refusal(
                    "llama_benchmark_again is set, and no benchmark of this matrix was kept: run it without that"
                )
            return matrix.record
        kept = self._head.call("found", prefix=self._head.own["prefix"], id=same[0]["id"]).get("record")
        cells = kept.get("cells") if isinstance(kept, dict) else None
        before = {
            cell["key"]: cell
            for cell in (cells if isinstance(cells, list) else ())
            if results.can_be_kept(cell) and not any(re.search(expression, cell["key"]) for expression in again)
        }
        cells = [_merged(cell, before.get(cell["key"])) for cell in matrix.record["cells"]]
        return {**matrix.record, "id": same[0]["id"], "cells": cells}

    # ------------------------------------------------------------------------------------------------------- measure

    def _cells(self, keys: list[str]) -> list[dict]:
        """Those of these cells that are not measured yet."""
        return [cell for cell in self._record["cells"] if cell["key"] in keys and not results.is_done(cell)]

    def _put(self, cells: list[dict]) -> None:
        """Takes cells into the record, shows them, and has the head keep it."""
        by_key = {cell["key"]: cell for cell in cells}
        self._record["cells"] = [by_key.get(cell["key"], cell) for cell in self._record["cells"]]
        for cell in cells:
            unit = cell["measured"]["unit"] if cell["measured"] else ""
            said = f"{benchmark_tables.speed(cell)} {unit}" if cell["measured"] else f"not measured: {cell['skipped']}"
            display.display(f"  [{self._head.name}] {cell['key']}: {said}")
        if cells:
            self._head.call("written", prefix=self._head.own["prefix"], record=self._record)

    def _ask_all(self, matrix: Matrix) -> None:
        """Measures through the API of the server, while that serves."""
        asked = [
            cell for cell in self._record["cells"] if cell["program"] == benchmark.SERVER and not results.is_done(cell)
        ]
        for parallel in dict.fromkeys(cell["parallel"] for cell in asked):
            cells = [cell for cell in asked if cell["parallel"] == parallel]
            self._put(self._ask(cells, parallel, matrix))

    def _ask(self, cells: list[dict], parallel: int, matrix: Matrix) -> list[dict]:
        request, firsts, speeds = matrix.request, [], []
        question = {
            "prompt": (request.prompts or (512,))[0],
            "generated": (request.generated or (128,))[0],
            "vocabulary": matrix.vocabulary,
            "parallel": parallel,
            "seconds": request.timeout,
        }
        for _number in range(request.repetitions):
            self._head.check_run()
            answer = self._head.call("asked", may_fail=True, plan=self._head.plan, question=question)
            if answer.get("failed"):
                return [{**cell, "skipped": copying.why(answer)} for cell in cells]
            firsts += answer["speeds"]["first_s"]
            speeds.append(answer["speeds"]["tokens_per_s"])
        argv, now = self._head.plan["head"]["argv"], int(time.time())
        samples = {"api-ttft": (firsts, "s"), "api-tg": (speeds, "t/s")}
        filled = []
        for cell in cells:
            figures, unit = samples[re.sub("[0-9]+$", "", cell["test"])]
            if all(map(results.is_speed, figures)):
                filled.append({**cell, "measured": results.measured_of(figures, unit), "argv": argv, "time": now})
            else:
                filled.append(
                    {**cell, "skipped": "no time passed between the first and the last token: ask for more tokens"}
                )
        return filled

    def _run_all(self, matrix: Matrix) -> None:
        """Measures in place of the server, which serves again afterwards, whatever happened."""
        loads = [load for load in matrix.loads if not load.obstacle and self._cells(load.keys)]
        if not loads:
            return
        self._head.keep_lease()
        self._fetch(loads)
        try:
            self._head.call("begun", plan=self._head.plan, runner=Path(runner.__file__).read_text())
            for load in loads:
                self._run_load(load, matrix.request)
        finally:
            self._end()

    def _fetch(self, loads: list[Load]) -> None:
        """Gets models that are not on the head yet there, while the server still serves.

        :raises AnsibleActionFail: one of them could not be fetched.
        """
        wanted = {load.plan["model"]["path"]: load.plan["model"] for load in loads if load.plan["model"]["fetched_by"]}
        for path, model in wanted.items():
            arguments = {
                "state": "fetched",
                **{key: model[key] for key in ("files", "records", "fetched_by")},
                "folder": str(PurePosixPath(model["records"][0]["path"]).parent.parent),
                **({"token_file": self._token_file} if self._token_file else {}),
            }
            result = self._head.fetch(arguments)
            if result.get("failed"):
                raise AnsibleActionFail(f"{PurePosixPath(path).name} cannot be fetched: {copying.why(result)}")

    def _end(self) -> None:
        try:
            self._head.call("ended", plan=self._head.plan)
        except AnsibleActionFail as failure:
            raise AnsibleActionFail(
                f"{str(failure).rstrip('.')}. A guard on {self._head.name} starts the server {SILENCE_SECONDS} s after the last look at the program, "
                "and the next run of this playbook does it at once."
            ) from None

    def _run_load(self, load: Load, request: benchmark.Request) -> None:
        argv = benchmark.argv_of(load.plan, load.setup, request.repetitions)
        missing = [(cell["test"], cell["depth"]) for cell in self._cells(load.keys)]
        for words in benchmark.arguments_of_tests(argv, missing):
            own = self._head.own
            log = f"{own['state']}/{names.BENCHMARKS}/{self._record['id']}/{time.time():.0f}-{len(self._cells(load.keys))}.log"
            how = benchmark.Measuring(
                f"{own['prefix']}/{names.BENCHMARKS}/{RUNNER}", log, load.setup.link, request.timeout
            )
            service = benchmark.service_of(load.plan, words, how)
            self._head.keep_lease()
            definition = definitions.definition(
                typed_json.parse(HostPlan, own), typed_json.parse(ServicePlan, service), request.timeout
            )
            self._head.call("run", plan=self._head.plan, definition=definition)
            self._follow(load, words, log, request.timeout)

    def _follow(self, load: Load, argv: list[str], log: str, timeout: int) -> None:
        """Looks at the program until it has ended or its seconds are over, and takes what it has measured. systemd ends it then by itself, supervisor
        does not."""
        began = shown = time.monotonic()
        while True:
            answer = self._head.look(log)
            seen = results.read(str(answer.get("lines") or ""))
            cells = [results.fill(cell, seen, argv, log) for cell in self._cells(load.keys)]
            self._put([cell for cell in cells if cell])
            if answer["serves"]:
                raise AnsibleActionFail(
                    f"the server of {self._head.name} was started while {Path(argv[0]).name} measured: nobody could look at the program for "
                    f"{SILENCE_SECONDS} s, the host restarted, or another run started it. Run this playbook again, which goes on with what is missing."
                )
            if not answer["runs"] or time.monotonic() - began >= timeout:
                break
            if time.monotonic() - shown >= SHOW_SECONDS:
                shown = time.monotonic()
                doing = "measures" if seen.load_s is not None else "loads"
                display.display(f"  [{self._head.name}] {load.keys[0]}: {doing}, {shown - began:.0f} s")
        lasted = time.monotonic() - began
        self._head.call("stopped", plan=self._head.plan)
        why = results.failure_of(seen, argv)
        why += f" (llama_benchmark_timeout is {timeout}, seconds)" if lasted >= timeout else ""
        cells = self._record["cells"]
        self._record["cells"] = [results.with_memory(cell, seen) if cell["log"] == log else cell for cell in cells]
        failed = [cell for cell in self._cells(load.keys) if _is_of(argv, cell)]
        self._put([{**cell, "skipped": why, "argv": argv, "log": log} for cell in failed])


def _is_of(argv: list[str], cell: dict) -> bool:
    """Whether a command line was to measure a cell."""
    if argv[0].endswith(benchmark.SWEEP):
        return True
    given = dict(zip(argv, [*argv[1:], ""]))
    numbers = given["-p" if cell["test"].startswith("pp") else "-n"].split(",")
    return cell["test"][2:] in numbers and str(cell["depth"]) in given["-d"].split(",")


class Head:
    """The module on the head."""

    def __init__(self, action: ActionModule, plan: dict, task_vars: dict) -> None:
        self._action, self._task_vars, self._run = action, task_vars, os.getppid()
        self._away = False
        self.name = plan["head"]["host"]
        part = plan["hosts"][self.name]
        self.own = part
        kept = {"head": plan["head"], "cluster": plan["cluster"]}
        self.plan = {**kept, "hosts": {self.name: {key: value for key, value in part.items() if key != "files"}}}

    def check_run(self) -> None:
        """This process is another one than the run's, and outlives it where that is killed.

        :raises AnsibleActionFail: the run has ended.
        """
        if os.getppid() != self._run:
            raise AnsibleActionFail("the run of the playbook was ended; what is missing is measured by the next one")

    def fetch(self, arguments: dict) -> dict:
        """What the module of models returns."""
        return copying.run(self._action, self._task_vars, "llamacpp.cluster.model", arguments)

    def call(self, state: str, may_fail: bool = False, **arguments: Any) -> dict:
        """
        :raises AnsibleActionFail: with what the module says, or why the head cannot be reached.
        :raises Refusal: it says something else than FORMS.
        """
        answer = self._answer({"state": state, **arguments})
        if answer.get("failed") and not may_fail:
            raise AnsibleActionFail(f"{state}: {copying.why(answer)}")
        form = {} if answer.get("failed") else FORMS.get(state, {})
        found = {name: answer.get(name) for name in form}
        return {**answer, **validation.reported(self.name, "the benchmark", found, form)}

    def _answer(self, arguments: dict) -> Any:
        """What the module returns. A head that cannot be reached is asked again: nothing is wrong with asking twice for a state."""
        for left in reversed(range(1 if self._away else MOST_MISSED)):
            try:
                answer = self._action._execute_module(module_args=arguments, task_vars=self._task_vars)
                self._away = False
                return answer
            except AnsibleConnectionFailure as failure:
                if not left:
                    self._away = True
                    raise AnsibleActionFail(f"{self.name} cannot be reached any more: {failure}") from None
                time.sleep(POLL_SECONDS)

    def keep_lease(self) -> None:
        """:raises AnsibleActionFail: another run has taken over the cluster."""
        arguments = {"prefix": self.own["prefix"], "state": "renewed"}
        answer = copying.run(self._action, self._task_vars, "llamacpp.cluster.lease", arguments)
        if answer.get("failed"):
            raise AnsibleActionFail(copying.why(answer))

    def look(self, log: str) -> dict:
        """What the program has written, whether it runs, and whether the server does; a look that fails is repeated."""
        for _missed in range(MOST_MISSED):
            self.check_run()
            answer = self.call("looked", may_fail=True, plan=self.plan, log=log, seconds=POLL_SECONDS)
            if not answer.get("failed"):
                return answer
            time.sleep(POLL_SECONDS)
        raise AnsibleActionFail(f"looked: {copying.why(answer)}")


def _fork(plan: dict) -> str:
    return plan["release"].get("fork", options.MAINLINE)


def _merged(cell: dict, before: dict | None) -> dict:
    """A cell of the matrix with what an earlier run measured."""
    if not before or not (before["measured"] or (before["skipped"] and before["time"] is None and before["argv"])):
        return cell
    return {**cell, **{key: before[key] for key in results.KEPT}}


def _vocabulary(model: ModelRequest, found: dict) -> int:
    summary = model_source.summary_of(model, model_source.report_of(found))
    return summary.vocabulary if summary else 0


def _described(model: ModelRequest, found: dict, path: str) -> dict:
    summary = model_source.summary_of(model, model_source.report_of(found))
    return {
        "path": path,
        "architecture": summary.architecture if summary else "",
        "layers": summary.layers if summary else 0,
        "bytes": sum(summary.layer_bytes) + summary.input_bytes + summary.output_bytes if summary else 0,
        "parameters": summary.parameters if summary else None,
    }


def _link(served: dict, host: str) -> str | None:
    link = next((link for link in served["estimate"]["links"] if link["host"] == host), None)
    if not link:
        return None
    figures = f", {2 * link['one_way_ms']:g} ms, {1000 * link['gbit_per_s']:g} Mbit/s" if link["measured"] else ""
    return link["kind"] + figures


def write(folder: str, record: dict) -> None:
    """Writes the three forms of a record into a folder of the controller, which is made."""
    place = Path(folder).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AnsibleActionFail(
            f"llama_benchmark_path is {folder!r}, which cannot be made on the controller: {error.strerror}. Use a folder that is writable."
        ) from None
    texts = {
        "json": json.dumps(record, indent=1) + "\n",
        "csv": benchmark_tables.as_csv(record),
        "md": benchmark_tables.as_markdown(record),
    }
    for ending, text in texts.items():
        output.write("llama_benchmark_path", str(place / f"benchmark.{ending}"), text)

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits for the server, judges the cluster, and shows the result."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift.serving_record import Load
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes, rollback_report
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import loading, verification
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, Lease
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import build_registry

display = Display()

SECONDS_FOR_WORKERS = 45
"""How long a worker whose process runs may stay without an answer to the head."""
LOOKUP_SECONDS = 10.0
FIRST_WAIT = 5.0
LINE_SECONDS = 10.0
"""Between two lines of what is waited for. Who waits for less sees none."""


class ActionModule(Action):
    def perform(self, arguments: dict) -> dict:
        written = {name: arguments.pop(name, None) for name in ("path", "page", "benchmark")}
        staged = arguments.pop("staged", None)
        obstacles = arguments.pop("obstacles", None)
        answers = arguments.pop("answers", {})
        changed = arguments.pop("changed", [])
        if obstacles is not None:
            staged = {"reasons": obstacles, **(staged or {})}
        plan = arguments["plan"]
        if arguments.pop("gate", False):
            return self._gate(plan)
        planned = typed_json.parse(Plan, plan)
        answers = changes.check(planned.hosts, answers)
        drifts = {name: (answers.get(name) or {}).get("drift") or None for name in plan["hosts"]}
        answered = {name: drift for name, drift in drifts.items() if drift}
        unlike = changes.unlike(planned, answered, build_registry.recorded(planned))
        patience = plan["head"]["start_timeout"] if verification.may_become_healthy(plan, drifts) else 0
        exposed = [] if plan["staging"] else _exposed(plan, self.variables["hostvars"])
        with ThreadPoolExecutor(max(1, len(exposed))) as threads:
            knocking = threads.map(verification.knock, exposed)
            answer = self._collect(arguments, plan, patience)
            knocks = dict(zip(exposed, knocking))
        if "evidence" not in answer:
            return answer
        head = planned.head.host
        reported = {head: {"drift": answer["evidence"].get("drift")}}
        again = changes.check({head: planned.hosts[head]}, reported)[head]["drift"]
        drifts[head] = again or drifts[head]
        found = {
            name: drift and {**drift, "unlike": list(unlike.get(name, {}).values())} for name, drift in drifts.items()
        }
        other = None if plan["staging"] else rollback_report.other_plan(planned, drifts)
        if other:
            display.warning(other)
        judged = verification.judge(plan, found, answer["evidence"], knocks, staged, changed)
        if plan["staging"]:
            return {"changed": False, "report": judged}
        self._record(arguments, judged)
        _write(plan, judged, **written)
        display.display(plan_text.checks_table(judged["checks"]) + "\n")
        failed = [check for check in judged["checks"] if check["status"] == "failed"]
        if not failed:
            display.display(
                "\n".join(["  It answers now. Ask it:", *plan_text.request_lines(typed_json.parse(Plan, plan)), ""])
            )
            return {"changed": False, "report": judged, "evidence": answer["evidence"]}
        message = "The cluster does not do what was planned. " + " ".join(
            f"{check['name']} of {check['subject']}: {check['evidence']}." for check in failed
        )
        if answer["evidence"].get("waits_for"):
            message += f" {verification.remedy(plan, answer['evidence']['waits_for'])}"
        elif not answer["evidence"]["health"]["healthy"]:
            message += " The log of the server ends in:\n" + "\n".join(answer["evidence"]["log"])
        return {"failed": True, "msg": message, "failing": sorted({check["name"] for check in failed})}

    def _gate(self, plan: dict) -> dict:
        """Waits for the server and asks it one real question."""
        answer = self._collect({"plan": plan}, plan, plan["head"]["start_timeout"])
        if "evidence" not in answer:
            return answer
        wrong = verification.gate(plan, answer["evidence"])
        return {"failed": True, "msg": wrong} if wrong else {"changed": False}

    def _record(self, arguments: dict, judged: dict) -> None:
        """Leaves the result on the head. A head that cannot be written on is no reason to hide it here."""
        if self.check_mode:
            return
        plan, head = arguments["plan"], arguments["plan"]["head"]["host"]
        place = {"head": {"host": head}, "hosts": {head: {"prefix": plan["hosts"][head]["prefix"]}}}
        record = {"plan": place, "record": verification.recorded(plan, judged)}
        answer = self.module(record)
        if answer.get("failed"):
            reason = validation.printable(answer.get("msg"))
            display.warning(
                f"status.yml cannot show this verification, since it could not be recorded on the head: {reason}"
            )

    def _collect(self, arguments: dict, plan: dict, patience: float) -> dict:
        started = time.monotonic()
        before: int | None = None
        wait, said = FIRST_WAIT, 0.0
        loads = _Loads(plan)
        lease = Lease(self, plan["hosts"][plan["head"]["host"]]["prefix"])
        while True:
            answer = self.module({**arguments, "wait": wait})
            if not answer.get("failed"):
                evidence = verification.check_evidence(plan["head"]["host"], answer.get("evidence"))
                answer = {**answer, "evidence": evidence}
            if answer.get("failed") or answer["evidence"]["health"]["healthy"]:
                return answer
            before = answer["evidence"]["ends"]["number"] if before is None else before
            elapsed = time.monotonic() - started
            waits_for = answer["evidence"].get("waits_for")
            if plan["staging"] and not answer["evidence"]["launched"]:
                return answer
            limit = (
                min(patience, SECONDS_FOR_WORKERS + (plan["head"]["fallback_after"] or 0)) if waits_for else patience
            )
            loads.see(answer["evidence"])
            lease.renew_in_time()
            hopeless = answer["evidence"]["health"]["said"] == reading.OTHER_CERTIFICATE
            if hopeless or verification.ends_at_each_start(answer["evidence"], before):
                return answer
            if elapsed >= limit:
                if limit and not waits_for and answer["evidence"]["health"]["said"] == verification.LOADING:
                    verification.came_late(answer["evidence"], limit, loads.progress)
                return answer
            if elapsed - said >= LINE_SECONDS:
                said = elapsed - elapsed % LINE_SECONDS
                state = "; ".join(waits_for or [answer["evidence"]["health"]["said"], *loads.words()])
                display.display(f"  [{plan['head']['host']}] llama-server: {state}, {elapsed:.0f} s")
                loads.shown()
            wait = max(FIRST_WAIT, LINE_SECONDS - (time.monotonic() - started - said))


class _Loads:
    """What was seen of a load: the rate that is shown is counted from one line to the next."""

    def __init__(self, plan: dict) -> None:
        """:param plan: whole, or what a rollback has of it, without a placement."""
        self.expected = loading.expected_of(typed_json.parse(Plan, plan) if plan.get("placement") else None)
        self.load: Load | None = None
        self.last: Load | None = None

    def see(self, evidence: dict) -> None:
        load = evidence.get("load")
        self.load = typed_json.parse(Load, load) if load else None

    def shown(self) -> None:
        self.last = self.load

    @property
    def progress(self) -> loading.Progress | None:
        return loading.progress_of(self.load, self.expected, self.last) if self.load else None

    def words(self) -> list[str]:
        progress = self.progress
        return [loading.sentence(progress)] if progress else []


def _write(plan: dict, judged: dict, path: str | None, page: str | None, benchmark: dict | None) -> None:
    """Writes the files of the controller that were asked for."""
    if path:
        output.write("llama_verify_path", path, json.dumps(judged, indent=2) + "\n")
    if page:
        output.write_report(page, typed_json.parse(Plan, plan), judged, benchmark)


def _exposed(plan: dict, variables: Mapping[str, Mapping]) -> list[str]:
    """Endpoints of workers at addresses at which the controller reaches their hosts. Each name is looked up once, all at the same time."""
    named = {name: variables[name].get("ansible_host", name) for name, host in plan["hosts"].items() if host["workers"]}
    distinct = set(named.values())
    with ThreadPoolExecutor(max(1, len(distinct))) as threads:
        known = dict(zip(distinct, threads.map(_addresses, distinct)))
    return [
        worker["endpoint"]
        for name, given in named.items()
        for worker in plan["hosts"][name]["workers"]
        if worker["endpoint"].split(":")[0] in known[given]
    ]


def _addresses(host: str) -> set[str]:
    """The IPv4 addresses at which the controller reaches a host; a number is one itself."""
    try:
        found = reading.within(LOOKUP_SECONDS, lambda: socket.getaddrinfo(host, None, socket.AF_INET))
    except reading.TooSlowError:
        display.warning(
            f"The controller did not find the address of {validation.printable(host)} within {LOOKUP_SECONDS:g} s, so it does not try the ports of "
            "workers there: check its name server, or set ansible_host to an address"
        )
        return set()
    except (OSError, UnicodeError):
        return set()
    return {str(entry[4][0]) for entry in found}

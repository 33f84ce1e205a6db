# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits for the server, judges the cluster, and shows the result."""

import json
import os
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.action import cluster_lock
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import port_probes
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes, rollback
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import judge, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.evidence import ABSENCE_TIMEOUT_SECONDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.waiting import ServerWait
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text

display = Display()

STATUS_MARKS = {"passed": "ok", "failed": "FAILED", "not tested": "not tested"}
PROBE_TIMEOUT_SECONDS = 1.0
UNREACHABLE = ""
FALLBACK_POLL_SECONDS = 10


class ActionModule(Action):
    ARGUMENTS = types.VerifyArguments

    def perform(self, arguments: types.VerifyArguments) -> dict:
        self._arguments = arguments
        self._benchmark = typed_json.parse(Benchmark, arguments.benchmark) if arguments.benchmark else None
        subject = typed_json.parse(types.Subject, arguments.plan)
        if arguments.gate:
            return self._verify_gate(subject)
        plan, result = typed_json.parse(Plan, arguments.plan), None
        deadline = time.monotonic() + arguments.fallback_wait
        while result is None:
            result = self._verify(plan, subject, deadline)
        return result

    def _verify_gate(self, subject: types.Subject) -> dict[str, Any]:
        """Wait for the server and ask it a real question, using the first of several models."""
        model_subject = self._mark_absent(self._find_lost_hosts(), subject).per_model()[0]
        problem = judge.serving_failure(model_subject, self._collect(model_subject, model_subject.head.start_timeout))
        return {"failed": True, "msg": problem} if problem else {"changed": False}

    def _verify(self, plan: Plan, subject: types.Subject, deadline: float) -> dict[str, Any] | None:
        """Return the result; None if the head serves on a fallback, and there is time left to wait for its return.

        :param deadline: time.monotonic() at which to stop waiting.
        """
        answers = changes.parse_answers(plan.hosts, self._arguments.answers)
        drifts = {name: answer.drift for name, answer in answers.items() if answer.drift}
        service_states = {service.state for drift in drifts.values() for service in drift.services.values()}
        timeout_s = plan.head.start_timeout if service_states - {"stopped"} else 0
        absent_hosts = (self._find_lost_hosts() | (plan.hosts.keys() - drifts)) - {plan.head.host}
        used_hosts = {name for name, host in plan.hosts.items() if any(worker.used for worker in host.workers)}
        subject = self._mark_absent(absent_hosts & used_hosts if service_states != {"stopped"} else (), subject)
        hostvars = self.variables["hostvars"]
        addresses = {
            worker.tunnel or worker.endpoint: hostvars[name].get("ansible_host", name)
            for name, host in plan.hosts.items()
            for worker in host.workers
        }
        with ThreadPoolExecutor(max(1, len(addresses))) as executor:
            results = executor.map(_probe, addresses.values(), addresses)
            first_model_subject, *other_subjects = subject.per_model()
            evidence = self._collect(first_model_subject, timeout_s)
            other_evidence = [
                self._collect(other_subject, timeout_s) for other_subject in other_subjects if evidence.server
            ]
            probes = {endpoint: source for endpoint, source in zip(addresses, results) if source != UNREACHABLE}
        if evidence.drift:
            changes.check_service_states(plan.head.host, plan.hosts[plan.head.host], evidence.drift)
            drifts[plan.head.host] = evidence.drift
        observations = judge.Observations(
            drifts, probes, self._arguments.changed, other_evidence, self._arguments.lacks_proof
        )
        report = judge.judge(plan, evidence, observations)
        fallback_check = next((check for check in report.failed_checks if check.name == "fallback"), None)
        if fallback_check and time.monotonic() < deadline:
            display.display(f"  [{plan.head.host}] llama-server: {fallback_check.evidence}")
            time.sleep(FALLBACK_POLL_SECONDS)
            return None
        plan_warning = rollback.other_plan_note(
            plan, drifts, lambda name: inventory.changed_variables(self.variables, name, plan.release)
        )
        if plan_warning:
            display.warning(plan_warning)
        is_asleep = all(map(judge.was_asleep, (evidence, *other_evidence)))
        self._write_records(plan, report, [evidence, *other_evidence], is_asleep)
        return self._show(plan, subject, report, evidence, is_asleep)

    def _find_lost_hosts(self) -> set[str]:
        """Return the hosts of this replica that failed or froze in the play before this task."""
        variables = self.variables
        lost_hosts = {*variables.get("ansible_play_hosts_all", ())} - {*variables.get("ansible_play_hosts", ())}
        return lost_hosts.intersection(inventory.replica_of(variables)) if lost_hosts else lost_hosts

    @staticmethod
    def _mark_absent(absent_hosts: Collection[str], subject: types.Subject) -> types.Subject:
        """Show hosts that do not answer, and return the subject with these hosts."""
        if absent_hosts:
            display.display(
                f"  {', '.join(sorted(absent_hosts))} did not answer: the server may be waiting for these hosts, so this run waits at most "
                f"{ABSENCE_TIMEOUT_SECONDS} s for the server"
            )
        return subject._replace(unreachable_hosts=tuple(sorted(absent_hosts)))

    def _collect(self, subject: types.Subject, timeout_s: float) -> types.Evidence:
        """Return the evidence of the head when its server is healthy or further waiting is pointless."""
        subject_json, start_time = typed_json.dump(subject), time.monotonic()
        server_wait = ServerWait(subject, timeout_s)
        may_wake = bool(self._arguments.wake or self._arguments.gate or self._arguments.changed)
        while True:
            answer = self.run_module(plan=subject_json, wake=may_wake)
            if answer.get("failed"):
                raise AnsibleActionFail(validation.printable(answer.get("msg")), result=answer)
            evidence = judge.parse_evidence(subject.head.host, answer.get("evidence"))
            elapsed_seconds = time.monotonic() - start_time
            final_evidence = server_wait.final_evidence_of(evidence, elapsed_seconds)
            if final_evidence:
                return final_evidence
            line = server_wait.progress_line(evidence, elapsed_seconds)
            if line:
                display.display(f"  {line}")

    def _write_records(self, plan: Plan, report: types.Report, evidence: list[types.Evidence], is_asleep: bool) -> None:
        if self.check_mode:
            return
        prefix = plan.hosts[plan.head.host].prefix
        self.write_record(prefix, names.VERIFICATION_FILE, judge.outcome_of(plan, report, is_asleep))
        readings = judge.readings_of(evidence) if report.passed else ()
        if readings:
            self.write_record(prefix, names.READINGS_FILE, types.ReadingRecord(readings))

    def _show(
        self, plan: Plan, subject: types.Subject, report: types.Report, evidence: types.Evidence, is_asleep: bool
    ) -> dict[str, Any]:
        """Show the result, write the requested files, and return the result of the task."""
        path, report_path = self._arguments.path, self._arguments.report
        if path:
            output.write("llama_verify_path", path, json.dumps(typed_json.dump(report), indent=2) + "\n")
        if report_path:
            output.write_report(report_path, plan, report, self._benchmark)
        rows = [[STATUS_MARKS[check.status], check.name, check.subject, check.evidence] for check in report.checks]
        display.display(tables.format_table(rows) + "\n")
        if not report.passed:
            text = "Verification failed: " + " ".join(f"{check.sentence()}." for check in report.failed_checks)
            if not evidence.server:
                text = f"{text} {judge.advice(subject, evidence)}".rstrip()
            holder, this_run = evidence.lock, cluster_lock.run_identity(os.getppid(), [])
            if holder and not holder.is_same_run(this_run) and not cluster_lock.has_ended(holder):
                text += f" Another run may be changing this cluster: {holder.describe()}."
            return {"failed": True, "msg": text, "failing": sorted({check.name for check in report.failed_checks})}
        if is_asleep:
            display.display(f"  The server's answers were not tested: {judge.ASLEEP_NOTE}.\n")
        else:
            server = evidence.server
            lines = plan_text.request_lines(plan, server.certificate_names if server else ())
            lines += plan_text.chat_page_lines(plan, bool(server and server.page))
            display.display("\n".join([f"  The server answers. Try it on {plan.head.host}:", *lines, ""]))
        return {"changed": False, "report": typed_json.dump(report)}


def _probe(host_address: str, endpoint: str) -> str | None:
    """Connect without sending anything. Return the controller's address on success, None if the port is closed, and UNREACHABLE if the host may be
    unreachable.

    :param host_address: address at which the controller reaches the host. At another address, a refused connection would prove nothing.
    """
    address = endpoint.rsplit(":", 1)[0]
    try:
        if address not in [entry[4][0] for entry in socket.getaddrinfo(host_address, None, socket.AF_INET)]:
            return UNREACHABLE
    except (OSError, UnicodeError):
        return UNREACHABLE
    probes = port_probes.probe_endpoints([endpoint], [names.ANY_ADDRESS], PROBE_TIMEOUT_SECONDS)
    return (probes[0].source if probes[0].open else None) if probes else UNREACHABLE

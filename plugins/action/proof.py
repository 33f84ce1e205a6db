# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Proves each model on the head with some of its layers, and shows the verdicts."""

import itertools
import shlex
from typing import Annotated, NamedTuple

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.service_managers import MANAGERS
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import proof_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services as planned_services
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, ProofWork
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, BackgroundJob, failure_reason

display = Display()

POLL_SECONDS = 2.0
BASE_LIMIT_SECONDS, LIMIT_FACTOR = 600, 10
"""Time limit of a proof: a number of seconds, plus a multiple of the predicted time."""
REPORT_GRACE_SECONDS = 60
"""Seconds for the head to report that it stopped a proof at its time limit. A head that reports nothing may have been restarted."""
PROVE_NEVER, PROVE_SEARCH = "never", "search"
REFERENCE_STAGE, DEVICES_STAGE = "reference", "devices"
SEARCH_HINT = " -e llama_proof=search retries the failed device with other settings of flash attention, KV cache types or micro-batch size."
FAILURE_REMEDY = (
    "Run the playbook again if a host or the network was down. Otherwise change llama_backend or llama_release, or remove the device. To serve without a "
    "proof, use -e llama_proof=never"
)


class ProofArguments(NamedTuple):
    plan: Plan
    prove: Annotated[str, ("once", "always", PROVE_NEVER, PROVE_SEARCH)] = "once"
    stage: Annotated[str, (REFERENCE_STAGE, DEVICES_STAGE)] = DEVICES_STAGE


class ActionModule(Action):
    ARGUMENTS = ProofArguments

    def perform(self, arguments: ProofArguments) -> dict:
        plan, proofs, failures = arguments.plan, [], []
        labels = [f"{model.name}: " for model in plan.head.models or ()] or [""]
        for label, single_model_plan in (
            zip(labels, plan.per_model()) if arguments.prove != PROVE_NEVER and not self.check_mode else ()
        ):
            work = proof_plan.proof_work(single_model_plan)
            if work:
                work = work if arguments.prove == PROVE_SEARCH else work._replace(remedies=())
                proofs.append(self._prove(single_model_plan, work, arguments))
                failures += [f"{label}{sentence}" for sentence in proofs[-1].failures()]
        hint = "" if arguments.prove == PROVE_SEARCH else SEARCH_HINT
        crashed_workers = {verdict.name for proof in proofs for verdict in proof.devices if verdict.failure}
        worker_logs = [
            (
                name,
                MANAGERS[host.service_manager].log.format(
                    prefix=host.prefix, service=names.service_name(f"worker-{worker.name}")
                ),
            )
            for name, host in plan.hosts.items()
            for worker in host.workers
            if f"{name} {worker.name}" in crashed_workers
        ]
        log_note = f". Worker logs: {', '.join(log for _name, log in worker_logs)}" if worker_logs else ""
        return {
            "changed": False,
            "proofs": [typed_json.dump(proof) for proof in proofs],
            "failure_text": "; ".join(failures),
            "remedy": f"The model was not loaded.{hint} {FAILURE_REMEDY}{log_note}",
            "crashed_workers": [{"host": name, "command": _log_command(log)} for name, log in worker_logs],
        }

    def _show(self, text: str) -> None:
        display.display(f"  [{self.host}] proof: {text}")

    def _definition(self, plan: Plan, work: ProofWork, limit_seconds: int) -> str:
        """Return the definition of the launcher's service, with the sandbox of the head's service."""
        host = plan.hosts[plan.head.host]
        head_service = next(service for service in host.services if service.kind == "head")
        name, description = names.service_name("proof"), f"proof of cluster {plan.cluster}"
        service = planned_services.temporary_service(head_service, name, description, work.launcher)
        return definitions.definition(host, service, limit_seconds)

    def _prove(self, plan: Plan, work: ProofWork, arguments: ProofArguments) -> Proof:
        prediction, host = plan.head.proof, arguments.plan.hosts[plan.head.host]
        max_run_count = 1 + len(work.remedies) * len(work.devices)
        predicted_seconds = (prediction.outage_s + prediction.seconds if prediction else 0) * max_run_count
        remedy = "The host may have been restarted: run the playbook again."
        limit_seconds = BASE_LIMIT_SECONDS + LIMIT_FACTOR * predicted_seconds
        job = BackgroundJob("proof", limit_seconds, REPORT_GRACE_SECONDS, itertools.repeat(POLL_SECONDS), str, remedy)
        if arguments.stage == REFERENCE_STAGE and prediction:
            self._show(
                f"unless these devices passed an earlier proof, the head's processor computes {len(work.layers)} of {plan.model.layers} layers of "
                f"{plan.model.name} for about {prediction.seconds} s. Then the server stops while the devices compute the same layers (about "
                f"{prediction.outage_s} s) and the model is loaded again"
            )
        answer = self.run_in_background(
            job,
            work=typed_json.dump(work),
            prove=arguments.prove,
            stage=arguments.stage,
            host=typed_json.dump(installation.planned_paths(host)),
            definition=self._definition(arguments.plan, work, limit_seconds),
        )
        if answer.get("failed"):
            raise AnsibleActionFail(f"the proof on {self.host} did not complete: {failure_reason(answer)}")
        proof = typed_json.parse_report(self.host, "the proof", Proof, answer.get("proof"))
        if arguments.stage == REFERENCE_STAGE:
            return Proof(0)
        if answer.get("record_error"):
            display.warning(
                f"{self.host} could not record the verdicts, so the next run repeats the proof: {validation.printable(answer['record_error'])}"
            )
        if proof.untested:
            display.warning(f"the devices for {plan.model.name} were not tested: {proof.untested}")
        elif not proof.failures():
            duration_note = f", {proof.seconds} s" if answer.get("remaining") else ", according to an earlier run"
            self._show(f"{'; '.join(verdict.sentence() for verdict in proof.devices)}{duration_note}")
        return proof


def _log_command(log: str) -> str:
    """Return the command that shows the lines of a log with the reason for a crash."""
    pattern = shlex.quote(run.REASON_LINE_PATTERN)
    return f"grep -aiE {pattern} {shlex.quote(log)}" if log.startswith("/") else f"{log} --since=-1h --grep={pattern}"

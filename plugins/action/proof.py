# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Has the head prove each model with its first layers, and shows what was found."""

from __future__ import annotations

import itertools
import shlex
from typing import Annotated, NamedTuple

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.service_managers import MANAGERS
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import first_layers
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, Work
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, BackgroundJob, failure_reason

display = Display()

POLL_SECONDS = 2.0
LIMIT_SECONDS = 4 * 3600
NEVER, SEARCH = "never", "search"
LOOK = " -e llama_proof=search tries other flash attention, cache types and a smaller micro-batch on it."
FIX = (
    "Run it again where its machine or network was away, else set what makes it right, another llama_backend or llama_release, or leave that device out; "
    "-e llama_proof=never serves without a proof"
)


class Arguments(NamedTuple):
    plan: Plan
    prove: Annotated[str, ("once", "always", NEVER, SEARCH)] = "once"


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        plan, proofs, wrong = arguments.plan, [], []
        prefix = plan.hosts[plan.head.host].prefix
        names_of = [f"{model.name}: " for model in plan.head.models or ()] or [""]
        for name, one in zip(names_of, plan.per_model()) if arguments.prove != NEVER and not self.check_mode else ():
            asked = first_layers.work_of(one)
            if asked:
                asked = asked if arguments.prove == SEARCH else asked._replace(remedies=())
                proofs.append(self._prove(one, asked, prefix, arguments.prove))
                wrong += [f"{name}{sentence}" for sentence in proofs[-1].wrong()]
        look = "" if arguments.prove == SEARCH else LOOK
        ended = {one.name for proof in proofs for one in proof.devices if one.ended}
        chain = not ended and any(proof.together and proof.together.ended for proof in proofs)
        logs = [
            (name, _log_of(host, names.service(f"worker-{worker.name}")))
            for name, host in plan.hosts.items()
            for worker in host.workers
            if chain or f"{name} {worker.name}" in ended
        ]
        where = f". Logs of the workers: {', '.join(log for _name, log in logs)}" if logs else ""
        return {
            "changed": False,
            "proofs": [typed_json.dump(proof) for proof in proofs],
            "wrong": "; ".join(wrong),
            "fix": f"The model was not loaded.{look} {FIX}{where}",
            "ended": [{"host": name, "command": _telling(log)} for name, log in logs],
        }

    def _show(self, text: str) -> None:
        display.display(f"  [{self.host}] first layers: {text}")

    def _prove(self, plan: Plan, asked: Work, prefix: str, prove: str) -> Proof:
        first, name = plan.head.first_layers, plan.model.name
        if first:
            self._show(
                f"the first {first.layers} of {plan.model.layers} layers of {name} are computed on the planned devices, about {first.seconds} s"
            )
        lost = "It may go on there: run the playbook again, which waits for it."
        job = BackgroundJob("proof", LIMIT_SECONDS, LIMIT_SECONDS, itertools.repeat(POLL_SECONDS), str, lost)
        answer = self.background(job, work=typed_json.dump(asked), prove=prove, prefix=prefix)
        if answer.get("failed"):
            raise AnsibleActionFail(f"proof on {self.host}: {failure_reason(answer)}")
        proof = typed_json.reported(self.host, "the proof", Proof, answer.get("proof"))
        if proof.untested:
            display.warning(f"{name} is not proven on its devices: {proof.untested}")
        elif proof.right:
            known = f", {proof.seconds} s" if not answer.get("known") else ", by an earlier run"
            self._show(f"{'; '.join(one.sentence() for one in (proof.together, *proof.devices) if one)}{known}")
        return proof


def _log_of(host: HostPlan, service: str) -> str:
    """Its path, or the command that shows it."""
    return MANAGERS[host.service_manager].log.format(prefix=host.prefix, service=service)


def _telling(log: str) -> str:
    """The command that shows what of a log tells why its program ended."""
    words = shlex.quote(run.TELLING)
    return f"grep -aiE {words} {shlex.quote(log)}" if log.startswith("/") else f"{log} --since=-1h --grep={words}"

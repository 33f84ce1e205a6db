# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fills the caches of a host's workers in steps of ten seconds, and shows after each what is left. A cache that cannot be filled is no error."""

from __future__ import annotations

import os
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, units
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import prefill
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class Arguments(NamedTuple):
    plan: Plan
    tensors: tuple[prefill.Tensor, ...]
    local: bool = True


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        done = {path: self._fill(arguments, path) for path in prefill.paths(arguments.plan)}
        missing = {path: answer.missing for path, answer in done.items()}
        return {
            "changed": any(answer.changed for answer in done.values()),
            "missing": missing,
            "lacking": len({worker for own in missing.values() for worker, names in own.items() if names}),
            "why": [
                *(sentence for answer in done.values() for sentence in answer.why),
                *(
                    f"The cache of the worker {worker} lacks {len(names)} of its large tensors of {os.path.basename(path)}."
                    for path, workers in missing.items()
                    for worker, names in workers.items()
                    if names
                ),
            ],
        }

    def _fill(self, arguments: Arguments, path: str) -> prefill.Answer:
        """The last answer of a host about the tensors of one model."""
        plan, host = arguments.plan, self.host
        tensors = typed_json.dump(tuple(tensor for tensor in arguments.tensors if tensor.path == path))
        workers = [
            {
                **typed_json.dump({key: getattr(worker, key) for key in ("name", "environment", "seed")}),
                "names": list(names),
            }
            for worker in plan.hosts[host].workers
            if (names := prefill.names_of(plan, worker, path))
        ]
        changed, copied, before = False, 0, rpc_upload.MOST_BYTES
        progress = prefill.Progress(host, "from its own copy of the model")
        while True:
            answer = prefill.ask(self, plan, host, path, workers=workers, tensors=tensors, local=arguments.local)
            changed |= answer.changed
            copied += answer.copied_mib
            if not answer.left_mib or answer.why or not answer.changed or answer.left_mib >= before:
                break
            before = answer.left_mib
            progress.show(copied, before)
        if copied or answer.linked_mib:
            got = units.amount((copied + answer.linked_mib) * MIB)
            prefill.say(host, f"its workers' caches got {got} from the host itself")
        for sentence in answer.why:
            prefill.say(host, sentence)
        return answer._replace(changed=changed)

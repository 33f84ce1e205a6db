# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fills the caches of a host's workers in steps of ten seconds, and shows after each what is left. A cache that cannot be filled is no error."""

from __future__ import annotations

from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, units
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.cache_prefill import Tensor
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import prefill
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class Arguments(NamedTuple):
    plan: Plan
    tensors: tuple[Tensor, ...]
    local: bool = True


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        plan, host = arguments.plan, self.host
        workers = [
            {
                **typed_json.dump({key: getattr(worker, key) for key in ("name", "environment", "seed")}),
                "names": list(names),
            }
            for worker in plan.hosts[host].workers
            if worker.seed and (names := cache_prefill.names_of(worker.seed.tensors))
        ]
        changed, copied, before = False, 0, rpc_upload.MOST_BYTES
        progress = prefill.Progress(host, "from its own copy of the model")
        while True:
            answer = prefill.ask(
                self, plan, host, workers=workers, tensors=typed_json.dump(arguments.tensors), local=arguments.local
            )
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
        missing = answer.missing
        return {"changed": changed, "missing": missing, "lacking": sum(map(bool, missing.values())), "why": answer.why}

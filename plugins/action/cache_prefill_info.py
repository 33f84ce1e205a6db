# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads on the head which tensors the workers of a plan cache."""

from __future__ import annotations

from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import prefill
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class Arguments(NamedTuple):
    plan: Plan


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        plan = arguments.plan
        tensors: list[prefill.Tensor] = []
        why: list[str] = []
        for path in prefill.paths(plan):
            names = {
                name: size
                for host in plan.hosts.values()
                for worker in host.workers
                for name, size in prefill.names_of(plan, worker, path).items()
            }
            answer = prefill.ask(self, plan, plan.head.host, path, names=names)
            tensors += [prefill.Tensor(path, *(tensor[key] for key in prefill.TENSOR)) for tensor in answer.tensors]
            why += answer.why
        return {"changed": False, "tensors": typed_json.dump(tuple(tensors)), "why": why}

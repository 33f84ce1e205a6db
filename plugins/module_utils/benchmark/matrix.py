# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a benchmark measures: the variables ``llama_benchmark_…``, the loads of the model that follow from them, and their cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Cell
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster

GENERATED = 128
"""Tokens that are generated."""
CACHE_CELLS = 256
"""llama.cpp makes a cache of a multiple of so many tokens."""


class Request(NamedTuple):
    """The variables ``llama_benchmark_…``."""

    hosts: tuple[int, ...]
    prompts: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def tests(self) -> list[str]:
        """As llama-bench names them."""
        return [*(f"pp{number}" for number in self.prompts), f"tg{GENERATED}"]

    @property
    def context(self) -> int:
        """Tokens of the longest of the tests, as llama-bench makes its cache."""
        return -(-(max(*self.prompts, GENERATED) + max(self.depths)) // CACHE_CELLS) * CACHE_CELLS


def request_of(variables: Mapping[str, Any]) -> Request:
    """:param variables: of the head, with their defaults.
    :raises Refusal: names the variable and its value.
    """
    given = Request(*(tuple(dict.fromkeys(variables[f"llama_benchmark_{name}"])) for name in Request._fields))
    wrong = [number for number in (*given.hosts, *given.prompts) if number < 1]
    wrong += [number for number in given.depths if number < 0]
    if wrong or not given.prompts or not given.depths:
        raise Refusal(
            "llama_benchmark_hosts, llama_benchmark_prompts or llama_benchmark_depths "
            + (f"has {wrong[0]}: use larger numbers" if wrong else "is empty: give at least one number of tokens")
        )
    return given


def hosts_in_order(plan: Plan) -> list[str]:
    """The head, then the hosts that lend devices: those that hold layers in the plan's order, then the others."""
    holding = [plan.head.host, *(entry.host for entry in plan.placement if entry.endpoint)]
    lending = [name for name, host in plan.hosts.items() if host.workers]
    return list(dict.fromkeys([*holding, *lending, *(worker.host for worker in plan.external_workers)]))


def loads_of(request: Request, plan: Plan) -> list[tuple[str, ...]]:
    """The hosts of every load of the model that is measured.

    :param plan: that serves.
    :raises Refusal: there are fewer hosts.
    """
    hosts = hosts_in_order(plan)
    beyond = [number for number in request.hosts if number > len(hosts)]
    if beyond:
        raise Refusal(
            f"llama_benchmark_hosts has {beyond[0]}, but the cluster has {len(hosts)} hosts with devices ({', '.join(hosts)}): use a smaller number"
        )
    return [tuple(hosts[:number]) for number in request.hosts or range(1, len(hosts) + 1)]


def cluster_of(cluster: Cluster, hosts: Sequence[str], request: Request, plan: Plan) -> Cluster:
    """The cluster as it would serve this load: with these hosts alone, all of their devices, a cache for the tests, and the model alone, since
    llama-bench loads neither projector nor draft. Prompts are in the pieces of the plan that serves, which are planned for its context."""
    server, served = cluster.server, None if plan.model.known_answer else plan.estimate.prompt
    if served:
        batch = server.batch or max(served.batch, server.micro_batch or 0)
        server = server._replace(batch=batch, micro_batch=server.micro_batch or min(served.micro_batch, batch))
    server = server._replace(
        backend=server.backend or serving_backend(plan),
        context=request.context,
        parallel=1,
        fallback=False,
        speculation=None,
    )
    model = cluster.model._replace(mmproj=None, draft=None)
    return cluster._replace(model=model, layer_hosts=frozenset(hosts), placement="all", server=server)


def _build_id(plan: Plan) -> str:
    """Of the head's program."""
    return PurePosixPath(plan.head.argv[0]).parts[-3]


def serving_backend(plan: Plan) -> str:
    return next(build.backend for build in plan.hosts[plan.head.host].builds if build.id == _build_id(plan))


def obstacle(planned: Plan | Refused, served: Plan, hosts: Sequence[str]) -> str | None:
    """Why a load cannot be measured; None where it can.

    :param planned: the plan of the load.
    """
    if planned.refused or isinstance(planned, Refused):
        return " ".join(planned.reasons)
    if _build_id(planned) not in [build.id for build in served.hosts[served.head.host].builds]:
        return f"it needs the build {_build_id(planned)}, which the plan that serves does not have"
    holds = {entry.host for entry in planned.placement if entry.layers or entry.output}
    idle = [host for host in hosts[1:] if host not in holds]
    return f"the plan gives no layer to {', '.join(idle)}" if idle else None


def cells_of(hosts: tuple[str, ...], request: Request, planned: Plan | Refused, skipped: str | None) -> list[Cell]:
    """The cells of a load, not measured yet.

    :param skipped: why nothing will be measured.
    """
    plan = None if planned.refused or isinstance(planned, Refused) else planned
    return [
        Cell(hosts, test, depth, _predicted(plan, test) if plan and not depth else None, skipped=skipped)
        for depth in request.depths
        for test in request.tests
    ]


def _predicted(plan: Plan, test: str) -> float | None:
    """Tokens per second by the plan; None of prompts that a pipeline computes, other than the one that is planned for."""
    is_prompt, long = test.startswith("pp"), plan.estimate.prompt
    if long and test == f"pp{long.tokens}":
        return long.tokens_per_s
    if long and long.pipelined and is_prompt and int(test[2:]) > long.micro_batch:
        return None
    return plan.estimate.prompt_tokens_per_s if is_prompt else plan.estimate.generation_tokens_per_s

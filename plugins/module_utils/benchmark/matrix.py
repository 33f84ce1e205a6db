# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Contents of a benchmark: the variables ``llama_benchmark_…``, the loads that they require, and their cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Cell
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster

GENERATED_TOKENS = 128
CACHE_STEP_TOKENS = 256
"""llama.cpp allocates a cache in multiples of this number of tokens."""


class Sweep(NamedTuple):
    """Numbers of hosts, prompt lengths and depths that a benchmark combines: the variables ``llama_benchmark_…``."""

    hosts: tuple[int, ...]
    prompts: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def context(self) -> int:
        """Return the cache size of the longest test in llama-bench, in tokens."""
        return -(-(max(*self.prompts, GENERATED_TOKENS) + max(self.depths)) // CACHE_STEP_TOKENS) * CACHE_STEP_TOKENS


def sweep_of(variables: Mapping[str, Any]) -> Sweep:
    """:param variables: variables of the head, with their defaults.
    :raises Refusal: a number is too small, or one is required.
    """
    sweep = Sweep(*(tuple(dict.fromkeys(variables[f"llama_benchmark_{name}"])) for name in Sweep._fields))
    invalid_numbers = [count for count in (*sweep.hosts, *sweep.prompts) if count < 1]
    invalid_numbers += [count for count in sweep.depths if count < 0]
    if invalid_numbers or not sweep.prompts or not sweep.depths:
        raise Refusal(
            f"llama_benchmark_hosts, llama_benchmark_prompts or llama_benchmark_depths contains {invalid_numbers[0]}: use 1 or more (depths: 0 or more)"
            if invalid_numbers
            else "llama_benchmark_prompts or llama_benchmark_depths is empty: set at least one number of tokens"
        )
    return sweep


def hosts_in_order(plan: Plan) -> list[str]:
    """Return the head, then hosts with layers in the plan's order, then other hosts with workers."""
    layer_hosts = [plan.head.host, *(device.host for device in plan.placement if device.endpoint)]
    worker_hosts = [name for name, host in plan.hosts.items() if host.workers]
    return list(dict.fromkeys([*layer_hosts, *worker_hosts, *(worker.host for worker in plan.external_workers)]))


def loads_of(sweep: Sweep, plan: Plan) -> list[tuple[str, ...]]:
    """Return the hosts for each load of the model.

    :raises Refusal: the cluster has fewer hosts.
    """
    hosts = hosts_in_order(plan)
    excessive_numbers = [count for count in sweep.hosts if count > len(hosts)]
    if excessive_numbers:
        raise Refusal(
            f"llama_benchmark_hosts contains {excessive_numbers[0]}, but the cluster has fewer hosts with devices ({', '.join(hosts)}): use a smaller number"
        )
    return [tuple(hosts[:count]) for count in sweep.hosts or range(1, len(hosts) + 1)]


def cluster_for_load(cluster: Cluster, hosts: Sequence[str], sweep: Sweep, plan: Plan) -> Cluster:
    """Return the cluster for this load: only these hosts with all their devices, a cache for the tests, and only the model, because llama-bench loads
    neither projector nor draft model. Prompts have the batches of the serving plan, which suit its context."""
    server, prompt = cluster.server, None if plan.model.known_answer else plan.estimate.prompt
    if prompt:
        batch = server.batch or max(prompt.batch, server.micro_batch or 0)
        server = server._replace(batch=batch, micro_batch=server.micro_batch or min(prompt.micro_batch, batch))
    server = server._replace(
        backend=server.backend or serving_backend(plan),
        context=sweep.context,
        parallel=1,
        fallback=False,
        speculation=None,
    )
    model = cluster.model._replace(mmproj=None, draft=None)
    return cluster._replace(model=model, layer_hosts=frozenset(hosts), placement="all", server=server)


def _build_id(plan: Plan) -> str:
    return PurePosixPath(plan.head.argv[0]).parts[-3]


def serving_backend(plan: Plan) -> str:
    return next(build.backend for build in plan.hosts[plan.head.host].builds if build.id == _build_id(plan))


def skip_reason(load_plan: Plan | Refused, serving_plan: Plan, hosts: Sequence[str]) -> str | None:
    """Return the reason why a load cannot be measured, or None."""
    if load_plan.refused or isinstance(load_plan, Refused):
        return " ".join(load_plan.reasons)
    if _build_id(load_plan) not in [build.id for build in serving_plan.hosts[serving_plan.head.host].builds]:
        return f"this measurement needs build {_build_id(load_plan)}, which the serving plan does not contain"
    layer_hosts = {device.host for device in load_plan.placement if device.layers or device.output}
    idle_hosts = [host for host in hosts[1:] if host not in layer_hosts]
    return f"the plan for these hosts places no layers on {', '.join(idle_hosts)}" if idle_hosts else None


def cells_of(hosts: tuple[str, ...], sweep: Sweep, load_plan: Plan | Refused, obstacle: str | None) -> list[Cell]:
    """Return the cells of a load before its measurement.

    :param obstacle: reason why nothing will be measured.
    """
    plan = None if load_plan.refused or isinstance(load_plan, Refused) else load_plan
    return [
        Cell(hosts, test, depth, _predicted_speed(plan, test) if plan and not depth else None, skipped=obstacle)
        for depth in sweep.depths
        for test in (*(f"pp{prompt_tokens}" for prompt_tokens in sweep.prompts), f"tg{GENERATED_TOKENS}")
    ]


def _predicted_speed(plan: Plan, test: str) -> float | None:
    """Return the plan's tokens per second; None for pipelined prompts whose length differs from the planned length."""
    is_prompt, prompt = test.startswith("pp"), plan.estimate.prompt
    if prompt and test == f"pp{prompt.tokens}":
        return prompt.tokens_per_s
    if prompt and prompt.pipelined and is_prompt and int(test[2:]) > prompt.micro_batch:
        return None
    return plan.estimate.prompt_tokens_per_s if is_prompt else plan.estimate.generation_tokens_per_s

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan that proves a release on the staging ports, and what keeps it from being carried out."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import HostAnswer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import KnownAnswerPlan, Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, ModelRequest

MODEL = KnownAnswerPlan(2 * capabilities.MAX_BACKENDS, 128, "f32")
ROOM_MIB = 1024
"""What has to be free on a device beyond the known-answer model, for what a backend takes for itself."""


def cluster_of(cluster: Cluster) -> Cluster:
    """The cluster that serves the known-answer model on its head's staging port, with every worker of its own and to itself only.
    Those that others run have no staging ports."""
    server = cluster.server
    return cluster._replace(
        model=ModelRequest(None, MODEL, None),
        placement="all",
        external=(),
        server=server._replace(
            host=LOOPBACK,
            allowed=(),
            port=server.staging_port,
            staging_port=server.port,
            api_key_file=None,
            extra_args=(),
            gpu_layers=None,
            tensor_split=(),
            override_tensor=(),
            environment={name: value for name, value in server.environment.items() if not _is_argument(name)},
            fallback=False,
            speculation=None,
            prompt_cache_mib=0,
            idle_seconds=None,
            batch=kv_cache.BATCH,
            micro_batch=kv_cache.MICRO_BATCH,
        ),
    )


def _is_argument(name: str) -> bool:
    return name.startswith("LLAMA_ARG_") or options.of_variable(name) is not None


def obstacles(plan: Plan | Refused, answers: Mapping[str, HostAnswer]) -> list[str]:
    """Why the instances of a plan for staging cannot be started, a sentence each.

    :param answers: host → what it reported just before, given its part of this plan.
    """
    if isinstance(plan, Refused) or plan.refused:
        return list(plan.reasons)
    silent = [
        f"{name}: {answer.why or 'it could not be reached'}"
        for name, answer in answers.items()
        if answer.why or answer.free_mib is None
    ]
    if silent:
        return silent
    without_release = [
        name
        for name, answer in answers.items()
        if answer.drift
        and (
            answer.drift.missing_builds
            or any(path.startswith(f"{plan.hosts[name].runtime}/") for path in answer.drift.changed_files)
        )
    ]
    if without_release:
        return [f"the planned release is missing on {', '.join(without_release)}: run site.yml"]
    lent = {entry.endpoint: entry.total_mib for entry in plan.placement if entry.endpoint}
    return _shortages(_needed(plan, lent), {name: answer.free_mib or {} for name, answer in answers.items()})


def _needed(plan: Plan, lent: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Host and device → MiB that have to be free there for llama-server and these workers.

    :param lent: endpoint of each of them → MiB of the known-answer model that it holds.
    """
    place = plan.head.host
    own = {entry.device: entry.total_mib for entry in plan.placement if not entry.endpoint}
    needed: dict[tuple[str, str], float] = {(place, "CPU"): ROOM_MIB}
    for device in plan.head.devices:
        needed[place, device] = needed.get((place, device), 0) + own[device] + ROOM_MIB
    for name, host in plan.hosts.items():
        for worker in host.workers:
            if worker.endpoint in lent:
                device = "CPU" if worker.shared else worker.device
                needed[name, device] = needed.get((name, device), 0) + lent[worker.endpoint] + ROOM_MIB
    return needed


def _shortages(needed: Mapping[tuple[str, str], float], free: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Why instances would disturb what serves: a sentence for each device that has too little free memory.

    :param free: host → device → MiB that are free now, of memory.free_mib; the free memory of other devices is unknown.
    """
    return [
        f"{name} has {free[name][device]} MiB free on {device}, but {math.ceil(size)} MiB are needed: try again when more is free"
        for (name, device), size in needed.items()
        if device in free[name] and free[name][device] < size
    ]

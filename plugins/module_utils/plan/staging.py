# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan that proves a release on the staging ports, and what keeps it from being carried out."""

from __future__ import annotations

import math
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Cluster, KnownAnswer, ModelRequest

MODEL = KnownAnswer(2 * capabilities.MAX_BACKENDS, 128, "f32")
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
            fallback=False,
        ),
    )


def obstacles(plan: dict[str, Any], answers: dict[str, dict[str, Any]]) -> list[str]:
    """Why the instances of a plan for staging cannot be started, a sentence each.

    :param answers: host → what host_info returned just before, given its part of this plan: ``drift`` and ``free_mib``, or ``msg`` of an
        error; absent where it did not answer.
    """
    if plan["refused"]:
        return list(plan["reasons"])
    reports = {name: answers.get(name) or {} for name in plan["hosts"]}
    errors = [f"{name}: {host['msg']}" for name, host in reports.items() if "msg" in host]
    silent = [
        f"{name} could not be reached"
        for name, host in reports.items()
        if "msg" not in host and (not host.get("drift") or host.get("free_mib") is None)
    ]
    if errors or silent:
        return errors + silent
    without_release = [
        name
        for name, host in reports.items()
        if host["drift"]["missing_builds"]
        or any(path.startswith(f"{plan['hosts'][name]['runtime']}/") for path in host["drift"]["changed_files"])
    ]
    if without_release:
        return [f"the planned release is missing on {', '.join(without_release)}: run site.yml"]
    return _shortages(plan, {name: host["free_mib"] for name, host in reports.items()})


def _shortages(plan: dict[str, Any], free: dict[str, dict[str, int]]) -> list[str]:
    """Why a planned staging would disturb what serves: a sentence for each device that has too little free memory.

    :param free: host → device → MiB that are free now, of memory.free_mib; the free memory of other devices is unknown.
    """
    reasons = []
    lent = {entry["endpoint"]: entry["total_mib"] for entry in plan["placement"] if entry["endpoint"]}
    own = {entry["device"]: entry["total_mib"] for entry in plan["placement"] if not entry["endpoint"]}
    for name, host in plan["hosts"].items():
        needed: dict[str, float] = {}
        for worker in host["workers"]:
            device = "CPU" if worker["shared"] else worker["device"]
            needed[device] = needed.get(device, 0) + lent[worker["endpoint"]] + ROOM_MIB
        for device in plan["head"]["devices"] if name == plan["head"]["host"] else []:
            needed[device] = needed.get(device, 0) + own[device] + ROOM_MIB
        if name == plan["head"]["host"]:
            needed["CPU"] = needed.get("CPU", 0) + ROOM_MIB
        reasons += [
            f"{name} has {free[name][device]} MiB free on {device}, but {math.ceil(size)} MiB are needed: try again when more is free"
            for device, size in needed.items()
            if device in free[name] and free[name][device] < size
        ]
    return reasons

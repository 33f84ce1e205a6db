# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster of an inventory, with what follows from it and from its hosts alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import (
    kernel_parameters,
    server_settings,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import (
    external_workers,
    model_source,
    rdma,
    turns,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import speculation, workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster


def derive(cluster: Cluster, report: model_source.ModelReport) -> Cluster:
    """The cluster with the summary of its model, the hosts of workers that others run, hosts as they are after a reboot for their kernel parameters,
    the head's ends of tunnels, and RDMA where both ends have it.

    :raises Refusal: a host cannot have what is asked for.
    """
    known = cluster._replace(
        hosts={name: kernel_parameters.after_reboot(host) for name, host in cluster.hosts.items()},
        elsewhere=external_workers.hosts_of(cluster.external),
        served=model_source.summary_of(cluster.model, report),
        model=speculation.request_of(cluster.model, cluster.server),
    )
    if known.served:
        server_settings.check_kind(known.model, known.served)
        known = known._replace(server=server_settings.serving_as(known.server, known.served))
    return workers.with_transport(rdma.with_rdma(known))


def each_alone(cluster: Cluster, found: Mapping[str, Any]) -> list[tuple[Cluster, Mapping[str, Any]]]:
    """For each of several models the cluster as if that were its one model, with caches of workers for all of them, and what was found of it."""
    own = {turn.name: turns.found_of(found, turn.name) for turn in cluster.turns}
    known = {
        turn.name: model_source.summary_of(turn.model, model_source.report_of(own[turn.name])) for turn in cluster.turns
    }
    return [
        (
            cluster._replace(
                server=turn.server,
                model=turn.model,
                turns=(),
                alternates=True,
                beside=tuple(summary for name, summary in known.items() if summary and name != turn.name),
            ),
            own[turn.name],
        )
        for turn in cluster.turns
    ]

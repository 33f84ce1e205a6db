# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster of an inventory with what follows from it, and the workload of its head."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import kernel_parameters, speculation, workload
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import (
    external_workers,
    model_source,
    rdma,
    server_checks,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Programs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Equipped
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import Workload


def derive(cluster: Cluster) -> Cluster:
    """Return the cluster with the hosts of external workers, hosts as they are after a reboot for their kernel parameters,
    the head's ends of tunnels, and RDMA if both ends have it.

    :raises Refusal: a host cannot have what is asked for.
    """
    derived_cluster = cluster._replace(
        hosts={name: kernel_parameters.after_reboot(host) for name, host in cluster.hosts.items()},
        external_hosts=external_workers.hosts_of(cluster.external),
        model=speculation.request_of(cluster.model, cluster.server),
    )
    return workers.with_transport(rdma.with_rdma(derived_cluster))


def workload_of(cluster: Cluster, programs: Programs, head: Equipped) -> Workload:
    """Work out what the head shall serve.

    :raises Refusal: the model does not go with the settings of the server, or with its release.
    """
    release, request = programs.release, cluster.model
    model = model_source.model_of(request, head.host.facts)
    server_checks.check_architecture(request, model.summary)
    server = workload.for_kind(cluster.server, model.summary)
    server_checks.check_auxiliary(server, request)
    server_checks.check_server(cluster.head, server, head.workers, release)
    speculation.check_speculation(server, model, release)
    model = speculation.with_predicting_layers(model, server)
    variable = releases.variable_of(programs.serving_backend, cluster.releases)
    server_checks.check_types(request, model.summary, release, variable)
    return workload.plan_workload(server, cluster.placement, cluster.users, model, release)


def variants(cluster: Cluster) -> list[Cluster]:
    """Return for each of several models the cluster as if it served that model only, with caches of workers for all of them."""
    return [
        cluster._replace(
            server=turn.server,
            model=turn.model,
            turns=(),
            alternates=True,
            other_summaries=tuple(
                other.model.summary for other in cluster.turns if other.model.summary and other != turn
            ),
        )
        for turn in cluster.turns
    ]

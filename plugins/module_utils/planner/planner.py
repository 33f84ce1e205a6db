# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""From inventory and facts to the plan: the whole intended state as data. Reads and writes nothing.

The plan depends on the inventory and on facts that stay the same from run to run; its form is described in docs/plan.md. Each stage is a module of
``stages`` or a package beside it, and decides what its name says.
"""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import SCHEMA, Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import proof_plan, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import prompts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import (
    Candidate,
    attempt_placement,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import merging
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import (
    advice,
    deriving,
    document,
    fallbacks,
    hosts,
    lending,
    programs,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Catalogue, Cluster


def make_plan(cluster: Cluster, catalogue: Catalogue, runtime_id: str) -> Plan | Refused:
    """Decide, write the plan, and add its fallbacks, its services, the advisories that it meets and the remedies that help; then judge it.

    :param runtime_id: digest of the launcher's files, which names their folder on the hosts.
    :returns: a Plan, ``refused`` if its model does not fit or an error is not accepted; Refused if there is no plan. Then ``reasons`` says why, and
        nothing may be applied.
    """
    if cluster.turns:
        variants = deriving.variants(cluster)
        return merging.merged_plan(cluster, [make_plan(variant, catalogue, runtime_id) for variant in variants])
    try:
        installation, candidate = decide_placement(cluster, catalogue, runtime_id)
        plan = fallbacks.with_fallbacks(installation, candidate, document.compose(installation, candidate))
        plan = advice.add_advice(installation, candidate, proof_plan.with_proof(services.with_services(plan)))
    except Refusal as refusal:
        return refused_plan(cluster.name, refusal)

    def plan_variant(variant: Cluster) -> Plan | Refused:
        return make_candidate(variant, catalogue, runtime_id)

    plan = advice.with_remedies(plan, candidate.workload.model.offered, cluster, plan_variant)
    return advice.judge_plan(plan, cluster.accepted)


def make_candidate(cluster: Cluster, catalogue: Catalogue, runtime_id: str) -> Plan | Refused:
    """Return the plan without fallbacks and remedies: one of many that are compared with each other."""
    try:
        decision = decide_placement(cluster, catalogue, runtime_id)
        plan = services.with_services(document.compose(*decision))
        return advice.judge_plan(advice.add_advice(*decision, plan), cluster.accepted)
    except Refusal as refusal:
        return refused_plan(cluster.name, refusal)


def decide_placement(
    requested_cluster: Cluster, catalogue: Catalogue, runtime_id: str
) -> tuple[Installation, Candidate]:
    """Make all decisions, each stage from those before it: which programs, who lends what, who builds, and which layers lie where.

    :raises Refusal: there is no plan.
    """
    cluster = deriving.derive(requested_cluster)
    selection = programs.choose_programs(cluster, catalogue)
    equipped_hosts, site = lending.equip(cluster, selection, catalogue)
    tls_backend = selection.serving_backend if cluster.server.tls else None
    builds = releases.builds(
        equipped_hosts, selection.releases, cluster.server, catalogue, tls_backend, cluster.measures
    )
    workload = deriving.workload_of(cluster, selection, equipped_hosts[cluster.head])
    candidate = prompts.best_batches(attempt_placement(workload, site))
    if cluster.alternates or not candidate.fits or "unprotected-worker" in cluster.accepted:
        return Installation(cluster, selection, equipped_hosts, builds, runtime_id), candidate
    return _without_idle_workers(Installation(cluster, selection, equipped_hosts, builds, runtime_id), candidate)


def _without_idle_workers(installation: Installation, candidate: Candidate) -> tuple[Installation, Candidate]:
    """Return both without the workers that the plan does not use and that other hosts could reach."""
    used_endpoints = {worker.endpoint for worker in candidate.layout.workers()}
    spares = [
        worker
        for entry in installation.equipped.values()
        for worker in entry.workers
        if worker.endpoint not in used_endpoints and hosts.is_exposed(entry.host.facts, worker)
    ]
    equipped_hosts = {
        name: entry._replace(workers=tuple(worker for worker in entry.workers if worker not in spares))
        for name, entry in installation.equipped.items()
    }
    result = candidate._replace(site=candidate.site.without_workers(spares), idle_workers=tuple(spares))
    return installation._replace(equipped=equipped_hosts), result


def refused_plan(cluster: str, refusal: Refusal) -> Refused:
    """Return what stands for the plan of a cluster that has none: the reason."""
    return Refused(SCHEMA, validation.printable(cluster), refused=True, fits=False, reasons=(str(refusal),))

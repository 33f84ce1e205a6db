# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the plan, the complete intended state as data, from inventory and facts. Planning reads and writes no files.

The plan depends only on the inventory and on facts that do not change between runs; docs/plan.md describes its format. Each stage is a module of
``stages`` or a package next to it, named after what it decides.
"""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import SCHEMA, Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import proof_plan, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import table
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import prompts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import (
    Candidate,
    attempt_placement,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import merging
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import (
    advice,
    document,
    fallbacks,
    hosts,
    lending,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import (
    Installation,
    choose_programs,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Catalogue, Cluster
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import workload_of


def make_plan(cluster: Cluster, catalogue: Catalogue, runtime_id: str) -> Plan | Refused:
    """Return the plan of a cluster, with its services and the proof of its devices. Several models are planned separately, then merged.

    :param runtime_id: digest of the launcher's files, which names their folder on the hosts.
    :returns: a Plan, ``refused`` if its model does not fit or an error is not accepted; Refused if no plan is possible. A refused plan may not be applied;
        its ``reasons`` say why.
    """
    if not cluster.model_entries:
        plan = _plan_model(cluster, catalogue, runtime_id)
    else:
        plans = [_plan_model(variant, catalogue, runtime_id) for variant in merging.single_model_clusters(cluster)]
        plan = merging.merge_plans(cluster, plans)
    return proof_plan.with_proof(services.with_services(plan)) if isinstance(plan, Plan) else plan


def _plan_model(cluster: Cluster, catalogue: Catalogue, runtime_id: str) -> Plan | Refused:
    """Return the plan of one model, with fallbacks, the advisories that apply, and remedies that help."""
    try:
        installation, candidate = decide_placement(cluster, catalogue, runtime_id)
        plan = fallbacks.with_fallbacks(installation, candidate, document.compose_plan(installation, candidate))
        plan = table.with_advisories(AdvisoryContext(plan, cluster, candidate))
    except Refusal as refusal:
        return refused_plan(cluster.name, refusal)
    plan = advice.with_remedies(
        plan, candidate.workload.model.offered, cluster, lambda variant: make_trial_plan(variant, catalogue, runtime_id)
    )
    return advice.judge_plan(plan, cluster.accepted_ids)


def make_trial_plan(cluster: Cluster, catalogue: Catalogue, runtime_id: str) -> Plan | Refused:
    """Return a plan for comparison with others, without fallbacks, remedies and services."""
    try:
        installation, candidate = decide_placement(cluster, catalogue, runtime_id)
        plan = document.compose_plan(installation, candidate)
        plan = table.with_advisories(AdvisoryContext(plan, cluster, candidate))
        return advice.judge_plan(plan, cluster.accepted_ids)
    except Refusal as refusal:
        return refused_plan(cluster.name, refusal)


def decide_placement(cluster: Cluster, catalogue: Catalogue, runtime_id: str) -> tuple[Installation, Candidate]:
    """Decide in stages: the programs, the devices that workers lend, the builds, and the placement of layers.

    :raises Refusal: no plan is possible.
    """
    programs = choose_programs(cluster, catalogue)
    equipped_hosts, site = lending.equip_hosts(cluster, programs, catalogue)
    release_variable = releases.variable_of(programs.serving_backend, cluster.release_requests)
    workload = workload_of(cluster, equipped_hosts[cluster.head], programs.release, release_variable)
    candidate = prompts.best_batches(attempt_placement(workload, site))
    installation = Installation(cluster, programs, equipped_hosts, runtime_id)
    if cluster.has_other_models or not candidate.fits or "unprotected-worker" in cluster.accepted_ids:
        return installation, candidate
    return hosts.without_exposed_workers(installation, candidate)


def refused_plan(name: str, refusal: Refusal) -> Refused:
    """Return the result if no plan is possible, with the reason."""
    return Refused(SCHEMA, validation.printable(name), refused=True, fits=False, reasons=(str(refusal),))

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan, composed from the decisions of the other stages."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import SCHEMA, Plan, UncountedModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import proof_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import auxiliary_models
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.estimate import estimate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import head, hosts, shapes
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Installation


def compose_plan(installation: Installation, candidate: Candidate) -> Plan:
    """Return the plan without fallbacks, services and advisories."""
    cluster, model = installation.cluster, candidate.workload.model
    predicted_estimate = estimate(candidate, *shapes.compare_shapes(candidate))
    return Plan(
        schema=SCHEMA,
        cluster=cluster.name,
        refused=False,
        reasons=candidate.layout.reasons,
        fits=candidate.fits,
        release=candidate.release,
        releases={
            release.id: release
            for entry in installation.equipped_hosts.values()
            for release in (installation.programs.releases[backend] for backend in entry.backends)
        },
        model=model_source.model_plan_of(model),
        hosts={
            name: hosts.plan_of_host(installation, entry, candidate)
            for name, entry in installation.equipped_hosts.items()
        },
        head=head.plan_of_head(installation, candidate, predicted_estimate.load_s)._replace(
            proof=proof_plan.plan_proof(candidate, predicted_estimate, cluster.proof_seconds)
        ),
        external_workers=hosts.external_workers_of(installation, candidate),
        placement=candidate.placement(),
        auxiliary_models=auxiliary_models.auxiliary_model_plans(candidate.layout.auxiliary, model, cluster.head),
        auxiliary_uncounted=tuple(UncountedModel(*pair) for pair in candidate.workload.uncounted_models.items()),
        links=tuple(
            name
            for name, entry in installation.equipped_hosts.items()
            if entry.host.links and name != cluster.head and any(worker.open_endpoint for worker in entry.workers)
        ),
        fallbacks=(),
        no_fallback=(),
        estimate=predicted_estimate,
        advisories=(),
    )

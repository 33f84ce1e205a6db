# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Remedies for a model that does not fit, and the judgement of a plan by its advisories."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import AdvisoryPlan, Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Quantisation


def with_remedies(plan: Plan, offered: Sequence[Quantisation], cluster: Cluster, replan: remedies.Planner) -> Plan:
    """Return the plan with further reasons: changes that make its model fit, each of which was tried.

    :param offered: quantisations in the repository of the model.
    :param replan: function that plans a changed cluster.
    """
    if plan.fits:
        return plan
    trial = remedies.Trial(cluster, judge_plan(plan, cluster.accepted_ids), replan)
    clauses = [*remedies.memory_remedies(trial), *remedies.quantisation_remedies(trial, offered)]
    fit_text = [f"To make the model fit, {', or '.join(clauses)}"] if clauses else []
    return plan._replace(reasons=(*plan.reasons, *fit_text))


def judge_plan(plan: Plan, accepted_ids: frozenset[str]) -> Plan:
    """Return the plan with ``reasons`` and ``refused``, which follow from its advisories, and with the accepted ones marked."""
    advisories = tuple(advisory._replace(accepted=advisory.id in accepted_ids) for advisory in plan.advisories)
    errors: dict[str, list[AdvisoryPlan]] = {}
    for advisory in advisories:
        if advisory.severity == "error" and not advisory.accepted:
            errors.setdefault(advisory.id, []).append(advisory)
    reasons = list(plan.reasons)
    for advisory_id, group in errors.items():
        sentences = [*(advisory.message for advisory in group), *(advisory.remedy for advisory in group)]
        reasons.append(
            f"{' '.join(dict.fromkeys(sentences))} To proceed anyway, add {advisory_id} to llama_accept_advisories."
        )
    return plan._replace(advisories=advisories, reasons=tuple(reasons), refused=bool(reasons))

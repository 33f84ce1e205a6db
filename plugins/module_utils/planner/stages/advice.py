# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The advisories that a plan meets, and what helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import AdvisoryPlan, Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies, table
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import (
    AdvisoryContext,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.draft import Draft, Laid, lay
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Quantisation


class Advised(NamedTuple):
    """A plan with its advisories, and what makes room where its model does not fit."""

    plan: Plan
    offered: Sequence[Quantisation]
    """That the repository of the model has."""


def evaluate(draft: Draft, plan: Plan) -> Advised:
    """The plan with the advisories that it meets."""
    findings = table.evaluate(context_of(draft, plan, lay(draft, draft.placed)))
    return Advised(plan._replace(advisories=tuple(map(table.as_plan, findings))), draft.model.offered)


def context_of(draft: Draft, plan: Plan, laid: Laid) -> AdvisoryContext:
    return AdvisoryContext(plan, draft.cluster, draft.release, draft.model.summary, laid.holders)


def with_remedies(advised: Advised, cluster: Cluster, attempt: Callable[[Cluster], Plan | Refused]) -> Plan:
    """The plan with what helps, when it is tried, a model that does not fit.

    :param attempt: plans a changed cluster.
    """
    plan = advised.plan

    def tried(changed: Cluster) -> Plan | None:
        made = attempt(changed)
        return made if isinstance(made, Plan) else None

    trial = remedies.Trial(cluster, judged(plan, cluster.accepted), tried)
    if not plan.fits:
        room = [*remedies.for_more_room(trial), *remedies.smaller_quantisation(trial, advised.offered)]
        fitting = [f"It fits this way: {', or '.join(room)}"] if room else []
        return plan._replace(reasons=(*plan.reasons, *fitting))
    return plan


def judged(plan: Plan, accepted: frozenset[str]) -> Plan:
    """The plan with ``accepted``, ``reasons`` and ``refused``, which follow from its advisories."""
    met = tuple(advisory._replace(accepted=advisory.id in accepted) for advisory in plan.advisories)
    refusing: dict[str, list[AdvisoryPlan]] = {}
    for advisory in met:
        if advisory.severity == "error" and not advisory.accepted:
            refusing.setdefault(advisory.id, []).append(advisory)
    reasons = list(plan.reasons)
    for identifier, alike in refusing.items():
        sentences = [*(advisory.message for advisory in alike), *(advisory.remedy for advisory in alike)]
        reasons.append(
            f"{' '.join(dict.fromkeys(sentences))} To run it anyway, add {identifier} to llama_accept_advisories."
        )
    return plan._replace(advisories=met, reasons=tuple(reasons), refused=bool(reasons))

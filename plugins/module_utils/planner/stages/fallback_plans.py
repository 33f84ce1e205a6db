# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head serves on while a worker is away."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import llama_server
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import table
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import fallbacks
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import document, head
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.advice import context_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.draft import Draft, Laid, lay


def with_fallbacks(draft: Draft, runtime_id: str) -> Plan:
    """The plan with its fallbacks, but without those that meet an error which it does not meet itself, and which is not accepted."""
    if draft.cluster.alternates or draft.placed.reasons:
        return document.write(draft, (), runtime_id)
    requested = draft.as_requested()
    found = fallbacks.of_plan(requested.case, draft.placed)
    plan = document.write(draft, found, runtime_id)
    judged = _judged(requested, plan, lay(draft, draft.placed), found, runtime_id)
    return plan if judged == found else document.write(draft, judged, runtime_id)


def _judged(
    draft: Draft, plan: Plan, laid: Laid, found: list[fallbacks.Fallback], runtime_id: str
) -> list[fallbacks.Fallback]:
    """The fallbacks without those that meet an error which the plan itself does not meet, and which is not accepted."""
    known = {one.advisory.id for one in table.evaluate(context_of(draft, plan, laid))} if found else set()
    judged = []
    for entry in found:
        errors = []
        if entry.placed:
            other = lay(draft, entry.placed)
            serving = head.serving(draft, other, runtime_id)
            own = llama_server.plan_of(serving, plan.head.environment, plan.head.backends, plan.estimate.load_s)
            served = plan._replace(head=own, placement=other.entries)
            met = table.evaluate(context_of(draft, served, other))
            errors = [
                one.message
                for one in met
                if one.advisory.severity == "error" and one.advisory.id not in known | draft.cluster.accepted
            ]
        judged.append(fallbacks.Fallback(entry.absence, None, reason=errors[0].rstrip(".")) if errors else entry)
    return judged

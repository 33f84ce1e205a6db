# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan, written from what was decided."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    SCHEMA,
    FallbackHead,
    FallbackPlan,
    Plan,
    UncountedModel,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import (
    cache_prefill,
    first_layers,
    llama_server,
    server_settings,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    auxiliary_models,
    estimate,
    fallbacks,
    layout,
    prompts,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import head, hosts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.draft import Draft, Laid, lay


def write(draft: Draft, found: Sequence[fallbacks.Fallback], runtime_id: str) -> Plan:
    """The plan without services and advisories.

    :param found: what the head serves on without some worker.
    """
    cluster, placed, model, release = draft.cluster, draft.placed, draft.model, draft.release
    laid, case = lay(draft, placed), draft.estimated()
    laid_without = [(entry.absence, lay(draft, entry.placed)) for entry in found if entry.placed]
    predicted = estimate.of_plan(case, layout.alone(draft.case, case))
    if case.fits:
        works = estimate.works_of(case)
        predicted = predicted._replace(
            prompt=prompts.of_plan(case, works),
            at_context=prompts.speeds_at_context(case, works) if predicted.generation_range else (),
        )
    return Plan(
        schema=SCHEMA,
        cluster=cluster.name,
        refused=False,
        reasons=tuple(placed.reasons),
        fits=not placed.reasons,
        release=release,
        releases={
            draft.programs.releases[backend].id: draft.programs.releases[backend]
            for entry in draft.equipped.values()
            for backend in entry.backends
        },
        model=model_source.as_plan(model, cache_prefill.large_sizes(model.summary)),
        hosts={name: hosts.plan_of_host(draft, entry, runtime_id) for name, entry in draft.equipped.items()},
        head=head.plan_of_head(
            draft, [laid, *(other for _absence, other in laid_without)], runtime_id, predicted.load_s
        )._replace(first_layers=first_layers.of_plan(model, cluster.server, placed, draft.head.host, predicted)),
        external_workers=hosts.external_workers_of(draft),
        placement=laid.entries,
        auxiliary_models=auxiliary_models.as_plan(placed.auxiliary, model, cluster.head),
        auxiliary_uncounted=tuple(
            UncountedModel(role, why)
            for role, why in auxiliary_models.uncounted(model, cluster.server, release).items()
        ),
        links=tuple(
            name
            for name, entry in draft.equipped.items()
            if entry.host.links and name != cluster.head and any(worker.open for worker in entry.workers)
        ),
        fallbacks=tuple(_fallback(draft.as_requested(), absence, other, runtime_id) for absence, other in laid_without),
        no_fallback=tuple(entry.as_plan() for entry in found if not entry.placed),
        estimate=predicted,
        advisories=(),
    )


def _fallback(draft: Draft, absence: fallbacks.Absence, laid: Laid, runtime_id: str) -> FallbackPlan:
    case = draft.estimated(laid.placed)
    generates = server_settings.generates(case.server, case.summary)
    speeds = estimate.speeds_of(case, estimate.works_of(case)) if generates else None
    return FallbackPlan(
        without=absence.name,
        endpoint=absence.workers[0].endpoint,
        placement=laid.entries,
        head=FallbackHead(llama_server.argv_of(head.serving(draft, laid, runtime_id))),
        workers=tuple(worker.endpoint for worker in laid.placed.lent()),
        generation_tokens_per_s=speeds and speeds.generation,
        generation_range=speeds and speeds.generation_range,
    )

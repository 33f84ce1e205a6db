# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fallbacks while a worker is away: the same model on the remaining devices, or why that is not possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import table
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import (
    Candidate,
    attempt_placement,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.estimate import generation_figures
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.prompt_cache import plan_prompt_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.head import argv_of, serve_candidates
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Worker
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import Workload


class Absence(NamedTuple):
    """Workers that are absent together: one, or all those of a host that lends several devices."""

    name: str
    """``HOST:WORKER``, or ``HOST``."""
    workers: tuple[Worker, ...]


def with_fallbacks(installation: Installation, main_candidate: Candidate, plan: types.Plan) -> types.Plan:
    """Return the plan with its fallbacks, except those with an error that the plan does not have and the operator did not accept."""
    cluster, absences = installation.cluster, [*_absences(main_candidate)]
    if cluster.has_other_models or not main_candidate.fits or not absences:
        return plan
    # Planned batch sizes suit devices with more memory than a fallback may have.
    workload = main_candidate.workload.with_batches(*main_candidate.workload.requested_batches)
    findings = table.evaluate_advisories(AdvisoryContext(plan, cluster, main_candidate))
    ignored_ids = cluster.accepted_ids.union(finding.advisory.id for finding in findings)
    candidates, fallbacks, failures = [main_candidate], [], []
    for absence in absences:
        candidate, missing_mib, reason = _attempt_fallback(workload, main_candidate.site, absence)
        if candidate:
            findings = table.evaluate_advisories(AdvisoryContext(plan, cluster, candidate))
            errors = [finding for finding in findings if finding.advisory.severity == "error"]
            reason = next((error.message.rstrip(".") for error in errors if error.advisory.id not in ignored_ids), "")
        if candidate and not reason:
            candidates.append(candidate)
            argv = argv_of(installation, candidate, plan_prompt_cache(candidate))
            fallback = types.FallbackPlan(
                without=absence.name,
                endpoint=absence.workers[0].endpoint,
                placement=candidate.placement(),
                head=types.FallbackHead(argv),
                workers=candidate.layout.endpoints,
                **generation_figures(candidate),
            )
            fallbacks.append(fallback)
        else:
            failures.append(types.NoFallback(absence.name, absence.workers[0].endpoint, missing_mib, reason))
    head = serve_candidates(plan.head, installation, candidates) if cluster.server.fallback else plan.head
    return plan._replace(head=head, fallbacks=tuple(fallbacks), no_fallback=tuple(failures))


def _absences(candidate: Candidate) -> Iterator[Absence]:
    """Yield each used worker in the order of the plan's hosts, then each other host with several of them, since it may lose power."""
    workers_by_host: dict[str, list[Worker]] = {}
    for device in candidate.site.devices:
        if device.worker and device.endpoint in candidate.layout.endpoints:
            workers_by_host.setdefault(device.host, []).append(device.worker)
            yield Absence(f"{device.host}:{device.worker.name}", (device.worker,))
    for host, workers in workers_by_host.items():
        if len(workers) > 1 and host != candidate.site.head:
            yield Absence(host, tuple(workers))


def _attempt_fallback(workload: Workload, site: Site, absence: Absence) -> tuple[Candidate | None, int | None, str]:
    """Return the candidate without the absent workers; if none is possible, the missing MiB if that is why, and the reason."""
    if workload.server.tensor_split:
        return None, None, "llama_server_tensor_split fixes each device's share"
    remaining_site = site.without_workers(absence.workers)
    lost_buffers = [device.buffer for device in site.devices if device not in remaining_site.devices]
    if any(override.endswith(f"={buffer}") for override in workload.server.override_tensor for buffer in lost_buffers):
        return None, None, "llama_server_override_tensor places tensors on absent devices"
    try:
        candidate = attempt_placement(workload, remaining_site)
    except Refusal as refusal:
        return None, None, str(refusal)
    missing_mib = candidate.layout.missing_mib
    return (candidate, None, "") if candidate.fits else (None, missing_mib, f"needs {missing_mib} MiB more memory")

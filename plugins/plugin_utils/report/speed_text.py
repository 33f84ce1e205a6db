# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The predicted speed of a plan as text."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Estimate, Plan


def model_rows(plan: Plan) -> list[list[str]]:
    """Return a row of titles, and for each of several models its size, speed and loading time."""
    rows = [["model", "GiB", "context", "tokens/s", "prompts", "change"]]
    for model in plan.head.models or ():
        estimate = model.estimate
        weights = model.cpu.weights_mib + sum(entry.weights_mib for entry in model.placement)
        loading = "does not fit" if estimate.load_s is None else f"{estimate.load_s:g} s"
        speeds = [str(speed or "") for speed in (estimate.generation_range, estimate.prompt_range)]
        model_names = ", ".join([model.name, *model.aliases])
        rows.append([model_names, f"{weights / 1024:.1f}", str(model.context), *speeds, loading])
    return rows


def served_without_worker(plan: Plan) -> list[str]:
    """Return for each worker which of several models can be loaded without it, in lines."""
    rows = []
    for name, host in plan.hosts.items():
        for worker in host.workers:
            models = [
                model.name
                for model in plan.head.models or ()
                if worker.endpoint not in {entry.endpoint for entry in model.placement}
            ]
            if worker.used:
                rows.append([f"without {name}:{worker.name}:", f"still served: {', '.join(models) or 'none'}"])
    return tables.table(rows).splitlines() if rows else []


RATE_TEXTS = {"table": "come from a table by name and architecture", "assumed": "are assumed for at least one device"}
SERVICES_S = 7
"""Seconds in which services stop and start, without loading and proof, measured on five containers."""


def makes_text(plan: Plan) -> bool:
    return plan.estimate.generation_range is not None


def speed_rows(plan: Plan) -> list[list[str]]:
    """Return the predictions with their values and limits; nothing if the model does not fit."""
    estimate = plan.estimate
    if estimate.load_s is None:
        return []
    outage = SERVICES_S + estimate.load_s + (plan.head.proof.outage_s if plan.head.proof else 0)
    generation = [f"{estimate.generation_range} tokens per second", f"limited by: {estimate.limited_by}"]
    return [
        ["generation", *(generation if makes_text(plan) else ["none: this model generates no text", ""])],
        ["prompts", f"{estimate.prompt_range} tokens per second", f"limited by: {estimate.prompt_limited_by}"],
        ["loading", f"{estimate.load_s:g} seconds", f"limited by: {estimate.load_limited_by}"],
        *_proof_row(plan),
        ["restart", f"about {outage:.0f} seconds", "without an answer if site.yml restarts the head"],
        *(
            [
                f"after {speed.context} tokens",
                f"{speed.generation_range} tokens per second",
                f"prompts: {speed.prompt_range}",
            ]
            for speed in estimate.at_context
        ),
        *(
            [
                f"a prompt of {prompt.tokens}",
                f"{prompt.speed_range} tokens per second",
                f"{'pipeline, ' * prompt.pipelined}-b {prompt.batch} -ub {prompt.micro_batch}",
            ]
            for prompt in filter(None, [estimate.prompt])
        ),
    ]


def _proof_row(plan: Plan) -> list[list[str]]:
    proof = plan.head.proof
    if not proof or not proof.layers:
        return []
    took = f"{proof.seconds} s, then an outage of {proof.outage_s} s"
    return [["proof", took, f"once: {proof.coverage(plan.model.layers)}"]]


def speed_notes(plan: Plan) -> list[str]:
    """Return the speed of the best single host, and the assumptions of the prediction."""
    estimate, best = plan.estimate, plan.estimate.best_single_host
    speed = "does not hold the model"
    if best.fits and estimate.load_s is not None and not makes_text(plan):
        speed = f"{best.prompt_range} tokens per second in prompts"
    elif best.fits:
        speed = f"{best.generation_range} tokens per second in generation, {best.prompt_range} in prompts"
    hosts = {entry.host for entry in plan.placement}
    hosts |= {plan.head.host} if plan.head.cpu.layers or not plan.placement else set()
    proof = plan.head.proof
    return [
        *([f"No proof of the devices: {proof.reason}."] if proof and not proof.layers else []),
        *([f"{best.host} alone: {speed}"] if best.fits or hosts != {best.host} else []),
        "About four in five measurements fell within the predicted range. "
        f"Device rates {RATE_TEXTS[estimate.rates or 'assumed']}; the head's disk speed is assumed. "
        "Unless a row says otherwise, a prompt has 512 tokens, the context is empty, and no worker has cached the model.",
        *_correction(estimate),
        _conversations(plan),
        *_sleep(plan),
    ]


def _correction(estimate: Estimate) -> list[str]:
    """Return how a measurement of the cluster corrects the speeds."""
    correction = estimate.correction
    if not correction:
        return []
    source = f"measured on {correction.date} with {correction.model} and {correction.release}"
    return [
        f"Generation is corrected by {correction.factor:.2g}, {source}; prompts, single hosts and fallbacks are not corrected."
    ]


def _conversations(plan: Plan) -> str:
    """Return where the head caches conversations."""
    head = plan.head
    if not makes_text(plan):
        return "This model generates no text, so no conversations are cached."
    memory = f"MiB of {head.host}'s memory"
    conversations = f"Conversations that left their slot are cached in {head.prompt_cache_mib} {memory}"
    if not head.prompt_cache_mib:
        conversations = "Conversations that left their slot are not cached"
    points = f" Context checkpoints take up to {head.checkpoints_mib} {memory}." if head.checkpoints_mib else ""
    kept = head.conversations
    disk = (
        f" They survive a restart on {head.host}'s disk: a full context takes {kept.file_mib} MiB, and {kept.move_s:g} s to save or to restore; "
        f"computing it takes {kept.computing_s:g} s."
        if kept
        else ""
    )
    return f"{conversations}.{points}{disk}"


def _sleep(plan: Plan) -> list[str]:
    """Return when llama-server unloads its model, and the cost for the next request."""
    idle = f"After {plan.head.idle_seconds} seconds without a request, llama-server unloads its model and frees the memory of workers"
    return [f"{idle}; the next request waits while it loads."] if plan.head.idle_seconds else []


def speed_lines(plan: Plan) -> list[str]:
    rows = speed_rows(plan)
    notes = [line for note in speed_notes(plan) for line in tables.wrap("  ", note)] if rows else []
    return [*tables.table(rows).splitlines(), *notes] if rows else []


def network_lines(plan: Plan) -> list[str]:
    estimate = plan.estimate
    if not estimate.links:
        return ["  none: no worker is used"]
    kinds = dict.fromkeys((link.kind, link.one_way_ms, link.measured) for link in estimate.links)
    latency_text = ", ".join(
        f"{time:g} ms by {kind} ({'measured' if measured else 'assumed'})" for kind, time, measured in kinds
    )
    return tables.wrap(
        "  ",
        f"about {estimate.network_ms_per_token:.1f} ms for each token, including worker overhead; one-way latency: "
        f"{latency_text}.",
    )


def fallback_lines(plan: Plan) -> list[str]:
    """Return what is served while a used worker is away, in lines."""
    rows = [
        [
            f"without {entry.without}:",
            f"fits, {entry.generation_range} tokens per second" if makes_text(plan) else "fits",
        ]
        for entry in plan.fallbacks
    ]
    for entry in plan.no_fallback:
        missing = entry.missing_mib
        obstacle = f"cannot be planned: {entry.reason}" if missing is None else f"does not fit, {missing} MiB missing"
        rows.append([f"without {entry.without}:", obstacle])
    seconds = plan.head.fallback_after
    fallback_note = (
        f"llama_server_fallback is true: if the model fits, the head serves without the worker after {seconds} seconds."
    )
    if seconds is None:
        fallback_note = "llama_server_fallback is false: while one of them is away, nothing is served."
    return [*tables.table(rows).splitlines(), *tables.wrap("  ", fallback_note)] if rows else []

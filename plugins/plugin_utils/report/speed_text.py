# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The predicted speed of a plan as text."""

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Estimate, Plan, ShapeEstimate


def model_rows(plan: Plan) -> list[list[str]]:
    """Return a row of titles, and for each of several models a row with its size, speed and loading time."""
    rows = [["model", "GiB", "context", "tokens/s", "prompts", "loading"]]
    for model in plan.head.models or ():
        estimate = model.estimate
        weights_mib = model.cpu.weights_mib + sum(entry.weights_mib for entry in model.placement)
        loading_text = "does not fit" if estimate.load_s is None else f"{estimate.load_s:g} s"
        speed_texts = [str(speed_range or "") for speed_range in (estimate.generation_range, estimate.prompt_range)]
        model_names = ", ".join([model.name, *model.aliases])
        rows.append([model_names, f"{weights_mib / 1024:.1f}", str(model.context), *speed_texts, loading_text])
    return rows


def absent_worker_lines(plan: Plan) -> list[str]:
    """Return a line for each used worker, with the models that do not need it."""
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
    return tables.format_table(rows).splitlines() if rows else []


RATE_TEXTS = {"table": "come from a table of known devices", "assumed": "are assumed for at least one device"}
RESTART_SECONDS = 7
"""Seconds to stop and start services, without loading and proof, measured on five containers."""


def generates_text(plan: Plan) -> bool:
    return plan.estimate.generation_range is not None


def speed_rows(plan: Plan) -> list[list[str]]:
    """Return rows with the predicted values and their limits; none if the model does not fit."""
    estimate = plan.estimate
    if estimate.load_s is None:
        return []
    outage_s = RESTART_SECONDS + estimate.load_s + (plan.head.proof.outage_s if plan.head.proof else 0)
    generation_texts = [f"{estimate.generation_range} tokens per second", f"limited by: {estimate.limited_by}"]
    return [
        ["generation", *(generation_texts if generates_text(plan) else ["none: this model generates no text", ""])],
        ["prompts", f"{estimate.prompt_range} tokens per second", f"limited by: {estimate.prompt_limited_by}"],
        *_users_rows(estimate),
        ["loading", f"{estimate.load_s:g} seconds", f"limited by: {estimate.load_limited_by}"],
        *_proof_rows(plan),
        ["restart", f"about {outage_s:.0f} seconds", "without answers if site.yml restarts the server"],
        *(
            [
                f"a prompt of {prompt.tokens}",
                f"{prompt.speed_range} tokens per second",
                f"{'pipeline, ' * prompt.pipelined}-b {prompt.batch} -ub {prompt.micro_batch}",
            ]
            for prompt in filter(None, [estimate.prompt])
        ),
    ]


def _users_rows(estimate: Estimate) -> list[list[str]]:
    users = estimate.users
    if not users or users.users == 1:
        return []
    concurrency_note = "" if users.at_once == users.users else f", {users.at_once} at once"
    speed = f"{users.generation_range} tokens per second in total" if users.generation_range else ""
    return [[f"{users.users} users{concurrency_note}", speed, f"prompts: {users.prompt_range}"]]


def _proof_rows(plan: Plan) -> list[list[str]]:
    proof = plan.head.proof
    if not proof or not proof.layers:
        return []
    duration_text = f"{proof.seconds} s, then an outage of {proof.outage_s} s"
    return [["proof", duration_text, f"once: {proof.coverage_text(plan.model.layers)}"]]


def speed_notes(plan: Plan) -> list[str]:
    """Return the assumptions of the prediction."""
    estimate, proof, idle_seconds = plan.estimate, plan.head.proof, plan.head.idle_seconds
    idle_note = (
        f"After {idle_seconds} seconds without a request, llama-server unloads its model and frees the workers' memory"
    )
    return [
        *([f"No proof of the devices: {proof.reason}."] if proof and not proof.layers else []),
        "About four in five measured speeds were within their predicted range. "
        f"Device rates {RATE_TEXTS[estimate.rates or 'assumed']}; the head's disk speed is assumed. "
        "Unless a row says otherwise, a prompt has 512 tokens, the context is empty, and no worker has cached the model.",
        *_correction_notes(estimate),
        _conversations_note(plan),
        *([f"{idle_note}; the next request waits while the model loads."] if idle_seconds else []),
    ]


def _correction_notes(estimate: Estimate) -> list[str]:
    """Return a sentence about the correction of speeds by a measurement of the cluster."""
    correction = estimate.correction
    if not correction:
        return []
    source = f"measured on {correction.date} with {correction.model} and {correction.release}"
    return [
        f"Only generation speeds (also those of other shapes and fallbacks) are corrected, by a factor of {correction.factor:.2g}, {source}."
    ]


def _conversations_note(plan: Plan) -> str:
    """Return sentences about the caches for conversations."""
    head = plan.head
    if not generates_text(plan):
        return "This model generates no text, so no conversations are cached."
    memory_unit = f"MiB of {head.host}'s memory"
    cache_text = f"Conversations that lost their slot are cached in up to {head.prompt_cache_mib} {memory_unit}"
    if not head.prompt_cache_mib:
        cache_text = "Conversations that lost their slot are not cached"
    ram_text = f" Context checkpoints take up to {head.checkpoints_mib} {memory_unit}." if head.checkpoints_mib else ""
    disk_plan = head.conversations
    disk_text = (
        f" Conversations survive a restart on {head.host}'s disk: a full context takes {disk_plan.file_mib} MiB there, and {disk_plan.move_s:g} s to save or "
        f"restore, but {disk_plan.computing_s:g} s to compute again."
        if disk_plan
        else ""
    )
    return f"{cache_text}.{ram_text}{disk_text}"


def speed_lines(plan: Plan) -> list[str]:
    rows = speed_rows(plan)
    notes = [line for note in speed_notes(plan) for line in tables.wrap("  ", note)] if rows else []
    return [*tables.format_table(rows).splitlines(), *notes] if rows else []


def _shape_name(shape: ShapeEstimate) -> str:
    hosts = ", ".join(shape.hosts) if len(shape.hosts) < 4 else f"{len(shape.hosts)} hosts"
    if shape.kind == "split" and len(shape.hosts) == 1:
        return f"workers on {hosts}"
    if shape.kind != "host":
        return f"{'one server on each of' if shape.kind == 'replicas' else 'split over'} {hosts}"
    settings = " ".join(shape.settings if shape.fits else ())
    cpu_part = "experts" if "override_tensor" in settings else "some layers" if "gpu_layers" in settings else ""
    single_host_text = f"one of {hosts} alone" if len(shape.hosts) > 1 else f"{hosts} alone"
    return f"{single_host_text} ({cpu_part} on its processor)" if cpu_part else single_host_text


def shape_rows(plan: Plan) -> list[list[str]]:
    """Return a row of titles, and for each shape its memory and speeds. The plan's own shape is marked."""
    estimate, users = plan.estimate, plan.estimate.users
    users_titles = [f"{users.users} users"] if users and users.users > 1 else []
    prompt_title = f"prompt of {estimate.prompt.tokens}" if estimate.prompt else "prompt"
    rows = [["shape", "fits", "free memory", "tokens/s", *users_titles, prompt_title]]
    for shape in estimate.shapes:
        users_range = shape.users and shape.users.generation_range
        speeds = [str(shape.generation_range or ""), *[str(users_range or "")][: len(users_titles)]]
        memory_text = f"{shape.free_mib / 1024:.1f} GiB" if shape.fits else f"{-shape.free_mib / 1024:.1f} GiB missing"
        name = f"{_shape_name(shape)}{' (this plan)' if shape.chosen else ''}"
        rows.append(
            [name, "yes" if shape.fits else "no", memory_text, *speeds, f"{shape.prompt_s:g} s" if shape.fits else ""]
        )
    return rows


def shape_notes(plan: Plan) -> list[str]:
    """Return a sentence about the gain of the fastest other shape, and how to select it; none if no other shape fits."""

    def speed(shape: ShapeEstimate) -> float:
        return (shape.users.generation_tokens_per_s or shape.users.prompt_tokens_per_s) if shape.users else 0.0

    users = plan.estimate.users
    other_shapes = [shape for shape in plan.estimate.shapes if shape.fits and not shape.chosen]
    if not other_shapes or not users:
        return []
    best_shape, current_speed = max(other_shapes, key=speed), users.generation_tokens_per_s or users.prompt_tokens_per_s
    users_text = "one user" if users.users == 1 else f"{users.users} users"
    gain_text = f"{speed(best_shape) / current_speed:.2f} times the tokens per second of this plan for {users_text}"
    settings_text = " and ".join(filter(None, [", ".join(best_shape.settings[:-1]), *best_shape.settings[-1:]]))
    return [f"The fastest other shape is {_shape_name(best_shape)}: {gain_text}. To select it, {settings_text}."]


def shape_lines(plan: Plan) -> list[str]:
    rows = shape_rows(plan)
    notes = [line for note in shape_notes(plan) for line in tables.wrap("  ", note)]
    return [*tables.format_table(rows).splitlines(), *notes] if rows[1:] else []


def network_lines(plan: Plan) -> list[str]:
    estimate = plan.estimate
    if not estimate.links:
        return ["  none: no worker is used"]
    links = dict.fromkeys((link.kind, link.one_way_ms, link.measured) for link in estimate.links)
    latency_text = ", ".join(
        f"{ms:g} ms over {kind} ({'measured' if is_measured else 'assumed'})" for kind, ms, is_measured in links
    )
    return tables.wrap(
        "  ",
        f"about {estimate.network_ms_per_token:.1f} ms per token, including worker overhead; one-way latency: {latency_text}.",
    )


def fallback_lines(plan: Plan) -> list[str]:
    """Return lines about what the head serves while a used worker is absent."""
    rows = [
        [
            f"without {entry.without}:",
            f"fits, {entry.generation_range} tokens per second" if generates_text(plan) else "fits",
        ]
        for entry in plan.fallbacks
    ]
    for entry in plan.no_fallback:
        missing_mib = entry.missing_mib
        obstacle = (
            f"cannot be planned: {entry.reason}" if missing_mib is None else f"does not fit, {missing_mib} MiB missing"
        )
        rows.append([f"without {entry.without}:", obstacle])
    delay_s = plan.head.fallback_after
    fallback_note = f"llama_server_fallback is true: the head waits {delay_s} seconds for an absent worker, then serves without it if the model still fits."
    if delay_s is None:
        fallback_note = "llama_server_fallback is false: the head serves nothing while a worker that it uses is absent."
    return [*tables.format_table(rows).splitlines(), *tables.wrap("  ", fallback_note)] if rows else []

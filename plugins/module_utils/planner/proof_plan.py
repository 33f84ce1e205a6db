# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of the proof, which tests devices with layers of the model: which layers, how long it takes, and what the head runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    device_rates,
    options,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, layer_sample
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import cores_gflops
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import questions
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.leftovers import PROOF_SOCKET_FILE
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.questions import Question
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import ProofWork, Remedy, Side

MAX_SAMPLE_BYTES = 8 << 30
PROCESSOR_CONTEXT = 1536
"""Context if all proven devices are processors, whose kernels are the same for longer prompts."""
START_S = 2
"""Seconds that a llama-server takes to start and stop."""
PROOF_RATE_SHARE, EXPERT_RATE_SHARE = 0.45, 0.25
"""Share of a device's prompt rate that the proof reaches: most of its prompts are short, and the head's processor repacks no weights."""
LIMIT_FACTOR = 4
"""Multiple of the predicted time after which the processor gets no further long prompts."""
WAIT_S, TIMEOUT_FACTOR = 300, 5
"""Time in which a server must become healthy or answer: seconds, plus a multiple of the predicted time of the whole proof."""
REPLACED_OPTIONS = f"""
model host port rpc device gpu-layers tensor-split override-tensor context parallel prompt-cache context-checkpoints sleep api-key-file
tls-certificate tls-key projector projector-offload projector-device adapter {options.SPECULATION} draft draft-device draft-layers draft-tensors
draft-cache-type-k draft-cache-type-v metrics batch repack alias ui conversations --log-file
""".split()
"""Options that the proof sets itself, or that concern only clients or auxiliary models."""
IRRELEVANT_OPTIONS = {
    *REPLACED_OPTIONS,
    "micro-batch",
    "flash-attention",
    "threads",
    "threads-batch",
    "load-mode",
    "fit",
    "--log-verbosity",
}
"""Options that the result of the reading check does not depend on."""
REPACK_WORDS = ("--repack",)
"""llama-server's default, which replaces the reference's --no-repack."""
REMEDIES = (
    {"flash-attention": "off", "cache-type-v": "f16"},
    {"flash-attention": "on"},
    {"cache-type-k": "f16", "cache-type-v": "f16"},
    {"micro-batch": 128},
)
"""Settings that select other kernels, in the order in which they are tried. Quantised values need flash attention."""


def plan_proof(candidate: Candidate, estimate: types.Estimate, limit_s: int) -> types.ProofPlan | None:
    """Return the proof with as many layers as the head's processor computes within ``limit_s`` seconds; None if there is nothing to prove.

    :param estimate: estimate of the whole model.
    """
    workload, devices, site = candidate.workload, candidate.layout.devices, candidate.site
    has_known_answer = workload.model.known_answer or known_answer.is_model_name(workload.summary.name)
    if has_known_answer or not devices or not workload.generates_text or not candidate.fits:
        return None
    summary = workload.summary
    max_bytes = min([device.capacity_mib for device in devices] + [site.head_facts.memory_mib]) * MIB // 2
    uses_processors = all(device.backend == backends.CPU.name for device in devices)
    context = min(PROCESSOR_CONTEXT if uses_processors else questions.CONTEXT_TOKENS, workload.context_per_request)
    prompts = questions.list_questions(context)
    if not prompts:
        reason = f"a context of {context} tokens is too short for the proof's prompts"
        return types.ProofPlan((), 0, False, False, 0, 0, reason=reason)
    variants = questions.variant_questions(prompts) * (1 + (workload.cache.type_v == "f16"))
    rate = site.rates[device_load.CPU_BUFFER]
    gflops = cores_gflops(site.head_facts) if rate.source == device_rates.ASSUMED_SOURCE else rate.prompt_gflops

    def reference_s(layers: float) -> float:
        return _compute_s(summary, [*prompts, *variants], layers, rate.gb_per_s, gflops)

    layer_s = reference_s(1) - reference_s(0)
    max_layers = max(1, int((limit_s - reference_s(0)) / layer_s))
    sample = layer_sample.choose_layers(summary, min(MAX_SAMPLE_BYTES, max_bytes), max_layers)
    if isinstance(sample, str):
        return types.ProofPlan((), 0, False, False, 0, 0, reason=sample)
    upload_s = (estimate.load_s or 0) * sample.bytes / summary.size
    device_seconds = [
        _compute_s(summary, prompts, len(sample.layers), device.gb_per_s, device.prompt_gflops)
        for device in estimate.devices
    ]
    outage_s = START_S + upload_s + max(device_seconds, default=0)
    proof_s = sample.bytes / 1e9 / cost_model.DISK_GB_PER_S + START_S * 3 + reference_s(len(sample.layers))
    return types.ProofPlan(*sample, context=context, seconds=math.ceil(proof_s), outage_s=math.ceil(outage_s))


def _compute_s(
    summary: ModelSummary, prompts: Sequence[Question], layers: float, gb_per_s: float, gflops: float
) -> float:
    """Return the seconds that a device takes to answer questions with this number of layers."""
    layer_share = layers / summary.layers
    weight_bytes = sum(summary.layer_bytes) * layer_share + summary.output_bytes
    tokens = questions.count_tokens(prompts)
    output_parameters = summary.width * summary.vocabulary
    dense_parameters, expert_parameters = 0.0, 0.0
    for row in summary.tensor_groups:
        if row.layers is not None:
            parameters = math.prod(row.shape) * row.tensor_count * layer_share
            if cost_model.EXPERT_PATTERN.search(row.name):
                expert_parameters += parameters * summary.active_expert_share
            else:
                dense_parameters += parameters
    attention_operations = (
        questions.count_pairs(prompts) * summary.heads * (summary.key_dimension + summary.value_dimension) * layers
    )
    operations = (
        dense_parameters * tokens + output_parameters * len(prompts) + attention_operations
    ) / PROOF_RATE_SHARE + expert_parameters * tokens / EXPERT_RATE_SHARE
    return len(prompts) * weight_bytes / 1e9 / gb_per_s + 2e-9 * operations / gflops


def with_proof(plan: types.Plan) -> types.Plan:
    """Return the finished plan with the ids of its proof and its reading check for each model."""
    head = plan.head
    if not head.models:
        return _with_model_proof(plan)
    heads = [_with_model_proof(model_plan).head for model_plan in plan.per_model()]
    models = [model._replace(proof=entry.proof, reading=entry.reading) for model, entry in zip(head.models, heads)]
    return plan._replace(head=head._replace(proof=heads[0].proof, reading=heads[0].reading, models=tuple(models)))


def _with_model_proof(plan: types.Plan) -> types.Plan:
    """Return the plan of one model with these ids."""
    head, proof = plan.head, plan.head.proof
    if proof and proof.layers:
        devices = (types.ProvenDevice(*_proof_side(plan, entry)[:2]) for entry in plan.placement)
        proof = proof._replace(devices=tuple(devices))
    has_known_answer = plan.model.known_answer or known_answer.is_model_name(plan.model.name)
    generates_text = plan.estimate.generation_range is not None and not has_known_answer
    return plan._replace(head=head._replace(proof=proof, reading=_reading_id(plan) if generates_text else None))


def proof_work(plan: types.Plan) -> ProofWork | None:
    """Return the head's work to prove the plan of one model; None if there is nothing to prove."""
    proof, head = plan.head.proof, plan.head_host
    if not proof or not proof.layers:
        return None
    planned_values = {name: words[1:] for name, words in _options_in(plan.head.argv)}
    variants: list[tuple[str, ...]] = [REPACK_WORDS] if plan.release.mainline else []
    if planned_values.get("cache-type-v", ["f16"]) == ["f16"]:
        flash_attention = "on" if planned_values.get("flash-attention") == ["off"] else "off"
        variants.append(tuple(options.render_option("flash-attention", flash_attention, plan.release.fork)))
    return ProofWork(
        model=plan.model.path,
        layers=proof.layers,
        bytes=proof.bytes,
        folder=head.state,
        account=head.account,
        environment=plan.head.environment,
        launcher=services.launcher_argv(plan, "prove", [f"{head.state}/{PROOF_SOCKET_FILE}"]),
        sockets=plan.release.mainline,
        context=proof.context,
        micro_batch=int(*planned_values.get("micro-batch", ["512"])),
        limit_s=math.ceil(LIMIT_FACTOR * proof.seconds),
        timeout_s=WAIT_S + TIMEOUT_FACTOR * (proof.seconds + proof.outage_s),
        processor=_proof_side(plan, None),
        variants=tuple(variants),
        devices=tuple(_proof_side(plan, entry) for entry in plan.placement),
        remedies=tuple(_remedies(plan)),
    )


def _proof_side(plan: types.Plan, entry: types.DevicePlacement | None) -> Side:
    """Return a device as a side of the comparison; the head's processor if ``entry`` is None."""
    details: Any
    argv = _proof_argv(plan, entry)
    name, details = f"{plan.head.host}'s processor", argv
    if entry:
        worker = next((worker for worker in plan.workers if worker.endpoint == entry.endpoint), None)
        rates = [
            (device.gb_per_s, device.prompt_gflops) for device in plan.estimate.devices if device.device == entry.device
        ]
        program = worker and [
            worker.argv[0],
            [
                word
                for _name, words in _options_in(worker.argv)
                for word in words
                if words[0] not in ("-H", "-p", "--host", "--port")
            ],
            dict(worker.environment),
        ]
        excluded_options = ("rpc", "device", "micro-batch")
        compared_options = [words for name, words in _options_in(argv) if name not in excluded_options]
        label = entry.worker or entry.device
        name = f"{entry.host} {label}"
        details = [argv[0], compared_options, [entry.host, label, entry.capacity_mib, rates], program]
    details = [plan.head.proof and plan.head.proof.layers, details, dict(plan.head.environment)]
    return Side(_digest(plan, *details), name, argv)


def _reading_id(plan: types.Plan) -> str:
    """Return an id of everything that the result of the reading check depends on, except the release and the devices, which it tests."""
    planned_options = _options_in(plan.head.argv)
    return _digest(plan, [(name, words[1:]) for name, words in planned_options if name not in IRRELEVANT_OPTIONS])


def _digest(plan: types.Plan, *details: Any) -> str:
    """Return an id of the model's files and further details."""
    files = [(file.name, file.bytes, file.sha256, file.revision) for file in plan.model.files]
    text = json.dumps([plan.model.path, plan.model.revision, files, *details], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _options_in(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the options in a command line: their names in the table, and their words."""
    return [(options.name_of(words[0]), words) for words in options.group_words(argv[1:])]


def _remedies(plan: types.Plan) -> Iterator[Remedy]:
    """Yield settings that the planned command line lacks. Words after the command line override its own."""
    planned_values = {name: words[1:] for name, words in _options_in(plan.head.argv)}
    for values in REMEDIES:
        settings, words = [], []
        for name, value in values.items():
            option = options.by_name(name)
            if [str(value)] != planned_values.get(name, [*option.omitted_values]):
                settings.append(f"{option.variable}: {value!r}")
                words += [option.spellings_of(plan.release.fork)[0].words[0], str(value)]
        if words:
            yield Remedy(", ".join(settings), tuple(words))


def _proof_argv(plan: types.Plan, entry: types.DevicePlacement | None) -> tuple[str, ...]:
    """Return llama-server's command line for a device, or for the processor alone, which then repacks no weights, like the processors of workers."""
    fork, proof, planned_options = plan.release.fork, plan.head.proof, _options_in(plan.head.argv)
    kept_words = [words for name, words in planned_options if name not in REPLACED_OPTIONS]
    overrides = [
        override for name, words in planned_options if name == "override-tensor" for override in words[1].split(",")
    ]
    values: Mapping[str, str | Sequence[str]] = {
        "rpc": [entry.endpoint] if entry and entry.endpoint else [],
        "device": _device_name(fork, entry) if entry else "none",
        "gpu-layers": str(len(proof.layers) + 1 if entry and proof else 0),
        "override-tensor": [override for override in overrides if override.endswith("=CPU")] if entry else [],
        "context": str(proof.context if proof else 0),
        "parallel": "1",
        "prompt-cache": "0",
        "repack": "off" if not entry and plan.release.mainline else "",
    }
    settings = [word for name, value in values.items() for word in options.render_option(name, value, fork)]
    return (plan.head.argv[0], *settings, *itertools.chain(*kept_words))


def _device_name(fork: str, entry: types.DevicePlacement) -> str:
    """Return the name by which --device selects a single device."""
    template = capabilities.DEVICE_TEMPLATES[fork]
    return template.format(index=0, endpoint=entry.endpoint) if entry.endpoint else entry.device

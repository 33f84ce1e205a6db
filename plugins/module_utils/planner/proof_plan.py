# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The proof of the devices by layers of the model: which layers, what it costs, and what the head runs for it."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, device_rates, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, layer_sample
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    DevicePlacement,
    Estimate,
    Plan,
    ProofPlan,
    ProvenDevice,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import llama_server, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import cores_gflops
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import questions
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.leftovers import SOCKET
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.questions import Question
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import ProofWork, Remedy, Side

LARGEST_FILE = 8 << 30
PROCESSORS_CONTEXT = 1536
"""Context if only processors are proven: their kernels are the same for longer prompts."""
START_S = 2
"""Seconds in which a llama-server starts and stops."""
RATE_SHARE, EXPERT_RATE_SHARE = 0.45, 0.25
"""Share of a device's rate for prompts that the proof's prompts reach: most of them are short, and the head's processor repacks no weights."""
LIMIT_TIMES = 4
"""Multiple of the prediction after which the processor answers no further long prompts."""
PATIENCE_S, PATIENCE_TIMES = 300, 5
"""Time that a server may take to be healthy or to answer: seconds, and a multiple of the whole proof's prediction."""
REPLACED_OPTIONS = f"""
model host port rpc device gpu-layers tensor-split override-tensor context parallel prompt-cache context-checkpoints sleep api-key-file
tls-certificate tls-key projector projector-offload projector-device adapter {options.SPECULATION} draft draft-device draft-layers draft-tensors
draft-cache-type-k draft-cache-type-v metrics batch repack alias ui conversations --log-file
""".split()
"""Options that the proof sets itself, or that concern clients or what is loaded beside the model."""
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
"""Options that do not change how well a model reads."""
REPACK_OPTION = ("--repack",)
"""llama-server's default, which replaces the reference's --no-repack."""
REMEDIES = (
    {"flash-attention": "off", "cache-type-v": "f16"},
    {"flash-attention": "on"},
    {"cache-type-k": "f16", "cache-type-v": "f16"},
    {"micro-batch": 128},
)
"""Settings with which other kernels compute, in the order in which they are tried. Quantised values need flash attention."""


def plan_proof(candidate: Candidate, estimate: Estimate, seconds: int) -> ProofPlan | None:
    """Return the proof with as many layers as the head's processor computes in time; None if there is nothing to prove.

    :param estimate: estimate of the whole model.
    """
    workload, devices, head = candidate.workload, candidate.layout.devices, candidate.site
    has_known_answer = workload.model.known_answer or known_answer.is_name(workload.summary.name)
    if has_known_answer or not devices or not workload.generates or not candidate.fits:
        return None
    summary = workload.summary
    capacity = min([device.capacity_mib for device in devices] + [head.facts.memory_mib]) * MIB // 2
    longest_context = questions.CONTEXT
    if all(device.backend == backends.CPU.name for device in devices):
        longest_context = PROCESSORS_CONTEXT
    context = min(longest_context, workload.context_per_request)
    prompts = questions.list_questions(context)
    variants = questions.variant_questions(prompts) * (1 + (workload.cache.type_v == "f16"))
    rate = head.rates[device_load.CPU]
    gflops = cores_gflops(head.facts) if rate.source == device_rates.ASSUMED_SOURCE else rate.prompt_gflops

    def reference_s(layers: float) -> float:
        return _compute_s(summary, [*prompts, *variants], layers, rate.gb_per_s, gflops)

    per_layer = reference_s(1) - reference_s(0)
    room = layer_sample.Room(min(LARGEST_FILE, capacity), max(1, int((seconds - reference_s(0)) / per_layer)))
    sample = layer_sample.choose_layers(summary, room)
    if isinstance(sample, str):
        return ProofPlan((), 0, False, False, 0, 0, reason=sample)
    upload_s = (estimate.load_s or 0) * sample.bytes / summary.size
    computing_devices = [
        _compute_s(summary, prompts, len(sample.layers), device.gb_per_s, device.prompt_gflops)
        for device in estimate.devices
    ]
    outage = START_S + upload_s + max(computing_devices, default=0)
    reference = sample.bytes / 1e9 / cost_model.DISK_GB_PER_S + START_S * 3 + reference_s(len(sample.layers))
    return ProofPlan(*sample, context=context, seconds=math.ceil(reference), outage_s=math.ceil(outage))


def _compute_s(
    summary: ModelSummary, prompts: Sequence[Question], layers: float, gb_per_s: float, gflops: float
) -> float:
    """Return the seconds in which a device answers questions with so many layers."""
    share = layers / summary.layers
    weights = sum(summary.layer_bytes) * share + summary.output_bytes
    tokens = questions.count_tokens(prompts)
    outside = summary.width * summary.vocabulary
    dense_cost, expert_cost = 0.0, 0.0
    for group in summary.named_tensors:
        if group.layers is not None:
            parameters = math.prod(group.shape) * group.how_many * share
            if cost_model.EXPERTS.search(group.name):
                expert_cost += parameters * summary.active_share
            else:
                dense_cost += parameters
    pairs = questions.count_pairs(prompts) * summary.heads * (summary.key_dimension + summary.value_dimension) * layers
    computed_parameters = (
        dense_cost * tokens + outside * len(prompts) + pairs
    ) / RATE_SHARE + expert_cost * tokens / EXPERT_RATE_SHARE
    return len(prompts) * weights / 1e9 / gb_per_s + 2e-9 * computed_parameters / gflops


def with_proof(plan: Plan) -> Plan:
    """Return the finished plan with the ids of what is proven and read."""
    head, proof = plan.head, plan.head.proof
    if head.models:
        heads = [with_proof(model_plan).head for model_plan in plan.per_model()]
        models = [model._replace(proof=entry.proof, reading=entry.reading) for model, entry in zip(head.models, heads)]
        return plan._replace(head=head._replace(proof=heads[0].proof, reading=heads[0].reading, models=tuple(models)))
    if proof and proof.layers:
        sides = [_proof_side(plan, entry) for entry in plan.placement]
        proof = proof._replace(devices=tuple(ProvenDevice(side.id, side.name) for side in sides))
    has_known_answer = plan.model.known_answer or known_answer.is_name(plan.model.name)
    generates = plan.estimate.generation_range is not None and not has_known_answer
    return plan._replace(head=head._replace(proof=proof, reading=_reading_id(plan) if generates else None))


def work_of(plan: Plan) -> ProofWork | None:
    """Return what the head runs to prove the plan of one model; None if there is nothing to prove."""
    proof, head = plan.head.proof, plan.hosts[plan.head.host]
    if not proof or not proof.layers:
        return None
    words = dict(_pairs(plan))
    variants: list[tuple[str, ...]] = [REPACK_OPTION] if plan.release.mainline else []
    if words.get("cache-type-v", ["f16"]) == ["f16"]:
        flash = "on" if words.get("flash-attention") == ["off"] else "off"
        variants.append(tuple(options.render("flash-attention", flash, plan.release.fork)))
    return ProofWork(
        model=plan.model.path,
        layers=proof.layers,
        bytes=proof.bytes,
        folder=head.state,
        account=head.account,
        environment=plan.head.environment,
        launcher=services.with_launcher(plan, "prove", [f"{head.state}/{SOCKET}"]),
        sockets=plan.release.mainline,
        context=proof.context,
        micro_batch=int(*words.get("micro-batch", ["512"])),
        limit_s=math.ceil(LIMIT_TIMES * proof.seconds),
        timeout_s=PATIENCE_S + PATIENCE_TIMES * (proof.seconds + proof.outage_s),
        processor=_proof_side(plan, None),
        variants=tuple(variants),
        devices=tuple(_proof_side(plan, entry) for entry in plan.placement),
        remedies=tuple(_remedies(plan)),
    )


def _proof_side(plan: Plan, entry: DevicePlacement | None) -> Side:
    """Return a device as a side; the head's processor without one."""
    details: Any
    argv = _argv(plan, entry)
    name, details = f"{plan.head.host}'s processor", argv
    if entry:
        workers = [worker for host in plan.hosts.values() for worker in host.workers]
        worker = next((worker for worker in workers if worker.endpoint == entry.endpoint), None)
        rates = [
            (device.gb_per_s, device.prompt_gflops) for device in plan.estimate.devices if device.device == entry.device
        ]
        program = worker and [
            worker.argv[0],
            [
                word
                for pair in options.pairs(worker.argv[1:])
                for word in pair
                if pair[0] not in ("-H", "-p", "--host", "--port")
            ],
            dict(worker.environment),
        ]
        pairs = [
            pair for pair in options.pairs(argv[1:]) if options.name_of(pair[0]) not in ("rpc", "device", "micro-batch")
        ]
        name = f"{entry.host} {entry.worker or entry.device}"
        details = [argv[0], pairs, [entry.host, entry.worker or entry.device, entry.capacity_mib, rates], program]
    return Side(_hash(plan, details), name, argv)


def _hash(plan: Plan, details: Any) -> str:
    """Return an id of the model's file, the layers and something else."""
    files = [(file.name, file.bytes, file.sha256, file.revision) for file in plan.model.files]
    hashed_values = [plan.model.path, plan.model.revision, files, plan.head.proof and plan.head.proof.layers, details]
    hashed_values.append(dict(plan.head.environment))
    return hashlib.sha256(json.dumps(hashed_values, sort_keys=True).encode()).hexdigest()[:16]


def _reading_id(plan: Plan) -> str:
    """Return an id of everything that changes how well the model reads, but not of the release and the devices, which are what is checked."""
    files = [(file.name, file.bytes, file.sha256, file.revision) for file in plan.model.files]
    relevant_options = [pair for pair in _pairs(plan) if pair[0] not in IRRELEVANT_OPTIONS]
    hashed_values = [plan.model.path, plan.model.revision, files, relevant_options]
    return hashlib.sha256(json.dumps(hashed_values, sort_keys=True).encode()).hexdigest()[:16]


def _pairs(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return the options of the planned command line by their names in the table, and their values."""
    return [(options.name_of(word), value) for word, *value in options.pairs(plan.head.argv[1:])]


def _remedies(plan: Plan) -> Iterator[Remedy]:
    """Yield settings that the planned command line does not have. Words that are repeated after it replace its own."""
    planned_words = dict(_pairs(plan))
    for values in REMEDIES:
        settings, words = [], []
        for name, value in values.items():
            option = options.by_name(name)
            if [str(value)] != planned_words.get(name, [*option.silent]):
                settings.append(f"{option.variable}: {value!r}")
                words += [option.spelled(plan.release.fork)[0].words[0], str(value)]
        if words:
            yield Remedy(", ".join(settings), tuple(words))


def _argv(plan: Plan, entry: DevicePlacement | None) -> tuple[str, ...]:
    """Return llama-server on a device; on the processor alone without one, which then repacks no weights, like the processors of workers."""
    fork, (program, *words) = plan.release.fork, plan.head.argv
    pairs = options.pairs(words)
    kept_pairs = [pair for pair in pairs if options.name_of(pair[0]) not in REPLACED_OPTIONS]
    overrides = [
        part for word, *value in pairs if options.name_of(word) == "override-tensor" for part in value[0].split(",")
    ]
    proof = plan.head.proof
    values: Mapping[str, str | Sequence[str]] = {
        "rpc": [entry.endpoint] if entry and entry.endpoint else [],
        "device": llama_server.device_names(fork, [(entry.endpoint, entry.device)]) if entry else "none",
        "gpu-layers": str(len(proof.layers) + 1 if entry and proof else 0),
        "override-tensor": [part for part in overrides if part.endswith("=CPU")] if entry else [],
        "context": str(proof.context if proof else 0),
        "parallel": "1",
        "prompt-cache": "0",
        "repack": "off" if not entry and plan.release.mainline else "",
    }
    settings = [word for name, value in values.items() for word in options.render(name, value, fork)]
    return (program, *settings, *itertools.chain(*kept_pairs))

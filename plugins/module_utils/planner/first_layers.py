# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The proof of the devices by the model's first layers: which layers, what it costs, and what the head runs for it."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import first_layers
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import WorkerPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    DevicePlacement,
    Estimate,
    ExternalWorkerPlan,
    FirstLayersPlan,
    Plan,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import llama_server, server_settings, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host, Model, Server
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import questions
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Remedy, Side, Work

MOST_BYTES, MOST_S = 8 << 30, 300
"""Of the file, and that the head's processor is predicted to compute."""
START_S = 5
"""Of a llama-server."""
PATIENCE_S, TIMES = 300, 5
"""A server may take as long to be healthy, or to answer, and several times as long as the whole proof is predicted to take."""
CONTEXT = 4352
"""For the longest prompt and what follows it, in blocks of 256."""
OTHERWISE = f"""
model host port rpc device gpu-layers tensor-split override-tensor context parallel prompt-cache context-checkpoints sleep api-key-file
tls-certificate tls-key projector projector-offload projector-device adapter {options.SPECULATION} draft draft-device draft-layers draft-tensors
draft-cache-type-k draft-cache-type-v metrics --alias -a --slot-save-path --log-file
""".split()
"""Options that the proof gives itself, or that are of clients and of what is loaded beside the model."""
REMEDIES = (
    {"flash-attention": "off", "cache-type-v": "f16"},
    {"flash-attention": "on"},
    {"cache-type-k": "f16", "cache-type-v": "f16"},
    {"micro-batch": 128},
)
"""Settings with which other kernels compute, in the order in which they are tried. Quantised values need flash attention."""


def of_plan(
    model: Model, server: Server, placed: device_load.Placed, head: Host, predicted: Estimate
) -> FirstLayersPlan | None:
    """What fits on each device, and into the memory of the head; None where there is nothing to prove, or not one layer fits.

    :param predicted: of the whole model.
    """
    if model.known_answer or not placed.devices or not server_settings.generates(server, model.summary):
        return None
    summary, count = model.summary, len(placed.devices)
    room = min([device.capacity_mib for device in placed.devices] + [head.facts.memory_mib]) * MIB // 2
    whole = 2e-9 * (summary.parameters or 0) * cost_model.active_share(summary) * questions.computed()
    whole_s = whole / cost_model.processor_rate(head.facts).prompt_gflops
    layers = max(1, int(MOST_S * summary.layers / max(whole_s, 1.0)))
    chosen = first_layers.choose(summary, count, min(MOST_BYTES, room), layers)
    if not chosen:
        return None
    share = min(1.0, chosen.bytes / summary.size)
    written = chosen.bytes / 1e9 / cost_model.DISK_GB_PER_S
    loads = 1 if chosen.layers >= count else count  # of all together, or of each alone
    of_devices = START_S + share * (predicted.load_s or 0)
    of_devices += sum(share * whole / one.prompt_gflops for one in predicted.devices) / count
    return FirstLayersPlan(*chosen, seconds=math.ceil(written + START_S + share * whole_s + loads * of_devices))


def work_of(plan: Plan) -> Work | None:
    """Of the plan of one model; None where there is nothing to prove."""
    first, head = plan.head.first_layers, plan.hosts[plan.head.host]
    if not first:
        return None
    workers: list[WorkerPlan | ExternalWorkerPlan] = [one for host in plan.hosts.values() for one in host.workers]
    processors = {one.endpoint for one in [*workers, *plan.external_workers] if one.backend == backends.CPU.name}

    def side(name: str, *entries: DevicePlacement) -> Side:
        return Side(name, _argv(plan, entries, first.layers), {one.endpoint for one in entries} <= processors)

    work = Work(
        id="0" * 16,
        model=plan.model.path,
        layers=first.layers,
        bytes=first.bytes,
        folder=head.state,
        account=head.account,
        environment=plan.head.environment,
        client=services.behind_tunnels(plan, ()),
        context=min(CONTEXT, plan.head.context_per_request),
        patience=PATIENCE_S + TIMES * first.seconds,
        processor=side(f"{plan.head.host}'s processor"),
        together=side("the chain of devices", *plan.placement) if first.layers >= len(plan.placement) > 1 else None,
        devices=tuple(side(f"{one.host} {one.worker or one.device}", one) for one in plan.placement),
        remedies=tuple(_remedies(plan)),
    )
    whole = [typed_json.dump(work._replace(patience=1, folder="/")), plan.model.revision]
    whole += [(file.name, file.bytes, file.sha256, file.revision) for file in plan.model.files]
    whole += [(one.host, one.device, one.capacity_mib) for one in plan.placement]
    whole += [(one.device, one.gb_per_s, one.prompt_gflops) for one in plan.estimate.devices]
    whole += [(one.argv, dict(one.environment)) for host in plan.hosts.values() for one in host.workers if one.used]
    return work._replace(id=hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16])


def _remedies(plan: Plan) -> Iterator[Remedy]:
    """What is said again after the planned command line counts."""
    given = {_name_of(word): value for word, *value in options.pairs(plan.head.argv[1:])}
    for values in REMEDIES:
        settings, words = [], []
        for name, value in values.items():
            option = options.by_name(name)
            if [str(value)] != given.get(name, [*option.silent]):
                settings.append(f"{option.variable}: {value!r}")
                words += [option.spelled(plan.release.fork)[0].words[0], str(value)]
        if words:
            yield Remedy(", ".join(settings), tuple(words))


def _argv(plan: Plan, entries: Sequence[DevicePlacement], layers: int) -> tuple[str, ...]:
    """llama-server on these devices, with one share of the layers on each and the output on the last; on the processor alone where there are none."""
    fork, (program, *words) = plan.release.fork, plan.head.argv
    pairs = options.pairs(words)
    kept = [pair for pair in pairs if _name_of(pair[0]) not in OTHERWISE]
    overrides = [one for word, *said in pairs if _name_of(word) == "override-tensor" for one in said[0].split(",")]
    shares = [layers // len(entries) + (index < layers % len(entries)) for index in range(len(entries))]
    shares[-1:] = [share + 1 for share in shares[-1:]]
    values: Mapping[str, str | Sequence[str]] = {
        "rpc": [entry.endpoint for entry in entries if entry.endpoint],
        "device": llama_server.device_names(fork, [(entry.endpoint, entry.device) for entry in entries]) or "none",
        "host": LOOPBACK,
        "gpu-layers": str(layers + 1 if entries else 0),
        "tensor-split": [str(share) for share in shares] if len(shares) > 1 else [],
        "override-tensor": [one for one in overrides if one.endswith("=CPU")] if entries else [],
        "context": str(min(CONTEXT, plan.head.context_per_request)),
        "parallel": "1",
        "prompt-cache": "0",
    }
    own = [word for name, value in values.items() for word in options.render(name, value, fork)]
    return (program, *own, *itertools.chain(*kept))


def _name_of(word: str) -> str:
    """Of an option that the table does not have it is the word itself."""
    option = options.by_word(word)
    return option.name if option else options.normalize(word)

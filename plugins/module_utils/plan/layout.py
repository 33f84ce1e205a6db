# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which devices hold which part of the model, and why it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import head as heads
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import placement, workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.placement import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Device, Facts, Model, Release, Server


def lay_out(
    server: Server,
    mode: str | None,
    model: Model,
    release: Release,
    devices: Sequence[Device],
    name: str,
    facts: Facts,
) -> placement.Placed:
    """The devices that are used and what they get.

    :param mode: ``llama_placement``.
    :param devices: those of workers, then the head's own.
    :param name: of the head.
    :param facts: of the head.
    """
    overrides = heads.overrides_of(server, [placement.CPU, *(device.buffer for device in devices)])
    if overrides and "tensors" not in model.summary:
        raise Refusal(
            "llama_server_override_tensor is set, but the summary of the model has no tensor names: create it again with gguf_info"
        )
    settings = heads.settings_of(server, model.summary)
    load = placement.Load(model.summary, settings, release.generation, overrides)
    gpu_layers = load.units if server.gpu_layers is None else min(server.gpu_layers, load.units)
    if not devices or not gpu_layers:
        return placement.Placed((), (), load, 0, _over_without_devices(name, facts, load))
    first = load.units - gpu_layers
    used, split = _choose(server, mode or ("all" if model.known_answer else "fewest"), devices, load, first)
    if release.capabilities["device_name"] is None:
        used, split = _own_first(used, split, devices)
    connections = sum(device.worker is not None for device in used)
    if connections > capabilities.MAX_ENDPOINTS:
        raise Refusal(
            f"the plan needs {connections} workers, but llama.cpp connects to {capabilities.MAX_ENDPOINTS} at most: use fewer, larger ones"
        )
    room = [_left(load, device) for device in used]
    placed = placement.Placed(tuple(used), split or placement.distribute(load, room, first), load, gpu_layers)
    asked = bool(split) or placement.fits(load, first, room)
    on_head = _over_on_head(name, facts, load, first) if first or overrides else ()
    return placed._replace(reasons=(*on_head, *_over_on_devices(placed, asked)))


def _over_without_devices(name: str, facts: Facts, load: placement.Load) -> tuple[str, ...]:
    """A sentence if the whole model does not fit into the head's memory."""
    missing = -(-sum(load.of(0, load.units)) // MIB) - _room_on_head(facts)
    if missing <= 0:
        return ()
    return (f"the model does not fit into the memory of {name}: {missing} MiB are missing; add a worker",)


def _room_on_head(facts: Facts) -> int:
    return facts.memory_mib - workers.reserve_mib(facts.memory_mib, shared=True)


def _over_on_head(name: str, facts: Facts, load: placement.Load, first: int) -> tuple[str, ...]:
    """A sentence if the layers before ``first`` do not fit into the head's memory."""
    weights, kv = load.on_head(range(first)), sum(load.kv[:first])
    missing = -(-(weights + kv) // MIB) - _room_on_head(facts)
    if missing <= 0:
        return ()
    return (
        f"llama_server_gpu_layers and llama_server_override_tensor leave {first} layers and {weights // MIB} MiB of weights on the head, but "
        f"{missing} MiB are missing in the memory of {name}: keep less there",
    )


def _over_on_devices(placed: placement.Placed, asked: bool) -> list[str]:
    """What is missing where.

    :param asked: whether the operator's own shares are the reason, since the model would fit.
    """
    over = placed.over()
    if asked:
        return [
            f"llama_server_tensor_split or llama_server_override_tensor is too much for {device.label}: {missing} MiB are missing, "
            f"and it holds {device.capacity_mib} MiB; give it a smaller share"
            for device, missing in over
        ]
    return [
        f"the model does not fit: {sum(missing for _device, missing in over)} MiB are missing, "
        + ", ".join(f"{missing} on {device.label}, which holds {device.capacity_mib}" for device, missing in over)
        + ": add a worker, or choose a smaller model"
    ]


def _choose(
    server: Server, mode: str, devices: Sequence[Device], load: placement.Load, first: int
) -> tuple[list[Device], list[float]]:
    """The devices that get units, and the operator's split between them if there is one.

    :param first: the first unit that is not on the head's processor.
    """
    split = list(server.tensor_split)
    if split:
        if len(split) != len(devices) or min(split) < 0 or not any(split):
            raise Refusal(
                f"llama_server_tensor_split is {split}: give a share, 0 or more, for each of the {len(devices)} devices in their order: "
                + ", ".join(device.label for device in devices)
            )
        kept = [(device, share) for device, share in zip(devices, split) if share or load.fixed(device.buffer)]
        return [device for device, _share in kept], [share for _device, share in kept]
    if mode == "all":
        return list(devices), []
    lent = [device for device in devices if device.worker]
    own = [device for device in devices if not device.worker]
    others, mine = placement.fewest(
        load, [_left(load, device) for device in lent], [_left(load, device) for device in own], first
    )
    chosen = {*(lent[index].buffer for index in others), *(own[index].buffer for index in mine)}
    return [device for device in devices if device.buffer in chosen or load.fixed(device.buffer)], []


def _left(load: placement.Load, device: Device) -> int:
    """Bytes that a device has for units."""
    return max(0, device.capacity_mib * MIB - load.fixed(device.buffer))


def _own_first(used: list[Device], split: list[float], devices: Sequence[Device]) -> tuple[list[Device], list[float]]:
    """Devices and their shares for a llama-server that cannot be told which to use: it puts all of the head's own before the workers,
    those with nothing have a share of 0."""
    shares = {device.buffer: share for device, share in zip(used, split)}
    own = [device for device in devices if not device.worker]
    ordered = [*own, *(device for device in used if device.worker)]
    return ordered, [shares.get(device.buffer, 0) for device in ordered] if split else []


def as_json(placed: placement.Placed, as_planned: bool, load_mode: str | None) -> list[dict[str, Any]]:
    """What the plan says of each device.

    :param as_planned: whether nothing that the operator adds changes what devices hold.
    :param load_mode: ``llama_server_load_mode``.
    """
    load = placed.load
    entries = []
    for device, share in zip(placed.devices, placed.shares()):
        sizes = {"weights": share.weights, "kv": share.kv, "compute": load.compute}
        sizes["total"] = sum(sizes.values())
        mapped = (
            backends.RECORDS[device.backend].maps_weights and not device.worker and load_mode not in ("none", "mlock")
        )
        exact = {"weights_mib": load.weights_exact and not mapped, "kv_mib": load.kv_exact}
        entries.append(
            {
                "device": device.buffer,
                "host": device.host,
                "worker": device.worker.name if device.worker else None,
                "endpoint": device.endpoint,
                "layers": share.layers,
                "output": share.output,
                **{f"{kind}_mib": round(size / MIB, 2) for kind, size in sizes.items()},
                "capacity_mib": device.capacity_mib,
                "exact": [size for size, sure in exact.items() if sure and as_planned],
            }
        )
    return entries

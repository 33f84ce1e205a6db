# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which devices hold which part of the model, and why it does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import DevicePlacement, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    auxiliary_models,
    cost_model,
    device_load,
    estimate,
    solver,
    workers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.devices import shares_memory
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device, Host, Model, Server

ALL, FASTEST = "all", "fastest"
"""Values of ``llama_placement``: every device is used, or those with which a token takes the least time."""


class DeviceCost(NamedTuple):
    """What a device's part of a token costs, in milliseconds; the last two are 0 of the head's own devices."""

    rate: cost_model.Rate
    worker: float = 0.0
    """For using the worker that lends it."""
    visit: float = 0.0
    """For each further time that a token comes to it."""


def device_costs(devices: Sequence[Device], hosts: Mapping[str, Host], architecture: str) -> dict[str, DeviceCost]:
    """Device, as the log names it → its cost.

    :param architecture: of the model.
    """
    costs_of = {}
    for device in devices:
        cost = DeviceCost(cost_model.rate_of(device, hosts[device.host].facts, architecture))
        if device.endpoint:
            link = estimate.link_of(device.wire, hosts[device.host], hosts)
            once = cost_model.worker_ms(link)
            cost = cost._replace(worker=once, visit=cost_model.worker_ms(link, visits=2) - once)
        costs_of[device.buffer] = cost
    return costs_of


class Case(NamedTuple):
    """What is to be placed, and where it may be."""

    server: Server
    mode: str | None
    """``llama_placement``."""
    model: Model
    release: ReleasePlan
    devices: Sequence[Device]
    """Those of workers, then the head's own."""
    head: str
    """Its name."""
    hosts: Mapping[str, Host]

    @property
    def facts(self) -> Facts:
        """Of the head."""
        return self.hosts[self.head].facts


def lay_out(case: Case) -> device_load.Placed:
    """The devices that are used and what they get. Models beside the one that is served get the first place with which all fits."""
    own = [device for device in case.devices if not device.worker]
    own.sort(key=lambda device: -cost_model.rate_of(device, case.facts).gb_per_s)
    places = list(auxiliary_models.candidate_places(case.model, case.server, case.release, own))
    whole, tried = {device.buffer: device for device in case.devices}, []
    taken = (case.server.prompt_cache_mib or 0) * MIB
    for held, reserved in [
        *zip(places, places),
        *((held, auxiliary_models.without_buffers(held)) for held in places if held),
    ]:
        left = auxiliary_models.remaining_capacity(case.devices, reserved)
        if left is None:
            continue
        placed = _of_the_model(case._replace(devices=left), auxiliary_models.in_memory(reserved) + taken)
        placed = placed._replace(devices=tuple(whole[device.buffer] for device in placed.devices), auxiliary=held)
        if not placed.reasons:
            return placed
        tried.append(placed)
    best = min(tried, key=lambda placed: placed.missing_mib)
    return best._replace(reasons=(*best.reasons, *auxiliary_models.sentences(best.auxiliary, case.head)))


def alone(case: Case, priced: estimate.Case) -> dict[str, list[device_load.Placed]]:
    """Host → the ways in which it holds the model without others: with as many layers on its devices as they hold, and on its processor. Of hosts
    that are alike the first stands for all. Devices leave room for the bound of the compute buffer, which they need not where it is too large
    for those of the plan, too."""
    server = case.server._replace(tensor_split=(), override_tensor=(), gpu_layers=None)
    bound = -(-priced.placed.load.compute // MIB)
    held = zip(priced.placed.devices, priced.placed.shares())
    tight = any(share.weights + share.kv > (device.capacity_mib - bound) * MIB for device, share in held)
    found: dict[str, list[device_load.Placed]] = {}
    seen = []
    for name, host in priced.hosts.items():
        alike = (host.is_head, host.facts.memory_mib, host.facts.cpu, host.facts.accelerators)
        if alike in seen:
            continue
        seen.append(alike)
        own = priced.own_devices(host)
        bounded = [device._replace(capacity_mib=max(0, device.capacity_mib - bound)) for device in own]
        of_host = case._replace(server=server, mode=FASTEST, head=name, hosts={name: host}, devices=())
        ways = [lay_out(of_host)]
        if own:
            whole = lay_out(of_host._replace(devices=own if tight else bounded))
            ways.append(_with_most_layers(of_host._replace(devices=bounded)) if whole.reasons else whole)
        found[name] = [placed for placed in ways if not placed.reasons]
    return {name: ways for name, ways in found.items() if ways}


def _with_most_layers(case: Case) -> device_load.Placed:
    """The placement with as many units on devices as they hold."""
    placed = lay_out(case._replace(server=case.server._replace(gpu_layers=0)))
    least, most = 0, placed.load.units
    while most - least > 1:
        middle = (least + most) // 2
        tried = lay_out(case._replace(server=case.server._replace(gpu_layers=middle)))
        least, most = (least, middle) if tried.reasons else (middle, most)
        placed = placed if tried.reasons else tried
    return placed


def _of_the_model(case: Case, beside: int) -> device_load.Placed:
    """The same of the model that is served.

    :param beside: bytes of the head's memory that models beside this one take, and conversations that are kept there.
    """
    server, model, devices = case.server, case.model, case.devices
    overrides = server_settings.overrides_of(server, [device_load.CPU, *(device.buffer for device in devices)])
    if overrides and model.summary.tensors is None:
        raise Refusal(
            "llama_server_override_tensor is set, but the summary of the model has no tensor names: create it again with model_info"
        )
    settings = server_settings.settings_of(server, model.summary, case.release.fork)
    load = device_load.load_of(model.summary, settings, case.release.build, tuple(overrides))
    gpu_layers = load.units if server.gpu_layers is None else min(server.gpu_layers, load.units)
    taken = beside + sum(load.kv) - sum(load.device_kv)
    if not devices or not gpu_layers:
        missing = _missing_on_head(case.facts, load, load.units, beside)
        text = f"the model does not fit into the memory of {case.head}: {missing} MiB are missing; add a worker"
        return device_load.Placed((), (), load, 0, (text,) if missing else (), missing_mib=missing)
    first = load.units - gpu_layers
    spare = workers.reserve_mib(case.facts.memory_mib, shared=True) * MIB // 2
    layers_on_processor = load.kv_on_head(first) - load.kv_on_head(0)
    tables = max(0, load.on_head(range(first)) - spare)
    devices = auxiliary_models.beside_memory(devices, tables + layers_on_processor + taken, case.head, case.facts)
    every = case.mode == ALL or (case.mode is None and model.known_answer is not None)
    if server.tensor_split:
        placed, fits = _as_asked(server.tensor_split, devices, load, gpu_layers), True
    else:
        candidates = _candidates(
            load, first, devices, device_costs(devices, case.hosts, case.model.summary.architecture)
        )
        placed, fits = _fastest(_ordered(candidates, load), load, first, every)
    _check_number(placed.devices, bool(server.tensor_split))
    # auto maps nothing where a device of the head shares its memory
    copies = any(not device.worker and shares_memory(device, case.facts) for device in devices)
    mapped = server.load_mode == "mmap" or (server.load_mode in (None, "auto") and not copies)
    missing = _missing_on_head(case.facts, load, first, beside, mapped)
    over, stays = placed.over(), bool(first or overrides)
    cache = server.prompt_cache_mib or 0
    reasons = [*_over_on_head(case.head, load, first, missing, stays, cache), *_over_on_devices(over, fits)]
    return placed._replace(
        reasons=(
            *reasons,
            *(_without_tensors(overrides, load) if reasons else ()),
        ),
        missing_mib=missing + sum(mib for _device, mib in over),
    )


def _as_asked(
    split: Sequence[float], devices: Sequence[Device], load: device_load.Load, gpu_layers: int
) -> device_load.Placed:
    """The operator's own split between the devices that have a share or tensors of overrides."""
    if len(split) != len(devices) or min(split) < 0 or not any(split):
        raise Refusal(
            f"llama_server_tensor_split is {list(split)}: give a share, 0 or more, for each of the {len(devices)} devices in their order: "
            + ", ".join(device.label for device in devices)
        )
    used = [pair for pair in zip(devices, split) if pair[1] or load.fixed(pair[0].buffer, pair[0].backend)]
    return device_load.Placed(
        tuple(device for device, _share in used),
        tuple(share for _device, share in used),
        load,
        gpu_layers,
        why=("llama_server_tensor_split",) * len(used),
    )


class Candidate(NamedTuple):
    """A device with what it costs there."""

    device: Device
    cost: DeviceCost
    place: solver.Place

    @property
    def is_needed(self) -> bool:
        """Whether llama-server uses it without units of its own, too."""
        return bool(self.place.fixed)


def _candidates(
    load: device_load.Load, first: int, devices: Sequence[Device], costs_of: Mapping[str, DeviceCost]
) -> list[Candidate]:
    """The devices as the solver needs them. Those that are alike cost the same, also where one is the head's and one a worker's: which
    layers it gets then follows from the room, and whether it gets any from what its worker costs."""
    read, nodes = cost_model.units_read(load), cost_model.nodes_per_layer(load.summary)
    each = [costs_of[device.buffer] for device in devices]
    whole = [cost_model.generation_ms(cost.rate, sum(read), nodes * load.layers) for cost in each]
    groups = solver.groups_of([1 / ms for ms in whole])
    costs: dict[int, list[int]] = {}
    for group in set(groups):
        members = [index for index, other in enumerate(groups) if other == group]
        rate = each[min(members, key=lambda index: whole[index])].rate
        ms = [cost_model.generation_ms(rate, size, nodes) for size in read[: load.layers]]
        ms += [cost_model.generation_ms(rate, size, 0) for size in read[load.layers :]]
        costs[group] = [solver.cost_of(time) for time in ms]
    visits = {buffer: solver.cost_of(cost.visit) for buffer, cost in costs_of.items()}
    return [
        Candidate(device, cost, _place(load, first, device, cost, costs[group], visits, group))
        for device, cost, group in zip(devices, each, groups)
    ]


def _place(
    load: device_load.Load,
    first: int,
    device: Device,
    cost: DeviceCost,
    costs: Sequence[int],
    visits: Mapping[str, int],
    group: int,
) -> solver.Place:
    """:param costs: of each unit on this device, for itself.
    :param visits: device → what it costs to go there and back once more.
    """
    fixed, here = load.fixed(device.buffer, device.backend), device.buffer
    own = list(costs)
    for unit, others in load.moved.items():
        for other in others - {here}:
            own[unit] += visits[here] + visits.get(other, 0) + (solver.MOVE if other != device_load.CPU else 0)
    base = solver.cost_of(cost.worker) + solver.DEVICE + (solver.WORKER if device.worker else 0)
    return solver.Place(
        capacity=device.capacity_mib * MIB,
        fixed=fixed,
        compute=load.compute_on(device, first),
        sizes=load.sizes(device.backend),
        cost=solver.prefix_sums(own),
        base=0 if fixed else base,
        group=group,
    )


def _ordered(candidates: Sequence[Candidate], load: device_load.Load) -> list[Candidate]:
    """The devices in the order in which llama-server takes layers: workers and then the head's own, each with the fastest last, which so gets
    the output, whose result then need not cross the network. With overrides devices have the order of the layers that are there."""
    by_speed = sorted(candidates, key=lambda candidate: (candidate.device.worker is None, -candidate.place.group))
    layers: dict[str, list[int]] = {}
    for unit, devices in load.moved.items():
        for buffer in devices:
            layers.setdefault(buffer, []).append(unit)
    middle = {buffer: sum(units) / len(units) for buffer, units in layers.items()}
    return sorted(by_speed, key=lambda candidate: middle.get(candidate.device.buffer, load.units))


def _solved(
    candidates: Sequence[Candidate], first: int, every: bool
) -> tuple[Sequence[Candidate], Sequence[int] | None]:
    """The devices and the units of each; of more than llama.cpp schedules over, those with the most memory. ``every`` as of ``_fastest``."""

    def units_of(some: Sequence[Candidate]) -> Sequence[int] | None:
        return solver.solve([one.place._replace(base=one.place.base - solver.MUST * every) for one in some], first)

    units = units_of(candidates)
    used = [one for one, count in zip(candidates, units or ()) if count or one.is_needed]
    if len(candidates) <= capabilities.MAX_DEVICES or (units and len(used) <= capabilities.MAX_DEVICES):
        return candidates, units
    wanted = sorted(
        candidates, key=lambda one: (one.is_needed, one.device.worker is None, one.place.capacity, -one.place.group)
    )[-capabilities.MAX_DEVICES :]
    kept = [one for one in candidates if one in wanted]
    return kept, units_of(kept)


def _fastest(
    candidates: Sequence[Candidate], load: device_load.Load, first: int, every: bool
) -> tuple[device_load.Placed, bool]:
    """The placement of the fewest seconds, and whether the model fits; where not, the shares are those of the capacities.

    :param every: whether every device gets layers, as far as there are enough.
    """
    candidates, units = _solved(candidates, first, every)
    places, gpu_layers = [candidate.place for candidate in candidates], load.units - first
    if units is None:
        room = [max(0, place.capacity - place.fixed) for place in places]
        devices, shares = (
            tuple(candidate.device for candidate in candidates),
            tuple(device_load.proportional(gpu_layers, room)),
        )
        return device_load.Placed(
            devices, shares, load, gpu_layers, why=("the model does not fit",) * len(shares)
        ), False
    device_load.check(load, gpu_layers, units)
    why = _why(candidates, units, every)
    kept = [index for index, candidate in enumerate(candidates) if units[index] or candidate.is_needed]
    placed = device_load.Placed(
        tuple(candidates[index].device for index in kept),
        tuple(units[index] for index in kept),
        load,
        gpu_layers,
        why=tuple(why[index] for index in kept),
    )
    return placed, True


def _why(candidates: Sequence[Candidate], units: Sequence[int], every: bool) -> list[str]:
    sentences = []
    for candidate, count in zip(candidates, units):
        rate = candidate.cost.rate
        alike = [
            one.place.capacity
            for one, own in zip(candidates, units)
            if own and one.place.group == candidate.place.group
        ]
        how = "evenly" if alike and min(alike) >= solver.ALIKE * max(alike) else "by their memory"
        even = f", shared {how}" if count and len(alike) > 1 else ""
        words = _words(candidate, count, candidates, units, every)
        sentences.append(f"{rate.gb_per_s:g} GB/s ({rate.source}), {words}{even}")
    return sentences


def _words(candidate: Candidate, count: int, candidates: Sequence[Candidate], units: Sequence[int], every: bool) -> str:
    group, places = candidate.place.group, [one.place for one in candidates]
    if not count:
        return "what llama_server_override_tensor puts there" if candidate.place.fixed else "nothing"
    faster = any(own for place, own in zip(places, units) if place.group < group)
    slower = max((own for place, own in zip(places, units) if place.group > group), default=0)
    if faster:
        alone = every and count == 1
        return "one layer, since every device is used" if alone else "what has no room in faster memory"
    if slower:
        most = every and slower == 1
        return "the most, since the rest is slower" if most else "as much as it has room for, since the rest is slower"
    unused = [place for place in places if place.group < group]
    if any(place.holds_a_unit() for place in unused):
        return "faster devices would cost more than they save"
    return (
        "the fastest memory that has room" if unused else "the fastest memory" if len(places) > 1 else "the only device"
    )


def _check_number(used: Sequence[Device], asked: bool) -> None:
    """Refuses more devices than llama.cpp schedules over (GGML_SCHED_MAX_BACKENDS, and the longest ``-ts``); it would end with an assertion.

    :param asked: whether the operator gives each device its share.
    """
    if len(used) <= capabilities.MAX_DEVICES:
        return
    lent = sum(device.worker is not None for device in used)
    remedy = "name fewer of them in llama_server_override_tensor"
    if asked:
        remedy = "give 0 in llama_server_tensor_split to those that can be left out"
    raise Refusal(
        f"the plan needs {len(used)} devices ({lent} of workers, {len(used) - lent} of the head), but llama.cpp uses {capabilities.MAX_DEVICES} at most "
        f"beside the head's processor: {remedy}"
    )


def _missing_on_head(facts: Facts, load: device_load.Load, first: int, beside: int, mapped: bool = False) -> int:
    """MiB that are missing in the head's memory for the layers before ``first`` and so many bytes beside them, 0 where they fit.

    :param mapped: whether the layers are pages of the model's file, of which the kernel drops some where the system needs more than half of its reserve.
    """
    held = load.on_head(range(first)) + load.kv_on_head(first) + beside
    reserve = workers.reserve_mib(facts.memory_mib, shared=True)
    left = max(workers.reserve_mib(0, shared=True), reserve // 2) if mapped else reserve
    return max(0, -(-held // MIB) - max(0, facts.memory_mib - left))


def _over_on_head(
    name: str, load: device_load.Load, first: int, missing: int, stays: bool, cache: int
) -> tuple[str, ...]:
    """A sentence if the layers before ``first`` do not fit into the head's memory.

    :param stays: whether the operator leaves any of the model there.
    :param cache: MiB that the operator gives to conversations there.
    """
    if not missing:
        return ()
    if not stays:
        tables = f", which keeps {load.on_head() // MIB} MiB of the model's tables"
        cached = sum(load.kv) - sum(load.device_kv)
        tables += f", {cached // MIB} MiB of KV cache by --no-kv-offload" if cached else ""
        smaller = f" and {cache} MiB of llama_server_prompt_cache_mib: make that smaller, or" if cache else ":"
        return (f"{missing} MiB are missing in the memory of {name}{tables}{smaller} choose a head with more memory",)
    return (
        f"llama_server_gpu_layers and llama_server_override_tensor leave {first} layers and {load.on_head(range(first)) // MIB} MiB of weights on "
        f"the head, but {missing} MiB are missing in the memory of {name}: keep less there",
    )


def _without_tensors(overrides: Sequence[tuple[str, str]], load: device_load.Load) -> list[str]:
    """Overrides that move nothing, which may be why the model does not fit."""
    names = {part.name for part in load.parts}
    return [
        f"llama_server_override_tensor has {f'{pattern}={device}'!r}, and no tensor of the model has such a name: correct or remove it"
        for pattern, device in overrides
        if not any(re.search(pattern, name) for name in names)
    ]


def _over_on_devices(over: Sequence[tuple[Device, int]], asked: bool) -> list[str]:
    """What is missing where.

    :param asked: whether the operator's own shares are the reason, since the model would fit.
    """
    if asked:
        return [
            f"llama_server_tensor_split or llama_server_override_tensor is too much for {device.label}: {missing} MiB are missing, "
            f"and it holds {device.capacity_mib} MiB; give it a smaller share"
            for device, missing in over
        ]
    empty = list(dict.fromkeys(device.host for device, _missing in over if device.endpoint and not device.capacity_mib))
    kept = f"; all memory of {', '.join(empty)} is kept for the system: memory_mib in llama_worker_endpoints says what a worker there may hold"
    return [
        f"the model does not fit: {sum(missing for _device, missing in over)} MiB are missing, "
        + ", ".join(f"{missing} on {device.label}, which holds {device.capacity_mib}" for device, missing in over)
        + ": add a worker, or choose a smaller model"
        + (kept if empty else "")
    ]


def as_plan(
    placed: device_load.Placed, as_planned: bool, load_mode: str | None, without: Sequence[str]
) -> tuple[DevicePlacement, ...]:
    """What the plan says of each device.

    :param as_planned: whether nothing that the operator adds changes what devices hold.
    :param without: what llama-server loads too and is not counted.
    """
    load = placed.load
    entries = []
    for device, share, why in zip(placed.devices, placed.shares(), placed.why):
        beside, compute = auxiliary_models.on_device(placed.auxiliary, device), placed.compute_on(device)
        mapped = (
            backends.RECORDS[device.backend].maps_weights and not device.worker and load_mode not in ("none", "mlock")
        )
        unknown = device.worker is not None and device.worker.external
        exact = {"weights_mib": load.weights_exact and not mapped and not unknown, "kv_mib": load.kv_exact}
        entries.append(
            DevicePlacement(
                device=device.buffer,
                host=device.host,
                worker=device.worker.name if device.worker else None,
                endpoint=device.endpoint,
                layers=share.layers,
                output=share.output,
                weights_mib=round(share.weights / MIB, 2),
                kv_mib=round(share.kv / MIB, 2),
                compute_mib=round(compute / MIB, 2),
                auxiliary_mib=round(beside / MIB, 2),
                total_mib=round((share.weights + share.kv + compute + beside) / MIB, 2),
                capacity_mib=device.capacity_mib,
                reason=why,
                exact=tuple(size for size, sure in exact.items() if sure and as_planned and not beside),
                without=tuple(without),
            )
        )
    return tuple(entries)

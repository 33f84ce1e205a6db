# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast the plan is: tokens per second, seconds to load, what limits them, and the same of the best of its hosts alone."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import STUNNEL, WIREGUARD, is_loopback
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    DeviceEstimate,
    DiskEstimate,
    Estimate,
    LinkEstimate,
    SingleHostEstimate,
    SpeedRange,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Interface, MeasuredLink
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    cost_model,
    device_load,
    devices,
    workers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device, Host, Release, Server

NAMES = {
    "thunderbolt": "thunderbolt",
    "ib": "infiniband",
    "wl": "wireless",
    "wg": "wireguard",
    "tailscale": "wireguard",
    "zt": "tunnel",
}
"""How the name of an interface begins → kind of its link, where neither the operator nor the host says it; all others are Ethernet."""
LEAST_FIGURE = 0.001
"""Of a link: what is less was not measured."""
IN_A_LAYER = re.compile(r"blk\.(\d+)\.")


def kind_of(endpoint: str, links: Sequence[LinkPlan], interfaces: Sequence[Interface] = ()) -> str:
    """Kind of the link over which the head reaches a worker, a key of speed.LINKS."""
    address = endpoint.rsplit(":", 1)[0]
    if is_loopback(address):
        return "loopback"
    own = [link for link in links if link.address.split("/", maxsplit=1)[0] == address]
    names = {link.interface for link in own}
    known = [link.kind for link in own if link.kind]
    known += [interface.kind for interface in interfaces if address in interface.addresses or interface.name in names]
    known += [kind for link in own for start, kind in NAMES.items() if (link.interface or "").startswith(start)]
    return next(iter(known), "ethernet")


def link_of(endpoint: str, host: Host, hosts: Mapping[str, Host]) -> cost_model.Link:
    """How the head reaches a worker of this host, as it was measured or as it is assumed for the kind of its link."""
    kind = kind_of(endpoint, host.links, host.facts.interfaces)
    if kind == "loopback" and not host.is_head:
        kind = "tunnel"
    facts = next((other.facts for other in hosts.values() if other.is_head), host.facts)
    found = (facts.measured.get(host.name) if kind != "loopback" else None) or MeasuredLink()
    round_trip, mbit = (figure if figure and figure >= LEAST_FIGURE else None for figure in found)
    assumed = _assumed(kind, host)
    gbit = host.facts.link_gbit_per_s if kind != "loopback" else None
    gbit = mbit / 1000 if mbit else gbit or assumed.gbit
    encrypted = host.transport == STUNNEL and kind not in ("loopback", "tunnel")
    return cost_model.Link(
        kind,
        (round_trip or assumed.round_trip_ms) + encrypted * cost_model.STUNNEL_MS,
        min(gbit, cost_model.STUNNEL_GBIT) if encrypted else gbit,
        bool(round_trip),
        cost_model.is_board(host.facts),
        host.facts.system == "Darwin",
        host.visit_ms,
        gbit if encrypted and cost_model.stunnel_limits(gbit) else None,
    )


def _assumed(kind: str, host: Host) -> cost_model.Link:
    """Of the run's own WireGuard: of the link beneath it, at the address that its one peer reaches."""
    peer = next((peer for link in host.links if kind == WIREGUARD for peer in link.peers or ()), None)
    if not peer:
        return cost_model.LINKS[kind]
    beneath = cost_model.LINKS[kind_of(f"{peer.local}:0", host.links, host.facts.interfaces)]
    slower = beneath.round_trip_ms + cost_model.WIREGUARD_MS
    return beneath._replace(round_trip_ms=slower, gbit=min(beneath.gbit, cost_model.WIREGUARD_GBIT))


class Case(NamedTuple):
    """What is estimated."""

    release: Release
    placed: device_load.Placed
    summary: ModelSummary
    head: str
    hosts: Mapping[str, Host]
    """Those that the collection manages."""
    places: Mapping[str, Host]
    """All hosts with devices, also those of external workers."""
    fits: bool
    backends_of: Mapping[str, Sequence[str]]
    """Host → the backend by which it would serve, then those whose workers it would use."""
    server: Server

    def own_devices(self, host: Host) -> list[Device]:
        """Those that this host would use if it served alone: its llama-server's, then those that it would lend to itself."""
        own: list[Device] = []
        for backend in self.backends_of[host.name]:
            server = self.server if host.is_head and not own else None
            own += devices.of_single_host(host, backend, server, [device.name for device in own])
        return own


class _Share(NamedTuple):
    """What a device has of the model. Numbers are those of cost_model.Work."""

    read: float
    weights: int
    multiplied: float
    quantised: float
    nodes: float
    visits: int


@functools.lru_cache(maxsize=64)
def _shares(
    load: device_load.Load, gpu_layers: int, split: tuple[float, ...], buffers: tuple[str, ...]
) -> dict[int | None, _Share]:
    """What each device has, by its place among those that are used; None is the head's processor."""
    names = {buffer: index for index, buffer in enumerate(buffers)}
    owners = device_load.assign(load.layers, gpu_layers, split if buffers else ())
    shares = {index: _Share(0, 0, 0, 0, 0, 0) for index in (None, *names.values())}
    beside: list[list[int | None]] = [[] for _unit in range(load.units)]
    for part, cost in zip(load.parts, cost_model.part_costs(load)):
        layer = IN_A_LAYER.match(part.name)
        if part.unit is None and not part.device and not layer:
            continue
        owner = names[part.device] if part.device in names else None if part.unit is None else owners[part.unit]
        share = shares[owner]
        shares[owner] = share._replace(
            read=share.read + cost.read,
            weights=share.weights + part.bytes,
            multiplied=share.multiplied + cost.multiplied,
            quantised=share.quantised + cost.quantised,
        )
        if layer and part.unit is None:
            beside[int(layer[1])].append(owner)
    return _walked(shares, owners, beside, cost_model.nodes_per_layer(load.summary))


def _walked(
    shares: dict[int | None, _Share],
    owners: Sequence[int | None],
    beside: Sequence[Sequence[int | None]],
    nodes: float,
) -> dict[int | None, _Share]:
    """The shares with nodes and visits: follows a token through the units, each on its own device and those that overrides name beside it."""
    last: object = ""
    for unit, own in enumerate(owners):
        in_turn = list(dict.fromkeys([own, *beside[unit]]))
        for owner in in_turn:
            share = shares[owner]
            visits = share.visits + (owner != last)
            more = nodes / len(in_turn) if unit < len(owners) - 1 else 0
            shares[owner] = share._replace(visits=visits, nodes=share.nodes + more)
            last = owner
    return shares


def works_of(case: Case) -> list[cost_model.Work]:
    """The parts of the model: those of the devices in their order, before them that of the head's processor where it has layers."""
    placed = case.placed
    buffers = tuple(device.buffer for device in placed.devices)
    shares = _shares(placed.load, placed.gpu_layers, placed.split, buffers)
    processor = Device(case.head, backends.CPU.name, "", device_load.CPU, 0, {})
    works = []
    for index, device in ((None, processor), *enumerate(placed.devices)):
        share = shares[index]
        if not share.visits:
            continue
        host = case.places[device.host]
        works.append(
            cost_model.Work(
                host=device.host,
                device=device.buffer,
                rate=cost_model.rate_of(device, host.facts),
                link=link_of(device.wire, host, case.places) if device.endpoint else None,
                **share._asdict(),
            )
        )
    return works


def rounded(number: float) -> float:
    """With three digits: more would say more than is known."""
    return float(f"{number:.3g}")


def _most(costs: Iterable[tuple[str, str, float]]) -> str:
    """The largest cause: of kinds of costs the one with the largest sum, and of it the host with the largest part.

    :param costs: kind (around the host's name), host, cost.
    """
    kinds: dict[str, dict[str, float]] = {}
    for kind, host, cost in costs:
        by_host = kinds.setdefault(kind, {})
        by_host[host] = by_host.get(host, 0) + cost
    kind = max(kinds, key=lambda name: sum(kinds[name].values()))
    return kind.format(max(kinds[kind], key=lambda host: kinds[kind][host]))


def _limit_of_generation(release: Release, works: Sequence[cost_model.Work]) -> str:
    costs = [("memory of {}", work.host, work.read / work.rate.gb_per_s / 1e6) for work in works]
    costs += [("steps of the graph on {}", work.host, work.nodes * work.rate.node_us / 1e3) for work in works]
    return _most(
        [*costs, *(("link to {}", work.host, cost_model.link_ms(release, work)) for work in works if work.link)]
    )


def _limit_of_prompts(case: Case, works: Sequence[cost_model.Work]) -> str:
    costs = []
    for work in works:
        cost = cost_model.prompt_costs(case.release, work, case.summary.width, _together(case))
        costs += [(f"{kind} {{}}", work.host, ms) for kind, ms in cost.items()]
    return _most(costs)


def _limit_of_load(case: Case, works: Sequence[cost_model.Work]) -> str:
    costs = []
    for work in works:
        for kind, seconds in cost_model.load_costs(case.release, work).items():
            costs.append((f"{kind} {{}}", work.host if kind == "link to" else case.head, seconds))
    return _most(costs)


class Speeds(NamedTuple):
    """Tokens per second."""

    generation: float
    prompt: float
    generation_range: SpeedRange
    prompt_range: SpeedRange


def range_of(speed: float, factor: float) -> SpeedRange:
    return SpeedRange(float(f"{speed / factor:.2g}"), float(f"{speed * factor:.2g}"))


def _together(case: Case) -> int:
    """Tokens of a short prompt that are computed together."""
    return min(cost_model.PROMPT, server_settings.micro_batch_of(case.server))


def speeds_of(case: Case, works: Sequence[cost_model.Work]) -> Speeds:
    width, tokens = case.summary.width, _together(case)
    generation = 1000 / cost_model.token_ms(case.release, works)
    prompt_ms = cost_model.prompt_ms(case.release, works, width, tokens)
    prompt = 1000 * cost_model.PROMPT / prompt_ms if prompt_ms else 0.0
    return Speeds(
        rounded(generation),
        rounded(prompt),
        range_of(generation, cost_model.token_factor(case.release, works)),
        range_of(prompt, cost_model.prompt_factor(case.release, works, width, tokens)),
    )


def of_plan(case: Case, moved: bool) -> Estimate:
    """``estimate`` of the plan.

    :param moved: whether tensors are on other devices than their layers.
    """
    works = works_of(case) if case.fits else []
    speeds = speeds_of(case, works) if works else None
    sources = [work.rate.source for work in works]
    by_buffer = {work.device: work for work in works}
    links = _links(case, by_buffer)
    lent = [
        by_buffer[device.buffer] for device in case.placed.devices if device.endpoint and device.buffer in by_buffer
    ]
    visits = sum(work.visits for work in lent)
    return Estimate(
        generation_tokens_per_s=speeds.generation if speeds else None,
        prompt_tokens_per_s=speeds.prompt if speeds else None,
        generation_range=speeds.generation_range if speeds else None,
        prompt_range=speeds.prompt_range if speeds else None,
        load_s=rounded(cost_model.load_s(case.release, works)) if works else None,
        limited_by=_limit_of_generation(case.release, works) if works else None,
        prompt_limited_by=_limit_of_prompts(case, works) if works else None,
        load_limited_by=_limit_of_load(case, works) if works else None,
        disk=DiskEstimate(cost_model.DISK_GB_PER_S, False),
        rates=max(sources, key=(cost_model.MEASURED, cost_model.TABLE, cost_model.ASSUMED).index, default=None),
        devices=tuple(_device(work) for work in works),
        best_single_host=_best(case, works),
        network_ms_per_token=round(sum(cost_model.link_ms(case.release, work) for work in lent), 3),
        bound="at least" if moved and links else "about",
        visits=visits,
        crossings=2 * cost_model.WAITS * visits,
        links=links,
    )


def _device(work: cost_model.Work) -> DeviceEstimate:
    return DeviceEstimate(
        device=work.device,
        host=work.host,
        gb_per_s=work.rate.gb_per_s,
        prompt_gflops=work.rate.prompt_gflops,
        source=work.rate.source,
        ms_per_token=rounded(cost_model.device_ms(work)),
    )


def _links(case: Case, works: Mapping[str, cost_model.Work]) -> tuple[LinkEstimate, ...]:
    """What each worker costs besides computing.

    :param works: buffer → part of the model.
    """
    links = []
    for device in case.placed.devices:
        if device.endpoint:
            host, work = case.places[device.host], works.get(device.buffer)
            link = link_of(device.wire, host, case.places)
            links.append(
                LinkEstimate(
                    host=device.host,
                    endpoint=device.endpoint,
                    kind=link.kind,
                    one_way_ms=round(link.round_trip_ms / 2, 4),
                    gbit_per_s=link.gbit,
                    measured=link.measured,
                    ms_per_token=rounded(cost_model.link_ms(case.release, work)) if work else 0.0,
                    visit_ms=link.visit_ms,
                    plain_gbit_per_s=link.plain_gbit,
                )
            )
    return tuple(links)


class HostSpeed(NamedTuple):
    """How fast a host would be without others."""

    speeds: Speeds
    works: Sequence[cost_model.Work]
    gpu_layers: int | None
    """``llama_server_gpu_layers`` with which it is; None where all units are on its devices."""

    @property
    def lends(self) -> bool:
        """Whether it reaches devices of its own through workers."""
        return any(work.link for work in self.works)


def _best(case: Case, works: Sequence[cost_model.Work]) -> SingleHostEstimate:
    """The host on which the model alone would generate the fastest; where none holds it, the one with the most memory.

    :param works: of the plan.
    """
    needs = _needs(case.placed.load)
    single = {name: _single_host(case, host, needs) for name, host in case.hosts.items()}
    fitting = {name: found for name, found in single.items() if found}
    memory = {name: host.facts.memory_mib for name, host in case.hosts.items()}
    name = max(fitting or memory, key=lambda name: fitting[name].speeds.generation if fitting else memory[name])
    best = fitting.get(name)
    return SingleHostEstimate(
        host=name,
        fits=bool(best),
        gpu_layers=best.gpu_layers if best else None,
        generation_tokens_per_s=best.speeds.generation if best else None,
        prompt_tokens_per_s=best.speeds.prompt if best else None,
        generation_range=best.speeds.generation_range if best else None,
        prompt_range=best.speeds.prompt_range if best else None,
        faster=bool(best and works and cost_model.is_surely_faster(case.release, best.works, works)),
        lends=bool(best and best.lends),
    )


class Needs(NamedTuple):
    """What each unit needs, on whatever device it is."""

    weights: Sequence[int]
    """Bytes."""
    read: Sequence[float]
    """Bytes of weights that a token reads."""
    multiplied: Sequence[float]
    """Weights that a token is multiplied with."""
    quantised: Sequence[float]
    """Of those, quantised ones."""
    sizes: Sequence[int]
    """Bytes with its part of the cache."""


@functools.lru_cache(maxsize=32)
def _needs(load: device_load.Load) -> Needs:
    end = load.units
    weights, read, multiplied, quantised = [0] * end, [0.0] * end, [0.0] * end, [0.0] * end
    for part, cost in zip(load.parts, cost_model.part_costs(load)):
        unit = _unit_of(part)
        if unit is not None:
            weights[unit] += part.bytes
            read[unit] += cost.read
            multiplied[unit] += cost.multiplied
            quantised[unit] += cost.quantised
    sizes = [size + kv for size, kv in itertools.zip_longest(weights, load.kv, fillvalue=0)]
    return Needs(weights, read, multiplied, quantised, sizes)


def _single_host(case: Case, host: Host, needs: Needs) -> HostSpeed | None:
    """How fast the host would be with its own devices and processor, those of one backend, or its processor alone; None where it cannot hold the
    model."""
    own = case.own_devices(host)
    direct = [device for device in own if device.backend == case.backends_of[host.name][0]]
    choices = [own, *([direct] if direct != own else []), *([[]] if direct else [])]
    filled = [_fill(case, host, needs, choice) for choice in choices]
    found = [HostSpeed(speeds_of(case, works), works, gpu_layers) for works, gpu_layers in filled if works]
    return max(found, key=lambda one: one.speeds) if found else None


def _unit_of(part: device_load.Part) -> int | None:
    """The unit that a tensor belongs to, wherever overrides put it; None of what stays in the head's memory in any case."""
    layer = IN_A_LAYER.match(part.name)
    return int(layer[1]) if layer else part.unit


def _units_held(sizes: Sequence[int], own: Sequence[Device], kept: int) -> int:
    """How many units, the last ones first, these devices hold one after the other.

    :param kept: bytes that stay free on each device.
    """
    end = len(sizes)
    for device in own:
        held = itertools.accumulate(reversed(sizes[:end]))
        end -= sum(size <= device.capacity_mib * MIB - kept for size in held)
    return len(sizes) - end


def _fill(case: Case, host: Host, needs: Needs, own: Sequence[Device]) -> tuple[list[cost_model.Work], int | None]:
    """The model on these devices of the host, the last units first, and the rest on its processor; empty where that has no room for it. Devices
    that do not hold all leave room for the bound of the compute buffer.

    :returns: the parts, and how many units are on devices; None of all of them.
    """
    load = case.placed.load
    weights, read, multiplied, quantised, sizes = needs
    end = load.units

    def part_of(rate: cost_model.Rate, start: int, link: cost_model.Link | None = None) -> cost_model.Work:
        nodes = (min(end, load.layers) - min(start, load.layers)) * cost_model.nodes_per_layer(case.summary)
        own = slice(start, end)
        return cost_model.Work(
            host.name,
            "",
            rate,
            read=sum(read[own]),
            weights=sum(weights[own]),
            multiplied=sum(multiplied[own]),
            nodes=nodes,
            link=link,
            quantised=sum(quantised[own]),
        )

    room = workers.usable_mib(host.facts.memory_mib) * MIB
    direct = [device for device in own if device.backend == case.backends_of[host.name][0]]
    kept = load.on_head() - load.in_file(devices.reads_by_row(case.server, case.release, direct, host.facts))
    tables = kept if kept > workers.reserve_mib(host.facts.memory_mib, shared=True) * MIB // 2 else 0
    works = []
    by_speed = sorted(own, key=lambda device: -cost_model.rate_of(device, host.facts).gb_per_s)
    tight = any(
        entry.capacity_mib * MIB < share.weights + share.kv + load.compute
        for entry, share in zip(case.placed.devices, case.placed.shares())
    )
    kept = load.compute if not tight or _units_held(sizes, by_speed, 0) < end else 0
    for device in by_speed:
        start = end - _units_held(sizes[:end], [device], kept)
        lent = device.backend != case.backends_of[host.name][0]
        link = cost_model.LINKS["loopback"] if lent else None
        works.append(part_of(cost_model.rate_of(device, host.facts), start, link))
        accelerator = devices.accelerator_of(host.facts, device.name)
        room -= sum(sizes[start:end]) if accelerator and accelerator.unified else 0
        end = start
    if (end or tables) and sum(sizes[:end]) + tables > room:
        return [], None
    works.append(part_of(cost_model.processor_rate(host.facts), 0))
    return [work for work in works if work.weights], load.units - end if end and case.own_devices(host) else None

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast the plan is: tokens per second, seconds to load, what limits them, and the same of the best of its hosts alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import STUNNEL, is_loopback
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    DeviceEstimate,
    Estimate,
    LinkEstimate,
    ReleasePlan,
    SingleHostEstimate,
    SpeedRange,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Interface, MeasuredLink
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    cost_model,
    device_load,
    devices,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device, Host, Server

NAMES = {
    "thunderbolt": "thunderbolt",
    "ib": "infiniband",
    "wl": "wireless",
    "wg": "wireguard",
    "tailscale": "wireguard",
    "zt": "tunnel",
}
"""How the name of an interface begins → kind of its link, where neither the operator nor the host says it; all others are Ethernet."""
PART = 4
"""Prompts are planned for this part of the context."""
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
    measured = (facts.measured.get(host.name) if kind != "loopback" else None) or MeasuredLink()
    round_trip, mbit = measured[:2] if measured.requested else (None, None)
    assumed = cost_model.LINKS[kind]
    gbit = host.facts.link_gbit_per_s if kind != "loopback" else None
    gbit = mbit / 1000 if mbit else gbit or assumed.gbit
    encrypted = host.transport == STUNNEL and kind not in ("loopback", "tunnel")
    return cost_model.Link(
        kind,
        (round_trip or assumed.round_trip_ms) + encrypted * cost_model.STUNNEL_MS,
        min(gbit, cost_model.STUNNEL_GBIT) if encrypted else gbit,
        bool(round_trip),
        cost_model.is_board(host.facts),
    )


class Case(NamedTuple):
    """What is estimated."""

    release: ReleasePlan
    placed: device_load.Placed
    summary: ModelSummary
    head: str
    hosts: Mapping[str, Host]
    """Those that the collection manages."""
    every_host: Mapping[str, Host]
    """All hosts with devices, also those of external workers."""
    fits: bool
    backend_of: Mapping[str, str]
    """Host → the backend by which it would serve."""
    server: Server

    @property
    def settings(self) -> kv_cache.Settings:
        """The settings of the cache."""
        return server_settings.settings_of(self.server, self.summary, self.release.fork)

    def own_devices(self, host: Host) -> list[Device]:
        """Those that llama-server of this host would drive if it served alone."""
        return devices.of_single_host(host, self.backend_of[host.name], self.server if host.is_head else None)

    def alone(self, host: Host, placed: device_load.Placed) -> Case:
        """The same of a host that serves alone."""
        return self._replace(placed=placed, head=host.name, every_host={host.name: host}, fits=True)


class _Share(NamedTuple):
    """What a device has of the model. Numbers are those of cost_model.Work."""

    read: float = 0
    weights: int = 0
    multiplied: float = 0
    nodes: float = 0
    visits: int = 0


@functools.lru_cache(maxsize=64)
def _shares(
    load: device_load.Load, gpu_layers: int, split: tuple[float, ...], buffers: tuple[str, ...]
) -> dict[int | None, _Share]:
    """What each device has, by its place among those that are used; None is the head's processor."""
    names = {buffer: index for index, buffer in enumerate(buffers)}
    owners = device_load.assign(load.layers, gpu_layers, split if buffers else ())
    shares = {index: _Share() for index in (None, *names.values())}
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
        host = case.every_host[device.host]
        works.append(
            cost_model.Work(
                host=device.host,
                device=device.buffer,
                rate=cost_model.rate_of(device, host.facts, case.summary.architecture),
                link=link_of(device.wire, host, case.every_host) if device.endpoint else None,
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


def _limit_of_generation(works: Sequence[cost_model.Work]) -> str:
    costs = [("memory of {}", work.host, work.read / work.rate.gb_per_s / 1e6) for work in works]
    costs += [("steps of the graph on {}", work.host, work.nodes * work.rate.node_us / 1e3) for work in works]
    return _most([*costs, *(("link to {}", work.host, cost_model.link_ms(work)) for work in works if work.link)])


def _limit_of_prompts(case: Case, works: Sequence[cost_model.Work]) -> str:
    costs = []
    for work in works:
        cost = cost_model.prompt_costs(work, case.summary.width, _together(case))
        costs += [(f"{kind} {{}}", work.host, ms) for kind, ms in cost.items()]
    return _most(costs)


def _limit_of_load(case: Case, works: Sequence[cost_model.Work]) -> str:
    costs = []
    for work in works:
        kind, seconds = cost_model.load_cost(case.release, work)
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


def prompt_tokens(case: Case) -> int:
    """Of the prompt that is planned for."""
    return max(1, server_settings.context_per_request(case.server, case.summary) // PART)


def checkpoint_ms(case: Case, works: Sequence[cost_model.Work], tokens: int) -> float:
    """Milliseconds that a prompt of so many tokens takes longer for checkpoints; 0 where none are made."""
    return _checkpoint_ms(case, works, tokens) if pays_checkpoints(case, works) else 0.0


def pays_checkpoints(case: Case, works: Sequence[cost_model.Work]) -> bool:
    """Whether they take at most half as long as the planned prompt, which a conversation that goes on has computed again without them."""
    tokens = prompt_tokens(case)
    again = cost_model.prompt_ms(works, case.summary.width, _together(case)) * tokens / cost_model.PROMPT
    return not works or _checkpoint_ms(case, works, tokens) <= again / 2


def _checkpoint_ms(case: Case, works: Sequence[cost_model.Work], tokens: int) -> float:
    """llama-server computes the last tokens by themselves, and fetches windows and states from the devices before them; those before the last micro-batch,
    too, of a longer prompt (server-context.cpp of build 11063)."""
    summary, settings = case.summary, case.settings
    kept = kv_cache.checkpointed(summary, settings)
    if not case.release.mainline or not any(kept):
        return 0.0
    cells = min(tokens, kv_cache.window_size(summary) or 1)
    sizes = kv_cache.sizes(summary, settings._replace(context=cells, parallel=1), case.release.build)[0]
    s_per_gb = {work.device: cost_model.COPY_S_PER_GB + (8 / work.link.gbit if work.link else 0) for work in works}
    layers = zip(case.placed.buffer_of_layers(), sizes, kept)
    fetched = sum(size * s_per_gb.get(buffer, 0) for buffer, size, counts in layers if counts) / 1e6
    return cost_model.token_ms(works) + fetched * (1 + (tokens > settings.tokens))


def speeds_of(case: Case, works: Sequence[cost_model.Work]) -> Speeds:
    width, tokens = case.summary.width, _together(case)
    generation = 1000 / cost_model.token_ms(works)
    prompt_ms = cost_model.prompt_ms(works, width, tokens) + checkpoint_ms(case, works, cost_model.PROMPT)
    prompt = 1000 * cost_model.PROMPT / prompt_ms if prompt_ms else 0.0
    return Speeds(
        rounded(generation),
        rounded(prompt),
        range_of(generation, cost_model.token_factor(works)),
        range_of(prompt, cost_model.prompt_factor(works, width, tokens)),
    )


def of_plan(case: Case, alone: Mapping[str, Sequence[device_load.Placed]]) -> Estimate:
    """``estimate`` of the plan.

    :param alone: host → placements with which it holds the model alone.
    """
    works = works_of(case) if case.fits else []
    speeds = speeds_of(case, works) if works else None
    generates = server_settings.generates(case.server, case.summary)
    sources = [work.rate.source for work in works]
    by_buffer = {work.device: work for work in works}
    links = _links(case, by_buffer)
    lent = [
        by_buffer[device.buffer] for device in case.placed.devices if device.endpoint and device.buffer in by_buffer
    ]
    return Estimate(
        generation_tokens_per_s=speeds.generation if speeds and generates else None,
        prompt_tokens_per_s=speeds.prompt if speeds else None,
        generation_range=speeds.generation_range if speeds and generates else None,
        prompt_range=speeds.prompt_range if speeds else None,
        load_s=rounded(cost_model.load_s(case.release, works)) if works else None,
        limited_by=_limit_of_generation(works) if works and generates else None,
        prompt_limited_by=_limit_of_prompts(case, works) if works else None,
        load_limited_by=_limit_of_load(case, works) if works else None,
        rates=max(sources, key=(cost_model.TABLE, cost_model.ASSUMED).index, default=None),
        devices=tuple(_device(work) for work in works),
        best_single_host=_best(case, works, alone),
        network_ms_per_token=round(sum(cost_model.link_ms(work) for work in lent), 3),
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
            host, work = case.every_host[device.host], works.get(device.buffer)
            link = link_of(device.wire, host, case.every_host)
            links.append(
                LinkEstimate(
                    host=device.host,
                    endpoint=device.endpoint,
                    kind=link.kind,
                    one_way_ms=round(link.round_trip_ms / 2, 4),
                    gbit_per_s=link.gbit,
                    measured=link.measured,
                    ms_per_token=rounded(cost_model.link_ms(work)) if work else 0.0,
                )
            )
    return tuple(links)


class HostSpeed(NamedTuple):
    """How fast a host would be without others."""

    speeds: Speeds
    works: Sequence[cost_model.Work]
    gpu_layers: int | None
    """``llama_server_gpu_layers`` with which it is; None where all units are on its devices, or it has none."""


def _best(
    case: Case, works: Sequence[cost_model.Work], alone: Mapping[str, Sequence[device_load.Placed]]
) -> SingleHostEstimate:
    """The host on which the model alone would generate the fastest; where none holds it, the one with the most memory.

    :param works: of the plan.
    """
    fitting: dict[str, HostSpeed] = {}
    for name, placements in alone.items():
        host = case.hosts[name]
        partly = bool(case.own_devices(host))
        for placed in placements:
            one = case.alone(host, placed)
            own = works_of(one)
            layers = placed.gpu_layers if partly and placed.gpu_layers < placed.load.units else None
            found = HostSpeed(speeds_of(one, own), own, layers)
            if name not in fitting or found.speeds > fitting[name].speeds:
                fitting[name] = found
    generates = server_settings.generates(case.server, case.summary)
    memory = {name: host.facts.memory_mib for name, host in case.hosts.items()}
    name = max(fitting or memory, key=lambda name: fitting[name].speeds.generation if fitting else memory[name])
    best = fitting.get(name)
    return SingleHostEstimate(
        host=name,
        fits=bool(best),
        gpu_layers=best.gpu_layers if best else None,
        generation_tokens_per_s=best.speeds.generation if best and generates else None,
        prompt_tokens_per_s=best.speeds.prompt if best else None,
        generation_range=best.speeds.generation_range if best and generates else None,
        prompt_range=best.speeds.prompt_range if best else None,
        faster=bool(best and works and cost_model.is_surely_faster(best.works, works)),
    )

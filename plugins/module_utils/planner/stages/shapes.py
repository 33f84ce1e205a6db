# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shapes in which a cluster can serve the model: one host alone, one server on each of several hosts, or the model split over hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    ShapeEstimate,
    SingleHostEstimate,
    SpeedRange,
    UsersEstimate,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    cost_model,
    devices,
    prompts,
    workers,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate, attempt
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.estimate import (
    generation_figures,
    prompt_figures,
    rounded,
    speeds_of,
    users_estimate,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.layout import ALL, FASTEST
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import Workload

LEAST_SHARE = 0.5
"""Part of the fastest host's speed that a host needs to serve beside it: clients would wait for a slower one."""
HOST, REPLICAS, SPLIT = "host", "replicas", "split"
"""Kinds of shapes."""


class Single(NamedTuple):
    """Hosts that are alike, and the best way in which one of them serves alone."""

    names: tuple[str, ...]
    candidate: Candidate
    """One that does not fit if there is no way."""
    gpu_layers: int | None
    """llama_server_gpu_layers if its processor has to hold layers."""
    override_tensor: str | None
    """Entry of llama_server_override_tensor if its processor has to hold experts."""


def compare(
    candidate: Candidate, hosts: Mapping[str, Host], backends: Mapping[str, str]
) -> tuple[SingleHostEstimate, tuple[ShapeEstimate, ...]]:
    """Return the best host alone, and all shapes; no shapes for the known-answer model, which only tries workers.

    :param hosts: hosts that might serve alone.
    :param backends: host → the backend by which it would serve.
    """
    singles = list(_singles(candidate, hosts, backends))
    best = _best_host(candidate, singles, hosts)
    if candidate.workload.model.known_answer is not None or not candidate.fits:
        return best, ()
    head, has_workers = candidate.site.head, any(host.is_worker for host in hosts.values())
    shapes = []
    for single in singles:
        own = candidate if head in single.names and not candidate.layout.workers() else None
        settings = {
            f"put {single.names[0]} into llama_head": head not in single.names,
            "leave llama_workers empty": has_workers,
            f"set llama_server_gpu_layers to {single.gpu_layers}": single.gpu_layers is not None,
            f"set llama_server_override_tensor to ['{single.override_tensor}']": single.override_tensor,
        }
        shape = _shape(
            HOST, single.names, own or single.candidate, [text for text, needed in settings.items() if needed]
        )
        shapes.append(shape._replace(chosen=bool(own)))
    replicas = [single for single in singles if single.candidate.fits]
    speeds = [_speed(single.candidate) for single in replicas]
    replicas = [single for single, speed in zip(replicas, speeds) if speed >= LEAST_SHARE * max(speeds)]
    if sum(len(single.names) for single in replicas) > 1:
        shapes.append(_replicas(replicas, candidate.workload.users))
    shapes += _splits(candidate)
    return best, tuple(shapes)


def _shape(kind: str, names: Sequence[str], candidate: Candidate, settings: Sequence[str] = ()) -> ShapeEstimate:
    tokens, fits = candidate.workload.prompt_tokens, bool(candidate.parts)
    return ShapeEstimate(
        kind,
        tuple(names),
        fits,
        chosen=False,
        free_mib=_free_mib(candidate) if fits else -candidate.layout.missing_mib,
        **generation_figures(candidate),
        users=users_estimate(candidate, candidate.workload.users) if fits else None,
        prompt_s=rounded(prompts.seconds_of(candidate, tokens, tokens // 2)) if fits else None,
        settings=tuple(settings),
    )


def _free_mib(candidate: Candidate) -> int:
    """Return the free memory of the devices with layers; of the host without such."""
    layout, facts = candidate.layout, candidate.site.facts
    if not layout.devices:
        return workers.usable_mib(facts.memory_mib) - -(-(layout.on_head().weights + layout.on_head().kv) // MIB)
    pairs = zip(layout.devices, layout.shares())
    return int(sum(device.capacity_mib - (share.weights + share.kv) / MIB for device, share in pairs))


def _replicas(singles: Sequence[Single], users: int) -> ShapeEstimate:
    """Return the shape with one server on each host that holds the model. Users are shared evenly."""
    ways = [(name, single.candidate) for single in singles for name in single.names]
    ways.sort(key=lambda way: -speeds_of(way[1]).generation)
    counts = [users // len(ways) + (index < users % len(ways)) for index in range(len(ways))]
    loads = [users_estimate(way[1], count) for way, count in zip(ways, counts) if count]
    names = [name for name, _candidate in ways]
    groups = f"put {', '.join(names)} into the group llama_head and a host into llama_balancer"
    shape = _shape(REPLICAS, names, ways[0][1], [groups])
    return shape._replace(free_mib=min(_free_mib(candidate) for _name, candidate in ways), users=_sum(loads))


def _sum(loads: Sequence[UsersEstimate]) -> UsersEstimate:
    """Return the sum of the speeds of several servers."""

    def total(values: Sequence[Any]) -> Any:
        if values[0] is None or isinstance(values[0], int):
            return values[0] and sum(values)
        if isinstance(values[0], SpeedRange):
            return SpeedRange(*(float(f"{sum(bounds):.2g}") for bounds in zip(*values)))
        return rounded(sum(values))

    return UsersEstimate(*map(total, zip(*loads)))


def _splits(candidate: Candidate) -> Iterator[ShapeEstimate]:
    """Yield the shapes with workers: that of the plan, then those that other values of llama_placement select."""
    used = []
    for placement in (None, FASTEST, ALL):
        split = candidate
        if placement:
            server = candidate.workload.server._replace(tensor_split=(), override_tensor=())
            split = attempt(candidate.workload._replace(server=server, placement=placement), candidate.site)
        buffers = {device.buffer for device in split.layout.devices}
        if split.fits and split.layout.workers() and buffers not in used:
            used_hosts = {device.host for device in split.layout.devices}
            names = [name for name in candidate.site.hosts if name in used_hosts]
            shape = _shape(SPLIT, names, split, [f"set llama_placement to {placement}"] if placement else [])
            yield shape._replace(chosen=not placement)
        used.append(buffers)


def _speed(candidate: Candidate) -> float:
    """Return tokens per second of all users in generation, or in prompts of a model that does not generate."""
    together = users_estimate(candidate, candidate.workload.users)
    return together.generation_tokens_per_s or together.prompt_tokens_per_s


def _best_host(candidate: Candidate, singles: Sequence[Single], hosts: Mapping[str, Host]) -> SingleHostEstimate:
    """Return the host that alone would be the fastest for all users; if none holds the model, the one with the most memory."""
    fitting = [single for single in singles if single.candidate.fits]
    if not fitting:
        name = max(hosts, key=lambda host: hosts[host].facts.memory_mib)
        return SingleHostEstimate(name, False, None, None, None, None, None, False)
    best = max(fitting, key=lambda single: _speed(single.candidate))
    return SingleHostEstimate(
        host=best.names[0],
        fits=True,
        gpu_layers=best.gpu_layers,
        **generation_figures(best.candidate),
        **prompt_figures(best.candidate),
        faster=bool(candidate.parts) and _is_likely_faster(best.candidate, candidate),
        override_tensor=best.override_tensor,
    )


def _is_likely_faster(single: Candidate, candidate: Candidate) -> bool:
    workload = candidate.workload
    if not workload.generates:
        return speeds_of(single).prompt_range.low > speeds_of(candidate).prompt_range.high
    count = max(1, min(workload.users, workload.cache.parallel))
    depth = workload.prompt_tokens if count > 1 else 0
    pair = [prompts.at_depth(item, depth).parts if depth else item.parts for item in (single, candidate)]
    return cost_model.is_likely_faster(pair[0], pair[1], count)


def _singles(candidate: Candidate, hosts: Mapping[str, Host], backends: Mapping[str, str]) -> Iterator[Single]:
    """Yield the best way in which each kind of host serves alone: with all layers on its devices, with as many as they hold, with experts on its processor,
    or on its processor only. Devices leave room for the bound of the compute buffer, unless that is too large for the plan's own devices."""
    server = candidate.workload.server._replace(tensor_split=(), override_tensor=(), gpu_layers=None)
    workload, layout = candidate.workload._replace(server=server, placement=FASTEST), candidate.layout
    bound = -(-layout.load.compute // MIB)
    tight = any(
        share.weights + share.kv > (device.capacity_mib - bound) * MIB
        for device, share in zip(layout.devices, layout.shares())
    )
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for name, host in hosts.items():
        kind = (host.is_head, host.facts.memory_mib, host.facts.cpu, host.facts.accelerators)
        kinds.setdefault(kind, []).append(name)
    for names in sorted(kinds.values(), key=lambda names: not hosts[names[0]].is_head):
        host = hosts[names[0]]
        head_server = candidate.workload.server if host.is_head else None
        host_devices = tuple(devices.single_host_devices(host, backends[host.name], head_server))
        bounded = tuple(device._replace(capacity_mib=max(0, device.capacity_mib - bound)) for device in host_devices)
        site = Site(host.name, {host.name: host}, ())
        attempts = [attempt(workload, site)._replace(site=site._replace(devices=host_devices))]
        if host_devices:
            whole = attempt(workload, site._replace(devices=host_devices if tight else bounded))
            partly = site._replace(devices=bounded)
            attempts += (
                [whole] if whole.fits else [_with_most_layers(workload, partly), *_with_experts(workload, partly)]
            )
        fitting = [item for item in attempts if item.fits]
        best = max(fitting, key=_speed) if fitting else min(attempts, key=lambda item: item.layout.missing_mib)
        layers = best.layout.gpu_layers if host_devices and best.layout.gpu_layers <= workload.summary.layers else None
        yield Single(tuple(names), best, layers, next(iter(best.workload.server.override_tensor), None))


def _with_most_layers(workload: Workload, site: Site) -> Candidate:
    """Return the candidate with as many units on devices as they hold."""
    units = workload.summary.layers + 1

    def with_layers(number: int) -> Candidate:
        return attempt(workload._replace(server=workload.server._replace(gpu_layers=units - number)), site)

    return _fewest(with_layers, units)


def _with_experts(workload: Workload, site: Site) -> list[Candidate]:
    """Return the candidate with the experts of as few layers as possible on the processor; nothing for other models."""
    summary = workload.summary
    if summary.tensors is None or cost_model.active_share(summary) == 1:
        return []

    def with_experts(number: int) -> Candidate:
        entry = rf"blk\.({_numbers_below(number)})\.ffn_.*exps=CPU" if number < summary.layers else "exps=CPU"
        return attempt(workload._replace(server=workload.server._replace(override_tensor=(entry,))), site)

    return [_fewest(with_experts, summary.layers)]


def _numbers_below(count: int) -> str:
    """Return the expression for the numbers below this one."""
    tens, ones = divmod(min(count, 100) - 1, 10)
    last, full_tens = f"{tens or ''}[0-{ones}]", f"[1-{tens - 1}]?" if tens > 1 else ""
    return "|".join([f"{full_tens}[0-9]"] * bool(tens) + [last, *map(str, range(100, count))])


def _fewest(with_number: Callable[[int], Candidate], most: int) -> Candidate:
    """Return the candidate with the smallest number that fits; that with the largest if none fits."""
    low, high, best = 0, most, with_number(most)
    while best.fits and high - low > 1:
        middle = (low + high) // 2
        candidate = with_number(middle)
        low, high = (low, middle) if candidate.fits else (middle, high)
        best = candidate if candidate.fits else best
    return best

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shapes in which a cluster can serve the model: one host alone, one server on each of several hosts, or the model split over hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    estimate,
    prompts,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import (
    Candidate,
    attempt_placement,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site, site_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import ALL, FASTEST, Workload

LEAST_SHARE = 0.5
"""Part of the fastest host's speed that a host needs to serve beside it: clients would wait for a slower one."""
HOST, REPLICAS, SPLIT = "host", "replicas", "split"
"""Kinds of shapes."""


class SingleHost(NamedTuple):
    """Hosts that are alike, and the best way in which one of them serves alone."""

    names: tuple[str, ...]
    candidate: Candidate
    """One that does not fit if there is no way."""
    gpu_layers: int | None
    """llama_server_gpu_layers if its processor has to hold layers."""
    override_tensor: str | None
    """Entry of llama_server_override_tensor if its processor has to hold experts."""


def compare_shapes(candidate: Candidate) -> tuple[SingleHostEstimate, tuple[ShapeEstimate, ...]]:
    """Return the best host alone, and all shapes; no shapes for the known-answer model, which only tries workers."""
    hosts = [candidate.site.hosts[name] for name in candidate.site.server_backends]
    single_hosts = list(_single_hosts(candidate, hosts))
    best_host = _best_host(candidate, single_hosts, hosts)
    if candidate.workload.model.known_answer is not None or not candidate.fits:
        return best_host, ()
    head, has_workers = candidate.site.head, any(host.is_worker for host in hosts)
    shapes = []
    for entry in single_hosts:
        head_shape = candidate if head in entry.names and not candidate.layout.endpoints else None
        settings = {
            f"move {entry.names[0]} to llama_head": head not in entry.names,
            "leave llama_workers empty": has_workers,
            f"set llama_server_gpu_layers to {entry.gpu_layers}": entry.gpu_layers is not None,
            f"set llama_server_override_tensor to ['{entry.override_tensor}']": entry.override_tensor,
        }
        shape = _shape(
            HOST, entry.names, head_shape or entry.candidate, [text for text, applies in settings.items() if applies]
        )
        shapes.append(shape._replace(chosen=bool(head_shape)))
    replicas = [entry for entry in single_hosts if entry.candidate.fits]
    speeds = [_speed(entry.candidate) for entry in replicas]
    replicas = [entry for entry, speed in zip(replicas, speeds) if speed >= LEAST_SHARE * max(speeds)]
    if sum(len(entry.names) for entry in replicas) > 1:
        shapes.append(_replicas(replicas, candidate.workload.users))
    shapes += _splits(candidate)
    return best_host, tuple(shapes)


def _shape(kind: str, names: Sequence[str], candidate: Candidate, settings: Sequence[str] = ()) -> ShapeEstimate:
    tokens, does_fit = candidate.workload.prompt_tokens, bool(candidate.parts)
    return ShapeEstimate(
        kind,
        tuple(names),
        does_fit,
        chosen=False,
        free_mib=_free_mib(candidate) if does_fit else -candidate.layout.missing_mib,
        **estimate.generation_figures(candidate),
        users=estimate.users_estimate(candidate, candidate.workload.users) if does_fit else None,
        prompt_s=estimate.round_figure(prompts.seconds_of(candidate, tokens, tokens // 2)) if does_fit else None,
        settings=tuple(settings),
    )


def _free_mib(candidate: Candidate) -> int:
    """Return the free memory of the devices with layers; of the host without such."""
    layout, facts = candidate.layout, candidate.site.facts
    if not layout.devices:
        return devices.usable_mib(facts.memory_mib) - -(-(layout.on_head().weights + layout.on_head().kv) // MIB)
    return int(sum(share.device.capacity_mib - share.model_bytes / MIB for share in layout.shares()))


def _replicas(singles: Sequence[SingleHost], users: int) -> ShapeEstimate:
    """Return the shape with one server on each host that holds the model. Users are shared evenly."""
    candidates = [(name, single_host.candidate) for single_host in singles for name in single_host.names]
    candidates.sort(key=lambda entry: -estimate.speeds_of(entry[1]).generation)
    counts = [users // len(candidates) + (index < users % len(candidates)) for index in range(len(candidates))]
    loads = [estimate.users_estimate(entry[1], count) for entry, count in zip(candidates, counts) if count]
    names = [name for name, _candidate in candidates]
    groups = f"add {', '.join(names)} to llama_head, and a host to llama_balancer"
    shape = _shape(REPLICAS, names, candidates[0][1], [groups])
    return shape._replace(
        free_mib=min(_free_mib(candidate) for _name, candidate in candidates), users=_sum_users(loads)
    )


def _sum_users(loads: Sequence[UsersEstimate]) -> UsersEstimate:
    """Return the sum of the speeds of several servers."""

    def total(values: Sequence[Any]) -> Any:
        if values[0] is None or isinstance(values[0], int):
            return values[0] and sum(values)
        if isinstance(values[0], SpeedRange):
            return SpeedRange(*(float(f"{sum(bounds):.2g}") for bounds in zip(*values)))
        return estimate.round_figure(sum(values))

    return UsersEstimate(*map(total, zip(*loads)))


def _splits(candidate: Candidate) -> Iterator[ShapeEstimate]:
    """Yield the shapes with workers: that of the plan, then those that other values of llama_placement select."""
    tried_buffers = []
    for placement in (None, FASTEST, ALL):
        variant = candidate
        if placement:
            server = candidate.workload.server._replace(tensor_split=(), override_tensor=())
            variant = attempt_placement(candidate.workload._replace(server=server, placement=placement), candidate.site)
        buffers = {device.buffer for device in variant.layout.devices}
        if variant.fits and variant.layout.endpoints and buffers not in tried_buffers:
            used_hosts = {device.host for device in variant.layout.devices}
            names = [name for name in candidate.site.hosts if name in used_hosts]
            shape = _shape(SPLIT, names, variant, [f"set llama_placement to {placement}"] if placement else [])
            yield shape._replace(chosen=not placement)
        tried_buffers.append(buffers)


def _speed(candidate: Candidate) -> float:
    """Return tokens per second of all users in generation, or in prompts of a model that does not generate."""
    users_speed = estimate.users_estimate(candidate, candidate.workload.users)
    return users_speed.generation_tokens_per_s or users_speed.prompt_tokens_per_s


def _best_host(candidate: Candidate, singles: Sequence[SingleHost], hosts: Sequence[Host]) -> SingleHostEstimate:
    """Return the host that alone would be the fastest for all users; if none holds the model, the one with the most memory."""
    fitting_hosts = [single_host for single_host in singles if single_host.candidate.fits]
    if not fitting_hosts:
        largest_host = max(hosts, key=lambda host: host.facts.memory_mib)
        return SingleHostEstimate(largest_host.name, False, None, None, None, None, None, False)
    best_host = max(fitting_hosts, key=lambda single_host: _speed(single_host.candidate))
    return SingleHostEstimate(
        host=best_host.names[0],
        fits=True,
        gpu_layers=best_host.gpu_layers,
        **estimate.generation_figures(best_host.candidate),
        **estimate.prompt_figures(best_host.candidate),
        faster=bool(candidate.parts) and _is_likely_faster(best_host.candidate, candidate),
        override_tensor=best_host.override_tensor,
    )


def _is_likely_faster(host_candidate: Candidate, candidate: Candidate) -> bool:
    workload = candidate.workload
    if not workload.generates_text:
        return estimate.speeds_of(host_candidate).prompt_range.low > estimate.speeds_of(candidate).prompt_range.high
    count = max(1, min(workload.users, workload.cache.parallel))
    depth = workload.prompt_tokens if count > 1 else 0
    pair = [prompts.at_depth(item, depth).parts if depth else item.parts for item in (host_candidate, candidate)]
    return cost_model.is_likely_faster(pair[0], pair[1], count)


def _single_hosts(candidate: Candidate, hosts: Sequence[Host]) -> Iterator[SingleHost]:
    """Yield the best way in which each kind of host serves alone: with all layers on its devices, with as many as they hold, with experts on its processor,
    or on its processor only. Devices leave room for the bound of the compute buffer, unless that is too large for the plan's own devices."""
    server = candidate.workload.server._replace(tensor_split=(), override_tensor=(), gpu_layers=None)
    workload, layout = candidate.workload._replace(server=server, placement=FASTEST), candidate.layout
    bound = -(-layout.load.compute // MIB)
    is_full = any(share.model_bytes > (share.device.capacity_mib - bound) * MIB for share in layout.shares())
    kinds: dict[tuple[Any, ...], list[Host]] = {}
    for host in hosts:
        kind = (host.is_head, host.facts.memory_mib, host.facts.cpu, host.facts.accelerators)
        kinds.setdefault(kind, []).append(host)
    for peers in sorted(kinds.values(), key=lambda peers: not peers[0].is_head):
        host = peers[0]
        head_server = candidate.workload.server if host.is_head else None
        host_devices = tuple(devices.single_host_devices(host, candidate.site.server_backends[host.name], head_server))
        reduced_devices = tuple(
            device._replace(capacity_mib=max(0, device.capacity_mib - bound)) for device in host_devices
        )
        site = site_of(host.name, {host.name: host}, host_devices, workload.summary.architecture, {})
        attempts = [attempt_placement(workload, site._replace(devices=()))._replace(site=site)]
        if host_devices:
            attempt = attempt_placement(workload, site if is_full else site._replace(devices=reduced_devices))
            reduced_site = site._replace(devices=reduced_devices)
            attempts += (
                [attempt]
                if attempt.fits
                else [_with_most_layers(workload, reduced_site), *_with_experts(workload, reduced_site)]
            )
        candidates = [item for item in attempts if item.fits]
        choice = max(candidates, key=_speed) if candidates else min(attempts, key=lambda item: item.layout.missing_mib)
        layers = (
            choice.layout.gpu_layers if host_devices and choice.layout.gpu_layers <= workload.summary.layers else None
        )
        yield SingleHost(
            tuple(peer.name for peer in peers), choice, layers, next(iter(choice.workload.server.override_tensor), None)
        )


def _with_most_layers(workload: Workload, site: Site) -> Candidate:
    """Return the candidate with as many units on devices as they hold."""
    units = workload.summary.layers + 1

    def with_layers(number: int) -> Candidate:
        return attempt_placement(workload._replace(server=workload.server._replace(gpu_layers=units - number)), site)

    return _smallest_fitting(with_layers, units)


def _with_experts(workload: Workload, site: Site) -> list[Candidate]:
    """Return the candidate with the experts of as few layers as possible on the processor; nothing for other models."""
    summary = workload.summary
    if summary.tensors is None or summary.active_share == 1:
        return []

    def with_experts(number: int) -> Candidate:
        entry = rf"blk\.({_numbers_below(number)})\.ffn_.*exps=CPU" if number < summary.layers else "exps=CPU"
        return attempt_placement(workload._replace(server=workload.server._replace(override_tensor=(entry,))), site)

    return [_smallest_fitting(with_experts, summary.layers)]


def _numbers_below(count: int) -> str:
    """Return the expression for the numbers below this one."""
    tens, ones = divmod(min(count, 100) - 1, 10)
    last_decade_pattern, full_decades_pattern = f"{tens or ''}[0-{ones}]", f"[1-{tens - 1}]?" if tens > 1 else ""
    return "|".join([f"{full_decades_pattern}[0-9]"] * bool(tens) + [last_decade_pattern, *map(str, range(100, count))])


def _smallest_fitting(with_number: Callable[[int], Candidate], maximum: int) -> Candidate:
    """Return the candidate with the smallest number that fits; that with the largest if none fits."""
    lower_bound, upper_bound, best_candidate = 0, maximum, with_number(maximum)
    while best_candidate.fits and upper_bound - lower_bound > 1:
        midpoint = (lower_bound + upper_bound) // 2
        candidate = with_number(midpoint)
        lower_bound, upper_bound = (lower_bound, midpoint) if candidate.fits else (midpoint, upper_bound)
        best_candidate = candidate if candidate.fits else best_candidate
    return best_candidate

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
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import USE_ALL, USE_FASTEST, Workload

MIN_SPEED_SHARE = 0.5
"""Smallest share of the fastest host's speed with which another host serves as a replica: clients would wait for a slower one."""
HOST_SHAPE, REPLICAS_SHAPE, SPLIT_SHAPE = "host", "replicas", "split"
"""Kinds of shapes."""


class HostKind(NamedTuple):
    """Hosts with the same hardware, and the best candidate for one of them to serve alone."""

    names: tuple[str, ...]
    candidate: Candidate
    """Best candidate; it does not fit if no candidate does."""
    gpu_layers: int | None
    """llama_server_gpu_layers if its processor has to hold layers."""
    override_tensor: str | None
    """Entry of llama_server_override_tensor if its processor has to hold experts."""


def compare_shapes(candidate: Candidate) -> tuple[SingleHostEstimate, tuple[ShapeEstimate, ...]]:
    """Return the best host alone, and all shapes; no shapes for the known-answer model, which only tests workers."""
    hosts = [candidate.site.hosts[name] for name in candidate.site.server_backends]
    host_kinds = list(_host_kinds(candidate, hosts))
    best_host = _best_host(candidate, host_kinds, hosts)
    if candidate.workload.model.known_answer is not None or not candidate.fits:
        return best_host, ()
    head, has_workers = candidate.site.head, any(host.is_worker for host in hosts)
    shapes = []
    for host_kind in host_kinds:
        chosen_candidate = candidate if head in host_kind.names and not candidate.layout.endpoints else None
        settings = {
            f"move {host_kind.names[0]} to llama_head": head not in host_kind.names,
            "leave llama_workers empty": has_workers,
            f"set llama_server_gpu_layers to {host_kind.gpu_layers}": host_kind.gpu_layers is not None,
            f"set llama_server_override_tensor to ['{host_kind.override_tensor}']": host_kind.override_tensor,
        }
        texts = [text for text in settings if settings[text]]
        shape = _shape(HOST_SHAPE, host_kind.names, chosen_candidate or host_kind.candidate, texts)
        shapes.append(shape._replace(chosen=bool(chosen_candidate)))
    replicas = [host_kind for host_kind in host_kinds if host_kind.candidate.fits]
    speeds = [_speed(host_kind.candidate) for host_kind in replicas]
    replicas = [host_kind for host_kind, speed in zip(replicas, speeds) if speed >= MIN_SPEED_SHARE * max(speeds)]
    if sum(len(host_kind.names) for host_kind in replicas) > 1:
        shapes.append(_replicas_shape(replicas, candidate.workload.users))
    shapes += _split_shapes(candidate)
    return best_host, tuple(shapes)


def _shape(kind: str, names: Sequence[str], candidate: Candidate, settings: Sequence[str] = ()) -> ShapeEstimate:
    tokens, fits = candidate.workload.prompt_tokens, bool(candidate.parts)
    return ShapeEstimate(
        kind,
        tuple(names),
        fits,
        chosen=False,
        free_mib=_free_mib(candidate) if fits else -candidate.layout.missing_mib,
        **estimate.generation_figures(candidate),
        users=estimate.users_estimate(candidate, candidate.workload.users) if fits else None,
        prompt_s=estimate.round_figure(prompts.seconds_of(candidate, tokens, tokens // 2)) if fits else None,
        settings=tuple(settings),
    )


def _free_mib(candidate: Candidate) -> int:
    """Return the free memory of the devices with layers, or of the host if no device has layers."""
    layout, facts = candidate.layout, candidate.site.head_facts
    if not layout.devices:
        return devices.usable_mib(facts.memory_mib) - -(-(layout.head_share().weights + layout.head_share().kv) // MIB)
    return int(sum(share.device.capacity_mib - share.model_bytes / MIB for share in layout.shares()))


def _replicas_shape(host_kinds: Sequence[HostKind], users: int) -> ShapeEstimate:
    """Return the shape with one server on each host that holds the model. Users are distributed evenly."""
    candidates = [(name, host_kind.candidate) for host_kind in host_kinds for name in host_kind.names]
    candidates.sort(key=lambda entry: -estimate.speeds_of(entry[1]).generation)
    counts = [users // len(candidates) + (index < users % len(candidates)) for index in range(len(candidates))]
    estimates = [estimate.users_estimate(entry[1], count) for entry, count in zip(candidates, counts) if count]
    names = [name for name, _candidate in candidates]
    settings = [f"add {', '.join(names)} to llama_head, and a host to llama_balancer"]
    shape = _shape(REPLICAS_SHAPE, names, candidates[0][1], settings)
    return shape._replace(
        free_mib=min(_free_mib(candidate) for _name, candidate in candidates), users=_sum_users(estimates)
    )


def _sum_users(estimates: Sequence[UsersEstimate]) -> UsersEstimate:
    """Return the sum of the speeds of several servers."""

    def total(values: Sequence[Any]) -> Any:
        if values[0] is None or isinstance(values[0], int):
            return values[0] and sum(values)
        if isinstance(values[0], SpeedRange):
            return SpeedRange(*(float(f"{sum(bounds):.2g}") for bounds in zip(*values)))
        return estimate.round_figure(sum(values))

    return UsersEstimate(*map(total, zip(*estimates)))


def _split_shapes(candidate: Candidate) -> Iterator[ShapeEstimate]:
    """Yield the shapes with workers: that of the plan, then those that other values of llama_placement select."""
    tried_buffers = []
    for placement in (None, USE_FASTEST, USE_ALL):
        variant = candidate
        if placement:
            server = candidate.workload.server._replace(tensor_split=(), override_tensor=())
            variant = attempt_placement(candidate.workload._replace(server=server, placement=placement), candidate.site)
        buffers = {device.buffer for device in variant.layout.devices}
        if variant.fits and variant.layout.endpoints and buffers not in tried_buffers:
            used_hosts = {device.host for device in variant.layout.devices}
            names = [name for name in candidate.site.hosts if name in used_hosts]
            shape = _shape(SPLIT_SHAPE, names, variant, [f"set llama_placement to {placement}"] if placement else [])
            yield shape._replace(chosen=not placement)
        tried_buffers.append(buffers)


def _speed(candidate: Candidate) -> float:
    """Return the tokens per second of all users, in generation or, if the model generates no text, in prompts."""
    users_estimate = estimate.users_estimate(candidate, candidate.workload.users)
    return users_estimate.generation_tokens_per_s or users_estimate.prompt_tokens_per_s


def _best_host(candidate: Candidate, host_kinds: Sequence[HostKind], hosts: Sequence[Host]) -> SingleHostEstimate:
    """Return the host that alone would be the fastest for all users; if none holds the model, the host with the most memory."""
    fitting_kinds = [host_kind for host_kind in host_kinds if host_kind.candidate.fits]
    if not fitting_kinds:
        largest_host = max(hosts, key=lambda host: host.facts.memory_mib)
        return SingleHostEstimate(largest_host.name, False, None, None, None, None, None, False)
    best_host = max(fitting_kinds, key=lambda host_kind: _speed(host_kind.candidate))
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
    variants = [prompts.at_depth(variant, depth) if depth else variant for variant in (host_candidate, candidate)]
    return cost_model.is_likely_faster(variants[0].parts, variants[1].parts, count)


def _host_kinds(candidate: Candidate, hosts: Sequence[Host]) -> Iterator[HostKind]:
    """Yield for each kind of host the best candidate to serve alone: with all layers on its devices, with as many as they hold, with experts on its processor,
    or on its processor only. Devices leave space for the upper bound of the compute buffer, unless it is too large for the plan's own devices."""
    server = candidate.workload.server._replace(tensor_split=(), override_tensor=(), gpu_layers=None)
    workload, layout = candidate.workload._replace(server=server, placement=USE_FASTEST), candidate.layout
    compute_mib = -(-layout.load.compute // MIB)
    lacks_space = any(share.model_bytes > (share.device.capacity_mib - compute_mib) * MIB for share in layout.shares())
    kinds: dict[tuple[Any, ...], list[Host]] = {}
    for host in hosts:
        kind = (host.is_head, host.facts.memory_mib, host.facts.cpu, host.facts.accelerators)
        kinds.setdefault(kind, []).append(host)
    for peers in sorted(kinds.values(), key=lambda peers: not peers[0].is_head):
        host = peers[0]
        head_server = candidate.workload.server if host.is_head else None
        host_devices = tuple(devices.single_host_devices(host, candidate.site.server_backends[host.name], head_server))
        reduced_devices = tuple(
            device._replace(capacity_mib=max(0, device.capacity_mib - compute_mib)) for device in host_devices
        )
        site = site_of(host.name, {host.name: host}, host_devices, workload.summary.architecture, {})
        trials = [attempt_placement(workload, site._replace(devices=()))._replace(site=site)]
        if host_devices:
            attempt = attempt_placement(workload, site if lacks_space else site._replace(devices=reduced_devices))
            reduced_site = site._replace(devices=reduced_devices)
            trials += (
                [attempt]
                if attempt.fits
                else [_offload_most_layers(workload, reduced_site), *_move_experts(workload, reduced_site)]
            )
        candidates = [trial for trial in trials if trial.fits]
        choice = max(candidates, key=_speed) if candidates else min(trials, key=lambda trial: trial.layout.missing_mib)
        gpu_layers = (
            choice.layout.gpu_layers if host_devices and choice.layout.gpu_layers <= workload.summary.layers else None
        )
        override = next(iter(choice.workload.server.override_tensor), None)
        yield HostKind(tuple(peer.name for peer in peers), choice, gpu_layers, override)


def _offload_most_layers(workload: Workload, site: Site) -> Candidate:
    """Return the candidate with as many units on devices as they hold."""
    units = workload.summary.layers + 1

    def attempt(count: int) -> Candidate:
        return attempt_placement(workload._replace(server=workload.server._replace(gpu_layers=units - count)), site)

    return _smallest_fitting_candidate(attempt, units)


def _move_experts(workload: Workload, site: Site) -> list[Candidate]:
    """Return the candidate with the experts of as few layers as possible on the processor; nothing for other models."""
    summary = workload.summary
    if summary.tensors is None or summary.active_expert_share == 1:
        return []

    def attempt(count: int) -> Candidate:
        override = rf"blk\.({_numbers_pattern(count)})\.ffn_.*exps=CPU" if count < summary.layers else "exps=CPU"
        return attempt_placement(workload._replace(server=workload.server._replace(override_tensor=(override,))), site)

    return [_smallest_fitting_candidate(attempt, summary.layers)]


def _numbers_pattern(count: int) -> str:
    """Return a regular expression for the numbers below ``count``."""
    tens, ones = divmod(min(count, 100) - 1, 10)
    last_decade_pattern, full_decades_pattern = f"{tens or ''}[0-{ones}]", f"[1-{tens - 1}]?" if tens > 1 else ""
    return "|".join([f"{full_decades_pattern}[0-9]"] * bool(tens) + [last_decade_pattern, *map(str, range(100, count))])


def _smallest_fitting_candidate(attempt: Callable[[int], Candidate], maximum: int) -> Candidate:
    """Return the candidate with the smallest count that fits, or the candidate with the largest count if none fits."""
    lower_bound, upper_bound, best_candidate = 0, maximum, attempt(maximum)
    while best_candidate.fits and upper_bound - lower_bound > 1:
        midpoint = (lower_bound + upper_bound) // 2
        candidate = attempt(midpoint)
        lower_bound, upper_bound = (lower_bound, midpoint) if candidate.fits else (midpoint, upper_bound)
        best_candidate = candidate if candidate.fits else best_candidate
    return best_candidate

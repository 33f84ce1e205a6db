# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast a candidate is: tokens per second, seconds to load, what limits them, and the best of its hosts single."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    DeviceEstimate,
    Estimate,
    LinkEstimate,
    SingleHostEstimate,
    SpeedRange,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate, attempt
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.layout import FASTEST
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import Workload


def rounded(number: float) -> float:
    """Return the number with three digits: no more of it is known."""
    return float(f"{number:.3g}")


def _largest_cause(costs: Iterable[tuple[str, str, float]]) -> str:
    """Return the kind of costs with the largest sum, with the host that has the largest part of it.

    :param costs: kind (around the host's name), host, cost.
    """
    kinds: dict[str, dict[str, float]] = {}
    for kind, host, cost in costs:
        by_host = kinds.setdefault(kind, {})
        by_host[host] = by_host.get(host, 0) + cost
    kind = max(kinds, key=lambda name: sum(kinds[name].values()))
    return kind.format(max(kinds[kind], key=lambda host: kinds[kind][host]))


def _limit_of_generation(parts: Sequence[cost_model.Work]) -> str:
    costs = [("memory of {}", part.host, part.read / part.rate.gb_per_s / 1e6) for part in parts]
    costs += [("steps of the graph on {}", part.host, part.nodes * part.rate.node_us / 1e3) for part in parts]
    return _largest_cause(
        [*costs, *(("link to {}", part.host, cost_model.link_ms(part)) for part in parts if part.link)]
    )


def _limit_of_prompts(candidate: Candidate) -> str:
    costs = []
    for part in candidate.parts:
        cost = cost_model.prompt_costs(part, candidate.summary.width, _short_prompt(candidate))
        costs += [(f"{kind} {{}}", part.host, ms) for kind, ms in cost.items()]
    return _largest_cause(costs)


def _limit_of_load(candidate: Candidate) -> str:
    costs = []
    for part in candidate.parts:
        kind, seconds = cost_model.load_cost(candidate.release, part)
        costs.append((f"{kind} {{}}", part.host if kind == "link to" else candidate.site.head, seconds))
    return _largest_cause(costs)


class Speeds(NamedTuple):
    """Tokens per second."""

    generation: float
    prompt: float
    generation_range: SpeedRange
    prompt_range: SpeedRange


def range_of(speed: float, factor: float) -> SpeedRange:
    return SpeedRange(float(f"{speed / factor:.2g}"), float(f"{speed * factor:.2g}"))


def _short_prompt(candidate: Candidate) -> int:
    """Return how many tokens of a short prompt are computed together."""
    return min(cost_model.PROMPT_TOKENS, candidate.workload.micro_batch)


def checkpoint_ms(candidate: Candidate, tokens: int) -> float:
    """Return the milliseconds that checkpoints add to a prompt of so many tokens; 0 if none are made."""
    return _checkpoint_ms(candidate, tokens) if checkpoints_pay(candidate) else 0.0


def checkpoints_pay(candidate: Candidate) -> bool:
    """Return whether they take at most half as long as the planned prompt, which a conversation would compute again without them."""
    tokens = candidate.workload.prompt_tokens
    prompt_ms = cost_model.prompt_ms(candidate.parts, candidate.summary.width, _short_prompt(candidate))
    recomputing_ms = prompt_ms * tokens / cost_model.PROMPT_TOKENS
    return not candidate.parts or _checkpoint_ms(candidate, tokens) <= recomputing_ms / 2


def _checkpoint_ms(candidate: Candidate, tokens: int) -> float:
    """llama-server computes the last tokens by themselves, and fetches windows and states from the devices before them; those before the last micro-batch,
    too, of a longer prompt (server-context.cpp of build 11063)."""
    summary, cache, parts = candidate.summary, candidate.workload.cache, candidate.parts
    in_checkpoints = kv_cache.checkpointed(summary, cache)
    if not candidate.release.mainline or not any(in_checkpoints):
        return 0.0
    cells = min(tokens, kv_cache.window_size(summary) or 1)
    sizes = kv_cache.sizes(summary, cache._replace(context=cells, parallel=1), candidate.release.build)[0]
    s_per_gb = {part.device: cost_model.COPY_S_PER_GB + (8 / part.link.gbit if part.link else 0) for part in parts}
    layers = zip(candidate.layout.buffer_of_layers(), sizes, in_checkpoints)
    fetch_ms = sum(size * s_per_gb.get(buffer, 0) for buffer, size, counts in layers if counts) / 1e6
    return cost_model.token_ms(parts) + fetch_ms * (1 + (tokens > cache.tokens))


def speeds_of(candidate: Candidate) -> Speeds:
    parts, width, tokens = candidate.parts, candidate.summary.width, _short_prompt(candidate)
    generation = 1000 / cost_model.token_ms(parts)
    prompt_ms = cost_model.prompt_ms(parts, width, tokens) + checkpoint_ms(candidate, cost_model.PROMPT_TOKENS)
    prompt = 1000 * cost_model.PROMPT_TOKENS / prompt_ms if prompt_ms else 0.0
    return Speeds(
        rounded(generation),
        rounded(prompt),
        range_of(generation, cost_model.token_factor(parts)),
        range_of(prompt, cost_model.prompt_factor(parts, width, tokens)),
    )


def generation_figures(candidate: Candidate) -> dict[str, Any]:
    """Return the predicted speed of generation as a plan names it; None unless the model fits and generates text."""
    speeds = speeds_of(candidate) if candidate.parts and candidate.workload.generates else None
    return {
        "generation_tokens_per_s": speeds and speeds.generation,
        "generation_range": speeds and speeds.generation_range,
    }


def _prompt_figures(candidate: Candidate) -> dict[str, Any]:
    speeds = speeds_of(candidate) if candidate.parts else None
    return {"prompt_tokens_per_s": speeds and speeds.prompt, "prompt_range": speeds and speeds.prompt_range}


def estimate(candidate: Candidate, hosts: Mapping[str, Host], backends: Mapping[str, str]) -> Estimate:
    """Return the plan's ``estimate``.

    :param hosts: hosts that might serve single.
    :param backends: host → the backend by which it would serve.
    """
    parts = candidate.parts
    sources = [part.rate.source for part in parts]
    part_of = {part.device: part for part in parts}
    worker_parts = [
        part_of[device.buffer] for device in candidate.layout.devices if device.worker and device.buffer in part_of
    ]
    return Estimate(
        **generation_figures(candidate),
        **_prompt_figures(candidate),
        load_s=rounded(cost_model.load_s(candidate.release, parts)) if parts else None,
        limited_by=_limit_of_generation(parts) if parts and candidate.workload.generates else None,
        prompt_limited_by=_limit_of_prompts(candidate) if parts else None,
        load_limited_by=_limit_of_load(candidate) if parts else None,
        rates=max(sources, key=(cost_model.TABLE, cost_model.ASSUMED).index, default=None),
        devices=tuple(_device(part) for part in parts),
        best_single_host=_best_host(candidate, hosts, backends),
        network_ms_per_token=round(sum(cost_model.link_ms(part) for part in worker_parts), 3),
        links=tuple(_links(candidate, part_of)),
    )


def _device(part: cost_model.Work) -> DeviceEstimate:
    return DeviceEstimate(
        device=part.device,
        host=part.host,
        gb_per_s=part.rate.gb_per_s,
        prompt_gflops=part.rate.prompt_gflops,
        source=part.rate.source,
        ms_per_token=rounded(cost_model.device_ms(part)),
    )


def _links(candidate: Candidate, part_of: Mapping[str, cost_model.Work]) -> Iterator[LinkEstimate]:
    """Yield the cost of each worker besides computing.

    :param part_of: buffer → part of the model.
    """
    for device in candidate.layout.devices:
        link, part = candidate.site.link_to(device), part_of.get(device.buffer)
        if link and device.endpoint:
            yield LinkEstimate(
                host=device.host,
                endpoint=device.endpoint,
                kind=link.kind,
                one_way_ms=round(link.round_trip_ms / 2, 4),
                gbit_per_s=link.gbit,
                measured=link.measured,
                ms_per_token=rounded(cost_model.link_ms(part)) if part else 0.0,
            )


def _best_host(candidate: Candidate, hosts: Mapping[str, Host], backends: Mapping[str, str]) -> SingleHostEstimate:
    """Return the host that alone would generate the fastest, or read prompts without generation; if none holds the model, the one with the most memory."""
    fastest = [max(attempts, key=speeds_of) for attempts in _single_hosts(candidate, hosts, backends) if attempts]
    if not fastest:
        name = max(hosts, key=lambda host: hosts[host].facts.memory_mib)
        return SingleHostEstimate(name, False, None, None, None, None, None, False)
    generates = candidate.workload.generates
    best = max(fastest, key=lambda item: speeds_of(item).generation if generates else speeds_of(item).prompt)
    uses_processor = bool(best.site.devices) and best.layout.gpu_layers < best.layout.load.units
    return SingleHostEstimate(
        host=best.site.head,
        fits=True,
        gpu_layers=best.layout.gpu_layers if uses_processor else None,
        **generation_figures(best),
        **_prompt_figures(best),
        faster=bool(candidate.parts) and _is_surely_faster(best, candidate),
    )


def _is_surely_faster(single: Candidate, candidate: Candidate) -> bool:
    if candidate.workload.generates:
        return cost_model.is_surely_faster(single.parts, candidate.parts)
    return speeds_of(single).prompt_range.low > speeds_of(candidate).prompt_range.high


def _single_hosts(
    candidate: Candidate, hosts: Mapping[str, Host], backends: Mapping[str, str]
) -> Iterator[list[Candidate]]:
    """Yield for each host the ways in which it holds the model alone: with as many layers on its devices as they hold, and on its processor. The
    first of several hosts that are alike stands for all. Devices leave room for the bound of the compute buffer, unless that is too large for
    the plan's own devices."""
    server = candidate.workload.server._replace(tensor_split=(), override_tensor=(), gpu_layers=None)
    workload, layout = candidate.workload._replace(server=server, placement=FASTEST), candidate.layout
    bound = -(-layout.load.compute // MIB)
    is_tight = any(
        share.weights + share.kv > (device.capacity_mib - bound) * MIB
        for device, share in zip(layout.devices, layout.shares())
    )
    kinds = []
    for name, host in hosts.items():
        kind = (host.is_head, host.facts.memory_mib, host.facts.cpu, host.facts.accelerators)
        if kind in kinds:
            continue
        kinds.append(kind)
        head_server = candidate.workload.server if host.is_head else None
        host_devices = tuple(devices.single_host_devices(host, backends[name], head_server))
        bounded = tuple(device._replace(capacity_mib=max(0, device.capacity_mib - bound)) for device in host_devices)
        site = Site(name, {name: host}, ())
        attempts = [attempt(workload, site)._replace(site=site._replace(devices=host_devices))]
        if host_devices:
            whole = attempt(workload, site._replace(devices=host_devices if is_tight else bounded))
            uses_processor = not whole.fits
            attempts.append(_with_most_layers(workload, site._replace(devices=bounded)) if uses_processor else whole)
        yield [item for item in attempts if item.fits]


def _with_most_layers(workload: Workload, site: Site) -> Candidate:
    """Return the candidate with as many units on devices as they hold."""

    def with_layers(number: int) -> Candidate:
        return attempt(workload._replace(server=workload.server._replace(gpu_layers=number)), site)

    best = with_layers(0)
    low, high = 0, best.layout.load.units
    while high - low > 1:
        middle_units = (low + high) // 2
        candidate = with_layers(middle_units)
        low, high = (middle_units, high) if candidate.fits else (low, middle_units)
        best = candidate if candidate.fits else best
    return best

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The search for the layout: which devices hold which part of the model, and why it does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    auxiliary_models,
    cost_model,
    device_load,
    solver,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.device_load import Layout
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.devices import (
    load_mode_of,
    reserve_mib,
    usable_mib,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import Workload


def lay_out(workload: Workload, site: Site) -> Layout:
    """Return the layout with the least time for a token. Auxiliary models get the first placement with which everything fits."""
    overrides = _overrides(workload, [device_load.CPU_BUFFER, *(device.buffer for device in site.devices)])
    placements = list(auxiliary_models.candidate_placements(workload, site))
    load = device_load.load_of(workload.summary, workload.cache, workload.release.build, overrides)
    without_buffers = [(models, auxiliary_models.without_buffers(models)) for models in placements if models]
    failures = []
    for models, counted_models in [*zip(placements, placements), *without_buffers]:
        reserved_mib = {
            device.buffer: -(-sum(model.total_on(device) for model in counted_models) // MIB) for device in site.devices
        }
        devices = _change_capacities(site.devices, {buffer: -size for buffer, size in reserved_mib.items()})
        if any(device.capacity_mib < 0 for device in devices):
            continue
        head_bytes = sum(model.head_bytes for model in counted_models) + (workload.server.prompt_cache_mib or 0) * MIB
        layout = _lay_out_model(workload, site._replace(devices=devices), load, head_bytes)
        layout = layout._replace(devices=_change_capacities(layout.devices, reserved_mib), auxiliary=models)
        if not layout.reasons:
            return layout
        failures.append(layout)
    closest_layout = min(failures, key=lambda layout: layout.missing_mib)
    reasons = (
        f"{model_source.AUXILIARY_VARIABLES[model.role]} needs {-(-(model.weights + model.kv) // MIB)} MiB of "
        f"{model.device.name if model.device else 'the memory'} on {site.head}, which leaves too little for the model"
        for model in closest_layout.auxiliary
    )
    return closest_layout._replace(reasons=(*closest_layout.reasons, *reasons))


def _change_capacities(devices: Sequence[Device], added_mib: Mapping[str, int]) -> tuple[Device, ...]:
    return tuple(device._replace(capacity_mib=device.capacity_mib + added_mib[device.buffer]) for device in devices)


def _lay_out_model(workload: Workload, site: Site, load: device_load.Load, head_bytes: int) -> Layout:
    """Return the layout of the served model.

    :param head_bytes: bytes of the head's memory that auxiliary models and the prompt cache take.
    """
    server, devices = workload.server, site.devices
    gpu_layers = load.units if server.gpu_layers is None else min(server.gpu_layers, load.units)
    if not devices or not gpu_layers:
        missing_mib = _missing_head_mib(site.head_facts, load, load.units, head_bytes)
        remedy = "increase llama_server_gpu_layers" if devices else "add a worker"
        text = f"the model does not fit, because {site.head} lacks {missing_mib} MiB of memory: {remedy}"
        layout = Layout((), (), load, 0, missing_mib=missing_mib, load_mode=server.load_mode)
        return layout._replace(reasons=(text,)) if missing_mib else layout
    first_offloaded = load.units - gpu_layers
    reserved_bytes = reserve_mib(site.head_facts.memory_mib, shared=True) * MIB // 2
    processor_kv = load.head_kv_bytes(first_offloaded) - load.head_kv_bytes(0)
    table_bytes = max(0, load.head_weights(range(first_offloaded)) - reserved_bytes)
    head_kv_bytes = sum(load.kv) - sum(load.device_kv)
    devices = _reserve_head_memory(site, table_bytes + processor_kv + head_bytes + head_kv_bytes)
    if server.tensor_split:
        layout, can_fit = _layout_of_split(server.tensor_split, devices, load, gpu_layers), True
    else:
        options = _order_options(_device_options(workload, site._replace(devices=devices), load, first_offloaded), load)
        layout, can_fit = _fastest_layout(options, load, first_offloaded, workload.uses_all_devices)
    # With auto, llama-server maps nothing if a device of the head shares its memory.
    shares_memory = any(not device.worker and device.shares_memory for device in devices)
    shares, overloads = layout.shares(), layout.overloads()
    load_mode = server.load_mode or load_mode_of(workload.release, shares, site.head_host)
    _check_device_count(layout.devices, bool(server.tensor_split))
    is_mapped = load_mode == "mmap" or (load_mode in (None, "auto") and not shares_memory)
    missing_mib = _missing_head_mib(site.head_facts, load, first_offloaded, head_bytes, is_mapped)
    reasons = [
        *_describe_head_shortage(site.head, load, first_offloaded, missing_mib, server.prompt_cache_mib or 0),
        *_describe_overloads(overloads, can_fit),
    ]
    return layout._replace(
        reasons=(*reasons, *(_unmatched_overrides(load) if reasons else ())),
        missing_mib=missing_mib + sum(mib for _device, mib in overloads),
        load_mode=load_mode,
    )


def _reserve_head_memory(site: Site, size: int) -> tuple[Device, ...]:
    """Return the devices without the capacity that these bytes in the head's memory take: first memory that drivers' limits leave, then memory of the
    largest device that shares it."""
    sharing_devices = [device for device in site.devices if device.host == site.head and device.shares_memory]
    largest_device = max(sharing_devices, key=lambda device: device.capacity_mib, default=None)
    free_mib = usable_mib(site.head_facts.memory_mib) - sum(device.capacity_mib for device in sharing_devices)
    missing_mib = max(0, -(-size // MIB) - max(0, free_mib))
    return tuple(
        device._replace(capacity_mib=max(0, device.capacity_mib - missing_mib)) if device is largest_device else device
        for device in site.devices
    )


def _overrides(workload: Workload, buffers: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return expressions for names of tensors and their buffers, from ``llama_server_override_tensor``."""
    overrides = []
    for entry in workload.server.override_tensor:
        pattern, _equals, buffer = entry.partition("=")
        if not pattern or buffer not in buffers or "," in pattern:
            raise Refusal(
                f"llama_server_override_tensor has {entry!r}: use EXPRESSION=DEVICE, a regular expression for tensor names (no comma or =) and one of these "
                f"devices: {', '.join(buffers)}"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise Refusal(
                f"llama_server_override_tensor has {entry!r}, which is not a valid regular expression ({error}): correct it"
            ) from None
        overrides.append((pattern, buffer))
    if overrides and workload.summary.tensors is None:
        raise Refusal(
            "llama_server_override_tensor is set, but the model's summary has no tensor names: create the summary again with model_info"
        )
    return tuple(overrides)


def _layout_of_split(
    split: Sequence[float], devices: Sequence[Device], load: device_load.Load, gpu_layers: int
) -> Layout:
    """Return the operator's split between the devices that have a share or tensors of overrides."""
    if len(split) != len(devices) or min(split) < 0 or not any(split):
        raise Refusal(
            f"llama_server_tensor_split is {list(split)}: set shares of 0 or more, at least one above 0, for these {len(devices)} devices in this order: "
            + ", ".join(device.label for device in devices)
        )
    pairs = [
        (device, share) for device, share in zip(devices, split) if share or load.tensors_by_buffer.get(device.buffer)
    ]
    return Layout(
        tuple(device for device, _share in pairs),
        tuple(share for _device, share in pairs),
        load,
        gpu_layers,
        share_reasons=("llama_server_tensor_split",) * len(pairs),
    )


class DeviceOption(NamedTuple):
    """A device that the solver may choose."""

    device: Device
    rate: device_rates.Rate
    spec: solver.DeviceSpec

    @property
    def is_needed(self) -> bool:
        """Return whether llama-server uses it even without units."""
        return bool(self.spec.fixed_bytes)


def _device_options(workload: Workload, site: Site, load: device_load.Load, first_offloaded: int) -> list[DeviceOption]:
    """Return the devices that the solver may choose. Units cost the same on similar devices, even if one is the head's and one a worker's: their
    memory then decides which layers they get, and the cost of a worker whether they get any."""
    rates = [site.rates[device.buffer] for device in site.devices]
    times = [cost_model.model_and_unit_ms(load, rate) for rate in rates]
    token_ms = [ms for ms, _unit_ms in times]
    groups = solver.groups_of([1 / ms for ms in token_ms])
    unit_costs = {}
    for group in set(groups):
        fastest_index = min((ms, index) for index, ms in enumerate(token_ms) if groups[index] == group)[1]
        unit_costs[group] = [solver.cost_of(ms) for ms in times[fastest_index][1]]
    visits_ms = {
        device.buffer: [cost_model.worker_ms(link, rate, count) if link else 0 for count in (1, 2)]
        for device, rate in zip(site.devices, rates)
        for link in (site.links.get(device.buffer),)
    }
    min_saved_ms = cost_model.MIN_SAVED_SHARE * min(token_ms)
    move_costs = {buffer: solver.cost_of(two_ms - one_ms) for buffer, (one_ms, two_ms) in visits_ms.items()}
    options = []
    for device, rate, group in zip(site.devices, rates, groups):
        fixed_bytes, buffer, costs = (
            load.override_bytes(device.buffer, device.backend),
            device.buffer,
            list(unit_costs[group]),
        )
        if link := site.links.get(buffer):
            costs[-1] += solver.cost_of(cost_model.wire_ms(link, 4 * workload.summary.vocabulary))
        for unit, targets in load.override_targets.items():
            for target in targets - {buffer}:
                costs[unit] += move_costs[buffer] + move_costs.get(target, 0)
                costs[unit] += solver.MOVE_COST * (target != device_load.CPU_BUFFER)
        base_cost = solver.cost_of(visits_ms[buffer][0] + (min_saved_ms if device.host != site.head else 0.0))
        base_cost += solver.DEVICE_COST + (solver.WORKER_COST if device.worker else 0)
        spec = solver.DeviceSpec(
            capacity=device.capacity_mib * MIB,
            fixed_bytes=fixed_bytes,
            compute=load.compute_on(device, first_offloaded),
            sizes=load.sizes(device.backend),
            prefix_costs=solver.prefix_sums(costs),
            base_cost=0 if fixed_bytes else base_cost,
            group=group,
        )
        options.append(DeviceOption(device, rate, spec))
    return options


def _order_options(options: Sequence[DeviceOption], load: device_load.Load) -> list[DeviceOption]:
    """Return the devices in the order in which llama-server takes layers: workers, then the head's own, each with the fastest last. The
    last device gets the output, whose result then need not cross the network. With overrides, the devices follow the order of their layers."""
    units_by_buffer: dict[str, list[int]] = {}
    for unit, targets in load.override_targets.items():
        for target in targets:
            units_by_buffer.setdefault(target, []).append(unit)
    mean_units = {buffer: sum(units) / len(units) for buffer, units in units_by_buffer.items()}

    def position(option: DeviceOption) -> tuple[float, bool, int]:
        return mean_units.get(option.device.buffer, load.units), option.device.worker is None, -option.spec.group

    return sorted(options, key=position)


def _solve(
    options: Sequence[DeviceOption], first_offloaded: int, uses_all: bool
) -> tuple[Sequence[DeviceOption], Sequence[int] | None]:
    """Return the devices and the units of each; of more devices than llama.cpp supports, those with the most memory."""

    def units_of(subset: Sequence[DeviceOption]) -> Sequence[int] | None:
        specs = [option.spec for option in subset]
        specs = [spec._replace(base_cost=spec.base_cost - solver.USE_REWARD * uses_all) for spec in specs]
        return solver.solve(tuple(specs), first_offloaded)

    units = units_of(options)
    device_count = sum(bool(count or option.is_needed) for option, count in zip(options, units or ()))
    if len(options) <= capabilities.MAX_DEVICES or (units and device_count <= capabilities.MAX_DEVICES):
        return options, units

    def priority(option: DeviceOption) -> tuple[bool, bool, int, int]:
        return option.is_needed, option.device.worker is None, option.spec.capacity, -option.spec.group

    largest_options = sorted(options, key=priority)[-capabilities.MAX_DEVICES :]
    subset = [option for option in options if option in largest_options]
    return subset, units_of(subset)


def _fastest_layout(
    options: Sequence[DeviceOption], load: device_load.Load, first_offloaded: int, uses_all: bool
) -> tuple[Layout, bool]:
    """Return the layout with the least time for a token, and whether the model fits; if it does not, shares follow the capacities."""
    options, units = _solve(options, first_offloaded, uses_all)
    devices, gpu_layers = [option.device for option in options], load.units - first_offloaded
    if units is None:
        capacities = [max(0, option.spec.capacity - option.spec.fixed_bytes) for option in options]
        shares = device_load.proportional_shares(gpu_layers, capacities)
        share_reasons = ("the model does not fit",) * len(shares)
        return Layout(tuple(devices), tuple(shares), load, gpu_layers, share_reasons=share_reasons), False
    reasons = _share_reasons(options, units, uses_all)
    device_load.check_split(load, gpu_layers, units)
    entries = [entry for entry in zip(options, devices, units, reasons) if entry[2] or entry[0].is_needed]
    _options, used_devices, split, share_reasons = zip(*entries)
    return Layout(used_devices, split, load, gpu_layers, share_reasons=share_reasons), True


def _share_reasons(options: Sequence[DeviceOption], units: Sequence[int], uses_all: bool) -> list[str]:
    """Return for each device why it gets its units."""
    reasons = []
    for option, count in zip(options, units):
        rate, group = option.rate, option.spec.group
        sizes = [peer.spec.capacity for peer, share in zip(options, units) if share and peer.spec.group == group]
        share_text = "evenly" if sizes and min(sizes) >= solver.MIN_SIMILARITY * max(sizes) else "by memory size"
        peer_text = f", shared {share_text}" if count and len(sizes) > 1 else ""
        reason = _share_reason(option.spec, count, [peer.spec for peer in options], units, uses_all)
        reasons.append(f"{rate.gb_per_s:g} GB/s ({rate.source}), {reason}{peer_text}")
    return reasons


def _share_reason(
    spec: solver.DeviceSpec, count: int, specs: Sequence[solver.DeviceSpec], units: Sequence[int], uses_all: bool
) -> str:
    if not count:
        return "tensors from llama_server_override_tensor" if spec.fixed_bytes else "nothing"
    shares = [*zip(specs, units)]
    if any(share for peer, share in shares if peer.group < spec.group):
        return "one layer, because every device is used" if uses_all and count == 1 else "overflow from faster devices"
    max_slower_units = max((share for peer, share in shares if peer.group > spec.group), default=0)
    if max_slower_units == 1 and uses_all:
        return "most layers: faster than other devices"
    if max_slower_units:
        return "filled first: faster than other devices"
    unused_faster_specs = [peer for peer in specs if peer.group < spec.group]
    if any(peer.fits_one_unit for peer in unused_faster_specs):
        return "faster devices would add more overhead than they save"
    if unused_faster_specs:
        return "the fastest memory with enough space"
    return "the fastest memory" if len(specs) > 1 else "the only device"


def _check_device_count(devices: Sequence[Device], has_split: bool) -> None:
    """Refuse more devices than llama.cpp supports (GGML_SCHED_MAX_BACKENDS, and the longest ``-ts``): it would abort with a failed assertion.

    :param has_split: whether the operator gives each device its share.
    """
    if len(devices) <= capabilities.MAX_DEVICES:
        return
    worker_count = sum(device.worker is not None for device in devices)
    remedy = "name fewer devices in llama_server_override_tensor"
    if has_split:
        remedy = "set the share of dispensable devices to 0 in llama_server_tensor_split"
    raise Refusal(
        f"the plan needs {len(devices)} devices ({worker_count} on workers, {len(devices) - worker_count} on the head), but llama.cpp supports at most "
        f"{capabilities.MAX_DEVICES} in addition to the head's processor: {remedy}"
    )


def _missing_head_mib(
    facts: Facts, load: device_load.Load, first_offloaded: int, head_bytes: int, is_mapped: bool = False
) -> int:
    """Return the MiB that are missing in the head's memory for the layers before ``first_offloaded`` and for further bytes.

    :param is_mapped: whether the layers are pages of the model's file: the kernel drops some if the system needs more than half of its reserve.
    """
    size = load.head_weights(range(first_offloaded)) + load.head_kv_bytes(first_offloaded) + head_bytes
    reserved_mib = reserve_mib(facts.memory_mib, shared=True)
    reserved_mib = max(reserve_mib(0, shared=True), reserved_mib // 2) if is_mapped else reserved_mib
    return max(0, -(-size // MIB) - max(0, facts.memory_mib - reserved_mib))


def _describe_head_shortage(
    head: str, load: device_load.Load, first_offloaded: int, missing_mib: int, cache_mib: int
) -> tuple[str, ...]:
    """Return a sentence if the layers before ``first_offloaded`` do not fit into the head's memory.

    :param cache_mib: memory that the operator gives to conversations there.
    """
    if not missing_mib:
        return ()
    if not first_offloaded and not load.overrides:
        tables_note = f" for {load.head_weights() // MIB} MiB of embedding tables"
        head_kv_bytes = sum(load.kv) - sum(load.device_kv)
        if head_kv_bytes:
            tables_note += f"{',' if cache_mib else ' and'} {head_kv_bytes // MIB} MiB of KV cache (--no-kv-offload)"
        note = f" and {cache_mib} MiB for llama_server_prompt_cache_mib: reduce this variable, or" if cache_mib else ":"
        return (f"{head} lacks {missing_mib} MiB of memory{tables_note}{note} choose a head with more memory",)
    return (
        f"llama_server_gpu_layers and llama_server_override_tensor leave {first_offloaded} layers and {load.head_weights(range(first_offloaded)) // MIB} MiB "
        f"of weights on the head, but {head} lacks {missing_mib} MiB of memory: leave fewer layers and tensors on the head",
    )


def _unmatched_overrides(load: device_load.Load) -> list[str]:
    """Return a sentence for each override that matches no tensor, since that may be why the model does not fit."""
    names = {tensor.name for tensor in load.tensors}
    return [
        f"llama_server_override_tensor has {f'{pattern}={device}'!r}, which matches no tensor of the model: correct or remove it"
        for pattern, device in load.overrides
        if not any(re.search(pattern, name) for name in names)
    ]


def _describe_overloads(overloads: Sequence[tuple[Device, int]], can_fit: bool) -> list[str]:
    """Return sentences about the devices that get more than they hold.

    :param can_fit: whether the model could fit: then the operator's settings are the reason.
    """
    if can_fit:
        return [
            f"llama_server_tensor_split or llama_server_override_tensor assigns {mib} MiB too much to {device.label}, whose capacity is "
            f"{device.capacity_mib} MiB: reduce its share"
            for device, mib in overloads
        ]
    reserved_hosts = list(
        dict.fromkeys(device.host for device, _mib in overloads if device.endpoint and not device.capacity_mib)
    )
    note = f"; all memory of {', '.join(reserved_hosts)} is reserved for the system: set a worker's memory_mib in llama_worker_endpoints to use some of it"
    return [
        f"the model does not fit: it exceeds the devices' capacity by {sum(mib for _device, mib in overloads)} MiB ("
        + "; ".join(f"{mib} on {device.label}, whose capacity is {device.capacity_mib}" for device, mib in overloads)
        + "): add a worker, or choose a smaller model"
        + (note if reserved_hosts else "")
    ]

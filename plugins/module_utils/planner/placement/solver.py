# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The search for the number of units of each device with which a token takes the least time. It knows only numbers, no hosts or backends.

Devices compute units in order, one device after the other, so a placement is a number of units for each device in this order. The solver
is exact: it uses dynamic programming over (device, unit), with a queue for the cheapest start, and takes devices times units steps.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_SIMILARITY = 0.9
"""Smallest ratio between the rates of similar devices: measurements differ by as much."""
FREE_STEPS = 16
"""Number of steps in which free space for compute buffers is reduced, if the model does not fit with their upper bounds."""
FILL_PARTS = 1 << 20
"""Resolution of fill levels: number of parts in a device's capacity."""
COMPARED_BITS = 12
"""Number of leading bits of fill levels that are compared."""

DEVICE_COST = 1
WORKER_COST = 1 << 8
MOVE_COST = 1 << 16
ATTOSECOND = 1 << 32
USE_REWARD = 1 << 120
"""Costs are integers, so that equal costs compare as equal. Larger terms have priority: devices that have to be used, then time, then
tensors on another device than the rest of their layer, then workers, then devices."""
INFINITE_COST = 1 << 160


class Sizes(NamedTuple):
    """Bytes that a device needs for units."""

    bytes_before: tuple[int, ...]
    """Bytes of all units before each one, and of all."""
    copied_before: tuple[int, ...]
    """Number of these units that need the tensors of which a device has one copy."""
    copy_bytes: int
    """Bytes of these tensors."""

    def bytes_of(self, start: int, end: int) -> int:
        copy_bytes = self.copy_bytes if self.copied_before[end] > self.copied_before[start] else 0
        return self.bytes_before[end] - self.bytes_before[start] + copy_bytes


class DeviceSpec(NamedTuple):
    """A device that may get units."""

    capacity: int
    """Bytes, of which ``fixed_bytes`` are always in use."""
    fixed_bytes: int
    compute: int
    """Upper bound of its compute buffer in bytes."""
    sizes: Sizes
    prefix_costs: tuple[int, ...]
    """Cost on this device of all units before each one, and of all."""
    base_cost: int
    """Cost of using the device at all."""
    group: int
    """Group of similar devices; group 0 is the fastest."""

    @property
    def fits_one_unit(self) -> bool:
        smallest_unit = min(self.sizes.bytes_of(unit, unit + 1) for unit in range(len(self.prefix_costs) - 1))
        return self.fixed_bytes + smallest_unit <= self.capacity


class Limits(NamedTuple):
    """Most bytes of units that a device may get, and fewest bytes if it gets any."""

    max_bytes: int
    min_bytes: int = 0


class Placement(NamedTuple):
    """A solution: its cost, and the number of units of each device."""

    cost: int
    units: list[int]


def groups_of(rates: Sequence[float]) -> list[int]:
    """Return the group of each device: group 0 has the fastest device and similar devices."""
    leaders: list[float] = []
    for rate in sorted(rates, reverse=True):
        if not leaders or rate < MIN_SIMILARITY * leaders[-1]:
            leaders.append(rate)
    return [next(index for index, leader in enumerate(leaders) if rate >= MIN_SIMILARITY * leader) for rate in rates]


def cost_of(ms: float) -> int:
    return round(ms * 1e15) * ATTOSECOND


def prefix_sums(numbers: Sequence[int]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(numbers))


def cheapest_placement(
    specs: Sequence[DeviceSpec], limits: Sequence[Limits], positions: Sequence[Sequence[int]], last_unit: int
) -> Placement | None:
    """Return the cheapest placement; None if the units do not fit.

    :param positions: numbers of units that may be placed before the first device and after each device.
    :param last_unit: unit before which each device has to start.
    """
    units = positions[-1][-1]
    costs = _initial_costs(specs, positions[0][0])
    starts = []
    for index, (spec, limit) in enumerate(zip(specs, limits)):
        costs, first_units = _add_device(spec, limit, costs, positions[index], positions[index + 1], last_unit)
        starts.append(first_units)
    if costs[units] >= INFINITE_COST // 2:
        return None
    end, counts = units, []
    for first_units in reversed(starts):
        start = end if first_units[end] < 0 else first_units[end]
        counts.append(end - start)
        end = start
    return Placement(costs[units], counts[::-1])


def _initial_costs(specs: Sequence[DeviceSpec], start: int) -> list[int]:
    costs = [INFINITE_COST] * len(specs[0].prefix_costs)
    costs[start] = 0
    return costs


def _all_positions(specs: Sequence[DeviceSpec], first_offloaded: int) -> list[list[int]]:
    units = len(specs[0].prefix_costs) - 1
    return [[first_offloaded], *([list(range(first_offloaded, units + 1))] * len(specs))]


def _add_device(
    spec: DeviceSpec, limit: Limits, costs: Sequence[int], starts: Sequence[int], ends: Sequence[int], last_unit: int
) -> tuple[list[int], list[int]]:
    """Return the least costs of all units before each one with one more device, and the first unit of that device; -1 if it gets none.

    :param costs: costs without the device; only those at ``starts`` count.
    :param ends: units before which costs are computed.
    """
    (bytes_before, copied_before, copy_bytes), prefix_costs, (maximum, minimum) = spec.sizes, spec.prefix_costs, limit
    result, first_units = [INFINITE_COST] * len(costs), [-1] * len(costs)
    queue: deque[tuple[int, int]] = deque()
    index = leave_index = 0
    count = len(starts)
    for end in ends:
        size, end_count, result[end] = bytes_before[end], copied_before[end], costs[end]
        bound = min(end, last_unit)
        while index < count and (start := starts[index]) < bound:
            if minimum and size - bytes_before[start] + copy_bytes * (end_count > copied_before[start]) < minimum:
                break
            value = costs[start] - prefix_costs[start]
            while queue and queue[-1][0] > value:
                queue.pop()
            queue.append((value, start))
            index += 1
        while leave_index < count and (start := starts[leave_index]) < end:
            if size - bytes_before[start] + copy_bytes * (end_count > copied_before[start]) <= maximum:
                break
            leave_index += 1
            if queue and queue[0][1] == start:
                queue.popleft()
        if queue and (value := queue[0][0] + prefix_costs[end] + spec.base_cost) < result[end]:
            result[end], first_units[end] = value, queue[0][1]
    return result, first_units


@functools.lru_cache(maxsize=64)  # most attempts of a plan have the same devices and the same model
def solve(specs: tuple[DeviceSpec, ...], first_offloaded: int) -> tuple[int, ...] | None:
    """Return the units of each device; None if they do not fit. Of placements with equal costs, it is the one that fills similar devices most evenly."""
    units, positions = len(specs[0].prefix_costs) - 1, _all_positions(specs, first_offloaded)
    for last_unit in (units - 1, units):  # a device has a layer, not the output alone, unless nothing else fits
        limits = _choose_limits(specs, positions, last_unit)
        placement = cheapest_placement(specs, limits, positions, last_unit) if limits else None
        if limits and placement:
            return tuple(_balance(specs, limits, first_offloaded, last_unit, placement))
    return None


def _choose_limits(
    specs: Sequence[DeviceSpec], positions: Sequence[Sequence[int]], last_unit: int
) -> list[Limits] | None:
    """Return the limits that leave the most space for compute buffers. The upper bounds of buffers never prevent a placement."""

    def limits_of(steps: int) -> list[Limits]:
        return [Limits(max(0, spec.capacity - spec.fixed_bytes - spec.compute * steps // FREE_STEPS)) for spec in specs]

    attempt = cheapest_placement(specs, limits_of(0), positions, last_unit)
    if not attempt:
        return None

    def fits_with(steps: int) -> bool:
        placement = cheapest_placement(specs, limits_of(steps), positions, last_unit)
        return placement is not None and placement.cost // USE_REWARD <= attempt.cost // USE_REWARD

    lower_bound, upper_bound = 0, FREE_STEPS
    steps = FREE_STEPS  # most models leave this much space
    while lower_bound < upper_bound:
        lower_bound, upper_bound = (steps, upper_bound) if fits_with(steps) else (lower_bound, steps - 1)
        steps = (lower_bound + upper_bound + 1) // 2
    return limits_of(lower_bound)


def _positions_at_cost(
    specs: Sequence[DeviceSpec], limits: Sequence[Limits], first_offloaded: int, last_unit: int, cost: int
) -> list[list[int]]:
    """Return the numbers of units that may be placed before the first device and after each device if the placement has to cost this much."""
    positions, units = _all_positions(specs, first_offloaded), len(specs[0].prefix_costs) - 1
    costs_before = [_initial_costs(specs, first_offloaded)]
    for spec, limit, starts, ends in zip(specs, limits, positions, positions[1:]):
        costs_before.append(_add_device(spec, limit, costs_before[-1], starts, ends, last_unit)[0])
    costs_after = [_initial_costs(specs, 0)]
    all_positions = list(range(units + 1))
    for spec, limit in zip(reversed(specs), reversed(limits)):
        costs_after.append(_add_device(_mirror(spec), limit, costs_after[-1], all_positions, all_positions, units)[0])
    return [
        [end for end in ends if costs[end] + later_costs[units - end] <= cost]
        for ends, costs, later_costs in zip(positions, costs_before, reversed(costs_after))
    ]


def _mirror(spec: DeviceSpec) -> DeviceSpec:
    """Return the device for units in reverse order."""

    def flip(sums: Sequence[int]) -> tuple[int, ...]:
        return tuple(sums[-1] - total for total in reversed(sums))

    sizes = spec.sizes
    sizes = sizes._replace(bytes_before=flip(sizes.bytes_before), copied_before=flip(sizes.copied_before))
    return spec._replace(sizes=sizes, prefix_costs=flip(spec.prefix_costs))


class _Group(NamedTuple):
    """Similar devices, as members of all devices of a placement."""

    specs: Sequence[DeviceSpec]
    members: Sequence[int]
    first_offloaded: int
    """The first unit that is on a device."""
    find_units: Callable[[list[Limits]], list[int] | None]
    """Function that returns units within limits at the same cost; None if there are none."""

    def fill_levels(self, units: Sequence[int]) -> list[int]:
        """Return the fill levels of the members with units, in parts of their capacity."""
        starts = [self.first_offloaded + start for start in prefix_sums(units)]
        held_bytes = {
            index: self.specs[index].sizes.bytes_of(starts[index], starts[index + 1]) + self.specs[index].fixed_bytes
            for index in self.members
            if units[index]
        }
        return [-(-FILL_PARTS * size // self.specs[index].capacity) for index, size in held_bytes.items()]

    def change_limits(self, limits: Sequence[Limits], change: Callable[[DeviceSpec, Limits], Limits]) -> list[Limits]:
        return [
            change(spec, limit) if index in self.members else limit
            for index, (spec, limit) in enumerate(zip(self.specs, limits))
        ]

    def lower_maximum(self, limits: list[Limits], units: list[int]) -> tuple[list[Limits], list[int]]:
        """Return limits and units that minimise the highest fill level."""

        def limits_below(fill_level: int) -> list[Limits]:
            return self.change_limits(
                limits,
                lambda spec, limit: limit._replace(
                    max_bytes=max(0, min(limit.max_bytes, fill_level * spec.capacity // FILL_PARTS - spec.fixed_bytes))
                ),
            )

        lower_bound, upper_bound = 0, max(self.fill_levels(units), default=0)
        while upper_bound - lower_bound > upper_bound >> COMPARED_BITS:
            fill_level = (lower_bound + upper_bound) // 2
            trial_units = self.find_units(limits_below(fill_level))
            if trial_units is None:
                lower_bound = fill_level + 1
            else:
                units, upper_bound = trial_units, min(fill_level, max(self.fill_levels(trial_units), default=0))
        return limits_below(upper_bound), units

    def raise_minimum(self, limits: list[Limits], units: list[int]) -> tuple[list[Limits], list[int]]:
        """Return limits and units that maximise the lowest fill level of members with units."""

        def limits_above(fill_level: int) -> list[Limits]:
            return self.change_limits(
                limits,
                lambda spec, limit: limit._replace(
                    min_bytes=max(0, (fill_level - 1) * spec.capacity // FILL_PARTS + 1 - spec.fixed_bytes)
                ),
            )

        fill_levels = self.fill_levels(units)
        lower_bound, upper_bound = min(fill_levels, default=0), max(fill_levels, default=0)
        while upper_bound - lower_bound > upper_bound >> COMPARED_BITS:
            fill_level = (lower_bound + upper_bound + 1) // 2
            trial_units = self.find_units(limits_above(fill_level))
            if trial_units is None:
                upper_bound = fill_level - 1
            else:
                units, lower_bound = trial_units, max(fill_level, min(self.fill_levels(trial_units)))
        return limits_above(lower_bound), units


def _balance(
    specs: Sequence[DeviceSpec], limits: list[Limits], first_offloaded: int, last_unit: int, placement: Placement
) -> list[int]:
    """Return the units of each device. Of all placements with the least cost, it is the one where in each group the fullest device is least full
    and, of these, the one where the emptiest device with units is fullest.

    :param placement: a placement with the least cost.
    """
    cost, units = placement
    positions = _positions_at_cost(specs, limits, first_offloaded, last_unit, cost)

    def find_units(trial_limits: list[Limits]) -> list[int] | None:
        placement = cheapest_placement(specs, trial_limits, positions, last_unit)
        return placement.units if placement and placement.cost == cost else None

    for group in sorted({spec.group for spec in specs}):
        members = [index for index, spec in enumerate(specs) if spec.group == group and spec.capacity]
        if len(members) > 1:
            peers = _Group(specs, members, first_offloaded, find_units)
            limits, units = peers.raise_minimum(*peers.lower_maximum(limits, units))
    return units

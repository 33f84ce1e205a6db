# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many units each device gets, so that a token takes the fewest seconds. Knows no host and no backend, only numbers.

Units are worked through in order, one device after the other, so a placement is a number of units for each device in their order. The
solver is exact: dynamic programming over (device, unit), with a queue for the cheapest start, which takes devices times units steps.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

SIMILARITY = 0.9
"""Smallest ratio between rates of similar devices: measurements differ by as much."""
STEPS = 16
"""Number of steps in which free space for compute buffers is reduced, if the model does not fit with their upper bounds."""
FILL_PARTS = 1 << 20
"""Unit of a device's fill level: its capacity is this many parts."""
COMPARED_BITS = 12
"""Number of leading bits in which different fill levels differ."""

DEVICE = 1
WORKER = 1 << 8
MOVE = 1 << 16
ATTOSECOND = 1 << 32
REQUIRED = 1 << 120
"""Costs are whole numbers, so that equal ones are equal. What is larger counts first: devices that have to be used, then seconds, then
tensors that are on another device than the rest of their layer, then workers, then devices."""
INFINITY = 1 << 160


class Sizes(NamedTuple):
    """Bytes that a device needs for units."""

    bytes_before: tuple[int, ...]
    """Bytes of all units before each one, and of all."""
    copied_before: tuple[int, ...]
    """How many of them need the tensors of which a device has one copy."""
    copies: int
    """Bytes of these."""

    def bytes_of(self, start: int, end: int) -> int:
        copies = self.copies if self.copied_before[end] > self.copied_before[start] else 0
        return self.bytes_before[end] - self.bytes_before[start] + copies


class Place(NamedTuple):
    """A device that may get units."""

    capacity: int
    """Bytes, of which ``fixed`` are taken whatever it gets."""
    fixed_bytes: int
    compute: int
    """Upper bound of its compute buffer in bytes."""
    sizes: Sizes
    cost: tuple[int, ...]
    """Cost of all units before each one here, and of all."""
    base: int
    """Cost of using the device at all."""
    group: int
    """Number of the devices that are alike; 0 are the fastest."""

    @property
    def fits_one_unit(self) -> bool:
        smallest_unit = min(self.sizes.bytes_of(unit, unit + 1) for unit in range(len(self.cost) - 1))
        return self.fixed_bytes + smallest_unit <= self.capacity


class Limits(NamedTuple):
    """Bytes of units that a device may get at most, and has to get at least if it gets any."""

    max_bytes: int
    min_bytes: int = 0


class Placement(NamedTuple):
    """A result: what it costs, and units for each device."""

    cost: int
    units: list[int]


def groups_of(rates: Sequence[float]) -> list[int]:
    """Return the group of each device: group 0 has the fastest device and similar devices."""
    leaders: list[float] = []
    for rate in sorted(rates, reverse=True):
        if not leaders or rate < SIMILARITY * leaders[-1]:
            leaders.append(rate)
    return [next(index for index, leader in enumerate(leaders) if rate >= SIMILARITY * leader) for rate in rates]


def cost_of(milliseconds: float) -> int:
    return round(milliseconds * 1e15) * ATTOSECOND


def prefix_sums(numbers: Sequence[int]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(numbers))


def cheapest_placement(
    places: Sequence[Place], limits: Sequence[Limits], positions: Sequence[Sequence[int]], last_unit: int
) -> Placement | None:
    """Return the cheapest placement; None if the units do not fit.

    :param positions: before the first device and after each one, how many units may be placed by then.
    :param last_unit: the first unit of each device is before this one.
    """
    units = positions[-1][-1]
    costs = _no_units_placed(places, positions[0][0])
    starts = []
    for index, (place, limit) in enumerate(zip(places, limits)):
        costs, first_units = _with_device(place, limit, costs, positions[index], positions[index + 1], last_unit)
        starts.append(first_units)
    if costs[units] >= INFINITY // 2:
        return None
    end, counts = units, []
    for first_units in reversed(starts):
        start = end if first_units[end] < 0 else first_units[end]
        counts.append(end - start)
        end = start
    return Placement(costs[units], counts[::-1])


def _no_units_placed(places: Sequence[Place], first_unit: int) -> list[int]:
    costs = [INFINITY] * len(places[0].cost)
    costs[first_unit] = 0
    return costs


def _all_positions(places: Sequence[Place], first_unit: int) -> list[list[int]]:
    units = len(places[0].cost) - 1
    return [[first_unit], *([list(range(first_unit, units + 1))] * len(places))]


def _with_device(
    place: Place, limit: Limits, costs: Sequence[int], starts: Sequence[int], ends: Sequence[int], last_unit: int
) -> tuple[list[int], list[int]]:
    """The least costs of all units before each one with one device more, and the first of its units, -1 where it gets none.

    :param costs: the costs without the device, of which those of ``starts`` count.
    :param ends: of which the costs are wanted.
    """
    (bytes_before, copies_before, copies), cost, base, (maximum, minimum) = (place.sizes, place.cost, place.base, limit)
    result, first_units = [INFINITY] * len(costs), [-1] * len(costs)
    queue: deque[tuple[int, int]] = deque()
    head = tail = 0
    count = len(starts)
    for end in ends:
        used, with_copy, result[end] = bytes_before[end], copies_before[end], costs[end]
        bound = min(end, last_unit)
        while head < count and (start := starts[head]) < bound:
            if minimum and used - bytes_before[start] + (copies if with_copy > copies_before[start] else 0) < minimum:
                break
            value = costs[start] - cost[start]
            while queue and queue[-1][0] > value:
                queue.pop()
            queue.append((value, start))
            head += 1
        while tail < count and (start := starts[tail]) < end:
            if used - bytes_before[start] + (copies if with_copy > copies_before[start] else 0) <= maximum:
                break
            tail += 1
            if queue and queue[0][1] == start:
                queue.popleft()
        if queue and (value := queue[0][0] + cost[end] + base) < result[end]:
            result[end], first_units[end] = value, queue[0][1]
    return result, first_units


@functools.lru_cache(maxsize=64)  # most attempts of a plan have the same devices and the same model
def solve(places: tuple[Place, ...], first_unit: int) -> tuple[int, ...] | None:
    """Return the units of each device; None if they do not fit. Among equal costs, similar devices are filled most evenly."""
    units = len(places[0].cost) - 1
    for last_unit in (units - 1, units):  # a device has a layer, not the output alone, unless nothing else fits
        limits = _limits_beside_compute(places, first_unit, last_unit)
        placement = (
            cheapest_placement(places, limits, _all_positions(places, first_unit), last_unit) if limits else None
        )
        if limits and placement:
            return tuple(_balance(places, limits, first_unit, last_unit, placement))
    return None


def _limits_beside_compute(places: Sequence[Place], first_unit: int, last_unit: int) -> list[Limits] | None:
    """Return the limits that leave the most space for compute buffers. Their upper bounds never prevent a placement."""

    def limits_of(steps: int) -> list[Limits]:
        return [Limits(max(0, place.capacity - place.fixed_bytes - place.compute * steps // STEPS)) for place in places]

    positions = _all_positions(places, first_unit)
    attempt = cheapest_placement(places, limits_of(0), positions, last_unit)
    if not attempt:
        return None

    def is_enough(steps: int) -> bool:
        placement = cheapest_placement(places, limits_of(steps), positions, last_unit)
        return placement is not None and placement.cost // REQUIRED <= attempt.cost // REQUIRED

    lower_bound, upper_bound = 0, STEPS
    steps = STEPS  # most models have this room
    while lower_bound < upper_bound:
        lower_bound, upper_bound = (steps, upper_bound) if is_enough(steps) else (lower_bound, steps - 1)
        steps = (lower_bound + upper_bound + 1) // 2
    return limits_of(lower_bound)


def _reachable_at_cost(
    places: Sequence[Place], limits: Sequence[Limits], first_unit: int, last_unit: int, cost: int
) -> list[list[int]]:
    """Before the first device and after each one, the number of units that may be placed by then if all of them are to cost this much."""
    positions, units = _all_positions(places, first_unit), len(places[0].cost) - 1
    costs_before = [_no_units_placed(places, first_unit)]
    for place, limit, starts, ends in zip(places, limits, positions, positions[1:]):
        costs_before.append(_with_device(place, limit, costs_before[-1], starts, ends, last_unit)[0])
    costs_after = [_no_units_placed(places, 0)]
    all_positions = list(range(units + 1))
    for place, limit in zip(reversed(places), reversed(limits)):
        costs_after.append(_with_device(_mirror(place), limit, costs_after[-1], all_positions, all_positions, units)[0])
    return [
        [end for end in ends if costs[end] + later_costs[units - end] <= cost]
        for ends, costs, later_costs in zip(positions, costs_before, reversed(costs_after))
    ]


def _mirror(place: Place) -> Place:
    """The device for units in the opposite order."""

    def sums(bytes_before: Sequence[int]) -> tuple[int, ...]:
        return tuple(bytes_before[-1] - number for number in reversed(bytes_before))

    bytes_before, copied_before, copies = place.sizes
    return place._replace(sizes=Sizes(sums(bytes_before), sums(copied_before), copies), cost=sums(place.cost))


class _Group(NamedTuple):
    """Devices that are alike, among all that there are."""

    places: Sequence[Place]
    members: Sequence[int]
    first_unit: int
    """The first unit that is on a device."""
    balanced_units: Callable[[list[Limits]], list[int] | None]
    """Units within limits that cost as little, if there are such."""

    def fill_levels(self, units: Sequence[int]) -> list[int]:
        """Return the fill levels of the members with units, in parts of their capacity."""
        starts = [self.first_unit + start for start in prefix_sums(units)]
        held_bytes = {
            index: self.places[index].sizes.bytes_of(starts[index], starts[index + 1]) + self.places[index].fixed_bytes
            for index in self.members
            if units[index]
        }
        return [-(-FILL_PARTS * size // self.places[index].capacity) for index, size in held_bytes.items()]

    def change_limits(self, limits: Sequence[Limits], change: Callable[[Place, Limits], Limits]) -> list[Limits]:
        return [
            change(place, limit) if index in self.members else limit
            for index, (place, limit) in enumerate(zip(self.places, limits))
        ]

    def lower_maximum(self, limits: list[Limits], units: list[int]) -> tuple[list[Limits], list[int]]:
        """Return limits and units that minimise the highest fill level."""

        def limits_below(fill_level: int) -> list[Limits]:
            return self.change_limits(
                limits,
                lambda place, limit: limit._replace(
                    max_bytes=max(
                        0, min(limit.max_bytes, fill_level * place.capacity // FILL_PARTS - place.fixed_bytes)
                    )
                ),
            )

        lower_bound, upper_bound = 0, max(self.fill_levels(units), default=0)
        while upper_bound - lower_bound > upper_bound >> COMPARED_BITS:
            fill_level = (lower_bound + upper_bound) // 2
            trial_units = self.balanced_units(limits_below(fill_level))
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
                lambda place, limit: limit._replace(
                    min_bytes=max(0, (fill_level - 1) * place.capacity // FILL_PARTS + 1 - place.fixed_bytes)
                ),
            )

        fill_levels = self.fill_levels(units)
        lower_bound, upper_bound = min(fill_levels, default=0), max(fill_levels, default=0)
        while upper_bound - lower_bound > upper_bound >> COMPARED_BITS:
            fill_level = (lower_bound + upper_bound + 1) // 2
            trial_units = self.balanced_units(limits_above(fill_level))
            if trial_units is None:
                upper_bound = fill_level - 1
            else:
                units, lower_bound = trial_units, max(fill_level, min(self.fill_levels(trial_units)))
        return limits_above(lower_bound), units


def _balance(
    places: Sequence[Place], limits: list[Limits], first_unit: int, last_unit: int, placement: Placement
) -> list[int]:
    """Units for each device: of all placements of the least cost, in each group that where the fullest device is least full, and of these
    that where the emptiest one with units is fullest.

    :param placement: one of the least cost.
    """
    cost, units = placement
    positions = _reachable_at_cost(places, limits, first_unit, last_unit, cost)

    def balanced_units(trial_limits: list[Limits]) -> list[int] | None:
        placement = cheapest_placement(places, trial_limits, positions, last_unit)
        return placement.units if placement and placement.cost == cost else None

    for group in sorted({place.group for place in places}):
        members = [index for index, place in enumerate(places) if place.group == group and place.capacity]
        if len(members) > 1:
            peers = _Group(places, members, first_unit, balanced_units)
            limits, units = peers.raise_minimum(*peers.lower_maximum(limits, units))
    return units

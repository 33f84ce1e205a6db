"""Which device gets how many units: the solver held against trying everything, and each of its rules."""

import itertools
import random

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import solver
from hypothesis import given, settings
from hypothesis import strategies as st

WHOLE, WORKER_BASE = solver.FILL_PARTS, solver.DEVICE_COST + solver.WORKER_COST


def place(sizes, capacity, pace=1, base=WORKER_BASE, group=0, fixed=0, compute=0, copies=0, moved=()):
    """A device that takes ``pace`` attoseconds a byte.

    :param sizes: bytes of each unit.
    :param moved: units with tensors on another device.
    """
    costs = [pace * size * solver.ATTOSECOND + solver.MOVE_COST * (unit in moved) for unit, size in enumerate(sizes)]
    return solver.DeviceSpec(
        capacity,
        fixed,
        compute,
        solver.Sizes(solver.prefix_sums(sizes), solver.prefix_sums([1] * (len(sizes) - 1) + [0]), copies),
        solver.prefix_sums(costs),
        base,
        group,
    )


def every_placement(devices, units):
    """All ways to give so many units, in order, to so many devices."""
    for cuts in itertools.combinations_with_replacement(range(units + 1), devices - 1):
        yield [end - start for start, end in itertools.pairwise([0, *cuts, units])]


def judged(places, counts, first, kept_free):
    """What a placement costs, None where it is not possible, and how full the devices of each group with units are."""
    start, cost, full = first, 0, {}
    for device, count in zip(places, counts):
        end = start + count
        if count:
            held = sum(device.sizes.bytes_before[end : end + 1]) - device.sizes.bytes_before[start]
            held += device.sizes.copy_bytes if start < len(device.prefix_costs) - 2 else 0
            if held > device.capacity - device.fixed_bytes - device.compute * kept_free // solver.FREE_STEPS:
                return None
            cost += device.prefix_costs[end] - device.prefix_costs[start] + device.base_cost
            full.setdefault(device.group, []).append(-(-WHOLE * (held + device.fixed_bytes) // device.capacity))
        start = end
    return cost, full


def by_trying_everything(places, first):
    """How good the best placement is, as rank_of. None where nothing fits."""
    units = len(places[0].prefix_costs) - 1
    for whole in (True, False):
        counted = [
            counts
            for counts in every_placement(len(places), units - first)
            if not whole or units - next(count for count in reversed(counts) if count) < units - 1
        ]
        needed = used(places, counted, first, 0)
        kept_free = max((part for part in range(17) if used(places, counted, first, part) == needed), default=0)
        if needed is not None:
            return min(rank_of(places, counts, first) for counts in counted if judged(places, counts, first, kept_free))
    return None


def used(places, counted, first, kept_free):
    """How many of the devices that have to be used are at most; None where no placement is possible."""
    possible = [verdict for counts in counted if (verdict := judged(places, counts, first, kept_free))]
    return max((-(cost // solver.USE_REWARD) for cost, _full in possible), default=None)


def rank_of(places, counts, first):
    cost, full = judged(places, counts, first, 0)
    groups = sorted({device.group for device in places})
    return (
        cost,
        *(
            (max(full.get(group, [0])), -min(full.get(group, [0])))
            if sum(device.group == group and device.capacity > 0 for device in places) > 1
            else ()
            for group in groups
        ),
    )


@st.composite
def clusters(draw):
    """Devices and the first unit that is on one."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=6))
    must = draw(st.sampled_from([0, 0, solver.USE_REWARD]))
    drawn = draw(
        st.lists(
            st.tuples(
                st.integers(0, 30),
                st.integers(0, 2),
                st.integers(0, 4),
                st.integers(0, 4),
                st.sampled_from([solver.DEVICE_COST, WORKER_BASE + solver.ATTOSECOND, 0]),
                st.sets(st.integers(0, 6), max_size=2),
                st.integers(0, 2),
            ),
            min_size=1,
            max_size=4,
        )
    )
    places = [
        place(sizes, capacity, group + 1, base - must, group, min(fixed, capacity), compute, copies, moved)
        for capacity, group, fixed, compute, base, moved, copies in drawn
    ]
    return places, draw(st.integers(0, len(sizes) - 1))


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_the_solver_finds_what_trying_everything_finds(drawn):
    places, first = drawn
    counts, best = solver.solve(tuple(places), first), by_trying_everything(places, first)
    assert (counts is None) == (best is None)
    if counts is not None:
        assert sum(counts) == len(places[0].prefix_costs) - 1 - first
        assert rank_of(places, counts, first) == best


def test_alike_devices_share_by_bytes_and_not_by_layers():
    """DeepSeek R1: three small layers before 58 large ones; by hand ``17,15,15,15``."""
    small, large, output = 2, 65, 8
    sizes = [small] * 3 + [large] * 58 + [output]
    counts = solver.solve((place(sizes, 1120),) * 4, 0)
    assert sorted(counts) == [15, 15, 15, 17]
    assert counts[0] == 17


@pytest.mark.parametrize(
    "rates, groups",
    [
        ([1.0], [0]),
        ([5, 100, 100], [1, 0, 0]),
        ([210, 220, 215, 200], [0, 0, 0, 0]),
        ([100, 91, 89, 81, 80], [0, 0, 1, 1, 2]),
    ],
)
def test_devices_are_alike_within_a_tenth_of_the_fastest(rates, groups):
    assert solver.groups_of(rates) == groups


class Counted(int):
    """A number of bytes that counts how often such numbers are subtracted."""

    operations = 0

    def __sub__(self, other):
        Counted.operations += 1
        return int(self) - other


def steps(layers, groups):
    """How many sizes are subtracted to place a model of so many layers of different sizes on 16 devices that are nearly full."""
    chosen = random.Random(1)
    sizes = [chosen.randrange(1 << 28, 1 << 31) for _layer in range(layers)] + [1 << 29]
    places = []
    for index in range(16):
        device = place(
            sizes, int(sum(sizes) / 16 * chosen.uniform(0.95, 1.45)), index % groups + 1, group=index % groups
        )
        before = tuple(Counted(size) for size in device.sizes.bytes_before)
        places.append(device._replace(sizes=device.sizes._replace(bytes_before=before)))
    Counted.operations = 0
    counts = solver.solve(tuple(places), 0)
    assert sum(counts) == layers + 1
    return Counted.operations


@pytest.mark.parametrize("groups", [1, 8, 16])
def test_the_work_grows_with_the_layers_and_not_with_their_square(groups):
    few, many = steps(125, groups), steps(500, groups)
    assert many < 6 * few
    assert few < 16 * 126 * 1000

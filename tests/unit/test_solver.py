"""Which device gets how many units: the solver held against trying everything, and each of its rules."""

import itertools
import random

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import solver
from hypothesis import given, settings
from hypothesis import strategies as st

TEN, WHOLE = 10, solver.PARTS


def place(sizes, capacity, pace=1, base=solver.DEVICE + solver.WORKER, group=0, fixed=0, compute=0, copies=0, moved=()):
    """A device that takes ``pace`` attoseconds a byte.

    :param sizes: bytes of each unit.
    :param moved: units with tensors on another device.
    """
    costs = [pace * size * solver.ATTOSECOND + (solver.MOVE if unit in moved else 0) for unit, size in enumerate(sizes)]
    return solver.Place(
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
            held = sum(device.sizes.before[end : end + 1]) - device.sizes.before[start]
            held += device.sizes.copies if start < len(device.cost) - 2 else 0
            if held > device.capacity - device.fixed - device.compute * kept_free // solver.STEPS:
                return None
            cost += device.cost[end] - device.cost[start] + device.base
            full.setdefault(device.group, []).append(-(-WHOLE * (held + device.fixed) // device.capacity))
        start = end
    return cost, full


def by_trying_everything(places, first):
    """How good the best placement is, as rank_of. None where nothing fits."""
    units = len(places[0].cost) - 1
    for whole in (True, False):
        counted = [
            counts
            for counts in every_placement(len(places), units - first)
            if not whole or units - last_count(counts) < units - 1
        ]
        needed = used(places, counted, first, 0)
        kept_free = max((part for part in range(17) if used(places, counted, first, part) == needed), default=0)
        if needed is not None:
            return min(rank_of(places, counts, first) for counts in counted if judged(places, counts, first, kept_free))
    return None


def used(places, counted, first, kept_free):
    """How many of the devices that have to be used are at most; None where no placement is possible."""
    possible = [verdict for counts in counted if (verdict := judged(places, counts, first, kept_free))]
    return max((-(cost // solver.MUST) for cost, _full in possible), default=None)


def is_shared(places, group):
    return sum(device.group == group and device.capacity > 0 for device in places) > 1


def last_count(counts):
    return next(count for count in reversed(counts) if count)


def rank_of(places, counts, first):
    cost, full = judged(places, counts, first, 0)
    groups = sorted({device.group for device in places})
    return (
        cost,
        *(
            (max(full.get(group, [0])), -min(full.get(group, [0]))) if is_shared(places, group) else ()
            for group in groups
        ),
    )


@st.composite
def clusters(draw):
    """Devices and the first unit that is on one."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=6))
    must = draw(st.sampled_from([0, 0, solver.MUST]))
    drawn = draw(
        st.lists(
            st.tuples(
                st.integers(0, 30),
                st.integers(0, 2),
                st.integers(0, 4),
                st.integers(0, 4),
                st.sampled_from([solver.DEVICE, solver.DEVICE + solver.WORKER + solver.ATTOSECOND, 0]),
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
    counts, best = solver.solve(places, first), by_trying_everything(places, first)
    assert (counts is None) == (best is None)
    if counts is not None:
        assert sum(counts) == len(places[0].cost) - 1 - first
        assert rank_of(places, counts, first) == best


def test_the_fastest_memory_is_filled_first():
    sizes = [10] * 10 + [5]
    places = [place(sizes, 200, pace=4, group=1), place(sizes, 64, pace=1)]
    assert solver.solve(places, 0) == [5, 6]


def test_what_is_slow_gets_nothing_where_the_fast_has_room():
    sizes = [10] * 10 + [5]
    assert solver.solve([place(sizes, 1000, pace=4, group=1), place(sizes, 105)], 0) == [0, 11]


def test_alike_devices_share_by_bytes_and_not_by_layers():
    """DeepSeek R1: three small layers before 58 large ones; by hand ``17,15,15,15``."""
    small, large, output = 2, 65, 8
    sizes = [small] * 3 + [large] * 58 + [output]
    counts = solver.solve([place(sizes, 1120)] * 4, 0)
    assert sorted(counts) == [15, 15, 15, 17]
    assert counts[0] == 17


def test_fewer_workers_come_before_more():
    sizes = [10] * 8 + [5]
    assert solver.solve([place(sizes, size) for size in (50, 20, 60)], 0) == [4, 0, 5]
    assert sum(count > 0 for count in solver.solve([place(sizes, 85)] * 3, 0)) == 1


@pytest.mark.parametrize("cost, counts", [(30, [5, 0]), (42, [0, 5])])
def test_a_worker_is_used_where_it_saves_more_than_it_costs(cost, counts):
    """41 and its cost on the worker, 82 on the head's own device."""
    sizes = [10] * 4 + [1]
    worker = place(sizes, 100, base=solver.DEVICE + solver.WORKER + cost * solver.ATTOSECOND)
    assert solver.solve([worker, place(sizes, 100, pace=2, base=solver.DEVICE, group=1)], 0) == counts


def test_a_layer_stays_beside_its_tensors_where_that_costs_no_time():
    sizes = [1] * 8 + [1]
    places = [
        place(sizes, 50, fixed=20, base=0, moved=range(2, 8)),
        place(sizes, 50, fixed=20, base=0, moved=range(2)),
    ]
    assert solver.solve(places, 0) == [2, 7]


def test_what_overrides_put_on_a_device_counts_when_devices_are_filled_evenly():
    sizes = [1] * 20 + [0]
    counts = solver.solve([place(sizes, 50, fixed=20, base=0), place(sizes, 50, fixed=10, base=0)], 0)
    assert counts in ([5, 16], [6, 15])


def test_room_for_compute_is_left_as_far_as_there_is_any():
    sizes = [10] * 4 + [10]
    assert solver.solve([place(sizes, 60, pace=2, group=1, compute=20), place(sizes, 50, compute=20)], 0) == [2, 3]
    assert solver.solve([place(sizes, 50, compute=1000)], 0) == [5]


def must(device):
    return device._replace(base=device.base - solver.MUST)


def test_a_device_that_has_to_be_used_gets_a_layer():
    sizes = [10] * 6 + [5]
    fast, slow = must(place(sizes, 1000)), must(place(sizes, 1000, pace=9, group=1))
    assert solver.solve([fast, slow], 0) == [5, 2]
    assert solver.solve([slow, fast], 0) == [1, 6]
    assert solver.solve([slow._replace(capacity=9), fast], 0) == [0, 7]


def test_a_device_that_has_to_be_used_is_so_without_room_for_compute():
    sizes = [10] * 6 + [5]
    small = must(place(sizes, 15, compute=10, pace=9, group=1))
    assert solver.solve([small, must(place(sizes, 1000, compute=10))], 0) == [1, 6]


def test_the_output_alone_is_on_a_device_only_where_nothing_else_fits():
    assert solver.solve([place([4, 4, 4], 8), place([4, 4, 4], 4)], 0) == [2, 1]
    assert solver.solve([place([4, 4, 4], 8), place([4, 4, 4], 8)], 0) == [1, 2]
    assert solver.solve([place([4, 4, 4], 8)], 2) == [1]


def test_units_that_do_not_fit():
    assert solver.solve([place([4, 4, 4], 3), place([4, 4, 4], 7)], 0) is None
    assert solver.solve([place([4, 4, 4], 0)], 0) is None


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
        before = tuple(Counted(size) for size in device.sizes.before)
        places.append(device._replace(sizes=device.sizes._replace(before=before)))
    Counted.operations = 0
    counts = solver.solve(places, 0)
    assert sum(counts) == layers + 1
    return Counted.operations


@pytest.mark.parametrize("groups", [1, 8, 16])
def test_the_work_grows_with_the_layers_and_not_with_their_square(groups):
    few, many = steps(125, groups), steps(500, groups)
    assert many < 6 * few
    assert few < 16 * 126 * 1000

import copy

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import caches, known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import placement
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Device

GIB = 1 << 30


@pytest.fixture
def load(big_model):
    return placement.Load(big_model, caches.Settings(4096), caches.NEW)


def test_units_are_the_layers_and_the_output(load):
    assert load.units == 81
    weights, kv = load.of(79, 2)
    assert weights == GIB + load.weights[-1]
    assert kv == load.kv[79]


@pytest.mark.parametrize("sizes", [(50, 50), (90, 30, 10), (20, 20, 20, 20, 20), (82, 1, 1, 1), (1, 1, 82)])
def test_everything_is_placed_and_nothing_is_over_its_capacity(load, sizes):
    capacities = [size * GIB for size in sizes]
    shares = placement.distribute(load, capacities)
    assert sum(shares) == load.units
    start = 0
    for share, capacity in zip(shares, capacities):
        assert sum(load.of(start, share)) <= capacity
        start += share


def test_layers_follow_the_capacities(load):
    shares = placement.distribute(load, [120 * GIB, 40 * GIB])
    assert shares[0] in (60, 61)


def test_every_device_gets_a_unit_of_a_small_model():
    small = placement.Load(known_answer.summary(4, 64, "f16"), caches.Settings(256), caches.NEW)
    assert placement.distribute(small, [100 * GIB, GIB, GIB]) == [3, 1, 1]


def test_fewer_units_than_devices():
    small = placement.Load(known_answer.summary(1, 64, "f16"), caches.Settings(256), caches.NEW)
    shares = placement.distribute(small, [GIB, GIB, GIB])
    assert sorted(shares) == [0, 1, 1]


def test_a_model_that_does_not_fit(load):
    capacities = [30 * GIB, 30 * GIB]
    assert placement.distribute(load, capacities) == [40, 41]
    assert placement.distribute(load, [0, 0, 30 * GIB]) == [1, 1, 79]
    assert not placement.fits(load, 0, capacities)


def test_a_model_that_fits(load):
    assert placement.fits(load, 0, [50 * GIB, 50 * GIB])


@pytest.mark.parametrize(
    "sizes, chosen", [((100, 100, 100), [0]), ((50, 20, 40), [0, 2]), ((30, 30, 30), [0, 1, 2]), ((10, 10), [0, 1])]
)
def test_fewest_takes_the_largest_and_keeps_their_order(load, sizes, chosen):
    assert placement.fewest(load, [size * GIB for size in sizes]) == (chosen, [])


@pytest.mark.parametrize(
    "own, chosen",
    [
        ((90,), ([], [0])),
        ((50, 90), ([], [1])),
        ((50, 50), ([], [0, 1])),
        ((10, 20), ([1], [0, 1])),
        ((10, 10), ([0, 1], [0, 1])),
    ],
)
def test_fewest_takes_the_heads_own_devices_first(load, own, chosen):
    assert placement.fewest(load, [30 * GIB, 55 * GIB], [size * GIB for size in own]) == chosen


@pytest.mark.parametrize(
    "gpu_layers, split, expected",
    [
        (9, [1], "000000000"),
        (9, [5, 4], "000001111"),
        (9, [1, 1], "000001111"),
        (9, [3, 3, 3], "000111222"),
        (9, [1, 0, 2], "000222222"),
        (9, [0.3, 0.45, 0.25], "000111122"),
        (99, [1, 1], "000001111"),
        (4, [1, 1], ".....0011"),
        (4, [9, 1], ".....0000"),
        (0, [1, 1], "........."),
        (9, [], "........."),
    ],
)
def test_units_go_where_llama_cpp_puts_them(gpu_layers, split, expected):
    found = placement.assign(8, gpu_layers, split)
    assert "".join("." if device is None else str(device) for device in found) == expected


def test_shares_are_compared_as_32_bit_floats():
    """In 64 bits 0.1 + 0.2 is more than 3/10, and unit 3 of 10 would still be on the second device. In 32 bits they are the same."""
    assert placement.assign(9, 10, [0.1, 0.2, 0.7]) == [0, 1, 1, 2, 2, 2, 2, 2, 2, 2]


def row(name, layers=None, kind="F32", shape=(256,), size=1024):
    return {"name": name, "type": kind, "shape": list(shape), "bytes": size, "layers": layers}


def loaded(summary, generation=caches.NEW, **settings):
    return placement.Load(summary, caches.Settings(**{"context": 256, **settings}), generation)


@pytest.fixture
def small():
    """Three layers of 1 KiB, and whatever else a test adds."""
    summary = known_answer.summary(3, 64, "f32")
    summary["tensors"] = [
        row("token_embd.weight", shape=(256, 8), size=8192),
        row("blk.*.a.weight", [0, 1, 2]),
        row("output_norm.weight"),
    ]
    return summary


def of_units(load, backend="cpu"):
    """Weights of each unit on a device of its own, and of what stays on the head, in bytes."""
    found = [load.share([unit], backend).weights for unit in range(load.units)]
    return found, load.on_head()


def test_a_tied_output_is_a_copy_of_the_token_embedding(small):
    assert of_units(loaded(small)) == ([1024, 1024, 1024, 1024 + 8192], 8192)
    small["tensors"] += [row("output.weight", None, "F32", [256, 4], 4096)]
    assert of_units(loaded(small)) == ([1024, 1024, 1024, 1024 + 4096], 8192)


def test_each_device_with_layers_gets_the_factors_of_the_rotation(small):
    small["tensors"] += [row("rope_freqs.weight", None, "F32", [16], 64)]
    load = loaded(small)
    assert of_units(load)[0] == [1024 + 64] * 3 + [1024 + 8192]
    assert load.share([0, 1, 2, 3], "cpu").weights == 4 * 1024 + 64 + 8192
    assert load.of(0, 3)[0] == 3 * 1024 + 64
    assert load.of(3, 1)[0] == 1024 + 8192


def test_only_layers_without_a_window_need_them_in_gemma4(small):
    keys = {"attention.sliding_window": 512, "attention.sliding_window_pattern": [1, 0, 1]}
    small.update(architecture="gemma4", keys=keys)
    small["tensors"] += [row("rope_freqs.weight", None, "F32", [16], 64)]
    assert of_units(loaded(small))[0] == [1024, 1024 + 64, 1024, 1024 + 8192]


def test_layers_that_predict_further_tokens_are_not_loaded(small):
    small.update(architecture="glm4moe", keys={"nextn_predict_layers": 1})
    assert of_units(loaded(small)) == ([1024, 1024, 0, 1024 + 8192], 8192)


@pytest.mark.parametrize(
    "name, generation, where",
    [
        ("token_embd_norm.weight", caches.OLD, None),
        ("token_embd_norm.weight", caches.NEW, 0),
        ("per_layer_token_embd.weight", caches.NEW, None),
        ("per_layer_token_embd.weight", caches.MIDDLE, 3),
        ("per_layer_model_proj.weight", caches.NEW, 0),
        ("per_layer_model_proj.weight", caches.OLD, 3),
        ("position_embd.weight", caches.OLD, None),
        ("cls.output.weight", caches.NEW, 3),
    ],
)
def test_where_other_tensors_go(small, name, generation, where):
    before = of_units(loaded(small, generation))
    small["tensors"] += [row(name)]
    units, on_head = of_units(loaded(small, generation))
    more = [size - other for size, other in zip([*units, on_head], [*before[0], before[1]])]
    assert more == [1024 if unit == where else 0 for unit in (0, 1, 2, 3, None)]


def test_a_build_between_two_that_differ_is_not_exact(small):
    assert loaded(small, 9000).weights_exact
    small["tensors"] += [row("per_layer_model_proj.weight")]
    assert not loaded(small, 9000).weights_exact


@pytest.mark.parametrize("generation, exact", [(6169, False), (6170, True), (11669, True), (11670, False)])
def test_a_build_older_or_newer_than_those_that_were_read_is_not_exact(small, generation, exact):
    assert loaded(small, generation).weights_exact is exact


def test_without_names_of_tensors_sizes_are_a_bound(small):
    del small["tensors"]
    load = loaded(small)
    assert not load.weights_exact
    assert load.weights[:3] == small["layer_bytes"]


def test_tensors_are_laid_out_as_the_device_needs_it(small):
    small["tensors"] += [row("blk.*.b.weight", [0], "Q8_0", [320, 10], 3400), row("blk.*.c.bias", [0], "F32", [1], 4)]
    load = loaded(small)
    assert load.share([0], "cpu").weights == 1024 + 3424 + 32
    assert load.share([0], "cuda").weights == 1024 + 3712 + 128


def test_devices_and_the_processor_share_the_model(small):
    devices = tuple(Device("here", "cpu", name, name, 0, {}) for name in ("one", "two"))
    placed = placement.Placed(devices, [1, 1], loaded(small), 2)
    assert [(share.layers, share.output) for share in placed.shares()] == [(1, False), (0, True)]
    assert placed.on_head() == placement.Share(2, False, 2 * 1024 + 8192, 2 * 256 * 64 * 2 * 2)
    alone = placement.Placed((), (), loaded(small), 0)
    assert alone.on_head().output
    assert alone.shares() == []


def test_overrides_move_tensors_whatever_their_layer(small):
    small["tensors"] += [row("blk.*.b.weight", [0, 1, 2], size=2048)]
    settings = caches.Settings(256)
    overrides = [(r"blk\.0\.b", "CPU"), (r"\.b\.", "two"), ("never", "one")]
    load = placement.Load(small, settings, caches.NEW, overrides)
    devices = tuple(Device("here", "cpu", name, name, 0, {}) for name in ("one", "two"))
    placed = placement.Placed(devices, [3, 1], load, 4)
    assert [share.weights for share in placed.shares()] == [3 * 1024, 1024 + 8192 + 2 * 2048]
    assert placed.on_head().weights == 8192 + 2048
    assert load.fixed("two") == 2 * 2048


@pytest.mark.parametrize("device, moved", [("CPU", (8192, 0)), ("one", (0, 8192))])
def test_a_tied_output_on_the_device_of_the_embedding_is_no_copy(small, device, moved):
    load = placement.Load(small, caches.Settings(256), caches.NEW, [("token_embd", device)])
    assert (load.on_head(), load.fixed("one")) == moved
    assert load.weights[3] == 1024
    alone = placement.Placed((), (), loaded(small), 0)
    assert alone.on_head().weights == 4 * 1024 + 8192


def counted(name):
    """The operation of whole numbers of that name, which counts how often it is done."""

    def operate(number, other):
        Counted.operations += 1
        result = getattr(int, name)(number, other)
        return result if result is NotImplemented or isinstance(result, bool) else Counted(result)

    return operate


class Counted(int):
    """A number of bytes that counts how often such numbers are added, subtracted or compared."""

    operations = 0
    __add__, __radd__, __sub__, __rsub__ = map(counted, ("__add__", "__radd__", "__sub__", "__rsub__"))
    __lt__, __le__, __gt__, __ge__ = map(counted, ("__lt__", "__le__", "__gt__", "__ge__"))


def operations_of_a_plan(cluster, layers):
    """How many sizes a plan for a model of so many layers adds and compares."""
    summary = known_answer.summary(layers, 128, "f32")
    for row in summary["tensors"]:
        row["bytes"] = Counted((80 * GIB // layers) if "attn_q" in row["name"] else row["bytes"])
    cluster.hosts["head"]["variables"]["llama_model_known_answer"] = None
    cluster.hosts["head"]["variables"]["llama_model_path"] = "/srv/model.gguf"
    cluster.model = {"summary": summary}
    Counted.operations = 0
    plan = cluster.plan()
    assert (plan["fits"], len(plan["placement"])) == (True, 2)
    return Counted.operations


def test_the_work_of_a_plan_grows_with_the_layers_and_not_with_their_square(pair):
    few, many = (operations_of_a_plan(copy.deepcopy(pair), layers) for layers in (64, 512))
    assert many < 10 * few


@pytest.mark.parametrize("layers", [500, 2000])
def test_the_work_of_a_split_is_some_steps_for_each_layer(layers):
    summary = known_answer.summary(layers, 64, "f32")
    for row in summary["tensors"]:
        row["bytes"] = Counted(row["bytes"])
    Counted.operations = 0
    load = placement.Load(summary, caches.Settings(256), caches.NEW)
    room = [sum(load.of(0, load.units)) // 3] * 5
    assert sum(placement.distribute(load, room)) == load.units
    assert Counted.operations < 50 * layers

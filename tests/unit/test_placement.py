import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils import known_answer, placement

GIB = 1 << 30


@pytest.fixture
def load(big_model):
    return placement.Load(big_model, 4096, "f16", "f16")


def test_units_are_the_layers_and_the_output(load):
    assert load.units == 81
    weights, kv = load.of(79, 2)
    assert weights == GIB + load.weights[-1]
    assert kv == load.kv


def test_cache_of_a_layer_is_that_of_llama_cpp():
    """16 layers of 128 at 512 tokens took 4 MiB in 16-bit floats, by llama-server's own log."""
    model = known_answer.summary(16, 128, "f32")
    assert 16 * placement.kv_bytes_per_layer(model, 512, "f16", "f16") == 4 * placement.MIB
    assert placement.kv_bytes_per_layer(model, 1, "f16", "f16") == placement.kv_bytes_per_layer(
        model, 256, "f16", "f16"
    )
    q8, f16 = (placement.kv_bytes_per_layer(model, 512, kind, kind) for kind in ("q8_0", "f16"))
    assert q8 / f16 == 34 / 64


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
    small = placement.Load(known_answer.summary(4, 64, "f16"), 256, "f16", "f16")
    assert placement.distribute(small, [100 * GIB, GIB, GIB]) == [3, 1, 1]


def test_fewer_units_than_devices():
    small = placement.Load(known_answer.summary(1, 64, "f16"), 256, "f16", "f16")
    shares = placement.distribute(small, [GIB, GIB, GIB])
    assert sorted(shares) == [0, 1, 1]


def test_a_model_that_does_not_fit(load):
    capacities = [30 * GIB, 30 * GIB]
    assert placement.distribute(load, capacities) is None
    assert 19 * GIB < placement.missing_bytes(load, capacities) < 23 * GIB


def test_nothing_is_missing_when_it_fits(load):
    assert placement.missing_bytes(load, [50 * GIB, 50 * GIB]) == 0


@pytest.mark.parametrize(
    "sizes, chosen", [((100, 100, 100), [0]), ((50, 20, 40), [0, 2]), ((30, 30, 30), [0, 1, 2]), ((10, 10), [0, 1])]
)
def test_fewest_takes_the_largest_and_keeps_their_order(load, sizes, chosen):
    assert placement.fewest(load, [size * GIB for size in sizes]) == chosen

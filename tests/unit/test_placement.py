import copy
import itertools
import random

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    compute_buffers,
    header_summary,
    known_answer,
    kv_cache,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device
from support.clusters import accelerator, serving

GIB = 1 << 30


@pytest.fixture
def load(big_model):
    return device_load.Load(header_summary.parse(big_model), kv_cache.CacheSettings(4096), 11063)


def test_shares_of_a_model_that_does_not_fit_are_those_of_the_capacities():
    assert device_load.proportional_shares(81, [30 * GIB, 30 * GIB]) == [40, 41]
    assert device_load.proportional_shares(81, [0, 0, 30 * GIB]) == [1, 1, 79]
    assert device_load.proportional_shares(2, [GIB, GIB, GIB]) == [0, 1, 1]
    assert device_load.proportional_shares(81, [0, 0]) == [1, 80]


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
    found = device_load.assign_units(8, gpu_layers, tuple(split))
    assert "".join("." if device is None else str(device) for device in found) == expected


def test_shares_are_compared_as_32_bit_floats():
    """In 64 bits 0.1 + 0.2 is more than 3/10, and unit 3 of 10 would still be on the second device. In 32 bits they are the same."""
    assert device_load.assign_units(9, 10, (0.1, 0.2, 0.7)) == (0, 1, 1, 2, 2, 2, 2, 2, 2, 2)


@pytest.mark.parametrize("layers, gpu_layers", [(1, 2), (3, 4), (61, 62), (130, 131), (130, 100), (512, 513)])
def test_whole_numbers_as_shares_give_each_device_so_many_units(load, layers, gpu_layers):
    load.layers = layers
    chosen = random.Random(layers)
    for devices in range(1, 17):
        cuts = sorted(chosen.choices(range(gpu_layers + 1), k=devices - 1))
        units = [end - start for start, end in itertools.pairwise([0, *cuts, gpu_layers])]
        device_load.check_split(load, gpu_layers, units)


def test_shares_that_llama_cpp_divides_otherwise_are_noticed(load):
    with pytest.raises(ValueError, match="would split 81 units differently with -ts 40,40"):
        device_load.check_split(load, 81, [40, 40])


def row(name, layers=None, kind="F32", shape=(256,), size=1024):
    return {"name": name, "type": kind, "shape": list(shape), "bytes": size, "layers": layers}


def loaded(model, build=11063, **settings):
    return device_load.Load(header_summary.parse(model), kv_cache.CacheSettings(**{"context": 256, **settings}), build)


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
    return found, load.head_weights()


def test_a_tied_output_is_a_copy_of_the_token_embedding(small):
    assert of_units(loaded(small)) == ([1024, 1024, 1024, 1024 + 8192], 8192)
    small["tensors"] += [row("output.weight", None, "F32", [256, 4], 4096)]
    assert of_units(loaded(small)) == ([1024, 1024, 1024, 1024 + 4096], 8192)


def test_each_device_with_layers_gets_the_factors_of_the_rotation(small):
    small["tensors"] += [row("rope_freqs.weight", None, "F32", [16], 64)]
    load = loaded(small)
    assert of_units(load)[0] == [1024 + 64] * 3 + [1024 + 8192]
    assert load.share([0, 1, 2, 3], "cpu").weights == 4 * 1024 + 64 + 8192
    sizes, kv = load.sizes("cpu"), load.kv[0]
    assert sizes.bytes_of(0, 3) == 3 * 1024 + 64 + 3 * kv
    assert sizes.bytes_of(3, 4) == 1024 + 8192


def test_only_layers_without_a_window_need_them_in_gemma4(small):
    keys = {"attention.sliding_window": 512, "attention.sliding_window_pattern": [1, 0, 1]}
    small.update(architecture="gemma4", keys=keys)
    small["tensors"] += [row("rope_freqs.weight", None, "F32", [16], 64)]
    assert of_units(loaded(small))[0] == [1024, 1024 + 64, 1024, 1024 + 8192]


def test_layers_that_predict_further_tokens_are_not_loaded(small):
    small.update(architecture="glm4moe", keys={"nextn_predict_layers": 1, "expert_count": 8})
    assert of_units(loaded(small)) == ([1024, 1024, 0, 1024 + 8192], 8192)


@pytest.mark.parametrize(
    "name, where",
    [
        ("token_embd_norm.weight", 0),
        ("per_layer_token_embd.weight", None),
        ("per_layer_model_proj.weight", 0),
        ("position_embd.weight", None),
        ("cls.output.weight", 3),
    ],
)
def test_where_other_tensors_go(small, name, where):
    before = of_units(loaded(small))
    small["tensors"] += [row(name)]
    units, on_head = of_units(loaded(small))
    more = [size - other for size, other in zip([*units, on_head], [*before[0], before[1]])]
    assert more == [1024 if unit == where else 0 for unit in (0, 1, 2, 3, None)]


def test_a_build_that_nobody_measured_and_ik_llama_are_not_exact(small):
    assert loaded(small, 11434).has_exact_weights
    assert not loaded(small, 12000).has_exact_weights
    assert not loaded(small, 4840, fork="ik_llama.cpp").has_exact_weights


def test_without_names_of_tensors_sizes_are_a_bound(small):
    del small["tensors"]
    load = loaded(small)
    assert not load.has_exact_weights
    assert load.weights[:3] == small["layer_bytes"]


def test_tensors_are_laid_out_as_the_device_needs_it(small):
    small["tensors"] += [row("blk.*.b.weight", [0], "Q8_0", [320, 10], 3400), row("blk.*.c.bias", [0], "F32", [1], 4)]
    load = loaded(small)
    assert load.share([0], "cpu").weights == 1024 + 3424 + 32
    assert load.share([0], "cuda").weights == 1024 + 3712 + 128


def test_devices_and_the_processor_share_the_model(small):
    devices = tuple(Device("here", "cpu", name, name, 0, {}) for name in ("one", "two"))
    placed = device_load.Layout(devices, (1, 1), loaded(small), 2)
    assert [(share.layers, share.has_output) for share in placed.shares()] == [(1, False), (0, True)]
    assert placed.head_share() == device_load.Share(2, False, 2 * 1024 + 8192, 2 * 256 * 64 * 2 * 2)
    alone = device_load.Layout((), (), loaded(small), 0)
    assert alone.head_share().has_output
    assert alone.shares() == []


def test_overrides_move_tensors_whatever_their_layer(small):
    small["tensors"] += [row("blk.*.b.weight", [0, 1, 2], size=2048)]
    settings = kv_cache.CacheSettings(256)
    overrides = [(r"blk\.0\.b", "CPU"), (r"\.b\.", "two"), ("never", "one")]
    load = device_load.Load(header_summary.parse(small), settings, 11063, overrides)
    devices = tuple(Device("here", "cpu", name, name, 0, {}) for name in ("one", "two"))
    placed = device_load.Layout(devices, (3, 1), load, 4)
    assert [share.weights for share in placed.shares()] == [3 * 1024, 1024 + 8192 + 2 * 2048]
    assert placed.head_share().weights == 8192 + 2048
    assert load.override_bytes("two", "cpu") == 2 * 2048


@pytest.mark.parametrize("device, moved", [("CPU", (8192, 0)), ("one", (0, 8192))])
def test_a_tied_output_on_the_device_of_the_embedding_is_no_copy(small, device, moved):
    load = device_load.Load(header_summary.parse(small), kv_cache.CacheSettings(256), 11063, [("token_embd", device)])
    assert (load.head_weights(), load.override_bytes("one", "cpu")) == moved
    assert load.weights[3] == 1024
    alone = device_load.Layout((), (), loaded(small), 0)
    assert alone.head_share().weights == 4 * 1024 + 8192


GPU = accelerator("cuda", "NVIDIA GeForce RTX 4090", "8.9", 24564)
SLOW = {**GPU, "name": "Tesla P40", "architecture": "6.1"}
CUDA = {"toolchain": {"cmake": "3.31", "ninja": "1.12", "c++": "14.2", "venv": "1.0", "nvcc": "12.8"}}


def with_cards(cluster, **cards):
    """The cluster whose hosts have these accelerators."""
    for host, accelerators in cards.items():
        cluster.hosts[host]["facts"].update({**copy.deepcopy(CUDA), "accelerators": accelerators})
    return cluster


def serve(cluster, layers, **variables):
    """The plan for a model of so many layers of 1 GiB."""
    summary = known_answer.summary(layers, 128, "f32")
    summary["tensors"].append(row("blk.*.all.weight", list(range(layers)), "F32", (1 << 14, 1 << 14), GIB))
    summary["layer_bytes"] = [GIB] * layers
    return serving(cluster, summary, **variables).plan()


def layers_of(plan):
    return {entry["device"]: entry["layers"] for entry in plan["placement"]}


def reasons_of(plan):
    return [entry["reason"].split("), ", 1)[1] for entry in plan["placement"]]


ONE, TWO = "RPC0[192.0.2.11:50052]", "RPC0[192.0.2.12:50052]"


def test_the_fastest_memory_is_last_and_full(pair):
    plan = serve(with_cards(pair, head=[SLOW], worker1=[GPU]), 60)
    assert layers_of(plan) == {TWO: 16, ONE: 22, "CUDA0": 22}
    rest = "overflow from faster devices"
    assert reasons_of(plan) == [rest, "filled first: faster than other devices", rest]
    assert plan["placement"][1]["reason"].startswith("866.9 GB/s (table), ")
    assert plan["placement"][-1]["output"]
    for entry in plan["placement"][1:]:
        assert entry["total_mib"] <= entry["capacity_mib"] < entry["total_mib"] + 1024 + entry["kv_mib"]


def test_a_faster_worker_is_used_where_it_saves_more_than_it_costs(pair):
    cluster = with_cards(pair, head=[SLOW], worker1=[GPU])
    assert layers_of(serve(cluster, 10)) == {ONE: 10}
    pair.model["summary"]["tensors"][-1]["bytes"] = 1 << 20
    plan = pair.plan()
    assert layers_of(plan) == {"CUDA0": 10}
    assert reasons_of(plan) == ["faster devices would add more overhead than they save"]


@pytest.mark.parametrize("card, worker", [("RTX 5070 Ti", False), ("RTX 5090", True)])
def test_a_worker_takes_the_place_of_the_own_card_only_for_a_gain_worth_the_network(pair, card, worker):
    own, other = ({**GPU, "name": f"NVIDIA GeForce {name}"} for name in ("RTX 3080", card))
    plan = serve(with_cards(pair, head=[own], worker1=[other]), 10)
    assert layers_of(plan) == ({ONE: 10} if worker else {"CUDA0": 10})


@pytest.mark.parametrize("name", ["fastest", None])
def test_the_default_uses_one_device_where_all_uses_every_one(pair, name):
    cluster = with_cards(pair, worker1=[GPU])
    plan = serve(cluster, 10, llama_placement=name)
    assert layers_of(plan) == {ONE: 10}
    assert reasons_of(plan) == ["the fastest memory"]
    plan = serve(cluster, 10, llama_placement="all")
    assert layers_of(plan) == {TWO: 1, ONE: 9}
    assert reasons_of(plan) == ["one layer, because every device is used", "most layers: faster than other devices"]


def test_a_faster_device_without_room_for_a_layer_would_save_something(pair):
    plan = serve(with_cards(pair, head=[{**GPU, "memory_mib": 512}]), 40)
    assert "CUDA0" not in layers_of(plan)
    assert reasons_of(plan) == ["the fastest memory with enough space"]


def test_the_only_device_says_so(local):
    local.hosts["here"]["variables"]["llama_worker_endpoints"] = [{"port": 50052}]
    assert reasons_of(local.plan()) == ["the only device"]


def test_what_does_not_fit_says_so(pair):
    plan = serve(pair, 200)
    assert plan["refused"]
    assert [entry["reason"] for entry in plan["placement"]] == ["the model does not fit"] * 2


def test_a_split_of_the_operators_is_its_own_reason(pair):
    plan = serve(pair, 20, llama_server_tensor_split=[1, 3])
    assert {entry["reason"] for entry in plan["placement"]} == {"llama_server_tensor_split"}
    assert list(layers_of(plan)) == [ONE, TWO]


def test_devices_are_named_in_the_order_in_which_they_get_layers(pair):
    cluster = with_cards(pair, head=[GPU])
    overrides = [r"blk\.[0-8]\.all=CUDA0", rf"blk\.9\.all={TWO}", rf"blk\.1\d\.all={ONE}"]
    plan = serve(cluster, 20, llama_server_override_tensor=overrides)
    assert list(layers_of(plan).items()) == [("CUDA0", 9), (TWO, 1), (ONE, 10)]
    argv = plan["head"]["argv"]
    assert argv[argv.index("--rpc") + 1] == "192.0.2.12:50052,192.0.2.11:50052"
    assert argv[argv.index("--device") + 1] == "CUDA0,RPC0,RPC1"
    assert argv[argv.index("--tensor-split") + 1] == "9,1,11"


def test_a_device_with_nothing_but_what_overrides_put_there(pair):
    overrides = [rf"blk\.0\.all={TWO}", rf"blk\.[1-9]\.all={ONE}"]
    pair.hosts["worker2"]["variables"]["llama_worker_endpoints"] = [{"memory_mib": 1024}]
    plan = serve(pair, 10, llama_server_override_tensor=overrides)
    assert layers_of(plan) == {TWO: 0, ONE: 10}
    assert plan["head"]["argv"][plan["head"]["argv"].index("--tensor-split") + 1] == "0,11"
    assert reasons_of(plan)[0] == "tensors from llama_server_override_tensor"


@pytest.mark.parametrize("known, expected", [(True, 1000), (False, 2500)])
def test_bounds_of_compute_buffers_are_kept_free_as_far_as_there_is_room(pair, monkeypatch, known, expected):
    """What is kept free where it can be, and less where the model would not fit."""
    monkeypatch.setattr(device_load, "load_of", device_load.load_of.__wrapped__)
    monkeypatch.setattr(
        compute_buffers, "buffer_bound", lambda *_arguments: (1000 if known else 9000) * device_load.MIB
    )
    plan = serve(with_cards(pair, head=[GPU], worker1=[SLOW], worker2=[SLOW]), 60)
    assert not plan["refused"]
    for entry in plan["placement"]:
        assert entry["capacity_mib"] - entry["weights_mib"] - entry["kv_mib"] >= expected


def test_of_alike_workers_the_one_with_the_better_link_is_used(pair):
    for host, address, interface in (("worker1", "192.0.2.21", "wlan0"), ("worker2", "192.0.2.22", "eth0")):
        pair.hosts[host]["variables"]["llama_links"] = [{"interface": interface, "address": f"{address}/24"}]
    assert layers_of(serve(pair, 10)) == {"RPC0[192.0.2.22:50052]": 10}


def test_a_plan_does_not_depend_on_the_order_of_the_facts(pair):
    """The same devices in the same order, whatever else is known of their hosts."""
    plan = serve(with_cards(pair, head=[GPU], worker1=[GPU, SLOW], worker2=[SLOW]), 70)
    for facts in (host["facts"] for host in pair.hosts.values()):
        facts.update(dict(reversed(list(facts.items()))))
    assert pair.plan()["placement"] == plan["placement"]

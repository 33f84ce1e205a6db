"""What clusters that owners publish need of planning."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices
from support.clusters import TOOLS, TREE, accelerator, cards_of, head_with_cards, strix_halo_head, strix_halos


def test_what_a_limit_of_the_driver_leaves_to_the_system_is_reserve():
    """Macs lend three quarters of their memory, a BC-250 12 GiB of 16: owners fill that."""
    capacities = [devices.usable_device_mib(size, True, memory) for size, memory in ((49152, 65536), (126976, 128200))]
    assert capacities == [49152, 128200 - 12697]
    assert devices.usable_device_mib(24576, False, 65536) == 24576 - 1228


def test_a_worker_maps_nothing_whatever_its_graphics_are():
    """A share of HIP with which a head hangs: what a worker gets by RPC comes from no mapped page (ggml-rpc.cpp of 0.3.36 has none)."""
    cluster = strix_halos(2, 69, llama_server_load_mode="mmap")
    cluster.hosts["strix0"]["facts"]["accelerators"] = []
    cluster.hosts["strix0"]["variables"]["llama_backend"] = "cpu"
    cluster.hosts["strix0"]["groups"] = ["head"]
    plan = cluster.plan()
    assert [entry["host"] for entry in plan["placement"]] == ["strix1"]
    assert not [entry["id"] for entry in plan["advisories"] if entry["id"].startswith("hip-mmap")]


@pytest.mark.parametrize(
    "gib, memory, variables, mode, refused",
    [
        (40, 262144, {}, "dio", False),
        (20, 32768, {}, "dio", False),
        (20, 65536, {}, None, False),
        (40, 262144, {"llama_server_load_mode": "auto"}, "auto", True),
        (40, 262144, {"llama_server_load_mode": "mmap"}, "mmap", True),
        (40, 262144, {"llama_server_load_mode": "none"}, "none", False),
        (80, 33800, {"llama_server_gpu_layers": 26}, "dio", True),
    ],
)
def test_hip_cards_of_one_program_share_the_limit_for_mapped_pages(gib, memory, variables, mode, refused):
    """The layers that do not fit on the cards are no pages of the file either, if it is not mapped."""
    cluster = head_with_cards(2, gib, **variables)
    card = accelerator("hip", "Radeon AI PRO R9700", "gfx1201", 32624)
    facts = {"memory_mib": memory, "accelerators": [card, card], "toolchain": TOOLS}
    cluster.hosts["head"]["facts"].update(facts)
    plan = cluster.plan()
    assert (plan["head"]["load_mode"], plan["refused"]) == (mode, refused), plan["reasons"]
    assert ("hip-mmap-hang" in [entry["id"] for entry in plan["advisories"]]) == (mode in ("auto", "mmap"))
    assert "MiB for ROCm0 and ROCm1 on head" in " ".join(plan["reasons"]) or mode not in ("auto", "mmap")


def tables(cluster, gib, architecture="qwen4exp"):
    """A model with so many GiB of embeddings for each layer, of which a token reads single rows."""
    summary = cluster.model["summary"]
    row = {"name": "per_layer_token_embd.weight", "type": "Q4_0", "shape": [32, 1], "bytes": gib << 30, "layers": None}
    layer = {"name": "blk.*.ffn_up.weight", "type": "F16", "shape": [1], "bytes": 1 << 28, "layers": list(range(40))}
    cluster.model["summary"] = {**summary, "architecture": architecture, "tensors": [layer, row]}
    return cluster


def test_tables_that_stay_in_the_memory_of_the_head_are_counted():
    cluster = tables(cards_of(20, llama_release={**TREE, "build": 11063}), 28)
    assert cluster.plan()["fits"]
    cluster.hosts["head"]["facts"]["memory_mib"] = 16384
    assert "head lacks 14336 MiB of memory for 28672 MiB of embedding tables" in cluster.reason()


def test_a_cache_that_stays_on_the_head_is_on_no_device():
    cluster = cards_of(20)
    cached = [sum(entry["kv_mib"] for entry in cluster.plan()["placement"])]
    cluster.hosts["head"]["variables"]["llama_server_extra_args"] = ["-nkvo"]
    plan = cluster.plan()
    assert {entry["kv_mib"] for entry in plan["placement"]} == {0}
    assert plan["head"]["cpu"]["kv_mib"] == cached[0] > 0
    cluster.hosts["head"]["facts"]["memory_mib"] = 2048 + int(cached[0]) // 2
    assert f"{int(cached[0])} MiB of KV cache (--no-kv-offload)" in cluster.reason()


def test_tables_and_devices_share_the_memory_of_the_head():
    cluster = tables(strix_halo_head(100), 28, "gemma3n")
    (entry,) = cluster.plan()["placement"]
    facts = cluster.hosts["head"]["facts"]
    facts.update(memory_mib=40000, accelerators=[{**facts["accelerators"][0], "memory_mib": 30000}])
    assert 100000 > entry["capacity_mib"] > entry["weights_mib"] + entry["kv_mib"]
    assert "the model does not fit: " in cluster.reason()


def test_devices_of_different_memory_do_not_share_evenly():
    cluster = head_with_cards(2, 30)
    (one, two) = cluster.hosts["head"]["facts"]["accelerators"]
    for size, how in ((24576, "evenly"), (16384, "by memory size")):
        cluster.hosts["head"]["facts"]["accelerators"] = [one, {**two, "memory_mib": size}]
        reasons = [entry["reason"] for entry in cluster.plan()["placement"]]
        assert [reason.rpartition(", shared ")[2] for reason in reasons] == [how] * 2

"""What a plan says of memory that may be too little, and of the context. Each remedy is applied, and the advisory is gone."""

import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import server
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import html_page, plan_text
from conftest import typed
from support.clusters import TREE, advisories_of, cards_of, head_with_cards, strix_halo_head


@pytest.mark.parametrize(
    "variables, change, remedy",
    [
        (
            {},
            {"llama_server_flash_attention": "on"},
            "Set llama_server_flash_attention to 'on'. Or reduce llama_server_micro_batch or ",
        ),
        (
            {"llama_server_flash_attention": "on"},
            {"llama_server_micro_batch": 128},
            "Reduce llama_server_micro_batch or llama_server_context",
        ),
    ],
)
def test_what_makes_compute_buffers_smaller_is_a_remedy(variables, change, remedy):
    given = {"llama_server_flash_attention": "off", "llama_server_context": 32768, **variables}
    cluster = cards_of(20.8 if variables else 19, **given)
    (advisory,) = advisories_of(cluster, "compute-over-capacity")
    assert advisory["remedy"].startswith(remedy)
    assert (advisory["severity"], advisory["host"]) == ("warning", "gpu1")
    cluster.hosts["head"]["variables"].update(change)
    cluster.accepted()
    assert not advisories_of(cluster, "compute-over-capacity")


def test_a_smaller_prompt_cache_is_a_remedy():
    plan = strix_halo_head(90, llama_server_prompt_cache_mib=50000).plan()
    assert "remove llama_server_prompt_cache_mib" in plan["reasons"][-1]


def test_the_default_context_is_that_of_the_variable():
    assert inventory.specification()["llama_server_context"]["default"] == server.DEFAULT_CONTEXT
    cluster = cards_of(1, summary={"context": 4096})
    assert not advisories_of(cluster, "context-cut")
    assert cluster.plan()["head"]["context"] == 4096


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, (23348, 23348)),
        ({"llama_server_reserve_mib": 4000}, (20576, 20576)),
        ({"llama_server_reserve_mib": 0}, (24576, 24576)),
        ({"llama_server_memory_mib": {"CUDA1": 16000}}, (23348, 16000)),
        ({"llama_server_memory_mib": {"CUDA1": 24576}}, (23348, 24576)),
        ({"llama_server_memory_mib": {"CUDA1": "16000"}, "llama_server_reserve_mib": 4000}, (20576, 16000)),
    ],
)
def test_the_operator_says_what_devices_of_the_head_hold(variables, expected):
    plan = head_with_cards(gib=30, llama_placement="all", **variables).accepted()
    found = {entry["device"]: entry["capacity_mib"] for entry in plan["placement"]}
    assert found == dict(zip(("CUDA0", "CUDA1"), expected))


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"llama_server_memory_mib": {"CUDA2": 1}}, "llama_server_memory_mib has CUDA2, .* use one of CUDA0, CUDA1"),
        ({"llama_server_memory_mib": {"CUDA0": 24577}}, "sets CUDA0 to 24577: use 1 to 24576"),
        ({"llama_server_memory_mib": {"CUDA0": 0}}, "sets CUDA0 to 0: use 1 to 24576"),
        ({"llama_server_memory_mib": {"CUDA0": "all"}}, "sets CUDA0 to 'all': use a whole number of MiB"),
        ({"llama_server_memory_mib": {"CUDA0": True}}, "sets CUDA0 to True: use a whole number of MiB"),
        ({"llama_server_reserve_mib": -1}, "llama_server_reserve_mib is -1: use a number of MiB, 0 or more"),
    ],
)
def test_what_devices_of_the_head_cannot_hold_is_refused(variables, said):
    assert re.search(said, head_with_cards(**variables).reason())
    assert not head_with_cards(llama_server_memory_mib={"CUDA0": 1}).plan()["refused"]


def test_a_head_without_devices_of_its_own_has_the_memory_of_its_workers():
    said = cards_of(10, llama_server_memory_mib={"CUDA0": 1000}).reason()
    assert "set memory_mib in llama_worker_endpoints instead" in said


def test_one_strix_halo_holds_87_gib_by_vulkan():
    """Its own graphics, without RPC: Mesa is told to show all of the memory, not two thirds."""
    plan = strix_halo_head(86).accepted()
    assert plan["head"]["environment"]["radv_enable_unified_heap_on_apu"] == "true"
    assert [entry["device"] for entry in plan["placement"]] == ["Vulkan0"]
    assert plan["placement"][0]["capacity_mib"] > 126976 * 2 / 3
    assert "vulkan-shared-memory" not in [advisory["id"] for advisory in plan["advisories"]]


@pytest.mark.parametrize("context", [4096, 131072])
def test_layers_on_the_processor_take_the_memory_that_graphics_share(context):
    cluster = strix_halo_head(150, llama_server_gpu_layers=20, llama_server_context=context)
    assert "the model does not fit" in cluster.reason()
    cluster = strix_halo_head(80, llama_server_gpu_layers=20, llama_server_context=context)
    (graphics,) = cluster.accepted()["placement"]
    whole = strix_halo_head(80, llama_server_context=context).accepted()["placement"][0]
    assert whole["capacity_mib"] - graphics["capacity_mib"] > 35 * 1024
    assert graphics["capacity_mib"] > graphics["weights_mib"] + graphics["kv_mib"]


def test_mesa_is_told_nothing_where_two_thirds_are_enough_or_the_operator_says_it():
    assert strix_halo_head(70).plan()["head"]["environment"] == {}
    assert head_with_cards(1, 60).plan()["head"]["environment"] == {}
    environment = {"radv_enable_unified_heap_on_apu": "false"}
    said = strix_halo_head(86, llama_server_environment=environment).plan()
    assert said["head"]["environment"]["radv_enable_unified_heap_on_apu"] == "false"


@pytest.mark.parametrize(
    "value, refused", [("true", False), (" true", False), ("1", True), ("yes", True), ("TRUE", True)]
)
def test_mesa_reads_nothing_but_true(value, refused):
    """By RPC, with the option in the environment of the worker; parseValue of xmlconfig.c compares with «true» and «false»."""
    environment = {"radv_enable_unified_heap_on_apu": value}
    cluster = strix_halo_head(86, "worker", llama_worker_endpoints=[{"environment": environment}])
    assert cluster.plan()["refused"] is refused


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, []),
        ({"llama_server_extra_args": ["--mmproj", "/srv/p.gguf"]}, ["the projector"]),
        (
            {"llama_server_extra_args": ["-md", "/srv/d.gguf", "--lora", "/srv/a.gguf", "--spec-type", "x"]},
            ["speculation (a draft model, or layers for multi-token prediction)", "adapters"],
        ),
    ],
)
def test_a_share_says_what_it_does_not_count(variables, expected):
    plan = cards_of(10, llama_release={**TREE, "build": 11063}, **variables).accepted()
    for entry in plan["placement"]:
        assert entry["without"] == expected
    lines = " ".join(" ".join(plan_text.plan_sections(typed(plan))["Memory"]).split())
    assert all(name in lines for name in expected)
    assert ("not included" in lines) is bool(expected)
    assert all(name in html_page.page(typed(plan)) for name in expected)

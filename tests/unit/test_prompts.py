"""What a plan says of prompts and conversations: what is kept of them, how fast they are when the context fills, and in which pieces."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from conftest import typed
from support.clusters import TREE, cards_of, head_with_cards, strix_halo_head

WINDOWS = {
    **{"architecture": "gemma3", "heads": 32, "kv_heads": 16, "key_dimension": 128, "value_dimension": 128},
    "keys": {"attention.sliding_window": 1024},
}


def argument(plan, word):
    argv = plan["head"]["argv"]
    return argv[argv.index(word) + 1] if word in argv else None


def pages(plan):
    return " ".join(plan_text.plan_page(typed(plan)).split())


def test_conversations_are_kept_in_half_of_what_is_free_and_8192_mib_at_most():
    sizes = {}
    for memory in (8192, 16384, 65536):
        cluster = head_with_cards()
        cluster.hosts["head"]["facts"]["memory_mib"] = memory
        plan = cluster.plan()
        sizes[memory] = plan["head"]["prompt_cache_mib"]
        assert argument(plan, "--cache-ram") == str(sizes[memory])
    assert sizes == {8192: 3072, 16384: 7168, 65536: 8192}
    assert "kept in 8192 MiB of the memory of head." in pages(plan)


def test_nothing_is_kept_where_fetching_takes_longer_than_computing_again():
    cluster, plans = cards_of(10, summary={"kv_heads": 32, "heads": 32, "width": 4096}), {}
    for mbit in (10000, 50):
        cluster.hosts["head"]["facts"]["measured"] = {"gpu1": {"round_trip_ms": 0.2, "mbit_per_second": mbit}}
        plans[mbit] = cluster.plan()
    assert [argument(plan, "--cache-ram") for plan in plans.values()] == ["8192", "0"]
    moved = plans[50]["estimate"]["conversation_s"]
    assert moved == pytest.approx(200 * plans[10000]["estimate"]["conversation_s"], rel=0.1)
    assert f"not kept; the KV cache of 8192 tokens takes {moved:g} seconds over the network" in pages(plans[50])


def test_what_is_asked_for_is_taken_from_the_memory_of_layers():
    assert strix_halo_head(100).plan()["fits"]
    plan = strix_halo_head(100, llama_server_prompt_cache_mib=16384).plan()
    assert "remove llama_server_prompt_cache_mib" in plan["reasons"][-1]
    assert argument(strix_halo_head(100, llama_server_prompt_cache_mib=1000).plan(), "--cache-ram") == "1000"
    assert "llama_server_prompt_cache_mib is -1" in head_with_cards(llama_server_prompt_cache_mib=-1).reason()


def test_memory_that_layers_or_another_cluster_take_keeps_no_conversation():
    assert strix_halo_head(105).plan()["head"].get("prompt_cache_mib", 0) < 8192
    cluster = head_with_cards()
    neighbour = {"cluster": "other", "ports": [], "memory_mib": {"CPU": 50000, "CUDA0": 9000}}
    cluster.hosts["head"]["facts"]["neighbours"] = [neighbour]
    assert argument(cluster.plan(), "--cache-ram") == "4352"


def test_a_build_without_the_option_gets_none_and_is_refused_a_size():
    cluster = head_with_cards(
        llama_release={**TREE, "build": 6170}, llama_accept_advisories=["rpc-remote-code-execution"]
    )
    assert argument(cluster.plan(), "--cache-ram") is None
    cluster.hosts["head"]["variables"]["llama_server_prompt_cache_mib"] = 512
    assert "which archive-bbbbbbbb does not know: use 0, or a build from b6800 on" in cluster.reason()


def test_checkpoints_of_windows_are_as_many_as_there_is_room_for():
    plan = head_with_cards(4, summary=WINDOWS, llama_server_parallel=2).plan()
    kept = plan["head"]["checkpoints_mib"]
    assert 1 < int(argument(plan, "--ctx-checkpoints")) < 32
    assert kept <= 8192
    assert plan["head"].get("prompt_cache_mib", 0) == (8192 - kept) // 256 * 256
    assert f"Checkpoints take up to {kept} MiB there." in pages(plan)
    assert argument(head_with_cards().plan(), "--ctx-checkpoints") is None
    full = head_with_cards(4, summary=WINDOWS, llama_server_extra_args=["--swa-full"]).plan()
    assert argument(full, "--ctx-checkpoints") is None

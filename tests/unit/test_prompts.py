"""What a plan says of prompts and conversations: what is kept of them, how fast they are when the context fills, and in which pieces."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, prompts
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text
from conftest import known_answer_of, typed
from support import models
from support.clusters import (
    CARD,
    FORK,
    TREE,
    cards_of,
    head_with_cards,
    model,
    strix_halo_head,
    strix_halos,
    with_long_context,
)

WINDOWS = {
    **{"architecture": "gemma3", "heads": 32, "kv_heads": 16, "key_dimension": 128, "value_dimension": 128},
    "keys": {"attention.sliding_window": 1024},
}

MIXTURE = {
    **{"architecture": "qwen3moe", "width": 4096, "heads": 32, "kv_heads": 8, "value_dimension": 128},
    **{"keys": {"expert_count": 128, "expert_used_count": 8}, "expert_bytes": [90 << 20] * 40},
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
    assert "cached in up to 8192 MiB of head's memory." in pages(plan)


def test_what_a_worker_beside_the_head_holds_is_not_free(local):
    head = local.hosts["here"]
    head["facts"]["memory_mib"], head["variables"]["llama_server_parallel"] = 16384, 1
    sizes = []
    for layers in (2, 40):
        head["variables"]["llama_model_known_answer"] = known_answer_of(layers, 2304, "f16")
        sizes.append(local.plan()["head"]["prompt_cache_mib"])
    assert sizes[1] < sizes[0] - 1024


def test_nothing_is_kept_where_fetching_takes_longer_than_computing_again():
    cluster, plans = cards_of(10, summary={"kv_heads": 32, "heads": 32, "width": 4096}), {}
    for mbit in (100000, 50):
        cluster.hosts["head"]["facts"]["measured"] = {"gpu1": {"round_trip_ms": 0.2, "mbit_per_second": mbit}}
        plans[mbit] = cluster.plan()
    assert [argument(plan, "--cache-ram") for plan in plans.values()] == ["8192", "0"]
    assert "Conversations that lost their slot are not cached." in pages(plans[50])
    cluster.hosts["head"]["facts"]["measured"]["gpu1"].update(mbit_per_second=100000, requested=False)
    assert argument(cluster.plan(), "--cache-ram") == "0"


@pytest.mark.parametrize(
    "context, backend, kept", [(65792, "vulkan", 0), (65792, "hip", 8192), (65536, "vulkan", 8192)]
)
def test_nothing_is_kept_that_llama_server_cannot_fetch(context, backend, kept):
    """ggml-org/llama.cpp#26128: it ends where values of a layer are more than one of Vulkan's buffers."""
    assert with_long_context(context, backend).plan()["head"]["prompt_cache_mib"] == kept


def test_what_is_asked_for_is_taken_from_the_memory_of_layers():
    assert strix_halo_head(100).plan()["fits"]
    plan = strix_halo_head(100, llama_server_prompt_cache_mib=16384).plan()
    assert not plan["fits"]
    alone = cards_of(30, 2, llama_server_prompt_cache_mib=100000).reason()
    assert "100000 MiB for llama_server_prompt_cache_mib: reduce this variable" in alone
    assert argument(strix_halo_head(100, llama_server_prompt_cache_mib=1000).plan(), "--cache-ram") == "1000"
    assert "llama_server_prompt_cache_mib is -1" in head_with_cards(llama_server_prompt_cache_mib=-1).reason()


def test_a_server_frees_its_model_after_the_seconds_that_are_asked_for():
    plan = head_with_cards(llama_server_idle_seconds=600).plan()
    assert (argument(plan, "--sleep-idle-seconds"), plan["head"]["idle_seconds"]) == ("600", 600)
    assert "After 600 seconds without a request, llama-server unloads its model" in pages(plan)
    kept = head_with_cards().plan()
    assert (argument(kept, "--sleep-idle-seconds"), "idle_seconds" in kept["head"]) == (None, False)
    other = head_with_cards(llama_server_idle_seconds=600, llama_release=FORK)
    assert other.reason().rstrip(".").endswith("archive-bbbbbbbb does not support: remove it")
    assert "llama_server_idle_seconds is 0" in head_with_cards(llama_server_idle_seconds=0).reason()


def test_conversations_survive_a_restart_if_that_is_asked_for():
    keeping = {"llama_server_keep_conversations": True, "llama_server_parallel": 2}
    plan = head_with_cards(**keeping).plan()
    kept, launcher = plan["head"]["conversations"], plan["head"]["launcher"]
    assert argument(plan, "--slot-save-path") == "/opt/llamacpp/state/conversations"
    place = launcher.index("--conversations")
    assert launcher[place + 1 : place + 4] == ["16384", str(kept["file_mib"]), "60"]
    assert abs(kept["file_mib"] - sum(entry["kv_mib"] for entry in plan["placement"]) / 2) <= 1
    assert f"takes {kept['file_mib']} MiB there, and {kept['move_s']:g} s to save or restore" in pages(plan)
    off = head_with_cards().plan()
    assert (argument(off, "--slot-save-path"), "conversations" in off["head"]) == (None, False)
    assert "--conversations" not in off["head"]["launcher"]
    assert "llama_server_conversations_mib is 0" in head_with_cards(llama_server_conversations_mib=0).reason()
    own = head_with_cards(llama_server_extra_args=["--slot-save-path", "/tmp"])
    assert "--slot-save-path, which cannot be set there: set llama_server_keep_conversations instead" in own.reason()


@pytest.mark.parametrize(
    "variables, reason",
    [
        ({"summary": WINDOWS}, "sliding windows or recurrent layers, and only build 11669"),
        ({"llama_server_extra_args": ["--spec-type", "draft-mtp"]}, "does not save the context of a draft model"),
        ({"llama_server_extra_args": ["--embedding"]}, "the model generates no text"),
        ({"llama_release": FORK}, "restoring conversations has not been tested with ik_llama.cpp"),
    ],
)
def test_the_plan_says_where_conversations_do_not_survive(variables, reason):
    plan = head_with_cards(llama_server_keep_conversations=True, **variables).plan()
    (advisory,) = [entry for entry in plan["advisories"] if entry["id"] == "conversations-lost"]
    assert reason in advisory["message"]
    assert (argument(plan, "--slot-save-path"), "conversations" in plan["head"]) == (None, False)


def test_windows_survive_a_restart_with_their_checkpoints():
    release = {**TREE, "build": 11669}
    plan = head_with_cards(summary=WINDOWS, llama_server_keep_conversations=True, llama_release=release).plan()
    head, kv = plan["head"], sum(entry["kv_mib"] for entry in plan["placement"])
    assert abs(head["conversations"]["file_mib"] - kv - head["checkpoints_mib"]) <= 1


def test_checkpoints_of_windows_are_as_many_as_there_is_room_for():
    plan = head_with_cards(4, summary=WINDOWS, llama_server_parallel=2).plan()
    kept = plan["head"]["checkpoints_mib"]
    assert 1 < int(argument(plan, "--ctx-checkpoints")) < 32
    assert kept <= 8192
    assert plan["head"]["prompt_cache_mib"] == 8192
    assert f"Context checkpoints take up to {kept} MiB of head's memory." in pages(plan)
    cluster = head_with_cards(4, summary=WINDOWS, llama_server_parallel=2)
    cluster.hosts["head"]["facts"]["memory_mib"] = 22528
    head = cluster.plan()["head"]
    assert 0 < head["prompt_cache_mib"] < 8192
    assert head["prompt_cache_mib"] + head["checkpoints_mib"] <= (22528 - 2252) // 2
    assert argument(head_with_cards().plan(), "--ctx-checkpoints") is None
    full = head_with_cards(4, summary=WINDOWS, llama_server_extra_args=["--swa-full"]).plan()
    assert argument(full, "--ctx-checkpoints") is None


MINIMAX = {"layers": 62, "heads": 48, "kv_heads": 8, "key_dimension": 128, "value_dimension": 128, "width": 3072}


def test_a_filled_context_slows_down_as_owners_measured():
    """MiniMax-M2 on two Strix Halo with 32768 tokens (kyuz0): a token took 100 ms more, one of a prompt 10.9 ms."""
    cluster = strix_halos(2, 180, llama_server_context=65536, llama_server_micro_batch=512)
    cluster.model["summary"] = model(180, **{**MINIMAX, "context": 65536})
    plan = cluster.plan()
    empty, (whole,) = plan["estimate"], plan["estimate"]["at_context"]
    assert whole["context"] == 65536
    for figure, measured, within in (("generation_tokens_per_s", 100, 0.2), ("prompt_tokens_per_s", 10.9, 0.5)):
        assert 1000 / whole[figure] - 1000 / empty[figure] == pytest.approx(2 * measured, rel=within)


def test_windows_do_not_slow_down():
    plan = head_with_cards(
        4, summary={**WINDOWS, "keys": {**WINDOWS["keys"], "attention.sliding_window_pattern": 40}}
    ).plan()
    (whole,) = plan["estimate"]["at_context"]
    assert whole["generation_tokens_per_s"] > 0.9 * plan["estimate"]["generation_tokens_per_s"]


@pytest.fixture
def free_visits(monkeypatch):
    monkeypatch.setattr(cost_model, "VISIT_MS", 0)


def works(seconds, links):
    """Stages of a pipeline that compute so many seconds for 256 tokens."""
    link = cost_model.ASSUMED_LINKS["loopback"]._replace(gbit=1e6)
    rate = device_rates.Rate(1e9, 1.0, device_rates.TABLE_SOURCE)
    return [
        cost_model.ModelPart("h", str(index), rate, 0, 0, time * 1e9 / 512, 0, link=link if lent else None)
        for index, (time, lent) in enumerate(zip(seconds, links))
    ]


@pytest.mark.usefixtures("free_visits")
@pytest.mark.parametrize(
    "seconds, links, micro_batches, expected",
    [
        ([1.0], [True], 8, 8),
        ([0.5, 0.5], [True, True], 8, 0.5 * 9),
        ([0.5, 0.5], [True, False], 8, 0.5 * 9),
        ([0.25] * 4, [True] * 4, 8, 0.75 * 8 + 0.25),
        ([0.25] * 4, [False] * 4, 8, 0.25 * 11),
        ([0.2, 0.5, 0.3], [True, False, False], 8, 1.0 + 7 * 0.5),
    ],
)
def test_the_head_waits_for_workers_before_it_hands_on(seconds, links, micro_batches, expected):
    found = prompts.prompt_s(works(seconds, links), 256 * micro_batches, 256, len(seconds) > 1)
    assert found == pytest.approx(expected, rel=0.01)
    further = (expected - sum(seconds)) / (micro_batches - 1)
    longer = prompts.prompt_s(works(seconds, links), 512 * micro_batches, 256, len(seconds) > 1)
    assert longer == pytest.approx(expected + micro_batches * further, rel=0.01)
    alone = prompts.prompt_s(works(seconds, links), 256 * micro_batches, 256, False)
    assert alone == pytest.approx(micro_batches * sum(seconds), rel=0.01)


@pytest.mark.usefixtures("free_visits")
@pytest.mark.parametrize("devices, measured", [(2, 9323), (3, 6898), (4, 5782)])
def test_the_head_computes_nothing_beside_what_it_carries(devices, measured):
    """phi3 on A100 behind workers, one of which reads 7099 tokens per second (ggml-org/llama.cpp#18626)."""
    link = cost_model.ASSUMED_LINKS["loopback"]
    lent = {"link": link, "network_bytes": 2 * 4 * 3072}
    carried = sum(cost_model.prompt_costs(works([0.0], [True])[0]._replace(**lent)).values()) / 1000
    parts = works([(512 / 7099 - carried) / 2 / devices] * devices, [True] * devices)
    tokens = 64 * 512
    found = prompts.prompt_s([part._replace(**lent) for part in parts], tokens, 512, True)
    assert tokens / found == pytest.approx(measured, rel=0.1)


def test_pieces_suit_the_memory(pair):
    long = cards_of(30, 2, llama_server_context=65536)
    plan = long.plan()
    prompt = plan["estimate"]["prompt"]
    assert (prompt["tokens"], prompt["pipelined"]) == (16384, True)
    shown = "a prompt of 16384 {low:g} to {high:g} tokens per second pipeline, -b 2048 -ub "
    assert shown.format(**prompt["speed_range"]) in pages(plan)
    given = cards_of(30, 2, llama_server_micro_batch=128).plan()
    assert (argument(given, "--ubatch-size"), given["estimate"]["prompt"]["micro_batch"]) == ("128", 128)
    for entry in plan["placement"]:
        assert entry["total_mib"] <= entry["capacity_mib"]


@pytest.mark.parametrize("gbit, micro_batch", [(10, 256), (0.1, 512)])
def test_a_short_prompt_counts_for_its_pieces(gbit, micro_batch):
    """On two H200 behind 10 Gbit/s 256 reads 512 tokens 1.24 times as fast as 512 does; a slow link carries both alike."""
    cluster = cards_of(30, 2)
    link = {"round_trip_ms": 0.28, "mbit_per_second": 1000 * gbit}
    cluster.hosts["head"]["facts"]["measured"] = {"gpu1": link, "gpu2": link}
    assert cluster.plan()["estimate"]["prompt"]["micro_batch"] == micro_batch


@pytest.mark.parametrize(
    "variables", [{"llama_server_override_tensor": ["blk.0.nothing=CPU"]}, {"llama_server_extra_args": ["-nkvo"]}]
)
@pytest.mark.parametrize("make, counts", [(head_with_cards, (2, 30)), (cards_of, (30, 2))], ids=["own", "workers"])
def test_what_switches_the_pipeline_off(make, counts, variables):
    def prompt(**given):
        cluster = make(*counts, llama_server_context=65536, **given)
        row = models.tensor("blk.*.ffn.weight", "Q4_0", [7168, 195000], 750 << 20, 40)
        cluster.model["summary"]["tensors"] = [row]
        return cluster.plan()["estimate"]["prompt"]

    off, on = prompt(**variables), prompt()
    assert (off["pipelined"], on["pipelined"]) == (False, True)
    assert off["tokens_per_s"] <= 0.95 * on["tokens_per_s"]


def test_ik_llama_has_no_pipeline():
    plan = cards_of(30, 2, llama_release=FORK, llama_server_context=65536).plan()
    assert not plan["estimate"]["prompt"]["pipelined"]
    assert "tokens per second -b 2048" in pages(plan)


def test_checkpoints_that_come_over_a_link_slow_prompts_down_and_are_off_where_they_cost_more_than_they_give():
    """What five of six layers keep of 1024 tokens is fetched twice, over links of 2.5 Gbit/s."""

    def planned(context, *arguments):
        given = {"llama_server_context": context, "llama_server_extra_args": list(arguments), "llama_placement": "all"}
        plan = cards_of(30, 2, summary=WINDOWS, **given).plan()
        return argument(plan, "--ctx-checkpoints"), plan["estimate"]["prompt"]["tokens_per_s"]

    (kept, with_them), (none, without) = planned(32768), planned(32768, "--swa-full")
    assert int(kept) > 1
    assert none is None
    assert 0.6 < with_them / without < 0.9
    assert planned(4096) == ("0", planned(4096, "--swa-full")[1])

    def more_ms(micro_batch):
        given = {"llama_server_context": 32768, "llama_placement": "all", "llama_server_micro_batch": micro_batch}
        both = [{**given, "llama_server_extra_args": arguments} for arguments in ([], ["--swa-full"])]
        found = [cards_of(30, 2, summary=WINDOWS, **one).plan()["estimate"]["prompt_tokens_per_s"] for one in both]
        return 512000 / found[0] - 512000 / found[1]

    assert more_ms(256) > 1.8 * more_ms(512), "those before the last micro-batch, too"


def test_a_kernel_that_takes_a_little_memory_changes_no_command_line():
    """The cache is planned in steps, and so is the room of checkpoints, each of which may be small."""
    lines = set()
    for memory in range(8300, 8420, 8):
        cluster = head_with_cards(4, summary={**WINDOWS, "kv_heads": 4})
        cluster.hosts["head"]["facts"]["memory_mib"] = memory
        lines.add(tuple(cluster.plan()["head"]["argv"]))
    assert len(lines) == 1
    assert 1 < int(argument(cluster.plan(), "--ctx-checkpoints")) < 32


def test_a_micro_batch_is_no_larger_than_its_batch(pair):
    wrong = cards_of(30, 2, llama_server_batch=512, llama_server_micro_batch=1024).reason()
    assert "llama_server_micro_batch is 1024, more than llama_server_batch" in wrong
    pair.hosts["head"]["variables"]["llama_server_micro_batch"] = 4096
    for plan in (cards_of(30, 2, llama_server_micro_batch=4096).plan(), pair.plan()):
        assert (argument(plan, "--batch-size"), argument(plan, "--ubatch-size")) == ("4096", "4096")


def test_a_fallback_has_pieces_of_prompts_for_which_its_devices_have_room():
    """A large card has room for the compute buffer of large micro-batches, the small ones that stand in have none."""
    cluster = cards_of(4, 4, MIXTURE, llama_server_context=131072)
    small, large = ("NVIDIA GeForce RTX 3060", "8.6", 12288), ("NVIDIA H100 80GB HBM3", "9.0", 81559)
    for name in ("gpu1", "gpu2", "gpu3", "gpu4"):
        device = dict(zip(("name", "architecture", "memory_mib"), large if name == "gpu1" else small))
        cluster.hosts[name]["facts"]["accelerators"] = [{**CARD["accelerators"][0], **device}]
        link = {name: {"round_trip_ms": 9.0, "mbit_per_second": 100000}}
        cluster.hosts["head"]["facts"].setdefault("measured", {}).update(link)
    plan = cluster.plan()
    assert plan["estimate"]["prompt"]["micro_batch"] > 512
    (fallback,) = plan["fallbacks"]
    for entry in fallback["placement"]:
        assert entry["total_mib"] <= entry["capacity_mib"]
    assert "--ubatch-size" not in fallback["head"]["argv"]

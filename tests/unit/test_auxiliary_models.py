"""Projectors and draft models: where llama-server holds them, what they take, and what a plan says of that."""

import gguf_files
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, known_answer, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import local_models
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import html_page, memory_text, plan_text
from conftest import typed
from support.clusters import FORK, GIB, TREE, advisories_of, cards_of, head_with_cards

MIB = 1 << 20
PROJECTOR = {
    "architecture": "clip",
    "name": "eyes",
    "tensors": 50,
    "tensor_bytes": 600 * MIB,
    "files": [],
    "bytes": 600 * MIB,
}


def draft(gib=1.0):
    return {
        **{"architecture": "llama", "name": "small", "layers": 16, "context": 131072, "vocabulary": 129280},
        **{"width": 2048, "heads": 32, "kv_heads": 8, "key_dimension": 64, "value_dimension": 64},
        "layer_bytes": [int(gib * GIB) // 16] * 16,
        "input_bytes": 100 * MIB,
        "output_bytes": 100 * MIB,
    }


def with_both(cluster, **summaries):
    """The cluster with a projector and a draft model, as far as they are given."""
    for role, known in summaries.items():
        cluster.hosts["head"]["variables"][f"llama_model_{role}"] = f"/srv/{role}.gguf"
        if known:
            cluster.model.setdefault("auxiliary", {})[role] = known
    return cluster


def rows(plan):
    return {one["role"]: one for one in plan["auxiliary_models"]}


def after(argv, word):
    return argv[argv.index(word) + 1] if word in argv else None


def read_on_host(path):
    """The summary of a file, as the head reports it."""
    return local_models.report([], [str(path)], [], "nobody")["paths"][str(path)]["summary"]


BUILD = {"llama_release": {**TREE, "build": 11063}}


def test_without_devices_of_the_head_its_processor_has_both_and_no_worker_any():
    plan = with_both(cards_of(10, **BUILD), draft=draft(), mmproj=PROJECTOR).accepted()
    assert {role: one["device"] for role, one in rows(plan).items()} == {"draft": None, "mmproj": None}
    argv = plan["head"]["argv"]
    assert after(argv, "--device-draft") == "none"
    assert "--no-mmproj-offload" in argv
    assert "--gpu-layers-draft" not in argv
    assert "MTMD_BACKEND_DEVICE" not in plan["head"]["environment"]
    (worker,) = plan["placement"]
    assert worker["auxiliary_mib"] == 0
    assert worker["without"] == []


def test_the_fastest_device_of_the_head_has_both_where_there_is_room():
    cluster = head_with_cards(2, 20, llama_placement="all", **BUILD)
    plan = with_both(cluster, draft=draft(), mmproj=PROJECTOR).accepted()
    argv, both = plan["head"]["argv"], rows(plan)
    assert after(argv, "--device-draft") == both["draft"]["device"] == both["mmproj"]["device"] == "CUDA0"
    assert after(argv, "--gpu-layers-draft") == "17"
    assert "--no-mmproj-offload" not in argv
    assert plan["head"]["environment"]["MTMD_BACKEND_DEVICE"] == "CUDA0"
    first = next(entry for entry in plan["placement"] if entry["device"] == "CUDA0")
    for one in both.values():
        assert one["total_mib"] == pytest.approx(
            sum(one[f"{part}_mib"] for part in ("weights", "kv", "compute")), abs=0.03
        )
    assert first["auxiliary_mib"] == pytest.approx(sum(one["total_mib"] for one in both.values()), abs=0.02)
    assert first["total_mib"] == pytest.approx(
        sum(first[f"{part}_mib"] for part in ("weights", "kv", "compute", "auxiliary")), abs=0.03
    )
    assert first["exact"] == []
    assert both["draft"]["weights_mib"] == 1124
    assert both["draft"]["in_memory_mib"] == 100
    assert both["draft"] == {
        key: round(value, 2) if key.endswith("_mib") else value for key, value in both["draft"].items()
    }


def test_a_device_that_only_a_draft_model_needs_is_the_servers():
    cluster = with_both(head_with_cards(1, 60, llama_server_gpu_layers=0), draft=draft())
    cluster.hosts["head"]["facts"]["memory_mib"] = 131072
    plan = cluster.accepted()
    assert plan["placement"] == []
    assert rows(plan)["draft"]["device"] == "CUDA0"
    assert plan["head"]["backends"] == ["cuda"]
    assert "CUDA_VISIBLE_DEVICES" not in plan["head"]["environment"]
    assert "  CUDA0" in "\n".join(plan_text.plan_sections(typed(plan))["Memory"])
    assert "draft model small on CUDA0" in html_page.page(typed(plan))


def test_a_draft_model_that_leaves_no_room_on_the_card_is_computed_by_the_processor():
    plan = with_both(head_with_cards(1, 16), draft=draft(6)).accepted()
    assert rows(plan)["draft"]["device"] is None


@pytest.mark.parametrize("arguments, kv", [([], 256), (["-ctkd", "q8_0", "-ctvd", "q8_0"], 136)])
def test_the_draft_models_cache_has_its_own_size(arguments, kv):
    given = {"llama_server_extra_args": arguments}
    cluster = cards_of(10, llama_server_context=8192, llama_server_cache_type_k="q4_0", **given, **BUILD)
    assert rows(with_both(cluster, draft=draft()).plan())["draft"]["kv_mib"] == kv


def test_a_type_of_the_draft_models_cache_that_is_none_is_refused():
    cluster = cards_of(10, llama_server_extra_args=["-ctkd", "q9_0"], **BUILD)
    assert "-ctkd 'q9_0': use one of " in with_both(cluster, draft=draft()).reason()


@pytest.mark.parametrize(
    "role, summary, variables, why",
    [
        ("draft", draft(), {"llama_release": FORK}, "ik_llama.cpp chooses"),
        ("mmproj", None, {}, "its header was not read"),
        ("mmproj", PROJECTOR, {"llama_server_extra_args": ["--mmproj-device", "RPC0"]}, "--mmproj-device in"),
        ("mmproj", PROJECTOR, {"llama_server_extra_args": ["--mmproj-offload"]}, "--mmproj-offload in"),
        ("draft", draft(), {"llama_server_extra_args": ["-ngld", "16"]}, "-ngld in"),
        ("draft", draft(), {"llama_server_extra_args": ["--spec-draft-device", "none"]}, "--spec-draft-device in"),
    ],
)
def test_what_is_not_known_is_said_and_not_guessed(role, summary, variables, why):
    cluster = with_both(cards_of(10, **{**BUILD, **variables}), **{role: summary})
    plan = cluster.plan()
    assert plan["auxiliary_models"] == []
    assert [one["role"] for one in plan["auxiliary_uncounted"]] == [role]
    assert why in plan["auxiliary_uncounted"][0]["reason"]
    assert "--device-draft" not in plan["head"]["argv"]
    assert "--no-mmproj-offload" not in plan["head"]["argv"]
    (advisory,) = advisories_of(cluster, "auxiliary-not-counted")
    assert f"The plan does not count the memory for llama_model_{role}" in advisory["message"]
    assert all(f"llama_model_{role}" in entry["without"] for entry in plan["placement"])


PART = (("block_count", 61), ("embedding_length", 1024), ("context_length", 4096), ("nextn_predict_layers", 1))
PART += (("attention.head_count", 8), ("attention.head_count_kv", 8))
MTP = (
    *((f"llama.{name}", gguf_files.U32, number) for name, number in PART),
    ("general.architecture", gguf_files.STRING, "llama"),
)


def test_a_draft_model_that_is_a_part_of_another_model_is_counted(tmp_path):
    """convert_hf_to_gguf.py --mtp of build 11063 writes the layers that predict further tokens alone, and counts those of the whole model."""
    tensors = [(f"blk.60.{name}", (1024, 1024), 1) for name in ("attn_q.weight", "nextn.eh_proj.weight")]
    (tmp_path / "mtp.gguf").write_bytes(gguf_files.model(MTP, [("token_embd.weight", (1024, 32), 1), *tensors]))
    read = read_on_host(tmp_path / "mtp.gguf")
    plan = with_both(head_with_cards(2, 20, **BUILD), draft=read).accepted()
    assert after(plan["head"]["argv"], "--spec-type") == "draft-mtp"
    assert after(plan["head"]["argv"], "--gpu-layers-draft") == "62"
    one = rows(plan)["draft"]
    assert one["weights_mib"] >= 4
    context = plan["head"]["context"]
    assert one["kv_mib"] == 2 * 2 * 1024 * context / MIB, "of one layer"
    windows = {"architecture": "gemma3", "layer_bytes": [0] * 15 + [GIB], "keys": {"attention.sliding_window": 512}}
    one = rows(with_both(head_with_cards(2, 20, **BUILD), draft={**draft(), **windows}).plan())["draft"]
    assert one["kv_mib"] == 2 * 2 * 8 * 64 * context / MIB, "of one that has no window"


def test_too_little_is_said_of_a_device_that_does_not_hold_what_is_beside_the_model():
    plan = with_both(head_with_cards(2, 20, llama_placement="all"), draft=draft()).plan()
    first = next(entry for entry in plan["placement"] if entry["device"] == "CUDA0")
    first["capacity_mib"] = first["weights_mib"] + first["kv_mib"]
    said = [line for line in memory_text.memory_lines(typed(plan)) if ", too small" in line]
    assert [line.split()[0] for line in said] == ["CUDA0"]


def test_the_pages_have_rows_beside_the_device():
    plan = with_both(head_with_cards(2, 20), draft=draft(), mmproj=PROJECTOR).plan()
    lines = memory_text.memory_lines(typed(plan))
    assert [line.split()[0] for line in lines[1:5]] == ["CUDA1", "CUDA0", "draft", "projector"]
    assert "compute buffer assumed" in lines[4]
    assert "░ auxiliary models" in "\n".join(lines)
    assert "draft model small on CUDA0: weights ≤ 1124 MiB" in html_page.page(typed(plan))
    assert '<span class="key auxiliary"></span>auxiliary models' in html_page.page(typed(plan))
    assert "key auxiliary" not in html_page.page(typed(head_with_cards(2, 20).plan()))
    plan = with_both(cards_of(10), draft=draft()).plan()
    assert "processor of head" in "\n".join(memory_text.memory_lines(typed(plan)))


@pytest.mark.parametrize(
    "summary, arguments, kind",
    [
        (draft(), [], "draft-simple"),
        (None, [], "draft-simple"),
        ({**draft(), "architecture": "eagle3"}, [], "draft-eagle3"),
        ({**draft(), "architecture": "dflash"}, [], "draft-dflash"),
        ({**draft(), "architecture": "dflash", "tensors": "markov_w1.weight"}, [], "draft-dspark"),
        ({**draft(), "tensors": "blk.*.nextn.eh_proj.weight"}, [], "draft-mtp"),
        (draft(), ["--spec-type", "ngram-simple"], "ngram-simple"),
    ],
)
def test_the_server_is_told_to_use_the_draft_model(summary, arguments, kind):
    """Build 11063 logged «no implementations specified for speculative decoding» with --model-draft alone, and 18 of 18 tokens accepted with
    --spec-type draft-simple."""
    if summary and "tensors" in summary:
        row = {"name": summary["tensors"], "type": "F16", "shape": [64, 64], "bytes": 8192, "layers": None}
        summary = {**summary, "tensors": [row]}
    plan = with_both(cards_of(10, llama_server_extra_args=arguments, **BUILD), draft=summary).accepted()
    assert after(plan["head"]["argv"], "--spec-type") == kind
    assert plan["head"]["argv"].count("--spec-type") == (kind is not None)
    if summary:
        assert all(entry["without"] == [] for entry in plan["placement"])


@pytest.mark.parametrize("kind, without", [("eagle3", 1), ("llama", 0)])
def test_states_of_a_recurrent_model_that_may_be_taken_back_are_not_counted(kind, without):
    summary = {"architecture": "mamba2"}
    cluster = with_both(cards_of(10, summary=summary, **BUILD), draft={**draft(), "architecture": kind})
    (entry_,) = cluster.plan()["placement"]
    assert entry_["without"] == ["states of tokens that may be rolled back"] * without
    given = {"llama_server_extra_args": ["--spec-type", "ngram-mod,draft-mtp"], **BUILD}
    (entry_,) = with_both(cards_of(10, summary=summary, **given), draft=draft()).plan()["placement"]
    assert entry_["without"] == ["states of tokens that may be rolled back"]


def test_without_a_draft_model_speculation_is_not_counted():
    given = {"llama_server_extra_args": ["--spec-type", "draft-mtp"]}
    plan = cards_of(10, **given, **BUILD).plan()
    assert plan["placement"][0]["without"] == ["speculation (a draft model, or layers for multi-token prediction)"]


# Figures that llama-server of build 11063 logged


def test_a_draft_model_is_planned_as_it_was_logged():
    """4 layers of width 256 in f16, 4096 tokens, two requests: by the processor 3.79, 16.00 and 5.01 MiB; on a device 3.65 and 16.00 beside 0.14
    in memory."""
    cluster = cards_of(1, llama_server_context=4096, llama_server_parallel=2, **BUILD)
    plan = with_both(cluster, draft=known_answer.summary(4, 256, "f16")).plan()
    row = rows(plan)["draft"]
    assert (row["weights_mib"], row["kv_mib"]) == (pytest.approx(3.79, abs=0.01), 16)
    assert 5.01 <= row["compute_mib"] < 64
    cluster = head_with_cards(1, 1, llama_server_context=4096, llama_server_parallel=2, **BUILD)
    row = rows(with_both(cluster, draft=known_answer.summary(4, 256, "f16")).plan())["draft"]
    assert (row["weights_mib"], row["kv_mib"], row["in_memory_mib"]) == (pytest.approx(3.65, abs=0.01), 16, 0.14)


# What is read


def test_a_header_of_a_projector(tmp_path):
    path = tmp_path / "p.gguf"
    path.write_bytes(gguf_files.model((("general.architecture", gguf_files.STRING, "clip"),)))
    read = projector.summarize(gguf.read_local_headers(str(path)))
    assert read["tensor_bytes"] == 64 * 32 * 4 + 2 * 64 * 64 * 2 + 64 * 4
    assert read_on_host(path) == read


def test_a_summary_of_a_projector_that_cannot_be():
    summary, said = {**PROJECTOR, "tensors": 0}, "tensors is 0"
    assert model_source.parse_model_report({"auxiliary": {"mmproj": summary}}).problem == said
    assert f"does not match this version's format ({said})" in with_both(cards_of(10), mmproj=summary).reason()

"""The shapes in which a cluster can serve a model, and speeds for several users."""

import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import shapes
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text, speed_text
from conftest import Cluster, typed
from support.clusters import CARD, CUDA, TREE, accelerator, cards_of, head_with_cards
from support.models import tensor

H200 = accelerator("cuda", "NVIDIA H200", "9.0", 143771)
DENSE = {
    **{"architecture": "qwen2", "name": "32B", "layers": 64, "width": 5120, "heads": 40, "kv_heads": 8},
    **{"key_dimension": 128, "value_dimension": 128, "context": 32768, "vocabulary": 152064},
    **{"layer_bytes": [281 << 20] * 64, "input_bytes": 438 << 20, "output_bytes": 609 << 20, "parameters": 32763876352},
}


def h200s(*cards, users=1, **variables):
    """A head and workers with so many cards each."""
    cluster = Cluster()
    for index, count in enumerate(cards):
        cluster.add(
            f"host{index}",
            *(["worker"] if index else ["head"]),
            address=f"192.0.2.{11 + index}",
            facts={"memory_mib": 262144, "toolchain": CUDA, "accelerators": [H200] * count},
            llama_release={**TREE, "build": 11669},
            llama_model_path="/srv/m.gguf",
            **{"llama_server_parallel": users, "llama_server_context": 4096 * users, **variables},
        )
    links = {f"host{index}": {"round_trip_ms": 0.28, "mbit_per_second": 9900} for index in range(1, len(cards))}
    cluster.hosts["host0"]["facts"]["measured"] = links
    cluster.model = {"summary": DENSE}
    return cluster


def together(cluster):
    return cluster.accepted()["estimate"]["users"]["generation_tokens_per_s"]


@pytest.mark.parametrize(
    "cards, users, measured",
    [((0, 1, 1), 1, 62), ((0, 1, 1), 4, 141), ((0, 1, 1), 8, 179), ((1,), 1, 75), ((1,), 8, 227), ((2,), 8, 234)],
)
def test_users_are_predicted_as_they_were_measured(cards, users, measured):
    """A dense 32B in q4_K on H200 (docs/performance.md)."""
    assert together(h200s(*cards, users=users, llama_placement="all")) == pytest.approx(measured, rel=0.2)


def test_users_without_a_slot_wait():
    cluster = h200s(1, users=4)
    cluster.set("host0", llama_users=16)
    plan = typed(cluster.accepted())
    assert (plan.estimate.users.users, plan.estimate.users.at_once) == (16, 4)
    assert plan.estimate.users.generation_tokens_per_s == together(h200s(1, users=4))
    assert speed_text.speed_rows(plan)[2][0] == "16 users, 4 at once"
    cluster.set("host0", llama_users=0)
    cluster.reason("llama_users is 0: use 1 or more")


def shapes_of(plan):
    return {speed_text._shape_name(shape): shape for shape in plan.estimate.shapes}


def test_one_server_on_each_host_serves_several_users_the_fastest():
    plan = typed(h200s(1, 1, users=8, llama_placement="all").accepted())
    found = shapes_of(plan)
    alone, other, replicas, split = found.values()
    assert [*found] == ["host0 alone", "host1 alone", "one server on each of host0, host1", "split over host0, host1"]
    assert [shape.chosen for shape in found.values()] == [False, False, False, True]
    half = together(h200s(1, users=4))
    assert replicas.users.generation_tokens_per_s == pytest.approx(2 * half, rel=0.02)
    assert replicas.users.generation_tokens_per_s > 1.5 * split.users.generation_tokens_per_s
    assert (replicas.generation_tokens_per_s, replicas.users.at_once) == (alone.generation_tokens_per_s, 8)
    assert min(alone.free_mib, other.free_mib) == replicas.free_mib < split.free_mib
    page = " ".join(" ".join(plan_text.plan_sections(plan)["Shapes"]).split())
    assert "split over host0, host1 (this plan) yes" in page
    gain = r"The fastest other shape is one server on each of host0, host1: 1\.\d+ times the tokens per second of this plan "
    assert re.search(
        gain + r"for 8 users\. To select it, add host0, host1 to llama_head, and a host to llama_balancer\.", page
    )


def test_hosts_that_are_alike_share_a_row_and_what_does_not_fit_says_how_much_is_missing():
    plan = typed(cards_of(85, 6).accepted())
    found = shapes_of(plan)
    row = found["one of 6 hosts alone"]
    assert not row.fits
    assert row.free_mib < 0
    assert f"{-row.free_mib / 1024:.1f} GiB missing" in " ".join(plan_text.plan_sections(plan)["Shapes"])
    (chosen,) = [shape for shape in found.values() if shape.chosen]
    assert (chosen.kind, chosen.settings) == ("split", ())
    assert 3 < len(chosen.hosts) < 6
    assert found["split over 6 hosts"].settings == ("set llama_placement to all",)
    alone = typed(head_with_cards().accepted())
    assert [(shape.kind, shape.chosen) for shape in alone.estimate.shapes] == [("host", True)]
    assert speed_text.shape_notes(alone) == []


def test_the_known_answer_model_has_no_shapes(local):
    plan = typed(local.accepted())
    assert plan.estimate.shapes == ()
    assert "Shapes" not in plan_text.plan_sections(plan)


MIXTURE = {"keys": {"expert_count": 128, "expert_used_count": 4}}


def mixture(head_memory=65536, **variables):
    """A mixture of experts of 20 GiB, a head with a small card, and a slow worker that holds the most of it."""
    slow = {**CARD, "accelerators": [accelerator("cuda", "NVIDIA GeForce GTX 1050 Ti", "6.1", 24576)]}
    cluster = cards_of(20, 1, MIXTURE, **variables)
    small = accelerator("cuda", "NVIDIA GeForce RTX 3060", "8.6", 6144)
    cluster.hosts["head"]["facts"].update({**CARD, "memory_mib": head_memory, "accelerators": [small]})
    cluster.hosts["head"]["facts"]["cpu"] = {"model": "AMD Ryzen 9 7950X", "cores": 32, "features_id": "f"}
    cluster.hosts["gpu1"]["facts"].update(slow)
    cluster.model["summary"]["tensors"] = [
        tensor("blk.*.ffn_up_exps.weight", "Q4_0", [2048, 2048, 204], 480 << 20, 40),
        tensor("blk.*.attn_q.weight", "Q4_0", [2048, 28000], 32 << 20, 40),
    ]
    return cluster


def test_a_host_alone_may_have_experts_on_its_processor():
    plan = mixture().accepted()
    best = plan["estimate"]["best_single_host"]
    assert (best["host"], best["faster"], best["gpu_layers"]) == ("head", True, None)
    assert re.fullmatch(r"blk\\\.\(.*\)\\\.ffn_\.\*exps=CPU", best["override_tensor"])
    (met,) = [entry for entry in plan["advisories"] if entry["id"] == "slower-than-one-host"]
    assert f"set llama_server_override_tensor to ['{best['override_tensor']}']" in met["remedy"]
    assert "head alone (experts on its processor)" in shapes_of(typed(plan))
    cluster = mixture(llama_server_override_tensor=[best["override_tensor"]])
    cluster.hosts = {"head": {**cluster.hosts["head"], "groups": ["head"]}}
    alone = cluster.accepted()["estimate"]
    assert alone["generation_tokens_per_s"] == best["generation_tokens_per_s"]
    assert "override_tensor" not in mixture(head_memory=9000).accepted()["estimate"]["best_single_host"]


def test_numbers_below_a_number_have_an_expression():
    for count in range(1, 130):
        expression = re.compile(shapes._numbers_pattern(count))
        assert [number for number in range(200) if expression.fullmatch(str(number))] == [*range(count)]

"""Rates of devices, what a token reads, and what that costs."""

import statistics

import predicted_speed
import published_speed
import pytest
import shapes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import device_rates as rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary, kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import TensorGroup
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load, site
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device
from conftest import ROOT
from support import models

STRIX = {"backend": "vulkan", "name": "8060S", "architecture": "gfx1151", "memory_mib": 126976, "unified": True}


def rate(pair, device, accelerators=(), model="test"):
    pair.hosts["worker1"]["facts"].update(
        accelerators=list(accelerators), cpu={"model": model, "cores": 64, "features_id": "f"}
    )
    host = cluster_inputs.read_cluster("test", pair.hosts).hosts["worker1"]
    own = Device("worker1", "vulkan", device, device, 1, {}, accelerator=host.facts.accelerator_of(device))
    return site.rate_of(own, host)


def test_a_rate_comes_from_the_table_and_a_processor_has_one_of_its_own(pair):
    given = rate(pair, "Vulkan0", [STRIX])
    assert given.source == rates.TABLE_SOURCE
    assert given.gb_per_s == pytest.approx(256 * rates.FAMILIES["strix"].generation_share, abs=0.1)
    assert rate(pair, "CPU", [STRIX], "AMD EPYC 7713 64-Core Processor").source == rates.TABLE_SOURCE


@pytest.mark.parametrize("unified, kind", [(True, "unified"), (False, "discrete")])
def test_what_no_table_knows_is_assumed_by_its_kind(pair, unified, kind):
    given = rate(pair, "Vulkan0", [{**STRIX, "name": "Other", "architecture": "gfx9999", "unified": unified}])
    row = rates.ASSUMED_RATES[kind]
    assert given.source == rates.ASSUMED_SOURCE
    assert given.gb_per_s == pytest.approx(row.gb_per_s * rates.FAMILIES[row.family].generation_share)


@pytest.mark.parametrize(
    "architecture, family, least, most",
    [
        ("12.1", "nvidia", 336, 1008),
        ("8.6", "nvidia", 336, 1008),
        ("7.5", "turing", 320, 672),
        ("7.0", "volta", 653, 900),
        ("9.0", "datacenter", 1935, 4800),
        ("6.1", "pascal", 192, 484),
    ],
)
def test_a_card_of_nvidia_that_no_table_knows_is_as_those_of_its_capability(pair, architecture, family, least, most):
    card = {**STRIX, "backend": "cuda", "name": "NVIDIA XYZ", "architecture": architecture, "unified": False}
    given = rate(pair, "CUDA0", [card])
    known = rates.FAMILIES[family]
    assert given.source == rates.ASSUMED_SOURCE
    assert least < given.gb_per_s / known.generation_share < most
    assert given.node_us == known.node_us
    rows = [row for row in rates.NVIDIA_ROWS if row.family == family]
    ratios = (row.gb_per_s * known.generation_share / given.gb_per_s for row in rows)
    assert statistics.mean(1 / given.uncertainty <= ratio <= given.uncertainty for ratio in ratios) >= 0.8
    ratios = (1000 * row.tflops * known.prompt_share / given.prompt_gflops for row in rows)
    factor = given.uncertainty**cost_model.PROMPT_EXPONENT
    assert statistics.mean(1 / factor <= ratio <= factor for ratio in ratios) >= 0.77, "seven of nine"
    assert rate(pair, "CUDA0", [{**card, "architecture": ""}]).gb_per_s == pytest.approx(400 * 0.7)


def test_measured_figures_are_predicted_within_their_bounds_and_half_of_them_closely():
    figures = predicted_speed.figures()
    assert [figure for figure in figures if abs(figure.error) > figure.within] == []
    assert all(figure.within == predicted_speed.WITHIN or figure.why for figure in figures)
    assert statistics.median(abs(figure.error) for figure in figures) <= predicted_speed.MEDIAN_WITHIN


def test_published_figures_are_predicted_and_in_ranges_that_say_something():
    figures = published_speed.figures(published_speed.published())
    errors = [abs(figure.predicted / figure.measured - 1) for figure in figures if figure.test == "tg"]
    assert statistics.mean(error <= 0.2 for error in errors) >= 0.95
    inside = [1 / figure.factor <= figure.predicted / figure.measured <= figure.factor for figure in figures]
    assert statistics.mean(inside) >= 0.98
    assert statistics.median(figure.factor**2 for figure in figures) <= 2.35


def test_four_of_five_figures_that_no_fit_used_are_in_their_range():
    figures = published_speed.figures(published_speed.published("published_checks.csv"))
    inside = [1 / figure.factor <= figure.predicted / figure.measured <= figure.factor for figure in figures]
    assert statistics.mean(inside) >= 0.8
    fitted = {(row.owner, row.test, row.measured) for row in published_speed.published()}
    assert not fitted & {
        (row.owner, row.test, row.measured) for row in published_speed.published("published_checks.csv")
    }


def test_a_step_of_several_users_reads_weights_once_and_the_cache_of_each():
    rate = rates.Rate(100, 1e9, rates.TABLE_SOURCE, node_us=1)
    work = cost_model.ModelPart("a", "", rate, read_bytes=1e9, weight_bytes=8e9, multiplied_weights=0, nodes=1000)
    assert [cost_model.device_ms(work, users) for users in (1, 8)] == [11, 11]
    cached = work._replace(cache_read_bytes=1e8)
    assert [cost_model.device_ms(cached, users) for users in (1, 8)] == pytest.approx([12, 19])
    experts = work._replace(expert_read_bytes=5e8, active_share=0.1)
    all_experts = cost_model.device_ms(experts, 1000)
    assert cost_model.device_ms(experts, 2) == pytest.approx(11 + 5 * 0.9)
    assert all_experts == pytest.approx(11 + 5 * 9)
    slow = work._replace(rate=rate._replace(prompt_gflops=1000), dense_weights=1e9)
    assert cost_model.device_ms(slow, 2) == pytest.approx(11 + 2 * cost_model.VECTOR_TOKEN_COST)
    growth = [cost_model.device_ms(slow, users) for users in (8, 9, 10)]
    assert growth[2] - growth[1] == pytest.approx(growth[1] - growth[0]) == pytest.approx(2)
    slowest = slow._replace(rate=rate._replace(prompt_gflops=1))
    assert cost_model.device_ms(slowest, 3) == 33, "no more than so many steps"
    limited = work._replace(rate=rate._replace(gweights_per_s=50), dense_weights=1e9)
    assert cost_model.device_ms(limited) == 21, "kernels for single tokens are the limit"
    link = ETHERNET._replace(gbit=8.0)
    lent = work._replace(link=link, network_bytes=1e6, result_bytes=1e6)
    assert cost_model.link_ms(lent, 4) - cost_model.link_ms(lent) == pytest.approx(3 * 2)
    assert cost_model.token_factor([cached], 8) > cost_model.token_factor([cached])


def test_matrices_that_open_a_compressed_cache_are_slow_to_read(tmp_path):
    path = tmp_path / "shape.gguf"
    shapes.write(path, shapes.SHAPES["DeepSeek R1"], "q8_0", filled=False)
    summary = header_summary.parse(header_summary.summarize(gguf.read_local_headers(str(path))))
    load = device_load.Load(summary, kv_cache.CacheSettings(512), 11063)
    costs = zip(load.tensors, cost_model.tensor_costs(load))
    read = {tensor.name: cost.read_bytes / tensor.bytes for tensor, cost in costs}
    assert read["blk.1.attn_k_b.weight"] == read["blk.1.attn_v_b.weight"] == cost_model.LATENT_FACTOR
    assert read["blk.1.attn_q_b.weight"] == 1


RATES = {
    ("gfx1100", "AMD gfx1100"): 864,
    ("gfx1100", "AMD Radeon PRO W7800 48GB"): 864,
    ("8.9", "NVIDIA GeForce RTX 4070 Ti SUPER"): 672,
    ("8.9", "NVIDIA L4"): 300,
    ("apple", "Apple M4"): 120,
    ("", "NVIDIA A100-SXM4-80GB"): 2039,
    ("", "NVIDIA A100-SXM4-40GB"): 1555,
    ("", "NVIDIA A100 80GB PCIe"): 1935,
    ("", "NVIDIA A10G"): 600,
    ("8.6", "NVIDIA A2"): 200,
    ("12.0", "NVIDIA RTX PRO 4500 Blackwell"): 896,
    ("", "NVIDIA TITAN RTX"): 672,
    ("", "NVIDIA GeForce GTX 1660 SUPER"): 336,
    ("", "NVIDIA GeForce GTX 1660 Ti"): 288,
    ("", "NVIDIA GeForce GTX 1660"): 192,
    ("", "AMD Radeon PRO W7800"): 576,
    ("", "AMD Custom GPU 0405 (RADV VANGOGH)"): 88,
    ("", "AMD Radeon Graphics (RADV RENOIR)"): 51,
    ("", "Apple M5"): 153,
    ("7.5", "NVIDIA GeForce RTX 2060 SUPER"): 448,
    ("7.5", "NVIDIA GeForce RTX 2060"): 336,
    ("7.5", "NVIDIA GeForce RTX 2070 with Max-Q Design"): 384,
    ("", "Apple M5 Pro"): 307,
}
"""Architecture and name, as drivers report them → GB/s; where names begin alike, the longer one counts."""


def test_names_as_drivers_report_them():
    assert {names: rates.accelerator_row(*names).gb_per_s for names in RATES} == RATES
    assert rates.accelerator_row("", "AMD graphics 1002:67df") is None
    processors = {
        "Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz": 68,
        "Raspberry Pi Compute Module 5 Rev 1.0, Cortex-A76": 17,
        "Orange Pi 5, Cortex-A55, Cortex-A76": 30,
        "Raspberry Pi 4 Model B Rev 1.4, Cortex-A72": 3.6,
        "Neoverse-V1": 307,
    }
    assert {name: rates.processor_row(name).gb_per_s for name in processors} == processors
    assert rates.is_board("Linux", "aarch64", 64000, "Raspberry Pi 5 Model B")
    assert not rates.is_board("Linux", "aarch64", 16000, "Neoverse-V1")
    assert rates.accelerator_row("8.6", "NVIDIA GeForce RTX 3050", 8192).gb_per_s == 224
    assert rates.accelerator_row("8.6", "NVIDIA GeForce RTX 3050", 6144).gb_per_s == 168


@pytest.mark.parametrize(
    "name, memory_mib, gb_per_s",
    [("Orin", 62841, 205), ("Orin", 15656, 102), ("Orin", 7620, 68), ("Xavier", 31919, 137), ("Xavier", 7772, 60)],
)
def test_memory_tells_jetsons_of_one_name_apart(pair, name, memory_mib, gb_per_s):
    given = rate(pair, "CUDA0", [{**STRIX, "backend": "cuda", "name": name, "memory_mib": memory_mib}])
    assert given.gb_per_s == pytest.approx(gb_per_s * rates.FAMILIES["jetson"].generation_share, abs=0.1)


def test_every_row_has_a_family_and_figures():
    for row in (*rates.ACCELERATOR_ROWS, *rates.PROCESSOR_ROWS):
        assert row.family in rates.FAMILIES, row
        assert min(row.gb_per_s, row.tflops) > 0, row


EXPERTS = (("expert_count", 8), ("expert_used_count", 2))


def load_of(summary):
    return device_load.Load(summary, kv_cache.CacheSettings(256), 11063)


def test_of_a_mixture_a_token_reads_the_chosen_experts_alone():
    named = TensorGroup("blk.*.ffn_up_exps.weight", "F16", (64, 32, 8), 8000, (0, 1))
    summary = models.known_answer_model(2, 64, "f16")._replace(keys=EXPERTS)
    dense = cost_model.bytes_read_by_unit(load_of(summary))
    mixed = cost_model.bytes_read_by_unit(load_of(summary._replace(tensors=(*summary.tensors, named))))
    assert [after - before for before, after in zip(dense, mixed)] == [2000, 2000, 0]
    assert summary._replace(keys=EXPERTS[:1]).active_expert_share == 1, "of experts that nobody counted, all"
    load = load_of(models.nameless(summary)._replace(expert_bytes=(0, 20000)))
    assert cost_model.bytes_read_by_unit(load) == [load.weights[0], load.weights[1] - 15000, load.weights[2]]


def test_nodes_follow_the_architecture():
    plain = models.known_answer_model(4, 64, "f16")
    assert cost_model.nodes_per_layer(load_of(plain)) == 31
    assert cost_model.nodes_per_layer(load_of(plain._replace(architecture="qwen3moe", keys=EXPERTS))) == 50
    assert cost_model.nodes_per_layer(load_of(plain._replace(architecture="qwen3next", keys=EXPERTS))) > 50


ETHERNET = cost_model.ASSUMED_LINKS["ethernet"]


def test_what_a_worker_costs_depends_on_its_host_and_on_the_round_trip():
    card = rates.Rate(800, 1000, rates.TABLE_SOURCE)
    here, there = (cost_model.worker_ms(cost_model.ASSUMED_LINKS[kind], card) for kind in ("loopback", "ethernet"))
    assert here < there < 2
    assert cost_model.worker_ms(ETHERNET, card._replace(wake_ms=1.8)) == pytest.approx(there + 1.8)
    assert cost_model.worker_ms(ETHERNET._replace(round_trip_ms=0.6), card) == pytest.approx(there + 0.3)
    pi_5, pi_4 = (
        cost_model.worker_ms(ETHERNET._replace(host_is_board=True), card._replace(gb_per_s=rate, wake_ms=2.8))
        for rate in (12.2, 2.6)
    )
    assert 8 < pi_5 < 20
    assert pi_4 > 4 * pi_5, "a slower board takes longer"


def test_the_page_has_the_tables_of_the_scripts():
    page = (ROOT / "docs" / "performance.md").read_text()
    mark = "<!-- published: written by tests/benchmarks/published_speed.py -->\n"
    assert page.split(mark)[1] == published_speed.table()
    mark = "<!-- predicted: written by tests/benchmarks/predicted_speed.py -->\n"
    assert page.split(mark)[1] == predicted_speed.table()


def test_the_page_has_what_is_assumed_of_links():
    page = (ROOT / "docs" / "plan.md").read_text()
    rows = page.split("| kind | round trip, ms | Gbit/s |\n")[1].split("\n\n")[0].splitlines()[1:]
    shown = [[float(figure) for figure in row.strip("|").split("|")[1:]] for row in rows]
    assumed = [[link.round_trip_ms, link.gbit] for kind, link in cost_model.ASSUMED_LINKS.items() if kind != "tunnel"]
    assert shown == assumed
    assert cost_model.ASSUMED_LINKS["tunnel"][1:] == cost_model.ASSUMED_LINKS["ethernet"][1:]


def bits_of(load):
    """Of a weight of each part."""
    return [8 * cost.read_bytes / cost.multiplied_weights for cost in cost_model.tensor_costs(load)]


def test_weights_of_a_tensor_follow_from_its_size_and_shape():
    summary = models.known_answer_model(2, 64, "f16")
    load = load_of(summary)
    named = {tensor.name: bits for tensor, bits in zip(load.tensors, bits_of(load))}
    assert named["blk.1.ffn_up.weight"] == 16
    assert named["blk.1.attn_norm.weight"] == 32
    nameless = models.nameless(summary)
    assert bits_of(load_of(nameless))[1] == pytest.approx(16, rel=0.01)
    unknown = nameless._replace(parameters=None)
    assert bits_of(load_of(unknown))[1] == pytest.approx(cost_model.ASSUMED_BITS)


def test_a_prompt_is_limited_by_what_it_is_multiplied_with_and_by_its_way():
    rate = rates.Rate(100, 1000, rates.TABLE_SOURCE)
    work = cost_model.ModelPart("a", "", rate, 1e9, 8e9, 2e9, 310)
    costs = cost_model.prompt_costs(work)
    computing = pytest.approx(2 * 512 * 2 + 310 * 0.002 * cost_model.PROMPT_NODE_FACTOR)
    assert costs == {"memory of": 80, "computing on": computing}
    link = cost_model.Link("ethernet", 0.3, 1.0, False)
    lent = {"link": link, "network_bytes": 2 * 4096 * 4, "result_bytes": 4 * 32000}
    costs = cost_model.prompt_costs(work._replace(**lent))
    assert costs["link to"] > 2 * 8 * 512 * 4096 * 4 / 1e6
    factors = [cost_model.prompt_factor([work._replace(attention_weights=share * 1e9)]) for share in (0, 1, 100)]
    limit = work.rate.uncertainty**cost_model.PROMPT_EXPONENT * cost_model.ATTENTION_UNCERTAINTY
    assert factors[0] < factors[1] < factors[2] <= limit
    works = [work, work._replace(link=link)]
    assert cost_model.load_s(predicted_speed.release_of(11063), works) == pytest.approx(
        8 / cost_model.DISK_GB_PER_S + 8 / 0.125
    )


def test_few_cores_reach_less_than_the_memory_of_their_processor(pair):
    pair.hosts["worker1"]["facts"]["cpu"] = {"model": "AMD EPYC 7713", "cores": 2, "features_id": "f"}
    facts = cluster_inputs.read_cluster("test", pair.hosts).hosts["worker1"].facts
    few = site.processor_rate(facts)
    assert (few.gb_per_s, few.source) == (2 * rates.CORE_GB_PER_S, rates.ASSUMED_SOURCE)
    assert site.processor_rate(facts._replace(cpu=facts.cpu._replace(cores=64))).source == rates.TABLE_SOURCE


def test_prompts_on_h200_are_predicted_as_they_were_measured(pair):
    """docs/hardware.md: q8_0 on one H200."""
    h200 = {"backend": "cuda", "name": "NVIDIA H200", "architecture": "9.0", "memory_mib": 143771, "unified": False}
    pair.hosts["head"]["facts"].update(
        accelerators=[h200], toolchain={**pair.hosts["head"]["facts"]["toolchain"], "nvcc": "12.9"}
    )
    for name in ("worker1", "worker2"):
        del pair.hosts[name]
    pair.set("head", llama_backend="cuda", llama_model_known_answer={"layers": 32, "width": 4096, "type": "q8_0"})
    plan = pair.plan()
    assert plan["estimate"]["prompt_tokens_per_s"] == pytest.approx(17140, rel=0.1), plan["reasons"]
    assert plan["estimate"]["best_single_host"]["prompt_tokens_per_s"] == plan["estimate"]["prompt_tokens_per_s"]

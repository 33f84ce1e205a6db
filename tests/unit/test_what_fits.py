"""What a cluster could serve: headers from shapes held against those of files, and the tables of small clusters."""

import json
import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import plan as plan_action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import header_summary, kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner, what_fits
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import table
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import what_fits_text
from conftest import CATALOGUE
from support import actions
from support.clusters import TREE, cards_of, head_with_cards
from test_inventories import of_file, variables_of

OFFERS = {offer.name: offer for offer in what_fits.offers_of(inventory.published_models())}
SMALL, LARGE = "Qwen3 8B", "DeepSeek V3.1"
NEW = {"llama_release": {**TREE, "build": 11063}}


def rows_of(hosts, names=(SMALL, "Qwen3 32B", "Llama 3.3 70B", LARGE), context=8192, speed=10.0, offers=()):
    checked = cluster_inputs.checked_hosts("llama_cluster", hosts)
    cluster = cluster_inputs.read_cluster("llama_cluster", checked, what_fits.ANY_MODEL)
    chosen = [OFFERS[name] for name in names] + list(offers)
    return what_fits.fit_models(cluster, chosen, CATALOGUE, what_fits.FitQuery(context, speed))


@pytest.mark.parametrize("model", inventory.published_models(), ids=lambda model: model["name"])
def test_each_shape_has_as_many_parameters_as_its_publisher_says(model):
    _name, header = next(OFFERS[model["name"]].quantisations())
    assert header.parameters / 1e9 == pytest.approx(model["parameters"], rel=0.012)
    assert model["architecture"] in capabilities.ARCHITECTURES


PUBLISHED_GB = {
    "Llama 3.3 70B": {"Q8_0": 74.98, "Q6_K": 57.89, "Q5_K_M": 49.95, "Q4_K_M": 42.52, "IQ4_XS": 37.9, "Q3_K_M": 34.27, "Q2_K": 26.38},
    "gpt-oss 120b": {"MXFP4_MOE": 63.37},
    "Qwen3 235B A22B 2507": {"Q2_K": 85.69, "Q4_K_M": 142.2},
    "MiniMax M2.7": {"Q8_0": 243.0},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_GB)
def test_files_are_as_large_as_published_ones(name):
    sizes = {quantisation: header.size / 1e9 for quantisation, header in OFFERS[name].quantisations()}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert {kind: sizes[kind] for kind in PUBLISHED_GB[name]} == pytest.approx(PUBLISHED_GB[name], rel=0.01)


@pytest.mark.parametrize(
    "file, name, within",
    [
        ("qwen3_coder_30b", "Qwen3 Coder 30B A3B", 0.002),
        ("tulu3_405b", "Tulu 3 405B", 0.002),
        ("deepseek_r1_q4_k_m", "DeepSeek V3.1", 0.002),
        ("qwen3_coder_next", "Qwen3 Coder Next", 0.03),
        ("gpt_oss_20b", "gpt-oss 20b", None),
        ("qwen3_5_397b", "Qwen3.5 397B A17B", None),
    ],
)
def test_headers_are_those_of_known_files(file, name, within):
    """Their layers, where the quantisation is the same, and whatever tells the size of the KV cache."""
    known = header_summary.parse(of_file(f"models/{file}.yml")["llama_model_gguf_summary"])
    files = dict(OFFERS[name].quantisations())
    own = files.get("Q4_K_M") or files["MXFP4_MOE"]
    if within:
        assert own.size == pytest.approx(known.size, rel=within)
        assert sum(own.layer_bytes[:9]) == pytest.approx(sum(known.layer_bytes[:9]), rel=within + 0.01)
    settings = kv_cache.CacheSettings(32768)
    if kv_cache.is_latent(known) == kv_cache.is_latent(own):  # that file of DeepSeek R1 is older than MLA
        assert kv_cache.sizes(own, settings, 11063) == kv_cache.sizes(known, settings, 11063)


def test_gemma_4_has_fewer_and_longer_heads_in_layers_without_a_window():
    own = OFFERS["gemma 4 31B"].quantisations()
    _name, header = next(own)
    cached = {layer.is_windowed: layer.keys for layer in kv_cache.layer_caches(header, True)}
    assert cached == {True: 16 * 256, False: 4 * 512}


def test_a_card_serves_what_it_holds_and_the_table_has_the_wanted_first():
    found = rows_of(head_with_cards(1, **NEW).hosts)
    assert [(row.model, row.quantisation) for row in found[:2]] == [("Qwen3 32B", "Q4_K_M"), (SMALL, "Q8_0")]
    assert [row.refusal_reason.split(" ")[0::2] for row in found[2:]] == [["needs", "GiB", "memory"]] * 2
    assert found[2].bytes < found[3].bytes
    assert (found[1].context, found[1].longest_context, found[1].hosts, found[1].devices) == (8192, 40960, ("head",), 1)
    text = what_fits_text.text_of(found, what_fits.FitQuery())
    assert text.index("Qwen3 32B") < text.index(SMALL) < text.index("Llama 3.3") < text.index("DeepSeek")
    assert "38 B of 671 B" in text
    assert found[1].prompt_tokens_per_s > found[1].generation_tokens_per_s
    shared = rows_of(cards_of(1, 2, **NEW).hosts, ["Qwen3 32B"], context=131072)
    assert (shared[0].devices, shared[0].hosts) == (2, ("gpu1", "gpu2"))
    assert "2 devices on 2 hosts" in what_fits_text.text_of(shared, what_fits.FitQuery())


def test_speed_is_that_of_each_user():
    users = {**NEW, "llama_users": 4, "llama_server_parallel": 4}
    (alone,), (row,) = (rows_of(head_with_cards(1, **given).hosts, [SMALL]) for given in (NEW, users))
    assert alone.speed_per_user == alone.generation_tokens_per_s == row.generation_tokens_per_s
    assert row.speed_per_user == row.users.generation_tokens_per_s / 4 < alone.speed_per_user
    assert f"{row.users.generation_range} for 4" in what_fits_text.text_of([row], what_fits.FitQuery())


def test_speed_has_its_price_in_quantisation_but_no_higher_one_than_four_bits():
    cluster = head_with_cards(1, **NEW)
    largest = rows_of(cluster.hosts, [SMALL], speed=1.0)[0].generation_tokens_per_s
    files = [rows_of(cluster.hosts, [SMALL], speed=times * largest)[0].quantisation for times in (1, 1.1, 1.5, 2.5)]
    assert files == ["Q8_0", "Q6_K", "Q4_K_M", "Q8_0"]
    by_speed = rows_of(cluster.hosts, [SMALL, "Qwen3 14B"], speed=1e6)
    assert [row.model for row in by_speed] == [SMALL, "Qwen3 14B"]
    (slower,) = rows_of(cluster.hosts, ["Qwen3 14B"], speed=1.0)
    as_fast = rows_of(cluster.hosts, [SMALL, "Qwen3 14B"], speed=slower.generation_tokens_per_s)
    assert [row.model for row in as_fast] == ["Qwen3 14B", SMALL], "just fast enough is enough"


def test_a_host_too_small_for_all_says_how_much_is_missing():
    cluster = cards_of(1, 0, **NEW)
    cluster.hosts["head"]["facts"].update(memory_mib=4096, accelerators=[])
    found = rows_of(cluster.hosts)
    assert [row.quantisation for row in found] == ["Q2_K"] * 4
    missing = [int(re.search(r"lacks (\d+) MiB of memory", row.refusal_reason)[1]) for row in found]
    assert 0 < missing[0] < missing[1] < missing[2] < missing[3]


def test_who_may_connect_has_no_part_in_it():
    assert {advisory.id for advisory in table.ADVISORIES if advisory.severity == "error"} > what_fits.ACCESS_IDS
    cluster = cards_of(1, llama_accept_advisories=[], llama_release={**TREE, "build": 11434})
    assert not rows_of(cluster.hosts, [SMALL])[0].refusal_reason


def test_what_the_operator_accepts_of_other_things_stays_accepted():
    header = of_file("models/gpt_oss_20b.yml")["llama_model_gguf_summary"]
    offers = what_fits.offers_of([], [{"name": "mine", "summary": {**header, "architecture": "newest"}}])
    found = [
        rows_of(head_with_cards(1, **NEW, llama_accept_advisories=accepted).hosts, [], offers=offers)[0].refusal_reason
        for accepted in ([], ["architecture-unknown"])
    ]
    assert list(map(bool, found)) == [True, False], found


def test_a_cluster_that_no_plan_is_possible_for_says_so_once():
    cluster = head_with_cards(1, llama_server_backend="hip", **NEW)
    with pytest.raises(Refusal, match="none of the models can be planned: llama_server_backend is 'hip'"):
        rows_of(cluster.hosts)


def test_an_operator_adds_models_by_their_headers():
    header = of_file("models/gpt_oss_20b.yml")["llama_model_gguf_summary"]
    shape = {"name": "mine", "architecture": "llama", "layers": 2, "width": 256, "heads": 2, "kv_heads": 2}
    shape |= {"vocabulary": 1000, "context": 4096, "inner": 512}
    own = [{"name": name, "summary": header} for name in ("by header", SMALL)]
    offers = what_fits.offers_of([shape, {**shape, "name": SMALL}], own)
    found = rows_of(head_with_cards(1, **NEW).hosts, [], offers=offers)
    kinds = {"by header": "as given", SMALL: "as given", "mine": "Q8_0"}
    assert {row.model: row.quantisation for row in found} == kinds
    assert found[-1].parameters == 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 2 * 256 * 1000 + 256


@pytest.mark.parametrize("given, what", [({"summary": 3}, "3"), ({"name": "mine"}, "None")])
def test_a_model_without_a_header_is_refused_by_its_place(given, what):
    with pytest.raises(Refusal, match=rf"summary in models\[0\] of llama_what_fits is {what}: set summary in models"):
        what_fits.offers_of([], [given])


@pytest.mark.programs
def test_a_hundred_plans_make_the_table_of_an_inventory(monkeypatch, tmp_path):
    made, make_trial_plan = [], planner.make_trial_plan
    monkeypatch.setattr(
        planner, "make_trial_plan", lambda *given, **more: made.append(1) or make_trial_plan(*given, **more)
    )
    asked = {"speed": 5}
    variables = {**variables_of("mac_loopback", {"llama_what_fits": asked}), "inventory_hostname": "mac"}
    path = tmp_path / "fits.json"
    found = actions.run(plan_action, variables, what_fits=True, path=str(path))
    assert len(made) >= 50
    assert len(found["models"]) == len(OFFERS)
    assert json.loads(path.read_text()) == {"models": json.loads(json.dumps(found["models"]))}


@pytest.mark.parametrize(
    "given, why",
    [
        ({"context": "many"}, "llama_what_fits.context is 'many': correct it"),
        ({"change": {}, 5: 1}, "llama_what_fits has unknown keys .5, change.: use only these: context, speed"),
        ("false", "llama_what_fits is 'false': correct it"),
        (["Qwen3 32B"], "llama_what_fits is"),
    ],
)
def test_a_question_that_has_no_such_part_is_refused(given, why):
    assert what_fits.parse_query("llama_what_fits", "true") == what_fits.FitQuery()
    with pytest.raises(Refusal, match=why):
        what_fits.parse_query("llama_what_fits", given)

"""What the head can serve on while a worker is away: planned for each worker, written for the launcher, and said to a person."""

import copy
import json

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import serving
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text
from conftest import Cluster, complete, known_answer_of, typed
from support.clusters import CARD, CUDA, GPU, TREE, TWO_CARDS, sized, strix_halo, strix_halos
from support.clusters import serving as serves

WORKERS = ("192.0.2.11:50052", "192.0.2.12:50052")


def gpus(big_model, count, layers=40, head=None, **variables):
    """A head and workers with 24 GiB each, and a model of so many layers of 1 GiB."""
    cluster = Cluster().add("head", "head", address="192.0.2.10", facts=head, **variables)
    for index in range(count):
        cluster.add(f"worker{index + 1}", "worker", address=f"192.0.2.{11 + index}", facts=CARD)
    return serves(cluster, sized(big_model, layers))


def layers(placement):
    return {entry["endpoint"]: entry["layers"] for entry in placement}


def test_each_worker_has_a_fallback_that_is_the_plan_without_it(pair):
    plan = pair.plan()
    assert [(entry["without"], entry["endpoint"]) for entry in plan["fallbacks"]] == [
        ("worker1:cpu", WORKERS[0]),
        ("worker2:cpu", WORKERS[1]),
    ]
    assert plan["no_fallback"] == []
    for index, name in enumerate(("worker1", "worker2")):
        rest = copy.deepcopy(pair)
        del rest.hosts[name]
        alone = rest.plan()
        fallback = plan["fallbacks"][index]
        assert fallback["placement"] == alone["placement"]
        assert fallback["head"]["argv"] == alone["head"]["argv"]
        assert fallback["workers"] == [WORKERS[1 - index]]
        assert fallback["generation_tokens_per_s"] == alone["estimate"]["generation_tokens_per_s"]


def test_workers_that_the_plan_does_not_use_stand_in(big_model):
    plan = gpus(big_model, 3).plan()
    used = [worker["endpoint"] for host in plan["hosts"].values() for worker in host["workers"] if worker["used"]]
    assert len(used) == 2
    for fallback in plan["fallbacks"]:
        assert fallback["endpoint"] in used
        assert fallback["endpoint"] not in fallback["workers"]
        assert len(fallback["workers"]) == 2


@pytest.mark.parametrize("accepted, spared", [([], False), (["cache-kernels"], True)])
def test_what_an_error_refuses_is_no_fallback(big_model, accepted, spared):
    """A Strix Halo stands in for a faster worker, with programs that lack kernels for the cache."""
    types = {"llama_server_cache_type_k": "q8_0", "llama_server_cache_type_v": "q4_0"}
    cluster = gpus(big_model, 2, 30, llama_accept_advisories=accepted, **types)
    option = backends.BY_NAME["hip"].quants_option
    own = {"llama_backend": "hip", "llama_build_cmake_options": {option: "OFF"}}
    cluster.add("worker3", "worker", address="192.0.2.13", facts=strix_halo(), **own)
    for host in cluster.hosts.values():
        host["variables"]["llama_release"] = {**TREE, "build": 11063}
    plan = cluster.accepted()
    assert {entry["host"] for entry in plan["placement"] if entry["layers"]} == {"worker1", "worker2"}
    assert ["worker3" in str(entry["placement"]) for entry in plan["fallbacks"]] == [True, True] * spared
    assert [entry["missing_mib"] for entry in plan["no_fallback"]] == [None, None] * (not spared)
    for entry in plan["no_fallback"]:
        assert entry["reason"].startswith("llama_server_cache_type_k is q8_0 and llama_server_cache_type_v is q4_0")


def test_the_head_alone_may_be_a_fallback(big_model):
    """On its processor, whose memory counts as for any head without devices."""
    cluster = gpus(big_model, 1, layers=20, head={"memory_mib": 65536})
    (fallback,) = cluster.plan()["fallbacks"]
    assert (fallback["placement"], fallback["workers"]) == ([], [])
    cluster.hosts["head"]["facts"]["memory_mib"] = 8192
    plan = cluster.plan()
    assert plan["fallbacks"] == []
    (lost,) = plan["no_fallback"]
    assert lost["missing_mib"] > 10000


def test_a_host_with_several_workers_may_go_away_as_a_whole(big_model):
    cluster = gpus(big_model, 3)
    cluster.hosts["worker1"]["facts"].update(TWO_CARDS)
    cluster.hosts["head"]["variables"]["llama_placement"] = "all"
    plan = cluster.plan()
    devices = ["worker1:cuda0", "worker1:cuda1", "worker2:cuda0", "worker3:cuda0"]
    assert [entry["without"] for entry in plan["fallbacks"]] == [*devices, "worker1"]
    whole = plan["fallbacks"][-1]
    assert whole["endpoint"] == "192.0.2.11:50052"
    assert set(whole["workers"]) == {"192.0.2.12:50052", "192.0.2.13:50052"}


def test_a_worker_that_an_override_names_cannot_be_spared(pair):
    device = pair.plan()["placement"][0]["device"]
    pair.hosts["head"]["variables"]["llama_server_override_tensor"] = [f"blk.1.ffn.*={device}"]
    plan = pair.plan()
    assert [entry["reason"] for entry in plan["no_fallback"]] == [
        "llama_server_override_tensor places tensors on absent devices"
    ]
    assert [entry["without"] for entry in plan["fallbacks"]] == ["worker2:cpu"]
    pair.hosts["head"]["variables"]["llama_server_override_tensor"] = ["blk.1.ffn.*=CPU"]
    assert len(pair.plan()["fallbacks"]) == 2


def test_a_refused_plan_has_none(big_model):
    assert gpus(big_model, 1).plan()["fallbacks"] == []


def test_the_launcher_gets_them_only_where_the_operator_wants_that(pair, tmp_path):
    without = complete(pair.plan())
    pair.hosts["head"]["variables"].update(llama_server_fallback=True, llama_server_fallback_after=90)
    wanted = complete(pair.plan())
    path = "/opt/llamacpp/fallbacks.json"
    added = ["--fallbacks", path, "--fallback-after", "90"]
    assert wanted["head"]["launcher"] == [*without["head"]["launcher"], *added]
    assert without["fallbacks"] == wanted["fallbacks"]
    assert path not in {file["path"] for file in without["hosts"]["head"]["files"]}
    (file,) = [file for file in wanted["hosts"]["head"]["files"] if file["path"] == path]
    assert file["mode"] == "0644"
    assert json.loads(file["content"]) == [
        {
            "name": fallback["without"],
            "without": fallback["endpoint"],
            "workers": fallback["workers"],
            "argv": fallback["head"]["argv"],
        }
        for fallback in wanted["fallbacks"]
    ]
    written = tmp_path / "fallbacks.json"
    written.write_text(file["content"])
    assert [entry.without for entry in serving.read_fallbacks(written)] == list(WORKERS)
    service = wanted["hosts"]["head"]["services"][-1]
    assert [entry["name"] for entry in service["fallbacks"]] == ["worker1:cpu", "worker2:cpu"]
    assert [entry["process"] for entry in service["fallbacks"]] == [
        entry["head"]["argv"] for entry in wanted["fallbacks"]
    ]
    assert without["hosts"]["head"]["services"][-1]["fallbacks"] == []


def test_the_file_is_written_where_nothing_can_be_spared(big_model):
    plan = complete(gpus(big_model, 2, llama_server_fallback=True).plan())
    (file,) = [file for file in plan["hosts"]["head"]["files"] if file["path"].endswith("/fallbacks.json")]
    assert json.loads(file["content"]) == []


def test_units_let_the_head_reach_the_workers_of_fallbacks(big_model):
    open_server = {"llama_server_host": "192.0.2.10", "llama_server_allowed": ["198.51.100.0/24"]}
    cluster = gpus(big_model, 3, llama_server_api_key_file="/etc/keys", **open_server)
    plan = cluster.plan()
    (idle,) = [
        host["workers"][0] for host in plan["hosts"].values() if host["workers"] and not host["workers"][0]["used"]
    ]
    address = idle["endpoint"].split(":")[0]
    assert address not in plan["hosts"]["head"]["services"][-1]["allow"]
    cluster.hosts["head"]["variables"]["llama_server_fallback"] = True
    assert address in cluster.plan()["hosts"]["head"]["services"][-1]["allow"]


def test_a_cache_holds_what_a_fallback_needs():
    cluster = Cluster().add("head", "head", address="192.0.2.10", llama_model_known_answer=known_answer_of(32, 1024))
    for index in (1, 2):
        endpoints = [{"cache": True, "cache_mib": 1}]
        cluster.add(f"worker{index}", "worker", address=f"192.0.2.{10 + index}", llama_worker_endpoints=endpoints)

    def limit():
        argv = cluster.plan()["hosts"]["worker1"]["services"][0]["argv"]
        return int(argv[argv.index("--limit-mib") + 1])

    before = limit()
    cluster.hosts["head"]["variables"]["llama_server_fallback"] = True
    assert limit() > 1.8 * before


def test_the_environment_of_the_head_serves_its_own_devices_too(big_model):
    """Those that the plan leaves to workers alone are hidden from llama-server, unless a fallback needs them."""
    head = {"accelerators": [{**GPU, "name": "Tesla P4", "architecture": "6.1", "memory_mib": 8192}], "toolchain": CUDA}
    cluster = gpus(big_model, 1, layers=5, head=head)
    cluster.hosts["worker1"]["facts"]["accelerators"] = [{**GPU, "name": "NVIDIA H200"}]
    cluster.hosts["head"]["variables"]["llama_accept_advisories"] = ["slower-than-one-host"]
    plan = cluster.plan()
    assert {entry["endpoint"] for entry in plan["placement"]} == {WORKERS[0]}
    assert plan["head"]["environment"]["CUDA_VISIBLE_DEVICES"] == "-1"
    assert [entry["device"] for entry in plan["fallbacks"][0]["placement"]] == ["CUDA0"]
    devices = plan["hosts"]["head"]["services"][-1]["devices"]
    cluster.hosts["head"]["variables"]["llama_server_fallback"] = True
    wanted = cluster.plan()
    assert "CUDA_VISIBLE_DEVICES" not in wanted["head"]["environment"]
    assert wanted["head"]["backends"] == ["cuda"]
    assert set(wanted["hosts"]["head"]["services"][-1]["devices"]) > set(devices)


def test_the_page_says_of_each_worker_whether_it_can_be_spared(pair):
    plan = pair.plan()
    part = plan_text.plan_sections(typed(plan))["While a worker is absent"]
    speed = plan["fallbacks"][0]["generation_range"]
    assert part[0] == f"  without worker1:cpu:  fits, {speed['low']:g} to {speed['high']:g} tokens per second"
    assert "llama_server_fallback is false" in part[-1]
    pair.hosts["head"]["variables"]["llama_server_fallback"] = True
    assert "llama_server_fallback is true: the head waits" in " ".join(
        plan_text.plan_sections(typed(pair.plan()))["While a worker is absent"]
    )
    pair.hosts["head"]["variables"]["llama_server_tensor_split"] = [1, 1]
    part = plan_text.plan_sections(typed(pair.plan()))["While a worker is absent"]
    assert part[0].startswith("  without worker1:cpu:  cannot be planned: llama_server_tensor_split")
    missing = plan_text.plan_sections(typed(strix_halos(2, 200).plan()))["While a worker is absent"]
    assert missing[0].startswith("  without strix0:rocm0:  does not fit, ")
    assert missing[0].endswith(" MiB missing")

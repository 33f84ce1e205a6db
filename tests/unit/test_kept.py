"""Models that are loaded at the same time: each on workers of its own, beside what the others hold."""

import math

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import neighbours
from conftest import complete, known_answer_of, typed
from support.clusters import cards_of, strix_halo_head
from test_several import DEEP, SMALL, files_of, on_paper, several

KEPT = [{**SMALL, "keep": True}, {**DEEP, "keep": True, "idle_seconds": None}]
CONTEXT = backends.CUDA.process_mib


def workers_of(plan, host):
    return {worker["name"]: worker for worker in plan["hosts"][host]["workers"]}


def two_kept(one=4, two=4, count=1):
    entries = [{**on_paper(name, gib, layers=8), "keep": True} for name, gib in (("one", one), ("two", two))]
    return several(cards_of(1, count), *entries)


def test_each_kept_model_has_workers_of_its_own(pair):
    plan = several(pair, *KEPT).plan()
    assert not plan["refused"], plan["reasons"]
    for name, address in (("worker1", "192.0.2.11"), ("worker2", "192.0.2.12")):
        first, second = workers_of(plan, name).values()
        assert (second["name"], second["endpoint"]) == (f"{first['name']}-2", f"{address}:50252")
        assert (first["endpoint"], second["staging_port"]) == (f"{address}:50052", 50352)
        assert first["used"]
        assert second["used"]
        assert second["argv"][second["argv"].index("-p") + 1] == "50252"
        assert [rule["port"] for rule in plan["hosts"][name]["firewall"]] == [50052, 50152, 50252, 50352]
        assert [service["name"] for service in plan["hosts"][name]["services"]] == [
            f"llamacpp-worker-{first['name']}",
            f"llamacpp-worker-{second['name']}",
        ]
        assert {port["port"] for port in plan["hosts"][name]["ports"]} == {50052, 50152, 50252, 50352}
    small, deep = plan["head"]["models"]
    assert small["argv"][small["argv"].index("--rpc") + 1] == "192.0.2.11:50052,192.0.2.12:50052"
    assert deep["argv"][deep["argv"].index("--rpc") + 1] == "192.0.2.11:50252,192.0.2.12:50252"
    assert plan["head"]["launcher"].count("--worker") == 4


def test_a_router_keeps_all_models_and_loads_them_at_once(pair):
    plan = complete(several(pair, *KEPT).plan())
    assert plan["head"]["argv"][plan["head"]["argv"].index("--models-max") + 1] == "2"
    assert plan["head"]["launcher"][-2:] == ["--router", "--keep"]
    sections = files_of(plan)["models.ini"]["content"].split("\n\n")
    assert [section.splitlines()[-1] for section in sections] == ["load-on-startup = true"] * 2
    assert [model["keep"] for model in plan["head"]["models"]] == [True, True]
    text = " ".join(plan_text.plan_table(typed(plan)).split())
    assert "All are loaded at the same time, each on workers of its own." in text


def test_a_kept_model_is_never_unloaded(pair):
    plan = several(pair, *KEPT, llama_server_idle_seconds=600).plan()
    assert not any("--sleep-idle-seconds" in model["argv"] for model in plan["head"]["models"])
    assert not any("idle_seconds" in model for model in plan["head"]["models"])
    reason = several(pair, KEPT[0], {**KEPT[1], "idle_seconds": 60}).reason()
    assert "deep in llama_models: keep is true, so that it is always loaded, and idle_seconds is 60: remove" in reason


def test_models_that_take_turns_have_the_declared_workers_alone(pair):
    plan = several(pair, SMALL, DEEP).plan()
    assert {len(host["workers"]) for host in plan["hosts"].values()} == {0, 1}
    assert not any("keep" in model for model in plan["head"]["models"])


def test_a_kept_model_is_placed_in_what_the_one_before_leaves():
    alone = several(cards_of(1, 1), {**on_paper("one", 4, layers=8), "keep": True}).plan()
    plan = two_kept().plan()
    assert not plan["refused"], plan["reasons"]
    (whole,), (first,), (second,) = (
        model["placement"] for model in [*alone["head"]["models"], *plan["head"]["models"]]
    )
    assert first["capacity_mib"] == whole["capacity_mib"] - CONTEXT
    assert second["capacity_mib"] == first["capacity_mib"] - math.ceil(first["total_mib"])
    held = neighbours.memory_of(typed(plan), "gpu1")["CUDA0"][0]
    assert held == pytest.approx(first["total_mib"] + second["total_mib"])
    row = ["gpu1:cuda0", f"{held:.0f}", str(first["capacity_mib"])]
    assert row in [line.split() for line in plan_text.plan_table(typed(plan)).splitlines()]


def test_kept_models_that_do_not_fit_together_are_refused_by_name():
    plan = two_kept(12, 12).plan()
    assert plan["refused"]
    assert {reason.partition(" ")[0] for reason in plan["reasons"]} == {"two"}
    assert "MiB are missing" in plan["reasons"][0]
    assert not two_kept(12, 12, count=2).plan()["refused"]


def test_memory_of_the_head_is_shared_too():
    def planned(gib):
        entries = [{**on_paper(name, gib, layers=8), "keep": True} for name in ("one", "two")]
        return several(strix_halo_head(1), *entries).plan()

    plan = planned(40)
    assert not plan["refused"], plan["reasons"]
    first, second = plan["head"]["models"]
    left = first["placement"][0]["capacity_mib"] - math.ceil(first["placement"][0]["total_mib"])
    assert second["placement"][0]["capacity_mib"] == left
    assert second["prompt_cache_mib"] < first["prompt_cache_mib"]
    assert planned(60)["refused"]


def test_caches_of_kept_models_are_one_folder_with_room_for_all():
    cluster = two_kept(12, 2)
    for host in cluster.hosts.values():
        host["facts"]["disk_gib"] = 64
    first, second = cluster.plan()["hosts"]["gpu1"]["services"]
    limits, folders = [], []
    for service in (first, second):
        limits.append(service["argv"][service["argv"].index("--limit-mib") + 1])
        folders.append(service["environment"]["LLAMA_CACHE"])
    assert len({*limits}) == len({*folders}) == 1
    assert int(limits[0]) > 14 * 1024


def test_an_external_worker_serves_the_first_kept_model_alone():
    cluster = two_kept()
    external = {"endpoint": "192.0.2.99:50052", "memory_mib": 65536, "backend": "cuda"}
    cluster.hosts["head"]["variables"].update(
        llama_external_workers=[external],
        llama_placement="all",
        llama_accept_advisories=["external-worker", "rpc-remote-code-execution"],
    )
    plan = cluster.plan()
    assert not plan["refused"], plan["reasons"]
    placements = [model["placement"] for model in plan["head"]["models"]]
    held = [{entry["endpoint"]: entry["capacity_mib"] for entry in placement} for placement in placements]
    assert [endpoints.get("192.0.2.99:50052") for endpoints in held] == [65536, None]


@pytest.mark.parametrize(
    "entry",
    [
        {"tunnel": "127.0.0.1:60052"},
        {"port": 65400, "staging_port": 1024},
        {"name": "one", "port": 50052, "staging_port": 50252},
    ],
)
def test_workers_that_cannot_run_twice_are_refused(pair, entry):
    several(pair, *KEPT).hosts["worker1"]["variables"]["llama_worker_endpoints"] = [entry]
    assert "llama_models needs 2 workers on each device, and " in pair.reason()
    assert (
        "give the workers of worker1 ports in llama_worker_endpoints that are free there and 200 above" in pair.reason()
    )


def test_a_router_does_not_keep_some_models(pair):
    reason = several(pair, {**SMALL, "keep": True}, {**DEEP, "known_answer": known_answer_of(layers=24)}).reason()
    assert "llama_models keeps small and not deep, and llama-server keeps all models or none" in reason

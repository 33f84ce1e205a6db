# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two clusters on the same hosts share no name, port, rule or folder, and take nothing from each other."""

from __future__ import annotations

import copy
import json

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import teardown
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import neighbours
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs as entry
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import workers
from conftest import CATALOGUE, FACTS, complete, make

SHARED = {"/var/cache/llamacpp", "/var/cache/llamacpp/sources", "/etc/systemd/system"}
"""Folders that clusters have together."""


def hosts_of(pair, cluster, first_port):
    """The pair's hosts as another cluster has them, with ports from first_port on."""
    hosts = copy.deepcopy(pair.hosts)
    for given in hosts.values():
        given["facts"].update(names.places("system", "systemd", {"HOME": "/root"}, cluster))
        if "worker" in given["groups"]:
            given["variables"]["llama_worker_endpoints"] = [{"port": first_port}]
        given["variables"].update(llama_server_port=first_port + 2)
    return hosts


def plan_of(pair, cluster, hosts):
    plan = make(entry.read(cluster, hosts), pair.model, CATALOGUE, "runtime-id")
    assert not plan["refused"], plan["reasons"]
    return complete(plan)


def owned(plan):
    """Everything of a plan that belongs to its cluster alone, of all hosts."""
    words = {f"{plan['head']['host']} {plan['head']['service']}"}
    for name, part in plan["hosts"].items():
        own = names.of(plan["cluster"])
        words.update(f"{name} {account['name']}" for account in part["accounts"])
        words.update(f"{name} {folder['path']}" for folder in part["folders"] if folder["path"] not in SHARED)
        words.update(f"{name} {file['path']}" for file in part["files"])
        words.update(f"{name} {service['name']}" for service in part["services"])
        words.update(f"{name} port {port['address']}:{port['port']}" for port in part["ports"])
        words.update(f"{name} rule {rule['address']}:{rule['port']}" for rule in part["firewall"])
        words.update(f"{name} {word}" for word in (own.mark, own.policy, *own.priorities, own.files))
    return words - {f"{name} {names.BUILD_ACCOUNT}" for name in plan["hosts"]}


def strings(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (key, *strings(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("cluster", ["a", "ab", "a_server", "workers", "x" * 23])
def test_two_clusters_share_no_name_port_rule_or_folder(pair, cluster):
    first = plan_of(pair, "llama_cluster", hosts_of(pair, "llama_cluster", 50052))
    second = plan_of(pair, cluster, hosts_of(pair, cluster, 50062))
    assert not owned(first) & owned(second)
    assert not [text for text in strings(second) if "/opt/llamacpp/" in text]


def taken(pair, plan, cluster="night", first_port=50062):
    """The hosts of the pair as another cluster, with what the first one has left there."""
    hosts = hosts_of(pair, cluster, first_port)
    for name, part in plan["hosts"].items():
        record = next(file for file in part["files"] if file["path"].endswith("/cluster.json"))
        said = json.loads(record["content"])
        hosts[name]["facts"]["neighbours"] = [{key: said[key] for key in ("cluster", "ports", "memory_mib")}]
    return hosts


def test_a_port_of_another_cluster_is_refused_with_a_free_one(pair):
    plan = plan_of(pair, "llama_cluster", hosts_of(pair, "llama_cluster", 50052))
    hosts = taken(pair, plan)
    assert not make(entry.read("night", hosts), pair.model, CATALOGUE, "runtime-id")["refused"]
    hosts["worker1"]["variables"]["llama_worker_endpoints"][0]["port"] = 50052
    (reason,) = make(entry.read("night", hosts), pair.model, CATALOGUE, "runtime-id")["reasons"]
    assert reason == (
        "port 50052 of worker1 belongs to llamacpp-worker-cpu of the cluster llama_cluster, and llamacpp-night-worker-cpu is to listen there: "
        "set port in llama_worker_endpoints of worker1 to a port that is free there, like 50053"
    )


RADEON = {"name": "AMD gfx1151", "architecture": "gfx1151", "memory_mib": 98304, "unified": True}
GEFORCE = {"name": "GPU", "architecture": "8.6", "memory_mib": 24576, "unified": False}
ACCELERATORS = [
    {"backend": "hip", **RADEON},
    {"backend": "vulkan", **RADEON},
    {"backend": "cuda", **GEFORCE},
    {"backend": "vulkan", **GEFORCE},
]


def test_each_memory_of_a_host_counts_once():
    facts = entry.facts_of({**FACTS, "memory_mib": 120000, "accelerators": ACCELERATORS})
    own = {"ROCm0": (60000, 90000), "CUDA0": (8000, 8192)}
    found = list(neighbours.memories(facts, own, ["CPU", "Vulkan0", "Vulkan1", "RPC9"]))
    assert found == [(["CPU", "ROCm0", "Vulkan0"], 108000), (["CUDA0", "Vulkan1"], 24576 - 1228), (["RPC9"], 0)]


@pytest.mark.parametrize("theirs, warned", [(40000, False), (60000, True)])
def test_graphics_and_processor_of_two_clusters_share_one_memory(pair, theirs, warned):
    """The worker lends its graphics; another cluster has its processor."""
    night = {"cluster": "night", "ports": [], "memory_mib": {"CPU": theirs}}
    size = {"memory_mib": 65536, "accelerators": [{"backend": "vulkan", **RADEON, "memory_mib": 60000}]}
    tools = {**FACTS["toolchain"], "glslc": "1", "vulkan": "1"}
    pair.hosts["worker1"]["facts"].update(size, neighbours=[night], toolchain=tools)
    pair.hosts["worker1"]["variables"].update(llama_backend="vulkan")
    for given in pair.hosts.values():
        given["variables"]["llama_model_known_answer"] = {"layers": 32, "width": 4096, "type": "f32"}
    plan = pair.plan()
    met = [met["message"] for met in plan["advisories"] if met["id"] == "memory-of-other-cluster"]
    assert bool(met) == warned, met


def test_two_servers_of_a_host_have_room_for_the_conversations_of_both(pair):
    """What an operator gives to the one is not the other's. What plans choose is shared, and stays when the other one was planned."""
    for given in pair.hosts.values():
        given["facts"]["memory_mib"] = 32768

    def cache(hosts, cluster="night", mib=None):
        hosts["head"]["variables"].update(llama_server_gpu_layers=0, llama_server_prompt_cache_mib=mib)
        plan = plan_of(pair, cluster, hosts)
        return plan, plan["head"]["prompt_cache_mib"]

    usable = workers.usable_mib(32768)
    first, alone = cache(hosts_of(pair, "day", 50052), "day")
    second, beside = cache(taken(pair, first))
    again = cache(taken(pair, second, "day", 50052), "day")[1]
    given, _mib = cache(hosts_of(pair, "day", 50052), "day", 20000)
    assert 4096 < again == beside < alone <= 8192
    assert 0 < cache(taken(pair, given))[1] <= (usable - 20000) // 4


def test_a_cluster_whose_rules_would_be_taken_for_those_of_another_is_refused(pair, monkeypatch):
    hosts = taken(pair, plan_of(pair, "llama_cluster", hosts_of(pair, "llama_cluster", 50052)))
    monkeypatch.setattr(names, "PRIORITIES", range(-20052, -20050, 2))
    (reason,) = make(entry.read("night", hosts), pair.model, CATALOGUE, "runtime-id")["reasons"]
    assert "firewalld would take its rules for those of night" in reason


def test_installations_of_other_clusters_are_known(tmp_path):
    for name in ("llamacpp", "llamacpp-night", "llamacpp-day", "llamacpp-empty", "llamacppy"):
        (tmp_path / name).mkdir()
    for name in ("llamacpp", "llamacpp-night", "llamacpp-day", "llamacppy"):
        (tmp_path / name / names.FOLDER_MARK).mkdir()
    record = {"ports": [{"service": "s", "address": "192.0.2.1", "port": 50052}], "memory_mib": {"CPU": 7}}
    (tmp_path / "llamacpp-night" / "cluster.json").write_text(json.dumps({"schema": 1, **record}))
    (tmp_path / "llamacpp-day" / "cluster.json").write_text('{"ports": 1}')
    known = host.neighbours(names.DEFAULT, str(tmp_path / "llamacpp"))
    assert [entry for entry in known if entry["cluster"] in ("night", "day", "empty")] == [
        {"cluster": "day", "ports": [], "memory_mib": {}},
        {"cluster": "night", **record},
    ]
    assert "llama_cluster" in [
        entry["cluster"] for entry in host.neighbours(names.of("night"), f"{tmp_path}/llamacpp-night")
    ]


def test_a_teardown_leaves_the_building_account_to_another_cluster():
    facts = {
        "scope": "system",
        "prefix": "/opt/llamacpp",
        "cache": "/var/cache/llamacpp",
        "defined": [],
        "accounts": {
            "llamacpp": "/opt/llamacpp",
            "llamacpp-build": "/opt/llamacpp",
            "llamacpp-night": "/opt/llamacpp-night",
        },
        "made_accounts": ["llamacpp", "llamacpp-build", "llamacpp-night"],
        "neighbours": [{"cluster": "night", "ports": [], "memory_mib": {}}],
    }
    part = teardown.plan({"here": {"facts": facts}})["hosts"]["here"]
    assert (part["accounts"], part["build_account"]) == (["llamacpp"], None)
    alone = {**facts, "neighbours": [], "prefix": "/opt/llamacpp-night"}
    part = teardown.plan({"here": {"facts": alone}}, "night")["hosts"]["here"]
    assert part["accounts"] == ["llamacpp-build", "llamacpp-night"]
    assert (part["account"], part["build_account"]) == ("llamacpp-night", "llamacpp-build")

"""All accelerators of a host together, each once, and how they share its memory."""

import copy
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs as entry
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host
from conftest import FACTS, RELEASE, Cluster, known_answer_of
from machines import Machine
from support.clusters import accelerator

RTX_4070 = accelerator("cuda", "RTX 4070", "8.9", 12282)
MI50 = {"backend": "hip", "name": "MI50", "architecture": "gfx906", "memory_mib": 32752, "unified": False}
METAL = {"backend": "metal", "name": "M4 Max", "architecture": "apple", "memory_mib": 49152, "unified": True}
TOOLS = {**FACTS["toolchain"], "nvcc": "12.9", "hipconfig": "6.3", "glslc": "2025"}


def by_vulkan(accelerator):
    return {**accelerator, "backend": "vulkan", "architecture": ""}


CARDS = [RTX_4070, MI50, by_vulkan(RTX_4070), by_vulkan(MI50)]
BOTH = {"accelerators": CARDS, "toolchain": TOOLS, "memory_mib": 131072}


def box(*groups, facts=None, **variables):
    """One host with a 4070 and an MI50, and a head beside it where it is a worker alone."""
    cluster, known = Cluster(), {"llama_model_known_answer": known_answer_of()}
    cluster.add("box", *groups, facts=copy.deepcopy(facts or BOTH), **known, **variables)
    return cluster if "head" in groups else cluster.add("head", "head", address="192.0.2.10", **known)


def devices_of(plan):
    assert not plan["refused"], plan["reasons"]
    return [entry["device"] for entry in plan["placement"]]


def workers_of(plan, host):
    return [(worker["device"], worker["used"]) for worker in plan["hosts"][host]["workers"]]


def test_the_head_drives_its_own_devices_beside_a_worker_for_those_of_another_backend():
    plan = box("head", "worker", llama_backend=["cuda", "hip"]).plan()
    assert devices_of(plan) == ["RPC0[127.0.0.1:50052]", "CUDA0"]
    assert workers_of(plan, "box") == [("ROCm0", True)]
    assert "-cuda-" in plan["head"]["argv"][0]
    assert "-hip-" in plan["hosts"]["box"]["workers"][0]["argv"][0]
    assert plan["head"]["environment"] == {}


@pytest.mark.parametrize(
    "lent, backend, driven", [((), "cuda", ["CUDA0"]), ((), "hip", ["ROCm0"]), (("CUDA0",), "hip", [])]
)
def test_integrated_graphics_serve_where_no_better_device_is_lent(lent, backend, driven):
    facts = entry.parse_facts({**FACTS, "accelerators": [RTX_4070, {**MI50, "unified": True}]})
    host, workers = Host("here", True, False, "", facts), [SimpleNamespace(device=name) for name in lent]
    assert [device.name for device in devices.driven_devices(host, workers, backend, {})] == driven


def test_the_workers_of_a_host_lend_all_of_its_devices_each_once():
    cluster = box("worker", llama_backend=["cuda", "hip", "vulkan"])
    plan = cluster.plan()
    assert [worker for worker in workers_of(plan, "box") if worker[1]] == [("CUDA0", True), ("ROCm0", True)]
    assert workers_of(plan, "box")[2:] == [("Vulkan0", False), ("Vulkan1", False)]
    cluster.hosts["head"]["facts"].update(copy.deepcopy(BOTH))
    cluster.hosts["head"]["variables"]["llama_backend"] = "vulkan"
    assert workers_of(cluster.plan(), "box")[2:] == [("Vulkan0", True), ("Vulkan1", True)]


@pytest.mark.parametrize(
    "tools, chosen, lent, unused",
    [
        (TOOLS, "cuda", ["CUDA0"], "MI50 on box"),
        ({**TOOLS, "nvcc": None}, "hip", ["ROCm0"], "RTX 4070 on box"),
        ({**TOOLS, "nvcc": None, "hipconfig": None}, "vulkan", ["Vulkan0", "Vulkan1"], None),
    ],
)
def test_auto_builds_for_one_backend_and_says_what_that_leaves_idle(tools, chosen, lent, unused):
    cluster = box("worker", facts={**BOTH, "toolchain": tools})
    plan = cluster.plan()
    assert [build["backend"] for build in plan["hosts"]["box"]["builds"]] == [chosen]
    assert workers_of(plan, "box") == [(device, True) for device in lent]
    said = [advisory["message"] for advisory in plan["advisories"] if advisory["id"] == "accelerator-unused"]
    assert len(said) == bool(unused)
    assert all(unused in message for message in said)


def test_auto_leaves_out_integrated_graphics_beside_discrete_ones():
    integrated = {**MI50, "name": "AMD gfx1036", "architecture": "gfx1036", "unified": True}
    cluster = box("worker", facts={**BOTH, "accelerators": [RTX_4070, integrated]})
    plan = cluster.plan()
    assert [build["backend"] for build in plan["hosts"]["box"]["builds"]] == ["cuda"]
    assert "accelerator-unused" not in [advisory["id"] for advisory in plan["advisories"]]


def mac(**variables):
    return box("head", "worker", facts={"accelerators": [METAL], "memory_mib": 65536}, **variables)


@pytest.mark.parametrize(
    "variables",
    [{"llama_backend": ["metal", "cpu"]}, {"llama_backend": "metal", "llama_worker_endpoints": [{"device": "CPU"}]}],
)
def test_a_head_drives_its_graphics_beside_a_worker_on_its_processor(variables):
    plan = mac(**variables).plan()
    assert devices_of(plan) == ["RPC0[127.0.0.1:50052]", "MTL0"]
    capacities = {entry["device"]: entry["capacity_mib"] for entry in plan["placement"]}
    processor, graphics = capacities["RPC0[127.0.0.1:50052]"], capacities["MTL0"]
    assert graphics == 49152
    assert processor == 65536 - 6553 - graphics


@pytest.mark.parametrize(
    "endpoints, capacities",
    [
        ([{"device": "MTL0"}, {"device": "CPU"}], [49152, 9831]),
        ([{"device": "MTL0"}, *[{"device": "CPU"}] * 4], [49152, *[2457] * 4]),
        ([{"device": "MTL0"}, *[{"device": "CPU"}] * 10], [58983 - 20480, *[2048] * 10]),
        ([{"device": "MTL0"}, {"device": "CPU", "memory_mib": 30000}], [28983, 30000]),
        ([{"device": "MTL0", "memory_mib": 20000}, {"device": "CPU"}], [20000, 38983]),
        ([{"device": "CPU"}, {"device": "CPU"}], [29491, 29491]),
    ],
)
def test_accelerators_come_first_in_the_memory_that_they_share_with_the_processor(endpoints, capacities):
    cluster = mac(llama_backend="metal", llama_worker_endpoints=endpoints)
    if endpoints[0]["device"] == "CPU":
        cluster.hosts["box"]["facts"]["accelerators"][0]["memory_mib"] = 0
    assert [entry["capacity_mib"] for entry in cluster.plan()["placement"]] == capacities


@pytest.mark.parametrize(
    "environment, accepted, graphics",
    [
        ({}, [], 60000 * 2 // 3),
        ({"radv_enable_unified_heap_on_apu": "true"}, [], 65536 - 6553 - 2048),
        ({}, ["vulkan-shared-memory"], 65536 - 6553 - 2048),
    ],
)
def test_the_processor_has_what_the_driver_of_the_graphics_does_not_show(environment, accepted, graphics):
    shared = {**by_vulkan(MI50), "memory_mib": 60000, "unified": True}
    cluster = box(
        "worker", facts={**BOTH, "accelerators": [shared], "memory_mib": 65536}, llama_backend=["vulkan", "cpu"]
    )
    cluster.hosts["box"]["variables"]["llama_worker_endpoints"] = [
        {"device": "Vulkan0", "environment": environment},
        {"device": "CPU"},
    ]
    cluster.hosts["head"]["variables"]["llama_accept_advisories"] = accepted
    capacities = sorted(entry["capacity_mib"] for entry in cluster.plan()["placement"])
    assert capacities == sorted([graphics, 65536 - 6553 - graphics])


def release(**more):
    return {"source": "git", "ref": "b11434", **more}


ARCHIVE = {"source": "archive", "path": "/x.tar.gz", "checksum": "sha256:" + "b" * 64, "build": 11434}


@pytest.mark.parametrize(
    "one, other, same",
    [
        (release(), release(), True),
        (release(), {**ARCHIVE, "source": "binary"}, True),
        (release(), ARCHIVE, True),
        (release(), {**ARCHIVE, "build": 11435}, False),
        (release(commit="c" * 40), {**ARCHIVE, "commit": "c" * 9}, True),
        (release(commit="c" * 40), {**ARCHIVE, "commit": "d" * 9}, False),
        (release(patches=["/p"]), ARCHIVE, False),
        (RELEASE, {**RELEASE, "commit": "0c1e570" + "0" * 33}, True),
    ],
)
def test_releases_are_alike_by_build_commit_and_patches(one, other, same):
    cluster = box("head", "worker", llama_backend=["cuda", "hip"], llama_release=one, llama_release_hip=other)
    plan = cluster.plan()
    if same:
        assert devices_of(plan) == ["RPC0[127.0.0.1:50052]", "CUDA0"]
    else:
        assert "no worker has a build of the same release" in " ".join(plan["reasons"])


@pytest.mark.parametrize(
    "name, expected",
    [
        ("constructed/strix_halo", {"ROCm0": "ROCm0", "Vulkan0": "ROCm0"}),
        ("constructed/mi300x", {"ROCm0": "ROCm0", "ROCm1": "ROCm1", "Vulkan0": "ROCm0", "Vulkan1": "ROCm1"}),
        ("constructed/rdna3", {"ROCm0": "ROCm0", "ROCm1": "ROCm1", "Vulkan0": "ROCm0"}),
        ("constructed/intel_arc", {"SYCL0": "SYCL0", "SYCL1": "SYCL1", "Vulkan0": "SYCL0", "Vulkan1": "Vulkan1"}),
    ],
)
def test_devices_that_are_one_and_the_same(name, expected, tmp_path, monkeypatch):
    machine = Machine(name, tmp_path).stand_in(monkeypatch)
    facts = entry.parse_facts({**FACTS, "accelerators": machine.accelerators()})
    assert facts.canonical_names == expected
    assert len(facts.distinct_accelerators()) == len(set(expected.values()))


@pytest.mark.parametrize(
    "one, other, same",
    [
        ({"memory_mib": 90000, "unified": True}, {"memory_mib": 60000, "unified": True}, True),
        ({"memory_mib": 12282}, {"memory_mib": 32752}, False),
        ({"memory_mib": 12282}, {"memory_mib": 12282}, True),
        ({"memory_mib": 12282, "name": "mine"}, {"memory_mib": 12000, "name": "mine"}, True),
    ],
)
def test_declared_devices_that_are_one_and_the_same(one, other, same):
    declared = {"name": "declared", "architecture": "", "unified": False}
    accelerators = [{**declared, **one, "backend": "hip"}, {**declared, **other, "backend": "vulkan"}]
    facts = entry.parse_facts({**FACTS, "accelerators": accelerators})
    assert (facts.canonical_names["Vulkan0"] == "ROCm0") is same

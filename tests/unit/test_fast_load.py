"""The collection's patch of ggml-rpc: its hash, which releases have it, and what it changes in the plan."""

import hashlib
import re
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, device_rates, fast_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.workers import SPIN_ENVIRONMENT
from conftest import RELEASE

IK = {"source": "git", "ref": "a" * 40, "repository": "https://github.com/ikawrakow/ik_llama.cpp", "build": 4840}
BINARY = {"source": "binary", "path": "/b.tar.gz", "checksum": "sha256:" + "b" * 64, "build": 11063}


def asked(cluster, **variables):
    for host in cluster.hosts.values():
        host["variables"].update(llama_build_fast_load=True, **variables)
    return cluster


@pytest.mark.parametrize("patch", fast_load.PATCHES.values())
def test_a_patch_is_the_file_whose_checksum_is_known_and_changes_one_file(patch):
    content = Path(patch.path).read_bytes()
    assert hashlib.sha256(content).hexdigest() == patch.sha256
    assert re.findall(r"^\+\+\+ b/(\S+)", content.decode(), re.MULTILINE) == [fast_load.PATCHED_FILE]
    assert patch.name.startswith(fast_load.PATCH_PREFIX)


def test_the_trees_that_were_read_have_one():
    assert {capabilities.protocol_of(build) for build in (11063, 11434)} == fast_load.PATCHES.keys()


def test_the_patch_is_part_of_the_release_and_its_cache_is_apart(pair):
    for host in pair.hosts.values():
        host["variables"]["llama_worker_endpoints"] = [{"cache": True}]
    before, after = pair.plan(), asked(pair).plan()
    assert not after["refused"]
    known = fast_load.PATCHES["7.0.0"]
    assert after["release"]["patches"] == [
        {"path": known.path, "sha256": known.sha256, "files": [fast_load.PATCHED_FILE]}
    ]
    assert after["release"]["id"] != before["release"]["id"]
    builds = [plan["hosts"]["worker1"]["builds"][0]["id"] for plan in (before, after)]
    assert builds[0] != builds[1]
    assert after["hosts"]["worker1"]["tools"]["patch"] == "patch"
    folders = [plan["hosts"]["worker1"]["workers"][0]["environment"] for plan in (before, after)]
    assert folders == [
        {**SPIN_ENVIRONMENT, "LLAMA_CACHE": f"/opt/llamacpp/state/cache/cpu{ending}"} for ending in ("", "-fast")
    ]


def test_an_operators_patch_comes_first():
    request = release_request.request_of({**RELEASE, "patches": ["/patches/a.patch"]})
    patches = releases.release_of(request._replace(fast_load=True), {}).patches
    assert [patch.path for patch in patches] == ["/patches/a.patch", fast_load.PATCHES["7.0.0"].path]


@pytest.mark.parametrize(
    "release, said",
    [
        (IK, "of ik_llama.cpp"),
        (BINARY, "source: binary, whose programs are already compiled"),
        ("b11450", "llama_release is b11450 of llama.cpp with RPC protocol 8.0.0"),
    ],
)
def test_releases_without_a_patch_are_refused_with_what_to_do(local, release, said):
    reason = asked(local, llama_release=release).reason()
    assert said in reason
    assert "remove llama_build_fast_load, or use a release with RPC protocol 7.0.0" in reason


@pytest.mark.parametrize("value", [True, {}, "x"])
def test_an_operator_cannot_ask_for_it_in_the_release(local, value):
    release = {**local.hosts["here"]["variables"]["llama_release"], "fast_load": value}
    local.hosts["here"]["variables"]["llama_release"] = release
    assert "llama_release has fast_load" in local.reason()


def test_a_value_without_a_valid_form_is_refused_as_without_the_patch(local):
    assert "llama_release is 'newest', which is not valid" in asked(local, llama_release="newest").reason()
    assert "llama_release is {'path': '/x'}, which" in asked(local, llama_release={"path": "/x"}).reason()


def test_loads_are_predicted_as_they_were_measured():
    """8.93 GB to a worker on loopback, beside 1.2 s alone; 0.94 GB over 1 Gbit/s in 8.3 s (docs/performance.md)."""
    request = release_request.request_of(RELEASE)
    plain, fast = (releases.release_of(request._replace(fast_load=value), {}) for value in (False, True))
    rate = device_rates.Rate(100, 1000, device_rates.TABLE_SOURCE)
    local = cost_model.ModelPart("a", "", rate, 1e9, 8.93e9, 2e9, 310)
    loopback = local._replace(link=cost_model.Link("loopback", 0.05, 100, False))
    assert cost_model.load_s(plain, [loopback]) == pytest.approx(29.0 - 1.2, rel=0.1)
    read_from_disk = pytest.approx(8.93 / cost_model.DISK_GB_PER_S)
    assert cost_model.load_s(fast, [loopback]) == read_from_disk
    slow = local._replace(weight_bytes=0.94e9, link=cost_model.Link("ethernet", 0.3, 1.0, False))
    assert cost_model.load_s(plain, [slow]) == pytest.approx(8.3, rel=0.1)
    assert cost_model.load_s(fast, [slow]) == pytest.approx(0.94 * 8)
    assert cost_model.load_s(fast, [local]) == read_from_disk
    assert [cost_model.largest_load_cost(plain, one)[0] for one in (slow, loopback)] == ["link to", "RPC on"]

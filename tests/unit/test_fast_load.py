"""The collection's patch of ggml-rpc: its hash, which releases have it, and what it changes in the plan."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, fast_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.workers import SHARING
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import release_variables
from conftest import CATALOGUE, RELEASE

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
    assert re.findall(r"^\+\+\+ b/(\S+)", content.decode(), re.MULTILINE) == [fast_load.CHANGED]
    assert patch.name.startswith(fast_load.PREFIX)


def test_the_default_release_has_one():
    assert capabilities.protocol_of(capabilities.PYPI_TREES["0.3.36"]["build"]) in fast_load.PATCHES


def test_the_patch_is_part_of_the_release_and_its_cache_is_apart(pair):
    for host in pair.hosts.values():
        host["variables"]["llama_worker_endpoints"] = [{"cache": True}]
    before, after = pair.plan(), asked(pair).plan()
    assert not after["refused"]
    known = fast_load.PATCHES["7.0.0"]
    assert after["release"]["patches"] == [{"path": known.path, "sha256": known.sha256, "files": [fast_load.CHANGED]}]
    assert after["release"]["id"] != before["release"]["id"]
    builds = [plan["hosts"]["worker1"]["builds"][0]["id"] for plan in (before, after)]
    assert builds[0] != builds[1]
    assert after["hosts"]["worker1"]["tools"]["patch"] == "patch"
    folders = [plan["hosts"]["worker1"]["workers"][0]["environment"] for plan in (before, after)]
    assert folders == [{**SHARING, "LLAMA_CACHE": f"/opt/llamacpp/state/cache/cpu{ending}"} for ending in ("", "-fast")]


def test_an_operators_patch_comes_first():
    request = release_request.request_of({**RELEASE, "patches": ["/patches/a.patch"]})
    patches = releases.release_of(request._replace(fast_load=True), {}).patches
    assert [patch.path for patch in patches] == ["/patches/a.patch", fast_load.PATCHES["7.0.0"].path]


@pytest.mark.parametrize(
    "release, said",
    [
        (IK, "of ik_llama.cpp"),
        (BINARY, "source: binary, programs that are compiled already"),
        ("b11450", "llama_release is b11450 of llama.cpp with RPC protocol 8.0.0"),
    ],
)
def test_releases_without_a_patch_are_refused_with_what_to_do(local, release, said):
    reason = asked(local, llama_release=release).reason()
    assert said in reason
    assert "remove llama_build_fast_load, or use a release with RPC protocol 7.0.0" in reason


def test_hosts_that_differ_are_refused(pair):
    pair.hosts["worker1"]["variables"]["llama_build_fast_load"] = True
    with pytest.raises(Refusal, match="llama_build_fast_load of worker1 differs from that of the head"):
        release_variables(cluster_inputs.read("llama_cluster", pair.hosts), CATALOGUE)


@pytest.mark.parametrize("value", [True, {}, "x"])
def test_an_operator_cannot_ask_for_it_in_the_release(local, value):
    release = {**local.hosts["here"]["variables"]["llama_release"], "fast_load": value}
    local.hosts["here"]["variables"]["llama_release"] = release
    assert "llama_release has fast_load" in local.reason()


def test_a_value_without_a_valid_form_is_refused_as_without_the_patch(local):
    assert "llama_release is 'newest', which is not a valid form" in asked(local, llama_release="newest").reason()
    assert "llama_release is {'path': '/x'}, which" in asked(local, llama_release={"path": "/x"}).reason()


def test_programs_with_and_without_it_are_not_of_the_same_source():
    request = release_request.request_of(RELEASE)
    plain, fast = (releases.release_of(request._replace(fast_load=value), {}) for value in (False, True))
    assert fast.loads_fast
    assert not plain.loads_fast
    assert not releases.same_source(plain, fast)


def test_loads_are_predicted_as_they_were_measured():
    """8.93 GB to a worker on loopback, beside 1.2 s alone; 0.94 GB over 1 Gbit/s in 8.3 s (docs/performance.md)."""
    request = release_request.request_of(RELEASE)
    plain, fast = (releases.release_of(request._replace(fast_load=value), {}) for value in (False, True))
    rate = cost_model.Rate(100, 1000, cost_model.TABLE)
    local = cost_model.Work("a", "", rate, 1e9, 8.93e9, 2e9, 310)
    loopback = local._replace(link=cost_model.Link("loopback", 0.05, 100, False))
    assert cost_model.load_s(plain, [loopback]) == pytest.approx(29.0 - 1.2, rel=0.1)
    from_disk = pytest.approx(8.93 / cost_model.DISK_GB_PER_S)
    assert cost_model.load_s(fast, [loopback]) == from_disk
    slow = local._replace(weights=0.94e9, link=cost_model.Link("ethernet", 0.3, 1.0, False))
    assert cost_model.load_s(plain, [slow]) == pytest.approx(8.3, rel=0.1)
    assert cost_model.load_s(fast, [slow]) == pytest.approx(0.94 * 8)
    assert cost_model.load_s(fast, [local]) == from_disk
    assert [cost_model.load_cost(plain, one)[0] for one in (slow, loopback)] == ["link to", "RPC on"]


MAIN = r"""
#include <algorithm>
#include <bitset>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <unordered_set>
#include <vector>
%s
int main() {
    std::vector<uint8_t> data(1024 + 5);
    uint64_t seed = 1;
    for (auto & byte : data) { seed = seed*6364136223846793005ULL + 1442695040888963407ULL; byte = seed >> 56; }
    const uint64_t whole = piece_hash(data.data(), data.size());
    std::unordered_set<uint64_t> seen{whole};
    size_t cases = 1;
    long changed[64] = {};
    // each bit, alone and with each bit of the same lane's next words and of the next lane
    for (size_t bit = 0; bit < 8*data.size(); ++bit) {
        data[bit/8] ^= 1 << bit%%8;
        const uint64_t one = piece_hash(data.data(), data.size());
        for (int i = 0; i < 64; ++i) { changed[i] += (one ^ whole) >> i & 1; }
        seen.insert(one); ++cases;
        if (bit < 512) {
            for (size_t from : {bit + 64, bit + 512, bit + 1024}) {
                for (size_t other = from/64*64; other < from/64*64 + 64; ++other) {
                    data[other/8] ^= 1 << other%%8;
                    seen.insert(piece_hash(data.data(), data.size())); ++cases;
                    data[other/8] ^= 1 << other%%8;
                }
            }
        }
        data[bit/8] ^= 1 << bit%%8;
    }
    // zeros of each length, one word at each place, and words that changed places
    std::vector<uint8_t> zeros(4096);
    for (size_t n = 0; n <= zeros.size(); ++n) { seen.insert(piece_hash(zeros.data(), n)); ++cases; }
    for (size_t n = 0; n < zeros.size(); ++n) { zeros[n] = 1; seen.insert(piece_hash(zeros.data(), zeros.size())); ++cases; zeros[n] = 0; }
    for (size_t a = 0; a < 128; ++a) {
        for (size_t b = 0; b < a; ++b) {
            std::swap_ranges(&data[8*a], &data[8*a] + 8, &data[8*b]);
            seen.insert(piece_hash(data.data(), data.size())); ++cases;
            std::swap_ranges(&data[8*a], &data[8*a] + 8, &data[8*b]);
        }
    }
    printf("%%zu %%zu %%ld %%ld\n", cases, seen.size(), *std::min_element(changed, changed + 64)*1000/(8*(long)data.size()),
           *std::max_element(changed, changed + 64)*1000/(8*(long)data.size()));
}
"""


@pytest.mark.programs
def test_the_hash_tells_small_differences_apart(tmp_path):
    """Compiled from the patch: no two of 120,000 data with few differences have the same hash, and each bit of it changes half of the time."""
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    added = "\n".join(
        line[1:] for line in Path(fast_load.PATCHES["7.0.0"].path).read_text().splitlines() if line.startswith("+")
    )
    function = re.search(r"^static uint64_t piece_hash.*?^}$", added, re.MULTILINE | re.DOTALL)
    source, program = tmp_path / "hash.cpp", tmp_path / "hash"
    source.write_text(MAIN % function[0])
    subprocess.run([compiler, "-std=c++17", "-O1", "-o", program, source], check=True)
    cases, different, least, most = map(int, subprocess.run([program], check=True, capture_output=True).stdout.split())
    assert cases > 100_000
    assert different == cases
    assert least > 450
    assert most < 550

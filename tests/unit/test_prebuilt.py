"""Upstream's archives of compiled programs: which of them a host installs, and how the controller fetches them from a server like GitHub's."""

import contextlib
import hashlib
import io
import json
import re
import tarfile

import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.action import release as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import prebuilt_archives
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources
from conftest import FACTS, typed
from model_server import answer
from support import actions
from support.builds import BUILD as BUILD_PLAN
from support.builds import planned_source
from support.clusters import CARD, GPU, strix_halo
from support.drift import drifts, typed_drifts
from support.sources import cache, kept

__all__ = ["cache"]

BUILD = 11669
NAME = f"llama-b{BUILD}-bin-ubuntu-x64.tar.gz"
ASKED = {"source": "prebuilt", "build": BUILD}
SHA = "sha256:" + "a" * 64


ROCM = {"backend": "hip", "prefix": "/opt/rocm", "links": [], "compiler": None, "libraries": []}


def names_of(backend, build=BUILD, devices=(), rocm=None, **changed):
    accelerators = [{**GPU, "backend": backend, "architecture": device} for device in devices]
    toolchains = [{**ROCM, "version": rocm}] if rocm else None
    given = {**FACTS, "glibc": "2.41", "accelerators": accelerators, "toolchains": toolchains}
    return prebuilt_archives.suitable_archives("host", cluster_inputs.parse_facts({**given, **changed}), backend, build)


@pytest.mark.parametrize(
    "backend, changed, kind",
    [
        ("cpu", {}, "ubuntu-x64"),
        ("cpu", {"glibc": "2.36"}, "ubuntu-x64"),
        ("cpu", {"architecture": "aarch64"}, "ubuntu-arm64"),
        ("vulkan", {"architecture": "aarch64", "glibc": None}, "ubuntu-vulkan-arm64"),
        ("cuda", {"newest_cuda": "13.4", "devices": ("8.6", "12.0")}, "ubuntu-cuda-13.4-x64"),
        ("cuda", {"newest_cuda": None, "devices": ("",)}, "ubuntu-cuda-13.4-x64"),
        ("cuda", {"newest_cuda": "13.3", "devices": ("9.0",)}, "ubuntu-cuda-12.8-x64"),
        ("cuda", {"newest_cuda": "13.3", "devices": ("5.0",)}, "ubuntu-cuda-12.8-x64"),
        ("cuda", {"newest_cuda": "13.4", "devices": ("6.1", "8.6")}, "ubuntu-cuda-12.8-x64"),
        ("cuda", {"newest_cuda": "13.10", "architecture": "aarch64", "devices": ("12.1",)}, "ubuntu-cuda-13.4-arm64"),
        ("hip", {"rocm": "10.0.2", "devices": ("gfx90a:xnack-", "gfx1151")}, "ubuntu-rocm-10.0-x64"),
        ("metal", {"system": "Darwin", "architecture": "arm64", "kernel": "24.1.0"}, "macos-arm64"),
    ],
)
def test_which_archive_runs_on_a_host(backend, changed, kind):
    programs = f"llama-b{BUILD}-bin-{kind}.tar.gz"
    runtime = (f"cudart-{programs}",) if backend == "cuda" else ()
    assert names_of(backend, **changed) == (programs, *runtime)


@pytest.mark.parametrize(
    "backend, changed, said",
    [
        ("cpu", {"glibc": "2.31"}, "host has glibc 2.31, but .* needs glibc 2.35 or newer: install such a system"),
        ("cpu", {"glibc": ""}, "has a C library other than glibc"),
        ("cpu", {"build": 9900}, "build to 9900, .* needs build 11081 or newer: use a newer build, or source: binary"),
        ("metal", {"system": "Darwin", "architecture": "arm64", "kernel": "21.6.0"}, "Darwin 21.6.0, .* 22.4"),
        ("cuda", {"newest_cuda": "12.4"}, "driver for CUDA 12.4, but .* needs CUDA 12.8 or newer: update the driver"),
        ("cuda", {"newest_cuda": "13.4", "devices": ("3.7",)}, "compute capability 3.7, but .* needs 5.0 or higher"),
        ("hip", {"rocm": "7.2.1"}, "has ROCm 7.2.1, but .* needs the ROCm 10 libraries: install them, or"),
        ("hip", {"rocm": "10.0", "devices": ("gfx906",)}, "has the device gfx906, but .* has no code for this device"),
        (
            "hip",
            {"architecture": "aarch64"},
            "uses the backend hip, .* no hip archive with an RPC worker for Linux aarch64",
        ),
    ],
)
def test_what_runs_no_archive_is_refused_in_one_sentence(backend, changed, said):
    with pytest.raises(Refusal, match=said) as refusal:
        names_of(backend, **changed)
    assert str(refusal.value).count(". ") == 0


# ------------------------------------------------------------------------------------------------------------------------ plan


def asking(cluster, **variables):
    for host in cluster.hosts.values():
        host["variables"].update({"llama_release": ASKED, **variables})
    return cluster


def archives(plan, host):
    return [build["archives"] for build in plan["hosts"][host]["builds"]]


def test_hosts_of_several_kinds_have_archives_of_one_release(pair):
    pair.hosts["worker1"]["facts"].update({**CARD, "newest_cuda": "13.4", "toolchain": {}})
    pair.hosts["worker2"]["facts"].update(architecture="aarch64", glibc="2.39", toolchain={"libgomp": None})
    plan = asking(pair).accepted()
    release = plan["release"]
    assert (release["source"], release["build"], release["protocol"]) == ("prebuilt", BUILD, "8.0.0")
    assert {build["release"] for host in plan["hosts"].values() for build in host["builds"]} == {release["id"]}
    cuda = f"llama-b{BUILD}-bin-ubuntu-cuda-13.4-x64.tar.gz"
    assert archives(plan, "head") == [[NAME]]
    assert archives(plan, "worker1") == [[cuda, f"cudart-{cuda}"]]
    assert archives(plan, "worker2") == [[f"llama-b{BUILD}-bin-ubuntu-arm64.tar.gz"]]
    tools = {name: host["tools"] for name, host in plan["hosts"].items()}
    assert tools["worker2"]["libgomp"] == "libgomp1"
    assert not {"cmake", "c++", "nvcc"} & {tool for own in tools.values() for tool in own}
    assert len(plan["hosts"]["worker1"]["accounts"]) == 1, "nobody compiles"


def test_a_checksum_that_is_not_that_of_what_is_installed_is_refused(local):
    """It changes no build, so that nothing else would see it."""
    plans = {
        digit: asking(local, llama_release={**ASKED, "checksums": {NAME: f"sha256:{digit * 64}"}}).plan()
        for digit in "ab"
    }
    identity = plans["a"]["hosts"]["here"]["builds"][0]["id"]
    found = typed_drifts({"here": {**drifts(plans["a"])["here"], "archives": {identity: "a" * 64}}})
    assert changes.decide(typed(plans["a"]), found).outdated_hosts == []
    assert changes.decide(typed(asking(local, llama_release=ASKED).plan()), found).outdated_hosts == []
    said = rf"sha256:b{{64}} for {NAME}, but the programs on here come from sha256:a{{64}}: correct .*/releases/{identity} on that host"
    with pytest.raises(Refusal, match=said):
        changes.decide(typed(plans["b"]), found)


def test_a_checksum_in_capitals_is_the_same():
    small, large = ({"checksum": f"sha256:{digit * 64}"} for digit in "aA")
    for asked in ({"source": "pypi", "version": "0.3.36"}, {"source": "binary", "url": "http://mirror/x.tar.gz"}):
        assert release_request.request_of({**asked, **large}) == release_request.request_of({**asked, **small})
    many = ({**ASKED, "checksums": {NAME: given["checksum"]}} for given in (small, large))
    assert len({release_request.request_of(given) for given in many}) == 1


def test_where_archives_lie_and_what_they_are_changes_no_build(local):
    before = asking(local).plan()
    given = {**ASKED, "url": "http://mirror/", "checksums": {NAME: SHA}}
    after = asking(local, llama_release=given).plan()
    assert after["hosts"] == before["hosts"]
    assert after["release"]["url"] == "http://mirror/"
    declared = json.loads(release_request.release_json(typed(after).release))
    assert release_request.request_of(declared) == release_request.request_of(given)
    other = asking(local, llama_release={**ASKED, "build": BUILD + 1}).plan()
    assert other["hosts"]["here"]["builds"][0]["id"] != before["hosts"]["here"]["builds"][0]["id"]


@pytest.mark.parametrize(
    "rocm, backend, environment", [("7.2.1", "vulkan", {}), ("10.0.0", "hip", {"LD_LIBRARY_PATH": "/opt/rocm/lib"})]
)
def test_auto_takes_a_backend_whose_archive_runs(local, rocm, backend, environment):
    local.hosts["here"]["facts"].update(strix_halo(), toolchains=[{**ROCM, "version": rocm}])
    build = asking(local, llama_worker_endpoints=None).plan()["hosts"]["here"]["builds"][0]
    assert (build["backend"], build["environment"]) == (backend, environment)


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"llama_release": {"source": "prebuilt"}}, "prebuilt but no build: .*versions like v0.4.1 have no archives"),
        ({"llama_release": {**ASKED, "build": "v0.4.1"}}, "sets build to 'v0.4.1': use llama.cpp's build number"),
        ({"llama_release": {**ASKED, "url": "ftp://x"}}, "sets url to 'ftp://x': set url to the address of a folder"),
        ({"llama_release": {**ASKED, "checksums": ["a"]}}, r"sets checksums to \['a'\]: map archive names"),
        ({"llama_release": {**ASKED, "checksums": {"llama-b1-bin-x.tar.gz": SHA}}}, f"names like llama-b{BUILD}-bin-"),
        ({"llama_release": {**ASKED, "patches": ["a.patch"]}}, "patches, which source: prebuilt does not accept"),
        ({"llama_build_fast_load": True}, "source: prebuilt, whose programs are already compiled"),
        ({"llama_build_cmake_options": {"GGML_RPC_RDMA": "ON"}}, "has GGML_RPC_RDMA, but .* compiles nothing: remove"),
    ],
)
def test_what_archives_do_not_have_is_refused(local, variables, said):
    assert re.search(said, asking(local, **variables).reason())


def test_pairs_of_types_that_only_compiling_gives(local):
    local.hosts["here"]["facts"].update(CARD)
    local.hosts["here"]["variables"].update(llama_worker_endpoints=None, llama_server_cache_type_k="q8_0")
    assert "q8_0 and f16, but upstream's cuda archive for here has no kernels" in asking(local).reason()


# ------------------------------------------------------------------------------------------------------------------------ auto


def chosen(cluster, **variables):
    plan = asking(cluster, **{"llama_release": "auto", **variables}).accepted()
    assert f"auto picks {plan['release']['source']}: " in plan_text.plan_summary(typed(plan)).replace("\n    ", " ")
    assert plan_text.plan_page(typed(plan)).replace("\n    ", " ").count("auto picks") == 1
    return plan["release"]["source"], plan["release"]["why"]


def test_auto_is_upstreams_programs_where_each_host_has_them(pair):
    pair.hosts["worker1"]["facts"].update(architecture="aarch64", glibc="2.41")
    source, why = chosen(pair)
    assert source == "prebuilt"
    assert why.startswith("upstream has an archive for each host; compiling would allow")


def test_auto_prefers_upstreams_programs_for_the_card_to_compiling_without_its_toolkit(local):
    vulkan = {**GPU, "backend": "vulkan", "architecture": ""}
    tools = {**CARD["toolchain"], "nvcc": None, "glslc": "2025", "vulkan": "2025", "spirv-headers": "2025"}
    local.hosts["here"]["facts"].update(CARD, accelerators=[GPU, vulkan], toolchain=tools)
    local.hosts["here"]["variables"].update(llama_worker_endpoints=None)
    assert chosen(local)[0] == "prebuilt"
    assert local.plan()["hosts"]["here"]["builds"][0]["backend"] == "cuda"


@pytest.mark.parametrize(
    "facts, variables, said",
    [
        ({**CARD, "newest_cuda": "12.4"}, {}, "here can compile for cuda, but upstream has no such archive"),
        ({}, {"llama_build_fast_load": True}, "source: prebuilt, whose programs are already compiled, but llama_build"),
        ({"glibc": "2.31"}, {}, "here has glibc 2.31, but upstream's archive"),
        ({}, {"llama_build_cmake_options": {"GGML_AVX512": "OFF"}}, "llama_build_cmake_options for here has GGML_AVX"),
    ],
)
def test_auto_compiles_what_only_compiling_gives(local, facts, variables, said):
    local.hosts["here"]["facts"].update(facts)
    source, why = chosen(local, llama_worker_endpoints=None, **variables)
    assert source == "pypi"
    assert said in why


def test_auto_from_a_mirror_is_the_same_release(local):
    mirrored = asking(local, llama_release={"source": "auto", "url": "http://mirror"}).plan()["release"]
    assert mirrored["url"] == "http://mirror"
    assert mirrored["id"] == asking(local).plan()["release"]["id"]
    assert "set url to the address of a folder" in asking(local, llama_release={"source": "auto", "url": "x"}).reason()
    assert "llama_release_cuda has source: auto" in asking(local, llama_release_cuda="auto").reason()


def test_what_auto_compiles_is_the_default():
    assert inventory.specification()["llama_release"]["default"] == release_request.DEFAULT_RELEASE


# --------------------------------------------------------------------------------------------------------------------- fetching


def packed(text, *names):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=0) as archive:
        for name in names or [f"llama-b{BUILD}/{target}" for target in BUILD_PLAN.targets]:
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return stream.getvalue()


CONTENT = packed(bytes(range(256)) * 4096)


@pytest.fixture
def release(server, monkeypatch):
    """Of a server that plays GitHub's: what is asked for is redirected to where it lies."""
    monkeypatch.setattr(sources, "RETRY_PAUSES_SECONDS", (0.01,) * 3)
    server.files[f"/assets/{NAME}"] = CONTENT
    server.faults[f"/b{BUILD}/{NAME}"] = answer(302, Location=f"{server.url}/assets/{NAME}?token=x")
    return planned_source("prebuilt", f"prebuilt-{BUILD}", build=BUILD, url=server.url)


def digest(content):
    return hashlib.sha256(content).hexdigest()


def test_an_archive_is_fetched_once_and_its_sha256_kept(release, server, cache):
    (fetched,) = sources.fetch(release, [NAME])
    assert (fetched.is_new, fetched.path.read_bytes(), fetched.sha256) == (True, CONTENT, digest(CONTENT))
    asked = len(server.asked)
    assert sources.fetch(release, [NAME]) == [fetched._replace(is_new=False)]
    assert len(server.asked) == asked
    assert kept(cache) == [NAME.replace(".tar.gz", ".json"), NAME]
    fetched.path.unlink()
    assert sources.fetch(release, [NAME]) == [fetched]


def test_all_archives_that_hosts_lack_are_fetched_before_any_host_changes(release, server):
    build = typed_json.dump(BUILD_PLAN._replace(archives=(NAME,)))
    given = {"state": "fetched", "release": typed_json.dump(release), "build": build, "prefix": "/p", "cache": "/c"}
    assert [actions.run(action, **given)["changed"] for _run in range(2)] == [True, False]


@pytest.mark.parametrize(
    "source, member, names, said",
    [
        ("archive", "", ["llama/CMakeLists.txt"], None),
        ("archive", "", ["x/llama/CMakeLists.txt"], "no CMakeLists.txt in its top-level folder, .*: use an archive"),
        ("archive", "", ["./llama/CMakeLists.txt"], "no CMakeLists.txt in its top-level folder"),
        ("archive", "", ["CMakeLists.txt"], "no CMakeLists.txt in its top-level folder"),
        ("archive", "p/vendor/llama.cpp", ["p/vendor/llama.cpp/CMakeLists.txt"], None),
        ("archive", "p/vendor/llama.cpp", ["p/CMakeLists.txt"], "no CMakeLists.txt in p/vendor/llama.cpp, where llama"),
        ("binary", None, ["x/bin/llama-server", "x/bin/ggml-rpc-server"], None),
        ("binary", None, ["x/bin/llama-server", "x/ggml-rpc-server"], "no ggml-rpc-server next to llama-server"),
    ],
)
def test_an_archive_that_no_build_can_use_is_refused_before_any_host_changes(
    tmp_path, cache, source, member, names, said
):
    content, path = packed(b"x", *names), tmp_path / "a.tar.gz"
    path.write_bytes(content)
    release = planned_source(source, "b1", path=str(path), checksum=f"sha256:{digest(content)}", member=member)
    given = {"release": typed_json.dump(release), "build": typed_json.dump(BUILD_PLAN), "prefix": "/p", "cache": "/c"}
    with pytest.raises(AnsibleError, match=said) if said else contextlib.nullcontext():
        actions.run(action, state="fetched", **given)


def test_an_archive_that_upstream_replaced_is_refused_until_the_operator_accepts_it(release, server, cache):
    (first,) = sources.fetch(release, [NAME])
    first.path.unlink()
    other = server.files[f"/assets/{NAME}"] = packed(b"other")
    replaced = f"{NAME} .*sha256:{digest(other)}, but had sha256:{first.sha256} when .* first"
    with pytest.raises(AnsibleError, match=replaced):
        sources.fetch(release, [NAME])
    assert kept(cache) == [NAME.replace(".tar.gz", ".json")]
    accepted = release._replace(checksums={NAME: f"sha256:{digest(other)}"})
    assert sources.fetch(accepted, [NAME])[0].path.read_bytes() == other


CUT = answer(200, CONTENT[:1000], Content_Length=len(CONTENT))
SIGN_IN = answer(200, b"<html>sign in</html>")
NOT_GIVEN = r"/llama-b11669-bin-ubuntu-x64\.tar\.gz, .* cannot be downloaded \(HTTP {}\): try again in a few hours \(upstream tags a build before"


@pytest.mark.parametrize(
    "fault, times, asked, said",
    [
        (answer(503), 3, 4, None),
        (CUT, 1, 2, None),
        (answer(200, CONTENT, Content_Length="unknown"), 1, 1, None),
        (answer(502), 4, 4, NOT_GIVEN.format(502)),
        (answer(404), 1, 1, NOT_GIVEN.format(404)),
        (CUT, 4, 4, "was cut off: the server sent less than it"),
        (answer(200, b"-%x\r\n" % (1 << 64), Transfer_Encoding="chunked"), 4, 4, r"was cut off \(Python int too large"),
        (SIGN_IN, 1, 1, r"\.tar\.gz, which cannot be read: it may be incomplete, or a web page\. Use"),
    ],
)
def test_what_a_server_does_not_give_for_now_is_asked_for_again(release, server, cache, fault, times, asked, said):
    server.faults[f"/assets/{NAME}"] = [fault] * times
    if said:
        with pytest.raises(AnsibleError, match=f"(?s)llama_release.*{said}"):
            sources.fetch(release, [NAME])
        assert kept(cache) == []
    else:
        assert sources.fetch(release, [NAME])[0].path.read_bytes() == CONTENT
    assert len([path for path, _headers in server.asked if path.startswith("/assets/")]) == asked


def test_a_wrong_checksum_names_archive_and_both(release, cache):
    given = release._replace(checksums={NAME: "sha256:" + "0" * 64})
    both = f"expects sha256:000.* for {NAME}, which has .*{digest(CONTENT)}"
    with pytest.raises(AnsibleError, match=both):
        sources.fetch(given, [NAME])
    assert kept(cache) == []

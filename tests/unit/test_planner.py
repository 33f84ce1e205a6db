"""The plan of small clusters, and every reason for which there is none."""

import copy
import math
import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs as entry
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.workers import SPIN_ENVIRONMENT
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import release_variables
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources
from conftest import CATALOGUE, RELEASE, Cluster, known_answer_of, typed
from support.clusters import FORK, GPU, TOOLS, TREE, TWO_CARDS, serving, strix_halo
from support.clusters import model as on_paper
from support.models import tensor


def test_workers_bind_to_the_link_and_are_open_to_the_head_only(pair):
    pair.hosts["worker1"]["variables"]["llama_links"] = [{"address": "198.51.100.2/30"}]
    plan = pair.accepted()
    assert plan["hosts"]["worker1"]["workers"][0]["endpoint"] == "198.51.100.2:50052"
    assert plan["hosts"]["worker2"]["workers"][0]["endpoint"] == "192.0.2.12:50052"
    assert plan["hosts"]["worker1"]["firewall"] == [
        {"port": port, "sources": ["192.0.2.10"], "address": "198.51.100.2"} for port in (50052, 50051)
    ]
    assert plan["hosts"]["worker1"]["services"][0]["allow"] == ["192.0.2.10", "198.51.100.2", "localhost"]


AMX_OFF = {"CMAKE_C_FLAGS": "-U__AMX_INT8__", "CMAKE_CXX_FLAGS": "-U__AMX_INT8__"}


@pytest.mark.parametrize(
    "given, added",
    [
        ({}, AMX_OFF),
        ({"CMAKE_CXX_FLAGS": "-O2"}, {**AMX_OFF, "CMAKE_CXX_FLAGS": "-U__AMX_INT8__ -O2"}),
        ({"GGML_AMX_INT8": "ON"}, {"GGML_AMX_INT8": "ON"}),
    ],
    ids=["by itself", "with the operator's flags", "the operator decides"],
)
@pytest.mark.parametrize(
    "release",
    [{"source": "git", "ref": "b11434"}, {"source": "git", "fork": "ik_llama.cpp", "ref": "8" * 40, "build": 4840}],
    ids=["llama.cpp", "ik_llama.cpp"],
)
def test_amx_is_left_out_where_programs_cannot_use_it(pair, release, given, added):
    for host in pair.hosts.values():
        host["variables"]["llama_release"] = release
    before = pair.plan()["hosts"]
    pair.hosts["worker2"]["facts"]["cpu"]["unusable"] = ["amx"]
    pair.hosts["worker2"]["variables"]["llama_build_cmake_options"] = given
    after = pair.plan()["hosts"]
    (build,), (usual,) = after["worker2"]["builds"], before["worker2"]["builds"]
    assert build["cmake_options"] == {**usual["cmake_options"], **added}
    assert build["id"] != usual["id"]
    for name in ("head", "worker1"):
        (build,), (usual,) = (plan[name].pop("builds") for plan in (after, before))
        assert {**build, "trusted_builders": [*build["trusted_builders"], "worker2"]} == usual
        assert after[name] == before[name]


@pytest.mark.parametrize("split", [[1], [1, 1, 1], [1, -1], [0, 0]])
def test_a_split_needs_a_share_for_each_device(pair, split):
    pair.hosts["head"]["variables"]["llama_server_tensor_split"] = split
    assert "these 2 devices in this order: 192.0.2.11:50052 (worker1)" in pair.reason()


def test_layers_on_the_head_need_room_there(pair, big_model):
    serving(pair, big_model)
    for worker in ("worker1", "worker2"):
        pair.hosts[worker]["variables"]["llama_worker_endpoints"] = [{"memory_mib": 60 * 1024}]
    pair.hosts["head"]["variables"]["llama_server_gpu_layers"] = 11
    assert re.search(r"but head lacks \d+ MiB of memory", pair.reason())
    pair.hosts["head"]["variables"]["llama_server_gpu_layers"] = 61
    assert not pair.plan()["refused"]


@pytest.mark.parametrize(
    "entry, told",
    [
        ("ffn", "these devices: CPU, RPC0[192.0.2.11:50052], RPC0[192.0.2.12:50052]"),
        ("=CPU", "'=CPU'"),
        ("a,b=CPU", "no comma or ="),
        ("ffn=CUDA0", "one of these devices: CPU"),
        ("(=CPU", "not a valid regular expression (missing )"),
    ],
)
def test_an_override_that_cannot_be(pair, entry, told):
    pair.hosts["head"]["variables"]["llama_server_override_tensor"] = [entry]
    assert told in pair.reason()


def test_an_override_needs_the_names_of_tensors(pair, big_model):
    del big_model["tensors"]
    pair.hosts["head"]["variables"]["llama_server_override_tensor"] = ["ffn=CPU"]
    serving(pair, big_model).reason("has no tensor names: create the summary again with model_info")


def test_overrides_leave_no_more_on_the_head_than_it_holds(pair, big_model):
    serving(pair, big_model, llama_server_override_tensor=["blk=CPU"]).reason(
        "81920 MiB of weights on the head, but head lacks 19661 MiB of memory"
    )


def test_what_is_kept_for_the_cache_follows_the_settings(pair):
    def kv(**settings):
        pair.hosts["head"]["variables"].update(settings)
        return sum(entry["kv_mib"] for entry in pair.plan()["placement"])

    whole = kv(llama_server_context=2048)
    assert kv(llama_server_parallel=3) == whole * 2304 / 2048
    assert kv(llama_server_extra_args=["--kv-unified"]) == whole
    assert pair.plan()["placement"][0]["exact"] == ["weights_mib", "kv_mib"]


@pytest.mark.parametrize(
    "build, exact", [("b11063", ["weights_mib", "kv_mib"]), ("b11669", ["weights_mib", "kv_mib"]), ("b12000", [])]
)
def test_a_build_beyond_those_that_were_read_has_bounds_alone(pair, build, exact):
    pair.hosts["head"]["variables"]["llama_release"] = build
    assert [entry["exact"] for entry in pair.plan()["placement"]] == [exact, exact]


def test_a_part_of_the_file_that_a_device_uses_where_it_is_mapped_is_not_exact(pair):
    facts = pair.hosts["head"]["facts"]
    facts["accelerators"] = [{**GPU, "backend": "metal", "architecture": "apple", "unified": True}]
    pair.set("head", llama_backend="metal", llama_server_load_mode="mmap")
    assert [entry["exact"] for entry in pair.plan()["placement"]][1:] == [["weights_mib", "kv_mib"], ["kv_mib"]]
    for mode in ("none", None):
        pair.set("head", llama_server_load_mode=mode)
        assert pair.plan()["placement"][-1]["exact"] == ["weights_mib", "kv_mib"]


@pytest.mark.parametrize(
    "name, address, said",
    [
        ("head", "127.0.0.1", ", which only head can reach"),
        ("worker1", "127.0.0.1", ", which only worker1 can reach"),
        ("worker1", "224.0.0.1", ", a multicast or reserved address: use worker1's own"),
        ("worker1", "255.255.255.255", ", a multicast or reserved address: use worker1's own"),
    ],
)
def test_an_address_that_no_other_host_reaches(pair, name, address, said):
    pair.hosts[name]["ansible_host"] = address
    assert f"ansible_host for {name} is '{address}'{said}" in pair.reason()


@pytest.mark.parametrize("variable, value", [("llama_release", "b8700"), ("llama_build_fast_load", True)])
def test_a_release_of_one_host_alone_is_refused(pair, variable, value):
    pair.hosts["worker1"]["variables"][variable] = value
    with pytest.raises(Refusal, match=f"{variable} for worker1 differs from its value for the head head"):
        release_variables(entry.read_cluster("test", pair.hosts), CATALOGUE)


@pytest.fixture
def own(pair):
    """A head with two accelerators of 24 GiB, which it does not lend."""
    pair.hosts["head"]["facts"].update(copy.deepcopy(TWO_CARDS))
    return pair


@pytest.mark.parametrize(
    "endpoint, own_devices, environment",
    [
        ({"device": "CUDA1"}, ["CUDA0"], {"CUDA_VISIBLE_DEVICES": "0"}),
        ({"device": "CUDA0"}, [], {"CUDA_VISIBLE_DEVICES": "-1"}),
        ({"device": "CPU"}, ["CUDA0", "CUDA1"], {}),
    ],
)
def test_a_head_uses_the_devices_before_those_that_it_lends(own, endpoint, own_devices, environment):
    own.hosts["head"]["groups"].append("worker")
    own.hosts["head"]["variables"]["llama_worker_endpoints"] = [endpoint]
    plan = own.plan()
    placed = [entry["device"] for entry in plan["placement"] if entry["host"] == "head"]
    assert placed == ["RPC0[127.0.0.1:50052]", *own_devices]
    assert (plan["head"]["devices"], plan["head"]["environment"]) == (own_devices, environment)


def test_devices_after_those_that_llama_server_uses_are_hidden_from_it(own):
    """They would lose the memory that a driver takes for each program that sees them."""
    own.hosts["head"]["variables"]["llama_placement"] = "fastest"
    plan = own.plan()
    assert (plan["head"]["devices"], plan["head"]["environment"]) == (["CUDA0"], {"CUDA_VISIBLE_DEVICES": "0"})


def test_devices_of_several_kinds_are_counted_as_they_were_found(own):
    own.hosts["head"]["facts"]["accelerators"][1] = {**GPU, "name": "another GPU"}
    assert own.plan()["head"]["environment"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    "release", [{"build": 11434}, {"fork": "ik_llama.cpp", "build": 4840}], ids=["llama.cpp", "ik_llama.cpp"]
)
def test_quantised_values_without_flash_attention(local, release):
    local.set(
        "here",
        llama_release={**TREE, **release},
        llama_server_flash_attention="off",
        llama_server_cache_type_k="q8_0",
        llama_server_cache_type_v="q8_0",
        llama_accept_advisories=["rpc-remote-code-execution"],
    )
    local.reason("set llama_server_flash_attention to 'on' instead of 'off'")
    refused = local.hosts["here"]["variables"]
    attention = [{"llama_server_flash_attention": value} for value in ("on", "auto", None)]
    for remedy in (*attention, {"llama_server_cache_type_v": "f16"}):
        local.hosts["here"]["variables"] = {**refused, **remedy}
        local.accepted()


@pytest.mark.parametrize(
    "given, context",
    [
        (["--override-kv", "llama.context_length=int:6144"], 6144),
        (["--override-kv=llama.context_length=int:9000"], 8192),
        (["--override-kv", "a.b=bool:true,llama.context_length=int:6144,c.d=int:1"], 6144),
        (["--override-kv", "qwen3.context_length=int:6144"], 4096),
        (["--override-kv", "x-llama.context_length=int:6144"], 4096),
        (["--override-kv", "llama.context_length=float:6144"], 4096),
    ],
)
def test_an_operator_may_say_what_context_the_model_has(local, given, context):
    local.hosts["here"]["variables"].update(llama_server_extra_args=given, llama_server_context=8192)
    plan = local.plan()
    assert plan["head"]["context"] == context
    assert f"--ctx-size {context} " in " ".join(plan["head"]["argv"])


GIT = {"source": "git", "ref": "b11434"}
BINARY = {**TREE, "source": "binary", "build": 11434}
BAD_RELEASES = [
    ("latest", ["llama_release", "'latest'", "use a build like b11434"]),
    ("{source: auto}", ["'{source: auto}'", "quotes in an INI inventory"]),
    ("b1274", ["build 1274 of llama.cpp, but the oldest supported build is 11063", "Lemonade", "set build to"]),
    ("b8643", ["llama_release is build 8643 of llama.cpp", "is 11063: use that build or a newer one"]),
    ("v0.4.1", ["asks for 'v0.4.1'", "was not looked up", "add commit"]),
    ({"source": ["git"]}, ["llama_release is {'source': ['git']}", "use a build"]),
    ({"source": "git"}, ["llama_release has no ref", "a tag like b11434"]),
    ({"source": "git", "ref": 11434}, ["llama_release sets ref to 11434", "in quotes"]),
    ({"source": "git", "ref": "--upload-pack=x"}, ["sets ref to '--upload-pack=x'", "a branch"]),
    ({"source": "git", "ref": "main"}, ["asks for 'main'", "was not looked up", "add commit"]),
    (
        {"source": "git", "ref": "main", "commit": "1" * 40},
        ["has no build: set build to the llama.cpp build number of git-1111"],
    ),
    ({**GIT, None: 2}, ["llama_release has the key 'None': use letters"]),
    ({**GIT, "commit": "abc"}, ["sets commit to 'abc'", "all digits of the commit's hash"]),
    ({**GIT, "fork": "other.cpp"}, ["sets fork to 'other.cpp'", "set fork to llama.cpp or ik_llama.cpp"]),
    ({**GIT, "repository": "--upload-pack=x"}, ["sets repository to '--upload-pack=x'", "repository to a git URL"]),
    ({**GIT, "repository": "https://me:secret@host/x"}, ["repository has a password or token", "credential store"]),
    ({**RELEASE, "fork": "ik_llama.cpp"}, ["fork", "source: pypi does not accept"]),
    ({**RELEASE, "commit": 4227912}, ["sets commit to 4227912", "in quotes"]),
    ({**RELEASE, "commit": "release/1"}, ["sets commit to 'release/1'", "at least the first 7 digits"]),
    ({**RELEASE, "patches": "a.patch"}, ["sets patches to 'a.patch'", "use a list of paths"]),
    ({**RELEASE, "checksum": "md5:1"}, ["llama_release", "'md5:1'", "64 hexadecimal digits"]),
    ({**RELEASE, "colour": 1}, ["llama_release", "colour", "use "]),
    ({**RELEASE, "version": "newest; rm"}, ["llama_release", "'newest; rm'", "like 0.3.36"]),
    ({**RELEASE, "version": "0.3.20"}, ["set build to the llama.cpp build number of pypi-0.3.20"]),
    ({"source": "binary", "url": "https://host/x"}, ["has no checksum", "64 hexadecimal"]),
    ({**BINARY, "url": "https://host/x"}, ["set either path (a file on the controller) or url", "or url"]),
    ({**BINARY, "build": None}, ["has no build: set build to the llama.cpp build number of", "binary-bbbbbbbb"]),
    (
        {**BINARY, "source": "archive", "url": "https://host/x.zip"},
        ["x.zip': set url to the http:// or https:// address of a tar archive (repack a .zip as tar, and set path"],
    ),
    ({"source": "archive", "checksum": RELEASE["checksum"], "build": 11434}, ["path", "url"]),
]
BAD_ENDPOINTS = [
    ([{"port": True}], ["sets port to True: use 1 to 65535"]),
    ([{"port": 99999}], ["99999", "65535"]),
    ([{"port": 50052}, {"port": 50052}], ["50052", "its own"]),
    ([{"memory_mib": -5}], ["sets memory_mib to -5: use 1 or more"]),
    ([{"device": "CUDA0"}], ["'CUDA0'", "CPU"]),
    ([{"backend": "hip"}], ["'hip', but no such device is free", "offer only CPU", "llama_backend"]),
    ([{"backend": "hip", "device": "CPU"}], ["'hip'", "device CPU", "remove backend or device"]),
    ([{"name": "a b"}], ["'a b'", "a-z"]),
    ([{"name": "a"}, {"name": "a"}], ["'a'"]),
]
BAD_MODELS = [
    (known_answer_of(width=100), ["llama_model_known_answer", "multiple of 64"]),
    (known_answer_of(kind="q2_k"), ["llama_model_known_answer", "f32, f16, q8_0"]),
    (known_answer_of(layers=0), ["llama_model_known_answer", "use 1 to"]),
    (known_answer_of(layers=1 << 31), ["an impossible model"]),
]


@pytest.mark.parametrize(
    "variables, said",
    [
        *(({"llama_release": value}, said) for value, said in BAD_RELEASES),
        *(
            ({"llama_worker_endpoints": value}, [f"llama_worker_endpoints[{len(value) - 1}] for here", *said])
            for value, said in BAD_ENDPOINTS
        ),
        *(({"llama_model_known_answer": value}, said) for value, said in BAD_MODELS),
        ({"llama_server_context": 0}, ["llama_server_context is 0: use 1 or more"]),
        ({"llama_server_gpu_layers": -1}, ["llama_server_gpu_layers is -1: use 0 or more"]),
        ({"llama_server_tensor_split": [float("nan"), 1]}, ["llama_server_tensor_split[0] is nan", "a finite number"]),
        ({"llama_server_extra_args": ["--jinja --no-webui"]}, ["'--jinja --no-webui' as one argument"]),
        ({"llama_server_extra_args": ["-mla", "3", "-amb", "512"]}, ["has -mla, -amb", "only ik_llama.cpp", "remove"]),
        ({"llama_backend": "cudaa"}, ["llama_backend for here is 'cudaa'", "vulkan"]),
        ({"llama_backend": "cuda"}, ["llama_backend for here is cuda", "no such device", "llama_hardware"]),
        ({"llama_server_port": 50052}, ["llama_server_port is 50052", "change llama_server_port, or port in"]),
        ({"llama_server_host": "headbox"}, ["llama_server_host is 'headbox'", "numeric"]),
        ({"llama_server_cache_type_k": "q9"}, ["llama_server_cache_type_k is 'q9'", "q8_0"]),
        ({"llama_server_api_key_file": "keys"}, ["llama_server_api_key_file is 'keys'", "absolute path on the head"]),
        ({"llama_model_known_answer": None, "llama_model_path": "/m.gguf"}, ["/m.gguf", "reachable"]),
        ({"llama_build_cmake_options": {"GGML_NATIVE": ["a"]}}, ["llama_build_cmake_options for here sets"]),
    ],
)
def test_bad_input_is_one_sentence_with_variable_value_and_remedy(local, variables, said):
    local.hosts["here"]["variables"].update(variables)
    local.reason(*said)


@pytest.mark.parametrize("address", ["198.51.100.300/24", "198.51.100.1/99", "fd00::1/64", "head.direct", ""])
def test_no_address_of_a_link_is_passed_over(pair, address):
    """The worker was opened to another address of the head, from which nobody comes."""
    pair.hosts["head"]["variables"]["llama_links"] = [{"address": address}]
    pair.hosts["worker1"]["variables"]["llama_links"] = [{"address": "198.51.100.2/24"}]
    assert f"[0].address for head is {address!r}: use the numeric IPv4 address of head on this link" in pair.reason()
    pair.hosts["head"]["variables"]["llama_links"] = [{"address": "198.51.100.1", "interface": "eth1", "manage": True}]
    assert "llama_links[0].address for head is '198.51.100.1': use" in pair.reason(), "without a prefix"


def test_no_compiler_and_no_root(local):
    local.hosts["here"]["facts"].update(scope="user", toolchain={"cmake": "3.31"})
    local.reason("here lacks ninja, c++", "llama_host_scope", "ninja-build, g++")
    local.hosts["here"]["facts"]["scope"] = "system"
    plan = local.accepted()
    assert plan["hosts"]["here"]["tools"] == {"cmake": "cmake", "ninja": "ninja-build", "c++": "g++"}
    assert plan["hosts"]["here"]["optional_tools"] == {"ccache": "ccache"}


@pytest.mark.parametrize(
    "facts, said",
    [
        ({"distribution": {"id": "plan9", "version": "4", "family": "unknown"}, "toolchain": {}}, "plan9"),
        ({"python": None}, "python3"),
    ],
    ids=["no package", "python"],
)
def test_a_host_that_cannot_build_or_start_services(local, facts, said):
    local.hosts["here"]["facts"].update(facts)
    assert said in local.reason()


@pytest.mark.parametrize("version", ["9.4.0", "17.0.0"])
def test_a_compiler_that_is_new_enough(local, version):
    local.hosts["here"]["facts"]["toolchain"]["c++"] = version
    assert not local.plan()["refused"]


def test_two_hosts_with_one_address(pair):
    pair.hosts["worker2"]["ansible_host"] = "192.0.2.11"
    assert "worker2 and worker1 both have the worker 192.0.2.11:50052" in pair.reason()
    pair.hosts["worker2"]["variables"]["llama_worker_endpoints"] = [{"port": 50062}]
    assert "worker2 and worker1 both have the address 192.0.2.11" in pair.reason()


def test_two_heads_and_none(pair):
    pair.hosts["worker1"]["groups"] = ["head"]
    assert "2 hosts" in pair.reason()
    pair.hosts["worker1"]["groups"] = pair.hosts["head"]["groups"] = ["worker"]
    assert "0 hosts" in pair.reason()


@pytest.mark.parametrize(
    "endpoints, said",
    [
        ([{"device": "CUDA0", "name": "a"}, {"device": "CUDA0", "name": "b"}], ["another entry already lends"]),
        (
            [{"backend": "cuda"}] * 3,
            ["endpoints[2] for here sets backend to 'cuda', but no such device is free", "CUDA0, CUDA1"],
        ),
    ],
)
def test_more_workers_than_accelerators(local, endpoints, said):
    local.hosts["here"]["facts"].update(TWO_CARDS)
    local.hosts["here"]["variables"]["llama_worker_endpoints"] = endpoints
    local.reason(*said)


def test_a_model_that_does_not_fit_says_how_much_is_missing_where(pair, big_model):
    pair.hosts["worker2"]["facts"]["memory_mib"] = 16384
    plan = serving(pair, big_model).plan()
    assert plan["refused"]
    assert not plan["fits"]
    told = re.fullmatch(
        r"the model does not fit: it exceeds the devices' capacity by (\d+) MiB \((\d+) on 192\.0\.2\.11:50052 \(worker1\), whose capacity is \d+; "
        r"(\d+) on 192\.0\.2\.12:50052 \(worker2\), whose capacity is \d+\): add a worker, .*",
        plan["reasons"][0],
    )
    missing = [math.ceil(entry["weights_mib"] + entry["kv_mib"] - entry["capacity_mib"]) for entry in plan["placement"]]
    assert [int(told[2]), int(told[3])] == missing
    assert int(told[1]) == sum(missing)


def test_a_small_host_that_lends_nothing_is_told_how_it_would(pair):
    pair.hosts["head"]["variables"]["llama_placement"] = "all"
    pair.hosts["worker1"]["facts"]["memory_mib"] = pair.hosts["worker2"]["facts"]["memory_mib"] = 1900
    reason = pair.plan()["reasons"][0]
    assert "whose capacity is 0" in reason
    assert "; all memory of worker1, worker2 is reserved for the system" in reason
    for name in ("worker1", "worker2"):
        pair.hosts[name]["variables"]["llama_worker_endpoints"] = [{"name": "cpu", "memory_mib": 900}]
    assert not pair.plan()["refused"]


@pytest.mark.parametrize(
    "hardware, expected",
    [
        ({"system": "Darwin", "home": "/Users/u"}, {"units": "/Users/u/Library/LaunchAgents", "packaged": None}),
        (
            {"distribution": "fedora 43", "home": "/home/u"},
            {"distribution": {"id": "fedora", "version": "43", "family": "redhat"}, "service_manager": "systemd_user"},
        ),
        ({"home": "/home/u"}, {"units": "/home/u/.config/systemd/user"}),
        ({}, {"prefix": "~/.local/share/llamacpp"}),
    ],
    ids=["a Mac", "a distribution", "units", "a home that nobody told is not guessed"],
)
def test_what_follows_from_declared_hardware_of_an_ordinary_user(hardware, expected):
    facts = entry.merge_hardware("here", None, hardware, "user")
    assert {name: facts[name] for name in expected} == expected


def test_a_declared_distribution_has_a_package_of_llama_cpp_or_none():
    for name, packaged in (("ubuntu 26.04", True), ("debian 14", True), ("debian forky", True), ("debian 13", False)):
        assert bool(entry.merge_hardware("here", None, {"distribution": name})["packaged"]) is packaged


def test_what_stands_in_for_facts_never_replaces_them():
    found = {"memory_mib": 1, "system": "Linux", "distribution": {"id": "debian"}, "scope": "system"}
    hardware = {"memory_mib": 2, "system": "Darwin", "distribution": "fedora 43", "home": "/x", "cores": 3}
    assert entry.merge_hardware("here", found, hardware, "user") == {**found, "memory_mib": 2}
    assert entry.merge_hardware("here", None, None) is None


@pytest.mark.parametrize(
    "hardware, scope, said",
    [
        ({"service_manager": "launchd"}, "auto", ["sets service_manager to launchd", "use systemd or supervisor"]),
        ({"service_manager": "systemd", "home": "/h"}, "user", ["llama_host_scope user", "use systemd_user"]),
        ({"toolchain": {"cmake": 3.28}}, "auto", ["toolchain.cmake to 3.28: put the version in quotes"]),
    ],
)
def test_declared_hardware_that_cannot_be(hardware, scope, said):
    with pytest.raises(Refusal) as raised:
        entry.merge_hardware("here", None, hardware, scope)
    for part in ("here", *said):
        assert part in str(raised.value)


PACKAGED = {
    "distribution": {"id": "debian", "version": "14", "family": "debian"},
    "packaged": {"version": "0.7.0", "installed": []},
    "toolchain": {},
}


def packaged(pair, **more):
    for host in pair.hosts.values():
        host["facts"].update({**PACKAGED, **more})
        host["variables"]["llama_release"] = {"source": "package"}
    return pair


def test_a_distributions_package_needs_no_toolchain(pair):
    plan = packaged(pair).accepted()
    assert plan["release"]["protocol"] == "8.0.0"
    head, worker = plan["hosts"]["head"], plan["hosts"]["worker1"]
    assert head["tools"] == {"libggml0-backend-rpc": "libggml0-backend-rpc", "llama.cpp-tools": "llama.cpp-tools"}
    assert set(worker["tools"]) == {"libggml0-backend-rpc", "llama.cpp-tools-extra"}
    assert worker["builds"][0]["packaged"] == {
        "ggml-rpc-server": "/usr/libexec/x86_64-linux-gnu/llama/bin/ggml-rpc-server"
    }
    assert [account["name"] for account in worker["accounts"]] == ["llamacpp"]


def test_a_packaged_version_that_is_not_known_needs_its_build(pair):
    assert packaged(pair).plan()["placement"][0]["exact"] == ["weights_mib", "kv_mib"]
    newer = packaged(pair, packaged={"version": "0.9.1", "installed": []})
    newer.reason("llama_release has no build: set build to the llama.cpp build number of package-0.9.1")
    for host in newer.hosts.values():
        host["variables"]["llama_release"] = {"source": "package", "build": 12345}
    assert newer.plan()["release"]["build"] == 12345


@pytest.mark.parametrize(
    "facts, said",
    [
        ({"packaged": {"version": None, "installed": []}}, ["worker1 none", "apt update", "source: pypi"]),
        ({"packaged": None}, ["head 0.7.0, worker1 none"]),
        ({"packaged": {"version": "0.6.0", "installed": []}}, ["have no common llama.cpp package", "worker1 0.6.0"]),
        ({"scope": "user"}, ["worker1 lacks libggml0-backend-rpc", "ask an administrator to install"]),
        (
            {"distribution": {"id": "fedora", "version": "43", "family": "redhat"}},
            ["no package of llama.cpp is known for fedora (worker1): use source: pypi"],
        ),
    ],
)
def test_packages_that_cannot_be_used(pair, facts, said):
    packaged(pair).hosts["worker1"]["facts"].update(facts)
    pair.reason(*said)


def test_a_summary_of_the_inventory_stands_in_for_the_file_until_it_is_read(local, big_model):
    here = local.hosts["here"]
    here["facts"]["memory_mib"] = 1 << 20
    here["variables"].update(llama_model_path="/srv/m.gguf", llama_model_known_answer=None)
    here["variables"]["llama_model_gguf_summary"] = big_model
    assert local.plan()["model"]["layers"] == 80
    tensors = [{**row, "layers": row["layers"] and row["layers"][:40]} for row in big_model["tensors"]]
    local.model = {"summary": {**big_model, "layers": 40, "layer_bytes": [1 << 30] * 40, "tensors": tensors}}
    assert local.plan()["model"]["layers"] == 40


@pytest.mark.parametrize(
    "change, said",
    [
        ({"heads": 0}, "heads is 0: set llama_model_gguf_summary to a summary from model_info"),
        ({"vocabulary": None}, "vocabulary is None: set llama_model"),
        ({"layer_bytes": [1] * 79}, "layer_bytes has the sizes of 79 layers, not 80"),
    ],
)
def test_a_summary_that_cannot_be_right(local, big_model, change, said):
    variables = local.hosts["here"]["variables"]
    variables.update(llama_model_path="/srv/m.gguf", llama_model_known_answer=None)
    variables["llama_model_gguf_summary"] = {**big_model, **change}
    reason = local.reason()
    assert reason.startswith("llama_model_gguf_summary.")
    assert said in reason
    assert reason.endswith(": set llama_model_gguf_summary to a summary from model_info")


@pytest.mark.parametrize(
    "path, found, facts, said",
    [
        (
            "/home/u/m.gguf",
            {"unreadable_path": "/home/u v"},
            {},
            ["the service account llamacpp cannot read", "chmod o+rX '/home/u v'"],
        ),
        ("/tmp/m.gguf", {}, {}, ["services cannot see the host's /tmp", "move the model to /srv"]),
        ("/home/u/m.gguf", {"unreadable_path": "/home/u"}, {"scope": "user", "service_manager": "systemd_user"}, None),
        ("/srv/m.gguf", {"unreadable_path": None}, {}, None),
    ],
)
def test_a_model_that_the_service_cannot_read(local, big_model, path, found, facts, said):
    here = local.hosts["here"]
    here["variables"].update(llama_model_path=path, llama_model_known_answer=None)
    here["facts"].update({"memory_mib": 1 << 20, **facts})
    local.model = {"summary": big_model, **found}
    if said is None:
        assert not local.plan()["refused"]
    else:
        local.reason(*said)


def test_api_keys_are_handed_over_by_systemd_and_read_by_the_service_elsewhere(local):
    here = local.hosts["here"]
    here["variables"]["llama_server_api_key_file"] = "/etc/llama.key"
    plan = local.plan()
    assert plan["hosts"]["here"]["services"][-1]["credentials"] == {"api-keys": "/etc/llama.key"}
    assert plan["head"]["api_key_file"] == "/etc/llama.key"
    here["facts"].update(service_manager="supervisor")
    argv = local.plan()["head"]["argv"]
    assert argv[argv.index("--api-key-file") + 1] == "/etc/llama.key"


@pytest.mark.parametrize("asked, limit", [(None, 4), (1, 4), (500, 500)])
def test_a_cache_holds_what_was_asked_for_and_never_less_than_the_model_needs(pair, asked, limit):
    pair.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"cache": True, "cache_mib": asked}]
    worker = pair.plan()["hosts"]["worker1"]
    service = worker["services"][0]
    launcher = "/usr/bin/python3 /opt/llamacpp/runtime/runtime-id/runtime.py"
    own = f"worker --port 50052 --cache /opt/llamacpp/state/cache/cpu/rpc --limit-mib {limit} --"
    assert service["argv"] == [*launcher.split(), *own.split(), *service["process"]]
    assert service["process"][-1] == "-c"
    assert service["environment"] == {**SPIN_ENVIRONMENT, "LLAMA_CACHE": "/opt/llamacpp/state/cache/cpu"}
    assert worker["runtime"] == "/opt/llamacpp/runtime/runtime-id"


def test_there_is_no_package_for_cuda(pair):
    packaged(pair).hosts["worker1"]["facts"].update(accelerators=[GPU], toolchain={"nvcc": "12.9"})
    assert pair.plan()["hosts"]["worker1"]["builds"][0]["backend"] == "cpu"
    pair.set("worker1", llama_backend="cuda")
    pair.reason("llama_backend for worker1 is cuda, but debian has no package for this backend")


def test_links_are_managed_by_root_on_systemd_only(pair):
    pair.hosts["worker1"]["variables"]["llama_links"] = [{"address": "198.51.100.2/30", "manage": True}]
    pair.hosts["worker1"]["facts"]["service_manager"] = "supervisor"
    assert "llama_links for worker1 has manage: true, which needs systemd" in pair.reason()


@pytest.mark.parametrize(
    "name, tool, package, changes",
    [
        ("worker1", "useradd", "passwd", {}),
        ("worker1", "useradd", "shadow-utils", {"distribution": {"id": "fedora", "version": "43", "family": "redhat"}}),
        ("worker1", "useradd", "shadow", {"distribution": {"id": "arch", "version": "", "family": "arch"}}),
        ("worker1", "useradd", None, {"scope": "user", "service_manager": "systemd_user"}),
        ("worker1", "setfacl", None, {"llama_metrics": "off"}),
        ("worker1", "setfacl", "acl", {"llama_metrics": "textfile"}),
        ("worker1", "curl", None, {}),
        ("head", "curl", "curl", {}),
    ],
)
def test_what_accounts_metrics_and_downloads_need_is_installed_where_it_is_missing(pair, name, tool, package, changes):
    host = pair.hosts[name]
    for key, value in changes.items():
        host["facts" if key in host["facts"] else "variables"][key] = value
    for version, expected in (("installed", None), (None, package)):
        host["facts"]["toolchain"][tool] = version
        assert pair.plan()["hosts"][name]["tools"].get(tool) == expected


def tuned(pair, **variables):
    worker = pair.hosts["worker1"]
    worker["facts"].update(memory_mib=128200, accelerators=strix_halo()["accelerators"][:1])
    worker["variables"].update(llama_host_tuning=True, **variables)
    return worker


def test_tuning_is_planned_where_it_is_asked_for(pair):
    tuned(pair, llama_host_tuning_gtt_mib=126976)
    hosts = pair.plan()["hosts"]
    assert hosts["worker1"]["tuning"] == {
        "parameters": {"amdgpu.gttsize": "126976", "ttm.pages_limit": "32505856"},
        "reboot": False,
    }
    assert hosts["worker2"]["tuning"] == {"parameters": {}, "reboot": False}


def test_graphics_are_planned_with_what_the_kernel_lends_them_after_the_reboot(pair):
    tuned(pair, llama_host_reboot=True)["facts"]["accelerators"][0]["memory_mib"] = 65536
    host = entry.read_cluster("test", pair.hosts).hosts["worker1"]
    assert [device.memory_mib for device in host.facts.accelerators] == [128200 - 4096]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda worker: worker["facts"].update(accelerators=[]), "no AMD GPU with shared memory"),
        (lambda worker: worker["facts"].update(service_manager="supervisor"), "needs systemd"),
        (
            lambda worker: worker["variables"].update(llama_host_tuning_gtt_mib=130000),
            "llama_host_tuning for worker1 would let the integrated GPU use 130000 of",
        ),
    ],
)
def test_tuning_that_cannot_be(pair, change, said):
    change(tuned(pair))
    assert said in pair.reason()


def test_an_account_of_somebody_elses(pair):
    pair.hosts["worker1"]["facts"]["accounts"] = {"llamacpp": "/opt/llamacpp", "llamacpp-build": "/opt/llamacpp"}
    assert not pair.plan()["refused"]
    pair.hosts["worker1"]["facts"]["accounts"]["llamacpp"] = "/home/llamacpp"
    assert "worker1 already has an account llamacpp with another home directory (/home/llamacpp)" in pair.reason()


def test_programs_that_are_compiled_already_are_for_one_architecture(pair):
    for host in pair.hosts.values():
        host["variables"]["llama_release"] = BINARY
    pair.hosts["worker2"]["facts"]["architecture"] = "aarch64"
    assert "(head x86_64, worker1 x86_64, worker2 aarch64): use source: git" in pair.reason()


TWO_GENERATIONS = {
    "llama_release_vulkan": {"source": "archive", "path": "/b11434", "checksum": "sha256:" + "1" * 64, "build": 11434},
    "llama_release_hip": {"source": "archive", "path": "/b11669", "checksum": "sha256:" + "2" * 64, "build": 11669},
}


@pytest.fixture
def both(pair):
    """A worker with builds for Vulkan and HIP side by side, each of a release of its own."""
    facts = {"accelerators": strix_halo(65536)["accelerators"], "toolchain": TOOLS}
    for name in ("head", "worker1"):
        pair.hosts[name]["facts"].update(copy.deepcopy(facts))
        pair.hosts[name]["variables"].update(llama_backend=["vulkan", "hip"])
    pair.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [
        {"backend": "vulkan", "port": 50053},
        {"backend": "hip", "port": 50054},
    ]
    pair.hosts["head"]["variables"].update(**TWO_GENERATIONS)
    del pair.hosts["worker2"]
    return pair


@pytest.mark.parametrize("backend, device, build", [("vulkan", "Vulkan0", 11434), ("hip", "ROCm0", 11669)])
def test_backends_run_side_by_side_and_the_head_uses_one(both, backend, device, build):
    both.hosts["head"]["variables"]["llama_server_backend"] = backend
    plan = both.accepted()
    worker = plan["hosts"]["worker1"]
    assert plan["release"]["build"] == build
    assert [(entry["device"], entry["used"]) for entry in worker["workers"]] == [
        ("Vulkan0", device == "Vulkan0"),
        ("ROCm0", device == "ROCm0"),
    ]
    assert plan["head"]["devices"] == [device]
    targets = {build["backend"]: build["targets"] for build in plan["hosts"]["head"]["builds"]}
    assert targets[backend] == ["ggml-rpc-server", "llama-server"]


@pytest.mark.parametrize(
    "name, variable, value, said",
    [
        ("worker1", "llama_backend", [], "llama_backend for worker1 is []"),
        ("worker1", "llama_backend", ["auto", "hip"], "a list of different backends without auto"),
        ("worker1", "llama_backend", ["hip", "hip"], "a list of different backends without auto"),
        ("worker1", "llama_backend", ["hip", "rocm"], "llama_backend for worker1 is 'rocm'"),
        ("worker1", "llama_backend", {"hip": 1}, "llama_backend for worker1 is {'hip': 1}"),
        ("head", "llama_server_backend", "cuda", "'cuda', for which no host has a build: use one of hip, vulkan"),
        ("head", "llama_release_hip", {"source": "pypi"}, "llama_release_hip has no version"),
        ("head", "llama_release_hip", {"source": "package"}, "llama_release_hip has source: package"),
    ],
)
def test_backends_and_their_releases_that_cannot_be(both, name, variable, value, said):
    both.set(name, **{variable: value})
    both.reason(variable, said)


def test_a_head_and_workers_of_different_releases(both):
    both.hosts["worker1"]["variables"].update(llama_backend="hip", llama_worker_endpoints=None)
    both.reason(
        "the head serves with vulkan, but no worker has a build of the same release: set llama_server_backend to hip"
    )
    both.hosts["head"]["variables"]["llama_server_backend"] = "hip"
    assert not both.plan()["refused"]


@pytest.mark.parametrize("arguments, refused", [([], True), (["--kv-unified"], False)])
def test_more_requests_than_tokens_of_context(pair, arguments, refused):
    """Requests divide the context in whole tokens, so each would have none."""
    pair.set("head", llama_server_context=200, llama_server_parallel=300, llama_server_extra_args=arguments)
    plan = pair.plan()
    assert plan["refused"] is refused, plan["reasons"]
    if refused:
        assert "llama_server_parallel is 300, but the requests share a context of only 200 tokens" in plan["reasons"][0]


@pytest.mark.parametrize("kind", ["f", "another kind"])
def test_changing_between_backends_that_stand_side_by_side_builds_nothing(both, kind):
    both.hosts["head"]["facts"]["cpu"]["features_id"] = kind

    def builds(backend):
        both.hosts["head"]["variables"]["llama_server_backend"] = backend
        plan = both.plan()
        assert f"-{backend}-" in plan["head"]["argv"][0]
        return [[build["id"] for build in host["builds"]] for host in plan["hosts"].values()]

    assert builds("vulkan") == builds("hip")


def test_a_release_is_the_same_wherever_it_lies():
    def id_of(**value):
        return releases.release_of(release_request.request_of(value), {}).id

    archive = {"source": "archive", "checksum": "sha256:" + "a" * 64, "build": 11434}
    places = ({"path": "/a"}, {"path": "/b"}, {"url": "https://192.0.2.1/c"})
    assert len({id_of(**archive, **place) for place in places}) == 1
    commit = {"source": "git", "ref": "b11434", "commit": "c" * 40}
    assert id_of(**commit) == id_of(**commit, repository="/srv/git/x")


def test_a_toolkit_is_for_one_of_several_backends(both):
    own = {"backend": "hip", "prefix": "/opt/rocm-7.2.0", "links": [], "version": "7.2.0"}
    both.hosts["worker1"]["facts"]["toolchains"] = [{**own, "compiler": "/opt/rocm-7.2.0/llvm/bin/clang"}]
    both.hosts["worker1"]["variables"]["llama_build_toolchain"] = "/opt/rocm-7.2.0"
    environments = [build["environment"] for build in both.plan()["hosts"]["worker1"]["builds"]]
    assert environments[0] == {}
    assert environments[1]["ROCM_PATH"] == "/opt/rocm-7.2.0"


BRANCH = {"source": "git", "repository": "https://git.invalid/llama.cpp", "ref": "master"}


def test_only_releases_of_which_a_host_has_a_build_are_looked_up(both, monkeypatch):
    looked_up = []
    monkeypatch.setattr(sources, "resolve", lambda request, find: looked_up.append(request.ref) or request)
    variables = both.hosts["head"]["variables"]
    variables.update({f"llama_release_{name}": {**BRANCH, "ref": name} for name in ("cpu", "vulkan", "hip", "cuda")})
    variables["llama_release"] = BRANCH
    both.hosts["worker1"]["variables"].update(variables)
    sources.look_up(str, entry.read_cluster("test", both.hosts), CATALOGUE)
    assert looked_up == ["vulkan", "hip"]
    for host in both.hosts.values():
        host["variables"]["llama_release_hip"] = None
    looked_up.clear()
    sources.look_up(str, entry.read_cluster("test", both.hosts), CATALOGUE)
    assert looked_up == ["vulkan", "master"]


def test_a_branch_of_a_backend_that_no_host_has_is_no_part_of_the_plan(pair):
    before = pair.plan()
    pair.hosts["head"]["variables"]["llama_release_hip"] = BRANCH
    assert pair.plan() == before
    pair.hosts["head"]["variables"]["llama_release_hip"] = {**BRANCH, "ref": ".."}
    assert "llama_release_hip sets ref to '..'" in pair.reason()


def test_values_of_an_environment_become_text_as_programs_read_it(local):
    variables = local.hosts["here"]["variables"]
    variables["llama_server_environment"] = {"radv_enable_unified_heap_on_apu": True, "NUMBER": 1, "TEXT": "a b"}
    variables["llama_worker_endpoints"][0]["environment"] = {"FLAG": False}
    plan = local.plan()
    expected = {"radv_enable_unified_heap_on_apu": "true", "NUMBER": "1", "TEXT": "a b"}
    assert plan["head"]["environment"] == expected
    assert plan["hosts"]["here"]["workers"][0]["environment"] == {**SPIN_ENVIRONMENT, "FLAG": "false"}


@pytest.mark.parametrize("value", [None, {"a": 1}, ["a"]])
def test_what_is_no_value_of_an_environment(local, value):
    local.hosts["here"]["variables"]["llama_server_environment"] = {"NAME": value}
    assert f"llama_server_environment sets NAME to {value!r}: use text" in local.reason()
    local.hosts["here"]["variables"]["llama_server_environment"] = {}
    local.hosts["here"]["variables"]["llama_worker_endpoints"][1]["environment"] = {"NAME": value}
    assert "environment in llama_worker_endpoints[1] for here sets NAME" in local.reason()


@pytest.mark.parametrize("folder", ["", "cache", "~/cache"])
def test_a_cache_has_a_whole_path_since_its_files_are_removed(local, folder):
    endpoint = {"name": "one", "cache": True, "environment": {"LLAMA_CACHE": folder}}
    local.hosts["here"]["variables"]["llama_worker_endpoints"] = [endpoint]
    assert f"LLAMA_CACHE for the worker one on here is {folder!r}: use the absolute path" in local.reason()


def test_names_that_no_environment_can_have(local):
    for name in ("A\nUser=root", "MY-VAR", "A B", "1A", 'A"B', "", "LLAMA_ARG_SPLIT_MODE=row", 1):
        local.hosts["here"]["variables"]["llama_server_environment"] = {name: "x"}
        assert f"llama_server_environment has the key {str(name)!r}: use letters" in local.reason()


def mla(cluster, **cpu):
    """A model with split MLA, of which the head computes the first layers."""
    cluster.hosts["head"]["facts"]["cpu"].update(cpu)
    cluster.set("head", llama_model_known_answer=None, llama_model_path="/models/mla.gguf", llama_server_gpu_layers=4)
    summary = known_answer.summary(16, 128, "f32")
    row = tensor("blk.*.attn_k_b.weight", "F16", [64, 64, 2], 16384, 16)
    cluster.model = {"summary": {**summary, "architecture": "deepseek2", "tensors": [*summary["tensors"], row]}}
    return cluster


@pytest.mark.parametrize(
    "change, repacked",
    [
        ({}, False),
        ({"llama_server_gpu_layers": None, "llama_server_override_tensor": ["attn_k_b=CPU"]}, False),
        ({"llama_server_gpu_layers": None}, True),
        ({"llama_server_gpu_layers": None, "llama_server_override_tensor": ["ffn_=CPU"]}, True),
        ({"llama_release": FORK, "llama_accept_advisories": ["rpc-remote-code-execution"]}, True),
    ],
    ids=["first layers on the head", "by an override", "none on the head", "experts alone", "ik_llama.cpp"],
)
def test_latent_attention_on_a_head_with_amx_is_not_repacked(pair, change, repacked):
    mla(pair, amx=True)
    for host in pair.hosts.values():
        host["variables"].update(change)
    plan = pair.accepted()
    assert ("--no-repack" not in plan["head"]["argv"]) is repacked


def test_the_ports_of_a_worker_are_tried_by_its_host_and_the_next_two():
    cluster = Cluster().add("head", "head", address="192.0.2.10", llama_model_known_answer=known_answer_of())
    for number in range(1, 5):
        cluster.add(f"worker{number}", "worker", address=f"192.0.2.1{number}")
    cluster.hosts["worker2"]["facts"].update(has_unit_filter=False, firewall="ufw")
    cluster.hosts["worker4"]["facts"].update(service_manager="supervisor")
    cluster.hosts["head"]["variables"]["llama_accept_advisories"] = ["unprotected-worker"]
    tried = {name: host["port_probes"] for name, host in cluster.plan()["hosts"].items()}
    endpoint = "192.0.2.1{}:50052".format
    assert tried == {
        "head": [],
        "worker1": [endpoint(1), endpoint(2), endpoint(3)],
        "worker2": [endpoint(3)],
        "worker3": [endpoint(3), endpoint(1)],
        "worker4": [endpoint(1), endpoint(2)],
    }


def test_a_backend_without_a_device_names_those_that_have_one(pair):
    facts = pair.hosts["worker1"]["facts"]
    facts["accelerators"] = strix_halo(16384)["accelerators"]
    pair.hosts["worker1"]["variables"]["llama_backend"] = "cuda"
    said = (
        "llama_backend for worker1 is cuda, but that host has no such device: set llama_backend to hip, vulkan or cpu"
    )
    assert said in pair.reason()
    facts["toolchain"].update(hipconfig="7.2", glslc="2025")
    for other in ("hip", "vulkan", "cpu"):
        pair.hosts["worker1"]["variables"]["llama_backend"] = other
        assert not pair.plan()["refused"]


@pytest.mark.parametrize(
    "architecture, said",
    [
        ("dream", "a diffusion model"),
        ("llada", "a diffusion model"),
        ("t5", "an encoder-decoder model"),
        ("eagle3", "a draft model: set llama_model_draft to this file"),
        ("wavtokenizer-dec", "a vocoder"),
        ("qwen3tts", "a speech model"),
        ("clip", "a projector"),
    ],
)
def test_a_model_of_which_llama_server_makes_nothing_has_no_plan(pair, architecture, said):
    reason = serving(pair, on_paper(1, architecture=architecture)).reason()
    assert reason.startswith(f"llama_model_path is on paper, {said}")


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"llama_backend": "rocm"}, "is 'rocm': use hip"),
        ({"llama_backend": "CUDA"}, "is 'CUDA': use cuda"),
        ({"llama_release": 11434}, "is 11434, which is not valid: use b11434"),
    ],
)
def test_other_words_for_what_a_variable_takes(local, variables, said):
    local.set("here", **variables)
    assert local.reason().endswith(said)


def test_a_number_of_requests_that_is_none_is_refused_of_embeddings_too(pair):
    pair = serving(pair, on_paper(1, architecture="bert"), llama_server_parallel=0)
    assert "llama_server_parallel is 0: use 1 or more" in pair.reason()


@pytest.mark.parametrize(
    "summary, variables, words, micro_batch",
    [
        ({"architecture": "bert"}, {}, ["--embeddings"], 2048),
        ({"keys": {"pooling_type": 3}}, {"llama_server_parallel": 4}, ["--embeddings"], 1024),
        ({"keys": {"pooling_type": 4}}, {"llama_server_micro_batch": 256}, ["--reranking"], 256),
        ({"architecture": "bert"}, {"llama_server_extra_args": ["--rerank"]}, ["--rerank"], 2048),
    ],
)
def test_a_model_for_embeddings_is_served_as_one_without_a_speed_of_generation(
    pair, summary, variables, words, micro_batch
):
    pair = serving(pair, on_paper(1, **summary), llama_server_context=4096, llama_placement="all", **variables)
    plan = pair.accepted()
    argv, estimate = plan["head"]["argv"], plan["estimate"]
    assert [word for word in argv if "embed" in word or "rerank" in word] == words
    assert argv[argv.index("--ubatch-size") + 1] == str(micro_batch)
    assert (estimate["generation_tokens_per_s"], estimate["at_context"]) == (None, [])
    assert estimate["prompt_tokens_per_s"] > 0
    assert {one["generation_tokens_per_s"] for one in (estimate["best_single_host"], *plan["fallbacks"])} == {None}
    assert plan["fallbacks"]
    assert not plan["head"]["checkpoints_mib"]
    page = plan_text.plan_page(typed(plan))
    assert "none: this model generates no text" in page
    assert "conversation" not in page.partition("Predicted speed")[2].lower().replace("no conversations are", "")
    assert "proof" not in page
    path = "/v1/embeddings" if "--embeddings" in words else "/v1/rerank"
    assert f"127.0.0.1:8080{path} " in " ".join(plan_text.request_lines(typed(plan)))

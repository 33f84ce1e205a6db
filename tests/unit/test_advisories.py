"""Every advisory is met where it must be, says what to do, and is silent once that was done and on healthy plans."""

import copy

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import advisories
from conftest import Cluster, known_answer_of

GIB = 1 << 30
TREE = {"source": "archive", "path": "/tmp/x.tar.gz", "checksum": "sha256:" + "b" * 64}
FORK = {**TREE, "fork": "ik_llama.cpp", "build": 4840}
TOOLS = {
    "cmake": "3.31",
    "ninja": "1.12",
    "c++": "14.2",
    "venv": "1.0",
    "glslc": "2025",
    "hipconfig": "7.2",
    "nvcc": "12.9",
}
NVIDIA = {"backend": "cuda", "name": "GPU", "architecture": "8.6", "memory_mib": 24576, "unified": False}


def strix_halo(memory=126976):
    """What host_info finds on such a host, on paper: one device, for two backends."""
    device = {"name": "AMD gfx1151", "memory_mib": memory, "unified": True}
    return {
        "memory_mib": 126976 + 2048,
        "kernel": "6.18.10-200.fc43.x86_64",
        "firmware": "20260110",
        "toolchain": TOOLS,
        "accelerators": [
            {**device, "backend": "hip", "architecture": "gfx1151"},
            {**device, "backend": "vulkan", "architecture": ""},
        ],
    }


def model(gib, layers=61, **more):
    """Summary of a model on paper, with its weights in equal layers."""
    return {
        **{"architecture": "llama", "name": "on paper", "layers": layers, "width": 7168, "heads": 128, "kv_heads": 1},
        **{"key_dimension": 576, "value_dimension": 512, "context": 4096, "vocabulary": 129280},
        "layer_bytes": [int(gib * GIB) // layers] * layers,
        "input_bytes": 497 << 20,
        "output_bytes": GIB,
        **more,
    }


def strix_halos(count, gib, backend="hip", build=8600, **variables):
    """Hosts as in the notes of a cluster of four; the head is one of the workers."""
    cluster = Cluster()
    for index in range(count):
        groups = ["head", "worker"] if not index else ["worker"]
        cluster.add(
            f"strix{index}",
            *groups,
            address=f"192.0.2.{11 + index}",
            facts=strix_halo(),
            llama_backend=backend,
            llama_release={**TREE, "build": build},
            llama_model_path="/srv/model.gguf",
            **variables,
        )
    cluster.model = {"summary": model(gib)}
    return cluster


def cluster_of(workers=2, facts=None, build=None, head_facts=None, **variables):
    """A head and workers that serve the known-answer model."""
    release = {"llama_release": {**TREE, "build": build}} if build else {}
    model = known_answer_of()
    cluster = Cluster().add(
        "head", "head", facts=head_facts, llama_model_known_answer=model, **{**release, **variables}
    )
    for index in range(workers):
        cluster.add(
            f"worker{index + 1}", "worker", address=f"192.0.2.{11 + index}", facts=facts, **{**release, **variables}
        )
    return cluster


def with_model(cluster, accepted=("slower-than-one-host",), **summary):
    """Serves a small model, which one host alone would serve faster."""
    cluster.hosts["head"]["variables"].update(
        llama_model_known_answer=None, llama_model_path="/srv/m.gguf", llama_accept_advisories=list(accepted)
    )
    cluster.model = {"summary": {**model(1, layers=16), **summary}}
    return cluster


def setting(name, **values):
    """Changes variables of a host."""
    return lambda cluster: cluster.hosts[name]["variables"].update(values)


def being(name, **values):
    """Changes facts of a host."""
    return lambda cluster: cluster.hosts[name]["facts"].update(values)


def everywhere(change):
    def apply(cluster):
        for host in cluster.hosts.values():
            change(host)

    return apply


def released(**release):
    return everywhere(lambda host: host["variables"].update(llama_release=release))


def graphics(backend):
    return everywhere(lambda host: host["variables"].update(llama_backend=backend))


def quantised(source, build):
    return cluster_of(
        1,
        facts={"accelerators": [NVIDIA], "toolchain": TOOLS},
        llama_backend="cuda",
        llama_server_backend="cuda",
        llama_server_cache_type_k="q8_0",
        llama_server_cache_type_v="q4_0",
        llama_release={**TREE, "source": source, "build": build},
    )


def quantised_by_head_without_graphics(source, build=9900):
    cluster = quantised(source, build)
    cluster.hosts["head"]["variables"].update(llama_backend="cpu")
    return cluster


def by_thunderbolt(facts=None, **link):
    """A head and a worker that are joined by a cable; the worker has these facts."""
    cluster = cluster_of(1, facts)
    for name, address in (("head", "198.51.100.1/30"), ("worker1", "198.51.100.2/30")):
        own = {"interface": "thunderbolt0", "address": address, "manage": True, **link}
        cluster.hosts[name]["variables"]["llama_links"] = [own]
    return cluster


def mtu_set(cluster):
    for host in cluster.hosts.values():
        host["variables"]["llama_links"][0]["mtu"] = 65520


def wire(lanes=2, gbit=20.0):
    return {"device": "0-1", "lanes": lanes, "gbit_per_lane": gbit}


def mac(cluster):
    cluster.hosts["worker1"]["facts"].update(system="Darwin", service_manager="launchd")
    return accepting(cluster, "unprotected-worker", "rpc-remote-code-execution")


def few_mib(memory):
    """Graphics that share 32 GiB with their processor."""
    facts = strix_halo()
    facts["memory_mib"] = memory
    facts["accelerators"][0].update(memory_mib=memory * 3 // 4, architecture="gfx1103")
    return facts


def with_unknown_variables(cluster):
    for host in cluster.hosts.values():
        host["unknown_variables"] = {"llama_backends": "llama_backend"}
    return cluster


def of_the_fork():
    cluster = cluster_of(1, strix_halo(), llama_backend="vulkan", llama_server_backend="vulkan", llama_release=FORK)
    cluster.hosts["head"]["variables"]["llama_backend"] = "cpu"
    return accepting(cluster, "rpc-remote-code-execution")


OPTION_FILES = ("/etc/llama.cpp/config.ini", "/opt/llamacpp/.config/llama.cpp/config.ini")


CARD = {"accelerators": [NVIDIA], "toolchain": TOOLS, "memory_mib": 65536}


def crowded(**more):
    """Weights that a card holds, of a model with 128 heads and 16384 tokens of context, and scores that it does not."""
    variables = {"llama_server_context": 16384, "llama_server_flash_attention": "off", **more}
    return with_model(cluster_of(1, CARD, **variables), **model(19, layers=40, context=16384, kv_heads=1))


def with_option_files(cluster, files=OPTION_FILES, name="head"):
    cluster.hosts[name]["facts"]["option_files"] = list(files)
    return cluster


CASES = [
    (
        "rpc-remote-code-execution",
        lambda: cluster_of(build=8491),
        released(**TREE, build=8492),
        ["Build 8491", "build 8492"],
    ),
    (
        "unprotected-worker",
        lambda: cluster_of(facts={"service_manager": "supervisor"}, workers=1),
        being("worker1", service_manager="systemd"),
        ["192.0.2.11:50052"],
    ),
    (
        "open-server",
        lambda: cluster_of(llama_server_host="192.0.2.1", llama_server_allowed=["192.0.2.0/24"]),
        setting("head", llama_server_api_key_file="/etc/llama.key"),
        ["192.0.2.1:8080", "llama_server_api_key_file"],
    ),
    (
        "server-for-everybody",
        lambda: cluster_of(llama_server_host="192.0.2.1", llama_server_api_key_file="/etc/llama.key"),
        setting("head", llama_server_allowed=["192.0.2.0/24"]),
        ["192.0.2.1:8080", "llama_server_allowed", "closed to nobody"],
    ),
    (
        "unlimited-server",
        lambda: cluster_of(
            llama_server_host="192.0.2.1",
            llama_server_allowed=["192.0.2.0/24"],
            llama_server_api_key_file="/etc/llama.key",
            head_facts={"units_filter": False},
        ),
        being("head", firewall="ufw"),
        ["192.0.2.0/24", "head", "lacks BPF", "no firewall is active"],
    ),
    (
        "hip-mmap-hang",
        lambda: strix_halos(2, 138, llama_server_load_mode="mmap", llama_placement="all"),
        setting("strix0", llama_server_load_mode="dio"),
        ["ROCm0 of strix0", "llama_server_load_mode", "30720"],
    ),
    (
        "hip-mmap-slow",
        lambda: with_model(cluster_of(1, few_mib(32768), llama_server_load_mode="mmap"), **model(18)),
        setting("head", llama_server_load_mode=None),
        ["ROCm0 of worker1", "more than half of the 32768 MiB"],
    ),
    (
        "vulkan-without-mmap",
        lambda: strix_halos(2, 60, "vulkan", llama_server_load_mode="none"),
        setting("strix0", llama_server_load_mode="mmap"),
        ["llama_server_load_mode is none"],
    ),
    (
        "vulkan-shared-memory",
        lambda: strix_halos(1, 90, "vulkan"),
        setting("strix0", llama_worker_endpoints=[{"environment": {"radv_enable_unified_heap_on_apu": "true"}}]),
        ["Vulkan0 of strix0 has 126976 MiB, and the model does not fit", "84650", "llama_backend: hip"],
    ),
    (
        "wide-tensor-send",
        lambda: mac(with_model(cluster_of(build=6110), largest_tensor_bytes=3082813808)),
        released(**TREE, build=6141),
        ["a tensor of 2940 MiB", "build 6141"],
    ),
    (
        "wide-model-abort",
        lambda: accepting(
            with_model(cluster_of(build=6110), architecture="qwen3moe", width=6144), "rpc-remote-code-execution"
        ),
        released(
            **TREE, build=6110, patches=[{"path": "/srv/send.patch", "sha256": "c" * 64, "files": [advisories.SENDING]}]
        ),
        ["build 6141", "15188"],
    ),
    (
        "three-endpoints-hang",
        lambda: cluster_of(3, build=10751),
        setting("head", llama_placement="fewest"),
        ["3 workers", "10620 to 10819", "llama_placement"],
    ),
    (
        "hip-garbage",
        lambda: strix_halos(1, 20, build=10500),
        graphics("vulkan"),
        ["ROCm0 of strix0 (gfx1151)", "llama_release", "0.3.36"],
    ),
    (
        "cache-kernels",
        lambda: quantised_by_head_without_graphics("binary"),
        setting("head", llama_server_cache_type_v="q8_0"),
        ["q8_0", "q4_0", "GGML_CUDA_FA_ALL_QUANTS"],
    ),
    (
        "router-with-workers",
        lambda: cluster_of(llama_server_extra_args=["--models-preset=/srv/models.ini"]),
        setting("head", llama_server_extra_args=["--metrics"]),
        ["--models-preset=/srv/models.ini", "llama_server_extra_args"],
    ),
    (
        "ollama-architecture",
        lambda: with_model(cluster_of(), architecture="glm4moelite"),
        lambda cluster: with_model(cluster, architecture="deepseek2"),
        ["/srv/m.gguf, with the architecture glm4moelite", "llama_model_path"],
    ),
    (
        "thunderbolt-mtu",
        by_thunderbolt,
        mtu_set,
        ["llama_links[0] of head", "thunderbolt0", "mtu"],
    ),
    (
        "thunderbolt-lanes",
        lambda: by_thunderbolt({"thunderbolt": [wire(lanes=1)]}, mtu=65520),
        being("worker1", thunderbolt=[wire()]),
        ["0-1 of worker1", "1 of 2 lanes, with 20 of 20 Gbit/s", "cable"],
    ),
    (
        "graphics-memory-limit",
        lambda: with_model(cluster_of(1, strix_halo(63488)), **model(100)),
        being("worker1", **strix_halo()),
        ["AMD gfx1151 only 63488 of 129024 MiB", "llama_host_tuning"],
    ),
    (
        "strix-halo-kernel",
        lambda: with_model(cluster_of(1, {**strix_halo(), "kernel": "6.17.12-300.fc43.x86_64"})),
        being("worker1", kernel="6.18.4"),
        ["worker1 runs kernel 6.17.12-300", "6.18.4"],
    ),
    (
        "strix-halo-firmware",
        lambda: with_model(cluster_of(1, {**strix_halo(), "firmware": "20251125-1"})),
        being("worker1", firmware=None),
        ["20251125-1", "linux-firmware"],
    ),
    (
        "external-worker",
        lambda: cluster_of(1, llama_external_workers=[{"endpoint": "192.0.2.77:50052", "memory_mib": 8192}]),
        setting("head", llama_external_workers=[{"endpoint": "127.0.0.1:60077", "memory_mib": 8192}]),
        ["192.0.2.77 runs 192.0.2.77:50052 by itself", "let only head reach the port", "127.0.0.1 of head"],
    ),
    (
        "backend-unmaintained",
        of_the_fork,
        released(**TREE, build=8600),
        ["ik_llama.cpp for vulkan", "llama_backend"],
    ),
    (
        "accelerator-unused",
        lambda: cluster_of(1, {"accelerators": [NVIDIA]}),
        being("worker1", toolchain=TOOLS),
        ["worker1 has GPU", "llama_backend"],
    ),
    (
        "options-elsewhere",
        lambda: with_option_files(cluster_of(1, build=11063)),
        lambda cluster: with_option_files(cluster, ()),
        [
            "head reads /etc/llama.cpp/config.ini and /opt/llamacpp/.config/llama.cpp/config.ini before",
            "llama_server_extra_args",
        ],
    ),
    (
        "compute-over-capacity",
        crowded,
        setting("head", llama_server_flash_attention="on"),
        ["of worker1 (≤ ", "of 23348 MiB)", "Set llama_server_flash_attention to 'on'."],
    ),
    (
        "context-cut",
        lambda: with_model(cluster_of(llama_server_context=16384)),
        setting("head", llama_server_context=4096),
        ["llama_server_context is 16384", "on paper was trained for 4096 tokens"],
    ),
    (
        "context-shared",
        lambda: with_model(cluster_of(llama_server_context=4096, llama_server_parallel=4)),
        setting("head", llama_server_parallel=1),
        [
            "llama_server_parallel is 4, so each request gets 1024 of the 4096 tokens",
            "Set llama_server_context to 16384",
        ],
    ),
    (
        "variable-unknown",
        lambda: with_unknown_variables(cluster_of(1)),
        everywhere(lambda host: host.update(unknown_variables={})),
        ["llama_backends is set for head, worker1", "Similar name: llama_backend."],
    ),
    (
        "cmake-option-unknown",
        lambda: cluster_of(1, llama_build_cmake_options={"GGML_HIP_UMA": "ON"}),
        everywhere(lambda host: host["variables"].update(llama_build_cmake_options={})),
        ["GGML_HIP_UMA is set for head", "up to 6169", "llama_build_cmake_options"],
    ),
    (
        "slower-than-one-host",
        lambda: with_model(cluster_of(1), accepted=()),
        lambda cluster: cluster.hosts.pop("worker1"),
        ["The cluster is predicted to generate ", "and head alone ", "Leave llama_workers empty."],
    ),
]
IN_THE_TABLE = {advisory.id: advisory for advisory in advisories.ADVISORIES}


def ids(plan):
    return {advisory["id"] for advisory in plan["advisories"] if not advisory["accepted"]}


@pytest.mark.parametrize(
    "facts, said",
    [
        ({"units_filter": False}, "lacks BPF for control groups"),
        (
            {"units_filter": None},
            "the host is down and its facts are those of an older version of the collection (then start it",
        ),
        ({"scope": "user", "service_manager": "systemd_user"}, "systemd_user does not filter addresses"),
    ],
)
def test_a_unit_closes_ports_only_where_the_host_was_seen_to_filter(facts, said):
    cluster = cluster_of(facts=facts, workers=1)
    met = {advisory["id"]: advisory["message"] for advisory in cluster.plan()["advisories"]}
    assert said in met["unprotected-worker"]
    cluster.hosts["worker1"]["facts"].update(units_filter=facts.get("units_filter"), firewall="nftables")
    closed_by_another = cluster.hosts["worker1"]["facts"]["scope"] == "system"
    assert ("unprotected-worker" not in [met["id"] for met in cluster.plan()["advisories"]]) == closed_by_another


def test_each_advisory_has_a_case_and_an_id_of_its_own():
    assert sorted(case[0] for case in CASES) == sorted(advisory.id for advisory in advisories.ADVISORIES)


def test_what_several_hosts_have_in_common_refuses_once():
    reasons = strix_halos(2, 400, "vulkan").plan()["reasons"]
    (told,) = [reason for reason in reasons if "vulkan-shared-memory" in reason]
    assert "Vulkan0 of strix0" in told
    assert "Vulkan0 of strix1" in told
    assert told.count("llama_backend: hip") == 1


@pytest.mark.parametrize("identifier, make, mend, said", CASES, ids=[case[0] for case in CASES])
def test_an_advisory_is_met_accepted_and_mended(identifier, make, mend, said):
    cluster = make()
    plan = cluster.plan()
    assert ids(plan) == {identifier}
    found = next(advisory for advisory in plan["advisories"] if advisory["id"] == identifier)
    assert found["severity"] == IN_THE_TABLE[identifier].severity
    for part in said:
        assert part in f"{found['message']} {found['remedy']}"
    assert "{" not in found["message"] + found["remedy"]
    reasons = " ".join(plan["reasons"])
    if found["severity"] == "error":
        assert plan["refused"]
        assert f"{found['remedy']} To run it anyway, add {identifier} to llama_accept_advisories" in reasons
    else:
        assert not plan["refused"] or not plan["fits"]
        assert found["message"] not in reasons

    again = copy.deepcopy(cluster)
    head = next(host["variables"] for host in again.hosts.values() if "head" in host["groups"])
    head["llama_accept_advisories"] = [*head["llama_accept_advisories"], identifier]
    accepted = again.plan()
    assert ids(accepted) == set()
    assert not accepted["refused"] or not accepted["fits"]

    mend(cluster)
    mended = cluster.plan()
    assert identifier not in {advisory["id"] for advisory in mended["advisories"]}
    assert not mended["refused"], mended["reasons"]


def test_an_advisory_that_is_not_in_the_list_of_accepted_ones_still_refuses(pair):
    pair.hosts["head"]["variables"].update(llama_server_host="192.0.2.10", llama_accept_advisories=["no-such-id"])
    assert pair.plan()["refused"]


def serving_networks(networks, **facts):
    return cluster_of(
        head_facts=facts,
        llama_server_host="0.0.0.0",
        llama_server_allowed=networks,
        llama_server_api_key_file="/etc/llama.key",
    )


HEALTHY = {
    "two workers": lambda: cluster_of(2),
    "a server that its unit limits": lambda: serving_networks(["192.0.2.0/24"]),
    "a server that its firewall limits": lambda: serving_networks(["192.0.2.0/24"], units_filter=False, firewall="ufw"),
    "a server for everybody, who needs no limit": lambda: serving_networks(["0.0.0.0/0"], units_filter=False),
    "three workers": lambda: cluster_of(3),
    "three workers on an older build": lambda: cluster_of(3, build=8600),
    "CUDA with types of the cache that differ": lambda: quantised_by_head_without_graphics("archive"),
    "HIP": lambda: strix_halos(4, 377),
    "HIP, two hosts": lambda: strix_halos(2, 205),
    "HIP of the newest tree": lambda: strix_halos(1, 20, build=11063),
    "Vulkan, 61 GiB": lambda: strix_halos(4, 61, "vulkan"),
    "Vulkan, 211 GiB": lambda: strix_halos(4, 211, "vulkan"),
    "Vulkan, 226 GiB": lambda: strix_halos(4, 226, "vulkan"),
    "Vulkan on Intel": lambda: cluster_of(
        1,
        {
            "toolchain": TOOLS,
            "memory_mib": 65536,
            "accelerators": [
                {"backend": "vulkan", "name": "Intel x", "architecture": "", "memory_mib": 32768, "unified": True}
            ],
        },
    ),
    "wide tensors between Linux hosts": lambda: accepting(
        with_model(cluster_of(build=6110), largest_tensor_bytes=3082813808), "rpc-remote-code-execution"
    ),
    "a mac and no wide tensor": lambda: mac(with_model(cluster_of(build=6110), largest_tensor_bytes=1 << 30)),
    "a router without workers": lambda: cluster_of(0, llama_server_extra_args=["--models-preset", "/srv/models.ini"]),
    "Thunderbolt that somebody else sets up": lambda: by_thunderbolt(manage=False),
    "three workers of a fork whose number is one of llama.cpp's faulty builds": lambda: accepting(
        cluster_of(3, llama_release={**FORK, "build": 10700}), "rpc-remote-code-execution"
    ),
    "a slow dock where Thunderbolt is no link": lambda: cluster_of(1, {"thunderbolt": [wire(1, 10.0)]}),
    "a file of options that the build does not read": lambda: with_option_files(cluster_of(1, build=8643)),
    "a file of options that no worker reads": lambda: with_option_files(cluster_of(1, build=11063), name="worker1"),
    "a kernel of which nothing is known": lambda: with_model(cluster_of(1, {**strix_halo(), "kernel": None})),
}


def accepting(cluster, *identifiers):
    given = cluster.hosts["head"]["variables"]
    given["llama_accept_advisories"] = [*given["llama_accept_advisories"], *identifiers]
    return cluster


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_plan_meets_none(name):
    plan = HEALTHY[name]().plan()
    assert ids(plan) == set()
    assert not plan["refused"], plan["reasons"]


@pytest.mark.parametrize("gib", [61, 205, 211, 226])
def test_models_are_spread_so_that_no_vulkan_device_holds_more_than_it_shows(gib):
    """Sizes from the notes, on hosts that declare 112000 MiB each as there."""
    plan = strix_halos(4, gib, "vulkan", llama_worker_endpoints=[{"memory_mib": 112000}]).plan()
    assert not plan["refused"]
    assert max(entry["total_mib"] for entry in plan["placement"]) < 126976 * 2 / 3


def test_who_accepts_it_gets_more_onto_a_vulkan_device_than_it_shows():
    cluster = strix_halos(4, 376.65, "vulkan")
    cluster.hosts["strix0"]["variables"]["llama_accept_advisories"] = ["vulkan-shared-memory"]
    plan = cluster.plan()
    assert not plan["refused"]
    assert {advisory["host"] for advisory in plan["advisories"]} == {f"strix{index}" for index in range(4)}
    assert "gets" in plan["advisories"][0]["message"]


def test_a_model_that_only_hip_can_hold_is_refused_with_vulkan():
    """DeepSeek R1 Q4_K_M, 377 GiB, on four hosts with 124 GiB each: in the notes it fails with Vulkan and runs with HIP."""
    plan = strix_halos(4, 376.65, "vulkan").plan()
    assert plan["refused"]
    assert not plan["fits"]
    assert ids(plan) == {"vulkan-shared-memory"}
    assert "llama_backend: hip" in " ".join(plan["reasons"])


@pytest.mark.parametrize(
    "build, backend, gib, wanted, mode, arguments",
    [
        (8600, "hip", 138, None, "dio", ["-dio"]),
        (11063, "hip", 138, None, "dio", ["--load-mode", "dio"]),
        (7000, "hip", 138, None, "none", ["--no-mmap"]),
        (8600, "hip", 138, "none", "none", ["--no-mmap"]),
        (8600, "hip", 20, None, None, []),
        (8600, "vulkan", 60, None, None, []),
    ],
)
def test_a_large_model_is_not_read_by_mmap_with_hip(build, backend, gib, wanted, mode, arguments):
    cluster = strix_halos(2, gib, backend, build, llama_server_load_mode=wanted)
    head = accepting_head(cluster).plan()["head"]
    assert head["load_mode"] == mode
    assert [part for part in head["argv"] if part in ("-dio", "--load-mode", "dio", "--no-mmap")] == arguments


def accepting_head(cluster):
    cluster.hosts["strix0"]["variables"]["llama_accept_advisories"] = ["rpc-remote-code-execution"]
    return cluster


def test_an_unknown_variable_that_resembles_none_of_ours():
    cluster = cluster_of(1)
    cluster.hosts["worker1"]["unknown_variables"] = {"llama_home": ""}
    found = [advisory for advisory in cluster.plan()["advisories"] if advisory["id"] == "variable-unknown"]
    assert [(advisory["host"], advisory["severity"]) for advisory in found] == [("worker1", "warning")]
    assert found[0]["message"].endswith("so it does nothing. Similar name: none.")


@pytest.mark.parametrize(
    "given",
    [
        {"llama_server_extra_args": ["--models_dir", "/srv"]},
        {"llama_server_environment": {"LLAMA_ARG_MODELS_DIR": "/srv"}},
    ],
)
def test_a_router_by_another_spelling(given):
    assert "router-with-workers" in [advisory["id"] for advisory in cluster_of(**given).plan()["advisories"]]

"""Every advisory is met where it must be, says what to do, and is silent once that was done and on healthy plans."""

import re
from functools import partial

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.toolkits import DECLARED_VERSIONS as VERSIONS
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies, table
from conftest import Cluster, known_answer_of
from support.clusters import (
    FORK,
    GPU,
    TOOLS,
    TREE,
    accelerator,
    cards_of,
    head_with_cards,
    model,
    strix_halo,
    strix_halos,
    with_long_context,
)

NVML = "Failed to initialize NVML: Driver/library version mismatch"
MI50 = accelerator("hip", "MI50", "gfx906", 32752)


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
    cluster.set(
        "head", llama_model_known_answer=None, llama_model_path="/srv/m.gguf", llama_accept_advisories=list(accepted)
    )
    cluster.model = {"summary": {**model(1, layers=16), **summary}}
    return cluster


def with_type(kind, cluster=None, backend="cuda", **variables):
    """Serves a small model with layers of this type."""
    cards = [{**GPU, "backend": one} for one in dict.fromkeys((backend, "vulkan"))]
    given = {"facts": {"accelerators": cards, "toolchain": TOOLS}, "llama_backend": backend}
    cluster = cluster or cluster_of(2, llama_placement="all", **given, **variables)
    cluster.set("head", llama_backend="cpu")
    row = {"name": "blk.*.ffn_up.weight", "type": kind, "shape": [7168, 256], "bytes": 1 << 20, "layers": [*range(16)]}
    return with_model(cluster, tensors=[row])


def placing_a_draft():
    """A draft model whose layers the operator places."""
    draft = {"llama_model_draft": "/srv/d.gguf", "llama_server_extra_args": ["-ngld", "9", "--metrics"]}
    cluster = with_model(cluster_of(build=11063, **draft))
    cluster.model["auxiliary"] = {"draft": model(1, layers=16)}
    return cluster


def with_slow_link():
    """A head that keeps conversations, and a worker that it reaches more slowly than it computes."""
    heads = {"kv_heads": 32, "heads": 32, "width": 4096}
    accepted = {"llama_accept_advisories": ["slower-than-one-host"]}
    cluster = cards_of(10, summary=heads, llama_server_keep_conversations=True, **accepted)
    link = {"round_trip_ms": 0.2, "mbit_per_second": 5}
    cluster.hosts["head"]["facts"]["measured"] = {"gpu1": link}
    return cluster


def with_large_cache():
    """A head that holds the model, but not beside its prompt cache, and a worker without a card."""
    cluster = strix_halos(1, 60, llama_server_prompt_cache_mib=90000, llama_accept_advisories=["slow-load"])
    release = {"llama_release": {**TREE, "build": 11434}, "llama_backend": "cpu"}
    return cluster.add("slow", "worker", address="192.0.2.30", facts={"memory_mib": 65536}, **release)


def setting(*names, **values):
    """Changes variables of these hosts, or of all."""
    return lambda cluster: [cluster.hosts[name]["variables"].update(values) for name in names or cluster.hosts]


def being(*names, **values):
    """Changes facts of these hosts, or of all."""
    return lambda cluster: [cluster.hosts[name]["facts"].update(values) for name in names or cluster.hosts]


def quantised_by_head_without_graphics(source, **variables):
    cluster = cluster_of(
        1,
        facts={"accelerators": [GPU], "toolchain": TOOLS},
        llama_backend="cuda",
        llama_server_backend="cuda",
        llama_server_cache_type_k="q8_0",
        llama_server_cache_type_v="q4_0",
        llama_release={**TREE, "source": source, "build": 11434},
        **variables,
    )
    cluster.set("head", llama_backend="cpu")
    return cluster


def by_thunderbolt(**link):
    """A head and a worker that are joined by a cable."""
    cluster = cluster_of(1)
    for name, address in (("head", "198.51.100.1/30"), ("worker1", "198.51.100.2/30")):
        own = {"interface": "thunderbolt0", "address": address, "manage": True, **link}
        cluster.hosts[name]["variables"]["llama_links"] = [own]
    return cluster


OUTSIDE = [{"endpoint": "192.0.2.77:50052", "memory_mib": 8192}]


def link_of(cluster, name, **more):
    """Says that the address of a worker is that of a link whose other end is the head."""
    host = cluster.hosts[name]
    host["variables"]["llama_links"] = [{"address": f"{host['ansible_host']}/24", "peer": "head", **more}]


def through_a_tunnel(cluster):
    cluster.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"tunnel": "127.0.0.1:60052"}]
    return cluster


USER = {"scope": "user", "service_manager": "systemd_user"}


def with_unknown_variables(cluster, meant="llama_backend", name="llama_backend_names"):
    for host in cluster.hosts.values():
        host["unknown_variables"] = {} if meant is None else {name: meant}
    return cluster


ALL_QUANTS_OFF = {"GGML_CUDA_FA_ALL_QUANTS": "OFF"}
HEAP = [{"environment": {"radv_enable_unified_heap_on_apu": "true"}}]
CARD = {"accelerators": [GPU], "toolchain": TOOLS, "memory_mib": 65536}


def accepts(identifier):
    """The operator accepts it by name."""
    return lambda cluster: cluster.hosts["head"]["variables"]["llama_accept_advisories"].append(identifier)


NEWER = setting(llama_release={**TREE, "build": 11434})
READ = setting(llama_release={**TREE, "build": 12211})


def lends_all(cluster):
    """What the kernel says after a boot with the parameters of 129024 - 4096 MiB."""
    for device in cluster.hosts["worker1"]["facts"]["accelerators"]:
        device["memory_mib"] = 124928


MAC = accelerator("metal", "Apple M4", "apple", 12124, unified=True)


def with_card(backend, card, keys=None, **variables):
    """A worker with a card that Vulkan sees too."""
    cards = [card, {**card, "backend": "vulkan", "architecture": ""}]
    facts = {"accelerators": cards, "toolchain": {**VERSIONS, **TOOLS}}
    cluster = with_model(cluster_of(1, facts, **variables), **model(4, keys=keys or {}))
    cluster.set("worker1", llama_backend=backend)
    return cluster


def with_card_of_head(backend, card):
    """A head whose llama-server has another backend than its worker."""
    cluster = with_card(backend, card)
    facts = cluster.hosts.pop("worker1")["facts"]
    cluster.hosts["head"].update(groups=["head", "worker"], facts=facts)
    cluster.set("head", llama_backend=["cpu", backend])
    return cluster


@pytest.mark.parametrize("cards", [[], [accelerator("cuda", "RTX 3090", "", 0)]])
def test_a_driver_that_fails_is_said_in_the_words_of_nvidia_smi(cards):
    cluster = cluster_of(1, {"nvidia_smi": NVML, "accelerators": cards}, llama_release={**TREE, "build": 11434})
    cluster.set("worker1", llama_backend="cuda")
    assert "install" not in cluster.reason(f": fix its NVIDIA driver (nvidia-smi fails: {NVML}), ")


def with_idle_worker():
    """A head whose card holds the model, and a worker whose port nothing restricts."""
    cluster = with_card("hip", MI50, llama_release={**TREE, "build": 11434})
    cluster.hosts["worker1"]["facts"]["has_unit_filter"] = False
    cluster.hosts["head"]["facts"].update(accelerators=[GPU], toolchain=TOOLS)
    return cluster


def without_split(cluster):
    cluster.hosts.pop("worker1")
    setting("head", llama_server_tensor_split=None)(cluster)


def vulkan_alone():
    """Graphics that ROCm does not support."""
    cluster = strix_halos(1, 90, "vulkan")
    facts = cluster.hosts["strix0"]["facts"]
    facts["accelerators"] = [card for card in facts["accelerators"] if card["backend"] == "vulkan"]
    return cluster


def with_mac_as_head(workers=1, **variables):
    """A head with Metal beside a worker, and a model for both."""
    head = {"system": "Darwin", "service_manager": "launchd", "architecture": "arm64", "memory_mib": 16384}
    return with_model(cluster_of(workers, CARD, head_facts={**head, "accelerators": [MAC]}, **variables), **model(24))


CASES = [
    (
        "rpc-remote-code-execution",
        lambda: cluster_of(1, llama_release=FORK),
        {"restrict the workers' ports": accepts("rpc-remote-code-execution")},
        ["build 4840 of ik_llama.cpp", "Restrict the workers' ports to the head"],
    ),
    (
        "unprotected-worker",
        lambda: cluster_of(facts={"service_manager": "supervisor"}, workers=2),
        {"restrict these ports": accepts("unprotected-worker")},
        [
            "192.0.2.11:50052 on worker1, 192.0.2.12:50052 on worker2",
            "The service manager (supervisor) does not filter",
        ],
    ),
    (
        "unprotected-worker",
        lambda: cluster_of(facts={"has_unit_filter": False}, workers=1),
        {"enable {managers} on {hosts}": being("worker1", firewall="nftables")},
        ["lacks BPF for control groups", "Enable firewalld, ufw or nftables on worker1"],
    ),
    (
        "unprotected-worker",
        lambda: cluster_of(facts=USER, workers=1, llama_host_scope="user"),
        {
            "set llama_host_scope to {scope} for {hosts}": being(
                scope="system", service_manager="systemd", has_unit_filter=True
            )
        },
        ["The service manager (systemd_user) does not filter", "llama_host_scope to system for worker1"],
    ),
    (
        "open-server",
        lambda: cluster_of(llama_server_host="192.0.2.1", llama_server_allowed=["192.0.2.0/24"]),
        {
            "set llama_server_api_key_file": setting("head", llama_server_api_key_file="/etc/llama.key"),
            "set llama_server_host to 127.0.0.1": setting("head", llama_server_host="127.0.0.1"),
        },
        ["192.0.2.1:8080"],
    ),
    (
        "server-for-everybody",
        lambda: cluster_of(llama_server_host="192.0.2.1", llama_server_api_key_file="/etc/llama.key"),
        {
            "set llama_server_allowed to the": setting("head", llama_server_allowed=["192.168.1.0/24"]),
            "set llama_server_host to 127.0.0.1": setting("head", llama_server_host="127.0.0.1"),
        },
        ["192.0.2.1:8080", "so anyone can connect"],
    ),
    (
        "unlimited-server",
        lambda: serving_networks(["192.0.2.0/24"], has_unit_filter=False),
        {
            "restrict the port to": accepts("unlimited-server"),
            "set llama_server_host to 127.0.0.1": setting("head", llama_server_host="127.0.0.1"),
        },
        ["192.0.2.0/24", "head", "lacks BPF", "No supported firewall (firewalld, ufw or nftables) is active"],
    ),
    (
        "hip-mmap-hang",
        lambda: strix_halos(2, 138, llama_server_load_mode="mmap", llama_placement="all"),
        {
            "remove llama_server_load_mode": setting("strix0", llama_server_load_mode=None),
            "set llama_server_load_mode to {mode}": setting("strix0", llama_server_load_mode="dio"),
        },
        ["MiB for ROCm0 on strix0. ", "30720", "llama_server_load_mode to dio"],
    ),
    (
        "vulkan-prompt-cache",
        lambda: with_long_context(llama_server_prompt_cache_mib=4096),
        {
            "remove llama_server_prompt_cache_mib": setting("strix0", llama_server_prompt_cache_mib=None),
            "reduce llama_server_context": setting("strix0", llama_server_context=65536),
        },
        ["spans several buffers: Vulkan0 on strix0, Vulkan0 on strix1."],
    ),
    (
        "conversations-lost",
        lambda: head_with_cards(llama_server_keep_conversations=True, llama_server_extra_args=["--embedding"]),
        {"remove llama_server_keep_conversations": setting("head", llama_server_keep_conversations=False)},
        ["do not survive a restart: the model generates no text"],
    ),
    (
        "conversations-slow",
        with_slow_link,
        {
            "remove llama_server_keep_conversations": setting("head", llama_server_keep_conversations=False),
            "accept this advisory if": accepts("conversations-slow"),
        },
        ["Restoring a conversation with a full context takes "],
    ),
    (
        "prompt-cache-memory",
        with_large_cache,
        {
            "set llama_server_prompt_cache_mib to": setting("strix0", llama_server_prompt_cache_mib=51200),
            "accept this advisory if": setting("strix0", llama_accept_advisories=["prompt-cache-memory"]),
        },
        ["90000 moves 38 layers from strix0", "llama_server_prompt_cache_mib to 52224 or less"],
    ),
    (
        "cache-kernels",
        lambda: quantised_by_head_without_graphics("binary"),
        {"set both variables": setting("head", llama_server_cache_type_v="q8_0"), "set {variables} to a": NEWER},
        ["q8_0", "q4_0", "llama_release"],
    ),
    (
        "cache-kernels",
        lambda: quantised_by_head_without_graphics("archive", llama_build_cmake_options=ALL_QUANTS_OFF),
        {
            "set both variables": setting("head", llama_server_cache_type_k="q4_0"),
            "remove {option} from llama_build_cmake_options": setting("worker1", llama_build_cmake_options={}),
        },
        ["GGML_CUDA_FA_ALL_QUANTS from llama_build_cmake_options for worker1"],
    ),
    (
        "architecture-unknown",
        lambda: with_model(cluster_of(build=11063), architecture="kolibri1"),
        {"set {variables} to {newer_build}": READ},
        ["would refuse the model: build 11063 does not know the architecture kolibri1", "to build 11739 or newer."],
    ),
    (
        "architecture-unknown",
        lambda: with_model(cluster_of(build=11670), architecture="kolibri1"),
        {"set {variables} to {newer_build}": READ},
        ["may refuse the model: build 11670 may not know the", "Set llama_release to build 11739 or newer."],
    ),
    (
        "architecture-unknown",
        lambda: with_model(cluster_of(build=12211), architecture="not-yet"),
        {"set {variables} to {newer_build}": setting(llama_release={**TREE, "build": 12212})},
        ["build 12211 does not know the architecture not-yet", "to a newer build that supports this"],
    ),
    (
        "model-unread",
        lambda: with_model(cluster_of(build=12300), architecture="not-yet"),
        {"look for support in release notes up to build {build}": accepts("model-unread")},
        ["has the architecture not-yet. No build up to 12211 supports", "build 12300 has not been checked"],
    ),
    (
        "model-unread",
        lambda: with_type("type 44", build=12300),
        {"look for support in release notes up to build {build}": accepts("model-unread")},
        ["has tensors of type 44. No build up to 12211 supports this"],
    ),
    (
        "tensor-kernels",
        lambda: with_type("TQ1_0"),
        {
            "set llama_backend to": setting("worker1", "worker2", llama_backend="vulkan"),
            "use a model file with": lambda cluster: with_type("Q4_K", cluster),
        },
        [
            "The cuda backend on worker1 and worker2 has no known kernels for the model's TQ1_0 tensors.",
            "to vulkan for worker1 and worker2",
        ],
    ),
    (
        "tensor-kernels",
        lambda: with_type("F8_E4M3", with_type("Q4_K", backend="vulkan", build=12211)),
        {
            "set llama_backend to": setting("worker1", "worker2", llama_backend="cpu"),
            "use a model file with": lambda cluster: with_type("NVFP4", cluster),
        },
        ["The vulkan backend on worker1 and worker2 has no known kernels", "to cpu for worker1 and worker2"],
    ),
    (
        "slow-load",
        lambda: with_model(by_thunderbolt(mtu=65520), **model(50)),
        {"set llama_build_fast_load to true": setting(llama_build_fast_load=True)},
        ["Loading is predicted to take", "pypi-0.3.36 spends most of this time hashing and copying tensors"],
    ),
    (
        "graphics-memory-limit",
        lambda: with_model(cluster_of(1, strix_halo(63488), llama_host_reboot=True), **model(100)),
        {
            "set llama_host_tuning and llama_host_reboot": setting(
                "worker1", llama_host_tuning=True, llama_host_reboot=True
            )
        },
        ["AMD gfx1151 on worker1 use only 63488 of 129024 MiB"],
    ),
    (
        "graphics-memory-limit",
        lambda: with_model(
            cluster_of(1, {**strix_halo(63488), **USER}),
            accepted=("slower-than-one-host", "unprotected-worker", "user-scope"),
            **model(100),
        ),
        {"boot {hosts} with the": lends_all},
        ["amdgpu.gttsize=124928 ttm.pages_limit=31981568"],
    ),
    (
        "strix-halo-kernel",
        lambda: with_model(cluster_of(1, {**strix_halo(), "kernel": "6.17.12-300.fc43.x86_64"})),
        {"install kernel {first} or": being("worker1", kernel="6.18.4")},
        ["worker1 (6.17.12-300.fc43.x86_64)", "6.18.4"],
    ),
    (
        "rocm-gfx906",
        lambda: with_card("hip", MI50),
        {
            "install ROCm 6.3 on {hosts}": being("worker1", toolchain={**VERSIONS, **TOOLS, "hipconfig": "6.3"}),
            "set llama_backend to {vulkan} for {hosts}": setting("worker1", llama_backend="vulkan"),
            "install rocBLAS kernels": accepts("rocm-gfx906"),
        },
        ["worker1 (ROCm 7.2)", "llama_backend to vulkan for worker1"],
    ),
    (
        "nvidia-driver",
        lambda: cluster_of(1, {"nvidia_smi": NVML}),
        {
            "fix the NVIDIA driver": being("worker1", nvidia_smi=None),
            "set llama_backend to another": setting("worker1", llama_backend="cpu"),
        },
        ["no NVIDIA card on worker1, because nvidia-smi fails there: Failed to initialize NVML"],
    ),
    (
        "rocblas-kernels",
        lambda: with_card("hip", accelerator("hip", "AMD Radeon RX 6600", "gfx1032", 8176)),
        {
            "set llama_backend to {vulkan} for {hosts}": setting("worker1", llama_backend="vulkan"),
            "set HSA_OVERRIDE_GFX_VERSION to 10.3.0": setting(
                "worker1",
                llama_worker_endpoints=[{"environment": {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}}],
                llama_build_cmake_options={"GPU_TARGETS": "gfx1030"},
            ),
            "install rocBLAS kernels": accepts("rocblas-kernels"),
        },
        [
            "GPUs: worker1 (gfx1032).",
            "to vulkan for worker1. Or set HSA",
            "and GPU_TARGETS to gfx1030 in llama_build_cmake_op",
        ],
    ),
    (
        "worker-not-started",
        with_idle_worker,
        {
            "remove the unused workers from the inv": lambda cluster: cluster.hosts.pop("worker1"),
            "accept unprotected-worker": accepts("unprotected-worker"),
        },
        ["connections from the head: 192.0.2.11:50052 on worker1"],
    ),
    (
        "vulkan-shared-memory",
        vulkan_alone,
        {"add radv_enable_unified_heap_on_apu: 'true' under": setting("strix0", llama_worker_endpoints=HEAP)},
        ["out-of-memory errors. Add radv_enable_unified_heap_on_apu"],
    ),
    (
        "sycl-worker",
        lambda: with_card("sycl", accelerator("sycl", "Intel Arc Pro B70", "", 32656)),
        {
            "set llama_backend to {vulkan} for {hosts}": setting("worker1", llama_backend="vulkan"),
            "accept this advisory": accepts("sycl-worker"),
        },
        ["SYCL0 on worker1", "llama_backend to vulkan for worker1"],
    ),
    (
        "sycl-worker",
        lambda: with_card_of_head("sycl", accelerator("sycl", "Intel Arc Pro B70", "", 32656)),
        {"set llama_server_backend to {sycl}": setting("head", llama_server_backend="sycl")},
        ["SYCL0 on head", "set llama_server_backend to sycl"],
    ),
    (
        "chat-template-missing",
        lambda: with_model(cluster_of(), chat_template=False),
        {
            "use an instruct model": lambda cluster: with_model(cluster, chat_template=True),
            "add --chat-template to": setting(llama_server_extra_args=["--chat-template", "chatml"]),
            "accept this advisory if": accepts("chat-template-missing"),
        },
        ["The model file of ", "has no chat template"],
    ),
    (
        "metal-mtp",
        lambda: with_card("metal", MAC, keys={"nextn_predict_layers": 1}, llama_server_speculation="mtp"),
        {
            "set llama_server_speculation to ngram": setting("head", llama_server_speculation="ngram"),
            "accept this advisory": accepts("metal-mtp"),
        },
        ["With llama_server_speculation: mtp, Metal workers are known to crash: worker1."],
    ),
    (
        "metal-mmap",
        lambda: with_mac_as_head(llama_server_load_mode="mmap"),
        {"remove llama_server_load_mode": setting("head", llama_server_load_mode=None)},
        ["On head, Metal maps almost the whole model file"],
    ),
    (
        "user-scope",
        lambda: with_model(cluster_of(1, USER), accepted=("slower-than-one-host", "unprotected-worker"), **model(1)),
        {
            "set llama_host_scope to system": being("worker1", scope="system", service_manager="systemd"),
            "set llama_host_scope to user": setting("worker1", llama_host_scope="user"),
        },
        ["worker1: installing for the connecting user only, because passwordless sudo is not available."],
    ),
    (
        "external-worker",
        lambda: cluster_of(1, llama_external_workers=OUTSIDE),
        {
            "restrict these ports to": accepts("external-worker"),
            "use a tunnel": setting(
                "head", llama_external_workers=[{"endpoint": "127.0.0.1:60077", "memory_mib": 8192}]
            ),
        },
        ["the external workers 192.0.2.77:50052 on 192.0.2.77", "ports to head with", "on head (in 127.0.0.0/8)"],
    ),
    (
        "accelerator-unused",
        lambda: cluster_of(
            1, {"accelerators": [GPU], "distribution": {"id": "void", "version": "", "family": "unknown"}}
        ),
        {
            "install {toolkit} on {hosts}": being("worker1", toolchain=TOOLS),
            "set llama_backend to {built} for {hosts}": setting("worker1", llama_backend="cpu"),
        },
        ["Install CUDA and cublas on worker1"],
    ),
    (
        "accelerator-unused",
        lambda: cluster_of(1, {"accelerators": [GPU, MI50], "toolchain": {**TOOLS, "hipconfig": None}}),
        {
            "set llama_backend to {backend} for {hosts}": setting("worker1", llama_backend=["cuda", "hip"]),
            "set llama_backend to {built} for {hosts}": setting("worker1", llama_backend="cuda"),
        },
        ["MI50 on worker1", "llama_backend to [cuda, hip] for worker1", "to cuda for worker1 to accept this"],
    ),
    (
        "auxiliary-not-counted",
        placing_a_draft,
        {
            "remove {option} to let": setting("head", llama_server_extra_args=["--metrics"]),
            "reserve memory with": accepts("auxiliary-not-counted"),
        },
        ["does not count the memory for llama_model_draft", "-ngld in llama_server", "Remove -ngld to let"],
    ),
    (
        "context-cut",
        lambda: with_model(cluster_of(llama_server_context=16384)),
        {"set llama_server_context to {context}": setting("head", llama_server_context=4096)},
        ["llama_server_context is 16384", "on paper was trained for 4096 tokens per request"],
    ),
    (
        "context-cut",
        lambda: with_model(cluster_of(llama_server_context=16384, llama_server_parallel=2)),
        {
            "set llama_server_context to {context}": setting("head", llama_server_context=8192),
            "add --rope-scaling": setting("head", llama_server_parallel=4),
        },
        [
            "With llama_server_parallel: 2, llama-server starts with a context of 8192 tokens.",
            "Set llama_server_context to 8192",
        ],
    ),
    (
        "context-shared",
        lambda: with_model(cluster_of(llama_server_context=4096, llama_server_parallel=4)),
        {
            "set llama_server_parallel to 1": setting("head", llama_server_parallel=1),
            "add --kv-unified to llama_server_extra_args": setting("head", llama_server_extra_args=["--kv-unified"]),
            "accept this advisory if": accepts("context-shared"),
        },
        ["llama_server_parallel is 4, so each request gets 1024 of the context's 4096 tokens"],
    ),
    (
        "variable-unknown",
        lambda: with_unknown_variables(cluster_of(1)),
        {
            "rename {variable} to {similar}": partial(with_unknown_variables, meant=None),
            "use a name from": partial(with_unknown_variables, meant=None),
        },
        ["llama_backend_names is set for head, worker1", "llama_backend_names to llama_backend"],
    ),
    (
        "variable-misspelt",
        lambda: with_unknown_variables(cluster_of(1), "llama_server_host", "llama_server_hots"),
        {
            "rename {variable} to {similar}": partial(with_unknown_variables, meant=None),
            "accept this advisory if": accepts("variable-misspelt"),
        },
        ["llama_server_hots is set for head, worker1", "llama_server_hots to llama_server_host"],
    ),
    (
        "variable-unknown",
        lambda: with_unknown_variables(cluster_of(1), ""),
        {"use a name from": partial(with_unknown_variables, meant=None)},
        ["Similar name: none."],
    ),
    (
        "rpc-in-clear",
        lambda: cluster_of(2),
        {
            "set llama_transport to": setting(llama_transport="stunnel"),
            "if a cable connects": lambda cluster: [link_of(cluster, name) for name in ("worker1", "worker2")],
            "accept this advisory if you trust": accepts("rpc-in-clear"),
        },
        [
            "Weights and activations (in effect, the conversation) travel unencrypted between head and its workers: ",
            "worker1 over ethernet, worker2 over ethernet",
            "Set llama_transport to stunnel for worker1 and worker2",
        ],
    ),
    (
        "no-fallback",
        lambda: strix_halos(2, 200, llama_server_fallback=True),
        {
            "add workers with": lambda cluster: cluster.hosts.update(strix2=strix_halos(3, 200).hosts["strix2"]),
            "set llama_server_fallback to false": setting(llama_server_fallback=False),
        },
        ["there is no fallback for these workers: strix0:rocm0 (needs ", " MiB more memory)."],
    ),
    (
        "slower-than-one-host",
        lambda: with_model(cluster_of(1), accepted=(), **model(0.5)),
        {
            "{steps}": lambda cluster: cluster.hosts.pop("worker1"),
            "set llama_placement to all": setting(llama_placement="all"),
        },
        [
            "Predicted speed, without measurements: ",
            " for head alone.",
            "Leave llama_workers empty. Or set llama_placement to all to",
        ],
    ),
    (
        "slower-than-one-host",
        lambda: with_model(
            cluster_of(1, head_facts=CARD, llama_server_tensor_split=[1, 0]),
            accepted=(),
            **{**model(0.5), "architecture": "bert"},
        ),
        {"{steps}": without_split, "set llama_placement to all": setting(llama_placement="all")},
        ["Predicted speed, without measurements: ", " for head alone.", "and remove llama_server_tensor_split"],
    ),
    (
        "vulkan-shared-memory",
        lambda: strix_halos(1, 90, "vulkan"),
        {
            "set llama_backend to": setting("strix0", llama_backend="hip"),
            "add radv_enable_unified_heap_on_apu: 'true' under": setting("strix0", llama_worker_endpoints=HEAP),
        },
        ["Vulkan0 on strix0 (126976 MiB in total, 84650 MiB reported)", "llama_backend to hip for strix0"],
    ),
    (
        "architecture-unknown",
        lambda: with_model(cluster_of(build=12300), architecture="glm5next"),
        {"set llama_model_huggingface to a": lambda cluster: with_model(cluster, architecture="glm5-next")},
        [
            "build 12300 knows glm5-next but not the architecture glm5next",
            "llama.cpp's format, and remove llama_model_path",
        ],
    ),
    (
        "architecture-unknown",
        lambda: with_model(cluster_of(), architecture="glm4moelite", keys={"expert_count": 64}),
        {"set llama_model_huggingface to a": lambda cluster: with_model(cluster, architecture="deepseek2")},
        ["only Ollama knows the architecture glm4moelite", "and remove llama_model_path"],
    ),
]
"""Id of an advisory, a cluster that meets it, the beginning of each remedy → what that changes, and parts of the text."""
IN_THE_TABLE = {advisory.id: advisory for advisory in table.ADVISORIES}
MEMORY = {"compute-over-capacity"}
"""Those that test_memory.py has cases of."""


IN_CLEAR = {"rpc-in-clear"}
"""Nearly all of these clusters have workers on an ordinary network."""


WORDS = 25
"""Most words of a sentence."""


def long_sentences(text):
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if len(sentence.split()) > WORDS]


def test_sentences_of_advisories_are_short(generate):
    assert long_sentences(" ".join(["word"] * (WORDS + 1)))
    for advisory in table.ADVISORIES:
        for text in (advisory.message, *advisory.remedies):
            assert not long_sentences(generate.fill_examples(advisory.id, text)), advisory.id


def test_no_context_is_offered_in_which_requests_have_no_room(monkeypatch):
    tried = set()
    monkeypatch.setattr(remedies.Trial, "fits", lambda self, change: tried.add(change(self.cluster).server.context))
    strix_halos(2, 4000, "vulkan", llama_server_context=16384, llama_server_parallel=4).plan()
    assert tried - {0, 16384} == {8192, 4096}


def ids(plan):
    return {advisory["id"] for advisory in plan["advisories"] if not advisory["accepted"]}


def test_a_unit_whose_filter_is_not_known_closes_no_port():
    cluster = cluster_of(facts={"has_unit_filter": None}, workers=1)
    (met,) = [advisory for advisory in cluster.plan()["advisories"] if advisory["id"] == "unprotected-worker"]
    assert "its cached facts are from an older version" in met["message"]


def test_what_several_hosts_have_in_common_is_said_once():
    plan = strix_halos(2, 400, "vulkan").plan()
    (met,) = [advisory for advisory in plan["advisories"] if advisory["id"] == "vulkan-shared-memory"]
    assert (met["host"], met["hosts"]) == (None, ["strix0", "strix1"])
    for name in met["hosts"]:
        assert f"Vulkan0 on {name}" in met["message"]
    assert sum("vulkan-shared-memory" in reason for reason in plan["reasons"]) == 1


@pytest.mark.parametrize("identifier", sorted(IN_THE_TABLE.keys() - MEMORY))
def test_each_remedy_of_an_advisory_is_tried(identifier):
    tried = tuple(text for case in CASES if case[0] == identifier for text in case[2])
    assert [text for text in IN_THE_TABLE[identifier].remedies if not text.startswith(tried)] == []


@pytest.mark.parametrize("identifier, make, fixes, said", CASES, ids=[case[0] for case in CASES])
def test_an_advisory_is_met_and_its_remedies_help(identifier, make, fixes, said):
    plan = make().plan()
    assert ids(plan) - IN_CLEAR == {identifier} - IN_CLEAR
    (found,) = [advisory for advisory in plan["advisories"] if advisory["id"] == identifier]
    assert found["severity"] == IN_THE_TABLE[identifier].severity
    for part in said:
        assert part in f"{found['message']} {found['remedy']}"
    assert "{" not in found["message"] + found["remedy"]
    assert not long_sentences(f"{found['message']} {found['remedy']}")
    reasons = " ".join(plan["reasons"])
    if found["severity"] == "error":
        assert plan["refused"]
        assert f"{found['remedy']} To proceed anyway, add {identifier} to llama_accept_advisories" in reasons
    else:
        assert not plan["refused"] or not plan["fits"]
        assert found["message"] not in reasons
    for text, fix in fixes.items():
        cluster = make()
        fix(cluster)
        fixed = cluster.plan()
        assert identifier not in ids(fixed), text
        assert not fixed["refused"], (text, fixed["reasons"])


def serving_networks(networks, **facts):
    return cluster_of(
        head_facts=facts,
        llama_server_host="0.0.0.0",
        llama_server_allowed=networks,
        llama_server_api_key_file="/etc/llama.key",
    )


HEALTHY = {
    "two workers": lambda: cluster_of(2),
    "requests with all that the model was trained for": lambda: with_model(
        cluster_of(llama_server_context=16384, llama_server_parallel=4)
    ),
    "requests that share more than that": lambda: with_model(
        cluster_of(llama_server_context=8192, llama_server_parallel=4, llama_server_extra_args=["--kv-unified"])
    ),
    "a server that its unit limits": lambda: serving_networks(["192.0.2.0/24"]),
    "a server limited by ufw": lambda: serving_networks(["192.0.2.0/24"], has_unit_filter=False, firewall="ufw"),
    "a server for everybody, who needs no limit": lambda: serving_networks(["0.0.0.0/0"], has_unit_filter=False),
    "CUDA with types of the cache that differ": lambda: quantised_by_head_without_graphics("archive"),
    "HIP, two hosts": lambda: strix_halos(2, 205),
    "Vulkan, 226 GiB": lambda: strix_halos(4, 226, "vulkan"),
    "Vulkan on Intel": lambda: cluster_of(
        1, {**CARD, "accelerators": [accelerator("vulkan", "Intel x", "", 32768, unified=True)]}
    ),
    "a worker that is reached through a tunnel": lambda: through_a_tunnel(cluster_of(1)),
    "a kernel of which nothing is known": lambda: with_model(cluster_of(1, {**strix_halo(), "kernel": None})),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_plan_meets_none(name):
    plan = HEALTHY[name]().plan()
    assert ids(plan) <= IN_CLEAR
    assert not plan["refused"], plan["reasons"]


@pytest.mark.parametrize("gpu_mib, memory_mib", [(1900, 3900), (3900, 7800)])
def test_a_host_with_little_memory_cannot_lend_more(gpu_mib, memory_mib):
    plan = with_model(cluster_of(1, {**strix_halo(gpu_mib), **USER, "memory_mib": memory_mib}), **model(100)).plan()
    assert (plan["refused"], "graphics-memory-limit" in ids(plan)) == (True, False)


def test_a_small_model_is_read_by_mmap_with_hip_too():
    """How a large one is read is in the recorded plans of such hosts."""
    head = strix_halos(2, 20, llama_accept_advisories=["slower-than-one-host"]).accepted()["head"]
    assert (head["load_mode"], "--load-mode" in head["argv"]) == (None, False)


def test_a_head_with_metal_maps_no_file_beside_workers():
    plan = with_mac_as_head().accepted()
    assert (plan["head"]["load_mode"], {entry["host"] for entry in plan["placement"]}) == ("none", {"head", "worker1"})
    assert with_model(with_mac_as_head(0), **model(4)).accepted()["head"]["load_mode"] is None


def by_wireguard(cluster):
    for name, number in (("head", 1), ("worker1", 2)):
        own = {"interface": "wg0", "address": f"10.8.0.{number}/24", "kind": "wireguard", "manage": False}
        cluster.hosts[name]["variables"]["llama_links"] = [own]


def by_rdma(cluster):
    for host in cluster.hosts.values():
        host["facts"]["rdma"] = [host["ansible_host"]]
    setting("worker1", llama_transport="rdma")(cluster)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda cluster: None, ["over ethernet."]),
        (lambda cluster: link_of(cluster, "worker1", peer=None), ["over ethernet."]),
        (lambda cluster: link_of(cluster, "worker1", peer=None, manage=True, interface="eth1"), []),
        (lambda cluster: link_of(cluster, "worker1", peer=None, interface="thunderbolt0"), []),
        (lambda cluster: link_of(cluster, "worker1", peer=None, interface="wlan0"), ["over wireless."]),
        (lambda cluster: link_of(cluster, "worker1", peer=None, interface="wg0"), []),
        (lambda cluster: link_of(cluster, "worker1", peer=None, interface="tailscale0"), []),
        (lambda cluster: link_of(cluster, "worker1", peer=None, interface="ztly5q4n37"), []),
        (setting("worker1", llama_transport="stunnel"), []),
        (by_wireguard, []),
        (by_rdma, ["over ethernet."]),
        (through_a_tunnel, []),
    ],
)
def test_it_is_said_where_rpc_crosses_a_network_in_clear(change, said):
    cluster = cluster_of(1)
    change(cluster)
    met = [entry for entry in cluster.plan()["advisories"] if entry["id"] == "rpc-in-clear"]
    assert len(met) == len(said)
    assert all(entry["message"].endswith(text) for entry, text in zip(met, said))


@pytest.mark.parametrize(
    "kind, release, first",
    [
        ("F8_E4M3", {"build": 12210}, 12211),
        ("type 44", {"build": 12211}, 12212),
        ("Q3_0", {"build": 12211}, 12212),
        ("type 44", FORK, 4841),
    ],
)
def test_a_type_that_is_newer_than_the_build_is_refused(kind, release, first):
    said = f"types that archive-bbbbbbbb is not known to support ({kind}): set llama_release to build {first} or newer"
    assert said in with_type(kind, cluster_of(llama_release={**TREE, **release})).reason()

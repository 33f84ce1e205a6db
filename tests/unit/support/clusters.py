"""Clusters that several files of tests plan."""

from conftest import Cluster

GIB = 1 << 30
TREE = {"source": "archive", "path": "/tmp/x.tar.gz", "checksum": "sha256:" + "b" * 64}
"""A release without a build number: a test adds one."""
FORK = {**TREE, "fork": "ik_llama.cpp", "build": 4840}
IK_LLAMA = {"source": "git", "fork": "ik_llama.cpp", "ref": "8337e4cd3861406fc04e0854b1409cd1b027fbc9", "build": 4840}


def accelerator(backend, name, architecture, memory_mib, unified=False):
    """As host_info reports it."""
    known = {"backend": backend, "name": name, "architecture": architecture}
    return {**known, "memory_mib": memory_mib, "unified": unified}


COMPILER = {"cmake": "3.31", "ninja": "1.12", "c++": "14.2", "venv": "1.0"}
TOOLS = {**COMPILER, "glslc": "2025", "hipconfig": "7.2", "nvcc": "12.9"}
GPU = accelerator("cuda", "GPU", "8.6", 24576)
CUDA = {**COMPILER, "nvcc": "12.9"}
TWO_CARDS = {"accelerators": [GPU, GPU], "toolchain": CUDA}
CARD = {"memory_mib": 65536, "toolchain": CUDA, "accelerators": [GPU]}
"""Facts of a host with one card."""
WIDE = {"width": 7168, "heads": 128, "kv_heads": 1, "key_dimension": 128, "value_dimension": 128}
STRIX_HALO = {
    "memory_mib": 126976 + 2048,
    "toolchain": {**COMPILER, "glslc": "2025"},
    "accelerators": [accelerator("vulkan", "AMD Radeon 8060S", "", 126976, unified=True)],
}


def strix_halo(memory=126976):
    """What host_info finds on such a host, on paper: one device, for two backends."""
    device = {"name": "AMD gfx1151", "memory_mib": memory, "unified": True}
    return {
        "memory_mib": 126976 + 2048,
        "kernel": "6.18.10-200.fc43.x86_64",
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


def strix_halos(count, gib, backend="hip", build=11434, **variables):
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


def with_small_layers(cluster, summary, **variables):
    """A cluster whose head serves a model with layers of 1 MiB, on workers alone."""
    whole, *rows = summary["tensors"]
    tensors = [{**whole, "bytes": 1 << 20, "shape": [2048, 2048]}, *rows]
    known = {**summary, "layer_bytes": [1 << 20] * summary["layers"], "tensors": tensors}
    settings = {"llama_model_path": "/models/big.gguf", "llama_model_gguf_summary": known, "llama_placement": "all"}
    cluster.set("head", llama_model_known_answer=None, **settings, **variables)
    return cluster


def with_long_context(context=65792, backend="vulkan", **variables):
    """Two hosts and a model whose values are 16 KiB for each token and layer."""
    cluster = strix_halos(2, 1, backend, llama_server_context=context, llama_placement="all", **variables)
    cluster.model = {"summary": model(40, 8, kv_heads=16, context=131072)}
    return cluster


def cards_of(gib, count=1, summary=None, **variables):
    """A head and workers with a card each, for a model of so many GiB."""
    shared = {"llama_accept_advisories": ["rpc-remote-code-execution"], **variables}
    cluster = Cluster().add("head", "head", facts={}, llama_model_path="/srv/m.gguf", **shared)
    for index in range(count):
        cluster.add(f"gpu{index + 1}", "worker", address=f"192.0.2.{11 + index}", facts=CARD, **shared)
    cluster.model = {
        "summary": {
            **{"architecture": "llama", "name": "on paper", "layers": 40, "context": 131072, "vocabulary": 129280},
            **{**WIDE, **(summary or {})},
            "layer_bytes": [int(gib * GIB) // 40] * 40,
            "input_bytes": 0,
            "output_bytes": GIB,
        }
    }
    return cluster


def head_with_cards(count=2, gib=20, **variables):
    """A head that drives its cards itself."""
    facts = {**CARD, "accelerators": CARD["accelerators"] * count}
    cluster = cards_of(gib, 0, **variables)
    cluster.hosts["head"]["facts"].update(facts)
    return cluster


def strix_halo_head(gib, *groups, **variables):
    shared = {"llama_release": {**TREE, "build": 11063}, **variables}
    cluster = cards_of(gib, 0, **shared)
    cluster.hosts["head"]["facts"].update(STRIX_HALO)
    cluster.hosts["head"]["groups"] += groups
    return cluster


def advisories_of(cluster, identifier):
    return [advisory for advisory in cluster.plan()["advisories"] if advisory["id"] == identifier]


def sized(big_model, layers):
    """The big model with so many layers, of 1 GiB each."""
    rows = [{**row, "layers": list(range(layers))} if row["layers"] else row for row in big_model["tensors"]]
    return {**big_model, "layers": layers, "layer_bytes": [1 << 30] * layers, "tensors": rows}


def serving(cluster, model, **variables):
    """The cluster, whose head serves a model of a file."""
    (head,) = (host for host in cluster.hosts.values() if "head" in host["groups"])
    head["variables"].update(llama_model_known_answer=None, llama_model_path="/models/big.gguf", **variables)
    cluster.model = {"summary": model}
    return cluster

"""What a plan says of memory that may be too little, and of the context. Each remedy is applied, and the advisory is gone."""

import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import memory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from conftest import Cluster

GIB = 1 << 30
CARD = {
    "memory_mib": 65536,
    "toolchain": {"cmake": "3.31", "ninja": "1.12", "c++": "14.2", "venv": "1.0", "nvcc": "12.9"},
    "accelerators": [{"backend": "cuda", "name": "GPU", "architecture": "8.6", "memory_mib": 24576, "unified": False}],
}
ARCHIVE = {"source": "archive", "path": "/tmp/x.tar.gz", "checksum": "sha256:" + "b" * 64}
FORK = {"llama_release": {**ARCHIVE, "fork": "ik_llama.cpp", "build": 3770}}
WIDE = {"width": 7168, "heads": 128, "kv_heads": 1, "key_dimension": 128, "value_dimension": 128}


def cluster_of(gib, count=1, summary=None, **variables):
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


def found(cluster, identifier):
    return [advisory for advisory in cluster.plan()["advisories"] if advisory["id"] == identifier]


def apply(cluster, remedy):
    """Does what a remedy says."""
    variables = cluster.hosts["head"]["variables"]
    for name, value in re.findall(r"(llama_\w+) to '?(\w+)'?", remedy):
        if name != "llama_server_extra_args":
            variables[name] = int(value) if value.isdigit() else value
    given = re.search(r"add (-[^l]+) to llama_server_extra_args", remedy, re.IGNORECASE)
    words = given[1].replace(" and ", " ").split() if given else []
    variables["llama_server_extra_args"] = [*variables.get("llama_server_extra_args", []), *words]


@pytest.mark.parametrize(
    "gib, variables, remedy",
    [
        (19, {}, "Set llama_server_flash_attention to 'on'."),
        (20.8, {}, "Set llama_server_flash_attention to 'on', and add -ub 128 to llama_server_extra_args."),
        (20.8, {"llama_server_flash_attention": "on"}, "Add -ub 128 to llama_server_extra_args."),
        (
            18.5,
            {"llama_server_flash_attention": "on", "llama_server_context": 131072},
            "Add -ub 256 to llama_server_extra_args.",
        ),
        (
            18,
            {**FORK, "llama_server_flash_attention": "on", "llama_server_extra_args": ["-mla", "3"]},
            "Add -amb 256 to llama_server_extra_args.",
        ),
    ],
)
def test_a_remedy_is_the_mildest_one_and_it_works(gib, variables, remedy):
    given = {"llama_server_flash_attention": "off", "llama_server_context": 32768, **variables}
    latent = {"architecture": "deepseek2", "key_dimension": 576, "value_dimension": 512}
    latent["keys"] = {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
    cluster = cluster_of(gib, summary=latent if "llama_release" in variables else None, **given)
    (advisory,) = found(cluster, "compute-over-capacity")
    assert advisory["remedy"] == remedy
    assert advisory["severity"] == "warning"
    assert advisory["host"] == "gpu1"
    apply(cluster, advisory["remedy"])
    plan = cluster.plan()
    assert not plan["refused"], plan["reasons"]
    assert not found(cluster, "compute-over-capacity")


def test_a_shorter_context_is_the_remedy_where_less_at_once_is_not_enough():
    cluster = cluster_of(19.2, llama_server_flash_attention="on", llama_server_context=131072)
    (advisory,) = found(cluster, "compute-over-capacity")
    assert "set llama_server_context to " in advisory["remedy"]
    apply(cluster, advisory["remedy"])
    assert not cluster.plan()["refused"]
    assert not found(cluster, "compute-over-capacity")


def test_where_nothing_makes_it_small_enough_the_remedy_is_more_memory():
    cluster = cluster_of(21.75, llama_server_flash_attention="on", llama_server_context=512)
    (advisory,) = found(cluster, "compute-over-capacity")
    assert advisory["remedy"] == "Use a smaller model, or devices with more memory."


def test_devices_that_share_it_are_named_in_one_message():
    cluster = cluster_of(40, 2, llama_server_flash_attention="off", llama_server_context=32768)
    (advisory,) = found(cluster, "compute-over-capacity")
    assert advisory["host"] is None
    assert len(re.findall(r"of gpu[12] \(≤ \d+ of 23348 MiB\)", advisory["message"])) == 2


def test_a_model_that_does_not_fit_is_refused_without_this_advisory():
    cluster = cluster_of(60, llama_server_flash_attention="off", llama_server_context=32768)
    assert cluster.plan()["refused"]
    assert not found(cluster, "compute-over-capacity")


def test_the_default_context_is_that_of_the_variable():
    assert inventory.specification()["llama_server_context"]["default"] == memory.DEFAULT_CONTEXT
    cluster = cluster_of(1, summary={"context": 4096})
    assert not found(cluster, "context-cut")
    assert cluster.plan()["head"]["context"] == 4096


@pytest.mark.parametrize(
    "variables, each",
    [
        ({}, 4096),
        ({"llama_server_parallel": 4}, 1024),
        ({"llama_server_parallel": 4, "llama_server_extra_args": ["--kv-unified"]}, 4096),
    ],
)
def test_requests_at_the_same_time_divide_the_context(variables, each):
    cluster = cluster_of(1, llama_server_context=4096, **variables)
    assert cluster.plan()["head"]["context_per_request"] == each
    assert bool(found(cluster, "context-shared")) == (each != 4096)

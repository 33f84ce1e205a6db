"""Build numbers against facts of real trees; what the real programs say is held against this in the integration tests."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities


@pytest.mark.parametrize(
    "version, binary, worker_flags, server_flags, protocol, buffer_name, device_name",
    [
        ("0.3.16", "rpc-server", set("Hpmctd"), {"no-mmap"}, "2.0.0", "RPC[{endpoint}]", "RPC[{endpoint}]"),
        (
            "0.3.20",
            "rpc-server",
            set("Hpctd"),
            {"no-mmap", "direct-io", "fit", "flash-attn"},
            "3.6.1",
            "RPC0[{endpoint}]",
            "RPC{index}",
        ),
        (
            "0.3.36",
            "ggml-rpc-server",
            set("Hpctd"),
            {"load-mode", "fit", "flash-attn"},
            "7.0.0",
            "RPC0[{endpoint}]",
            "RPC{index}",
        ),
    ],
)
def test_trees_of_the_package_index(version, binary, worker_flags, server_flags, protocol, buffer_name, device_name):
    tree = capabilities.PYPI_TREES[version]
    able = capabilities.of_build(tree["generation"], tree.get("protocol"))
    assert able == {
        "worker_binary": binary,
        "worker_flags": sorted(worker_flags),
        "server_flags": sorted(server_flags),
        "protocol": protocol,
        "buffer_name": buffer_name,
        "device_name": device_name,
    }


@pytest.mark.parametrize(
    "build, protocol", [(5149, None), (5150, "1.0.0"), (8802, "4.0.0"), (10496, "5.1.0"), (11000, None)]
)
def test_protocol_by_build_is_said_only_where_it_is_known(build, protocol):
    assert capabilities.of_build(build)["protocol"] == protocol


def test_help_of_a_worker_and_a_server():
    worker = "options:\n  -h, --help   show\n  -t, --threads N\n  -H, --host HOST\n  -p, --port PORT\n  -c, --cache  enable\n"
    able = capabilities.from_help("rpc-server", worker, "--rpc SERVERS\n-fit, --fit [on|off]\n-lm, --load-mode MODE\n")
    assert able == {
        "worker_binary": "rpc-server",
        "worker_flags": ["H", "c", "p", "t"],
        "server_flags": ["fit", "load-mode"],
    }


def test_help_of_older_programs():
    worker = "  -h, --help      x\n  -t,      --threads   x\n  -d DEV,  --device    x\n  -m MEM,  --mem MEM   x\n  -c,      --cache     x\n"
    able = capabilities.from_help("rpc-server", worker, "-fa,   --flash-attn     x\n--no-mmap\n")
    assert able["worker_flags"] == ["c", "d", "m", "t"]
    assert able["server_flags"] == ["no-mmap"]


@pytest.mark.parametrize("build, value", [(6170, False), (6324, False), (6325, True), (7991, True), (8643, True)])
def test_flash_attention_takes_a_value_from_one_build_on(build, value):
    assert ("flash-attn" in capabilities.of_build(build)["server_flags"]) is value

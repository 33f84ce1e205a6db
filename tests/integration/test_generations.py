"""Generations of llama.cpp that differ in names, flags and protocol, built and served from one inventory that differs in the release."""

import json

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils import capabilities, known_answer
from conftest import Cluster

pytestmark = pytest.mark.slow

CHECKSUMS = {
    "0.3.16": "sha256:34ed0f9bd9431af045bb63d9324ae620ad0536653740e9bb163a2e1fcb973be6",
    "0.3.20": "sha256:70f01b7d915d31c617dc66610a332cb2d51cde84c8b152d09a352206323616f5",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Builds before b8492 are below the security floor, which this inventory accepts."""
    made = Cluster(
        tmp_path_factory.mktemp("generations"),
        llama_accept_advisories=["rpc-remote-code-execution"],
        llama_server_load_mode="none",
    )
    yield made
    made.clear()


@pytest.mark.parametrize("version, protocol", [("0.3.16", "2.0.0"), ("0.3.20", "3.6.1")])
def test_a_generation_is_built_and_gives_the_known_answer(cluster, tmp_path, version, protocol):
    report = tmp_path / "verify.json"
    release = {"source": "pypi", "version": version, "checksum": CHECKSUMS[version]}
    result = cluster.site(llama_release=release, llama_verify_path=str(report))
    assert result.status == "successful", result.text
    checks = json.loads(report.read_text())["checks"]
    assert {check["name"] for check in checks if check["status"] == "passed"} >= {
        "handshake",
        "buffers",
        "known answer",
    }
    assert cluster.complete() == known_answer.SENTENCE
    assert all(f"protocol {protocol}" in check["evidence"] for check in checks if check["name"] == "handshake")
    server = cluster.processes()[cluster.pid_of("releases", "llama-server", "--rpc")]
    assert "--no-mmap" in server
    assert cluster.site(llama_release=release).changed == 0

    (manifest,) = (
        json.loads(path.read_text()) for path in cluster.prefix.glob(f"releases/pypi-{version}-*/manifest.json")
    )
    tree = capabilities.PYPI_TREES[version]
    assumed = capabilities.of_build(tree["generation"])
    probed = manifest["capabilities"]
    assert probed == {key: assumed[key] for key in probed}
    assert probed["worker_binary"] == "rpc-server"
    assert manifest["options_ignored"] == []

"""ik_llama.cpp from a local repository, real and compiled: it is not on the package index, so a clone of it has to be named."""

import json
import os
import subprocess

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA
from conftest import PORTS, Cluster, known_by, until

pytestmark = pytest.mark.slow

VARIABLE = "LLAMA_TEST_IK_LLAMA"
"""Path of a clone whose last part is ik_llama.cpp; its HEAD is built."""


@pytest.fixture(scope="module")
def release():
    repository = os.environ.get(VARIABLE)
    if not repository:
        pytest.skip(f"{VARIABLE} does not name a clone of ik_llama.cpp")
    commit = subprocess.run(
        ["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    number = subprocess.run(
        ["git", "-C", repository, "rev-list", "--count", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return {"source": "git", "repository": repository, "ref": commit, "build": int(number)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(
        tmp_path_factory.mktemp("fork"),
        llama_accept_advisories=["rpc-remote-code-execution"],
        llama_server_load_mode="none",
        llama_server_flash_attention="on",
        llama_server_extra_args=["-mla", "3", "-amb", "512"],
    )
    yield made
    made.clear()


def test_it_is_built_and_gives_the_known_answer(cluster, tmp_path, release):
    report = tmp_path / "verify.json"
    result = cluster.site(llama_release=release, llama_verify_path=str(report))
    assert result.status == "successful", result.text
    checks = json.loads(report.read_text())["checks"]
    assert {check["name"] for check in checks if check["status"] == "passed"} >= {
        "release",
        "handshake",
        "buffers",
        "known answer",
        "completion",
    }
    assert cluster.complete() == known_answer.SENTENCE
    assert all(capabilities.IK_LLAMA_PROTOCOL in check["evidence"] for check in checks if check["name"] == "handshake")
    assert cluster.site(llama_release=release).changed == 0


def test_its_programs_are_what_was_assumed(cluster, release):
    (path,) = cluster.prefix.glob("releases/git-*/manifest.json")
    for program in (options.SERVER, options.WORKER):
        assert set(options.listed_options(program, IK_LLAMA, release["build"])) <= set(
            known_by(path.parent / "bin" / program)
        )
    program = path.parent / "bin" / "llama-server"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert f"version: {release['build']} ({release['ref'][:8]})" in said.stdout + said.stderr


def test_a_lost_worker_restarts_the_head(cluster, release):
    head = cluster.pid_of("llama-server", "--rpc")
    os.kill(cluster.pid_of("rpc-server", str(PORTS[1])), 9)
    until(lambda: cluster.pid_of("llama-server", "--rpc") != head and cluster.complete() == known_answer.SENTENCE)


def test_it_goes_without_a_trace(cluster, release):
    result = cluster.run("playbooks/teardown.yml", llama_release=release)
    assert result.status == "successful", result.text
    assert not cluster.processes()
    assert not cluster.prefix.exists()

"""b11434, compiled: served, upgraded to from the default release and back, with the patch for loads, and as a router."""

import json
import sys
import urllib.request
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from conftest import ROOT, Cluster, known_by

sys.path.append(str(ROOT / "tests"))
import newer_tree  # it lies in the folder of the line before

pytestmark = pytest.mark.slow

MODELS = [{"name": "small", "known_answer": {}}, {"name": "large", "known_answer": {"layers": 32}}]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return newer_tree.release(tmp_path_factory.mktemp("tree") / "b11434.tar")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("newer"))
    yield made
    made.clear()


def installed(cluster):
    return {path.name for path in (cluster.prefix / "releases").iterdir()}


def verified(cluster, path, **variables):
    """Runs site.yml and verifies; the ids of the releases that are installed then."""
    result = cluster.site(llama_verify_path=str(path), **variables)
    assert result.status == "successful", result.text
    assert {check["status"] for check in json.loads(path.read_text())["checks"]} == {"passed"}
    return installed(cluster)


def test_an_upgrade_to_it_serves_and_its_programs_are_what_planning_took_for_granted(cluster, release, tmp_path):
    before = verified(cluster, tmp_path / "verify.json")
    (newer,) = verified(cluster, tmp_path / "verify.json", llama_release=release) - before
    assert cluster.complete() == known_answer.SENTENCE
    protocol = capabilities.protocol_of(newer_tree.BUILD)
    checks = json.loads((tmp_path / "verify.json").read_text())["checks"]
    assert all(f"protocol {protocol}" in check["evidence"] for check in checks if check["name"] == "handshake")
    for program, name in ((options.SERVER, "llama-server"), (options.WORKER, "ggml-rpc-server")):
        words = known_by(cluster.prefix / "releases" / newer / "bin" / name)
        assert set(options.listed_options(program, MAINLINE, newer_tree.BUILD)) <= set(words)
    assert cluster.site(llama_release=release).changed == 0


def test_the_way_back_compiles_nothing_and_so_does_the_next_upgrade(cluster, release):
    both = installed(cluster)
    for result in (cluster.run("playbooks/rollback.yml"), cluster.site(llama_release=release), cluster.site()):
        assert result.status == "successful", result.text
        assert cluster.complete() == known_answer.SENTENCE
        assert "step " not in result.text
    assert installed(cluster) == both


def test_a_build_that_nobody_read_is_served_without_options_that_it_lacks(cluster, release, tmp_path):
    unread = newer_tree.unread(tmp_path / "unread.tar", Path(str(release["path"])))
    result = cluster.site(llama_release=unread, llama_verify_path=str(tmp_path / "verify.json"))
    assert result.status == "successful", result.text
    told = " ".join(result.text.split())
    assert "does not know --cache-ram: the launcher passes -cram instead" in told
    assert "does not know --fit: the launcher omits it" in told
    assert "Traceback" not in told
    checks = json.loads((tmp_path / "verify.json").read_text())["checks"]
    assert {check["status"] for check in checks} == {"passed"}
    assert all("protocol 7.1.0" in check["evidence"] for check in checks if check["name"] == "handshake")
    assert cluster.complete() == known_answer.SENTENCE
    assert cluster.site(llama_release=unread).changed == 0


def test_the_patch_for_loads_compiles_with_it(cluster, release, tmp_path):
    verified(cluster, tmp_path / "verify.json", llama_release=release, llama_build_fast_load=True)
    assert cluster.complete() == known_answer.SENTENCE


def test_as_a_router_it_serves_each_model(cluster, release, tmp_path):
    router = Cluster(cluster.folder, llama_model_known_answer=None, llama_models=MODELS, llama_release=release)
    result = router.site()
    assert result.status == "successful", result.text
    for model in MODELS:
        body = json.dumps({"model": model["name"], "prompt": "", "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(router.url + "/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=300) as reply:
            assert json.load(reply)["choices"][0]["text"] == known_answer.SENTENCE

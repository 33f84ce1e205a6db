"""llama.cpp from a git repository, with patches, real and compiled; what an upgrade keeps and what a failing one leaves alone."""

import json
import subprocess

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache, sources
from conftest import Cluster

pytestmark = pytest.mark.slow

BUILD = 11063
USAGE = "tools/rpc/rpc-server.cpp"
WORDS = "show this help message"


def git(folder, *arguments):
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The tree that the demo builds as a git repository: tag b11063, and a branch with one commit more."""
    folder = tmp_path_factory.mktemp("repository") / "llama.cpp"
    folder.mkdir()
    request = release_request.request_of(inventory.specification()["llama_release"]["default"])
    release = releases.release_of(request, {})
    unpack = [
        "tar",
        "-xf",
        sources.fetch(release)[0].path,
        "--strip-components=3",
        "--exclude=.git",
        str(release.member),
    ]
    subprocess.run(unpack, cwd=folder, check=True)
    git(folder, "init", "--quiet", "--initial-branch=master")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message=tree")
    git(folder, "tag", f"b{BUILD}")
    git(folder, "checkout", "--quiet", "-b", "topic/usage")
    (folder / "README.md").write_text("changed\n")
    git(folder, "commit", "--quiet", "--all", "--message=change")
    yield folder
    commits = git(folder, "rev-list", "--all").split()
    for told in (cache.root_folder() / "sources").glob("git-*.json"):
        if json.loads(told.read_text())["commit"] in commits:
            told.unlink()
            told.with_suffix(".tar.gz").unlink()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("sources"))
    yield made
    made.clear()


def patch(folder, name, new):
    """A patch of the worker's help, as git diff writes it."""
    source = folder / USAGE
    before = source.read_text()
    source.write_text(before.replace(WORDS, new))
    text = subprocess.run(["git", "diff", "--", USAGE], cwd=folder, check=True, capture_output=True, text=True).stdout
    source.write_text(before)
    assert new in text
    path = folder.parent / f"{name}.patch"
    path.write_text(text)
    return path


def tag(repository):
    return {"source": "git", "repository": str(repository), "ref": f"b{BUILD}"}


def branch(repository, *patches):
    return {**tag(repository), "ref": "topic/usage", "build": BUILD, "patches": [str(path) for path in patches]}


def installed(cluster):
    """What each installed worker says of itself, by the id of its release."""
    found = {}
    for path in (cluster.prefix / "releases").iterdir():
        said = subprocess.run([path / "bin" / "ggml-rpc-server", "--help"], capture_output=True, text=True, check=False)
        found[path.name] = said.stdout + said.stderr
    return found


def test_a_tag_is_built_and_says_what_it_is(cluster, repository):
    result = cluster.site(llama_release=tag(repository))
    assert result.status == "successful", result.text
    assert cluster.complete() == known_answer.SENTENCE
    identity = next(iter(installed(cluster)))
    assert identity.startswith(f"b{BUILD}-cpu-")
    release = cluster.prefix / "releases" / identity
    commit = git(repository, "rev-parse", f"b{BUILD}")
    said = subprocess.run([release / "bin" / "llama-server", "--version"], capture_output=True, text=True, check=True)
    assert f"build {BUILD}, commit {commit[:8]}" in said.stdout + said.stderr
    manifest = json.loads((release / "manifest.json").read_text())
    assert (manifest["source"]["commit"], manifest["source"]["number"]) == (commit, BUILD)


def test_a_second_run_needs_no_repository_and_changes_nothing(cluster, repository):
    moved = repository.rename(repository.with_name("moved"))
    result = cluster.site(llama_release=tag(repository))
    moved.rename(repository)
    assert result.status == "successful", result.text
    assert result.changed == 0


def test_a_patched_branch_is_installed_beside_it(cluster, repository):
    first = next(iter(installed(cluster)))
    result = cluster.site(llama_release=branch(repository, patch(repository, "worded", "show these words")))
    assert result.status == "successful", result.text
    assert cluster.complete() == known_answer.SENTENCE
    found = installed(cluster)
    assert "show these words" not in found.pop(first)
    second, said = found.popitem()
    assert found == {}
    assert second.startswith(f"git-{git(repository, 'rev-parse', 'topic/usage')[:8]}-cpu-")
    assert "show these words" in said


def test_going_back_compiles_nothing(cluster, repository):
    before = set(installed(cluster))
    result = cluster.site(llama_release=tag(repository))
    assert result.status == "successful", result.text
    assert "step " not in result.text
    assert set(installed(cluster)) == before
    assert cluster.complete() == known_answer.SENTENCE


def test_a_patch_that_does_not_apply_leaves_alone_what_serves(cluster, repository):
    before, running = set(installed(cluster)), set(cluster.processes())
    broken = patch(repository, "broken", "show nothing")
    broken.write_text(broken.read_text().replace(WORDS, "no such words"))
    result = cluster.site(llama_release=branch(repository, broken))
    assert result.status == "failed"
    assert "the patch broken.patch of llama_release does not apply" in result.text
    assert "Hunk #1 FAILED" in result.text
    assert set(cluster.processes()) == running
    assert set(installed(cluster)) == before
    assert cluster.complete() == known_answer.SENTENCE


def test_a_third_release_replaces_the_one_that_served_longest_ago(cluster, repository):
    before = installed(cluster)
    (second,) = (identity for identity, said in before.items() if "show these words" in said)
    check = cluster.site(
        "--check --diff", llama_release=branch(repository, patch(repository, "third", "show the third"))
    )
    assert check.status == "successful", check.text
    assert installed(cluster) == before
    result = cluster.site(llama_release=branch(repository, patch(repository, "third", "show the third")))
    assert result.status == "successful", result.text
    found = installed(cluster)
    assert len(found) == 2
    assert second not in found
    assert second in check.text
    assert not list((cache.root_folder() / "builds").glob(f"{second}*"))

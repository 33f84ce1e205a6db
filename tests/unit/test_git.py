"""Real git on a small repository: what a branch, a tag or a commit is, its build number, and the archive of its tree."""

import copy
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time

import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import git, sources
from support.hosts import executable
from support.sources import cache, resolve

__all__ = ["cache"]

pytestmark = pytest.mark.programs

IDENTITY = ["-c", "user.name=test", "-c", "user.email=test@localhost"]


class Repository:
    """Commits 1, 2, 3 on ``main``; tag b4321 on the second, annotated tag v1 on the third; branch ``topic/one`` with a fourth."""

    def __init__(self, path):
        self.path = path
        path.mkdir()
        self.git("init", "--quiet", "--initial-branch=main", "--template=")
        self.commits = [self.commit(number) for number in (1, 2, 3)]
        self.git("tag", "b4321", self.commits[1])
        self.git("tag", "--annotate", "--message=x", "v1")
        self.git("checkout", "--quiet", "-b", "topic/one")
        self.commits.append(self.commit(4))
        self.git("checkout", "--quiet", "main")

    def git(self, *arguments):
        argv = ["git", *IDENTITY, *arguments]
        return subprocess.run(argv, cwd=self.path, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, number):
        (self.path / "number").write_text(f"{number}\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", f"--message={number}")
        return self.git("rev-parse", "HEAD")

    def request(self, ref, **more):
        return {"source": "git", "repository": str(self.path), "ref": ref, **more}

    def resolved(self, ref, **more):
        return resolve(self.request(ref, **more), nowhere)

    def fetched(self, ref, **more):
        return sources.fetch(releases.release_of(self.resolved(ref, **more), {}))[0]


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """Its builds have small numbers."""
    monkeypatch.setitem(releases.capabilities.OLDEST_BUILDS, MAINLINE, 1)
    monkeypatch.setattr(releases.capabilities, "PROTOCOLS", [(0, "7.0.0")])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Repository(tmp_path_factory.mktemp("git") / "llama.cpp")


@pytest.fixture
def repository(tmp_path, made):
    own = copy.copy(made)
    own.path = shutil.copytree(made.path, tmp_path / "llama.cpp", symlinks=True)
    return own


def test_a_version_of_upstream_is_its_tag(tmp_path, monkeypatch):
    repository = Repository(tmp_path / "upstream")
    repository.git("tag", "v0.4.1", repository.commits[1])
    monkeypatch.setitem(releases.capabilities.FORKS, MAINLINE, str(repository.path))
    found = resolve("v0.4.1", nowhere)
    assert (found.ref, found.commit, found.build) == ("v0.4.1", repository.commits[1], 2)


def nowhere(path):
    raise AnsibleError(f"no {path}")


@pytest.mark.parametrize("ref, index, build", [("main", 2, 3), ("topic/one", 3, 4), ("v1", 2, 3)])
def test_a_branch_or_tag_is_a_commit_with_its_count(repository, ref, index, build):
    found = repository.resolved(ref)
    assert (found.commit, found.build) == (repository.commits[index], build)
    release = releases.release_of(found, {})
    assert release.ref == f"git-{repository.commits[index][:8]}"
    assert (release.revision, release.build) == (repository.commits[index], build)


@pytest.fixture
def served(repository):
    """The repository over a network transport, by git's own daemon."""
    repository.git("config", "uploadpack.allowFilter", "true")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--listen=127.0.0.1", f"--port={port}", "--export-all", f"--base-path={repository.path.parent}"]
    argv = ["git", "daemon", "--reuseaddr", "--log-destination=none", *options]
    daemon = subprocess.Popen(argv, start_new_session=True)
    url = f"git://127.0.0.1:{port}/{repository.path.name}"
    try:
        for _attempt in range(100):
            if subprocess.run(["git", "ls-remote", url], check=False, capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
        yield url
    finally:
        os.killpg(daemon.pid, signal.SIGTERM)
        daemon.wait()


def test_a_repository_behind_a_network(repository, served):
    request = {"source": "git", "repository": served, "ref": "topic/one"}
    found = resolve(request, nowhere)
    assert (found.commit, found.build) == (repository.commits[3], 4)
    assert sources.fetch(releases.release_of(found, {}))[0].commit == repository.commits[3]
    with pytest.raises(Refusal, match="not a tag, branch or commit"):
        resolve({**request, "ref": "2" * 40}, nowhere)


def test_a_commit_is_counted_once(repository):
    found = repository.resolved(repository.commits[1])
    assert (found.commit, found.build) == (repository.commits[1], 2)
    shutil.rmtree(repository.path)
    assert repository.resolved(repository.commits[1]) == found


def test_a_commit_whose_number_of_ancestors_is_not_a_number(repository, monkeypatch):
    monkeypatch.setattr(git, "count_commits", lambda *_arguments: int("many"))
    with pytest.raises(Refusal, match=r"could not be counted .* add build"):
        repository.resolved(repository.commits[1])


def test_the_tag_of_a_build_and_a_commit_with_its_build_are_not_looked_up(repository):
    shutil.rmtree(repository.path)
    tag = releases.release_of(repository.resolved("b4321"), {})
    assert (tag.build, tag.revision, tag.commit, tag.ref) == (4321, "refs/tags/b4321", "unknown", "b4321")
    commit = releases.release_of(repository.resolved(repository.commits[0], build=11434), {})
    assert (commit.build, commit.commit) == (11434, repository.commits[0])


def test_a_tag_wins_over_a_branch_of_its_name(repository):
    repository.git("branch", "both", repository.commits[0])
    repository.git("tag", "both", repository.commits[1])
    assert repository.resolved("both").commit == repository.commits[1]


@pytest.mark.parametrize("ref", ["no-such-branch", "0" * 40])
def test_a_ref_that_is_not_there(repository, ref):
    said = f"llama_release asks for '{ref}', which is not a tag, branch or commit of {repository.path}"
    with pytest.raises(Refusal, match=said):
        repository.resolved(ref)


@pytest.mark.parametrize(
    "place, said",
    [
        ("/no/such/repository", "does not appear to be a git repository"),
        ("https://127.0.0.1:1/llama.cpp", "Could ?n.t connect|Connection refused"),
        ("ext::sh -c 'touch {marker}'", "transport 'ext' not allowed"),
        ("other::{marker}", "transport 'other' not allowed"),
    ],
)
def test_a_repository_that_cannot_be_read(tmp_path, place, said):
    marker = tmp_path / "marker"
    place = place.format(marker=marker)
    with pytest.raises(Refusal, match=f"llama_release needs the repository .*could not read.*({said})"):
        resolve({"source": "git", "repository": place, "ref": "main"}, nowhere)
    assert not marker.exists()


def test_a_history_that_was_cut_off_cannot_be_counted(repository, tmp_path):
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{repository.path}", str(shallow)], check=True)
    request = {"source": "git", "repository": str(shallow), "ref": "main"}
    with pytest.raises(Refusal, match=r"'main', whose commits could not be counted .*add build"):
        resolve(request, nowhere)
    release = releases.release_of(resolve({**request, "build": 3}, nowhere), {})
    assert sources.fetch(release)[0].commit == repository.commits[2]


def test_a_controller_without_git(repository, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refusal, match="the controller has no git; install git there"):
        repository.resolved("main")
    with pytest.raises(AnsibleError, match="the controller has no git"):
        repository.fetched("b4321")


def test_a_repository_that_does_not_answer(repository, tmp_path, monkeypatch):
    slow = executable(tmp_path / "bin" / "git", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(git, "LOOK_UP_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(Refusal, match="did not finish within"):
        repository.resolved("main")


def test_the_repository_of_the_playbooks_is_left_alone(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    fetched = repository.fetched("b4321")
    assert (fetched.is_new, fetched.commit) == (True, repository.commits[1])
    with tarfile.open(fetched.path) as archive:
        assert archive.extractfile("llama.cpp/number").read() == b"2\n"
    assert not (tmp_path / "elsewhere").exists()


def test_a_tag_stays_what_it_was_when_it_was_fetched_first(repository, cache):
    first = repository.fetched("b4321")
    repository.git("tag", "--force", "b4321", repository.commits[2])
    assert repository.fetched("b4321") == first._replace(is_new=False)
    pinned = repository.fetched("b4321", commit=repository.commits[2])
    assert (pinned.commit, pinned.is_new) == (repository.commits[2], True)
    first.path.write_bytes(b"damaged")
    assert repository.fetched("b4321").commit == repository.commits[2]


def test_the_same_commit_makes_the_same_archive(repository, cache):
    first = repository.fetched("main")
    shutil.rmtree(cache)
    time.sleep(1.1)
    assert repository.fetched(repository.commits[2]) == first


@pytest.mark.parametrize("more", [{"ref": "b9999"}, {"ref": "b4321", "commit": "1" * 40}])
def test_what_turns_out_not_to_be_there(repository, cache, more):
    with pytest.raises(AnsibleError, match=r"llama_release asks for .*, which is not a tag, branch or commit of"):
        repository.fetched(**more)
    assert not list(cache.glob("*.tar.gz"))


def test_patches_are_known_by_their_content(tmp_path):
    for name in ("one.patch", "two.patch"):
        (tmp_path / name).write_text("the same")
    request = {"source": "git", "ref": "b4321"}

    def release(*patches):
        value = resolve({**request, "patches": list(patches)}, lambda path: str(tmp_path / path))
        return releases.release_of(value, {})

    assert release("one.patch").patches[0].path == str(tmp_path / "one.patch")
    assert release("one.patch").id == release("two.patch").id
    assert release("one.patch").id not in (release().id, release("one.patch", "two.patch").id)
    assert release().patches == ()


def test_a_patch_that_cannot_be_read(tmp_path):
    for find in (lambda path: str(tmp_path / path), nowhere):
        with pytest.raises(Refusal, match=r"llama_release lists the patch 'none.patch', .*use an absolute path"):
            resolve({"source": "git", "ref": "b4321", "patches": ["none.patch"]}, find)

"""The controller's cache: several controllers at once, killed ones, and what was written by others."""

import hashlib
import os
import re
import signal
import stat
import subprocess
import sys
import tarfile

import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache, sources
from support.builds import planned_source
from test_git import Repository

pytestmark = pytest.mark.programs


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llamacpp"


def process(code):
    """A further controller; ``sources`` is imported when it prints its first line."""
    module = "ansible_collections.llamacpp.cluster.plugins.plugin_utils"
    utils = module.replace("plugin_utils", "module_utils")
    imports = f"from {utils}.planner.inputs.release_request import request_of\n"
    imports += f"from {utils}.plan.types import ReleasePlan\nfrom {module}.sources import sources, git"
    text = f"{imports}\nprint('ready', flush=True)\ninput()\n{code}"
    made = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert made.stdout.readline() == "ready\n"
    return made


def at_once(code, count=3):
    """What the last line says that each of some controllers prints, which do the same at the same time."""
    made = [process(code) for _index in range(count)]
    for each in made:
        each.stdin.write("\n")
        each.stdin.flush()
    answers = [each.communicate(timeout=120)[0].splitlines()[-1:] for each in made]
    assert [each.returncode for each in made] == [0] * count
    return [answer for lines in answers for answer in lines]


KEPT = r"\.lock|.*\.(tar\.gz|json|build)"


def leftovers(folder):
    """What the folders of the cache have beside files that are kept."""
    return [path.name for path in folder.glob("*/*") if path.is_dir() or not re.fullmatch(KEPT, path.name)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A path, and its first commit; the tests only read it."""
    made = Repository(tmp_path_factory.mktemp("git") / "llama.cpp")
    return made.path, made.commits[0]


def of_git(path, commit):
    return planned_source("git", "b4321", repository=str(path), revision=commit)


def of_path(tmp_path):
    """A release whose source is an archive of this machine."""
    if not (tmp_path / "a.tar.gz").exists():
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "CMakeLists.txt").write_bytes(os.urandom(200_000))
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "tree", "llama.cpp")
    digest = hashlib.sha256((tmp_path / "a.tar.gz").read_bytes()).hexdigest()
    return planned_source("archive", "b1", path=str(tmp_path / "a.tar.gz"), checksum=f"sha256:{digest}")


def test_controllers_that_fetch_the_same_at_once(repository, tmp_path, folder):
    path, commit = repository
    request = {"source": "git", "repository": str(path), "ref": commit}
    code = f"""
found = sources.resolve(request_of({request!r}), str)
(fetched,) = sources.fetch({of_git(path, commit)!r})
(kept,) = sources.fetch({of_path(tmp_path)!r})
print(found.build, fetched.commit, sources.sha256(fetched.path) == fetched.sha256, kept.sha256, fetched.is_new + kept.is_new)
"""
    answers = [answer.split() for answer in at_once(code, count=4)]
    digest = of_path(tmp_path).checksum.split(":")[1]
    assert {tuple(answer[:4]) for answer in answers} == {("1", commit, "True", digest)}
    assert sum(int(answer[4]) for answer in answers) == 2, "each source is fetched once"
    assert leftovers(folder) == []


def test_a_run_that_waits_says_for_what(tmp_path, monkeypatch):
    held = files.open_lock(cache.make_folder("sources", "llama_release") / cache.LOCK_FILE)
    assert files.take_lock(held)
    said = []
    monkeypatch.setattr(cache.Display, "display", lambda _self, text: (said.append(text), os.close(held)))
    assert sources.fetch(of_path(tmp_path))[0].is_new
    assert len(said) == 1
    assert f"sources is in use: waiting for process {os.getpid()}" in said[0]


@pytest.mark.parametrize("work", ["sources.fetch(SOURCE)", "sources.resolve(request_of(REQUEST), str)"])
def test_what_a_killed_run_left_is_removed_by_the_next(repository, folder, work):
    path, commit = repository
    source, request = of_git(path, commit), {"source": "git", "repository": str(path), "ref": commit}
    code = f"""
import os, signal
SOURCE, REQUEST = {source!r}, {request!r}
git._run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
{work}
"""
    killed = process(code)
    killed.communicate("\n")
    assert killed.returncode == -signal.SIGKILL
    assert leftovers(folder)
    sources.resolve(release_request.request_of(request), str)
    assert sources.fetch(source)[0].commit == commit
    assert leftovers(folder) == []


def test_what_is_in_the_cache_needs_no_lock_and_no_space(tmp_path, monkeypatch):
    sources.fetch(of_path(tmp_path))
    monkeypatch.setattr(cache, "exclusive_folder", None)
    assert not sources.fetch(of_path(tmp_path))[0].is_new


def test_a_cache_of_another_account_is_refused(folder, monkeypatch):
    release = of_path(folder.parent.parent)
    cache.make_folder("sources", "llama_release")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(cache.os, "geteuid", lambda: 65534)
    said = f"cache {folder} belongs to uid .*, but this run has uid 65534.*set XDG_CACHE_HOME to a folder of uid 65534"
    with pytest.raises(AnsibleError, match=said):
        sources.fetch(release)


@pytest.mark.parametrize("place", ["cache", "cache/llamacpp", "cache/llamacpp/sources"])
def test_a_cache_that_cannot_be_a_folder(tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("")
    with pytest.raises(AnsibleError, match=r"llama_release needs .*/sources on the controller, which cannot be used"):
        sources.fetch(of_path(tmp_path))

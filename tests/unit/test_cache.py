"""The controller's cache: several controllers at once, killed ones, full disks, and what was written by others."""

import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading

import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache, sources
from support.builds import planned_source
from test_git import Repository

pytestmark = pytest.mark.programs

SIZE = (1, 64, "f32")
SHA = "e7cff88d6cd9753602783228f2728f447173369dd78545415ea8c1c538528ad2"
"""Of the model of that size, see test_known_answer.py."""
PAGE_KIB = 4
LARGE = "size=64m,nr_inodes=10000"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llamacpp"


def model():
    """sha256 of the known-answer model in the cache, and what is recorded of it."""
    path, record = sources.known_answer_model(*SIZE)
    return hashlib.sha256(path.read_bytes()).hexdigest(), record.read_text()


def process(code):
    """A further controller; ``sources`` is imported when it prints its first line."""
    module = "ansible_collections.llamacpp.cluster.plugins.plugin_utils"
    utils = module.replace("plugin_utils", "module_utils")
    imports = f"from {utils}.llamacpp.model import known_answer_file\nfrom {utils}.planner.inputs.release_request import request_of\n"
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


KEPT = r"\.lock|.*\.(tar\.gz|json|build|gguf|gguf\.sha256)"


def leftovers(folder):
    """What the folders of the cache have beside files that are kept."""
    return [path.name for path in folder.glob("*/*") if path.is_dir() or not re.fullmatch(KEPT, path.name)]


def test_a_model_that_is_not_as_recorded_is_written_again():
    path, record = sources.known_answer_model(*SIZE)
    for recorded in ("", "\n", SHA[:40], "0" * 64, "\xff\xfe", SHA + SHA):
        record.write_text(recorded)
        assert model() == (SHA, SHA + "\n"), recorded
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert model() == (SHA, SHA + "\n")
    path.write_bytes(path.read_bytes()[:100])
    record.write_text(hashlib.sha256(path.read_bytes()).hexdigest() + "\n")
    assert model() == (SHA, SHA + "\n"), "the record of a torn file is right, and its size is not"


def test_controllers_that_write_the_same_model_at_once():
    size = (4, 512, "f16")
    code = (
        f"path, record = sources.known_answer_model(*{size})\nprint(sources.sha256(path), record.read_text().strip())"
    )
    answers = at_once(code)
    assert len(set(answers)) == 1
    assert len(set(answers[0].split())) == 1
    path, _record = sources.known_answer_model(*size)
    assert path.stat().st_size == known_answer_file.file_bytes(*size)


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
fetched = sources.fetch({of_git(path, commit)!r})
kept = sources.fetch({of_path(tmp_path)!r})
print(found.build, fetched.commit, sources.sha256(fetched.path) == fetched.sha256, kept.sha256, fetched.changed + kept.changed)
"""
    answers = [answer.split() for answer in at_once(code, count=4)]
    assert {tuple(answer[:4]) for answer in answers} == {
        ("1", commit, "True", of_path(tmp_path).checksum.split(":")[1])
    }
    assert sum(int(answer[4]) for answer in answers) == 2, "each source is fetched once"
    assert leftovers(folder) == []


def test_a_run_that_waits_says_for_what(tmp_path, monkeypatch):
    code = "sources._download_url = lambda *_: (print('fetching', flush=True), input())\n"
    other = process(code + f"sources.fetch({of_path(tmp_path)._replace(url='x', ref='b77')!r})")
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.stdout.readline() == "fetching\n"
    said = []

    def display(_self, text):
        said.append(text)
        other.kill()

    monkeypatch.setattr(cache.Display, "display", display)
    deadline = threading.Timer(60, other.kill)
    deadline.start()
    try:
        assert sources.fetch(of_path(tmp_path)).changed
    finally:
        deadline.cancel()
        other.kill()
        other.communicate()
    assert len(said) == 1
    assert f"sources is in use: waiting for process {other.pid}, which fetches b77" in said[0]


@pytest.mark.parametrize(
    "work", ["sources.fetch(SOURCE)", "sources.resolve(request_of(REQUEST), str)", "sources.known_answer_model(*SIZE)"]
)
def test_what_a_killed_run_left_is_removed_by_the_next(repository, folder, work):
    path, commit = repository
    source, request = of_git(path, commit), {"source": "git", "repository": str(path), "ref": commit}
    code = f"""
import os, signal
SOURCE, REQUEST, SIZE = {source!r}, {request!r}, {SIZE!r}
git._run = known_answer_file._attention = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
{work}
"""
    killed = process(code)
    killed.communicate("\n")
    assert killed.returncode == -signal.SIGKILL
    assert leftovers(folder)
    sources.resolve(release_request.request_of(request), str)
    assert sources.fetch(source).commit == commit
    assert model() == (SHA, SHA + "\n")
    assert leftovers(folder) == []


def test_what_is_in_the_cache_needs_no_lock_and_no_space(tmp_path, monkeypatch):
    sources.fetch(of_path(tmp_path))
    sources.known_answer_model(*SIZE)
    monkeypatch.setattr(cache, "exclusive_folder", None)
    assert not sources.fetch(of_path(tmp_path)).changed
    assert model() == (SHA, SHA + "\n")


def test_a_number_that_was_not_counted_is_counted_again(repository, folder):
    path, commit = repository
    request = {"source": "git", "repository": str(path), "ref": commit}
    assert sources.resolve(release_request.request_of(request), str).build == 1
    for text in ("", "12", "-1\n", "0\n", "nan\n", "²\n", "9" * 5000 + "\n"):
        (folder / "sources" / f"{commit}.build").write_text(text)
        assert sources.resolve(release_request.request_of(request), str).build == 1, text


def test_a_record_of_a_commit_that_is_not_one_is_not_believed(repository, folder):
    path, commit = repository
    fetched = sources.fetch(of_git(path, commit))
    record = next(folder.glob("sources/*.json"))
    for text in ("", "[]", '{"commit": 5}', '{"commit": "x", "sha256": "SHA"}', "[" * 100_000, '{"sha256": []}'):
        record.write_text(text.replace("SHA", fetched.sha256))
        assert sources.fetch(of_git(path, commit)) == fetched, text[:40]


def test_a_cache_of_another_account_is_refused(folder, monkeypatch):
    cache.folder("sources", "llama_release")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(cache.os, "geteuid", lambda: 65534)
    said = f"cache {folder} belongs to .*, and this run to nobody.*set XDG_CACHE_HOME to a folder of nobody"
    with pytest.raises(AnsibleError, match=said):
        sources.known_answer_model(*SIZE)
    with pytest.raises(Refusal, match=said):
        sources.resolve(release_request.request_of({"source": "git", "repository": "/no", "ref": "1" * 40}), str)


@pytest.mark.parametrize("place", ["cache", "cache/llamacpp", "cache/llamacpp/models"])
def test_a_cache_that_cannot_be_a_folder(tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("")
    with pytest.raises(
        AnsibleError, match=r"llama_model_known_answer needs .*/models on the controller, which cannot be used"
    ):
        sources.known_answer_model(*SIZE)


class Disk:
    """A tmpfs whose size changes; what is on it can be removed."""

    def __init__(self, path):
        self.path = path

    def mount(self, options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.path], check=False).returncode == 0

    def empty(self):
        for path in self.path.iterdir():
            shutil.rmtree(path)

    def resize(self, options):
        subprocess.run(["mount", "-o", f"remount,{options}", self.path], check=True)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    made = Disk(tmp_path / "disk")
    made.path.mkdir()
    if not made.mount(LARGE):
        pytest.skip("a small disk can be made by root only")
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.path))
    yield made
    subprocess.run(["umount", "-l", made.path], check=True)


def until_it_fits(disk, work, sizes, variable):
    """Does the work on larger and larger disks, empty ones, and again with space; it is the disk of the variable that stops it on each."""
    reasons = []
    for size in sizes:
        disk.resize(LARGE)
        disk.empty()
        disk.resize(size)
        try:
            work()
        except (AnsibleError, Refusal) as error:
            reasons.append(str(error))
            assert leftovers(disk.path / "llamacpp") == []
            disk.resize(LARGE)
            work()
            assert leftovers(disk.path / "llamacpp") == []
        else:
            full = f"{variable} does not fit on the controller: the disk of  is full. Free some space and run it again"
            assert {re.sub(r"/\S*", "", reason) for reason in reasons} == {full}
            assert len(reasons) > 3
            return
    pytest.fail(f"it does not fit on the largest disk: {reasons[-1]}")


def pages(step=1):
    return (f"size={number * PAGE_KIB}k,nr_inodes=10000" for number in range(1, 1000, step))


def inodes():
    return (f"size=64m,nr_inodes={number}" for number in range(2, 200))


@pytest.mark.faults
@pytest.mark.parametrize("sizes", [lambda: pages(2), inodes], ids=["bytes", "inodes"])
def test_a_full_disk_wherever_a_model_is_written(disk, sizes):
    def work():
        assert model() == (SHA, SHA + "\n")

    until_it_fits(disk, work, sizes(), "llama_model_known_answer")


@pytest.mark.faults
@pytest.mark.parametrize("sizes", [lambda: pages(5), inodes], ids=["bytes", "inodes"])
def test_a_full_disk_wherever_a_source_is_written(disk, sizes, repository, tmp_path):
    path, commit = repository

    def work():
        found = sources.resolve(
            release_request.request_of({"source": "git", "repository": str(path), "ref": commit}), str
        )
        fetched, kept = sources.fetch(of_git(path, commit)), sources.fetch(of_path(tmp_path))
        assert (found.build, fetched.commit, sources.sha256(fetched.path)) == (1, commit, fetched.sha256)
        assert "sha256:" + sources.sha256(kept.path) == of_path(tmp_path).checksum

    until_it_fits(disk, work, sizes(), "llama_release")

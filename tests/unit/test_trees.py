"""What source archives tell of themselves, and what planning makes of it."""

import hashlib
import io
import tarfile

import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import git, source_metadata, sources
from support.archives import ODD, write_odd
from support.sources import cache, resolve
from test_git import Repository, nowhere

__all__ = ["cache"]

COMMIT = "210a6570ceda20c5d6439172c09ada08c3754cc9"
CLONE = "llama_cpp_python-0.3.30/.git/modules/vendor/llama.cpp/"
LOG = (
    f"{'0' * 40} {'1' * 40} runner <runner@host> 1780375603 +0000\tclone: from https://github.com/ggml-org/llama.cpp.git\n"
    f"{'1' * 40} {COMMIT} runner <runner@host> 1780375605 +0000\tcheckout: moving from master to {COMMIT}\n"
)
"""As in the source archive of 0.3.25."""


def header(major=4, minor=0, patch=0):
    return (
        f"#define RPC_PROTO_MAJOR_VERSION    {major}\n#define RPC_PROTO_MINOR_VERSION    {minor}\n"
        f"#define RPC_PROTO_PATCH_VERSION    {patch}\n"
    )


SDIST = {
    CLONE + "HEAD": COMMIT + "\n",
    CLONE + "logs/HEAD": LOG,
    "llama_cpp_python-0.3.30/vendor/llama.cpp/ggml/include/ggml-rpc.h": header(),
}


def pack(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def request_of(archive, **more):
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return {"source": "pypi", "version": "0.3.30", "checksum": f"sha256:{digest}", **more}


@pytest.fixture
def downloads(monkeypatch):
    """Has pip find an archive of this test; the releases that it was asked for."""
    asked = []

    def serve(archive):
        def download(release, folder):
            asked.append(release.version)
            return pack(folder / "llama_cpp_python-0.3.30.tar.gz", archive) if isinstance(archive, dict) else archive

        monkeypatch.setattr(sources, "_download_pypi", download)
        return asked

    return serve


def test_a_release_of_llama_cpp_python_tells_commit_day_and_protocol(tmp_path, downloads):
    archive = pack(tmp_path / "a.tar.gz", SDIST)
    assert source_metadata.read(archive) == (COMMIT, "2026-06-02", "4.0.0")
    asked = downloads(tmp_path / "a.tar.gz")
    request = request_of(archive)
    release = releases.release_of(resolve(request, nowhere), {})
    assert (release.commit, release.build, release.generation, release.protocol) == (COMMIT, None, 9450, "4.0.0")
    assert releases.release_of(resolve(request, nowhere), {}) == release
    assert asked == ["0.3.30"], "what is in the cache is not asked for again"


@pytest.mark.parametrize("more", [{"build": 9500}, {"version": "0.3.36"}, {"version": "0.3.25"}])
def test_nothing_is_fetched_for_a_plan_where_enough_is_known(tmp_path, downloads, more):
    asked = downloads({})
    request = request_of(pack(tmp_path / "a.tar.gz", SDIST), **more)
    assert resolve(request, nowhere) == release_request.request_of(request)
    assert asked == []


@pytest.mark.parametrize("lacking", [{"HEAD"}, {"logs/HEAD"}, {"HEAD", "logs/HEAD"}])
def test_an_archive_that_does_not_tell_its_day_needs_a_build(tmp_path, downloads, lacking):
    files = {name: text for name, text in SDIST.items() if name.removeprefix(CLONE) not in lacking}
    archive = pack(tmp_path / "a.tar.gz", files)
    downloads(archive)
    found = resolve(request_of(archive), nowhere)
    if "logs/HEAD" in lacking:
        with pytest.raises(Refusal, match=r"llama_release has the build None: add build, .* number of pypi-0\.3\.30"):
            releases.release_of(found, {})
    else:
        assert releases.release_of(found, {}).commit == "unknown"


def test_an_archive_that_pip_cannot_fetch_refuses_the_plan(tmp_path, monkeypatch):
    def fail(*_arguments):
        raise AnsibleError("pip could not fetch the source archive of llama-cpp-python 0.3.30 (llama_release)")

    monkeypatch.setattr(sources, "_download_pypi", fail)
    with pytest.raises(Refusal, match=r"pip could not fetch .* 0\.3\.30"):
        resolve(request_of(pack(tmp_path / "a.tar.gz", SDIST)), nowhere)


@pytest.mark.parametrize("name", ODD)
def test_an_archive_that_python_cannot_read_refuses_the_plan(tmp_path, downloads, monkeypatch, name):
    archive = tmp_path / "odd.tar.gz"
    write_odd(archive, name, monkeypatch)
    request = request_of(archive)
    local = {key: value for key, value in request.items() if key != "version"}
    local.update(source="archive", path=str(archive), build=12000)
    assert resolve(local, str).build == 12000
    downloads(archive)
    with pytest.raises(
        Refusal, match=r"^llama_release has .* archive that cannot be read: |archive cannot be read \(\w.*add build"
    ):
        resolve(request, nowhere)


def test_metadata_is_read_once_and_again_where_its_record_is_torn(tmp_path, monkeypatch):
    archive = pack(tmp_path / "0123.tar.gz", SDIST)
    for record in ("", "[]", '{"commit": "x"}'):
        (tmp_path / "0123.tree").write_text(record)
        assert source_metadata.cached(archive).protocol == "4.0.0", record
    monkeypatch.setattr(source_metadata, "read", None)
    assert source_metadata.cached(archive).commit == COMMIT


@pytest.mark.parametrize(
    "files, told",
    [
        ({"llama.cpp/ggml/include/ggml-rpc.h": header(8)}, (None, None, "8.0.0")),
        ({"llama.cpp/ggml/include/ggml-rpc.h": "#define RPC_PROTO_MAJOR_VERSION 8\n"}, (None, None, None)),
        ({"a/b/c/d/e/f/g/ggml/include/ggml-rpc.h": header()}, (None, None, None)),
        ({CLONE + "HEAD": "ref: refs/heads/master\n"}, (None, None, None)),
        ({"llama.cpp/ggml/include/ggml-rpc.h": header() + " " * source_metadata.MEMBER_BYTES}, (None, None, None)),
    ],
)
def test_what_an_archive_tells(tmp_path, files, told):
    assert source_metadata.read(pack(tmp_path / "a.tar.gz", files)) == told


@pytest.fixture
def repository(tmp_path):
    """With a tag of a build whose protocol is not known by its number."""
    repository = Repository(tmp_path / "llama.cpp")
    folder = repository.path / "ggml/include"
    folder.mkdir(parents=True)
    (folder / "ggml-rpc.h").write_text(header(9, 1))
    repository.commit(5)
    repository.git("tag", "b12000")
    return repository


def test_the_protocol_of_a_newer_build_is_read_in_its_tree(repository):
    found = repository.resolved("b12000")
    release = releases.release_of(found, {})
    assert (release.build, release.protocol) == (12000, "9.1.0")
    repository.path.rename(repository.path.with_name("away"))
    assert resolve(repository.request("b12000"), nowhere) == found, "what is in the cache is not asked for again"


def test_a_repository_that_cannot_be_read_leaves_the_protocol_open(repository):
    repository.path.rename(repository.path.with_name("away"))
    assert releases.release_of(repository.resolved("b12000"), {}).protocol is None


def test_nothing_is_asked_of_a_repository_for_a_build_that_is_known(repository, monkeypatch):
    monkeypatch.setattr(git, "_run", lambda *_arguments: pytest.fail("git was asked"))
    assert releases.release_of(repository.resolved("b8600"), {}).protocol == "3.6.1"


def test_the_protocol_does_not_make_another_release(repository):
    known = repository.resolved("b12000")
    unknown = known._replace(tree=None)
    assert releases.release_of(known, {}).id == releases.release_of(unknown, {}).id


def test_the_tree_of_an_archive_tells_its_protocol(tmp_path):
    archive = pack(tmp_path / "a.tar.gz", {"llama.cpp/ggml/include/ggml-rpc.h": header(8)})
    request = {**request_of(archive), "source": "archive", "path": str(archive), "build": 12000}
    del request["version"]
    assert releases.release_of(resolve(request, str), {}).protocol == "8.0.0"


def test_an_operator_cannot_say_what_a_tree_tells():
    request = {"source": "git", "ref": "b8600", "tree": {"protocol": "8.0.0"}}
    with pytest.raises(Refusal, match=r"llama_release has tree, which source: git does not accept"):
        resolve(request, nowhere)

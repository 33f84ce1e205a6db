"""What source archives tell of themselves, and what planning makes of it."""

import gzip
import hashlib
import io
import tarfile

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import git, source_metadata
from support.sources import cache, resolve
from test_git import Repository, nowhere

__all__ = ["cache"]


def header(major=4, minor=0, patch=0):
    return (
        f"#define RPC_PROTO_MAJOR_VERSION    {major}\n#define RPC_PROTO_MINOR_VERSION    {minor}\n"
        f"#define RPC_PROTO_PATCH_VERSION    {patch}\n"
    )


def pack(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_an_archive_that_cannot_be_read_leaves_the_protocol_open(tmp_path):
    archive = tmp_path / "odd.tar.gz"
    archive.write_bytes(gzip.compress(b"no archive"))
    assert resolve(request_of(archive), str).protocol is None


def request_of(archive):
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return {"source": "archive", "path": str(archive), "checksum": f"sha256:{digest}", "build": 12000}


@pytest.mark.parametrize(
    "files, told",
    [
        ({"llama.cpp/ggml/include/ggml-rpc.h": header(8)}, "8.0.0"),
        ({"llama.cpp/ggml/include/ggml-rpc.h": "#define RPC_PROTO_MAJOR_VERSION 8\n"}, None),
        ({"a/b/c/d/e/f/g/ggml/include/ggml-rpc.h": header()}, None),
    ],
)
def test_what_an_archive_tells(tmp_path, files, told):
    assert source_metadata.protocol_of(pack(tmp_path / "a.tar.gz", files)) == told


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
    assert releases.release_of(repository.resolved("b11450"), {}).protocol == "8.0.0"


def test_the_protocol_does_not_make_another_release(repository):
    known = repository.resolved("b12000")
    unknown = known._replace(protocol=None)
    assert releases.release_of(known, {}).id == releases.release_of(unknown, {}).id


def test_the_tree_of_an_archive_tells_its_protocol(tmp_path):
    archive = pack(tmp_path / "a.tar.gz", {"llama.cpp/ggml/include/ggml-rpc.h": header(8)})
    assert releases.release_of(resolve(request_of(archive), str), {}).protocol == "8.0.0"

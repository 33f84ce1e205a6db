import bz2
import gzip
import hashlib
import os
import tarfile
from contextlib import nullcontext

import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources
from model_server import answer
from support.builds import planned_source
from support.sources import cache, kept, resolve

__all__ = ["cache"]

CONTENT = bytes(tarfile.BLOCKSIZE)
SHA = hashlib.sha256(CONTENT).hexdigest()


def release(**values):
    return planned_source("archive", "b1", **{"checksum": f"sha256:{SHA}", **values})


def test_a_file_of_the_controller(tmp_path, cache):
    (tmp_path / "a.tar.gz").write_bytes(CONTENT)
    (fetched,) = sources.fetch(release(path=str(tmp_path / "a.tar.gz")))
    assert fetched.is_new
    assert fetched.path.read_bytes() == CONTENT
    (tmp_path / "a.tar.gz").unlink()
    assert sources.fetch(release(path=str(tmp_path / "a.tar.gz"))) == [fetched._replace(is_new=False)]
    assert kept(cache) == [f"{SHA[:16]}.json", f"{SHA[:16]}.tar.gz"]


def test_a_wrong_checksum_names_both_and_leaves_nothing(tmp_path, cache):
    (tmp_path / "a.tar.gz").write_bytes(b"something else")
    actual = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(AnsibleError, match=f"(?s)llama_release.*{SHA}.*{actual}"):
        sources.fetch(release(path=str(tmp_path / "a.tar.gz")))
    assert kept(cache) == []


def test_what_stands_in_the_cache_and_cannot_be_read_is_named(tmp_path, cache):
    (tmp_path / "a.tar.gz").write_bytes(CONTENT)
    (cache / f"{SHA[:16]}.tar.gz").mkdir(parents=True)
    with pytest.raises(AnsibleError, match=r"llama_release needs .* on the controller, which cannot be used"):
        sources.fetch(release(path=str(tmp_path / "a.tar.gz")))


def test_where_an_archive_is_was_looked_up_when_planning(tmp_path):
    def find(path):
        return str(tmp_path / path)

    request = {"source": "archive", "path": "a.tar.gz", "checksum": f"sha256:{SHA}", "build": 1}
    with pytest.raises(Refusal, match=r"path to 'a\.tar\.gz', .*not a readable file.*relative to the inventory"):
        resolve(request, find)
    (tmp_path / "a.tar.gz").write_bytes(CONTENT)
    found = resolve(request, find)
    assert found.path == str(tmp_path / "a.tar.gz")
    sources.fetch(release(path=found.path))
    (tmp_path / "a.tar.gz").unlink()
    assert resolve(request, find).path == "a.tar.gz", "what is in the cache is not asked for again"


def test_an_archive_behind_a_url(server):
    server.faults["/a.tar.gz"] = answer(200, CONTENT)
    (fetched,) = sources.fetch(release(url=server.url + "/a.tar.gz"))
    assert fetched.is_new
    assert fetched.path.read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["fifo", ""])
def test_what_is_not_a_file_is_not_read(tmp_path, name):
    os.mkfifo(tmp_path / "fifo")
    request = {"source": "archive", "path": str(tmp_path / name), "checksum": f"sha256:{SHA}", "build": 1}
    with pytest.raises(Refusal, match=r"sets path to .*is not a readable file on the controller"):
        resolve(request, str)


LONG = tarfile.TarInfo("x")
LONG.size = 300_000  # several blocks of bzip2
TORN = [gzip.compress(os.urandom(9000))[:5000], bz2.compress(LONG.tobuf() + os.urandom(LONG.size), 1)[:-9] + bytes(9)]


def _header(kind, size):
    member = tarfile.TarInfo("name")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def _comments(kind, size, count=1):
    lines = b"".join((b"%d comment%d=" % (size, number)).ljust(size - 1, b"a") + b"\n" for number in range(count))
    return _header(kind, len(lines)) + lines + bytes(-len(lines) % 512) + FILE


FILE, LIMIT = _header(tarfile.REGTYPE, 0), 1 << 16
LONG_NAME = _header(tarfile.GNUTYPE_LONGNAME, 2) + b"a".ljust(512, b"\0")
ENDLESS_HEADERS = {
    "a name of a name of a name": LONG_NAME * 3000 + FILE + bytes(1024),
    "a name of 4 EiB": _header(tarfile.GNUTYPE_LONGNAME, 1 << 62) + bytes(2048),
    "a long comment": _comments(tarfile.XHDTYPE, 2 * LIMIT),
    "many comments": _comments(tarfile.XHDTYPE, 1 << 12) * 32,
    "many comments on all files": _comments(tarfile.XGLTYPE, 100, 99),
    "many headers": FILE * (LIMIT >> 8),
}


@pytest.mark.parametrize("name", ENDLESS_HEADERS)
def test_headers_of_an_archive_are_limited(tmp_path, monkeypatch, name):
    """Without a limit 398 KiB take 1.2 GiB of memory. Content does not count."""
    monkeypatch.setattr(archives, "MAX_HEADER_BYTES", LIMIT)
    content = _header(tarfile.REGTYPE, 2 * LIMIT) + bytes(2 * LIMIT)
    for number, data in enumerate((content + FILE * 9, content + ENDLESS_HEADERS[name])):
        path = tmp_path / f"{number}.tar.gz"
        path.write_bytes(gzip.compress(data))
        for read in (lambda path: [*archives.members(path)], lambda path: archives.extract_members(path, {}.get)):
            with pytest.raises(archives.DamagedError) if number else nullcontext():
                read(path)
    with pytest.raises(archives.DamagedError):
        archives.extract_members(path, lambda member: tmp_path / "file" if not (tmp_path / "file").exists() else None)
    assert (tmp_path / "file").stat().st_size == 2 * LIMIT


def test_a_sparse_file_fills_no_disk(tmp_path):
    map_of_holes = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n35 GNU.sparse.realsize=99999999999\n"
    header = _header(tarfile.XHDTYPE, len(map_of_holes)) + map_of_holes.ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(
        header + _header(tarfile.REGTYPE, 512) + b"1\n0\n0\n".ljust(512, b"\0") + bytes(1024)
    )
    with pytest.raises(archives.DamagedError, match="is a sparse file: pack it without holes"):
        archives.extract_members(tmp_path / "a.tar", lambda member: tmp_path / "file")


@pytest.mark.parametrize("data", [b"text", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", *TORN])
def test_an_archive_that_hosts_cannot_unpack(tmp_path, cache, data):
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(AnsibleError, match=r"/a.tar, which cannot be read: .* a complete tar archive"):
        sources.fetch(release(path=str(tmp_path / "a.tar"), checksum=f"sha256:{hashlib.sha256(data).hexdigest()}"))
    assert kept(cache) == []


OTHER_HASHES = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"
NO_PIP = "/usr/bin/python3: No module named pip"


@pytest.mark.parametrize(
    "stderr, said",
    [
        (f"{OTHER_HASHES}\n  Expected sha256 {'0' * 64}\n       Got        {'1' * 64}", f"Got *{'1' * 64}"),
        ("ERROR: No matching distribution found", "check its version"),
        (NO_PIP, f"source: archive. Output of pip: {NO_PIP}"),
    ],
)
def test_pip_that_fails(monkeypatch, stderr, said):
    """What pip says was recorded from pip 23.2."""
    failed = type("Completed", (), {"returncode": 1, "stderr": stderr})()
    monkeypatch.setattr(sources.subprocess, "run", lambda *_arguments, **_options: failed)
    with pytest.raises(AnsibleError, match=said):
        sources.fetch(planned_source("pypi", "0.3.36", version="0.3.36", checksum=f"sha256:{SHA}"))

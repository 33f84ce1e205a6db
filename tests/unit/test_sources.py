import errno
import hashlib
import http.server
import threading

import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import sources

CONTENT = b"an archive"
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llamacpp" / "sources"


def release(**values):
    return {"source": "archive", "ref": "b1", "checksum": f"sha256:{SHA}", "commit": "unknown", **values}


def kept(cache):
    return [path.name for path in cache.iterdir() if path.name != ".lock"]


def test_a_file_of_the_controller(tmp_path, cache):
    (tmp_path / "a.tar.gz").write_bytes(CONTENT)
    path, changed, *_digests = fetched = sources.fetch(release(path=str(tmp_path / "a.tar.gz")))
    assert changed
    assert path.read_bytes() == CONTENT
    (tmp_path / "a.tar.gz").unlink()
    assert sources.fetch(release(path=str(tmp_path / "a.tar.gz"))) == fetched._replace(changed=False)
    assert kept(cache) == [path.name]


def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(CONTENT)
    fetched = sources.fetch(release(path=str(tmp_path / "a.tar.gz")))
    fetched.path.write_bytes(b"damaged")
    assert sources.fetch(release(path=str(tmp_path / "a.tar.gz"))) == fetched
    assert fetched.path.read_bytes() == CONTENT


def test_a_wrong_checksum_names_both_and_leaves_nothing(tmp_path, cache):
    (tmp_path / "a.tar.gz").write_bytes(b"something else")
    with pytest.raises(
        AnsibleError, match=f"(?s)llama_release.*{SHA}.*{hashlib.sha256(b'something else').hexdigest()}"
    ):
        sources.fetch(release(path=str(tmp_path / "a.tar.gz")))
    assert kept(cache) == []


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(AnsibleError, match=r"llama_release has the path .*none\.tar\.gz.*No such file.*use a path"):
        sources.fetch(release(path=str(tmp_path / "none.tar.gz")))


def test_where_an_archive_is_was_looked_up_when_planning(tmp_path):
    def find(path):
        return str(tmp_path / path)

    request = {"source": "archive", "path": "a.tar.gz", "checksum": f"sha256:{SHA}", "build": 1}
    with pytest.raises(
        Refusal, match=r"llama_release has the path 'a\.tar\.gz', .*No such file.*relative to the inventory"
    ):
        sources.resolve(request, find)
    (tmp_path / "a.tar.gz").write_bytes(CONTENT)
    found = sources.resolve(request, find)
    assert found == {**request, "path": str(tmp_path / "a.tar.gz")}
    sources.fetch(release(path=found["path"]))
    (tmp_path / "a.tar.gz").unlink()
    assert sources.resolve(request, find) == request, "what is in the cache is not asked for again"


@pytest.mark.parametrize("path", [["a.tar.gz"], 5])
def test_a_path_that_is_none(path):
    request = {"source": "archive", "path": path, "checksum": f"sha256:{SHA}", "build": 1}
    with pytest.raises(Refusal, match=r"llama_release has the path .*use the path of a file on the controller"):
        sources.resolve(request, str)


def test_a_full_disk_of_the_controller(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sources.shutil, "copyfile", full)
    with pytest.raises(AnsibleError, match=r"llama_release does not fit on the controller: the disk of .* is full"):
        sources.fetch(release(path=str(tmp_path / "a.tar.gz")))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/a.tar.gz" else 404)
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def test_an_archive_behind_a_url(server):
    fetched = sources.fetch(release(url=server + "/a.tar.gz"))
    assert fetched.changed
    assert fetched.path.read_bytes() == CONTENT


def test_a_url_that_is_not_there(server):
    with pytest.raises(AnsibleError, match=r"llama_release has the url .*404"):
        sources.fetch(release(url=server + "/other"))


@pytest.mark.parametrize(
    "stderr, said",
    [
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Expected sha256 "
            + "0" * 64
            + "\n       Got        "
            + "1" * 64,
            f"has sha256:{'1' * 64}",
        ),
        ("ERROR: No matching distribution found", "check the version"),
        ("/usr/bin/python3: No module named pip", "has no pip"),
    ],
)
def test_pip_that_fails(monkeypatch, stderr, said):
    """What pip says was recorded from pip 23.2."""
    failed = type("Completed", (), {"returncode": 1, "stderr": stderr})()
    monkeypatch.setattr(sources.subprocess, "run", lambda *_arguments, **_options: failed)
    with pytest.raises(AnsibleError, match=said):
        sources.fetch({"source": "pypi", "ref": "0.3.36", "version": "0.3.36", "checksum": f"sha256:{SHA}"})

"""llama-server's chat page on the controller: upstream's server with each of its faults, npm by a stand-in, and what is kept."""

import hashlib
import io
import os
import tarfile
import time
from contextlib import suppress

import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import chat_page
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources.sources import CachedArchive
from model_server import answer
from support.builds import planned_source
from support.sources import cache, kept

__all__ = ["cache"]

RELEASE = planned_source("pypi", "pypi-1", build=11063, member="x-1/vendor/llama.cpp")
PLACE = "/buckets/ggml-org/llama-ui/resolve/b11063/dist.tar.gz"
PAGE = {"./index.html": b"<html>", "./_app/bundle.js": b"1"}


def packed(files, **links):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return stream.getvalue()


@pytest.fixture
def source(tmp_path, monkeypatch, server):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(chat_page, "DOWNLOAD_LIMITS", {"silence_s": 0.3, "limit_s": 1.0, "max_bytes": 4096})
    archive = tmp_path / "source.tar.gz"
    archive.write_bytes(packed({"x-1/vendor/llama.cpp/tools/ui/package.json": b"{}", "x-1/tools/ui/other": b"-"}))
    return CachedArchive(archive, False, "5" * 64, "c")


@pytest.fixture
def warnings(monkeypatch):
    texts = []
    monkeypatch.setattr(chat_page.Display, "warning", lambda _self, text: texts.append(text))
    return texts


def offer(server, content, checksum=None):
    server.files[PLACE] = content
    digest = checksum or hashlib.sha256(content).hexdigest()
    server.files[f"{PLACE}.sha256"] = f"{digest}  dist.tar.gz\n".encode()


def install(tmp_path, node, npm):
    (tmp_path / "bin").mkdir(exist_ok=True)
    for name, text in (("node", f"echo {node}"), ("npm", f"PATH=/usr/bin:/bin\n{npm}")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)


NPM = (
    'case "$1" in ci) [ "$2" = --ignore-scripts ] && ls > here;; '
    "run) mkdir $LLAMA_UI_OUT_DIR && cp here $LLAMA_UI_OUT_DIR/index.html && ln -s /etc/passwd $LLAMA_UI_OUT_DIR/link;; esac"
)


def content_of(page):
    with tarfile.open(page.path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def test_upstreams_page_is_kept_for_later_builds_of_the_same_source(source, server, cache, warnings):
    offer(server, packed({**PAGE, "../out": b"x", "/etc/x": b"x"}, link="/etc/passwd"))
    (page,) = chat_page.fetch(RELEASE, source, "auto")
    assert page.is_new
    assert content_of(page) == {"index.html": b"<html>", "_app/bundle.js": b"1"}
    server.files.clear()
    assert chat_page.fetch(RELEASE, source, "true") == chat_page.cached_pages(source) == [page._replace(is_new=False)]
    assert not chat_page.cached_pages(source._replace(sha256="6" * 64))
    assert kept(cache) == [page.path.name]
    assert not warnings


def test_a_page_that_cannot_be_downloaded_never_fails_a_run(source, server, cache, warnings):
    page = packed(PAGE)

    def trickle(handler):
        answer(200, b"", Content_Length=len(page))(handler)
        with suppress(OSError):
            for number in range(len(page)):
                time.sleep(0.1)
                handler.wfile.write(page[number : number + 1])

    cases = {
        "does not match its checksum file": lambda: offer(server, page, "0" * 64),
        "does not exist (HTTP 404)": server.files.clear,
        "was cut off: the server sent less": lambda: (offer(server, page), setattr(server, "cut", 40)),
        "is too large, or its server is too slow": lambda: (
            setattr(server, "cut", None),
            server.faults.update({PLACE: [trickle]}),
        ),
        "server": lambda: server.faults.update({f"{PLACE}.sha256": [lambda _handler: time.sleep(1)]}),
        "the page's files are incomplete": lambda: offer(server, packed({"index.html": b""})),
        "cannot be unpacked (Compressed file ended": lambda: offer(server, page[: len(page) // 2]),
        "cannot be unpacked (file": lambda: offer(server, b"<html>not an archive"),
        "cannot be unpacked (index.html appears twice": lambda: offer(server, packed({**PAGE, "index.html": b""})),
        "cannot be unpacked ([Errno": lambda: offer(server, packed({**PAGE, "a": b"x", "a/b": b"x"})),
        "HF_ENDPOINT on the controller is": lambda: os.environ.update(HF_ENDPOINT="nonsense"),
    }
    for reason, prepare in cases.items():
        prepare()
        assert chat_page.fetch(RELEASE, source, "auto") == [], reason
        assert reason in warnings[-1]
        assert warnings[-1].startswith("llama-server of pypi-1 has no chat page: ")
        assert warnings[-1].endswith("install Node.js 20 or newer on the controller and set llama_server_ui to true")
    assert kept(cache) == []


def test_npm_builds_it_only_on_request(source, tmp_path, cache, warnings):
    install(tmp_path, "v20.1.0", NPM)
    assert chat_page.fetch(RELEASE, source, "auto") == []
    (page,) = chat_page.fetch(RELEASE, source, "true")
    assert content_of(page) == {"index.html": b"here\npackage.json\n"}
    assert kept(cache) == [page.path.name]


NPM_CI = "npm ci --ignore-scripts --no-audit --no-fund"


@pytest.mark.parametrize(
    "node, npm, reason",
    [
        (None, None, "node --version failed on the controller ([Errno 2] No such file or directory: 'node')"),
        ("v18.19.0", NPM, "the controller has Node.js v18.19.0, but the page needs 20 or newer"),
        ("v22.1.0", "echo no network >&2; exit 1", f"{NPM_CI} failed on the controller: no network"),
        ("v22.1.0", "sleep 9", f"{NPM_CI} failed on the controller (Command"),
        ("v22.1.0", ":", "the page's files are incomplete"),
    ],
)
def test_a_page_that_is_wanted_and_cannot_be_had(source, tmp_path, monkeypatch, cache, node, npm, reason):
    monkeypatch.setattr(chat_page, "COMMAND_TIMEOUT_SECONDS", 1)
    if node:
        install(tmp_path, node, npm)
    with pytest.raises(AnsibleError) as failed:
        chat_page.fetch(RELEASE, source, "true")
    for text in ("llama_server_ui is true, but pypi-1 has no chat page: ", "404", reason, "auto"):
        assert text in str(failed.value)
    assert kept(cache) == []

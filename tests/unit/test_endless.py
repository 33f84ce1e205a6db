"""Answers without an end, of a hub, a registry and a server of archives: each is refused with a sentence, soon, and after a bounded part of it."""

import hashlib
import itertools
import sys
import time
import types
from contextlib import suppress
from pathlib import Path

import gguf_files
import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.model_files import ModelFile
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub as on_controller
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources
from test_model_sources import REPO, looked_up, on_huggingface, request_of

sys.path.append(str(Path(__file__).resolve().parents[1]))
import hub as play

pytestmark = pytest.mark.programs
MOST_BYTES = 64 << 20
"""That a server can send before it is left: six answers of 8 MiB, and what lies in sockets."""
MANY = 4 * MOST_BYTES
SHA256 = "0" * 64


class Hub(play.Hub):
    """Gives each request the same answer, and counts its bytes."""

    def __init__(self, folder, attack):
        super().__init__(folder)
        self.sent, self.number, self.attack, self.stopped = 0, itertools.count(), attack, False

    def answer(self, handler, path):
        handler.close_connection = True
        with suppress(OSError):
            self.attack(self, handler)

    def say(self, handler, text):
        self.sent += handler.wfile.write(text)

    def head(self, handler, status, *lines):
        self.say(handler, "\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode())

    def repeat(self, handler, piece, pause=0.0):
        while self.sent < MANY and not self.stopped:
            self.say(handler, piece)
            time.sleep(pause)


def endless_list(hub, handler):
    hub.head(handler, 200, "Content-Type: application/json")
    hub.say(handler, b'{"sha": "%s", "siblings": [' % (b"a" * 40))
    hub.repeat(handler, b'{"rfilename": "model.gguf", "size": 1},' * 1000)


def nested_lists(hub, handler):
    hub.head(handler, 200, "Content-Type: application/json")
    hub.say(handler, b'{"sha": "%s", "siblings": [], "x": %s}' % (b"a" * 40, b"[" * 900 + b"]" * 900))


def endless_spaces_in_chunks(hub, handler):
    hub.head(handler, 200, "Content-Type: application/json", "Transfer-Encoding: chunked")
    hub.repeat(handler, b"10000\r\n" + b" " * 65536 + b"\r\n")


def packed(hub, handler):
    hub.head(handler, 200, "Content-Type: application/json", "Content-Encoding: gzip", "Content-Length: 3")
    hub.say(handler, b"\x1f\x8b\x08")


def endless_redirects(hub, handler):
    hub.head(handler, 302, f"Location: /{next(hub.number)}", "Content-Length: 0")


def endless_redirects_with_endless_bodies(hub, handler):
    hub.head(handler, 302, f"Location: /{next(hub.number)}")
    hub.repeat(handler, b" " * 65536)


def endless_headers(hub, handler):
    hub.say(handler, b"HTTP/1.1 200 OK\r\n")
    hub.repeat(handler, b"X-Y: " + b"x" * 60000 + b"\r\n")


def endless_header(hub, handler):
    hub.say(handler, b"HTTP/1.1 200 OK\r\nX-Y: ")
    hub.repeat(handler, b"x" * 65536)


def endless_answers_before_the_answer(hub, handler):
    hub.repeat(handler, b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def trickle_of_headers(hub, handler):
    hub.say(handler, b"HTTP/1.1 200 OK\r\n")
    hub.repeat(handler, b"X", 0.05)


def trickle_of_spaces(hub, handler):
    hub.head(handler, 200, "Content-Type: application/json")
    hub.repeat(handler, b" ", 0.05)


def error_without_end(hub, handler):
    hub.head(handler, 404, "X-Error-Code: RepoNotFound")
    hub.repeat(handler, b" " * 65536)


ATTACKS = [
    *(endless_list, endless_spaces_in_chunks, packed, endless_redirects, endless_redirects_with_endless_bodies),
    *(endless_headers, endless_header, trickle_of_headers, trickle_of_spaces, error_without_end),
    endless_answers_before_the_answer,
]


def on_hub(url):
    looked_up(on_huggingface(), seconds=1)


def in_registry(url):
    looked_up(request_of(llama_model_ollama=f"{url}/library/m:1"), seconds=1)


def behind_url(url):
    looked_up(request_of(llama_model_url=[f"{url}/m.gguf"]), seconds=1)


def of_archive(url):
    sources.fetch({"source": "archive", "ref": "x", "commit": "c", "checksum": f"sha256:{SHA256}", "url": f"{url}/a"})


@pytest.fixture
def attacked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(web, "SECONDS_OF_HEADERS", 0.5)
    monkeypatch.setattr(sources, "DOWNLOAD_SECONDS", 1)
    monkeypatch.setattr(sources, "ARCHIVE_BYTES", 1 << 20)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    made = []

    def start(attack):
        made.append(Hub(tmp_path / "hub", attack).start())
        monkeypatch.setenv("HF_ENDPOINT", made[0].url)
        return made[0]

    yield start
    for hub in made:
        hub.stopped = True
        hub.stop()


def refusal(look, url):
    with pytest.raises((Refusal, AnsibleError)) as refused:
        look(url)
    return str(refused.value)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("look", [on_hub, in_registry, behind_url, of_archive])
def test_an_answer_without_an_end_is_refused(attacked, look, attack):
    hub = attacked(attack)
    message = refusal(look, hub.url)
    assert hub.sent < MOST_BYTES
    assert len(message) < 700
    assert "\n" not in message
    assert ": " in message  # a remedy
    assert message.startswith(("llama_model_", "llama_release "))


def test_each_limit_is_named(attacked, monkeypatch):
    hub = attacked(endless_list)
    subject = f"has the repo {REPO}, which"
    assert f"{subject} cannot be looked up: {hub.url} is longer than 8192 KiB" in refusal(on_hub, hub.url)
    assert f"whose manifest {hub.url}/v2/library/m/manifests/1 is longer than 1024 KiB" in refusal(in_registry, hub.url)
    hub.attack = nested_lists
    monkeypatch.setattr(on_controller, "MAX_PARTS", 800)
    assert "(its answer has more than 800 lists and objects)" in refusal(on_hub, hub.url)
    hub.attack = packed
    assert f"{subject} cannot be looked up: the answer of {hub.url} is not that of" in refusal(on_hub, hub.url)
    hub.attack = endless_redirects
    for look in (in_registry, behind_url, of_archive):
        assert "is redirected more than 5 times: use the URL of the file itself" in refusal(look, hub.url)
    hub.attack = trickle_of_headers
    said = "has a server whose answer did not begin within 0.5 s: try again, or use another server"
    for look in (in_registry, behind_url, of_archive):
        message = refusal(look, hub.url)
        assert said in message
        assert "is not a URL" not in message


def test_a_download_whose_answer_does_not_begin_is_given_up(attacked, tmp_path, monkeypatch):
    """After it was tried again: such a server may have too much to do."""
    pauses = []
    monkeypatch.setattr(download, "PAUSES", (0, 2))
    hub = attacked(trickle_of_headers)
    url, data = f"{hub.url}/m.gguf", gguf_files.model()
    digest = hashlib.sha256(data).hexdigest()
    file = ModelFile("m.gguf", tmp_path / "m.gguf", url, len(data), digest, tmp_path / "record")
    monkeypatch.setattr(download, "time", types.SimpleNamespace(sleep=pauses.append))
    with pytest.raises(Refusal, match=r"has a server whose answer did not begin within 0\.5 s"):
        download.receive(file, None, 0, lambda piece: None)
    assert pauses == [2]

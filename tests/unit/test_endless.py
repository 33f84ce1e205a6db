"""Answers without an end, of a hub, a web server and a server of archives: each is refused with a sentence, soon, and after a bounded part of it."""

import itertools
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import web
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources
from support.builds import planned_source
from support.model_sources import REPO, looked_up, on_huggingface, request_of

sys.path.append(str(Path(__file__).resolve().parents[1]))
import hub as play

pytestmark = pytest.mark.programs
MOST_BYTES = 64 << 20
"""That a server can send before it is left: six answers of 8 MiB, and what lies in sockets."""
MANY = 4 * MOST_BYTES
SHA256 = "0" * 64


class Attack(NamedTuple):
    """An answer: its beginning, and what is repeated after it; {n} is another number each time."""

    begin: bytes
    piece: bytes = b""
    pause: float = 0.0


class Hub(play.Hub):
    """Gives each request the same answer, and counts its bytes."""

    def __init__(self, folder, attack):
        super().__init__(folder)
        self.sent, self.number, self.attack, self.stopped = 0, itertools.count(), attack, False

    def answer(self, handler, path):
        handler.close_connection = True
        begin, piece, pause = self.attack
        with suppress(OSError):
            self.sent += handler.wfile.write(begin.replace(b"{n}", b"%d" % next(self.number)))
            while piece and self.sent < MANY and not self.stopped:
                self.sent += handler.wfile.write(piece)
                time.sleep(pause)


JSON = b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\n"
BEGUN = b'{"sha": "%s", "siblings": [' % (b"a" * 40)
SPACES = b" " * 65536
ATTACKS = {
    "endless list": Attack(JSON + b"\r\n" + BEGUN, b'{"rfilename": "model.gguf", "size": 1},' * 1000),
    "endless chunks": Attack(JSON + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + SPACES + b"\r\n"),
    "packed": Attack(JSON + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08"),
    "endless redirects": Attack(b"HTTP/1.1 302 X\r\nLocation: /{n}\r\nContent-Length: 0\r\n\r\n"),
    "redirects with endless bodies": Attack(b"HTTP/1.1 302 X\r\nLocation: /{n}\r\n\r\n", SPACES),
    "endless headers": Attack(b"HTTP/1.1 200 OK\r\n", b"X-Y: " + b"x" * 60000 + b"\r\n"),
    "endless header": Attack(b"HTTP/1.1 200 OK\r\nX-Y: ", b"x" * 65536),
    "answers before the answer": Attack(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "trickle of headers": Attack(b"HTTP/1.1 200 OK\r\n", b"X", 0.05),
    "trickle of spaces": Attack(JSON + b"\r\n", b" ", 0.05),
    "endless error": Attack(b"HTTP/1.1 404 X\r\nX-Error-Code: RepoNotFound\r\n\r\n", SPACES),
}


def on_hub(url):
    looked_up(on_huggingface(), seconds=1)


def behind_url(url):
    looked_up(request_of(llama_model_url=[f"{url}/m.gguf"]), seconds=1)


def of_archive(url):
    sources.fetch(planned_source("archive", "x", checksum=f"sha256:{SHA256}", url=f"{url}/a"))


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


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("look", [on_hub, behind_url, of_archive])
def test_an_answer_without_an_end_is_refused(attacked, tmp_path, look, name):
    hub = attacked(ATTACKS[name])
    message = refusal(look, hub.url)
    assert hub.sent < MOST_BYTES
    assert len(message) < 700
    assert not list(tmp_path.glob("cache/llamacpp/sources/[!.]*"))
    assert re.match(r"(llama_model_|llama_release )[^\n]*: [^\n]*$", message), "a remedy"


def test_each_limit_is_named(attacked):
    hub = attacked(ATTACKS["endless list"])
    subject = f"has the repo {REPO}, which cannot be looked up:"
    assert f"{subject} {hub.url} is longer than 8192 KiB" in refusal(on_hub, hub.url)
    assert "llama_release has the url" in (said := refusal(of_archive, hub.url))
    assert "could not be fetched: it has more than" in said
    hub.attack = ATTACKS["packed"]
    assert f"{subject} the answer of {hub.url} is not that of" in refusal(on_hub, hub.url)
    hub.attack = ATTACKS["endless redirects"]
    assert "is redirected more than 5 times: use the URL of the file itself" in refusal(behind_url, hub.url)
    hub.attack = ATTACKS["trickle of spaces"]
    assert "could not be fetched within 1 s: use another" in refusal(of_archive, hub.url)
    hub.attack = ATTACKS["trickle of headers"]
    assert "has a server whose answer did not begin within 0.5 s: try again" in refusal(of_archive, hub.url)

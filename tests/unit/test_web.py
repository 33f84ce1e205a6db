"""Headers of models on a web server, against real servers on this machine: right ones, wrong ones, and hostile ones."""

import re
import ssl
import threading

import gguf_files as files
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import web
from model_server import Server, answer


def why_not(url, token=None):
    """What a person is told of a model that cannot be read."""
    with pytest.raises(web.RemoteError) as refused:
        web.read_header(url, token)
    return web.explain_error(refused.value, token)


def test_only_the_header_is_read(server, tmp_path):
    data = files.model(tensors=[("blk.0.a", (1 << 20,), 0), ("blk.1.a", (1 << 20,), 0)])
    server.files["/m.gguf"] = data
    (tmp_path / "m.gguf").write_bytes(data)
    found = web.read_header(server.url + "/m.gguf")
    assert found == gguf.read_local_headers(str(tmp_path / "m.gguf"))
    assert found.files == [{"name": "m.gguf", "bytes": len(data)}]
    assert server.sent == gguf.FIRST_CHUNK_BYTES


def test_a_split_model(server, tmp_path):
    for path in files.write_parts(tmp_path, 3):
        server.files[f"/a%20b/{path.name}"] = path.read_bytes()
    found = web.read_header(f"{server.url}/a%20b/big-00001-of-00003.gguf?download=true")
    assert [file["name"] for file in found.files] == [f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert len(found.tensors) == 3
    assert [path for path, _headers in server.asked] == [
        f"/a%20b/big-0000{number}-of-00003.gguf?download=true" for number in (1, 2, 3)
    ]


def redirect(location):
    return answer(302, **({"Location": location} if location else {}))


def test_redirects_are_followed_and_a_token_stays_with_its_server(server, other):
    """Also one to a name with spaces and letters beyond ASCII."""
    other.files["/gro%C3%9Fe%20Datei.gguf"] = files.model()
    raw = "/große Datei.gguf?signature=1".encode().decode("latin-1")
    server.faults["/a"] = redirect("/b")
    server.faults["/b"] = answer(307, Location=other.url + raw)
    found = web.read_header(server.url + "/a", "secret")
    assert found.files == [{"name": "a", "bytes": len(files.model())}]
    assert [headers.get("Authorization") for _path, headers in server.asked] == ["Bearer secret"] * 2
    assert [headers.get("Authorization") for _path, headers in other.asked] == [None]


HTML = answer(200, b"<html>", Content_Type="text/html; charset=utf-8")
PART = b"x" * 100


@pytest.mark.parametrize(
    "fault, said, remedy",
    [
        (answer(401), "needs permission (HTTP 401)", "set llama_model_token_file"),
        (answer(404), "does not exist (HTTP 404)", "correct the URL"),
        (answer(429), "was requested too often", "wait a few minutes, or set llama_model_token_file"),
        (answer(503), "is not available (HTTP 503)", "try again later"),
        (answer(200, PART), "ignores range requests (HTTP 200", "set its path"),
        (HTML, "is a web page, not a file", "/resolve/ instead of /blob/"),
        (
            answer(206, PART, Content_Range="bytes 0-99/100", Content_Encoding="gzip"),
            "ignores range requests",
            "a server that supports range requests",
        ),
        (
            answer(206, PART, Content_Range="bytes 0-100/101", Content_Length=100),
            "announced 101 bytes but sent 100",
            "again",
        ),
        (redirect(None), "the server does not say where", "the file itself"),
        (redirect("/loop"), "redirected more than 5 times", "the file itself"),
        (redirect("file:///etc/passwd"), "is redirected to file:///etc/passwd", "does not begin with http or https:"),
    ],
)
def test_what_servers_answer(server, fault, said, remedy):
    server.faults["/loop"] = fault
    message = why_not(server.url + "/loop?signature=secret")
    assert said in message
    assert remedy in message
    assert "secret" not in message


def test_a_file_that_changes_while_it_is_read(server, monkeypatch):
    monkeypatch.setattr(gguf, "FIRST_CHUNK_BYTES", 64)
    data = files.vocabulary(5000)

    def grows(handler):
        server.send(handler, data + bytes(len(server.asked)))

    server.faults["/m.gguf"] = grows
    assert re.search(r"changed from \d+ to \d+ bytes while it was read: try again", why_not(server.url + "/m.gguf"))


def test_a_server_that_says_nothing(server, monkeypatch):
    monkeypatch.setattr(web, "MAX_SILENCE_SECONDS", 0.2)
    released = threading.Event()
    server.faults["/m.gguf"] = lambda handler: released.wait(20)
    assert "was not received: its server did not answer in time; try again" in why_not(server.url + "/m.gguf")
    released.set()


@pytest.mark.parametrize(
    "url, said",
    [
        ("file:///etc/passwd", "is not the URL of a web server"),
        ("http://127.0.0.1:port/m.gguf", "is not a URL (Port could not be cast"),
    ],
)
def test_what_is_no_url(url, said):
    assert said in why_not(url)


def test_a_proxy_of_the_environment_is_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    server.files["http://models.example.org/m.gguf"] = files.model()
    assert web.read_header("http://models.example.org/m.gguf").files[0]["name"] == "m.gguf"


def test_what_may_be_a_secret_is_not_shown():
    assert web.printable_url("http://me:secret@host:80/none.gguf?token=secret") == "http://host:80/none.gguf"


@pytest.mark.parametrize("token", ["secret\r\nX: y", "sécret"])
def test_a_token_that_cannot_be(server, token):
    message = why_not(server.url + "/m.gguf", token)
    assert "correct llama_model_token_file" in message
    assert "cret" not in message
    assert not server.asked


@pytest.fixture
def secured(certify):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certify("localhost"))
    server = Server(context)
    yield server
    server.stop()


def test_a_certificate_that_nobody_trusts(secured):
    assert "cannot be read ([SSL: CERTIFICATE_VERIFY_FAILED]" in why_not(secured.url + "/m.gguf")


def test_no_way_from_https_to_http(secured, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "localhost.pem"))
    secured.faults["/m.gguf"] = redirect("http://other/m.gguf")
    url = secured.url.replace("127.0.0.1", "localhost")
    assert "redirected to http://other/m.gguf, which does not begin with https:" in why_not(url + "/m.gguf")

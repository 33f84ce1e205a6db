"""Files of a model from a real server on this machine, whatever it does: they are whole in the end, or a sentence says why not."""

import fcntl
import json
import os
import re
import socket
import struct
import threading

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, download_record, model_files
from ansible_collections.llamacpp.cluster.plugins.modules import model
from conftest import fill_disk
from model_server import DATA, SHA, SIZE, answer, below, parsed, planned

MODULE = model
WHOLE = [".fetching", "source/.source.json", "source/m.gguf"]


def reset(handler):
    """A connection that ends at once, as when a router forgets it."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


@pytest.fixture
def fetch(server, models):
    def run(*files, token=None, seconds=30):
        download.download_files(parsed(*(files or [planned(server, models)])), models, token, seconds)

    return run


@pytest.fixture
def part(models):
    """What an earlier run left."""
    path = models / "source" / "m.gguf.part"
    path.parent.mkdir(parents=True)
    return path


def test_a_file_is_whole_and_recorded_last_and_then_neither_read_nor_requested(server, models, fetch, monkeypatch):
    fetch(planned(server, models, revision="c0ffee"))
    file = models / "source" / "m.gguf"
    assert file.read_bytes() == DATA
    assert file.stat().st_mode & 0o777 == 0o644
    assert below(models) == WHOLE
    record = json.loads((models / "source" / ".source.json").read_text())
    whole = {"name": "m.gguf", "bytes": SIZE, "sha256": SHA, "modified": int(file.stat().st_mtime)}
    assert record == {"files": [{**whole, "revision": "c0ffee"}]}
    file.write_bytes(DATA[::-1])
    os.utime(file, (record["files"][0]["modified"],) * 2)
    fetch(planned(server, models, revision="c0ffee"))
    assert (len(server.asked), file.read_bytes()) == (1, DATA[::-1])


def test_each_byte_is_downloaded_once_though_the_connection_breaks_again_and_again(server, models, fetch):
    server.cut = 100_000
    fetch()
    assert (models / "source" / "m.gguf").read_bytes() == DATA
    assert server.sent == SIZE
    assert len(server.asked) == SIZE // server.cut + 1


@pytest.mark.parametrize("fault", [reset, answer(503), answer(429)])
def test_a_passing_fault_is_tried_again(server, models, fetch, fault):
    server.faults["/m.gguf"] = [fault, fault]
    fetch()
    assert below(models) == WHOLE


def test_a_server_that_sends_nothing_is_given_up(server, models, fetch):
    server.faults["/m.gguf"] = reset
    with pytest.raises(Refusal, match=r"127\.0\.0\.1:\d+/m\.gguf cannot be downloaded \(curl: \(\d+\) .*\)$"):
        fetch()
    assert len(server.asked) == len(download.RETRY_PAUSES_SECONDS)
    assert below(models) == [".fetching"]


def test_a_server_that_breaks_off_and_sends_whole_files_only_is_given_up(server, models, fetch):
    def send(handler):
        del handler.headers["Range"]
        server.send(handler, DATA)

    server.faults["/m.gguf"] = send
    server.cut = 1_000_000
    with pytest.raises(Refusal, match=r"m\.gguf cannot be "):
        fetch()
    assert len(server.asked) <= 2 * len(download.RETRY_PAUSES_SECONDS)
    server.cut = None
    fetch()
    assert (models / "source" / "m.gguf").read_bytes() == DATA


def test_a_part_is_kept_and_the_next_run_continues_there(server, models, fetch):
    server.cut = 1_000_000
    server.faults["/m.gguf"] = [lambda handler: server.send(handler, DATA), *[reset] * 3]
    with pytest.raises(Refusal, match=r"1\.0 MB of 3\.0 MB were kept for the next run"):
        fetch()
    assert below(models) == [".fetching", "source/m.gguf.part"]
    server.cut = None
    fetch()
    assert server.sent == SIZE
    assert server.asked[-1][1]["Range"] == "bytes=1000000-"


@pytest.mark.parametrize(
    "status, token, reason",
    [
        (403, None, r"needs permission \(HTTP 403\): set llama_model_token_file, and accept the model's"),
        (403, "secret", r"needs permission \(HTTP 403\): use a token that has access in llama_model_token_file"),
        (404, None, r"does not exist \(HTTP 404\)"),
    ],
)
def test_a_refusal_is_not_tried_again(server, models, fetch, status, token, reason):
    server.faults["/m.gguf"] = answer(status)
    with pytest.raises(Refusal, match=rf"^{server.url}/m\.gguf {reason}"):
        fetch(token=token)
    assert len(server.asked) == 1
    assert below(models) == [".fetching"]


@pytest.mark.parametrize(
    "content, reason",
    [
        (DATA[:2000], rf"has 2000 bytes instead of the planned {SIZE}: the download was removed"),
        (DATA[:-1] + b"x", rf"has the sha256 [0-9a-f]{{64}} instead of the planned {SHA}: the download was removed"),
    ],
)
def test_a_file_that_is_not_what_was_planned_is_removed(server, models, fetch, part, content, reason):
    part.write_bytes(DATA[:1000])
    server.files["/m.gguf"] = content
    with pytest.raises(Refusal, match=reason):
        fetch()
    assert below(models) == [".fetching"]


@pytest.mark.parametrize(
    "name, content, sent",
    [
        ("m.gguf.part", bytes(1000), 2 * SIZE - 1000),
        ("m.gguf.part", DATA + b"x", SIZE),
        ("m.gguf", b"x" + DATA[1:], SIZE),
    ],
    ids=["damaged", "too long", "changed"],
)
def test_what_is_not_right_is_downloaded_again(server, models, fetch, part, name, content, sent):
    part.with_name(name).write_bytes(content)
    fetch()
    assert below(models) == WHOLE
    assert (models / "source" / "m.gguf").read_bytes() == DATA
    assert server.sent == sent


def test_a_server_that_sends_chunks_without_end_fills_no_disk(server, models, fetch, monkeypatch):
    """curl before 8.4 compares only a Content-Length with its limit."""
    largest = []

    def send(handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        data = b"x" * (1 << 20)
        for _chunk in range(64):
            handler.wfile.write(b"100000\r\n" + data + b"\r\n")
            handler.wfile.flush()
            largest.append(sum(path.stat().st_size for path in models.rglob("*.part")))

    monkeypatch.setattr(download, "RETRY_PAUSES_SECONDS", (0.0,))
    server.faults["/m.gguf"] = send
    with pytest.raises(Refusal, match=rf"m\.gguf is larger than the planned {SIZE} bytes and was removed"):
        fetch(planned(server, models, sha256=None))
    assert max(largest) <= SIZE
    assert below(models) == [".fetching"]


def test_without_a_checksum_nothing_of_an_earlier_run_is_believed(server, models, fetch, part):
    part.write_bytes(bytes(1000))
    file = planned(server, models, sha256=None)
    server.cut = 1_000_000
    server.faults["/m.gguf"] = [lambda handler: server.send(handler, DATA), *[reset] * 3]
    with pytest.raises(Refusal, match="cannot be downloaded"):
        fetch(file)
    server.cut, server.sent = None, 0
    for _run in range(2):
        fetch(file)
        assert below(models) == WHOLE
        assert server.sent == SIZE


def test_a_token_goes_to_one_server(server, other, models):
    """That of the first file, and not to where it redirects."""
    other.files["/n.gguf"] = DATA
    server.faults["/m.gguf"] = answer(302, Location=f"{other.url}/m.gguf?signature=1")
    second = planned(other, models, "n.gguf", path=str(models / "second" / "n.gguf"))
    download.download_files(parsed(planned(server, models), second), models, "secret", 30)
    sent = [[headers.get("Authorization") for _path, headers in one.asked] for one in (server, other)]
    assert sent == [["Bearer secret"], [None, None]]


def test_a_file_that_cannot_be_had_ends_the_run_and_those_before_it_stay(server, models, fetch):
    with pytest.raises(Refusal, match=r"n\.gguf does not exist"):
        fetch(planned(server, models), planned(server, models, "n.gguf"))
    assert below(models) == [".fetching", "source/m.gguf"]
    server.files["/n.gguf"] = DATA
    fetch(planned(server, models), planned(server, models, "n.gguf"))
    assert server.sent == 2 * SIZE


def test_two_runs_at_once_do_not_mix(server, models, fetch):
    server.cut = 300_000
    runs = [threading.Thread(target=fetch) for _number in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(30)
    assert below(models) == WHOLE
    assert server.sent == SIZE


def test_a_download_that_does_not_end_is_named(server, models, fetch):
    models.mkdir()
    with (models / model_files.LOCK_FILE).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(Refusal, match=rf"process {os.getpid()} on this host: .*or stop its holder"):
            fetch(seconds=0.1)


def test_a_host_without_curl_is_named(fetch, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refusal, match="curl is missing on this host, and downloads need it: install it"):
        fetch()


def test_a_model_that_does_not_fit_is_refused_before_a_byte_is_downloaded(server, small_disk):
    models = small_disk / "models"
    free = r"which has 0\.\d MB free: free another 2\.\d MB.*Nothing was downloaded"
    with pytest.raises(Refusal, match=rf"need 3\.0 MB more on {small_disk}, {free}"):
        download.download_files(parsed(planned(server, models)), models, None, 30)
    assert not server.asked


@pytest.mark.programs
@pytest.mark.parametrize("left", range(0, 10, 2))
def test_a_disk_that_fills_meanwhile(server, small_disk, call, monkeypatch, left):
    """Each step in turn meets a full disk: folders, lock, part and record. The run after it continues."""
    models, data = small_disk / "models", DATA[:20_000]
    server.files["/m.gguf"] = data
    arguments = {"files": [planned(server, models, data=data, revision="x" * 4000)], "folder": str(models)}
    filler = small_disk / "filler"
    fill_disk(filler, left)
    with monkeypatch.context() as patched:
        patched.setattr(download, "check_free_space", lambda *_arguments: None)
        result = call(**arguments)
    if left < 7:
        full = r"(No space left on device|curl could not write the file)\. Free space on .*disk"
        assert re.search(full, result["msg"])
        assert not (models / "source" / "m.gguf").exists() or (models / "source" / "m.gguf").read_bytes() == data
        assert not (models / "source" / download_record.RECORD_FILE).exists()
    filler.unlink()
    assert "failed" not in call(**arguments)
    assert below(models) == WHOLE
    assert (models / "source" / "m.gguf").read_bytes() == data
    assert not call(**arguments)["changed"]

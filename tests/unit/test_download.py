"""Files of a model from a real server on this machine, whatever it does: they are whole in the end, or a sentence says why not."""

import fcntl
import http.client
import json
import os
import re
import socket
import struct
import threading
import types

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import (
    download,
    download_record,
    model_files,
    web,
)
from ansible_collections.llamacpp.cluster.plugins.modules import model
from conftest import fill_disk
from model_server import DATA, SHA, SIZE, Server, answer, below, download_record_of, parsed, planned

MODULE = model
WHOLE = [".fetching", "source/.source.json", "source/m.gguf"]


def reset(handler):
    """A connection that ends at once, as when a router forgets it."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


@pytest.fixture
def fetch(server, models):
    def run(*files, token=None, **content):
        files, records = parsed(files or [planned(server, models)], [download_record_of(models / "source", **content)])
        return download.download(files, models, records, token)

    return run


@pytest.fixture
def part(models):
    """What an earlier run left."""
    path = models / "source" / "m.gguf.part"
    path.parent.mkdir(parents=True)
    return path


def test_a_file_is_whole_and_recorded_last(server, models, fetch):
    assert fetch(revision="c0ffee") == {str(models / "source" / "m.gguf"): SHA}
    file = models / "source" / "m.gguf"
    assert file.read_bytes() == DATA
    assert file.stat().st_mode & 0o777 == 0o644
    assert below(models) == WHOLE
    record = json.loads((models / "source" / ".source.json").read_text())
    entry = {"bytes": SIZE, "sha256": SHA, "modified": int(file.stat().st_mtime)}
    assert record.pop("checked") == {str(file): entry}
    assert record == {"schema": 1, "asked": {"url": ["it"]}, "source": "url:it", "revision": "c0ffee", "resolved": []}


def test_a_recorded_file_is_neither_read_nor_requested_again(server, models, fetch, monkeypatch):
    fetch()
    requests = len(server.asked)
    monkeypatch.setattr(download, "_complete", None)
    assert fetch() == {str(models / "source" / "m.gguf"): SHA}
    assert len(server.asked) == requests


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
    with pytest.raises(Refusal, match=r"127\.0\.0\.1:\d+/m\.gguf cannot be read .*Nothing of it was downloaded$"):
        fetch()
    assert len(server.asked) == len(download.PAUSES)
    assert below(models) == [".fetching"]


def test_a_part_is_kept_and_the_next_run_continues_there(server, models, fetch):
    server.cut = 1_000_000
    server.faults["/m.gguf"] = [lambda handler: server.send(handler, DATA), *[reset] * 3]
    with pytest.raises(Refusal, match=r"1\.0 MB of 3\.0 MB are kept: the next run continues there"):
        fetch()
    assert below(models) == [".fetching", "source/m.gguf.part"]
    server.cut = None
    fetch()
    assert server.sent == SIZE
    assert server.asked[-1][1]["Range"] == f"bytes=1000000-{SIZE - 1}"


@pytest.fixture
def slow_reads(server, models, monkeypatch):
    """Runs ``receive`` on a clock of its own; returns its pauses.

    :param read: in place of http.client's, with that.
    """
    clock, pauses, original = [0.0], [], http.client.HTTPResponse.read1

    def run(read, take_seconds=0.0):
        def take(_piece):
            clock[0] += take_seconds
            assert len(pauses) < 99, "it goes on"

        monkeypatch.setattr(web, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(download, "time", types.SimpleNamespace(sleep=pauses.append))
        monkeypatch.setattr(http.client.HTTPResponse, "read1", lambda reply, size: read(reply, size, original, clock))
        (file,), _records = parsed([planned(server, models)])
        download.receive(file, None, 0, take)

    return run, pauses


def drip(reply, _size, read, clock):
    """Each byte comes before its server counts as silent."""
    clock[0] += 10
    return read(reply, 1)


def fall_silent(reply, _size, read, clock):
    if getattr(reply, "seen", False):
        clock[0] += web.SECONDS_OF_SILENCE
        raise TimeoutError("timed out")
    reply.seen = True
    return read(reply, 1)


@pytest.mark.parametrize(
    "read, reason", [(drip, "sends less than 4 KiB per second"), (fall_silent, "did not answer in time")]
)
def test_a_server_that_sends_hardly_anything_is_given_up(slow_reads, read, reason):
    run, pauses = slow_reads
    with pytest.raises(Refusal, match=rf"/m\.gguf has a server that {reason}: try again"):
        run(read)
    assert len(pauses) == len(download.PAUSES) - 1


def test_a_slow_reader_is_no_slow_server(slow_reads):
    run, pauses = slow_reads
    run(lambda reply, size, read, clock: read(reply, size), take_seconds=300)
    assert not pauses


@pytest.mark.parametrize(
    "status, token, reason",
    [
        (403, None, r"needs permission \(HTTP 403\): give a token with llama_model_token_file, and accept the model's"),
        (403, "secret", r"needs permission \(HTTP 403\): the token of llama_model_token_file is not entitled"),
        (404, None, r"does not exist \(HTTP 404\)"),
    ],
)
def test_a_refusal_is_not_tried_again(server, models, fetch, status, token, reason):
    server.faults["/m.gguf"] = answer(status)
    with pytest.raises(Refusal, match=rf"^{server.url}/m\.gguf {reason}.*\. Nothing of it was downloaded$"):
        fetch(token=token)
    assert len(server.asked) == 1
    assert below(models) == [".fetching"]


@pytest.mark.parametrize(
    "content, reason",
    [
        (DATA + b"more", rf"has {SIZE + 4} bytes, and had {SIZE} when it was planned"),
        (DATA[:500], "HTTP 416"),
        (DATA[:-1] + b"x", rf"has the sha256 [0-9a-f]{{64}}, planned is {SHA}"),
    ],
)
def test_a_file_that_is_not_what_was_planned_is_removed(server, models, fetch, part, content, reason):
    part.write_bytes(DATA[:1000])
    server.files["/m.gguf"] = content
    with pytest.raises(Refusal, match=rf"{reason}.*[wW]hat was downloaded (of it )?is removed"):
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


def test_without_a_checksum_nothing_of_an_earlier_run_is_believed(server, models, fetch, part):
    part.write_bytes(bytes(1000))
    file = planned(server, models, sha256=None)
    server.cut = 1_000_000
    server.faults["/m.gguf"] = [lambda handler: server.send(handler, DATA), *[reset] * 3]
    with pytest.raises(Refusal, match=r"is removed: its checksum is not known, so the next run starts again$"):
        fetch(file)
    assert below(models) == [".fetching"]
    server.cut, server.sent = None, 0
    for _run in range(2):
        assert fetch(file) == {str(models / "source" / "m.gguf"): SHA}
        assert server.sent == SIZE


def test_a_whole_file_without_a_record_is_read_and_not_downloaded(server, models, fetch):
    fetch()
    (models / "source" / download_record.RECORD).unlink()
    requests = len(server.asked)
    fetch()
    assert below(models) == WHOLE
    assert len(server.asked) == requests


@pytest.mark.parametrize(
    "first, expected",
    [({"url": ["it"]}, [["Bearer secret"], [None, None]]), ({"ollama": "m:1"}, [[None], [None, "Bearer secret"]])],
)
def test_a_token_goes_to_one_server_and_to_no_registry_of_ollama(server, models, first, expected):
    """That of the first file, and not to where it redirects."""
    other = Server()
    try:
        other.files.update({"/m.gguf": DATA, "/n.gguf": DATA})
        server.faults["/m.gguf"] = answer(302, Location=f"{other.url}/m.gguf?signature=1")
        second = planned(other, models, "n.gguf", path=str(models / "second" / "n.gguf"))
        records = [download_record_of(models / "source", asked=first), download_record_of(models / "second")]
        files, records = parsed([planned(server, models), second], records)
        download.download(files, models, records, "secret")
        sent = [[headers.get("Authorization") for _path, headers in one.asked] for one in (server, other)]
        assert sent == expected
    finally:
        other.stop()


def test_a_file_that_cannot_be_had_ends_the_run_and_those_before_it_stay(server, models, fetch):
    with pytest.raises(Refusal, match=r"n\.gguf does not exist"):
        fetch(planned(server, models), planned(server, models, "n.gguf"))
    assert below(models) == [".fetching", "source/.source.json.part", "source/m.gguf"]
    server.files["/n.gguf"] = DATA
    fetch(planned(server, models), planned(server, models, "n.gguf"))
    assert server.sent == 2 * SIZE


@pytest.mark.parametrize("what", ["source", "source/m.gguf", "source/m.gguf.part"])
def test_a_symbolic_link_out_of_the_folder_is_refused(server, models, fetch, tmp_path, what):
    link = models / what
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refusal, match=r"leads to .*elsewhere.*, out of .*/models: remove the symbolic link"):
        fetch()
    assert not (tmp_path / "elsewhere").exists()
    assert not server.asked


def test_a_part_that_is_a_symbolic_link_within_the_folder_is_refused(server, models, fetch, part):
    (models / "other").write_bytes(b"kept")
    part.symlink_to("../other")
    with pytest.raises(Refusal, match=r"m\.gguf\.part is a symbolic link: remove it"):
        fetch()
    assert (models / "other").read_bytes() == b"kept"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_part_that_is_no_file_is_refused(server, models, fetch, part, make):
    """Of a pipe nothing would ever come."""
    make(part)
    with pytest.raises((Refusal, IsADirectoryError), match=r"m\.gguf\.part( is not a regular file: remove it|')"):
        fetch()


def test_a_download_record_of_another_form_is_written_again(server, models, fetch):
    fetch()
    place = models / "source" / download_record.RECORD
    whole, name = place.read_text(), str(models / "source" / "m.gguf")
    for checked in ([], {name: 5}, {name: {"bytes": SIZE, "sha256": [], "modified": 0}}):
        place.write_text(json.dumps({**json.loads(whole), "checked": checked}))
        fetch()
        assert place.read_text() == whole
    place.unlink()
    os.mkfifo(place)
    fetch()
    assert place.read_text() == whole


def test_the_folder_itself_may_be_a_symbolic_link(server, models, fetch, tmp_path):
    (tmp_path / "large").mkdir()
    models.symlink_to(tmp_path / "large")
    fetch()
    assert (tmp_path / "large" / "source" / "m.gguf").read_bytes() == DATA


def test_two_runs_at_once_do_not_mix(server, models, fetch):
    server.cut = 300_000
    runs = [threading.Thread(target=fetch) for _number in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(30)
    assert below(models) == WHOLE
    assert server.sent == SIZE


def test_a_process_that_holds_the_lock_without_progress_is_named(server, models, fetch, monkeypatch):
    monkeypatch.setattr(download, "WAIT_SECONDS", 0.1)
    models.mkdir()
    with (models / model_files.LOCK).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(Refusal, match=rf"process {os.getpid()} on this host .* without progress .*: end it"):
            fetch()


def test_progress_is_written_into_the_lock(server, models, fetch, monkeypatch):
    monkeypatch.setattr(download, "PROGRESS_SECONDS", 0)
    reports = []
    original = web.download

    def watched(*arguments):
        for piece in original(*arguments):
            yield piece
            reports.append(download.parse_progress((models / model_files.LOCK).read_text()))

    monkeypatch.setattr(web, "download", watched)
    fetch()
    assert reports[0].file == "m.gguf"
    assert reports[-1] == ("m.gguf", "fetch", 0, SIZE, SIZE)
    for text in ("", '{"file": "m", "st', '{"file": "m"}'):
        assert download.parse_progress(text) is None


def test_a_model_that_does_not_fit_is_refused_before_a_byte_is_downloaded(server, small_disk):
    models = small_disk / "models"
    files, _records = parsed([planned(server, models)])
    with pytest.raises(
        Refusal,
        match=rf"need 3\.0 MB more on {small_disk}, which has 0\.\d MB left: free 2\.\d MB there.*Nothing was written",
    ):
        download.download(files, models, [], None)
    assert not server.asked


def test_bytes_of_a_part_count_as_room(server, models, fetch, part, monkeypatch):
    part.write_bytes(DATA[: SIZE - 1000])
    original = os.statvfs

    def nearly_full(path):
        status = original(path)
        fields = list(status)
        fields[4] = 1 if status.f_frsize >= 1000 else 1000
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    fetch()
    assert server.sent == 1000


@pytest.mark.programs
@pytest.mark.parametrize("left", range(0, 10))
def test_a_disk_that_fills_meanwhile(server, small_disk, call, monkeypatch, left):
    """Each step in turn meets a full disk: folders, lock, part and record. The run after it continues."""
    models, data = small_disk / "models", DATA[:20_000]
    server.files["/m.gguf"] = data
    arguments = {
        "files": [planned(server, models, data=data)],
        "folder": str(models),
        "records": [download_record_of(models / "source", asked={"url": ["x" * 6000]})],
    }
    filler = small_disk / "filler"
    fill_disk(filler, left)
    with monkeypatch.context() as patched:
        patched.setattr(download, "check_room", lambda *_arguments: None)
        result = call(**arguments)
    if left < 8:
        assert re.search(
            r"No space left on device\. Free some space on .*disk .* run the playbook again\. What was downloaded is kept",
            result["msg"],
        )
        assert not (models / "source" / "m.gguf").exists() or (models / "source" / "m.gguf").read_bytes() == data
        assert not (models / "source" / download_record.RECORD).exists()
    filler.unlink()
    assert "failed" not in call(**arguments)
    assert below(models) == WHOLE
    assert (models / "source" / "m.gguf").read_bytes() == data
    assert not call(**arguments)["changed"]

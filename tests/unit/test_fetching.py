"""Files of a model from a real server on this machine, whatever it does: they are whole in the end, or a sentence says why not."""

import fcntl
import hashlib
import http.client
import json
import os
import re
import socket
import struct
import threading
import time
import types

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, download_record, downloaded, web
from ansible_collections.llamacpp.cluster.plugins.modules import model
from conftest import fill_disk
from model_server import DATA, SHA, SIZE, Server, answer

MODULE = model


def reset(handler):
    """A connection that ends at once, as when a router forgets it."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def planned(server, models, name="m.gguf", data=DATA, **more):
    return {
        "name": name,
        "path": str(models / "source" / name),
        "url": f"{server.url}/{name}",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "role": "model",
        **more,
    }


def records(models, **content):
    return [{"path": str(models / "source" / download_record.RECORD), "asked": {"url": ["it"]}, **content}]


@pytest.fixture
def fetch(server, models):
    def run(*files, token=None, **content):
        given = files or (planned(server, models),)
        listed = records(models, **content)
        return download.fetch(downloaded.of_plan(given, listed), models, listed, token)

    return run


def below(models):
    return sorted(str(path.relative_to(models)) for path in models.rglob("*") if path.is_file())


WHOLE = [".fetching", "source/.source.json", "source/m.gguf"]


def test_a_file_is_whole_and_recorded_last(server, models, fetch):
    assert fetch(commit="c0ffee") == {str(models / "source" / "m.gguf"): SHA}
    file = models / "source" / "m.gguf"
    assert file.read_bytes() == DATA
    assert file.stat().st_mode & 0o777 == 0o644
    assert below(models) == WHOLE
    record = json.loads((models / "source" / ".source.json").read_text())
    entry = {"bytes": SIZE, "sha256": SHA, "modified": int(file.stat().st_mtime)}
    assert record == {"asked": {"url": ["it"]}, "commit": "c0ffee", "checked": {str(file): entry}}


def test_what_is_recorded_is_neither_read_nor_asked_for_again(server, models, fetch, monkeypatch):
    fetch()
    asked = len(server.asked)
    monkeypatch.setattr(download._Fetcher, "_read", None)
    assert fetch() == {str(models / "source" / "m.gguf"): SHA}
    assert len(server.asked) == asked


def test_each_byte_is_fetched_once_though_the_connection_breaks_again_and_again(server, models, fetch):
    server.cut = 100_000
    fetch()
    assert (models / "source" / "m.gguf").read_bytes() == DATA
    assert server.sent == SIZE
    assert len(server.asked) == SIZE // server.cut + 1


@pytest.mark.parametrize("fault", [reset, answer(503), answer(429), answer(500)])
def test_what_passes_is_tried_again(server, models, fetch, fault):
    server.faults["/m.gguf"] = [fault, fault]
    fetch()
    assert below(models) == WHOLE


def test_a_server_that_sends_nothing_is_given_up(server, models, fetch):
    server.faults["/m.gguf"] = reset
    with pytest.raises(Refusal, match=r"127\.0\.0\.1:\d+/m\.gguf cannot be read .*Nothing of it was fetched$"):
        fetch()
    assert len(server.asked) == len(download.PAUSES)
    assert below(models) == [".fetching"]


def test_what_came_before_a_server_fell_silent_is_kept_and_the_next_run_goes_on_there(server, models, fetch):
    server.cut = 1_000_000
    server.faults["/m.gguf"] = [lambda handler: server.send(handler, DATA), *[reset] * 3]
    with pytest.raises(Refusal, match=r"1\.0 MB of 3\.0 MB are kept: the next run goes on there"):
        fetch()
    assert below(models) == [".fetching", "source/m.gguf.part"]
    server.cut = None
    fetch()
    assert server.sent == SIZE
    assert server.asked[-1][1]["Range"] == f"bytes=1000000-{SIZE - 1}"


def test_a_server_that_drips_is_given_up_and_a_slow_reader_is_not(server, tmp_path, monkeypatch):
    """Each byte comes before its server counts as silent."""
    now, pauses, read, drips = [0.0], [], http.client.HTTPResponse.read1, True

    def read_slowly(reply, size):
        now[0] += 10 if drips else 0.01
        return pytest.fail("it goes on") if drips and now[0] > 2000 else read(reply, 1 if drips else size)

    def take(_piece):
        now[0] += 0 if drips else 300

    monkeypatch.setattr(web, "time", types.SimpleNamespace(monotonic=lambda: now[0]), raising=False)
    monkeypatch.setattr(http.client.HTTPResponse, "read1", read_slowly)
    file = downloaded.File(
        "m.gguf", tmp_path / "m.gguf", f"{server.url}/m.gguf", SIZE, SHA, "model", tmp_path / "record"
    )
    with pytest.raises(Refusal, match=r"/m\.gguf has a server that sends less than 4 KiB per second: try again"):
        download.receive(file, None, 0, take, pauses.append)
    assert len(pauses) == len(download.PAUSES) - 1
    drips, now[0] = False, 0.0
    download.receive(file, None, 0, take, pauses.append)


def test_a_server_that_falls_silent_after_each_byte_is_given_up(server, tmp_path, monkeypatch):
    now, pauses, read = [0.0], [], http.client.HTTPResponse.read1

    def read_once(reply, _size):
        if getattr(reply, "seen", False):
            now[0] += web.SECONDS_OF_SILENCE
            raise TimeoutError("timed out")
        reply.seen = True
        return read(reply, 1)

    monkeypatch.setattr(web, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(http.client.HTTPResponse, "read1", read_once)
    file = downloaded.File(
        "m.gguf", tmp_path / "m.gguf", f"{server.url}/m.gguf", SIZE, SHA, "model", tmp_path / "record"
    )
    with pytest.raises(Refusal):
        download.receive(file, None, 0, lambda _piece: len(pauses) < 99 or pytest.fail("it goes on"), pauses.append)
    assert len(pauses) == len(download.PAUSES) - 1


@pytest.mark.parametrize(
    "status, token, said",
    [
        (401, None, r"needs permission \(HTTP 401\): accept .*set llama_model_token_file"),
        (403, None, r"needs permission \(HTTP 403\): accept .*set llama_model_token_file"),
        (401, "secret", r"needs permission \(HTTP 401\): the token of llama_model_token_file is not entitled"),
        (403, "secret", r"needs permission \(HTTP 403\): the token of llama_model_token_file is not entitled"),
        (404, None, r"does not exist \(HTTP 404\)"),
    ],
)
def test_a_refusal_is_not_tried_again(server, models, fetch, status, token, said):
    server.faults["/m.gguf"] = answer(status)
    with pytest.raises(Refusal, match=rf"^{server.url}/m\.gguf {said}.*\. Nothing of it was fetched$"):
        fetch(token=token)
    assert len(server.asked) == 1
    assert below(models) == [".fetching"]


def test_a_server_that_goes_on_having_too_many_requests_names_the_variable(server, models, fetch):
    server.faults["/m.gguf"] = answer(429)
    with pytest.raises(Refusal, match=r"\(HTTP 429\): wait a while, or set llama_model_token_file\. "):
        fetch()


def test_a_file_with_another_size_is_removed(server, models, fetch):
    part = models / "source" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA[:1000])
    server.files["/m.gguf"] = DATA + b"more"
    with pytest.raises(
        Refusal, match=rf"has {SIZE + 4} bytes, and had {SIZE} when it was planned.*What was fetched of it is removed"
    ):
        fetch()
    assert below(models) == [".fetching"]
    part.write_bytes(DATA[:1000])
    server.files["/m.gguf"] = DATA[:500]
    with pytest.raises(Refusal, match=r"HTTP 416.*What was fetched of it is removed"):
        fetch()
    assert below(models) == [".fetching"]


def test_a_file_with_another_hash_is_removed(server, models, fetch):
    server.files["/m.gguf"] = b"x" + DATA[1:]
    with pytest.raises(Refusal, match=rf"has the sha256 [0-9a-f]{{64}}, planned is {SHA}: what was fetched is removed"):
        fetch()
    assert below(models) == [".fetching"]


def test_a_damaged_part_of_an_earlier_run_is_fetched_anew(server, models, fetch):
    part = models / "source" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1000))
    fetch()
    assert below(models) == WHOLE
    assert (models / "source" / "m.gguf").read_bytes() == DATA
    assert server.sent == 2 * SIZE - 1000


def test_a_part_that_is_too_long_is_fetched_anew(server, models, fetch):
    part = models / "source" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA + b"x")
    fetch()
    assert below(models) == WHOLE


def test_without_a_checksum_nothing_of_an_earlier_run_is_believed(server, models, fetch):
    part = models / "source" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1000))
    assert fetch(planned(server, models, sha256=None)) == {str(models / "source" / "m.gguf"): SHA}
    assert server.sent == SIZE
    fetch(planned(server, models, sha256=None))
    assert server.sent == SIZE


def test_without_a_checksum_nothing_that_came_is_kept(server, models, fetch):
    server.cut = 1_000_000
    server.faults["/m.gguf"] = [lambda handler: server.send(handler, DATA), *[reset] * 3]
    with pytest.raises(Refusal, match=r"is removed: its checksum is not known, so the next run begins anew$"):
        fetch(planned(server, models, sha256=None))
    assert below(models) == [".fetching"]


def test_a_whole_file_without_a_record_is_read_and_not_fetched(server, models, fetch):
    fetch()
    (models / "source" / download_record.RECORD).unlink()
    asked = len(server.asked)
    fetch()
    assert below(models) == WHOLE
    assert len(server.asked) == asked


def test_a_file_that_was_changed_is_fetched_again(server, models, fetch):
    fetch()
    file = models / "source" / "m.gguf"
    file.write_bytes(b"x" + DATA[1:])
    os.utime(file, (1, 1))
    fetch()
    assert file.read_bytes() == DATA


def test_a_token_goes_to_the_first_server_alone(server, models, fetch):
    other = Server()
    try:
        other.files.update({"/m.gguf": DATA, "/n.gguf": DATA})
        server.faults["/m.gguf"] = answer(302, Location=f"{other.url}/m.gguf?signature=1")
        fetch(planned(server, models), planned(other, models, "n.gguf"), token="secret")
        assert [headers.get("Authorization") for _path, headers in server.asked] == ["Bearer secret"]
        assert [headers.get("Authorization") for _path, headers in other.asked] == [None, None]
    finally:
        other.stop()


def test_a_registry_of_ollama_gets_no_token(server, models, fetch):
    other = Server()
    try:
        other.files["/n.gguf"] = DATA
        second = planned(other, models, "n.gguf", path=str(models / "second" / "n.gguf"))
        listed = [
            *records(models, asked={"ollama": "registry/library/m:latest"}),
            {"path": str(models / "second" / download_record.RECORD), "asked": {"huggingface": {}, "role": "mmproj"}},
        ]
        download.fetch(downloaded.of_plan([planned(server, models), second], listed), models, listed, "secret")
        assert [headers.get("Authorization") for _path, headers in server.asked] == [None]
        assert [headers.get("Authorization") for _path, headers in other.asked] == ["Bearer secret"]
    finally:
        other.stop()


def test_one_file_that_cannot_be_had_stops_the_others_which_are_kept(server, models, fetch):
    begun = threading.Event()

    def wait_for_the_other(handler):
        begun.wait(10)
        answer(404)(handler)

    def begin(handler):
        answer(206, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}", Content_Length=SIZE)(handler)
        for start in range(0, SIZE, 30_000):
            handler.wfile.write(DATA[start : start + 30_000])
            if start >= 60_000:
                begun.set()
            time.sleep(0.02)

    server.faults.update({"/m.gguf": begin, "/n.gguf": wait_for_the_other})
    with pytest.raises(Refusal, match=r"n\.gguf does not exist"):
        fetch(planned(server, models), planned(server, models, "n.gguf"))
    assert below(models) == [".fetching", "source/m.gguf.part"]
    part = (models / "source" / "m.gguf.part").read_bytes()
    assert 0 < len(part) < SIZE
    assert DATA.startswith(part)


@pytest.mark.parametrize("what", ["source", "source/m.gguf", "source/m.gguf.part"])
def test_a_symbolic_link_out_of_the_folder_is_refused(server, models, fetch, tmp_path, what):
    link = models / what
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refusal, match=r"leads to .*elsewhere.*, out of .*/models: remove the symbolic link"):
        fetch()
    assert not (tmp_path / "elsewhere").exists()
    assert not server.asked


def test_a_part_that_is_a_symbolic_link_within_the_folder_is_refused(server, models, fetch):
    (models / "source").mkdir(parents=True)
    (models / "other").write_bytes(b"kept")
    (models / "source" / "m.gguf.part").symlink_to("../other")
    with pytest.raises(Refusal, match=r"m\.gguf\.part is a symbolic link: remove it"):
        fetch()
    assert (models / "other").read_bytes() == b"kept"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_part_that_is_no_file_is_refused(server, models, fetch, make):
    """Of a pipe nothing would ever come."""
    (models / "source").mkdir(parents=True)
    make(models / "source" / "m.gguf.part")
    with pytest.raises((Refusal, IsADirectoryError), match=r"m\.gguf\.part( is not a regular file: remove it|')"):
        fetch()


@pytest.mark.parametrize(
    "checked",
    [
        [],
        "x",
        {"FILE": 5},
        {"FILE": {}},
        {"FILE": {"bytes": SIZE, "sha256": [], "modified": 0}},
        {"FILE": {"bytes": SIZE, "sha256": SHA, "modified": True}},
    ],
    ids=str,
)
def test_a_record_of_another_form_is_none(server, models, fetch, checked):
    fetch()
    place = models / "source" / download_record.RECORD
    whole = place.read_text()
    entry = {str(models / "source" / "m.gguf"): checked["FILE"]} if isinstance(checked, dict) else checked
    place.write_text(json.dumps({**json.loads(whole), "checked": entry}))
    fetch()
    assert place.read_text() == whole


def test_a_record_that_is_a_pipe_is_replaced(server, models, fetch):
    (models / "source").mkdir(parents=True)
    os.mkfifo(models / "source" / download_record.RECORD)
    fetch()
    assert json.loads((models / "source" / download_record.RECORD).read_text())["checked"]


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


def test_a_process_that_holds_the_lock_and_gets_nowhere_is_named(server, models, fetch, monkeypatch):
    monkeypatch.setattr(download, "WAIT_SECONDS", 0.1)
    models.mkdir()
    with (models / downloaded.LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(
            Refusal, match=rf"process {os.getpid()} on this host fetches models .* got nowhere .*: end it"
        ):
            fetch()


# ----------------------------------------------------------------------------------------------------------------- full disks


def test_what_does_not_fit_is_refused_before_a_byte_is_fetched(server, small_disk):
    models = small_disk / "models"
    files = downloaded.of_plan([planned(server, models)])
    with pytest.raises(
        Refusal,
        match=rf"need 3\.0 MB more on {small_disk}, which has 0\.\d MB left: free 2\.\d MB there.*Nothing was written",
    ):
        download.fetch(files, models, [], None)
    assert not server.asked


def test_what_is_there_counts(server, models, fetch, monkeypatch):
    part = models / "source" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA[: SIZE - 1000])
    real = os.statvfs

    def nearly_full(path):
        status = real(path)
        fields = list(status)
        fields[4] = 1 if status.f_frsize >= 1000 else 1000
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    fetch()
    assert server.sent == 1000


@pytest.mark.programs
@pytest.mark.parametrize("left", range(0, 10))
def test_a_disk_that_fills_meanwhile(server, small_disk, call, left):
    """Each step in turn meets a full disk: folders, lock, part and record. The run after it goes on."""
    models, data = small_disk / "models", DATA[:20_000]
    server.files["/m.gguf"] = data
    arguments = {
        "files": [planned(server, models, data=data)],
        "folder": str(models),
        "records": records(models, long="x" * 6000),
    }
    filler = small_disk / "filler"
    fill_disk(filler, left)
    fetching_check = download.check_room
    download.check_room = lambda *_arguments: None
    try:
        result = call(state="fetched", **arguments)
    finally:
        download.check_room = fetching_check
    if left < 8:
        assert result["failed"]
        assert re.search(
            r"No space left on device\. Free some space on .*disk .* run the playbook again\. What came of the model is kept",
            result["msg"],
        )
        assert not (models / "source" / "m.gguf").exists() or (models / "source" / "m.gguf").read_bytes() == data
        assert not (models / "source" / download_record.RECORD).exists()
    filler.unlink()
    again = call(state="fetched", **arguments)
    assert again.get("failed") is None
    assert below(models) == WHOLE
    assert (models / "source" / "m.gguf").read_bytes() == data
    assert not call(state="fetched", **arguments)["changed"]


class Zeros:
    """A file of so many zeros that nobody keeps."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, wanted):
        return bytes(wanted.stop - wanted.start)


@pytest.mark.timeout(300)
@pytest.mark.programs
def test_a_model_of_eight_parts_and_two_gigabytes_over_a_connection_that_is_cut_every_hundred_megabytes(
    server, models, fetch
):
    size = 250_000_000
    digest = hashlib.sha256()
    for _megabyte in range(size // 1_000_000):
        digest.update(bytes(1_000_000))
    parts = [f"m-{number:05d}-of-00008.gguf" for number in range(1, 9)]
    server.files.update({f"/{name}": Zeros(size) for name in parts})
    server.cut = 100_000_000
    wanted = [{**planned(server, models, name), "bytes": size, "sha256": digest.hexdigest()} for name in parts]
    assert set(fetch(*wanted).values()) == {digest.hexdigest()}
    assert server.sent == 8 * size
    assert len(server.asked) == 8 * 3
    assert below(models) == [".fetching", "source/.source.json", *(f"source/{name}" for name in parts)]
    assert all((models / "source" / name).stat().st_size == size for name in parts)


def test_a_piece_that_finds_a_full_disk_leaves_the_part_as_it_was(server, small_disk, tmp_path, call):
    models, piece = small_disk / "models", tmp_path / "piece"
    file = planned(server, models, url="file:///m.gguf", sha256=None)
    piece.write_bytes(DATA[:100_000])

    def send(offset):
        digest = hashlib.sha256(piece.read_bytes()).hexdigest()
        given = {"path": str(piece), "offset": offset, "sha256": digest}
        return call(state="received", files=[file], folder=str(models), piece=given)

    assert send(0)["held"]["bytes"] == 100_000
    piece.write_bytes(DATA[100_000:400_000])
    assert re.search(r"m\.gguf\.part: No space left on device\. Free some space .* is kept", send(100_000)["msg"])
    part = models / "source" / "m.gguf.part"
    assert part.read_bytes() == DATA[:100_000]
    piece.write_bytes(DATA[100_000:150_000])
    assert re.search(r"has less than 200000 bytes: another run fetches it", send(200_000)["msg"])
    assert send(100_000)["held"]["bytes"] == 150_000
    assert part.read_bytes() == DATA[:150_000]

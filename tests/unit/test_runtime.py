"""The head's launcher against a scripted worker and a stand-in for llama-server, both real processes with real connections."""

import errno
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import (
    exporter,
    journal,
    metrics,
    page,
    progress,
    runtime,
    serving,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import server as llama_server
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import worker as workers
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import REPLACEMENTS_FILE
from support.hosts import executable, free_port
from support.launched import a_worker, children, lines_until, until
from test_rpc import Server

pytestmark = pytest.mark.programs


def test_it_waits_for_every_worker_then_starts_and_records_the_handshakes(cluster):
    _first, first_endpoint = a_worker()
    second_port = free_port()
    process = cluster.head("answers", [first_endpoint, f"127.0.0.1:{second_port}"], ["--protocol", "7.0.0"])
    lines_until(process, f"waiting for worker 127.0.0.1:{second_port}: refused")
    assert children(process) == []
    a_worker(port=second_port)
    lines_until(process, "model buffer size")
    record = json.loads((cluster.state / runtime.HANDSHAKES_FILE).read_text())
    assert set(record["workers"]) == {first_endpoint, f"127.0.0.1:{second_port}"}
    assert record["workers"][first_endpoint]["protocol"] == "7.0.0"
    assert "model buffer size" in (cluster.state / journal.START_LOG_FILE).read_text()


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
@pytest.mark.parametrize("kind", ["head", "worker"])
def test_a_program_ends_with_its_launcher_however_that_ends(cluster, worker_service, tmp_path, kind, number, status):
    """Where it is asked to, the launcher of a head says success when its server has ended."""
    process = cluster.head("answers", [a_worker()[1]]) if kind == "head" else worker_service(tmp_path / "cache")
    lines_until(process, "model buffer size" if kind == "head" else "SIG_IGN")
    (child,) = children(process)
    process.send_signal(number)
    assert process.wait() == status
    assert status or kind == "worker" or not os.path.exists(f"/proc/{child}")
    until(lambda: not os.path.exists(f"/proc/{child}"))
    assert not (cluster.state / runtime.EXITS_FILE).exists()


def test_asked_to_stop_while_it_waits(cluster):
    process = cluster.head("answers", [f"127.0.0.1:{free_port()}"])
    lines_until(process, "refused")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_how_often_and_how_the_server_ended_is_written_down_over_all_starts(tmp_path, monkeypatch):
    """A service manager starts the launcher anew each time; here each call is such a start."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(runtime, "SAMPLE_SECONDS", 0.01)
    program = "import sys; print('x' * 9000); print('error: invalid argument: --colour'); sys.exit(3)"
    missing = "before start-up: [Errno 2] No such file or directory: '/no/such/llama-server'"
    for number, argv, how, last in (
        (1, [sys.executable, "-c", program], "with status 3", ["error: invalid argument: --colour"]),
        (2, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "on signal 9", []),
        (3, ["/no/such/llama-server"], missing, []),
    ):
        assert runtime.run_head(argv, runtime.HeadSettings([], "http://127.0.0.1:1", tmp_path)) == 1
        told = json.loads((tmp_path / runtime.EXITS_FILE).read_text())
        assert (told["number"], told["how"], told["log"][:1]) == (number, how, last)
        assert sum(map(len, told["log"])) < llama_server.LOG_TAIL_BYTES


def test_the_server_is_started_in_the_words_of_its_build(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    program = executable(tmp_path / "bin" / "llama-server", '#!/bin/sh\necho "$@"\n')
    (tmp_path / REPLACEMENTS_FILE).write_text('{"--ctx-size": "-c", "--fit": ""}')
    argv = [str(program), "--ctx-size", "8", "--fit", "off", "--alias", "x"]
    runtime.run_head(argv, runtime.HeadSettings([], "http://127.0.0.1:1", tmp_path))
    assert (tmp_path / journal.START_LOG_FILE).read_text() == "-c 8 --alias x\n"


def test_the_log_of_a_start_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MAX_START_LOG_BYTES", 100)
    head = llama_server.Head([sys.executable, "-c", "print('x' * 1000)"], [], "http://127.0.0.1:1", tmp_path)
    head.process.wait()
    head.relay.join()
    assert len((tmp_path / journal.START_LOG_FILE).read_text()) == 100


@pytest.mark.parametrize("spoil", [os.mkfifo, lambda path: path.symlink_to("/dev/full")], ids=["pipe", "link"])
def test_the_server_is_heard_where_its_log_is_no_file(tmp_path, capfd, spoil):
    spoil(tmp_path / journal.START_LOG_FILE)
    head = llama_server.Head([sys.executable, "-c", "print('x' * 100000)"], [], "http://127.0.0.1:1", tmp_path)
    head.relay.join(10)
    head.kill()
    assert head.log_tail.strip().endswith(b"xxx")
    assert f"{journal.START_LOG_FILE} could not be written: " in capfd.readouterr().out


def test_a_read_only_disk_stops_neither_the_wait_for_workers_nor_the_server(cluster, small_disk):
    for name in (runtime.HANDSHAKES_FILE, runtime.EXITS_FILE, journal.START_LOG_FILE):
        (small_disk / name).write_text("{}")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    port = free_port()
    process = cluster.head("answers", [f"127.0.0.1:{port}"], ["--state", str(small_disk)])
    said = lines_until(process, "waiting for worker")
    assert any(f"{runtime.HANDSHAKES_FILE} could not be written: Read-only file system" in line for line in said)
    a_worker(port=port)
    said = lines_until(process, "model buffer size")
    assert any(f"{journal.START_LOG_FILE} could not be written: Read-only file system" in line for line in said)
    os.kill(children(process)[0], signal.SIGKILL)
    assert process.wait(50) == 1


DESCRIBED = {"folder": "", "cluster": "c", "host": "h", "plan": "p", "kind": "head", "release": "r"}


def exports_of(state, folder=""):
    (state / "metrics.json").write_text(json.dumps({"services": {"s": {**DESCRIBED, "folder": str(folder)}}}))
    return exporter.Exporter(state / "metrics.json", "s")


def number_of_ends(path):
    runtime.record_exit(path.parent, "with status 1", "")
    return json.loads(path.read_text())["number"] - 1


def verified(path):
    exports = exports_of(path.parent)
    exports.export_head(serving.HeadRecord(path.parent))
    return exports.snapshot.failed_checks or exports.snapshot.figures.get("verified_passed")


READ_BACK = {
    serving.RECORD_FILE: lambda path: serving.read_history(path) != serving.History(),
    runtime.EXITS_FILE: number_of_ends,
    "sizes.json": lambda path: workers.record_tensor_sizes(path.parent / "rpc", [300]) != {300},
    "fallbacks.json": serving.read_fallbacks,
    "metrics.json": lambda path: exporter.Exporter(path, "s").description,
    "s.prom": lambda path: any(exports_of(path.parent, path.parent).restarts.values()),
    exporter.VERIFICATION_FILE: verified,
}
"""File that the launcher reads → whether it has found something there."""
TEXTS = r"""
{} [] 1 null true "x" [1] [[1e999]] [{}] {"last":3} {"last":[1]} {"last":[],"restarts":1e999} {"last":[],"restarts":-1}
{"last":[],"restarts":"x"} {"number":1e999} {"number":[]} {"sizes":[3 {"sizes":3} {"sizes":[1e999]} {"sizes":[[]]}
{"services":{}} {"services":{"s":[]}} {"services":{"s":{"kind":[]}}} {"passed":true,"failed":3}
[{"name":"x","without":"1"}] [{"name":"x","without":"127.0.0.1:1","workers":[7],"argv":[]}]
"""
SPOILT = [
    *("", *TEXTS.split(), "[" * 100_000, *(f'{{"last": [], "restarts": {sign}1{"0" * 400}}}' for sign in ("", "-"))),
    *(b"\xff", b" " * (journal.MAX_FILE_BYTES + 1), os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")),
]


@pytest.mark.parametrize("name", READ_BACK)
@pytest.mark.parametrize("spoilt", SPOILT, ids=range(len(SPOILT)))
def test_a_file_that_is_read_back_is_of_its_form_or_is_none(tmp_path, name, spoilt):
    """A power cut may leave anything there."""
    if callable(spoilt):
        spoilt(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    if (name, spoilt) != (runtime.EXITS_FILE, os.mkdir):
        assert not READ_BACK[name](tmp_path / name)


@pytest.mark.parametrize("error", [RuntimeError("thrown"), OSError(errno.EMFILE, "Too many open files")])
@pytest.mark.parametrize(
    "place, name",
    [
        *((progress, "sample_process"), (progress, "children_of"), (llama_server, "is_healthy"), (page, "Snapshot")),
        *((exporter, "_add_record"), (exporter.MemoryReader, "read"), (metrics.Figures, "text")),
    ],
)
def test_nothing_that_shows_or_watches_a_service_ends_it(tmp_path, monkeypatch, capfd, place, name, error):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(exporter, "EXPORT_INTERVAL_SECONDS", 0)
    monkeypatch.setattr(place, name, mock.Mock(side_effect=error))
    monkeypatch.setattr(journal, "LOGGED_KEYS", set())
    exports, argv = exports_of(tmp_path, tmp_path), [sys.executable, "-c", "import time; time.sleep(0.5)"]
    for module in (runtime, workers):
        monkeypatch.setattr(module, "SAMPLE_SECONDS", 0.05)
    settings = runtime.HeadSettings([], "http://127.0.0.1:1", tmp_path, is_router=name == "children_of")
    assert runtime.run_head(argv, settings, exports) == 1
    assert json.loads((tmp_path / runtime.EXITS_FILE).read_text())["how"] == "with status 0"
    assert workers.run_worker(argv, None, 0, port="1", metrics_exporter=exports) == 1
    said = capfd.readouterr().out
    assert "the worker exited with status 0" in said
    assert said.count(str(error)) in ((0, 1, 2) if isinstance(error, OSError) else (1, 2)), "once each"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("target")])
def test_what_lies_in_the_way_of_a_new_file_is_removed(tmp_path, make):
    """A pipe there would be waited for, and what a link leads to would be overwritten."""
    (tmp_path / "target").write_text("mine")
    make(tmp_path / "x.json.new")
    assert journal.write_state(tmp_path / "x.json", {})
    assert (tmp_path / "x.json").read_text() == "{}"
    assert (tmp_path / "target").read_text() == "mine"


def test_others_read_a_file_that_is_for_them_whatever_the_mask(tmp_path):
    before = os.umask(0o077)
    try:
        assert journal.replace_file(tmp_path / "metrics.prom", "x 1", 0o644)
        assert journal.replace_file(tmp_path / "state.json", "{}")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in sorted(tmp_path.iterdir())] == [0o644, 0o600]


@pytest.mark.parametrize("text", [b"ke\xff\n", b"\n\r\n  ke\xff\r\nother\n"])
def test_a_key_of_any_bytes_is_sent_as_it_is(tmp_path, text):
    (tmp_path / "keys").write_bytes(text)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watched = llama_server.WatchedServer(["x", "--api-key-file", str(tmp_path / "keys")], [], "", 9)
        llama_server.ServerRequest(f"http://127.0.0.1:{listener.getsockname()[1]}", "/", watched.headers)
        listener.settimeout(5)
        client, _address = listener.accept()
        with client:
            client.settimeout(5)
            assert b"\r\nAuthorization: Bearer ke\xff\r\n" in client.recv(65536)


OK = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    "scheme, secured, answer, expected",
    [
        ("http", False, OK, True),
        ("http", False, b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        ("http", False, b"x" * 1000, False),
        ("http", False, b"", False),
        ("http", False, None, False),
        ("https", True, OK, True),
        ("https", False, OK, False),
    ],
)
def test_health_is_one_answer_in_time(certify, monkeypatch, scheme, secured, answer, expected):
    monkeypatch.setattr(llama_server, "HEALTH_TIMEOUT_SECONDS", 0.5)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certify("own"))

    def script(client):
        with context.wrap_socket(client, server_side=True) if secured else client as connection:
            connection.recv(4096)
            if answer is None:
                given_up.wait()
            connection.sendall(OK if answer is None else answer)

    server, given_up = Server(script), threading.Event()
    assert llama_server.is_healthy(f"{scheme}://127.0.0.1:{server.port}") == expected
    given_up.set()
    server.listener.close()


DEAF = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


def test_a_server_that_does_not_end_by_itself_is_not_waited_for(tmp_path):
    """Clients of a cluster that is upgraded wait for it."""
    head = llama_server.Head([sys.executable, "-c", DEAF], [], "http://127.0.0.1:1", tmp_path)
    while b"ready" not in head.log_tail:
        time.sleep(0.05)
    head.stop()
    assert head.process.returncode == -signal.SIGKILL


def cached(folder, name, size, age=100):
    """A file of the cache that nobody has used for so many seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_what_was_used_longest_ago_is_removed_first(tmp_path):
    old, used, new = (cached(tmp_path, name, 100, age) for name, age in (("old", 300), ("used", 900), ("new", 1)))
    os.utime(used, (time.time(), used.stat().st_mtime))
    (tmp_path / "link").symlink_to(new)
    assert workers.clean_cache(tmp_path, 300) == []
    assert workers.clean_cache(tmp_path, 250) == ["old"]
    assert not old.exists()
    assert sorted(workers.clean_cache(tmp_path, 0)) == ["new", "used"]
    assert workers.clean_cache(tmp_path / "no-such-folder", 0) == []


def test_a_cache_that_cannot_be_tidied_does_not_end_its_worker(small_disk, capfd):
    kept = cached(small_disk, "kept", 5000, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert workers.run_worker([sys.executable, "-c", ""], small_disk, 1000) == 1
    said = capfd.readouterr().out
    assert f"{kept} could not be removed: Read-only file system" in said
    assert "the worker exited with status 0" in said


@pytest.fixture
def worker_service(tmp_path, cluster):
    """Starts the launcher of a worker whose program prints a line and sleeps."""
    program = tmp_path / "idle.py"
    program.write_text(
        "import signal, time\nprint(signal.getsignal(signal.SIGPIPE).name, flush=True)\ntime.sleep(60)\n"
    )

    def start(cache):
        return cluster.start("worker", "--cache", cache, "--limit-mib", 1, "--", sys.executable, program)

    return start


def test_a_worker_starts_with_its_cache_below_the_limit_and_ignores_broken_connections(worker_service, tmp_path):
    cache = tmp_path / "cache"
    kept, gone = cached(cache, "kept", 1 << 20, 1), cached(cache, "gone", 1 << 20, 99)
    process = worker_service(cache)
    said = lines_until(process, "SIG_IGN")
    assert any("files removed" in line and "the cache exceeded 1 MiB: 1" in line for line in said)
    assert kept.exists()
    assert not gone.exists()


def test_files_of_a_cache_that_were_cut_off_are_removed_and_those_of_models_before_are_known(tmp_path):
    cache = tmp_path / "cache" / "rpc"
    for name, size, age in (("a", 100, 99), ("b", 70, 99), ("c", 200, 99), ("written now", 9, 1)):
        cached(cache, name, size, age)
    assert workers.clean_cache(cache, 1 << 20, [100, 200], 30) == ["b"]
    assert workers.clean_cache(cache, 1 << 20, [300]) == ["written now"]


@pytest.mark.parametrize(
    "sizes, limit, left",
    [([20], 99, ["whole"]), ([], 99, ["cut", "later", "whole"]), ([20], 19, []), ([], 15, ["cut"])],
)
def test_a_cache_is_tidied_when_its_worker_starts_and_while_it_runs(tmp_path, monkeypatch, sizes, limit, left):
    monkeypatch.setattr(workers, "CLEANUP_SECONDS", 0.1)
    cache = tmp_path / "cache" / "rpc"
    cached(cache, "whole", 20)
    cached(cache, "cut", 10, 99)
    later = str(cache / "later")
    program = f"import os, time; open({later!r}, 'wb').write(bytes(15)); os.utime({later!r}, (1, 1)); time.sleep(1)"
    workers.run_worker([sys.executable, "-c", program], cache, limit, sizes=sizes)
    assert sorted(path.name for path in cache.iterdir()) == left


def test_a_cache_is_not_tidied_at_each_look_at_its_worker(tmp_path, monkeypatch):
    tidied = []
    monkeypatch.setattr(workers, "clean_cache", lambda *given: tidied.append(given))
    workers.run_worker([sys.executable, "-c", ""], tmp_path, 99)
    assert tidied == [(tmp_path, 99, ())]

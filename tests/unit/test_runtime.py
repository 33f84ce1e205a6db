"""The head's launcher against a scripted worker and a stand-in for llama-server, both real processes with real connections."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.launch import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
from test_rpc import Server, worker

SERVER = """
import http.server, socket, sys
port, endpoints = int(sys.argv[1]), sys.argv[2:]
held = [socket.create_connection((e.split(":")[0], int(e.split(":")[1]))) for e in endpoints]
print("load_tensors: RPC0[x:1] model buffer size = 1.00 MiB", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *a):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


QUICK = """
import functools, runtime
runtime.run = functools.partial(runtime.run, pause=0.1)
raise SystemExit(runtime.main())
"""
"""The launcher, but that it looks ten times a second and not once."""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def until(condition, seconds=50):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


@pytest.fixture
def service():
    """Starts a program as a service would, without the collection on its path."""
    started = []

    def start(argv):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def launcher(tmp_path):
    """The launcher as it is installed on a host, a pair of files; and one beside it that looks more often."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    (folder / "quick.py").write_text(QUICK)
    for path in (Path(runtime.__file__), Path(rpc.__file__)):
        (folder / path.name).write_text(path.read_text())
    return folder


@pytest.fixture
def launch(tmp_path, launcher, service):
    """Starts the launcher of a head."""
    program = tmp_path / "server.py"
    program.write_text(SERVER)

    def start(port, endpoints, *extra):
        argv = [
            sys.executable,
            str(launcher / "quick.py"),
            "head",
            "--url",
            f"http://127.0.0.1:{port}",
            "--state",
            str(tmp_path),
            "--timeout",
            "0.5",
        ]
        for endpoint in endpoints:
            argv += ["--worker", endpoint]
        return service([*argv, *extra, "--", sys.executable, str(program), str(port), *endpoints])

    return start


def a_worker(port=0):
    server = Server(worker((7, 0, 0), {24}))
    return server, f"127.0.0.1:{server.port}"


def lines_until(process, text):
    seen = []
    while True:
        line = process.stdout.readline().decode()
        assert line, f"it ended: {seen}"
        seen.append(line)
        if text in line:
            return seen


def children(process):
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return [int(pid) for pid in found]


def test_it_waits_for_every_worker_then_starts_and_records_the_handshakes(launch, tmp_path):
    first, first_endpoint = a_worker()
    second_port = free_port()
    process = launch(free_port(), [first_endpoint, f"127.0.0.1:{second_port}"], "--protocol", "7.0.0")
    lines_until(process, f"waiting for worker 127.0.0.1:{second_port}: refused")
    assert children(process) == []
    second = Server.__new__(Server)
    listener = socket.create_server(("127.0.0.1", second_port))
    super(Server, second).__init__(daemon=True)
    second.script, second.listener, second.port, second.connections = worker((7, 0, 0), {24}), listener, second_port, []
    second.start()
    lines_until(process, "model buffer size")
    record = json.loads((tmp_path / runtime.HANDSHAKES).read_text())
    assert set(record["workers"]) == {first_endpoint, f"127.0.0.1:{second_port}"}
    assert record["workers"][first_endpoint]["protocol"] == "7.0.0"
    assert "model buffer size" in (tmp_path / runtime.START_LOG).read_text()
    first.listener.close()
    listener.close()


def test_a_worker_of_another_protocol_is_waited_for(launch):
    _server, endpoint = a_worker()
    process = launch(free_port(), [endpoint], "--protocol", "6.0.0")
    lines_until(process, "protocol_mismatch")
    assert children(process) == []


def test_asked_to_stop_it_ends_the_server_and_says_success(launch, tmp_path):
    _server, endpoint = a_worker()
    process = launch(free_port(), [endpoint])
    lines_until(process, "model buffer size")
    (child,) = children(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert not os.path.exists(f"/proc/{child}")
    assert not (tmp_path / runtime.ENDS).exists()


def test_asked_to_stop_while_it_waits(launch):
    process = launch(free_port(), [f"127.0.0.1:{free_port()}"])
    lines_until(process, "refused")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_server_that_ends_is_a_failure_for_the_service_manager(launch):
    _server, endpoint = a_worker()
    process = launch(free_port(), [endpoint])
    lines_until(process, "model buffer size")
    os.kill(children(process)[0], signal.SIGKILL)
    assert process.wait() == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="connections are read from the /proc of Linux")
def test_a_lost_worker_ends_an_idle_server(launch, tmp_path):
    server, endpoint = a_worker()
    process = launch(free_port(), [endpoint])
    lines_until(process, "model buffer size")
    time.sleep(0.5)
    assert process.poll() is None
    server.listener.close()
    for connection in server.connections:
        connection.shutdown(socket.SHUT_RDWR)
    lines_until(process, f"lost worker {endpoint}")
    assert process.wait() == 1
    told = json.loads((tmp_path / runtime.ENDS).read_text())
    assert (told["number"], told["how"]) == (1, f"since it had lost worker {endpoint}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent")
def test_the_server_does_not_outlive_a_killed_launcher(launch):
    _server, endpoint = a_worker()
    process = launch(free_port(), [endpoint])
    lines_until(process, "model buffer size")
    (child,) = children(process)
    process.kill()
    process.wait()
    until(lambda: not os.path.exists(f"/proc/{child}"))


def test_how_often_and_how_the_server_ended_is_written_down_over_all_starts(tmp_path, monkeypatch):
    """A service manager starts the launcher anew each time; here each call is such a start."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    program = "import sys; print('x' * 9000); print('error: invalid argument: --colour'); sys.exit(3)"
    for number, argv, how, last in (
        (1, [sys.executable, "-c", program], "with status 3", ["error: invalid argument: --colour"]),
        (2, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "by signal 9", []),
        (
            3,
            ["/no/such/llama-server"],
            "before it began, [Errno 2] No such file or directory: '/no/such/llama-server'",
            [],
        ),
    ):
        assert runtime.run(argv, [], "http://127.0.0.1:1", tmp_path, None, 1, pause=0.01) == 1
        told = json.loads((tmp_path / runtime.ENDS).read_text())
        assert (told["number"], told["how"], told["log"][-1:]) == (number, how, last)
        assert sum(map(len, told["log"])) < runtime.LAST_BYTES
    (tmp_path / runtime.ENDS).write_text("no record")
    runtime.write_end(tmp_path, "with status 1", "")
    assert json.loads((tmp_path / runtime.ENDS).read_text())["number"] == 1


def test_connections_of_a_process():
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:A000 0100007F:C384 01 00000000:00000000 00:00000000 00000000     0        0 111 1\n"
        "   1: 0100007F:A001 0100007F:C385 08 00000000:00000000 00:00000000 00000000     0        0 222 1\n"
        "   2: 0100007F:A002 0100007F:C386 01 00000000:00000000 00:00000000 00000000     0        0 333 1\n"
    )
    endpoints = ["127.0.0.1:50052", "127.0.0.1:50053", "127.0.0.1:50054"]
    assert runtime.connections(table, {"111", "222"}, endpoints) == {"127.0.0.1:50052"}


def test_the_log_of_a_start_is_bounded(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "START_LOG_BYTES", 100)
    head = runtime.Head([sys.executable, "-c", "print('x' * 1000)"], [], "http://127.0.0.1:1", tmp_path)
    head.process.wait()
    head.relay.join()
    assert len((tmp_path / runtime.START_LOG).read_text()) == 100


def cached(folder, name, size, age):
    path = folder / "rpc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_what_was_used_longest_ago_is_removed_first(tmp_path):
    old, used, new = (cached(tmp_path, name, 100, age) for name, age in (("old", 300), ("used", 900), ("new", 1)))
    os.utime(used, (time.time(), used.stat().st_mtime))
    (tmp_path / "link").symlink_to(new)
    assert runtime.prune(tmp_path, 300) == []
    assert runtime.prune(tmp_path, 250) == ["old"]
    assert not old.exists()
    assert sorted(runtime.prune(tmp_path, 0)) == ["new", "used"]
    assert runtime.prune(tmp_path / "no-such-folder", 0) == []


@pytest.fixture
def worker_service(tmp_path, launcher, service):
    """Starts the launcher of a worker whose program prints a line and sleeps."""
    program = tmp_path / "worker.py"
    program.write_text(
        "import signal, time\nprint(signal.getsignal(signal.SIGPIPE).name, flush=True)\ntime.sleep(60)\n"
    )

    def start(cache):
        argv = [sys.executable, str(launcher / "runtime.py"), "worker", "--cache", str(cache), "--limit-mib", "1"]
        return service([*argv, "--", sys.executable, str(program)])

    return start


def test_a_worker_starts_with_its_cache_below_the_limit_and_ignores_broken_connections(worker_service, tmp_path):
    cache = tmp_path / "cache"
    kept, gone = cached(cache, "kept", 1 << 20, 1), cached(cache, "gone", 1 << 20, 99)
    process = worker_service(cache)
    said = lines_until(process, "SIG_IGN")
    assert any("removed 1 files" in line and "below 1 MiB" in line for line in said)
    assert kept.exists()
    assert not gone.exists()


def test_the_cache_is_bounded_while_the_worker_runs(tmp_path):
    cache = tmp_path / "cache"
    program = f"import pathlib, time; pathlib.Path({str(cache / 'x')!r}).write_bytes(bytes(9)); time.sleep(0.5)"
    cache.mkdir()
    assert runtime.run_worker([sys.executable, "-c", program], cache, 5, pause=0.1) == 1
    assert not (cache / "x").exists()


def test_a_worker_ends_with_its_launcher_however_that_ends(worker_service, tmp_path):
    for number, status in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        process = worker_service(tmp_path / "cache")
        lines_until(process, "SIG_IGN")
        (child,) = children(process)
        process.send_signal(number)
        assert process.wait() == status
        until(lambda child=child: not os.path.exists(f"/proc/{child}"))


def test_a_worker_that_ends_is_a_failure_for_the_service_manager(worker_service, tmp_path):
    process = worker_service(tmp_path / "cache")
    lines_until(process, "SIG_IGN")
    os.kill(children(process)[0], signal.SIGKILL)
    assert process.wait() == 1

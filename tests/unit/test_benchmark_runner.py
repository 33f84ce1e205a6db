"""The program that runs a benchmark's job on the head, and the proxy that delays."""

import json
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import results, runner


def accept(listener, answer):
    """Has each client answered in a thread of its own, until the listener is shut down."""

    def serve():
        while True:
            try:
                client, _address = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


@pytest.fixture
def echo():
    """A server that sends back what it gets; its endpoint."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(client):
        with client:
            while data := client.recv(1 << 16):
                client.sendall(data)

    accept(listener, answer)
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


class Sink:
    def __init__(self):
        self.lines = []

    def write(self, kind, text):
        self.lines.append((kind, text))


@contextmanager
def through_a_proxy(endpoint, latency):
    """A client that reaches the endpoint through a proxy."""
    proxy = runner.Proxy(endpoint, latency, Sink())
    with socket.create_connection(("127.0.0.1", int(proxy.endpoint.split(":")[1])), 10) as client:
        yield client
    for thread in threading.enumerate():  # they would look at the clock of the next test
        if "_carry" in thread.name:
            thread.join(20)
    proxy.close()


def read(client, size):
    """So many bytes."""
    data = b""
    while len(data) < size:
        data += client.recv(1 << 16)
    return data


class Clock:
    """Stands still until the test sets it; who sleeps wakes up when it is time."""

    def __init__(self):
        self.now, self.over, self.ends, self.changed = 0.0, False, [], threading.Condition()
        self.seen = threading.local()

    def monotonic(self):
        self.seen.now = self.now
        return self.seen.now

    def sleep(self, seconds):
        with self.changed:
            end = self.seen.now + seconds
            self.ends.append(end)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.over or self.now >= end, 20)

    def wait_for_sleep(self, end):
        """Until somebody sleeps until then."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.ends and self.ends[-1] == pytest.approx(end), 20), self.ends

    def set(self, now, over=False):
        with self.changed:
            self.now, self.over = now, over
            self.changed.notify_all()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(runner, "time", made)
    return made


def test_the_proxy_changes_no_byte(echo):
    data = bytes(range(256)) * 8000
    with through_a_proxy(echo, 0.001) as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        assert read(client, len(data)) == data
        sender.join()
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b"", "the end of one side is passed on"


def test_each_direction_has_the_latency_once(clock, echo):
    with through_a_proxy(echo, 0.05) as client:
        for began in (0.0, 1.0):
            clock.set(began)
            client.sendall(b"x")
            for end in (began + 0.05, began + 0.1):
                clock.wait_for_sleep(end)
                assert select.select([client], [], [], 0)[0] == []
                clock.set(end)
            assert client.recv(1) == b"x"
        assert clock.ends == pytest.approx([0.05, 0.1, 1.05, 1.1])
        clock.set(2, over=True)


def test_what_follows_does_not_wait_for_the_latency_of_what_is_before(clock):
    ends = [*socket.socketpair(), *socket.socketpair()]
    link = runner.Link(ends[1], ends[2], 0.2)
    taken = link._waiting.put
    counted = []
    link._waiting.put = lambda part: (counted.append(part), taken(part))
    threads = link.start()
    deadline = time.monotonic() + 20
    for _part in range(20):
        ends[0].sendall(b"x")
    while sum(len(data) for _due, data in counted) < 20 and time.monotonic() < deadline:
        time.sleep(0.001)
    clock.wait_for_sleep(0.2)
    clock.set(0.2)
    assert read(ends[3], 20) == b"x" * 20
    assert clock.ends == [0.2]
    clock.set(1, over=True)
    ends[0].shutdown(socket.SHUT_WR)
    for thread in threads:
        thread.join(20)
    for end in ends:
        end.close()


def test_a_worker_that_is_away_is_named():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    proxy = runner.Proxy(f"127.0.0.1:{port}", 0.0, sink := Sink())
    with socket.create_connection(("127.0.0.1", int(proxy.endpoint.split(":")[1])), 10) as client:
        assert client.recv(1) == b""
    assert sink.lines[1][0] == "err"
    assert "cannot be reached" in sink.lines[1][1]
    proxy.close()


def load(tmp_path, *argv, name="x", **other):
    """A load whose program is Python's."""
    given = {"environment": {}, "workers": [], "latency_ms": 0.0, "log": str(tmp_path / "logs" / f"{name}.log")}
    return {**given, "argv": [sys.executable, "-c", *argv], **other}


def start(tmp_path, *loads, timeout=60):
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"timeout": timeout, "loads": loads}))
    program = shutil.copy(runner.__file__, tmp_path)  # as on a head: alone in its folder
    return subprocess.Popen([sys.executable, program, str(path)], stderr=subprocess.PIPE, text=True)


def log_of(one):
    with open(one["log"]) as stream:
        return stream.read()


def test_programs_run_one_after_the_other_and_find_the_workers_through_proxies(tmp_path, echo):
    program = "import os, sys; print(sys.argv[1]); print('said', os.environ['GIVEN'], file=sys.stderr); sys.exit(3)"
    first = load(tmp_path, program, f"{echo},10.0.0.1:1", workers=[echo], latency_ms=1, environment={"GIVEN": "7"})
    loads = [first, load(tmp_path, "pass", name="y"), {**load(tmp_path, name="z"), "argv": ["/none"]}]
    with start(tmp_path, *loads) as running:
        assert running.wait(30) == 0
    lines = log_of(loads[0]).splitlines()
    assert all(results.LINE.fullmatch(line) for line in lines)
    leads = re.search(r"run (127\.0\.0\.1:\d+) leads to", lines[0])[1]
    assert any(line.endswith(f"out {leads},10.0.0.1:1") for line in lines)
    assert any(line.endswith("err said 7") for line in lines)
    assert [results.read(log_of(one)).status for one in loads] == [3, 0, 1]
    assert "err /none cannot be started: No such file or directory" in log_of(loads[2])


def test_a_job_that_is_to_end_ends_its_program_and_starts_no_other(tmp_path):
    sleep = "import time; print(1, flush=True); time.sleep(60)"
    loads = [load(tmp_path, sleep), load(tmp_path, sleep, name="y")]
    with start(tmp_path, *loads) as running:
        while not (tmp_path / "logs" / "x.log").exists() or "out 1" not in log_of(loads[0]):
            time.sleep(0.05)
        running.terminate()
        assert running.wait(20) == 0
    assert results.read(log_of(loads[0])).status == -15
    assert not (tmp_path / "logs" / "y.log").exists()


def test_a_program_whose_time_is_over_is_killed_and_the_next_one_runs(tmp_path):
    loads = [load(tmp_path, "import time; time.sleep(60)"), load(tmp_path, "pass", name="y")]
    with start(tmp_path, *loads, timeout=0.2) as running:
        assert running.wait(30) == 0
    found = results.read(log_of(loads[0]))
    assert (found.status, found.last) == (-9, ("its 0.2 seconds are over",))
    assert results.read(log_of(loads[1])).status == 0


def test_a_program_whose_log_cannot_be_written_is_ended(tmp_path):
    endless = load(tmp_path, "while True: print('x' * 1000, flush=True)", log="/dev/full")
    with start(tmp_path, endless) as running:
        assert "the log cannot be written: [Errno 28] No space left on device" in running.communicate(timeout=20)[1]


def test_a_program_that_writes_without_an_end_is_ended(tmp_path, monkeypatch):
    """Neither its log nor one of its lines grows without an end."""
    monkeypatch.setattr(runner, "LOG_BYTES", 100_000)
    monkeypatch.setattr(runner, "LINE_BYTES", 1000)
    endless = load(tmp_path, "import sys\nwhile True: sys.stderr.write('x' * 500)")
    runner.Runner(60).run(runner.Load(**endless))
    lines = log_of(endless).splitlines()
    assert lines[-1].endswith(" run ended with -9")
    assert {len(line.split(" ", 2)[2]) for line in lines[:-1]} == {1000}
    assert len(log_of(endless)) < 110_000

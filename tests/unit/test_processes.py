"""Processes and sockets of a host, with real ones."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another account")


@pytest.fixture
def run(popen):
    """Starts programs that end with the test, and waits until each has a command line: Popen returns a little earlier."""

    def start(argv, **options):
        process = popen(argv, **options)
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        return process

    return start


@pytest.fixture
def script(tmp_path):
    """A script of an installation in a folder that every account may read."""
    path = tmp_path / "bin" / "script"
    path.parent.mkdir()
    path.write_text("import time\nprint(1, flush=True)\ntime.sleep(60)\n")
    tmp_path.chmod(0o755)
    return path


@needs_root
def test_a_process_of_another_account_is_left_out(tmp_path, script, run, monkeypatch):
    process = run([sys.executable, str(script)])
    assert list(processes.of_account(str(tmp_path), "root")) == [process.pid]
    assert processes.of_account(str(tmp_path), "nobody") == {}
    assert processes.of_account(str(tmp_path), "no-such") == {}
    monkeypatch.setattr(processes.os, "readlink", mock.Mock(side_effect=PermissionError))
    assert list(processes.of_account(str(tmp_path), "root")) == [process.pid]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="a process namespace needs root and the program unshare"
)
def test_a_process_of_a_container_is_left_out(tmp_path, script, run):
    inside = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, str(script)]
    process = run(inside, stdout=subprocess.PIPE)
    process.stdout.readline()
    assert processes.of_account(str(tmp_path), None) == {}
    process.stdout.close()
    outside = run([sys.executable, str(script)], stdout=subprocess.DEVNULL)
    assert list(processes.of_account(str(tmp_path), None)) == [outside.pid]


@needs_root
def test_only_the_account_of_a_foreign_process_is_read(run, monkeypatch):
    """Its command line may be on a file system of its own, which never answers."""
    read, paths = Path.read_bytes, []
    foreign = run(["sleep", "50"], user="nobody")
    monkeypatch.setattr(Path, "read_bytes", lambda path: paths.append(str(path)) or read(path))
    processes.of_account("/p", "root")
    assert f"/proc/{os.getpid()}/cmdline" in paths
    assert f"/proc/{foreign.pid}/cmdline" not in paths


def test_processes_and_listeners_of_macos(monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    lines = f"  10 {uid} /p/bin/rpc-server -p 1\n  11 12345 /p/bin/rpc-server -p 1\n  12 {uid} /bin/sh\n"
    monkeypatch.setattr(processes, "output", lambda argv: lines)
    assert processes.of_account("/p", None) == {10: ["/p/bin/rpc-server", "-p", "1"]}
    listeners = [f"p10\nu{uid}\nf3\nn*:8080", "p11\nu12345\nf3\nn192.0.2.1:8080"]
    monkeypatch.setattr(processes, "output", lambda argv: "\n".join(listeners))
    assert processes.unexpected_listener("127.0.0.1", 8080, [10], None) is None
    assert "another program" in processes.unexpected_listener("127.0.0.1", 8080, [9], None)
    assert "of account 12345" in processes.unexpected_listener("192.0.2.1", 8080, [10], None)


def test_a_listener_that_is_not_expected():
    unexpected = processes.unexpected_listener
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("0.0.0.0", 0)) as everywhere:
        for port in (listener.getsockname()[1], everywhere.getsockname()[1]):
            assert unexpected("127.0.0.1", port, [os.getpid()], None) is None
            for running in ([], [os.getppid()]):
                text = unexpected("127.0.0.1", port, running, None)
                assert text.startswith(f"127.0.0.1:{port} is held by another program of account ")
        assert "nothing on this host" in unexpected("192.0.2.1", listener.getsockname()[1], [os.getpid()], None)
        assert processes.listening_addresses(everywhere.getsockname()[1], processes.sockets()) == ["0.0.0.0"]
    assert "nothing on this host listens" in unexpected("127.0.0.1", port, [os.getpid()], None)


@needs_root
def test_an_account_decides_where_file_descriptors_may_not_be_read(monkeypatch):
    os.seteuid(65534)
    try:
        listener = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)
    unexpected = processes.unexpected_listener
    with listener, socket.create_server(("127.0.0.1", 0)) as expected:
        monkeypatch.setattr(processes, "_socket_inodes", lambda pids: {})
        assert "of account nobody" in unexpected("127.0.0.1", listener.getsockname()[1], [os.getpid()], None)
        assert unexpected("127.0.0.1", expected.getsockname()[1], [os.getpid()], None) is None


def test_clients_of_a_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert processes.clients(port, processes.sockets()) == []
        with socket.create_connection(("127.0.0.1", port)):
            assert processes.clients(port, processes.sockets()) == ["127.0.0.1"]


def test_when_a_process_started(run):
    assert abs(processes.started_at(run(["sleep", "50"]).pid) - time.time()) < 60
    assert processes.started_at(None) is None

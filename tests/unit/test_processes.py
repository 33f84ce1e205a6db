"""Processes and sockets of a host, with real ones."""

import os
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import listeners, processes
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import progress

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another account")


@pytest.fixture
def script(tmp_path):
    """A script of an installation in a folder that every account may read."""
    path = tmp_path / "bin" / "script"
    path.parent.mkdir()
    path.write_text("import time\nprint(1, flush=True)\ntime.sleep(60)\n")
    tmp_path.chmod(0o755)
    return path


@needs_root
def test_a_process_of_another_account_is_left_out(tmp_path, script, popen):
    process = popen([sys.executable, str(script)])
    assert list(processes.account_processes(str(tmp_path), "root")) == [process.pid]
    assert processes.account_processes(str(tmp_path), "nobody") == {}
    assert processes.account_processes(str(tmp_path), "no-such") == {}


@needs_root
def test_only_the_account_of_a_foreign_process_is_read(popen, monkeypatch):
    """Its command line may be on a file system of its own, which never answers."""
    read, paths = Path.read_bytes, []
    foreign = popen(["sleep", "50"], user="nobody")
    monkeypatch.setattr(Path, "read_bytes", lambda path: paths.append(str(path)) or read(path))
    processes.account_processes("/p", "root")
    assert f"/proc/{os.getpid()}/cmdline" in paths
    assert f"/proc/{foreign.pid}/cmdline" not in paths


def test_the_start_of_a_process_whose_name_the_kernel_cuts_within_a_letter(tmp_path, popen):
    program = shutil.copy("/bin/sleep", tmp_path / "übermäßigträge")
    start = processes.start_time(popen([str(program), "50"]).pid)
    assert abs(start - time.time()) < 60


def test_lines_of_the_socket_table_that_are_cut_off_are_left_out(monkeypatch):
    monkeypatch.setattr(processes, "text_of", lambda _path: "header\n0: 0100007F\n1: x:y 0:0 0A\n")
    assert processes.read_sockets() == processes.Sockets([], [])
    assert progress.parse_tcp_table("header\n0: 0100007F\n1: x:y 0:0 0A 0 0:0 0 0 0 0\n") == []


def test_processes_and_listeners_of_macos(monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    lines = f"  10 {uid} /p/bin/rpc-server -p 1\n  11 12345 /p/bin/rpc-server -p 1\n  12 {uid} /bin/sh\n  13 {uid}\nps: failed\n"
    monkeypatch.setattr(processes, "output", lambda argv: lines)
    assert processes.account_processes("/p", None) == {10: ["/p/bin/rpc-server", "-p", "1"]}
    asked = []
    monkeypatch.setattr(
        listeners, "output", lambda argv: asked.append(argv[-1]) or ("9\n" if "@" in argv[-1] else "10\n")
    )
    assert [listeners.is_served("127.0.0.1", 8080, pids) for pids in ([9], [10, 11], [])] == [True, False, False]
    assert {*asked} == {"-iTCP@127.0.0.1:8080"}
    monkeypatch.setattr(listeners, "output", lambda argv: "" if "@" in argv[-1] else "10\n")
    assert listeners.is_served("127.0.0.1", 8080, [10, 11])
    assert listeners.is_listening_alone(8080)


def test_whether_one_of_our_processes_listens(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("0.0.0.0", 0)) as everywhere:
        for port in (listener.getsockname()[1], everywhere.getsockname()[1]):
            served = [listeners.is_served("127.0.0.1", port, pids) for pids in ([os.getpid()], [], [os.getppid()])]
            assert (served, listeners.is_listening_alone(port)) == ([True, False, False], True)
        assert not listeners.is_served("192.0.2.1", listener.getsockname()[1], [os.getpid()])
        assert processes.listening_addresses(port, processes.read_sockets()) == ["0.0.0.0"]
        inode = str(os.fstat(everywhere.fileno()).st_ino)
        owners = {"127.0.0.1": "", "0.0.0.0": inode}
        exact, everyone = (processes.Socket(at, 8080, "", "0A", owner) for at, owner in owners.items())
        monkeypatch.setattr(processes, "read_sockets", lambda: processes.Sockets([exact, everyone], []))
        served = [listeners.is_served(at, 8080, [os.getpid()]) for at in ("127.0.0.1", "127.0.0.2")]
        assert served == [False, True]
        exact = exact._replace(uid=os.getuid() + 1)
        monkeypatch.setattr(processes, "read_sockets", lambda: processes.Sockets([exact, everyone], []))
        assert not listeners.is_listening_alone(8080)
        monkeypatch.undo()
    assert not listeners.is_served("127.0.0.1", port, [os.getpid()])
    assert not listeners.is_listening_alone(port)


def test_clients_of_a_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert processes.client_addresses(port, processes.read_sockets()) == []
        with socket.create_connection(("127.0.0.1", port)):
            assert processes.client_addresses(port, processes.read_sockets()) == ["127.0.0.1"]


def test_when_a_process_started(popen):
    assert abs(processes.start_time(popen(["sleep", "50"]).pid) - time.time()) < 60
    assert processes.start_time(None) is None

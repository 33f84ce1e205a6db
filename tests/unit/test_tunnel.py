"""Tunnels of the launcher: real stunnel between real launchers, with stand-ins for the programs of llama.cpp."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import tunnel_keys
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import progress, tunnel
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
from support import launched
from support.hosts import free_port
from support.launched import a_worker, children, lines_until, until

KEY, OTHER = "0a" * 32, "0b" * 32


def test_a_file_of_keys_names_a_key_without_telling_it():
    identity, key = tunnel_keys.line_of(KEY).strip().split(":")
    assert key == KEY
    assert len(identity) == 16
    assert identity not in KEY
    assert identity != tunnel_keys.identity_of(OTHER)


def test_both_ends_find_the_same_file_of_keys(tmp_path):
    (head,) = tunnel.parse_tunnels(["127.128.0.12:50052=10.0.0.12:50052"], tmp_path, is_head_end=True)
    (worker,) = tunnel.parse_tunnels(["10.0.0.12:50052=127.0.0.1:50052"], tmp_path, is_head_end=False)
    assert head.key_path == worker.key_path == tmp_path / "10.0.0.12"
    text = tunnel.stunnel_configuration([head])
    for line in ("client = yes", "accept = 127.128.0.12:50052", "connect = 10.0.0.12:50052", "TIMEOUTidle = 31536000"):
        assert f"\n{line}\n" in text
    assert "\nsocket = r:TCP_NODELAY=1\n" in text
    assert "\nclient = no\n" in tunnel.stunnel_configuration([worker])


def test_where_stunnel_is_missing_the_launcher_says_so_and_goes_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tunnel, "stunnel_path", lambda: None)
    tunnel.journal.LOGGED_KEYS.clear()
    ends = tunnel.parse_tunnels(["127.0.0.2:1=127.0.0.1:2"], tmp_path, is_head_end=False)
    with tunnel.Tunnels(ends):
        assert f"{tmp_path}/127.0.0.2 is missing: run site.yml" in capfd.readouterr().out
        (tmp_path / "127.0.0.2").write_text(tunnel_keys.line_of(KEY))
        tunnel.Tunnels.maintain(tunnel.Tunnels(ends))
    with tunnel.Tunnels(ends):
        assert "stunnel is not installed: run site.yml" in capfd.readouterr().out


def test_connections_through_tunnels_are_seen_as_they_are_on_the_network(tmp_path, monkeypatch):
    near = progress.TcpSocket("127.0.0.1:5", "127.128.0.12:1", progress.ESTABLISHED, 0, "near")
    probe = near._replace(address="127.0.0.1:6", inode="probe")
    client = near._replace(peer="127.0.0.1:9", inode="client")
    far = near._replace(address="10.0.0.11:5", peer="10.0.0.12:1", retransmissions=6, inode="far")
    short = far._replace(address="10.0.0.11:6", retransmissions=0, inode="short")
    said = {inode: progress.Traffic(sent, 0, 0, 0) for inode, sent in (("near", 90), ("probe", 9), ("client", 7))}
    behind = {"far": progress.Traffic(80, 1, 2, 3), "short": progress.Traffic(8, 1, 2, 3)}
    activity = progress.Activity("S", 0.0, 0, 0)
    look = progress.ProcessSample(activity, [probe, near, client], said)
    tunnels = tunnel.Tunnels(tunnel.parse_tunnels(["127.128.0.12:1=10.0.0.12:1"], tmp_path, is_head_end=True))
    assert tunnels.with_outer_traffic(look) == look
    tunnels.process = type("Process", (), {"pid": 7})()
    monkeypatch.setattr(
        progress, "sample_process", lambda *_where: progress.ProcessSample(activity, [short, far], behind)
    )
    found = tunnels.with_outer_traffic(look)
    assert [link.retransmissions for link in found.sockets] == [0, 6, 0]
    assert found.traffic == {"near": behind["far"], "probe": behind["short"], "client": said["client"]}


class Ends:
    """A worker behind a tunnel, and the folders of keys of its host and of the head."""

    def __init__(self, cluster, folder):
        self.cluster, self.server = cluster, a_worker()
        self.inner = self.server[1]
        self.outer, self.near = f"127.0.0.2:{free_port()}", f"127.0.0.3:{free_port()}"
        self.theirs, self.own = folder / "theirs", folder / "own"
        for keys in (self.theirs, self.own):
            keys.mkdir(mode=0o700)

    def give(self, keys, *texts):
        path = keys / "127.0.0.2"
        (keys / "new").write_text("".join(map(tunnel_keys.line_of, texts)))
        (keys / "new").chmod(0o600)
        (keys / "new").replace(path)

    def share_a_key(self):
        for keys in (self.theirs, self.own):
            self.give(keys, KEY)

    def start(self):
        """The launcher of the worker, as its service has it."""
        words = ["--tunnel", f"{self.outer}={self.inner}", "--tunnel-keys", self.theirs]
        process = self.cluster.start("worker", *words, "--", "sleep", "600")
        until(lambda: listens(self.outer))
        return process

    def head(self, how="serves"):
        words = ["--tunnel", f"{self.near}={self.outer}", "--tunnel-keys", self.own]
        return self.cluster.head(how, [self.near], words)

    def client(self):
        """A program with the head's end of the tunnel."""
        words = ["--tunnel", f"{self.near}={self.outer}", "--tunnel-keys", self.own]
        process = self.cluster.start("client", *words, "--", "sleep", "600")
        until(lambda: listens(self.near))
        return process

    def state(self):
        address, port = self.near.split(":")
        return rpc.probe(address, int(port), 3).state


def listens(endpoint):
    address, port = endpoint.split(":")
    with contextlib.suppress(OSError), socket.create_connection((address, int(port)), 1):
        return True


@pytest.fixture
def ends(cluster, tmp_path):
    return Ends(cluster, tmp_path)


@pytest.mark.programs
@pytest.mark.skipif(not (tunnel.stunnel_path() and progress.ON_LINUX), reason="stunnel is not installed")
class TestRealTunnels:
    def test_a_head_reaches_its_worker_and_nobody_else_does(self, ends):
        ends.share_a_key()
        ends.start()
        client = ends.client()
        assert ends.state() == "ok"
        address, port = ends.outer.split(":")
        assert rpc.probe(address, int(port), 3).state != "ok"
        ends.give(ends.own, OTHER)
        lines_until(client, "the tunnel keys have changed")
        assert until(lambda: ends.state() != "ok")

    def test_keys_are_renewed_while_a_connection_lives(self, ends):
        ends.share_a_key()
        worker, client = ends.start(), ends.client()
        address, port = ends.near.split(":")
        with socket.create_connection((address, int(port))) as held:
            held.settimeout(10)

            def answers():
                held.sendall(b"c")
                return held.recv(100)

            assert answers() == b"computed"
            for keys, process, texts in (
                (ends.theirs, worker, (OTHER, KEY)),
                (ends.own, client, (OTHER,)),
                (ends.theirs, worker, (OTHER,)),
            ):
                ends.give(keys, *texts)
                lines_until(process, "the tunnel keys have changed")
                assert answers() == b"computed"
        assert until(lambda: ends.state() == "ok")

    def test_a_tunnel_that_was_killed_comes_back(self, ends):
        ends.share_a_key()
        worker, client = ends.start(), ends.client()
        for process in (worker, client):
            (own,) = (pid for pid in children(process) if progress.argv_of(pid)[:1] == [tunnel.stunnel_path()])
            os.kill(own, signal.SIGKILL)
            lines_until(process, "stunnel exited on signal 9: restarting it")
            assert until(lambda: ends.state() == "ok")

    def test_a_head_whose_key_is_another_one_says_so_and_serves_once_it_is_right(self, ends):
        ends.give(ends.theirs, KEY)
        ends.give(ends.own, OTHER)
        ends.start()
        head = ends.head()
        lines_until(
            head, f"{ends.outer}, the far end of the tunnel, is unreachable, has another key, or does not forward to"
        )
        ends.give(ends.own, KEY)
        until(lambda: ends.cluster.is_now("serving"))

    def test_a_head_that_loses_its_worker_s_tunnel_is_started_again(self, ends):
        ends.share_a_key()
        worker, head = ends.start(), ends.head()
        until(lambda: ends.cluster.is_now("serving"))
        worker.terminate()
        assert f"lost worker {ends.near}: restarting llama-server" in launched.healed(head, "restarting llama-server")

    def test_the_key_is_in_no_command_line_and_in_no_log(self, ends):
        ends.share_a_key()
        worker = ends.start()
        ends.client()
        assert ends.state() == "ok"
        shown = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=True).stdout
        worker.terminate()
        assert KEY not in shown
        assert KEY not in worker.stdout.read().decode()

    def test_a_program_behind_tunnels_ends_as_it_ended(self, ends):
        ends.give(ends.own, KEY)
        words = ["--tunnel", f"{ends.near}={ends.outer}", "--tunnel-keys", ends.own]
        program = ends.cluster.start("client", *words, "--", shutil.which("sh"), "-c", "exit 3")
        assert program.wait(30) == 3
        asked = ends.client()
        asked.terminate()
        assert asked.wait(30) == 0
        assert not listens(ends.near)
        assert not [*ends.cluster.folder.glob("llamacpp-*.conf")]

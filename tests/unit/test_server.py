"""Each fault that heals without a controller, against real processes: the launcher as it is installed, but hasty, with stand-ins for the programs."""

import contextlib
import json
import os
import signal
import socket
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading, progress, serving
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import server as llama_server
from support.hosts import free_port
from support.launched import SILENCE, a_worker, children, healed, lines_until, until

pytestmark = [
    pytest.mark.skipif(not progress.ON_LINUX, reason="what moves is read from the kernel of Linux"),
    pytest.mark.programs,
]


def test_a_stopped_worker_is_ended_where_it_runs(cluster):
    process, _port = cluster.worker()
    (child,) = children(process)
    os.kill(child, signal.SIGSTOP)
    assert "the worker has been suspended (SIGSTOP) for " in healed(process, "restarting it")
    assert not os.path.exists(f"/proc/{child}")


def test_a_worker_that_does_not_notice_that_its_client_has_gone_is_ended(cluster):
    process, port = cluster.worker("hangs")
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"x")
    lines_until(process, "serves")
    time.sleep(2)
    assert process.poll() is None
    client.close()
    assert "has not noticed" in healed(process, "restarting it")


def test_connections_of_both_sides_are_kept_alive(cluster):
    """The kernel then ends those whose other host is gone, without a reset and without a request."""
    process, port = cluster.worker()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"x")
        (child,) = children(process)

        def kept():
            links = progress.sample_process(child, set(), set()).sockets
            (inode,) = [link.inode for link in links if link.state == progress.ESTABLISHED]
            with progress.copy_socket(child, progress.socket_descriptors(child)[inode]) as connection:
                return connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

        until(kept)


def watched(endpoints, argv=()):
    """A healthy llama-server that does nothing."""
    sample = progress.ProcessSample(progress.Activity("S", 0, 0, 0), [], {})
    head = llama_server.WatchedServer([*argv], endpoints, "http://127.0.0.1:1", 0.01)
    head.is_ready, head.health, head.update = True, (True, 0.0), lambda _clock: sample
    return head


@pytest.mark.parametrize(
    "asleep, said, after", [(True, b"401", True), (False, b"", False), (True, b'{"is_sleeping":false}', False)]
)
def test_only_an_answer_that_says_so_changes_whether_it_sleeps(asleep, said, after):
    """A proxy may answer, or a server that still has the key before the last one."""
    head = watched([], argv=[llama_server.SLEEP_OPTION])
    head.is_asleep, head.props_request = asleep, mock.Mock(reply=said, is_alive=lambda: False)
    head.fault()
    assert (head.is_asleep, head.props_request) == (after, None)


def test_what_a_server_does_by_itself_is_counted_over_the_whole_window():
    still, looks = progress.IdleTimer(10, 100), ((100, 0.0), (101, 0.01), (110, 0.01), (111, 1.0), (120, 1.0))
    samples = [(now, progress.ProcessSample(progress.Activity("S", cpu, 0, 0), [], {})) for now, cpu in looks]
    found = [still.seconds(sample, [], now) for now, sample in samples]
    assert found == [0, 1, 10, 11, 0]


def test_a_host_that_acknowledges_nothing_is_a_lost_worker(monkeypatch):
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:A000 0B0200C0:C384 01 00000100:00000000 01:00000000 00000004     0        0 111 1\n"
        "   1: 0100007F:A001 0C0200C0:C384 01 00000100:00000000 01:00000000 00000003     0        0 222 1\n"
        "   2: 0100007F:A002 0D0200C0:C384 01 00000100:00000000 04:00000000 00000009     0        0 333 1\n"
    )
    links = progress.parse_tcp_table(table)
    head = watched([link.peer for link in links])
    look = progress.ProcessSample(progress.Activity("S", 0, 0, 0), links, {})
    better = look._replace(sockets=[link._replace(retransmissions=0) for link in links])
    head.update = lambda clock: better if clock == 30 else look
    clocks = iter((0, 19, 30, 31, 50, 51))
    monkeypatch.setattr(llama_server, "time", SimpleNamespace(monotonic=lambda: next(clocks)))
    assert [head.fault() for _number in range(5)] == [None] * 5
    fault = head.fault()
    assert (fault.cause, fault._replace(model="m").cause) == ("lost_worker", "model_lost_worker")
    assert fault.workers == ["192.0.2.11:50052"]
    assert fault.finding == "lost worker 192.0.2.11:50052, whose host does not acknowledge data"


def test_launchers_tell_systemd_that_they_get_on(cluster, tmp_path, monkeypatch):
    """systemd ends one that is stopped together with its program, as ``systemctl kill`` does it."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        for start in (
            lambda: cluster.worker()[0],
            lambda: cluster.head("answers"),
            lambda: cluster.head("answers", [f"127.0.0.1:{free_port()}"]),
        ):
            process = start()
            time.sleep(2)
            os.kill(process.pid, signal.SIGSTOP)
            systemd.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while systemd.recv(100):
                    pass
            os.kill(process.pid, signal.SIGCONT)
            systemd.settimeout(20)
            assert [systemd.recv(100) for _number in range(3)] == [b"WATCHDOG=1"] * 3
            process.kill()
            process.wait()


def test_a_stopped_head_is_started_again(cluster):
    process = cluster.head("answers", until_it_is="serving")
    (child,) = children(process)
    os.kill(child, signal.SIGSTOP)
    assert "llama-server has been suspended (SIGSTOP) for " in healed(process, "restarting llama-server")
    assert not os.path.exists(f"/proc/{child}")
    assert cluster.record()["restarts"] == 1
    assert "suspended (SIGSTOP)" in cluster.record()["last"][-1]["text"]
    ends = json.loads((cluster.state / "ends.json").read_text())
    assert "because the launcher stopped it: llama-server has been suspended" in ends["how"]


def test_a_head_that_answers_health_and_no_client_is_started_again(cluster, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    process = cluster.head("hangs", more=[llama_server.KEY_FILE_OPTION, str(keys)])
    with cluster.client():
        said = lines_until(process, "there has been no progress for")
    assert "llama-server does not answer a client" in said[-1]
    assert any('"n_predict": 1' in line and "Bearer first" in line for line in said)
    assert process.wait(50) == 1


def test_a_client_that_asks_for_nothing_ends_no_server(cluster):
    """Half a request holds a connection; a question of the launcher's own shows that the server computes."""
    process = cluster.head("answers")
    with cluster.client(b"POST /completion HTTP/1.1\r\nHost: x\r\n"):
        lines_until(process, "n_predict")
        time.sleep(2 * SILENCE)
        assert process.poll() is None


@pytest.mark.parametrize("key, workers", [(False, 1), (True, 2), (False, 0)])
def test_a_server_that_sleeps_is_left_alone_and_wakes(cluster, monkeypatch, key, workers):
    """Waking takes longer than an answer of the launcher's questions may."""
    monkeypatch.chdir(cluster.folder)
    (cluster.folder / "keys").write_text("secret\n")
    endpoints = [a_worker()[1] for _worker in range(workers)]
    more = ["--sleep-idle-seconds", "1", *(["--api-key-file", "keys"] if key else [])]
    process = cluster.head("serves", endpoints, more=more)
    for _time in range(2):
        until(lambda: cluster.is_now("asleep"))
        time.sleep(1.5)
        assert cluster.is_now("asleep"), "a question of the launcher's woke it"
        assert cluster.ask() == b"the answer"
        until(lambda: cluster.is_now("serving"))
    until(lambda: cluster.is_now("asleep"))
    assert (process.poll(), cluster.record()["restarts"], cluster.record()["last"]) == (None, 0, [])


@pytest.mark.parametrize("more", [[], ["--sleep-idle-seconds", "99"]])
def test_a_lost_worker_ends_an_idle_server(cluster, more):
    server, endpoint = a_worker()
    process = cluster.head("serves", [endpoint], more=more, until_it_is="serving")
    server.connections[-1].shutdown(socket.SHUT_RDWR)
    healed(process, f"lost worker {endpoint}: restarting llama-server")
    told = json.loads((cluster.state / "ends.json").read_text())
    assert (told["number"], told["how"]) == (1, f"after losing worker {endpoint}")


def test_a_worker_that_owes_an_answer_is_named(cluster):
    _server, endpoint = a_worker(pause=600)
    process = cluster.head("asks its worker", [endpoint])
    with cluster.client():
        assert f"llama-server gets no answer from worker {endpoint}, and there has been no progress" in healed(
            process, "there has been no progress for"
        )


@pytest.mark.parametrize("how", ["is slow", "computes"])
def test_a_slow_model_is_never_taken_for_a_hung_one(cluster, how):
    """Its answer takes several times the time for which nothing may move, by a byte now and then or by processor time alone."""
    _server, endpoint = a_worker(pause=SILENCE * 0.4)
    process = cluster.head(how, [endpoint], until_it_is="serving")
    assert cluster.ask() == b"the answer"
    assert process.poll() is None
    assert cluster.record()["restarts"] == 0


def test_loading_that_stands_still_is_started_again(cluster):
    process = cluster.head("loads for ever")
    assert "loading has made no progress for" in healed(process, "made no progress for")
    assert cluster.record()["last"][-1]["text"].startswith("loading has made no progress for")


def test_a_load_that_moves_bytes_is_never_ended_and_is_written_down(cluster):
    """It takes several times the time for which nothing may move."""
    _server, endpoint = a_worker(pause=SILENCE * 0.4)
    process = cluster.head("loads slowly", [endpoint])
    loads = []

    def serves():
        with contextlib.suppress(OSError, ValueError):
            loads.extend([load] if (load := cluster.record()["load"]) else [])
        return cluster.is_now("serving")

    until(serves)
    assert process.poll() is None
    assert loads[-1]["sent"][endpoint] >= 8 * len("compute")
    sent = [load["sent"].get(endpoint, 0) for load in loads]
    assert len(set(sent)) > 2
    assert sent == sorted(sent)
    assert loads[-1]["read"] > 0
    assert loads[-1]["seconds"] > 8 * SILENCE * 0.3
    assert (cluster.record()["load"], cluster.record()["restarts"]) == (None, 0)


def test_what_was_sent_over_a_connection_that_is_closed_stays_counted():
    link = progress.TcpSocket("192.0.2.1:1", "192.0.2.2:50052", progress.ESTABLISHED, 0, "7")
    look = progress.ProcessSample(progress.Activity("S", 0, 9, 0, 5), [link], {"7": progress.Traffic(100, 1, 0, 0)})
    first = progress.load_of(look, ["192.0.2.2:50052", "192.0.2.3:50052"], 1.0, None)
    assert first == loading.LoadCounters(1.0, 5, {"192.0.2.2:50052": 100})
    later = look._replace(traffic={"7": progress.Traffic(3, 1, 0, 0)})
    again = progress.load_of(later, ["192.0.2.2:50052"], 2.0, first)
    assert again.sent == first.sent


def test_where_the_kernel_lends_no_sockets_slow_and_hung_are_not_told_apart(monkeypatch):
    for endpoints, silent in (["192.0.2.1:50052"], False), ([], True):
        head, clocks = watched(endpoints), iter(time.monotonic() + number for number in range(3))
        head.is_ready = False
        with monkeypatch.context() as patched:
            patched.setattr(llama_server, "time", SimpleNamespace(monotonic=lambda clocks=clocks: next(clocks)))
            faults = [head.fault() for _number in range(3)]
        assert [bool(fault and fault.is_silent) for fault in faults] == [False, silent, silent], faults


class Pair:
    """Two workers, of which the second one is away, and the fallback without it."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.server, self.first = a_worker()
        self.port = free_port()
        self.second = f"127.0.0.1:{self.port}"
        self.path = cluster.folder / "fallbacks.json"
        entry = {"name": "strix1:hip", "without": self.second, "workers": [self.first]}
        self.path.write_text(json.dumps([{**entry, "argv": cluster.argv("smaller", [self.first])}]))

    def head(self, after=0.5):
        extra = ["--fallbacks", self.path, "--fallback-after", after]
        return self.cluster.head("answers", [self.first, self.second], extra)

    def come_back(self):
        return a_worker(port=self.port)[0]


def test_a_worker_that_stays_away_is_done_without_until_it_is_back(cluster):
    pair = Pair(cluster)
    process = pair.head()
    said = lines_until(process, f"model buffer size smaller {pair.first}")
    lost = f"no answer from worker {pair.second}: starting llama-server without strix1:hip"
    assert any(lost in line for line in said)
    until(lambda: cluster.is_now("fallback"))
    record = cluster.record()
    assert (record["without"], record["waiting_for"], record["restarts"]) == (["strix1:hip"], [], 0)
    with cluster.client(b"POST /completion HTTP/1.1\r\nHost: x\r\n"):
        pair.come_back()
        time.sleep(3)
        assert process.poll() is None, "it did not wait for the client"
    healed(process, f"worker {pair.second} is back: restarting llama-server with all workers")
    record = cluster.record()
    assert (record["state"], record["restarts"]) == ("waiting", 1)
    assert not (cluster.state / "ends.json").exists()
    process = pair.head()
    lines_until(process, f"model buffer size answers {pair.first} {pair.second}")
    until(lambda: cluster.is_now("serving"))
    assert cluster.record()["without"] == []


def test_a_worker_that_comes_and_goes_does_not_end_the_fallback(cluster):
    pair = Pair(cluster)
    process = pair.head()
    until(lambda: cluster.is_now("fallback"))
    for _time in range(5):
        second = pair.come_back()
        time.sleep(0.4)
        second.listener.shutdown(socket.SHUT_RDWR)
        second.listener.close()
        time.sleep(0.4)
    assert process.poll() is None
    assert cluster.is_now("fallback")


def test_two_workers_that_are_away_are_waited_for(cluster):
    pair = Pair(cluster)
    pair.server.listener.close()
    away = free_port()
    pair.first = f"127.0.0.1:{away}"
    pair.path.write_text(pair.path.read_text().replace(str(pair.server.port), str(away)))
    process = pair.head(after=0)
    until(lambda: cluster.is_now("waiting") and len(cluster.record()["waiting_for"]) == 2)
    time.sleep(1)
    assert children(process) == []


def test_a_record_keeps_its_counts_and_its_last_lines(tmp_path):
    record = serving.HeadRecord(tmp_path)
    for number in range(30):
        record.log(f"line {number}")
        record.count_restart()
    record.set_state(serving.FALLBACK, ("strix1:hip",))
    after = serving.HeadRecord(tmp_path)
    assert after.history.restarts == 30
    assert [line["text"] for line in after.history.last] == [f"line {number}" for number in range(10, 30)]
    told = json.loads((tmp_path / serving.RECORD_FILE).read_text())
    assert (told["schema"], told["process"]) == (1, os.getpid())
    assert (told["state"], told["without"]) == ("fallback", ["strix1:hip"])

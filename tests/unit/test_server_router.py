"""What heals where llama-server is a router, whose models take turns: against real processes, with stand-ins for the programs."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, progress, runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import server as llama_server
from support import launched
from support.launched import a_worker, children, lines_until, until

pytestmark = [
    pytest.mark.skipif(not progress.ON_LINUX, reason="the children of a process are read from the kernel of Linux"),
    pytest.mark.programs,
]


@pytest.fixture
def models(cluster):
    """A head with two models on a worker each, and what is started and asked of it."""

    class Models:
        def __init__(self):
            (self.worker, one), (_other, two) = a_worker(pause=0.3), a_worker()
            how = {"one": "answers", "slow": "loads slowly"}
            named = {name: [behaves, one] for name, behaves in how.items()}
            self.launcher = cluster.router({**named, "two": ["answers", two]}, [one, two])
            until(lambda: cluster.is_now("asleep"))
            (self.router,) = children(self.launcher)

        def process(self):
            (child,) = progress.children_of(self.router)
            return child

        def ended(self, name):
            """Waits until the process of a model was ended, and nothing else; why."""
            said = lines_until(self.launcher, f"stopping model {name}")[-1]
            assert children(self.launcher) == [self.router]
            assert cluster.record()["restarts"] == 0
            return said

    return Models()


def test_a_model_that_lost_its_worker_is_ended_alone_and_others_go_on(cluster, models):
    assert cluster.ask(model="one") == b"the answer"
    until(lambda: cluster.is_now("serving"))
    models.worker.listener.close()
    models.worker.connections[-1].shutdown(socket.SHUT_RDWR)
    assert "lost worker" in models.ended("one")
    until(lambda: cluster.is_now("asleep"))
    assert cluster.ask(model="two") == b"the answer"
    until(lambda: cluster.is_now("serving"))


def test_a_model_does_not_notice_that_a_worker_of_another_one_is_lost(cluster, models):
    assert cluster.ask(model="two") == b"the answer"
    before = models.process()
    until(lambda: cluster.is_now("serving"))
    models.worker.listener.close()
    assert cluster.ask(model="two") == b"the answer"
    assert models.process() == before


def test_models_are_served_from_the_start_on_that_do_not_need_a_worker_that_stays_away(cluster):
    (_worker, one), port = a_worker(), launched.free_port()
    two = f"127.0.0.1:{port}"
    models = {"one": ["answers", one], "two": ["answers", two]}
    launcher = cluster.router(models, [one, two], ["--fallback-after", "0.5"])
    lines_until(launcher, f"no answer from worker {two}: requests for models that need it fail until it is back")
    until(lambda: cluster.is_now("asleep"))
    assert cluster.ask(model="one") == b"the answer"
    with pytest.raises(urllib.error.HTTPError):
        cluster.ask(model="two")

    def greeted():
        found = json.loads((cluster.state / runtime.HANDSHAKES_FILE).read_text())["workers"]
        return [endpoint for endpoint in (one, two) if found[endpoint]["state"] == "ok"]

    assert greeted() == [one]
    assert cluster.ask(model="one") == b"the answer"
    _back = a_worker(port=port)
    lines_until(launcher, f"worker {two} is back")
    until(lambda: greeted() == [one, two])
    assert cluster.ask(model="two") == b"the answer"
    assert cluster.record()["restarts"] == 0


def test_a_model_that_is_stopped_is_ended_and_loaded_again(cluster, models):
    cluster.ask(model="one")
    os.kill(models.process(), signal.SIGSTOP)
    assert "llama-server has been suspended (SIGSTOP) for " in models.ended("one")
    assert cluster.ask(model="one") == b"the answer"


def test_a_load_is_written_down_and_its_log_is_that_of_the_last_one(cluster, models):
    cluster.ask(model="one")
    asked = threading.Thread(target=cluster.ask, kwargs={"model": "slow"})
    asked.start()
    until(lambda: cluster.is_now("loading") and (cluster.record()["load"] or {}).get("sent"))
    asked.join()
    until(lambda: cluster.is_now("serving"))
    log = (cluster.state / f"slow.{journal.START_LOG_FILE}").read_text()
    assert "model buffer size loads slowly" in log
    assert "model buffer size answers" not in log
    assert "model buffer size answers" in (cluster.state / f"one.{journal.START_LOG_FILE}").read_text()


def test_what_children_say_is_kept_with_their_models(tmp_path):
    router = llama_server.Router.__new__(llama_server.Router)
    router.state_folder, router.logs_by_port, router.partial_line = tmp_path, {}, b""
    said = (
        b"I load: spawning server instance with name=a/b on port 40001\n[40001] one\nrouter\n"
        b"I load: spawning server instance with name=two on port 4002\n[ 4002] two\n[40001] name=x on port 7\n"
        b"I load: spawning server instance with name=a/b on port 40003\n[40003] again\n[40001] late\n"
    )
    with journal.StartLog(tmp_path / journal.START_LOG_FILE) as start_log:
        for at in range(0, len(said), 7):
            router.record_output(start_log, said[at : at + 7])
        router.record_output(start_log, b"x" * (llama_server.MAX_LINE_BYTES + 1))
    assert router.partial_line == b""
    assert (tmp_path / f"a%2Fb.{journal.START_LOG_FILE}").read_text() == "[40003] again\n"
    assert (tmp_path / f"two.{journal.START_LOG_FILE}").read_text() == "[ 4002] two\n"
    whole = (tmp_path / journal.START_LOG_FILE).read_text()
    assert whole.count("spawning") == 3
    assert "router\n" in whole
    assert "[40001] late\n" in whole


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGSTOP, 1), (signal.SIGKILL, 1)])
def test_no_model_outlives_the_router(cluster, models, number, status):
    """One that hangs does not see that its router has gone."""
    cluster.ask(model="two")
    child = models.process()
    until(lambda: cluster.is_now("serving"))
    os.kill(child, signal.SIGSTOP)
    os.kill(models.launcher.pid if number == signal.SIGTERM else models.router, number)
    assert models.launcher.wait(50) == status
    until(lambda: not progress.argv_of(child))


def test_the_number_of_a_process_that_has_become_another_ones_is_left_alone(tmp_path, popen):
    other = popen(["sleep", "50"])
    router = llama_server.Router([sys.executable, "-c", ""], "http://127.0.0.1:1", tmp_path, 1)
    router.children = {other.pid: SimpleNamespace(argv=["llama-server"])}
    router.stop()
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.2)

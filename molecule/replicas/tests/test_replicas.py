"""Eight clients send requests continuously while a replica's server is killed, changed and rebooted. No request fails."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import HOSTS, INVENTORY, WORK, connect

pytestmark = pytest.mark.timeout(1800)

PLAYBOOKS = INVENTORY.parents[3] / "playbooks"
URL, KEY = f"http://{HOSTS['balancer']['test_addresses'][0]}:8080", "replicas-test-key"
measured = {}


def run(playbook, **variables):
    command = ["ansible-playbook", PLAYBOOKS / playbook, f"--inventory={INVENTORY}", "-e", json.dumps(variables)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (WORK / "tests-output.log").open("a").write(done.stdout + done.stderr)
    return done


def succeeds(*arguments, **variables):
    done = run(*arguments, **variables)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout


def answers():
    """Return time, duration and text of each answer, by client."""
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(WORK.glob("asked-*.log"))]


def wait_for_answers():
    """Wait until each client gets an answer from now on."""
    begin = time.time()
    while not all(own and own[-1][0] > begin for own in answers()):
        assert time.time() < begin + 300
        time.sleep(1)


@pytest.fixture(scope="module", autouse=True)
def clients():
    """Run clients from the first test to the last. The measurements become the scenario's result."""
    logs = [WORK / f"asked-{number}.log" for number in range(8)]
    processes = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name("asker.py"), URL, KEY, str(number)], stdout=log.open("w")
        )
        for number, log in enumerate(logs)
    ]
    wait_for_answers()
    yield
    for process in processes:
        process.kill()
        process.wait()
    durations = sorted(duration for own in answers() for _time, duration, _text in own)
    measured.update(requests=len(durations), p99_s=round(durations[len(durations) * 99 // 100], 1))
    (WORK / "result.json").write_text(json.dumps(measured))


@pytest.fixture(autouse=True)
def no_request_fails():
    begin = time.time()
    yield
    wait_for_answers()
    failed = [text for own in answers() for ended, _took, text in own if ended > begin and text.startswith("failed")]
    assert failed == []


def test_a_server_is_killed():
    connect("replica1").check_output("pkill -9 -x llama-server")


def test_servers_change_one_after_the_other():
    printed = succeeds("site.yml", llama_server_batch=512)
    assert re.findall(r"^(replica\d) .* changed=[1-9]", printed, re.MULTILINE) == ["replica1", "replica2"]


def test_servers_roll_back():
    succeeds("rollback.yml")


def test_a_host_is_rebooted():
    succeeds("site.yml")
    succeeds("reboot.yml", llama_reboot_hosts="replica2")


def test_status_names_a_replica_that_gets_no_requests():
    socket = "/run/llamacpp-balancer/admin.sock"
    assert "balancer  UP" in succeeds("status.yml")
    command = f'python3 -c \'import socket; s = socket.socket(1); s.connect("{socket}"); s.send(b"set server replicas/replica1 state maint\\n")\''
    connect("balancer").check_output(command)
    failed = run("status.yml")
    assert failed.returncode != 0
    assert "the balancer sends no requests to replica1: MAINT" in " ".join(failed.stdout.split())
    assert "changed=1" in succeeds("site.yml")
    assert "balancer  UP" in succeeds("status.yml")

"""What the cluster does while something is wrong around it, and that it is right again by itself or by the next run."""

import contextlib
import json
import re
import subprocess
import time

import pytest
from conftest import INVENTORY, on

pytestmark = pytest.mark.timeout(900)

QUESTION = '{"prompt":"","temperature":0}'
ANSWER = "every layer of this model lives on some worker"
PREFIX = "/opt/llamacpp"
SERVER = "llamacpp-server"
WORKER = "llamacpp-worker-cpu"


def answers():
    asked = on("head").run("curl --silent --max-time 60 --data=%s http://127.0.0.1:8080/v1/completions", QUESTION)
    return ANSWER in asked.stdout


def answers_again():
    """The head may be starting."""
    for _second in range(90):
        if answers():
            return
        time.sleep(1)
    pytest.fail(
        on("head").check_output(
            "systemctl status --no-pager --lines=50 %s; cat /opt/llamacpp/state/start.log | tail -n 20", SERVER
        )
    )


def command(*arguments, cache=None, playbook="site", **variables):
    paths = {f"llama_{name}_path": "/dev/null" for name in ("plan", "verify")}
    before = ["env", f"XDG_CACHE_HOME={cache}"] if cache else []
    path = f"{INVENTORY.parents[3]}/playbooks/{playbook}.yml"
    given = f"--extra-vars={json.dumps({**paths, **variables})}"
    return [*before, "ansible-playbook", path, f"--inventory={INVENTORY}", given, *arguments]


def run(*arguments, playbook="site", **variables):
    return subprocess.run(
        command(*arguments, playbook=playbook, **variables), capture_output=True, text=True, check=False
    )


def converges(**variables):
    """The next run succeeds, and the one after it changes nothing."""
    first = run(**variables)
    assert first.returncode == 0, first.stdout[-5000:] + first.stderr
    second = run(**variables)
    assert second.returncode == 0, second.stdout[-5000:] + second.stderr
    assert set(re.findall(r"changed=(\d+)", second.stdout)) == {"0"}, second.stdout[-5000:]


def process(name, service):
    return on(name).check_output("systemctl show --property=MainPID --value %s", service)


@contextlib.contextmanager
def full(name, folder):
    """No byte is left on the file system of a folder."""
    on(name).run(f"dd if=/dev/zero of={folder}/filler bs=64k")
    assert on(name).check_output(f"df --output=avail {folder} | tail -n 1").strip() == "0"
    try:
        yield
    finally:
        on(name).check_output(f"rm {folder}/filler")


@contextlib.contextmanager
def read_only(name, service):
    """Neither /var nor where the collection installs can be written; the service was started after that."""
    on(name).check_output("systemctl stop %s", service)
    on(name).check_output(f"mount --bind /var /var && mount -o remount,bind,ro /var && mount -o remount,ro=fs {PREFIX}")
    on(name).check_output("systemctl start %s", service)
    try:
        yield
    finally:
        on(name).check_output(f"umount --lazy /var && mount -o remount,rw=fs {PREFIX}")


def test_a_full_disk_of_the_head_stops_nothing():
    with full("head", PREFIX):
        serving = process("head", SERVER)
        assert all(answers() for _question in range(20))
        assert process("head", SERVER) == serving
        on("worker1").check_output("systemctl kill --signal=KILL %s", WORKER)
        answers_again()
        failed = run(llama_model_known_answer={"layers": 24})
        said = failed.stdout + failed.stderr
        assert failed.returncode == 2
        assert "Traceback" not in said
        assert re.search("No space left on device|is full", said), said[-5000:]
        assert PREFIX in said
        answers_again()
    converges(llama_model_known_answer={"layers": 24})
    converges()


def test_a_full_disk_of_a_worker_stops_nothing():
    with full("worker1", PREFIX):
        on("worker1").check_output("systemctl kill --signal=KILL %s", WORKER)
        answers_again()
    converges()


@pytest.mark.parametrize("name, service", [("head", SERVER), ("worker2", WORKER)])
def test_services_start_again_where_nothing_can_be_written(name, service):
    with read_only(name, service):
        answers_again()
        on(name).check_output("systemctl kill --signal=KILL %s", service)
        answers_again()
    converges()


def test_two_operators_at_the_same_minute(tmp_path):
    """Each with a cache of his own, then both with one, with different wishes: afterwards a run alone finds what it wants or makes it."""
    for caches in ([tmp_path / "one", tmp_path / "two"], [tmp_path / "both"] * 2):
        runs = [
            subprocess.Popen(
                command(cache=cache, llama_server_context=context),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for cache, context in zip(caches, (2048, 3072))
        ]
        said = [started.communicate()[0] for started in runs]
        assert all("Traceback" not in text for text in said)
        assert any(started.returncode == 0 for started in runs), said
        converges(cache=caches[0])
        answers_again()


LIES = """#!/usr/bin/python3
import json, os, subprocess, sys
text = sys.stdin.read() if len(sys.argv) == 1 or sys.argv[1] == "-" else ""
done = subprocess.run(["/usr/bin/python3", *sys.argv[1:]], input=text, capture_output=True, text=True)
try:
    answer = json.loads(done.stdout)
except ValueError:
    answer = {}
if "facts" in answer:
    answer["facts"].update(%s)
sys.stdout.write(json.dumps(answer) if answer else done.stdout)
sys.exit(done.returncode)
"""


@pytest.fixture
def taken(tmp_path, request):
    """An inventory in which the interpreter of worker2 belongs to whoever took it over, and changes what the host says of itself."""
    on("worker2").check_output("printf %%s %s > /root/lies && chmod 755 /root/lies", LIES % request.param)
    path = tmp_path / "taken.yml"
    path.write_text("test_hosts: {hosts: {worker2: {ansible_python_interpreter: /root/lies}}}\n")
    yield path
    on("worker2").check_output("rm /root/lies")


@pytest.mark.parametrize(
    "taken",
    [
        "memory_mib=float('inf')",
        r"kernel='6.1\x1b[2J\nhead: ok'",
        "accelerators=[{'backend': 'cuda', 'name': 'a' * 10_000_000}]",
        "toolchain=None",
        r"prefix='/etc\n[Service]\nExecStart=/bin/sh'",
    ],
    ids=lambda lie: lie.split("=")[0],
    indirect=True,
)
def test_what_a_worker_claims_of_itself_is_checked(taken):
    before = {name: process(name, SERVER if name == "head" else WORKER) for name in ("head", "worker1")}
    failed = run(f"--inventory={taken}")
    said = failed.stdout + failed.stderr
    assert failed.returncode != 0, said[-5000:]
    assert "worker2" in said
    assert "Traceback" not in said
    assert "\x1b[2J" not in said
    assert {name: process(name, SERVER if name == "head" else WORKER) for name in before} == before
    assert answers()


NONSENSE = """
import contextlib, socket
server = socket.create_server(("10.218.0.22", 50052))
while True:
    client, _address = server.accept()
    with client, contextlib.suppress(OSError):
        client.recv(64)
        client.sendall(%s)
"""


RIGHT = "(28).to_bytes(8, 'little') + bytes([7, 0, 0]) + bytes(25)"
"""A handshake as a worker of protocol 7 answers it."""


@pytest.mark.parametrize(
    "reply", ["b''", "b'HTTP/1.1 200 OK'", "b'\\xff' * 8", "(1 << 40).to_bytes(8, 'little') + b'x' * 1000000", RIGHT]
)
def test_what_answers_at_a_worker_s_port_is_checked(reply):
    """Whoever took the worker over stopped it, and answers himself."""
    worker = on("worker2")
    worker.check_output("systemctl stop %s", WORKER)
    worker.check_output("systemd-run --quiet --unit=nonsense python3 -c %s", NONSENSE % reply)
    try:
        failed = run()
        said = failed.stdout + failed.stderr
        assert failed.returncode != 0, said[-5000:]
        assert "Something else already uses 10.218.0.22:50052" in said, said[-5000:]
        assert "Traceback" not in said
        state = on("head").check_output("systemctl show --property=ActiveState --value %s", SERVER)
        assert state in ("active", "activating"), state
    finally:
        worker.check_output("systemctl stop nonsense")
    converges()


SETTINGS = (
    "/etc/modprobe.d/llamacpp.conf",
    "/etc/systemd/network/70-llamacpp-cable.network",
    "/etc/NetworkManager/system-connections/llamacpp-cable.nmconnection",
    "/etc/firewall-llamacpp.nft",
)
FOREIGN = f"""
mkdir -p {PREFIX}/venv/bin {PREFIX}/models/.hidden {PREFIX}/releases/b1 {PREFIX}/plans
echo theirs | tee {PREFIX}/venv/bin/python {PREFIX}/models/.hidden/model {PREFIX}/releases/b1/file {PREFIX}/plans/x.json > {PREFIX}/notes
chown -R nobody {PREFIX}/venv {PREFIX}/models
printf '[Service]\\nExecStart=/bin/sleep infinity\\n' | tee /etc/systemd/system/{SERVER}.service > /etc/systemd/system/{WORKER}.service
systemctl daemon-reload
systemctl start {SERVER} {WORKER}
nft 'add table inet llamacpp; add chain inet llamacpp input; add rule inet llamacpp input tcp dport 4242 accept'
mkdir -p /etc/modprobe.d
echo '# theirs' | tee {" ".join(SETTINGS)}
"""
"""Somebody else's, under each name that an installation uses."""
STATE = f"""
find {PREFIX} /etc/systemd/system/{SERVER}.service /etc/systemd/system/{WORKER}.service {" ".join(SETTINGS)} -printf '%p %y %u %m %s %T@\\n' | sort
find {PREFIX} -type f -exec sha256sum {{}} +
systemctl show --property=MainPID {SERVER} {WORKER}
nft list table inet llamacpp
"""
AWAY = f"""
systemctl stop {SERVER} {WORKER}
rm -r /etc/systemd/system/{SERVER}.service /etc/systemd/system/{WORKER}.service {" ".join(SETTINGS)} {PREFIX}/*
rmdir /etc/modprobe.d
systemctl daemon-reload
nft delete table inet llamacpp
"""


def test_what_others_have_under_the_names_of_an_installation_stays():
    assert run(playbook="teardown").returncode == 0
    hosts = [on(name) for name in ("head", "worker1", "worker2")]
    for host in hosts:
        host.check_output(FOREIGN)
    before = [host.check_output(STATE) for host in hosts]
    try:
        refused = run()
        assert refused.returncode != 0
        assert "This host has " in refused.stdout + refused.stderr
        torn = run(playbook="teardown")
        said = torn.stdout + torn.stderr
        assert torn.returncode == 0, said[-5000:]
        for left in (PREFIX, f"/etc/systemd/system/{SERVER}.service", f"{WORKER}.service", "inet llamacpp", *SETTINGS):
            assert left in said, said[-5000:]
        assert [host.check_output(STATE) for host in hosts] == before
    finally:
        for host in hosts:
            host.check_output(AWAY)
    converges()

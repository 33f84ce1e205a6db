"""No one reaches a worker without the key, model and prompts are encrypted, keys are renewed under load, and the cluster recovers as without a tunnel."""

import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from conftest import INVENTORY, PLAN, WORK

sys.path.insert(0, str(INVENTORY.parents[2] / "failure" / "tests"))

import faults
from asker import Asker, ask
from faults import HEAD, SERVER, SERVICES, WORKERS, run_inside

pytestmark = pytest.mark.timeout(7200)

RECOVERY_SECONDS = 240
"""Seconds after which a recovery counts as failed."""
KEYS = {name: host["tunnel_keys"] for name, host in PLAN["hosts"].items()}
TUNNEL_ENDPOINTS = {name: PLAN["hosts"][name]["workers"][0]["tunnel"] for name in WORKERS}
HELLO_PROGRAM = """
import socket, sys
address, port = sys.argv[1].split(":")
try:
    with socket.create_connection((address, int(port)), 5) as worker:
        worker.settimeout(5)
        worker.sendall(bytes([14]) + (24).to_bytes(8, "little") + bytes(24))
        print("answer" if len(worker.recv(36)) > 8 else "nothing")
except OSError:
    print("nothing")
"""
"""Program that sends HELLO of the RPC protocol. A worker answers with 36 bytes."""
SNIFF_PROGRAM = """
import socket, struct, sys, time
model, seen = open(sys.argv[2], "rb").read(), bytearray()
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
packets.bind((sys.argv[1], 0))
RCVBUFFORCE = 33
packets.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, 1 << 26)
packets.settimeout(0.5)
until = time.monotonic() + float(sys.argv[3])
while time.monotonic() < until:
    try:
        seen += packets.recv(1 << 17)
    except OSError:
        pass
parts = [model[at : at + 48] for at in range(1 << 20, len(model), len(model) // 97)]
parts = [part for part in parts if len(set(part)) >= 20]
word = bytes(80) + struct.pack("<f", 1) + bytes(80)
print(len(seen), len(parts), sum(part in seen for part in parts), int(word in seen))
"""
"""Program that records an interface. It prints the number of bytes, the number of samples of the model, how many of these were seen,
and whether a word of the prompt (a unit vector) was seen."""


def wait_until(condition, seconds, what):
    deadline = time.time() + seconds
    while time.time() < deadline:
        if condition():
            return
        time.sleep(0.3)
    journal = run_inside(HEAD, f"journalctl --unit={SERVER} --lines=40", check=False)
    pytest.fail(f"{what} did not happen in {seconds} s\n{journal}")


def play(playbook, **variables):
    option = (
        f"--extra-vars={json.dumps({f'llama_{name}_path': '/dev/null' for name in ('plan', 'verify')} | variables)}"
    )
    argv = ["ansible-playbook", f"{INVENTORY.parents[3]}/playbooks/{playbook}", f"--inventory={INVENTORY}", option]
    done = subprocess.run([*argv, "-vvv", "--diff"], capture_output=True, text=True, check=False)
    (WORK / "tests-output.log").open("a").write(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-5000:]


def read_journal(name, since):
    units = " ".join(f"--unit={unit}" for unit in SERVICES[name])
    return run_inside(name, f"journalctl {units} --since=@{since:.3f} --no-pager", check=False)


def run(name, program, *arguments):
    return run_inside(name, shlex.join(["python3", "-c", program, *map(str, arguments)])).strip()


def read_keys():
    """Return the keys in all files on all hosts."""
    texts = [run_inside(name, f"cat {' '.join(files)}") for name, files in KEYS.items()]
    return {line.split(":")[1] for text in texts for line in text.split()}


@pytest.mark.parametrize("name", WORKERS)
def test_no_one_gets_an_answer_without_the_key(name):
    """Neither the head nor the worker's own host (firewall and unit admit both) nor the other worker's host gets an answer. Behind the tunnel, the worker
    serves only its head, and any client on its own host once the head is stopped."""
    assert {other: run(other, HELLO_PROGRAM, TUNNEL_ENDPOINTS[name]) for other in PLAN["hosts"]} == dict.fromkeys(
        PLAN["hosts"], "nothing"
    )
    inner = PLAN["hosts"][name]["workers"][0]["listens"]
    assert run(name, HELLO_PROGRAM, inner) == "nothing"
    run_inside(HEAD, f"systemctl stop {SERVER}")
    wait_until(lambda: run(name, HELLO_PROGRAM, inner) == "answer", 30, "an answer of the worker")
    run_inside(HEAD, f"systemctl start {SERVER}")
    wait_until(lambda: ask().right, RECOVERY_SECONDS, "an answer")


def test_only_the_services_can_read_key_files():
    for name, files in KEYS.items():
        for path in files:
            found = run_inside(name, f"stat --format='%a %U' {path} $(dirname {path})").splitlines()
            assert found == ["600 llamacpp", "755 root"]


def test_the_model_is_encrypted_on_the_wire():
    """The traffic is recorded while the head loads the model and answers. On the loopback of a worker's host, it is unencrypted."""
    path = PLAN["model"]["path"]
    subprocess.run(["podman", "cp", f"{faults.container(HEAD)}:{path}", str(WORK / "model")], check=True)
    subprocess.run(["podman", "cp", str(WORK / "model"), f"{faults.container(WORKERS[0])}:/tmp/model"], check=True)
    recorders = {}
    for name, interface, model in ((HEAD, "eth0", path), (WORKERS[0], "lo", "/tmp/model")):
        argv = ["podman", "exec", faults.container(name), "python3", "-c", SNIFF_PROGRAM, interface, model, "60"]
        recorders[interface] = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    time.sleep(2)
    run_inside(HEAD, f"systemctl restart {SERVER}")
    wait_until(lambda: ask().right, 50, "an answer")
    found = {interface: list(map(int, recorder.communicate()[0].split())) for interface, recorder in recorders.items()}
    size, parts, *clear = found["eth0"]
    assert size > 100 << 20
    assert parts > 9
    assert clear == [0, 0]
    assert min(found["lo"][2:]) > 0


def test_keys_are_renewed_while_clients_send_requests():
    before, server = read_keys(), run_inside(HEAD, f"systemctl show --property=MainPID --value {SERVER}")
    with Asker() as asker:
        play("renew_keys.yml")
        time.sleep(5)
    assert all(reply.right for reply in asker.replies)
    assert run_inside(HEAD, f"systemctl show --property=MainPID --value {SERVER}") == server
    after = read_keys()
    assert not before & after
    assert len(after) == len(WORKERS)
    run_inside(HEAD, f"systemctl restart {SERVER}")
    wait_until(lambda: ask().right, RECOVERY_SECONDS, "an answer with the new keys")


def test_an_upgrade_and_a_rollback_with_new_keys_in_between():
    """The upgrade is an archive of the packaged programs, which is another release."""
    archive = WORK / "programs.tar.gz"
    with tarfile.open(archive, "w:gz") as programs:
        for name, runs in ((HEAD, PLAN["head"]), (WORKERS[0], PLAN["hosts"][WORKERS[0]]["workers"][0])):
            copy = WORK / Path(runs["argv"][0]).name
            program = run_inside(name, f"readlink -f {runs['argv'][0]}").strip()
            subprocess.run(["podman", "cp", f"{faults.container(name)}:{program}", str(copy)], check=True)
            programs.add(copy, f"bin/{copy.name}")
    checksum = f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
    release = {"source": "binary", "path": str(archive), "checksum": checksum, "build": PLAN["release"]["build"]}
    running = "ps axo args | grep -o 'releases/[a-z][a-z]*' | sort -u"
    before = read_keys()
    for playbook, source in (("site.yml", "binary"), ("renew_keys.yml", "binary"), ("rollback.yml", "package")):
        play(playbook, llama_release=release)
        assert [run_inside(name, running) for name in PLAN["hosts"]] == [f"releases/{source}\n"] * len(PLAN["hosts"])
        assert ask().right
    assert not before & read_keys()


def test_no_key_is_shown():
    all_keys = read_keys()
    play("site.yml")
    files = ("plan.json", "verify.json", "tests-output.log")
    shown = [(WORK / file).read_text(errors="replace") for file in files]
    for name in PLAN["hosts"]:
        shown.append(run_inside(name, "ps axeww; journalctl --no-pager; cat /etc/systemd/system/llamacpp-*"))
        shown.append(run_inside(name, "find /opt/llamacpp -name '*.json' -exec cat {} +"))
    assert not [key for key in all_keys for text in shown if key in text]


@pytest.mark.parametrize("name", PLAN["hosts"])
def test_a_killed_stunnel_is_restarted(name):
    began = time.time()
    run_inside(name, "pkill -KILL --full '^/usr/bin/stunnel '")
    wait_until(lambda: "stunnel exited on signal 9: restarting it" in read_journal(name, began), 60, "a journal line")
    wait_until(lambda: ask().right, RECOVERY_SECONDS, "an answer")


@pytest.mark.parametrize("content", ["", "0123456789abcdef:" + "5" * 64], ids=["missing", "wrong"])
def test_a_missing_or_wrong_key_is_named_and_replaced(content):
    (path,) = KEYS[WORKERS[0]]
    began = time.time()
    run_inside(WORKERS[0], f"printf '{content}\\n' > {path}" if content else f"rm {path}")
    run_inside(WORKERS[0], f"systemctl restart {SERVICES[WORKERS[0]][0]}")
    wait_until(
        lambda: "is unreachable, has another key, or does not forward to a worker" in read_journal(HEAD, began),
        120,
        "a journal line",
    )
    assert content or f"{path} is missing: run site.yml" in read_journal(WORKERS[0], began)
    play("site.yml")
    assert ask().right


def test_a_used_port_is_named():
    name, began = WORKERS[0], time.time()
    address, port = TUNNEL_ENDPOINTS[name].split(":")
    run_inside(name, f"systemctl stop {SERVICES[name][0]}")
    taker = f"import socket,time; s=socket.create_server(('{address}', {port})); time.sleep(20)"
    run_inside(name, f"exec python3 -c {shlex.quote(taker)}", detach=True)
    time.sleep(1)
    run_inside(name, f"systemctl start {SERVICES[name][0]}")
    wait_until(lambda: "Address already in use" in read_journal(name, began), 60, "a journal line")
    wait_until(lambda: ask().right, RECOVERY_SECONDS, "an answer once the port is free")


def test_the_cluster_recovers_as_without_a_tunnel():
    seed = int(os.environ.get("LLAMA_TEST_SEED") or random.randrange(1 << 31))
    print(f"LLAMA_TEST_SEED={seed}", flush=True)
    chance = random.Random(seed)
    with Asker() as asker:
        for fault in chance.sample(faults.ALL, len(faults.ALL)):
            remove_fault, lasts = fault(chance.choice(WORKERS)), fault in faults.HEAL_WHILE_THEY_LAST
            if remove_fault and not lasts:
                time.sleep(40)
                remove_fault()
            recovered_at = asker.recovered(time.time(), RECOVERY_SECONDS)
            assert recovered_at, fault.__name__
            if remove_fault and lasts:
                remove_fault()
        faults.remove_small_disk()
    assert not asker.wrong

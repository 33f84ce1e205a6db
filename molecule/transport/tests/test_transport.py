"""Nobody reaches a worker without the key, nothing is in clear on the wire, keys are renewed under load, and every fault heals as without a tunnel."""

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
from faults import HEAD, SERVER, SERVICES, WORKERS, inside

pytestmark = pytest.mark.timeout(7200)

LONGEST = 240
"""Seconds after which a fault counts as not healed."""
KEYS = {name: host["tunnel_keys"] for name, host in PLAN["hosts"].items()}
OUTER = {name: PLAN["hosts"][name]["workers"][0]["tunnel"] for name in WORKERS}
HELLO = """
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
"""HELLO of the RPC protocol, to which a worker answers with 36 bytes."""
SNIFF = """
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
"""Bytes of an interface, how many of so many parts of the model are among them, and whether a word of the prompt is, which is a unit vector."""


def until(condition, seconds, what):
    deadline = time.time() + seconds
    while time.time() < deadline:
        if condition():
            return
        time.sleep(0.3)
    journal = inside(HEAD, f"journalctl --unit={SERVER} --lines=40", check=False)
    pytest.fail(f"{what} did not happen in {seconds} s\n{journal}")


def play(playbook, **variables):
    given = f"--extra-vars={json.dumps({f'llama_{name}_path': '/dev/null' for name in ('plan', 'verify')} | variables)}"
    argv = ["ansible-playbook", f"{INVENTORY.parents[3]}/playbooks/{playbook}", f"--inventory={INVENTORY}", given]
    done = subprocess.run([*argv, "-vvv", "--diff"], capture_output=True, text=True, check=False)
    (WORK / "tests-output.log").open("a").write(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-5000:]


def said(name, since):
    units = " ".join(f"--unit={unit}" for unit in SERVICES[name])
    return inside(name, f"journalctl {units} --since=@{since:.3f} --no-pager", check=False)


def run(name, program, *arguments):
    return inside(name, shlex.join(["python3", "-c", program, *map(str, arguments)])).strip()


def keys():
    """Of all files on all hosts."""
    texts = [inside(name, f"cat {' '.join(files)}") for name, files in KEYS.items()]
    return {line.split(":")[1] for text in texts for line in text.split()}


@pytest.mark.parametrize("name", WORKERS)
def test_nobody_gets_an_answer_without_the_key(name):
    """Neither the head nor the worker's own host, which firewall and unit let in, nor the other worker's. Behind the tunnel the worker serves its head alone,
    and anybody on its own host once the head has gone."""
    assert {other: run(other, HELLO, OUTER[name]) for other in PLAN["hosts"]} == dict.fromkeys(PLAN["hosts"], "nothing")
    inner = PLAN["hosts"][name]["workers"][0]["listens"]
    assert run(name, HELLO, inner) == "nothing"
    inside(HEAD, f"systemctl stop {SERVER}")
    until(lambda: run(name, HELLO, inner) == "answer", 30, "an answer of the worker")
    inside(HEAD, f"systemctl start {SERVER}")
    until(lambda: ask().right, LONGEST, "an answer")


def test_files_of_keys_are_for_the_services_alone():
    for name, files in KEYS.items():
        for path in files:
            found = inside(name, f"stat --format='%a %U' {path} $(dirname {path})").splitlines()
            assert found == ["600 llamacpp", "755 root"]


def test_nothing_of_the_model_is_in_clear_on_the_wire():
    """While the head loads it, and answers. On the loopback of a worker's host it is."""
    path = PLAN["model"]["path"]
    subprocess.run(["podman", "cp", f"{faults.container(HEAD)}:{path}", str(WORK / "model")], check=True)
    subprocess.run(["podman", "cp", str(WORK / "model"), f"{faults.container(WORKERS[0])}:/tmp/model"], check=True)
    looks = {}
    for name, interface, model in ((HEAD, "eth0", path), (WORKERS[0], "lo", "/tmp/model")):
        argv = ["podman", "exec", faults.container(name), "python3", "-c", SNIFF, interface, model, "60"]
        looks[interface] = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    time.sleep(2)
    inside(HEAD, f"systemctl restart {SERVER}")
    until(lambda: ask().right, 50, "an answer")
    found = {interface: list(map(int, look.communicate()[0].split())) for interface, look in looks.items()}
    size, parts, *clear = found["eth0"]
    assert size > 100 << 20
    assert parts > 9
    assert clear == [0, 0]
    assert min(found["lo"][2:]) > 0


def test_keys_are_renewed_while_clients_ask():
    before, server = keys(), inside(HEAD, f"systemctl show --property=MainPID --value {SERVER}")
    with Asker() as asker:
        play("renew_keys.yml")
        time.sleep(5)
    assert all(asked.right for asked in asker.all)
    assert inside(HEAD, f"systemctl show --property=MainPID --value {SERVER}") == server
    after = keys()
    assert not before & after
    assert len(after) == len(WORKERS)
    inside(HEAD, f"systemctl restart {SERVER}")
    until(lambda: ask().right, LONGEST, "an answer with the new keys")


def test_an_upgrade_and_the_way_back_with_new_keys_in_between():
    """To the packaged programs as an archive, which is another release."""
    archive = WORK / "programs.tar.gz"
    with tarfile.open(archive, "w:gz") as programs:
        for name, runs in ((HEAD, PLAN["head"]), (WORKERS[0], PLAN["hosts"][WORKERS[0]]["workers"][0])):
            copy = WORK / Path(runs["argv"][0]).name
            program = inside(name, f"readlink -f {runs['argv'][0]}").strip()
            subprocess.run(["podman", "cp", f"{faults.container(name)}:{program}", str(copy)], check=True)
            programs.add(copy, f"bin/{copy.name}")
    checksum = f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
    release = {"source": "binary", "path": str(archive), "checksum": checksum, "build": PLAN["release"]["build"]}
    running = "ps axo args | grep -o 'releases/[a-z][a-z]*' | sort -u"
    before = keys()
    for playbook, source in (("site.yml", "binary"), ("renew_keys.yml", "binary"), ("rollback.yml", "package")):
        play(playbook, llama_release=release)
        assert [inside(name, running) for name in PLAN["hosts"]] == [f"releases/{source}\n"] * len(PLAN["hosts"])
        assert ask().right
    assert not before & keys()


def test_no_key_is_in_sight():
    known = keys()
    play("site.yml")
    files = ("plan.json", "verify.json", "tests-output.log")
    shown = [(WORK / file).read_text(errors="replace") for file in files]
    for name in PLAN["hosts"]:
        shown.append(inside(name, "ps axeww; journalctl --no-pager; cat /etc/systemd/system/llamacpp-*"))
        shown.append(inside(name, "find /opt/llamacpp -name '*.json' -exec cat {} +"))
    assert not [key for key in known for text in shown if key in text]


@pytest.mark.parametrize("name", PLAN["hosts"])
def test_stunnel_that_is_killed_comes_back(name):
    began = time.time()
    inside(name, "pkill -KILL --full '^/usr/bin/stunnel '")
    until(lambda: "stunnel exited on signal 9: restarting it" in said(name, began), 60, "a sentence")
    until(lambda: ask().right, LONGEST, "an answer")


@pytest.mark.parametrize("content", ["", "0123456789abcdef:" + "5" * 64], ids=["missing", "another"])
def test_a_key_that_is_missing_or_another_one_is_named_and_replaced(content):
    (path,) = KEYS[WORKERS[0]]
    began = time.time()
    inside(WORKERS[0], f"printf '{content}\\n' > {path}" if content else f"rm {path}")
    inside(WORKERS[0], f"systemctl restart {SERVICES[WORKERS[0]][0]}")
    until(lambda: "is unreachable, has another key, or forwards to no worker" in said(HEAD, began), 120, "a sentence")
    assert content or f"{path} is missing: run site.yml" in said(WORKERS[0], began)
    play("site.yml")
    assert ask().right


def test_a_port_that_is_taken_is_named():
    name, began = WORKERS[0], time.time()
    address, port = OUTER[name].split(":")
    inside(name, f"systemctl stop {SERVICES[name][0]}")
    taker = f"import socket,time; s=socket.create_server(('{address}', {port})); time.sleep(20)"
    inside(name, f"exec python3 -c {shlex.quote(taker)}", detach=True)
    time.sleep(1)
    inside(name, f"systemctl start {SERVICES[name][0]}")
    until(lambda: "Address already in use" in said(name, began), 60, "a sentence")
    until(lambda: ask().right, LONGEST, "an answer once the port is free")


def test_every_fault_heals_as_without_a_tunnel():
    seed = int(os.environ.get("LLAMA_TEST_SEED") or random.randrange(1 << 31))
    print(f"LLAMA_TEST_SEED={seed}", flush=True)
    chance = random.Random(seed)
    with Asker() as asker:
        for fault in chance.sample(faults.ALL, len(faults.ALL)):
            lift, lasts = fault(chance.choice(WORKERS)), fault in faults.HEAL_WHILE_THEY_LAST
            if lift and not lasts:
                time.sleep(40)
                lift()
            healed = asker.recovered(time.time(), LONGEST)
            assert healed, fault.__name__
            if lift and lasts:
                lift()
        faults.whole_disk()
    assert not asker.wrong

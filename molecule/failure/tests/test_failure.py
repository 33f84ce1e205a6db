"""The cluster heals by itself from every fault, tells a slow model from a hung one, and serves on a fallback while a worker is away."""

import contextlib
import json
import os
import random
import re
import shlex
import subprocess
import threading
import time
from typing import NamedTuple

import faults
import pytest
from asker import WORDS, Asker, ask
from conftest import INVENTORY, PLAN, WORK
from faults import HEAD, SERVER, SERVICES, WORKERS, inside, told
from slow import slowed

pytestmark = pytest.mark.timeout(7200)

SEED = int(os.environ.get("LLAMA_TEST_SEED") or random.randrange(1 << 31))
ROUNDS = int(os.environ.get("LLAMA_TEST_ROUNDS", "2"))
ONLY = os.environ.get("LLAMA_TEST_FAULTS", "").split()
SLOW_SECONDS = int(os.environ.get("LLAMA_TEST_SLOW_SECONDS", "300"))
LONGEST = 240
"""Seconds after which a fault counts as not healed."""
NOTICED = r"^(\d+\.\d+) \S+ (?:\S*\[\d+\]: llamacpp: (.*)|systemd\[1\]: (.*(?:exited|Failed|Started).*))$"


@pytest.fixture(scope="module", autouse=True)
def measured():
    """What is found is left for the RESULT of the scenario, whatever fails."""
    found = {"seed": SEED, "faults": {}, "bare_start_s": None, "wrong_answers": 0, "by_hand": 0, "slow_restarts": None}
    print(f"LLAMA_TEST_SEED={SEED}", flush=True)
    yield found
    (WORK / "result.json").write_text(json.dumps(found))


def until(condition, seconds, what):
    deadline = time.time() + seconds
    while time.time() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.3)
    services = inside(HEAD, f"systemctl status --no-pager --lines=40 {SERVER}", check=False)
    pytest.fail(f"{what} did not happen in {seconds} s. {told()}\n{services}")


def noticed(since):
    """When the first launcher or service manager wrote into its journal what it saw, after this moment, with its words; None if none did."""
    lines = []
    for name, own in SERVICES.items():
        units = " ".join(f"--unit={unit}" for unit in own)
        journal = inside(name, f"journalctl {units} --output=short-unix --since=@{since:.3f} --no-pager", check=False)
        lines += [found for found in (re.match(NOTICED, line) for line in journal.splitlines()) if found]
    moments = sorted((float(found[1]), found[2] or found[3]) for found in lines if float(found[1]) >= since)
    return moments[0] if moments else None


def listens(name):
    port = PLAN["hosts"][name]["workers"][0]["endpoint"].split(":")[1]
    return inside(name, f"ss -Hltn 'sport = :{port}'")


def start_by_hand():
    for name in [*WORKERS, HEAD]:
        inside(name, f"systemctl restart {' '.join(SERVICES[name])}", check=False)


def test_a_bare_start(measured):
    """llama-server and workers alone, as the plan has them, from the command to the first right answer."""
    head = PLAN["head"]
    inside(HEAD, f"systemctl stop {SERVER}")
    account = PLAN["hosts"][HEAD]["account"]
    environment = [f"--setenv={name}={value}" for name, value in head["environment"].items()]
    seconds = []
    for _round in range(2 * ROUNDS - 1):
        for name in WORKERS:
            inside(name, f"systemctl stop {' '.join(SERVICES[name])}")
        began = time.time()
        for name in WORKERS:
            inside(name, f"systemctl start {' '.join(SERVICES[name])}")
        until(lambda: all(listens(name) for name in WORKERS), LONGEST, "the start of the workers")
        run = ["systemd-run", "--quiet", "--unit=bare", "--collect", f"--uid={account}", *environment, *head["argv"]]
        inside(HEAD, shlex.join(run))
        until(lambda: ask(max_tokens=WORDS).right, LONGEST, "a bare start")
        seconds.append(time.time() - began)
        inside(HEAD, "systemctl stop bare")
    inside(HEAD, f"systemctl start {SERVER}")
    until(lambda: ask().right, LONGEST, "the start of the head")
    measured["bare_start_s"] = round(sorted(seconds)[len(seconds) // 2], 1)


def quiet():
    return told().get("state") == "serving"


class Healed(NamedTuple):
    """Seconds of one fault; None where somebody had to help."""

    notice_s: float | None = None
    """From the fault to the first line in a journal."""
    recovery_s: float | None = None
    """To the first right answer: from the fault, or from when it was taken away where nothing can be served before that."""
    ratio: float | None = None
    """What of that came after the notice, to a bare start."""


def heal(asker, fault, worker, bare):
    began = time.time()
    lift = fault(worker)
    since, lasts = time.time(), fault in faults.HEAL_WHILE_THEY_LAST
    if lift and not lasts:
        deadline = time.time() + LONGEST / 2
        while not noticed(began) and time.time() < deadline:
            time.sleep(0.5)
        lift()
        since = time.time()
    healed = asker.recovered(since, LONGEST)
    seen = noticed(began)
    if lift and lasts:
        lift()
    said = f"healed after {healed - began:.1f} s" if healed else "not healed"
    print(f"{fault.__name__} {worker}: {said}, {seen and f'after {seen[0] - began:.1f} s: {seen[1]}'}", flush=True)
    if not healed:
        start_by_hand()
        until(lambda: ask().right, LONGEST, "a start by hand")
        return Healed()
    noted = seen[0] if seen and seen[0] <= healed else began
    waited = since if lift and not lasts else began
    ratio = round((healed - max(noted, waited)) / bare, 2) if bare else None
    return Healed(round(noted - began, 1), round(healed - waited, 1), ratio)


def worst(tries):
    """The largest of each figure, or none where somebody had to help once; then all tries."""
    lost = any(entry.recovery_s is None for entry in tries)
    figures = {name: None if lost else max(getattr(entry, name) or 0 for entry in tries) for name in Healed._fields}
    return {**figures, "tries": [entry._asdict() for entry in tries]}


def test_every_fault_heals_by_itself(measured):
    chance = random.Random(SEED)
    wanted = [fault for fault in faults.ALL if not ONLY or fault.__name__ in ONLY]
    order = chance.sample(wanted * ROUNDS, len(wanted) * ROUNDS)
    tries: dict[str, list[Healed]] = {}
    with Asker() as asker:
        for fault in order:
            until(quiet, LONGEST, "a quiet time before the next fault")
            tries.setdefault(fault.__name__, []).append(
                heal(asker, fault, chance.choice(WORKERS), measured["bare_start_s"])
            )
            measured["faults"] = {name: worst(found) for name, found in tries.items()}
            measured["by_hand"] = sum(entry.recovery_s is None for found in tries.values() for entry in found)
            measured["wrong_answers"] = len(asker.wrong)
        faults.whole_disk()
    assert measured["by_hand"] == 0, tries
    assert not asker.wrong, asker.wrong[0]


def test_a_slow_model_is_not_taken_for_a_hung_one(measured):
    """At half a token per second, for minutes; each answer takes longer than a minute."""
    until(lambda: ask().right, LONGEST, "an answer")
    before, process = told(), inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '")
    with slowed(0.5) as speed:
        deadline = time.time() + SLOW_SECONDS
        answers = []
        while time.time() < deadline:
            answers.append(ask(600))
    measured["slow_tokens_per_s"] = round(speed, 2)
    measured["slow_restarts"] = told().get("restarts", 0) - before.get("restarts", 0)
    measured["wrong_answers"] += sum(asked.answer is not None and not asked.right for asked in answers)
    assert all(asked.right for asked in answers)
    assert measured["slow_restarts"] == 0
    assert inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '") == process


def play(playbook, **variables):
    paths = {f"llama_{name}_path": "/dev/null" for name in ("plan", "verify")}
    given = f"--extra-vars={json.dumps({**paths, **variables})}"
    return subprocess.run(
        ["ansible-playbook", f"{INVENTORY.parents[3]}/playbooks/{playbook}", f"--inventory={INVENTORY}", given],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_SSH_ARGS": "-o ControlMaster=no"},
    )


def test_the_head_serves_on_a_fallback_while_a_worker_is_away(measured):
    """Runs meanwhile restart nothing, and verify says what is going on. When the worker is back, all of them serve again."""
    wanted = {"llama_server_fallback": True, "llama_server_fallback_after": 10}
    done = play("site.yml", **wanted)
    assert done.returncode == 0, done.stdout[-5000:]
    lost = WORKERS[-1]
    began = time.time()
    subprocess.run(["podman", "stop", "--time", "5", faults.container(lost)], check=True, capture_output=True)
    until(lambda: told().get("state") == "fallback", LONGEST, "a fallback")
    assert ask().right
    measured["fallback_s"] = round(time.time() - began, 1)
    (without,) = told()["without"]
    assert without.startswith(f"{lost}:")
    process = inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '")
    for playbook in ("verify.yml", "site.yml"):
        failed = play(playbook, **wanted)
        assert failed.returncode != 0, failed.stdout[-5000:]
        assert re.search(rf"FAILED +fallback .*the head has served without {without} since", failed.stdout), (
            failed.stdout
        )
        assert re.search(r"ok +known answer", failed.stdout), failed.stdout
        assert re.search(rf"ok +release +{HEAD}", failed.stdout), failed.stdout
        assert inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '") == process
    refused = play("rollback.yml")
    said = " ".join((refused.stdout + refused.stderr).split())
    assert f"needs hosts that did not answer or do not keep this plan: {lost}" in said, said[-5000:]
    assert inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '") == process
    assert ask().right
    assert told()["without"] == [without]
    began = time.time()
    subprocess.run(["podman", "start", faults.container(lost)], check=True, capture_output=True)
    until(lambda: told().get("state") == "serving" and not told()["without"], LONGEST, "the return to all workers")
    until(lambda: ask().right, LONGEST, "a right answer of all workers")
    measured["return_s"] = round(time.time() - began, 1)
    done = play("site.yml", **wanted)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"ok +fallback .*not needed", done.stdout)
    assert set(re.findall(r"changed=(\d+)", done.stdout)) == {"0"}
    back = play("site.yml")
    assert back.returncode == 0, back.stdout[-5000:]


@contextlib.contextmanager
def started_again(seconds):
    """Containers that end, as they do when their systemd reboots, are started after so long."""
    ended = threading.Event()

    def start(name):
        while not ended.is_set():
            state = subprocess.run(
                ["podman", "inspect", "--format={{.State.Status}}", name], capture_output=True, text=True, check=False
            )
            if state.stdout.strip() == "exited" and not ended.wait(seconds):
                subprocess.run(["podman", "start", name], capture_output=True, check=False)
            ended.wait(1)

    threads = [threading.Thread(target=start, args=(faults.container(name),)) for name in SERVICES]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join()


def test_hosts_reboot_one_at_a_time_and_the_head_serves_without_each(measured):
    """A worker is away for so long that a fallback serves meanwhile; the next host waits until all of them serve again."""
    wanted = {"llama_server_fallback": True, "llama_server_fallback_after": 10}
    done = play("site.yml", **wanted)
    assert done.returncode == 0, done.stdout[-5000:]
    began = time.time()
    with started_again(30):
        done = play("reboot.yml", llama_reboot_hosts=",".join([*WORKERS, HEAD]), **wanted)
    assert done.returncode == 0, done.stdout[-5000:]
    measured["reboot_s"] = round(time.time() - began, 1)
    said = [line["text"] for line in told()["last"] if line["time"] >= began]
    for name in WORKERS:
        assert f"{name} is about to reboot. After a while, the head serves without {name}:" in done.stdout
        assert any(f"stays away: llama-server is started without {name}:" in line for line in said), said
    assert f"{HEAD} is about to reboot. This head does not answer until it" in done.stdout
    assert ask().right


def test_two_operators_at_the_same_minute(tmp_path):
    """Each with a cache of his own and another wish: the lock on the head lets one of them change the cluster, and a run alone makes what it wants."""
    paths = {f"llama_{name}_path": "/dev/null" for name in ("plan", "verify")}
    runs = []
    for context in (2048, 3072):
        given = f"--extra-vars={json.dumps({**paths, 'llama_server_context': context})}"
        site = ["ansible-playbook", f"{INVENTORY.parents[3]}/playbooks/site.yml", f"--inventory={INVENTORY}", given]
        own = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / str(context))}
        runs.append(subprocess.Popen(site, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own))
    said = [started.communicate()[0] for started in runs]
    assert all("Traceback" not in text for text in said)
    assert any(started.returncode == 0 for started in runs), said
    for changes in (True, False):
        done = play("site.yml", llama_server_context=2048)
        assert done.returncode == 0, done.stdout[-5000:]
        assert changes or set(re.findall(r"changed=(\d+)", done.stdout)) == {"0"}
    assert ask().right

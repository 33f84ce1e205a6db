"""The cluster recovers from every fault, distinguishes a slow model from a hung model, and serves on a fallback while a worker is away."""

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
from faults import HEAD, SERVER, SERVICES, WORKERS, launcher_state, run_inside
from slow import slow_workers

pytestmark = pytest.mark.timeout(7200)

SEED = int(os.environ.get("LLAMA_TEST_SEED") or random.randrange(1 << 31))
ROUNDS = int(os.environ.get("LLAMA_TEST_ROUNDS", "2"))
ONLY = os.environ.get("LLAMA_TEST_FAULTS", "").split()
SLOW_SECONDS = int(os.environ.get("LLAMA_TEST_SLOW_SECONDS", "300"))
RECOVERY_SECONDS = 240
"""Seconds after which a recovery counts as failed."""
NOTICE_LINE = r"^(\d+\.\d+) \S+ (?:\S*\[\d+\]: llamacpp: (.*)|systemd\[1\]: (.*(?:exited|Failed|Started).*))$"


@pytest.fixture(scope="module", autouse=True)
def measured():
    """Measurements for the RESULT of the scenario, which are written even if tests fail."""
    found = {"seed": SEED, "faults": {}, "bare_start_s": None, "wrong_answers": 0, "by_hand": 0, "slow_restarts": None}
    print(f"LLAMA_TEST_SEED={SEED}", flush=True)
    yield found
    (WORK / "result.json").write_text(json.dumps(found))


def wait_until(condition, seconds, what):
    deadline = time.time() + seconds
    while time.time() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.3)
    services = run_inside(HEAD, f"systemctl status --no-pager --lines=40 {SERVER}", check=False)
    pytest.fail(f"{what} did not happen in {seconds} s. {launcher_state()}\n{services}")


def first_notice(since):
    """Return time and text of the first journal line in which a launcher or service manager reports the fault; None without such a line."""
    lines = []
    for name, own in SERVICES.items():
        units = " ".join(f"--unit={unit}" for unit in own)
        journal = run_inside(
            name, f"journalctl {units} --output=short-unix --since=@{since:.3f} --no-pager", check=False
        )
        lines += [found for found in (re.match(NOTICE_LINE, line) for line in journal.splitlines()) if found]
    moments = sorted((float(found[1]), found[2] or found[3]) for found in lines if float(found[1]) >= since)
    return moments[0] if moments else None


def listening_socket(name):
    port = PLAN["hosts"][name]["workers"][0]["endpoint"].split(":")[1]
    return run_inside(name, f"ss -Hltn 'sport = :{port}'")


def start_by_hand():
    for name in [*WORKERS, HEAD]:
        run_inside(name, f"systemctl restart {' '.join(SERVICES[name])}", check=False)


def test_a_bare_start(measured):
    """Measure llama-server and the workers alone, with the planned command lines, from the command to the first right answer."""
    head = PLAN["head"]
    run_inside(HEAD, f"systemctl stop {SERVER}")
    account = PLAN["hosts"][HEAD]["account"]
    environment = [f"--setenv={name}={value}" for name, value in head["environment"].items()]
    seconds = []
    for _round in range(2 * ROUNDS - 1):
        for name in WORKERS:
            run_inside(name, f"systemctl stop {' '.join(SERVICES[name])}")
        began = time.time()
        for name in WORKERS:
            run_inside(name, f"systemctl start {' '.join(SERVICES[name])}")
        wait_until(
            lambda: all(listening_socket(name) for name in WORKERS), RECOVERY_SECONDS, "the start of the workers"
        )
        run = ["systemd-run", "--quiet", "--unit=bare", "--collect", f"--uid={account}", *environment, *head["argv"]]
        run_inside(HEAD, shlex.join(run))
        wait_until(lambda: ask(max_tokens=WORDS).right, RECOVERY_SECONDS, "a bare start")
        seconds.append(time.time() - began)
        run_inside(HEAD, "systemctl stop bare")
    run_inside(HEAD, f"systemctl start {SERVER}")
    wait_until(lambda: ask().right, RECOVERY_SECONDS, "the start of the head")
    measured["bare_start_s"] = round(sorted(seconds)[len(seconds) // 2], 1)


def is_serving():
    return launcher_state().get("state") == "serving"


class Recovery(NamedTuple):
    """Seconds of one recovery; None if it needed help."""

    notice_s: float | None = None
    """Seconds from the fault to the first line in a journal."""
    recovery_s: float | None = None
    """Seconds to the first right answer: from the fault, or from its removal if nothing can be served before that."""
    ratio: float | None = None
    """Recovery time after the notice, divided by the time of a bare start."""


def measure_recovery(asker, fault, worker, bare):
    began = time.time()
    remove_fault = fault(worker)
    since, lasts = time.time(), fault in faults.HEAL_WHILE_THEY_LAST
    if remove_fault and not lasts:
        deadline = time.time() + RECOVERY_SECONDS / 2
        while not first_notice(began) and time.time() < deadline:
            time.sleep(0.5)
        remove_fault()
        since = time.time()
    recovered_at = asker.recovered(since, RECOVERY_SECONDS)
    seen = first_notice(began)
    if remove_fault and lasts:
        remove_fault()
    outcome = f"recovered after {recovered_at - began:.1f} s" if recovered_at else "not recovered"
    print(f"{fault.__name__} {worker}: {outcome}, {seen and f'after {seen[0] - began:.1f} s: {seen[1]}'}", flush=True)
    if not recovered_at:
        start_by_hand()
        wait_until(lambda: ask().right, RECOVERY_SECONDS, "a start by hand")
        return Recovery()
    noted = seen[0] if seen and seen[0] <= recovered_at else began
    waited = since if remove_fault and not lasts else began
    ratio = round((recovered_at - max(noted, waited)) / bare, 2) if bare else None
    return Recovery(round(noted - began, 1), round(recovered_at - waited, 1), ratio)


def worst(tries):
    """Return the largest value of each figure, or None if a recovery needed help; then all tries."""
    lost = any(entry.recovery_s is None for entry in tries)
    figures = {name: None if lost else max(getattr(entry, name) or 0 for entry in tries) for name in Recovery._fields}
    return {**figures, "tries": [entry._asdict() for entry in tries]}


def test_the_cluster_recovers_from_every_fault(measured):
    chance = random.Random(SEED)
    selected_faults = [fault for fault in faults.ALL if not ONLY or fault.__name__ in ONLY]
    order = chance.sample(selected_faults * ROUNDS, len(selected_faults) * ROUNDS)
    tries: dict[str, list[Recovery]] = {}
    with Asker() as asker:
        for fault in order:
            wait_until(is_serving, RECOVERY_SECONDS, "a serving cluster before the next fault")
            tries.setdefault(fault.__name__, []).append(
                measure_recovery(asker, fault, chance.choice(WORKERS), measured["bare_start_s"])
            )
            measured["faults"] = {name: worst(found) for name, found in tries.items()}
            measured["by_hand"] = sum(entry.recovery_s is None for found in tries.values() for entry in found)
            measured["wrong_answers"] = len(asker.wrong)
        faults.remove_small_disk()
    assert measured["by_hand"] == 0, tries
    assert not asker.wrong, asker.wrong[0]


def test_a_slow_model_does_not_count_as_hung(measured):
    """The model answers at half a token per second, for minutes. Each answer takes longer than a minute."""
    wait_until(lambda: ask().right, RECOVERY_SECONDS, "an answer")
    before, process = launcher_state(), run_inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '")
    with slow_workers(0.5) as speed:
        deadline = time.time() + SLOW_SECONDS
        answers = []
        while time.time() < deadline:
            answers.append(ask(600))
    measured["slow_tokens_per_s"] = round(speed, 2)
    measured["slow_restarts"] = launcher_state().get("restarts", 0) - before.get("restarts", 0)
    measured["wrong_answers"] += sum(reply.answer is not None and not reply.right for reply in answers)
    assert all(reply.right for reply in answers)
    assert measured["slow_restarts"] == 0
    assert run_inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '") == process


def play(playbook, **variables):
    paths = {f"llama_{name}_path": "/dev/null" for name in ("plan", "verify")}
    option = f"--extra-vars={json.dumps({**paths, **variables})}"
    return subprocess.run(
        ["ansible-playbook", f"{INVENTORY.parents[3]}/playbooks/{playbook}", f"--inventory={INVENTORY}", option],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ANSIBLE_SSH_ARGS": "-o ControlMaster=no"},
    )


def test_the_head_serves_on_a_fallback_while_a_worker_is_away(measured):
    """Meanwhile, runs restart nothing, and verify reports the fallback. When the worker is back, all workers serve again."""
    settings = {"llama_server_fallback": True, "llama_server_fallback_after": 10}
    done = play("site.yml", **settings)
    assert done.returncode == 0, done.stdout[-5000:]
    lost = WORKERS[-1]
    began = time.time()
    subprocess.run(["podman", "stop", "--time", "5", faults.container(lost)], check=True, capture_output=True)
    wait_until(lambda: launcher_state().get("state") == "fallback", RECOVERY_SECONDS, "a fallback")
    assert ask().right
    measured["fallback_s"] = round(time.time() - began, 1)
    (without,) = launcher_state()["without"]
    assert without.startswith(f"{lost}:")
    process = run_inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '")
    for playbook in ("verify.yml", "site.yml"):
        failed = play(playbook, **settings)
        assert failed.returncode != 0, failed.stdout[-5000:]
        assert re.search(rf"FAILED +fallback .*the head has served without {without} since", failed.stdout), (
            failed.stdout
        )
        assert re.search(r"ok +known answer", failed.stdout), failed.stdout
        assert re.search(rf"ok +release +{HEAD}", failed.stdout), failed.stdout
        assert run_inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '") == process
    refused = play("rollback.yml")
    output = " ".join((refused.stdout + refused.stderr).split())
    assert f"needs hosts that did not answer or do not keep this plan: {lost}" in output, output[-5000:]
    assert run_inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server '") == process
    assert ask().right
    assert launcher_state()["without"] == [without]
    began = time.time()
    subprocess.run(["podman", "start", faults.container(lost)], check=True, capture_output=True)
    wait_until(
        lambda: launcher_state().get("state") == "serving" and not launcher_state()["without"],
        RECOVERY_SECONDS,
        "the return to all workers",
    )
    wait_until(lambda: ask().right, RECOVERY_SECONDS, "a right answer of all workers")
    measured["return_s"] = round(time.time() - began, 1)
    done = play("site.yml", **settings)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"ok +fallback .*not needed", done.stdout)
    assert set(re.findall(r"changed=(\d+)", done.stdout)) == {"0"}
    back = play("site.yml")
    assert back.returncode == 0, back.stdout[-5000:]


@contextlib.contextmanager
def restart_containers(seconds):
    """Start containers again, this many seconds after they exit, as they do when their systemd reboots."""
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
    """Each worker is away so long that a fallback serves. The next host reboots only when all workers serve again."""
    settings = {"llama_server_fallback": True, "llama_server_fallback_after": 10}
    done = play("site.yml", **settings)
    assert done.returncode == 0, done.stdout[-5000:]
    began = time.time()
    with restart_containers(30):
        done = play("reboot.yml", llama_reboot_hosts=",".join([*WORKERS, HEAD]), **settings)
    assert done.returncode == 0, done.stdout[-5000:]
    measured["reboot_s"] = round(time.time() - began, 1)
    log_lines = [line["text"] for line in launcher_state()["last"] if line["time"] >= began]
    for name in WORKERS:
        assert f"{name} is about to reboot. After a wait (llama_server_fallback_after), the head serves" in done.stdout
        assert any(f"starting llama-server without {name}:" in line for line in log_lines), log_lines
    assert f"{HEAD} is about to reboot. The cluster does not answer until this head" in done.stdout
    assert ask().right


def test_two_operators_at_the_same_time(tmp_path):
    """Each operator has a cache and a setting of their own. The lock on the head lets only one of them change the cluster; a later run alone succeeds."""
    paths = {f"llama_{name}_path": "/dev/null" for name in ("plan", "verify")}
    runs = []
    for context in (2048, 3072):
        option = f"--extra-vars={json.dumps({**paths, 'llama_server_context': context})}"
        site = ["ansible-playbook", f"{INVENTORY.parents[3]}/playbooks/site.yml", f"--inventory={INVENTORY}", option]
        own = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / str(context))}
        runs.append(subprocess.Popen(site, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own))
    outputs = [run.communicate()[0] for run in runs]
    assert all("Traceback" not in output for output in outputs)
    assert any(run.returncode == 0 for run in runs), outputs
    for changes in (True, False):
        done = play("site.yml", llama_server_context=2048)
        assert done.returncode == 0, done.stdout[-5000:]
        assert changes or set(re.findall(r"changed=(\d+)", done.stdout)) == {"0"}
    assert ask().right

"""Models that take turns: what clients get during changes and faults, and what is left behind."""

import json
import os
import random
import shlex
import statistics
import subprocess
import threading
import time
from typing import NamedTuple

import faults
import pytest
from asker import SENTENCE
from conftest import INVENTORY, PLAN, WORK
from faults import HEAD, SERVER, STATE, WORKERS, container, inside

pytestmark = pytest.mark.timeout(7200)

SEED = int(os.environ.get("LLAMA_TEST_SEED") or random.randrange(1 << 31))
MODELS = {model["name"]: model for model in PLAN["head"]["models"]}
URL = f"http://127.0.0.1:{PLAN['head']['port']}"
CHANGES, CLIENTS, LONGEST = 100, 4, 240
ONLY = os.environ.get("LLAMA_TEST_FAULTS", "").split()
LEFT_MIB = 32
"""What a worker's process may have grown by after all changes, as its allocator keeps it."""
STARTS = "spawning server instance with name="
BARE_PORT = 18090


@pytest.fixture(scope="module", autouse=True)
def measured():
    """What is found is left for the RESULT of the scenario, whatever fails."""
    found = {"seed": SEED}
    print(f"LLAMA_TEST_SEED={SEED}", flush=True)
    yield found
    (WORK / "result.json").write_text(json.dumps(found))


class Asked(NamedTuple):
    """A question to a model; ``said`` is its text, or what came in place of an answer, with its status."""

    model: str
    seconds: float
    right: bool
    status: int
    said: str


def ask(model, seconds=120, url=URL, **more):
    question = json.dumps({"model": model, "prompt": "", "temperature": 0, **more})
    argv = [
        "podman",
        "exec",
        container(HEAD),
        "curl",
        "--silent",
        f"--max-time={seconds}",
        "--write-out=\n%{http_code} %{time_total}",
        "--header=Content-Type: application/json",
    ]
    done = subprocess.run(
        [*argv, f"--data={question}", f"{url}/v1/completions"], capture_output=True, text=True, check=False
    )
    said, _line, figures = done.stdout.rpartition("\n")
    status, took = figures.split() if figures else (0, 0)  # its host is not there
    words = SENTENCE.split()[: more.get("max_tokens")]
    try:
        reply = json.loads(said)
        text = reply["choices"][0]["text"]
        right = text.split() == words and reply["model"] == model
    except (ValueError, KeyError, TypeError):
        text, right = said, False
    return Asked(model, float(took), right, int(status), text)


class Clients:
    """Ask for models in random order, all at the same time, until they are closed."""

    def __init__(self, number=CLIENTS):
        self.all, self.closing = [], threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(random.Random(SEED + one),)) for one in range(number)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_error):
        self.closing.set()
        for thread in self.threads:
            thread.join()

    def _run(self, chance):
        while not self.closing.wait(chance.random() / 5):
            more = chance.choice([{}, {"max_tokens": 8}])
            self.all.append(ask(chance.choice(tuple(MODELS)), **more))

    @property
    def wrong(self):
        return [asked for asked in self.all if asked.status == 200 and not asked.right]

    @property
    def errors(self):
        return [asked for asked in self.all if asked.status not in (0, 200)]

    @property
    def lost(self):
        """Without an error that a client can act on."""
        return [asked for asked in self.all if asked.status == 0]


def until(condition, seconds, what, pause=0.3):
    deadline = time.time() + seconds
    while time.time() < deadline:
        if condition():
            return
        time.sleep(pause)
    log = inside(HEAD, f"systemctl status --no-pager --lines=60 {SERVER}", check=False)
    pytest.fail(f"{what} did not happen in {seconds} s\n{told()}\n{log}")


def told():
    return inside(HEAD, f"cat {STATE}/serving.json", check=False)


def changes(since):
    return int(
        inside(
            HEAD,
            f"journalctl --unit={SERVER} --since=@{since:.3f} --output=cat --no-pager | grep --count '{STARTS}'",
            check=False,
        )
    )


def unload_all():
    for name in MODELS:
        body = shlex.quote(json.dumps({"model": name}))
        inside(HEAD, f"curl --silent --data {body} {URL}/models/unload")
    until(lambda: not any(clients_of(name) for name in WORKERS), 30, "workers without a client")


def clients_of(name):
    """Established connections to the workers of a host, as it sees them."""
    ports = [worker["endpoint"].split(":")[1] for worker in PLAN["hosts"][name]["workers"]]
    return sum(len(inside(name, f"ss -Htn state established 'sport = :{port}'").splitlines()) for port in ports)


def memory(name):
    """MiB of each worker's process on a host."""
    processes = inside(name, f"pgrep --full '^[^ ]*/bin/{faults.WORKER_PROGRAM} '").split()
    status = " ".join(f"/proc/{process}/status" for process in processes)
    resident = inside(name, f"awk '/^VmRSS/ {{print $2}}' {status}").split()
    return {process: int(kib) // 1024 for process, kib in zip(processes, resident, strict=True)}


def test_a_hundred_changes_with_questions_in_flight(measured):
    for name in MODELS:
        assert ask(name).right
    unload_all()
    before, process = (
        {name: memory(name) for name in WORKERS},
        inside(HEAD, f"systemctl show --property=MainPID {SERVER}"),
    )
    began = time.time()
    with Clients() as clients:
        until(lambda: changes(began) >= CHANGES, 1800, f"{CHANGES} changes", pause=5)
    measured["changes"] = changes(began)
    measured["asked"] = len(clients.all)
    measured["wrong_answers"] = len(clients.wrong)
    measured["errors"] = [f"{asked.status}: {asked.said[:200]}" for asked in clients.errors]
    measured["lost_questions"] = len(clients.lost)
    assert not clients.wrong, clients.wrong[0]
    assert not clients.lost, clients.lost[0]
    unload_all()
    measured["left_mib"] = max(mib - before[name][process] for name in WORKERS for process, mib in memory(name).items())
    assert measured["left_mib"] <= LEFT_MIB
    assert inside(HEAD, f"systemctl show --property=MainPID {SERVER}") == process
    assert json.loads(told())["restarts"] == 0


def test_a_change_beside_a_bare_start(measured):
    """From the question to the whole answer, and from the command to the same answer, of the same command line."""
    head = PLAN["head"]
    account = PLAN["hosts"][HEAD]["account"]
    environment = [f"--setenv={name}={value}" for name, value in head["environment"].items()]
    changed, bare = {name: [] for name in MODELS}, {name: [] for name in MODELS}
    for _round in range(5):
        for name in MODELS:
            asked = ask(name)
            assert asked.right, asked
            changed[name].append(asked.seconds)
    for name in MODELS:
        for _round in range(5):
            unload_all()
            argv = [*MODELS[name]["argv"], "--host", "127.0.0.1", "--port", str(BARE_PORT), "--alias", name]
            run = shlex.join(
                ["systemd-run", "--quiet", "--unit=bare", "--collect", f"--uid={account}", *environment, *argv]
            )
            url = f"http://127.0.0.1:{BARE_PORT}"
            question = shlex.quote(json.dumps({"prompt": "", "temperature": 0}))
            answered = f"until curl --silent --fail {url}/health; do sleep 0.02; done; curl --silent --fail --data {question} {url}/v1/completions"
            began, ended = inside(HEAD, f"date +%s.%N; ({run}; {answered}) >/dev/null; date +%s.%N").split()
            bare[name].append(float(ended) - float(began))
            inside(HEAD, "systemctl stop bare")
    measured["change_s"] = {name: round(statistics.median(found), 2) for name, found in changed.items()}
    measured["bare_start_s"] = {name: round(statistics.median(found), 2) for name, found in bare.items()}
    measured["change_to_bare_start"] = {
        name: round(measured["change_s"][name] / measured["bare_start_s"][name], 2) for name in MODELS
    }


def model_killed(_name):
    inside(HEAD, "pkill -KILL --full '^[^ ]*/bin/llama-server .*--alias '")


def model_hung(_name):
    inside(HEAD, "pkill -STOP --full '^[^ ]*/bin/llama-server .*--alias '")


OF_MODELS = [model_killed, model_hung]


def test_every_fault_heals_by_itself(measured):
    chance = random.Random(SEED)
    measured["faults"], wrong = {}, []
    wanted = [fault for fault in (*faults.ALL, *OF_MODELS) if not ONLY or fault.__name__ in ONLY]
    for fault in chance.sample(wanted, len(wanted)):
        until(lambda: ask(chance.choice(list(MODELS))).right, LONGEST, "a model to lose")
        began = time.time()
        with Clients(1) as clients:
            lift = fault(chance.choice(WORKERS))
            if lift and fault not in faults.HEAL_WHILE_THEY_LAST:
                time.sleep(30)
                lift()
                lift = None
            for name in MODELS:
                until(lambda name=name: ask(name).right, LONGEST, f"{fault.__name__}: an answer of {name}")
            if lift:
                lift()
        wrong += clients.wrong
        measured["faults"][fault.__name__] = round(time.time() - began, 1)
        print(
            fault.__name__,
            measured["faults"][fault.__name__],
            [f"{asked.status} {asked.said[:80]}" for asked in clients.errors],
            flush=True,
        )
    faults.whole_disk()
    assert not wrong, wrong[0]
    until(lambda: all(ask(name).right for name in MODELS), LONGEST, "the end")
    unload_all()
    assert not inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server .*--alias '", check=False)


def test_status_lists_the_models(measured):
    assert ask("large").right
    status = WORK / "status.json"
    subprocess.run(
        [
            "ansible-playbook",
            f"{INVENTORY.parents[3]}/playbooks/status.yml",
            f"--inventory={INVENTORY}",
            f"--extra-vars=llama_status_path={status}",
        ],
        capture_output=True,
        check=False,
    )
    found = {model["name"]: model["state"] for model in json.loads(status.read_text())["cluster"]["models"]}
    assert found == {name: "loaded" if name == "large" else "unloaded" for name in MODELS}

"""Several models, one loaded at a time: what clients get during model changes and faults, and what remains afterwards."""

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
from faults import HEAD, SERVER, STATE, WORKERS, container, run_inside

pytestmark = pytest.mark.timeout(7200)

SEED = int(os.environ.get("LLAMA_TEST_SEED") or random.randrange(1 << 31))
MODELS = {model["name"]: model for model in PLAN["head"]["models"]}
URL = f"http://127.0.0.1:{PLAN['head']['port']}"
CHANGES, CLIENTS, RECOVERY_SECONDS = 100, 4, 240
ONLY = os.environ.get("LLAMA_TEST_FAULTS", "").split()
MAX_GROWTH_MIB = 32
"""Memory by which a worker's process may grow over all changes, because its allocator keeps it."""
START_LOG_LINE = "spawning server instance with name="
BARE_PORT = 18090


@pytest.fixture(scope="module", autouse=True)
def measured():
    """Measurements for the RESULT of the scenario, which are written even if tests fail."""
    found = {"seed": SEED}
    print(f"LLAMA_TEST_SEED={SEED}", flush=True)
    yield found
    (WORK / "result.json").write_text(json.dumps(found))


class Reply(NamedTuple):
    """Reply of a model; ``text`` is the answer, or the body of an error."""

    model: str
    seconds: float
    right: bool
    status: int
    text: str


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
    body, _line, figures = done.stdout.rpartition("\n")
    status, took = figures.split() if figures else (0, 0)  # the host is down
    words = SENTENCE.split()[: more.get("max_tokens")]
    try:
        reply = json.loads(body)
        text = reply["choices"][0]["text"]
        right = text.split() == words and reply["model"] == model
    except (ValueError, KeyError, TypeError):
        text, right = body, False
    return Reply(model, float(took), right, int(status), text)


class Clients:
    """Clients that send requests to models in random order, all at the same time, until they are closed."""

    def __init__(self, number=CLIENTS):
        self.replies, self.closing = [], threading.Event()
        self.threads = [
            threading.Thread(target=self._run, args=(random.Random(SEED + index),)) for index in range(number)
        ]

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
            self.replies.append(ask(chance.choice(tuple(MODELS)), **more))

    @property
    def wrong(self):
        return [reply for reply in self.replies if reply.status == 200 and not reply.right]

    @property
    def errors(self):
        return [reply for reply in self.replies if reply.status not in (0, 200)]

    @property
    def lost(self):
        """Requests that failed without an error that a client can act on."""
        return [reply for reply in self.replies if reply.status == 0]


def wait_until(condition, seconds, what, pause=0.3):
    deadline = time.time() + seconds
    while time.time() < deadline:
        if condition():
            return
        time.sleep(pause)
    log = run_inside(HEAD, f"systemctl status --no-pager --lines=60 {SERVER}", check=False)
    pytest.fail(f"{what} did not happen in {seconds} s\n{read_launcher_state()}\n{log}")


def read_launcher_state():
    return run_inside(HEAD, f"cat {STATE}/serving.json", check=False)


def count_changes(since):
    return int(
        run_inside(
            HEAD,
            f"journalctl --unit={SERVER} --since=@{since:.3f} --output=cat --no-pager | grep --count '{START_LOG_LINE}'",
            check=False,
        )
    )


def unload_all():
    for name in MODELS:
        body = shlex.quote(json.dumps({"model": name}))
        run_inside(HEAD, f"curl --silent --data {body} {URL}/models/unload")
    wait_until(lambda: not any(clients_of(name) for name in WORKERS), 30, "workers without a client")


def clients_of(name):
    """Return the number of established connections to the workers of a host, as the host counts them."""
    ports = [worker["endpoint"].split(":")[1] for worker in PLAN["hosts"][name]["workers"]]
    return sum(len(run_inside(name, f"ss -Htn state established 'sport = :{port}'").splitlines()) for port in ports)


def process_memory(name):
    """Return the MiB of each worker process on a host."""
    processes = run_inside(name, f"pgrep --full '^[^ ]*/bin/{faults.WORKER_PROGRAM} '").split()
    status = " ".join(f"/proc/{process}/status" for process in processes)
    resident = run_inside(name, f"awk '/^VmRSS/ {{print $2}}' {status}").split()
    return {process: int(kib) // 1024 for process, kib in zip(processes, resident, strict=True)}


def test_a_hundred_changes_with_requests_in_flight(measured):
    for name in MODELS:
        assert ask(name).right
    unload_all()
    before, process = (
        {name: process_memory(name) for name in WORKERS},
        run_inside(HEAD, f"systemctl show --property=MainPID {SERVER}"),
    )
    began = time.time()
    with Clients() as clients:
        wait_until(lambda: count_changes(began) >= CHANGES, 1800, f"{CHANGES} changes", pause=5)
    measured["changes"] = count_changes(began)
    measured["asked"] = len(clients.replies)
    measured["wrong_answers"] = len(clients.wrong)
    measured["errors"] = [f"{reply.status}: {reply.text[:200]}" for reply in clients.errors]
    measured["lost_questions"] = len(clients.lost)
    assert not clients.wrong, clients.wrong[0]
    assert not clients.lost, clients.lost[0]
    unload_all()
    measured["left_mib"] = max(
        mib - before[name][process] for name in WORKERS for process, mib in process_memory(name).items()
    )
    assert measured["left_mib"] <= MAX_GROWTH_MIB
    assert run_inside(HEAD, f"systemctl show --property=MainPID {SERVER}") == process
    assert json.loads(read_launcher_state())["restarts"] == 0


def test_a_change_compared_with_a_bare_start(measured):
    """Compare the time from the request to the whole answer with the time from a bare start of the same command line to the same answer."""
    head = PLAN["head"]
    account = PLAN["hosts"][HEAD]["account"]
    environment = [f"--setenv={name}={value}" for name, value in head["environment"].items()]
    changed, bare = {name: [] for name in MODELS}, {name: [] for name in MODELS}
    for _round in range(5):
        for name in MODELS:
            reply = ask(name)
            assert reply.right, reply
            changed[name].append(reply.seconds)
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
            began, ended = run_inside(HEAD, f"date +%s.%N; ({run}; {answered}) >/dev/null; date +%s.%N").split()
            bare[name].append(float(ended) - float(began))
            run_inside(HEAD, "systemctl stop bare")
    measured["change_s"] = {name: round(statistics.median(found), 2) for name, found in changed.items()}
    measured["bare_start_s"] = {name: round(statistics.median(found), 2) for name, found in bare.items()}
    measured["change_to_bare_start"] = {
        name: round(measured["change_s"][name] / measured["bare_start_s"][name], 2) for name in MODELS
    }


def model_killed(_name):
    run_inside(HEAD, "pkill -KILL --full '^[^ ]*/bin/llama-server .*--alias '")


def model_hung(_name):
    run_inside(HEAD, "pkill -STOP --full '^[^ ]*/bin/llama-server .*--alias '")


MODEL_FAULTS = [model_killed, model_hung]


def test_the_cluster_recovers_from_every_fault(measured):
    chance = random.Random(SEED)
    measured["faults"], wrong = {}, []
    selected_faults = [fault for fault in (*faults.ALL, *MODEL_FAULTS) if not ONLY or fault.__name__ in ONLY]
    for fault in chance.sample(selected_faults, len(selected_faults)):
        wait_until(lambda: ask(chance.choice(list(MODELS))).right, RECOVERY_SECONDS, "a loaded model")
        began = time.time()
        with Clients(1) as clients:
            remove_fault = fault(chance.choice(WORKERS))
            if remove_fault and fault not in faults.HEAL_WHILE_THEY_LAST:
                time.sleep(30)
                remove_fault()
                remove_fault = None
            for name in MODELS:
                wait_until(
                    lambda name=name: ask(name).right, RECOVERY_SECONDS, f"{fault.__name__}: an answer of {name}"
                )
            if remove_fault:
                remove_fault()
        wrong += clients.wrong
        measured["faults"][fault.__name__] = round(time.time() - began, 1)
        print(
            fault.__name__,
            measured["faults"][fault.__name__],
            [f"{reply.status} {reply.text[:80]}" for reply in clients.errors],
            flush=True,
        )
    faults.remove_small_disk()
    assert not wrong, wrong[0]
    wait_until(lambda: all(ask(name).right for name in MODELS), RECOVERY_SECONDS, "an answer of each model")
    unload_all()
    assert not run_inside(HEAD, "pgrep --full '^[^ ]*/bin/llama-server .*--alias '", check=False)


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

"""Measures tokens per second with two accelerators, the second behind a worker on loopback: the collection's cluster against programs started by hand.

The collection builds, starts and verifies a cluster on this machine with a known-answer model of 7.5 GB. The command lines of its plan are also started by
hand on other ports, and requests alternate between both. This is repeated several times with restarts, in changing order. At the end,
llama-server alone drives both devices in its own process, to show the cost of RPC.

Installs in a temporary folder as the current user, and needs 16 GB there and twice the size of the model on the devices. If XDG_CACHE_HOME is set, model,
sources and compiled objects are kept there. Passes other arguments to ansible-playbook. Prints each round and one JSON object; the figures in
docs/hardware.md come from it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

from first_run import PORTS, ROOT, machine

ROUNDS = 6
RUNS = 36
TOKENS = 64
MODEL = {"layers": 32, "width": 4096, "type": "f16"}
FURTHER = 1000
"""What is added to the ports of the plan for what is started by hand."""
SECONDS_TO_START = 300
SECONDS_TO_END = 60


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """What is known here, and what ansible-playbook gets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", default="auto", help="accelerator backend; auto selects none with compiled programs (binary)"
    )
    parser.add_argument("--cluster", action="append", help="for gpu_speed.py: cluster to measure, repeatable")
    return parser.parse_known_args()


def play(playbook: str, work: Path, environment: dict[str, str], variables: dict) -> str:
    """What one run of a playbook says.

    :param variables: ``llama_worker_endpoints``, what the machine lends (nothing is everything), and others.
    """
    settings = {
        **PORTS,
        "llama_model_known_answer": MODEL,
        "llama_host_scope": "user",
        "llama_placement": "all",
        **variables,
    }
    (work / "settings.json").write_text(json.dumps(settings))
    command = [str(Path(sys.executable).with_name("ansible-playbook")), playbook, "-i", "inventories/local"]
    command += ["-e", f"@{work / 'settings.json'}", "-e", f"llama_plan_path={work / 'plan.json'}", *arguments()[1]]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{playbook} failed:\n{process.stdout[-6000:]}{process.stderr[-1000:]}")
    return process.stdout


def elsewhere(argv: list[str]) -> list[str]:
    """The same command line on other ports."""
    ports = [PORTS["llama_server_port"], *(endpoint["port"] for endpoint in PORTS["llama_worker_endpoints"])]
    expression = rf"\b({'|'.join(map(str, ports))})\b"
    return [re.sub(expression, lambda found: str(int(found[0]) + FURTHER), word) for word in argv]


def without_rpc(argv: list[str], devices: list[str]) -> list[str]:
    """The head's command line with the devices in its own process."""
    changed = list(argv)
    changed[changed.index("--device") + 1] = ",".join(devices)
    place = changed.index("--rpc")
    return changed[:place] + changed[place + 2 :]


def answers(port: int, path: str | None, address: str = "127.0.0.1") -> bool:
    """Whether something listens there, and answers the path with 200 if one is given."""
    try:
        if path is None:
            socket.create_connection((address, port), 5).close()
            return True
        connection = http.client.HTTPConnection(address, port, timeout=5)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


@contextmanager
def by_hand(workers: list[dict], head: dict, environment: dict[str, str], log: Path) -> Iterator[int]:
    """Runs workers, then llama-server; gives the server's port."""
    running: list[subprocess.Popen] = []

    def start(argv: list[str], own: dict[str, str], port: int, path: str | None) -> None:
        with log.open("ab") as stream:
            process = subprocess.Popen(
                elsewhere(argv),
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        running.append(process)
        deadline = time.monotonic() + SECONDS_TO_START
        while not answers(port + FURTHER, path):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{process.args!r} did not start, see {log}")
            time.sleep(0.2)

    try:
        for worker in workers:
            start(worker["argv"], worker["environment"], int(worker["endpoint"].rsplit(":", 1)[1]), None)
        start(head["argv"], head["environment"], head["port"], "/health")
        yield head["port"] + FURTHER
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(SECONDS_TO_END)


def processes(argv: list[str]) -> set[int]:
    """Those with this command line."""
    wanted = b"".join(word.encode() + b"\0" for word in argv)
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == wanted:
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def begin_anew(workers: list[dict], head: dict) -> None:
    """Ends the collection's processes and waits until its service manager has brought them back."""
    before = {tuple(argv): processes(argv) for argv in (head["argv"], *(worker["argv"] for worker in workers))}
    for process in set().union(*before.values()):
        os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_START
    while any(not processes(list(argv)) - old for argv, old in before.items()) or not answers(head["port"], "/health"):
        if time.monotonic() > deadline:
            sys.exit("The cluster did not become healthy again.")
        time.sleep(0.2)


def tokens_per_second(port: int) -> float:
    """Of one completion, as its client sees it."""
    question = {"prompt": "", "n_predict": TOKENS, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    started = time.monotonic()
    connection.request("POST", "/completion", json.dumps(question), {"Content-Type": "application/json"})
    said = json.load(connection.getresponse())
    seconds = time.monotonic() - started
    assert said["tokens_predicted"] == TOKENS, said
    return TOKENS / seconds


def in_turns(ports: list[int]) -> list[list[float]]:
    """Figures of each server, in the next run the other way round; the first of each is left out."""
    found: list[list[float]] = [[] for _port in ports]
    for run in range(RUNS + 1):
        order = list(enumerate(ports))
        for index, port in order if run % 2 else reversed(order):
            found[index].append(tokens_per_second(port))
    return [figures[1:] for figures in found]


def compared(plan: dict, environment: dict[str, str], log: Path) -> tuple[list[list[float]], list[list[float]]]:
    """Figures of each round: of the collection's cluster, and by hand."""
    head, workers = plan["head"], plan["hosts"]["localhost"]["workers"]
    ours, hand = [], []
    for number in range(ROUNDS):
        with ExitStack() as stack:
            if number % 2:
                begin_anew(workers, head)
            port = stack.enter_context(by_hand(workers, head, environment, log))
            if not number % 2:
                begin_anew(workers, head)
            figures = in_turns([head["port"], port])
        ours.append(figures[0])
        hand.append(figures[1])
        print(f"round {number + 1}: {told(ours[-1:])} by the collection, {told(hand[-1:])} by hand", file=sys.stderr)
    return ours, hand


def told(rounds: list[list[float]]) -> dict[str, float]:
    deciles = statistics.quantiles(chain(*rounds), n=10)
    return {
        name: round(value, 1) for name, value in zip(("median", "p10", "p90"), (deciles[4], deciles[0], deciles[8]))
    }


def measured(plan: dict, environment: dict[str, str], log: Path) -> dict:
    devices = [*plan["head"]["devices"], *(worker["device"] for worker in plan["hosts"]["localhost"]["workers"])]
    ours, hand = compared(plan, environment, log)
    alone = {**plan["head"], "argv": without_rpc(plan["head"]["argv"], devices), "environment": {}}
    with by_hand([], alone, environment, log) as port:
        in_process = in_turns([port])
    ratios = [statistics.median(one) / statistics.median(other) for one, other in zip(ours, hand)]
    return {
        "devices": devices,
        "rounds": ROUNDS,
        "runs": RUNS,
        "tokens": TOKENS,
        "tokens_per_s": {"collection": told(ours), "by_hand": told(hand), "without_rpc": told(in_process)},
        "ratio": round(statistics.median(chain(*ours)) / statistics.median(chain(*hand)), 4),
        "ratio_of_rounds": [round(ratio, 4) for ratio in ratios],
    }


def names_of_devices(plan: dict) -> str:
    host = plan["hosts"]["localhost"]
    facts = json.loads(Path(host["prefix"], "facts.json").read_text())["localhost"]
    backends = {worker["backend"] for worker in host["workers"]}
    names = [device["name"] for device in facts["accelerators"] if device["backend"] in backends]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def begin(least: int = 2) -> tuple[Path, dict[str, str], list[dict]]:
    """A folder for the installation, the environment of the playbooks, and the planned workers of the accelerators. Ends where there are fewer
    than ``least`` or more than two, or where this user has a cluster already."""
    work = Path(tempfile.mkdtemp(prefix="llamacpp-benchmark-"))
    environment = {
        "XDG_CACHE_HOME": str(work / "cache"),
        **os.environ,
        "XDG_DATA_HOME": str(work / "data"),
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
    }
    play(
        "playbooks/plan.yml", work, environment, {"llama_worker_endpoints": [], "llama_backend": arguments()[0].backend}
    )
    host = json.loads((work / "plan.json").read_text())["hosts"]["localhost"]
    workers = [worker for worker in host["workers"] if worker["device"] != "CPU"]
    if not least <= len(workers) <= 2:
        sys.exit(f"This machine has {len(workers)} accelerators that llama.cpp supports, instead of {least} or 2.")
    if any(Path(host["units"]).glob("llamacpp-*")):
        sys.exit(f"This user already has a cluster: see {host['units']}.")
    return work, environment, workers


def main() -> None:
    work, environment, (_first, worker) = begin()
    second = {"device": worker["device"], "port": PORTS["llama_worker_endpoints"][1]["port"]}
    variables = {"llama_worker_endpoints": [second], "llama_backend": worker["backend"]}
    try:
        said = play("site.yml", work, environment, variables)
        assert "36 of 36 words correct" in said, said
        plan = json.loads((work / "plan.json").read_text())
        found = measured(plan, environment, work / "log")
        described = {"machine": f"{machine()}, {names_of_devices(plan)}", "model": plan["model"]["name"]}
        described["release"] = plan["hosts"]["localhost"]["builds"][0]["id"]
    finally:
        play("playbooks/teardown.yml", work, environment, variables)
    print(json.dumps({**described, **found}))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()

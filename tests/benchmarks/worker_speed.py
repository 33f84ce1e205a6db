"""Planned beside measured speed with no, one and two workers on the processor, over links that ``tc tbf`` limits.

Each worker is a host of its own for the plan: a network namespace in which Ansible runs its modules. All are one machine,
and each host takes the processor for its own, which is right while one computes after the other.

The collection installs and verifies a cluster of the machine itself. Then the command lines of the three plans are started by hand, each in
its namespace, say the known answer and are asked in turns, several rounds, each with all of them started anew. All that is
measured runs before other programs, with a priority of real time.

Needs root for namespaces and priority, 3 GB of memory and as much in a temporary folder; installs as a user. Where XDG_CACHE_HOME is set, sources and
compiled objects are kept there. Arguments are handed to ansible-playbook. Tells each round, and prints one JSON object; the figures in
docs/performance.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/worker_speed.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model
from first_run import ROOT, machine
from gpu_speed import asked, spread, timings
from gpu_workers import SECONDS_TO_END, SECONDS_TO_START, answers

MODELS = {
    "16 x 2048 f16": {"layers": 16, "width": 2048, "type": "f16"},
    "16 x 2048 q8_0": {"layers": 16, "width": 2048, "type": "q8_0"},
}
WORKERS = ("worker1", "worker2")
NETWORK = "10.213.7"
BRIDGE = "llamabench"
RATE = "1gbit"
TBF = ("tbf", "rate", RATE, "burst", "256kb", "latency", "50ms")
ROUNDS = 3
RUNS = 4
TOKENS = 32
FIRST = {"llama_server_port": 18201}
FIGURES = ("generation_tokens_per_s", "prompt_tokens_per_s", "load_s")


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)


@contextmanager
def network() -> Iterator[None]:
    """A bridge to which each worker's namespace is joined by a link that is limited in both directions."""
    run("ip", "link", "add", BRIDGE, "type", "bridge")  # that fails where another run has one, whose network stays
    try:
        run("ip", "address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for index, name in enumerate(WORKERS):
            here, space = f"{BRIDGE}{index}", ["ip", "netns", "exec", f"{BRIDGE}-{name}"]
            run("ip", "netns", "add", f"{BRIDGE}-{name}")
            run("ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", f"{BRIDGE}-{name}")
            run("ip", "link", "set", here, "master", BRIDGE, "up")
            run(*space, "ip", "address", "add", f"{NETWORK}.{11 + index}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run(*space, "ip", "link", "set", device, "up")
            run("tc", "qdisc", "add", "dev", here, "root", *TBF)
            run(*space, "tc", "qdisc", "add", "dev", "eth0", "root", *TBF)
        yield
    finally:
        for name in WORKERS:
            subprocess.run(["ip", "netns", "delete", f"{BRIDGE}-{name}"], check=False)
        subprocess.run(["ip", "link", "delete", BRIDGE], check=False)


def inventory(work: Path, workers: tuple[str, ...], variables: dict) -> dict:
    """Hosts whose modules run in their namespaces, the head's on the machine itself; all of them find the same installation.

    :param variables: of all hosts.
    """
    hosts = {"head": {"ansible_host": f"{NETWORK}.1", "ansible_python_interpreter": sys.executable}}
    for index, name in enumerate(WORKERS):
        program = work / f"python-{name}"
        program.write_text(f'#!/bin/sh\nexec ip netns exec {BRIDGE}-{name} {sys.executable} "$@"\n')
        program.chmod(0o755)
        hosts[name] = {"ansible_host": f"{NETWORK}.{11 + index}", "ansible_python_interpreter": str(program)}
    return {
        "llama_cluster": {
            "children": {
                "llama_head": {"hosts": {"head": hosts["head"]}},
                "llama_workers": {"hosts": {name: hosts[name] for name in workers}},
            },
            "vars": {
                "ansible_connection": "local",
                "llama_host_scope": "user",
                "llama_placement": "all",
                "llama_accept_advisories": ["unprotected-worker", "slower-than-one-host"],
                **variables,
            },
        }
    }


def play(playbook: str, work: Path, workers: tuple[str, ...], variables: dict) -> tuple[str, dict]:
    """What one run of a playbook says, one host at a time, and its plan."""
    (work / "inventory.json").write_text(json.dumps(inventory(work, workers, variables)))
    command = [str(Path(sys.executable).with_name("ansible-playbook")), playbook]
    command += ["-i", str(work / "inventory.json"), "-f", "1", "-e", f"llama_plan_path={work / 'plan.json'}"]
    process = subprocess.run(
        [*command, *sys.argv[1:]],
        cwd=ROOT,
        env={
            "XDG_CACHE_HOME": str(work / "cache"),
            **os.environ,
            "XDG_DATA_HOME": str(work / "data"),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(f"{playbook} failed:\n{process.stdout[-6000:]}{process.stderr[-1000:]}")
    plan = work / "plan.json"
    return process.stdout, json.loads(plan.read_text()) if plan.exists() else {}


def ports(index: int) -> dict:
    """Variables that give each cluster its own ports.

    :param index: of the cluster; 0 is the one that the collection runs.
    """
    own = {name: port + index for name, port in FIRST.items()}
    return {**own, "llama_worker_endpoints": [{"name": "cpu", "port": 51201 + index}]}


@contextmanager
def process(argv: list[str], environment: dict[str, str], port: str, path: str | None, log: Path) -> Iterator[float]:
    """Runs a program of the plan; gives the seconds until it answered."""
    address, number = port.rsplit(":", 1)
    started = time.monotonic()
    with log.open("ab") as stream:
        running = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
    try:
        while not answers(int(number), path, address):
            if running.poll() is not None or time.monotonic() > started + SECONDS_TO_START:
                sys.exit(f"{argv!r} did not start, see {log}")
            time.sleep(0.1)
        yield time.monotonic() - started
    finally:
        running.terminate()
        running.wait(SECONDS_TO_END)


def with_program(argv: list[str], programs: Path) -> list[str]:
    """The command line with the program of that name: the hosts of a plan without workers need another build than one with them."""
    return [str(programs / Path(argv[0]).name), *argv[1:]]


@contextmanager
def by_hand(plan: dict, programs: Path, work: Path) -> Iterator[float]:
    """Runs a plan's programs, each in the namespace of its host; gives the seconds until llama-server answered."""
    with ExitStack() as stack:
        for name, host in plan["hosts"].items():
            for worker in host["workers"]:
                argv = ["ip", "netns", "exec", f"{BRIDGE}-{name}", *with_program(worker["argv"], programs)]
                stack.enter_context(process(argv, worker["environment"], worker["endpoint"], None, work / "log"))
        head = plan["head"]
        address = f"127.0.0.1:{head['port']}"
        argv = with_program(head["argv"], programs)
        yield stack.enter_context(process(argv, head["environment"], address, "/health", work / "log"))


@contextmanager
def first() -> Iterator[None]:
    """Lets this process and those that it starts run before all others."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def measured(
    plans: dict[str, dict], programs: Path, work: Path
) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Cluster → figures of its estimate, as they are measured in turns; and the GB/s of the memory at the same time."""
    found = {name: {figure: [] for figure in FIGURES} for name in plans}
    words = [known_answer.first_piece_token()] * cost_model.PROMPT_TOKENS
    for number in range(ROUNDS):
        with ExitStack() as stack:
            stack.enter_context(first())
            for name, plan in plans.items():
                found[name]["load_s"].append(stack.enter_context(by_hand(plan, programs, work)))
                said = asked(plan["head"]["port"], {"prompt": "", "n_predict": 64, "temperature": 0})["content"]
                assert known_answer.SENTENCE in said, said
            order = list(plans.items())
            for turn in range(RUNS + 1):
                for name, plan in order if turn % 2 else reversed(order):
                    port = plan["head"]["port"]
                    generated = timings(port, "", TOKENS)["predicted_per_second"]
                    prompt = timings(port, words, 1)["prompt_per_second"]
                    if turn:
                        found[name]["generation_tokens_per_s"].append(generated)
                        found[name]["prompt_tokens_per_s"].append(prompt)
        medians = {name: spread(figures["generation_tokens_per_s"])["median"] for name, figures in found.items()}
        print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}: {medians}", file=sys.stderr)
    return found


def of_model(work: Path, model: dict) -> dict:
    """What is planned and measured of one model."""
    common = {"llama_model_known_answer": model}
    said, installed = play("site.yml", work, ("head",), {**common, **ports(0)})
    assert "36 of 36 words correct" in said, said
    plans = {}
    for index, used in enumerate(((), WORKERS[:1], WORKERS), start=1):
        name = ("alone", "one worker", "two workers")[len(used)]
        _said, plans[name] = play("playbooks/plan.yml", work, used, {**common, **ports(index)})
        (work / f"plan-{index}.json").write_text(json.dumps(plans[name]))
    figures = measured(plans, Path(installed["head"]["argv"][0]).parent, work)
    return {
        "load_average": os.getloadavg()[0],
        "clusters": {name: compared(plan, figures[name]) for name, plan in plans.items()},
    }


def compared(plan: dict, figures: dict[str, list[float]]) -> dict:
    estimate, found = plan["estimate"], {name: spread(values) for name, values in figures.items()}
    return {
        "layers": [entry["layers"] for entry in plan["placement"]],
        "rates": {entry["device"]: f"{entry['gb_per_s']:g} GB/s, {entry['source']}" for entry in estimate["devices"]},
        "links": estimate["links"],
        "planned": {name: estimate[name] for name in FIGURES},
        "measured": found,
        "planned_to_measured": {name: round(estimate[name] / found[name]["median"], 3) for name in FIGURES},
    }


def main() -> None:
    work, found = Path(tempfile.mkdtemp(prefix="llamacpp-benchmark-")), {}
    with network():
        try:
            for name, model in MODELS.items():
                found[name] = of_model(work, model)
                print(json.dumps({name: found[name]}, indent=1), file=sys.stderr)
        finally:
            play("playbooks/teardown.yml", work, ("head",), ports(0))
    print(json.dumps({"machine": machine(), "link": " ".join(TBF), "rounds": ROUNDS, "models": found}))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()

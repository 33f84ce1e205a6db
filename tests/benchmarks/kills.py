"""Kills runs at random moments, runs them again, and wants a verified cluster each time.

    python tests/benchmarks/kills.py          # 50 kills
    python tests/benchmarks/kills.py 5        # as in make test-full
    LLAMA_TEST_SEED=… python tests/benchmarks/kills.py 5

Makes the containers of the molecule scenario kills, as root. Every second kill ends each process of the run, as a power cut of the controller does; the others
end its process group, so that tasks under way go on. Prints a line for each kill and at the end RESULT with a JSON object; docs/operating.md has its figures.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from first_run import ROOT, machine

sys.path.insert(0, str(ROOT / "molecule"))
scenario = importlib.import_module("run")

SCENARIO = "kills"
SITE, TEARDOWN, ROLLBACK = "site.yml", "playbooks/teardown.yml", "playbooks/rollback.yml"
FIRST_GUESS_S, RUN_S = 20.0, 900


class Operation(NamedTuple):
    """What is killed: a playbook, after others that ran to their end, with changed variables."""

    name: str
    playbook: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    again: str = ""
    """What runs after the kill, and goes back to the variables of before; by default the same playbook, which goes on."""
    needs_two: bool = False
    """Whether two plans have to have served before."""


UPGRADE = ("server port", "worker port", "model")
"""Debian has one release of llama.cpp at a time: all of the plan changes that can change without another one."""
OPERATIONS = [
    Operation("converge", SITE, before=(TEARDOWN,)),
    *(Operation(name, SITE) for name in UPGRADE),
    Operation("upgrade", SITE),
    Operation("upgrade, then rollback", SITE, again=ROLLBACK, after=(SITE,), needs_two=True),
    Operation("rollback", ROLLBACK, after=(SITE,), needs_two=True),
    Operation("teardown", TEARDOWN, after=(SITE,)),
]


def changed(variables: dict, name: str) -> dict:
    """The variables of the next run, in which what an operation is named after has another value."""
    if name.startswith("upgrade"):
        for part in UPGRADE:
            variables = changed(variables, part)
    if name == "server port":
        return {**variables, "llama_server_port": 16170 - variables["llama_server_port"]}
    if name == "worker port":
        port = 100112 - variables["llama_worker_endpoints"][0]["port"]
        return {**variables, "llama_worker_endpoints": [{"port": port}]}
    if name == "model":
        return {
            **variables,
            "llama_model_known_answer": {"layers": 33 - variables["llama_model_known_answer"]["layers"]},
        }
    return variables


class Run:
    """One run of a playbook; ``mark`` is on the command lines of all its processes."""

    def __init__(self, playbook: str, variables: dict, log: Path):
        self.mark, self.log = f"kill_mark={random.randrange(1 << 60):x}", log
        command = ["ansible-playbook", playbook, "-i", f"molecule/{SCENARIO}/inventory/hosts.yml", "-e", self.mark]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*scenario.enter(), *command, "-e", json.dumps(variables)],
                cwd=ROOT,
                env={
                    **scenario.environment(SCENARIO),
                    "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                    "ANSIBLE_NOCOLOR": "1",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, whole: bool) -> None:
        """Ends the process group, or every process of the run wherever it stands."""
        os.killpg(self.process.pid, signal.SIGKILL)
        for path in Path("/proc").glob("[0-9]*") if whole else []:
            with suppress(OSError):
                if self.mark.encode() in (path / "cmdline").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)
        self.process.wait()

    def last_task(self) -> str:
        return (re.findall(r"^TASK \[(.*?)\]", self.log.read_text(errors="replace"), re.MULTILINE) or ["nothing"])[-1]


def complete(playbook: str, variables: dict, log: Path) -> float:
    """Seconds of a run that has to succeed, and to prove the cluster where it is site.yml's."""
    started = time.monotonic()
    status = Run(playbook, variables, log).process.wait(RUN_S)
    said = log.read_text(errors="replace")
    if status or (playbook == SITE and "36 of 36 words right" not in said):
        raise AssertionError(f"{playbook} ended with status {status}: {log}\n{said[-2500:]}")
    return time.monotonic() - started


def kill_once(
    number: int, chance: random.Random, variables: dict, seconds: dict[str, float], work: Path
) -> tuple[str, dict]:
    """Kills one run and runs it again; the operation, and the variables of the cluster now."""
    operation = chance.choice(OPERATIONS)
    moment, whole = chance.random(), bool(chance.getrandbits(1))
    if operation.needs_two:
        variables = changed(variables, "upgrade")
        complete(SITE, variables, work / f"{number}-first.log")
    wanted = changed(variables, operation.name)
    for playbook in operation.before:
        complete(playbook, variables, work / f"{number}-before.log")
    run = Run(operation.playbook, wanted, work / f"{number}-killed.log")
    with suppress(subprocess.TimeoutExpired):
        run.process.wait(moment * seconds.get(operation.name, seconds.get("upgrade", FIRST_GUESS_S)))
    ended = run.process.poll() is not None
    run.kill(whole) if not ended else None
    how = "every process" if whole else "the process group"
    print(f"{number}: {operation.name}, {how}, {'had ended' if ended else 'in ' + repr(run.last_task())}", flush=True)
    again = complete(operation.again or operation.playbook, wanted, work / f"{number}-again.log")
    if operation.again:
        wanted = variables
    else:
        seconds[operation.name] = max(again, seconds.get(operation.name, 0.0))
    for playbook in operation.after:
        complete(playbook, wanted, work / f"{number}-after.log")
    return operation.name, wanted


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    seed = int(os.environ.get("LLAMA_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"LLAMA_TEST_SEED={seed}", flush=True)
    scenario.install_missing()
    work = scenario.WORK / SCENARIO / "logs"
    work.mkdir(parents=True, exist_ok=True)
    for step in ("destroy", "create"):
        scenario.molecule(step, SCENARIO)
    chance, failed, done = random.Random(seed), [], Counter[str]()
    variables = {
        "llama_server_port": 8080,
        "llama_worker_endpoints": [{"port": 50052}],
        "llama_model_known_answer": {"layers": 16},
    }
    seconds = {"converge": complete(SITE, variables, work / "first.log")}
    for number in range(1, kills + 1):
        try:
            name, variables = kill_once(number, chance, variables, seconds, work)
            done[name] += 1
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failed.append(number)
            print(f"{number}: {error}", flush=True)
    scenario.molecule("destroy", SCENARIO)
    scenario.leave()
    result = {"machine": machine(), "seed": seed, "kills": kills, "converged": dict(done), "failed": failed}
    print("RESULT " + json.dumps(result), flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

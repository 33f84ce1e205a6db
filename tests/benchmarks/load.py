"""Seconds from the start of llama-server to its health, and what the network carried, over workers whose links ``tc tbf`` limits.

Head and two workers are hosts of their own for the plan: network namespaces on one machine, which worker_speed.py makes. The collection plans; the
programs of that plan are started by hand, each in its namespace. Measured are a head alone, workers without a cache, with an empty one, with a full
one, with one that was filled from a copy of the model on the worker's host, and with one that the head filled through instances on the staging
ports, all at once. The filling is timed by itself: while it goes on, an old head may serve.

The known-answer model is written once. Its gate and up matrices are the same in all layers, so that a cache has them once.

All that is measured runs before other programs, with a priority of real time. Needs root for that and for namespaces, and three times the model on
the disk and in memory. Prints what it does, and in the last line RESULT and a JSON object.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/load.py --programs FOLDER [--mib 4000] [--width 4096] [--rate 1gbit]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import worker_speed
from ansible_collections.llamacpp.cluster.plugins.module_utils.apply import seeding
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import known_answer, transfer
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import known_answer_file
from first_run import machine
from gpu_speed import asked
from worker_speed import BRIDGE, WORKERS, first, network, play, process, with_program

NO_LIMIT = 3600.0
HEAD_PORT, WORKER_PORT = 18202, 51211
ROUNDS = 2


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def written(work: Path, mib: int, width: int) -> Path:
    """The model, of about so many MiB."""
    layers = max(2, round(mib * MIB / (known_answer.summary(1, width, "f16")["layer_bytes"][0])))
    path = work / known_answer.file_name(layers, width, "f16")
    known_answer_file.write(path, layers, width, "f16")
    return path


def planned(work: Path, model: Path, used: tuple[str, ...]) -> dict:
    """The plan over these workers."""
    variables = {
        "llama_model_path": str(model),
        "llama_server_port": HEAD_PORT,
        "llama_server_staging_port": HEAD_PORT + 100,
        "llama_worker_endpoints": [
            {"name": "cpu", "port": WORKER_PORT, "staging_port": WORKER_PORT + 100, "cache": True}
        ],
    }
    return play("playbooks/plan.yml", work, used, variables)[1]


def carried() -> list[int]:
    """Bytes that went to each worker."""
    folder = Path("/sys/class/net")
    return [int((folder / f"{BRIDGE}{index}/statistics/tx_bytes").read_text()) for index in range(len(WORKERS))]


def grown(before: list[int]) -> list[float]:
    """MiB that went to each worker since."""
    return [(after - start) / MIB for start, after in zip(before, carried())]


def own(plan: dict) -> dict[str, dict]:
    """Name of each host → its worker, of those that have layers."""
    return {name: worker for name, host in plan["hosts"].items() for worker in host["workers"] if worker["used"]}


class Bench:
    """What does not change from one case to the next."""

    def __init__(self, work: Path, programs: Path, model: Path, plans: dict[str, dict]) -> None:
        self.work, self.programs, self.model, self.plans = work, programs, model, plans
        self.log = work / "log"

    def cache(self, name: str) -> Path:
        return self.work / f"cache-{name}"

    def argv(self, name: str, argv: list[str]) -> list[str]:
        return ["ip", "netns", "exec", f"{BRIDGE}-{name}", *with_program(argv, self.programs)]

    @contextmanager
    def workers(self, cached: bool, port: int = WORKER_PORT) -> Iterator[None]:
        with ExitStack() as stack:
            for name, worker in own(self.plans["workers"]).items():
                address = worker["listens"].split(":")[0]
                argv = [str(port) if word == str(WORKER_PORT) else word for word in worker["argv"]]
                argv = argv if cached else [word for word in argv if word != "-c"]
                environment = {**worker["environment"], "LLAMA_CACHE": str(self.cache(name))}
                stack.enter_context(process(self.argv(name, argv), environment, f"{address}:{port}", None, self.log))
            yield

    def head(self, plan: dict) -> float:
        """Seconds until it is healthy; it has to say the sentence."""
        head = plan["head"]
        argv, address = with_program(head["argv"], self.programs), f"127.0.0.1:{head['port']}"
        with process(argv, head["environment"], address, "/health", self.log) as seconds:
            answer = asked(head["port"], {"prompt": "", "n_predict": 64, "temperature": 0})["content"]
            assert known_answer.SENTENCE in answer, answer
            return seconds

    def load(self, cached: bool) -> dict:
        """One start over the workers, with what it sent them."""
        with self.workers(cached):
            before = carried()
            seconds = self.head(self.plans["workers"])
            return {"seconds": seconds, "mib": grown(before)}

    def clear(self) -> None:
        for name in WORKERS:
            shutil.rmtree(self.cache(name), ignore_errors=True)

    def wanted(self, worker: dict) -> list[seeding.Tensor]:
        return seeding.describe(str(self.model), seeding.names_of(worker["seed"]["tensors"]))

    def from_copy(self) -> dict:
        """Seconds in which every worker's cache is filled from the model on its host, one after the other: it is one disk here."""
        before, started = carried(), time.monotonic()
        for name, worker in own(self.plans["workers"]).items():
            filled = self.worker(name, worker)
            lacking = seeding.missing(filled, self.wanted(worker))
            seeding.give_here(
                filled, str(self.model), seeding.copies(str(self.model), lacking), time.monotonic() + NO_LIMIT
            )
            assert not seeding.missing(filled, self.wanted(worker))
        return {"seconds": time.monotonic() - started, "mib": grown(before)}

    def worker(self, name: str, worker: dict) -> seeding.Worker:
        given = {**worker, "environment": {**worker["environment"], "LLAMA_CACHE": str(self.cache(name))}}
        return seeding.worker_of(
            {**given, "seed": {**worker["seed"], "argv": with_program(worker["seed"]["argv"], self.programs)}}
        )

    def from_head(self) -> dict:
        """Seconds in which the head fills all caches at once, and what the network carried."""
        port = WORKER_PORT + 100
        with self.workers(True, port):
            targets = []
            for name, worker in own(self.plans["workers"]).items():
                lacking = seeding.missing(self.worker(name, worker), self.wanted(worker))
                targets.append((f"{worker['listens'].split(':')[0]}:{port}", worker["seed"]["fork"], lacking))
            before, started = carried(), time.monotonic()
            answers = seeding.send(str(self.model), targets, started + NO_LIMIT)
            seconds = time.monotonic() - started
            failed = [str(answer) for answer in answers.values() if isinstance(answer, seeding.SeedError)]
            assert not failed, failed
            return {"seconds": seconds, "mib": grown(before)}


def measured(bench: Bench) -> dict:
    """Case → what it took. Each begins with the model in memory, as after a download, and with new programs."""
    cases: dict = {"alone": {"seconds": bench.head(bench.plans["alone"])}}
    say(f"alone: {cases['alone']}")
    cases["no cache"] = bench.load(cached=False)
    say(f"no cache: {cases['no cache']}")
    bench.clear()
    cases["empty cache"] = bench.load(cached=True)
    say(f"empty cache: {cases['empty cache']}")
    cases["full cache"] = bench.load(cached=True)
    say(f"full cache: {cases['full cache']}")
    bench.clear()
    filling = bench.from_copy()
    cases["filled from a copy"] = {"filling": filling, **bench.load(cached=True)}
    say(f"filled from a copy: {cases['filled from a copy']}")
    bench.clear()
    filling = bench.from_head()
    cases["filled by the head"] = {"filling": filling, **bench.load(cached=True)}
    say(f"filled by the head: {cases['filled by the head']}")
    bench.clear()
    return cases


def result(rounds: list[dict], plan: dict, arguments: argparse.Namespace, model: Path) -> dict:
    """Medians of all rounds."""

    def median(values: list) -> object:
        if isinstance(values[0], dict):
            return {key: median([value[key] for value in values]) for key in values[0]}
        if isinstance(values[0], list):
            return [median(list(column)) for column in zip(*values)]
        return round(statistics.median(values), 2)

    cases = median(rounds)
    assert isinstance(cases, dict)
    alone = cases["alone"]["seconds"]
    return {
        "machine": machine(),
        "link": " ".join(worker_speed.TBF),
        "release": plan["release"]["ref"],
        "model_mib": model.stat().st_size // MIB,
        "large_tensors_mib": [worker["seed"]["bytes"] // MIB for worker in own(plan).values()],
        "threshold_mib": transfer.THRESHOLD // MIB,
        "rounds": len(rounds),
        "load_average": os.getloadavg()[0],
        "cases": cases,
        "ratio_to_alone": {name: round(case["seconds"] / alone, 2) for name, case in cases.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--programs", type=Path, required=True, help="folder with llama-server and the worker's program"
    )
    parser.add_argument("--mib", type=int, default=4000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rate", default=worker_speed.RATE)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--work", type=Path, help="where model and caches go; a temporary folder where it is not given")
    arguments = parser.parse_args()
    sys.argv[1:] = []
    worker_speed.TBF = ("tbf", "rate", arguments.rate, *worker_speed.TBF[3:])
    work = Path(tempfile.mkdtemp(prefix="llamacpp-benchmark-", dir=arguments.work))
    try:
        model = written(work, arguments.mib, arguments.width)
        with network():
            plans = {"alone": planned(work, model, ()), "workers": planned(work, model, WORKERS)}
            bench = Bench(work, arguments.programs, model, plans)
            with first():
                rounds = [measured(bench) for _round in range(arguments.rounds)]
        print("RESULT", json.dumps(result(rounds, plans["workers"], arguments, model)))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}: {error.stderr}")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()

"""Seconds from the start of llama-server to its health, and what the network carried, over workers whose links ``tc tbf`` limits.

Head and two workers are hosts of their own for the plan: network namespaces on one machine, which worker_speed.py makes. The collection plans; the
programs of that plan are started by hand, each in its namespace. The cases are a head alone as llama-server starts by itself (it maps the file),
a head alone that reads the file into memory, workers without a cache, with an empty one, with a full one, and with one that was filled from a copy
of the model on the worker's host. The filling is timed by itself: while it goes on, an old head may serve.

The known-answer model is written once. Its gate and up matrices are the same in all layers, so that a cache has them once.

All that is measured runs before other programs, with a priority of real time. Needs root for that and for namespaces, and three times the model on
the disk and in memory. Prints what it does, and in the last line RESULT and a JSON object. With --work the folder stays, and another call goes on
where one ended: a case that is there for all rounds is not measured again. --only takes some of the cases.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/load.py --programs FOLDER [--fast] [--work FOLDER] [--only CASE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import worker_speed
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from first_run import machine
from gpu_speed import asked
from worker_speed import BRIDGE, WORKERS, first, network, play, process, with_program

HEAD_PORT, WORKER_PORT = 18202, 51211
ROUNDS = 2
ALONE = "alone"
IN_MEMORY = "none"
"""Load mode of a head alone that reads the model into memory, as workers have to."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def written(work: Path, mib: int, width: int) -> Path:
    """The model, of about so many MiB."""
    layers = max(2, round(mib * MIB / (known_answer.summary(1, width, "f16")["layer_bytes"][0])))
    path = work / known_answer.file_name(layers, width, "f16")
    if not path.exists():
        started, part = time.monotonic(), path.with_suffix(".part")
        known_answer_file.write_model(part, layers, width, "f16")
        part.rename(path)
        say(f"model written: {time.monotonic() - started:.0f} s")
    return path


def planned(work: Path, model: Path, used: tuple[str, ...], variables: dict) -> dict:
    """The plan over these workers."""
    endpoint = {"name": "cpu", "port": WORKER_PORT, "cache": True}
    common = {"llama_model_path": str(model), "llama_server_port": HEAD_PORT, "llama_worker_endpoints": [endpoint]}
    return play("playbooks/plan.yml", work, used, {**common, **variables})[1]


def plans_of(work: Path, model: Path, variables: dict) -> dict[str, dict]:
    """Name of a cluster → its plan: over both workers, and alone in each load mode that is compared."""
    over = planned(work, model, WORKERS, variables)
    plans = {"workers": over, ALONE: planned(work, model, (), variables)}
    for mode in dict.fromkeys([IN_MEMORY, over["head"]["load_mode"] or IN_MEMORY]):
        plans[f"{ALONE}, {mode}"] = planned(work, model, (), {**variables, "llama_server_load_mode": mode})
    return plans


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


def large_mib(worker: dict) -> int:
    """Of its tensors that caches keep."""
    return sum(row["bytes"] * len(row["layers"] or [0]) for row in worker["prefill"]["tensors"]) // MIB


class Bench:
    """What does not change from one case to the next."""

    def __init__(self, work: Path, programs: Path, model: Path, plans: dict[str, dict]) -> None:
        self.work, self.programs, self.model, self.plans = work, programs, model, plans
        self.log = work / "log"

    def cache(self, name: str) -> Path:
        return self.work / f"cache-{name}"

    def argv(self, name: str, argv: list[str]) -> list[str]:
        return ["ip", "netns", "exec", f"{BRIDGE}-{name}", *with_program(argv, self.programs)]

    def environment(self, planned: dict[str, str]) -> dict[str, str]:
        """Of a program: it finds its libraries beside it."""
        return {**planned, "LD_LIBRARY_PATH": str(self.programs)}

    @contextmanager
    def workers(self, cached: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for name, worker in own(self.plans["workers"]).items():
                address = worker["listens"].split(":")[0]
                argv = [word for word in worker["argv"] if cached or word != "-c"]
                environment = self.environment({**worker["environment"], "LLAMA_CACHE": str(self.cache(name))})
                stack.enter_context(
                    process(self.argv(name, argv), environment, f"{address}:{WORKER_PORT}", None, self.log)
                )
            yield

    def head(self, plan: dict) -> float:
        """Seconds until it is healthy; it has to say the sentence."""
        head = plan["head"]
        argv, address = with_program(head["argv"], self.programs), f"127.0.0.1:{head['port']}"
        os.sync()  # what was written before is no work of the disk meanwhile
        with process(argv, self.environment(head["environment"]), address, "/health", self.log) as seconds:
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

    def from_copy(self) -> dict:
        """Seconds in which every worker's cache is filled from the model on its host, one after the other: it is one disk here."""
        before, started = carried(), time.monotonic()
        for name, worker in own(self.plans["workers"]).items():
            cache_prefill.fill_cache(self.worker(name, worker))
        return {"seconds": time.monotonic() - started, "mib": grown(before)}

    def worker(self, name: str, worker: dict) -> cache_prefill.WorkerCache:
        environment = self.environment({**worker["environment"], "LLAMA_CACHE": str(self.cache(name))})
        prefill = {**worker["prefill"], "argv": with_program(worker["prefill"]["argv"], self.programs)}
        return typed_json.parse(
            cache_prefill.WorkerCache, {"name": worker["name"], "environment": environment, "prefill": prefill}
        )

    def from_nothing(self, cached: bool) -> dict:
        self.clear()
        return self.load(cached)

    def from_full(self) -> dict:
        """With what a load before has left; where that was not measured, with a copy of it."""
        workers = own(self.plans["workers"]).items()
        if any(cache_prefill.missing_tensors(self.worker(name, worker)) for name, worker in workers):
            self.from_copy()
        return self.load(cached=True)

    def filled(self, fill: Callable[[], dict]) -> dict:
        self.clear()
        return {"filling": fill(), **self.load(cached=True)}

    def cases(self) -> dict[str, Callable[[], dict]]:
        """Case → what measures it. Each begins with the model in memory, as after a download, and with new programs."""
        alone = [name for name in self.plans if name.startswith(ALONE)]
        return {
            **{name: lambda name=name: {"seconds": self.head(self.plans[name])} for name in alone},
            "no cache": lambda: self.from_nothing(cached=False),
            "empty cache": lambda: self.from_nothing(cached=True),
            "full cache": self.from_full,
            "filled from a copy": lambda: self.filled(self.from_copy),
        }


Rounds = dict[str, list[dict]]
"""Case → what it took, once for each round."""


def measure(bench: Bench, only: list[str] | None, rounds: int, kept: Path) -> Rounds:
    """Measures what ``kept`` lacks, and keeps it after each case."""
    took: Rounds = json.loads(kept.read_text()) if kept.exists() else {}
    cases = bench.cases()
    unknown = set(only or ()) - set(cases)
    if unknown:
        sys.exit(f"Unknown cases in --only: {sorted(unknown)}. Known cases: {list(cases)}")
    for number in range(rounds):
        for name in only or cases:
            if len(took.setdefault(name, [])) <= number:
                started = time.monotonic()
                took[name].append(cases[name]())
                kept.write_text(json.dumps(took))
                say(f"{name}: {took[name][-1]}, the whole case {time.monotonic() - started:.0f} s")
    return {name: took[name] for name in cases if took.get(name)}


def median(values: list) -> object:
    """The median of numbers; of lists and mappings, of each part."""
    if isinstance(values[0], dict):
        return {key: median([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], list):
        return [median(list(column)) for column in zip(*values)]
    return round(statistics.median(values), 2)


def result(took: Rounds, plan: dict, arguments: argparse.Namespace, model: Path) -> dict:
    """Medians of all rounds."""
    cases: dict = {name: median(values) for name, values in took.items()}
    alone = {name: case["seconds"] for name, case in cases.items() if name.startswith(ALONE)}
    return {
        "machine": machine(),
        "link": " ".join(worker_speed.TBF),
        "release": plan["release"]["ref"],
        "fast_load": arguments.fast,
        "head_load_mode": plan["head"]["load_mode"] or "llama-server's default",
        "model_mib": model.stat().st_size // MIB,
        "large_tensors_mib": [large_mib(worker) for worker in own(plan).values()],
        "threshold_mib": rpc_upload.CACHE_THRESHOLD // MIB,
        "rounds": min(len(values) for values in took.values()),
        "load_average": os.getloadavg()[0],
        "cases": cases,
        "ratio": {
            base: {name: round(case["seconds"] / seconds, 2) for name, case in cases.items() if name not in alone}
            for base, seconds in alone.items()
        },
    }


def check_settings(work: Path, arguments: argparse.Namespace) -> None:
    """Ends where the folder's figures are of another model, link or release."""
    path, settings = work / "settings.json", [arguments.mib, arguments.width, arguments.rate, arguments.fast]
    settings.append(str(arguments.programs.resolve()))
    if path.exists() and json.loads(path.read_text()) != settings:
        sys.exit(f"--work {work} has figures for other settings, {path.read_text()}: use another folder")
    path.write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--programs", type=Path, required=True, help="folder that contains llama-server and the worker program"
    )
    parser.add_argument("--fast", action="store_true", help="the programs have the patch of llama_build_fast_load")
    parser.add_argument("--mib", type=int, default=4000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rate", default=worker_speed.RATE)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--work", type=Path, help="folder for model, caches and figures; default: a temporary folder")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="run only these cases")
    arguments = parser.parse_args()
    sys.argv[1:] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated."))  # so that namespaces and programs go
    worker_speed.TBF = ("tbf", "rate", arguments.rate, *worker_speed.TBF[3:])
    work = arguments.work or Path(tempfile.mkdtemp(prefix="llamacpp-benchmark-"))
    work.mkdir(parents=True, exist_ok=True)
    check_settings(work, arguments)
    try:
        model = written(work, arguments.mib, arguments.width)
        with network():
            plans = plans_of(work, model, {"llama_build_fast_load": True} if arguments.fast else {})
            say("planned")
            with first():
                bench = Bench(work, arguments.programs.resolve(), model, plans)
                took = measure(bench, arguments.only, arguments.rounds, work / "measured.json")
        print("RESULT", json.dumps(result(took, plans["workers"], arguments, model)))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}: {error.stderr}")
    finally:
        if not arguments.work:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()

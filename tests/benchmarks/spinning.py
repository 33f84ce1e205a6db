"""Measures tokens per second of workers on processors, by how long their threads spin before they sleep (GOMP_SPINCOUNT), with and without neighbours.

Writes a known-answer model. In each case, each value of GOMP_SPINCOUNT has its own llama-server and workers. All of them run, and requests alternate, so
that one computes while the others sleep.

Needs five times the memory of the model, but not Ansible. Prints each case and one JSON object; the table in docs/performance.md comes from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/spinning.py --programs releases/A/bin --work /dev/shm
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer_file
from fast_load import WORKER_PROGRAMS, health, listens, running
from first_run import machine

SPINS = ("", "1000", "10000", "100000")
PORT = 21200
"""Below those that the kernel gives to clients, of which there are many here."""
BUSY = "while True: pass"


class Case(NamedTuple):
    workers: int
    threads: int
    cores: int = 0
    """On so many only; 0 is all."""
    neighbours: int = 0
    """Processes that compute without an end."""
    tokens: int = 32


def cases(cores: int) -> dict[str, Case]:
    return {
        "one worker, all cores": Case(1, cores),
        "two workers, half of the cores each": Case(2, cores // 2),
        "two workers, all cores each": Case(2, cores),
        "one worker, all cores, a neighbour on one": Case(1, cores, neighbours=1, tokens=6),
        "one worker, all cores, neighbours on a quarter": Case(1, cores, neighbours=cores // 4, tokens=6),
        "one worker on two cores": Case(1, 2, cores=2, tokens=8),
        "two workers on two cores, each with two threads": Case(2, 2, cores=2, tokens=8),
    }


def tokens_per_s(port: int, tokens: int) -> float:
    question = {"prompt": "", "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/completion", json.dumps(question), {"Content-Type": "application/json"})
    return round(json.load(connection.getresponse())["timings"]["predicted_per_second"], 1)


def measured(options: argparse.Namespace, model: Path, case: Case) -> dict[str, list[float]]:
    """Value of GOMP_SPINCOUNT → tokens per second."""
    log = model.with_name("log")
    log.unlink(missing_ok=True)
    pinned = ["taskset", "-c", f"0-{case.cores - 1}"] if case.cores else []
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ports = {}
        for place, spin in enumerate(options.spins):
            own = {"LD_LIBRARY_PATH": str(options.programs), **({"GOMP_SPINCOUNT": spin} if spin else {})}
            endpoints = []
            for index in range(case.workers):
                port = PORT + 10 * place + 1 + index
                program = next(
                    options.programs / name for name in WORKER_PROGRAMS if (options.programs / name).exists()
                )
                argv = [*pinned, str(program), "-H", "127.0.0.1", "-p", str(port), "-d", "CPU", "-t", str(case.threads)]
                stack.enter_context(running(argv, own, lambda port=port: listens(port), log))
                endpoints.append(f"127.0.0.1:{port}")
            ports[spin] = PORT + 10 * place
            argv = [*pinned, str(options.programs / "llama-server"), "-m", str(model), "-c", "512", "-np", "1"]
            argv += ["-ngl", "99", "--rpc", ",".join(endpoints), "-t", "1", "-tb", "1", "-fit", "off", "--no-warmup"]
            argv += ["--device", ",".join(f"RPC{index}" for index in range(case.workers))]
            argv += ["--host", "127.0.0.1", "--port", str(ports[spin])]
            plain = {"LD_LIBRARY_PATH": str(options.programs)}
            stack.enter_context(running(argv, plain, lambda port=ports[spin]: health(port), log))
        for _neighbour in range(case.neighbours):
            stack.callback(subprocess.Popen([sys.executable, "-c", BUSY]).kill)
        for run in range(options.runs + 1):
            turn = list(ports.items())
            for spin, port in turn if run % 2 else reversed(turn):
                found.setdefault(spin or "unset", []).append(tokens_per_s(port, case.tokens))
    return {spin: speeds[1:] for spin, speeds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--work", type=Path, help="folder for the model")
    parser.add_argument("--spins", nargs="+", default=SPINS)
    parser.add_argument("--runs", type=int, default=12)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        model = Path(folder) / "model.gguf"
        known_answer_file.write_model(model, 16, 2048, "f16")
        for name, case in cases(len(os.sched_getaffinity(0))).items():
            found = measured(options, model, case)
            row = {
                spin: [statistics.median(speeds), min(speeds), max(speeds), *speeds] for spin, speeds in found.items()
            }
            print(json.dumps({name: row}), file=sys.stderr, flush=True)
            rows.append({"case": name, **{spin: found[:3] for spin, found in row.items()}})
    print(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()

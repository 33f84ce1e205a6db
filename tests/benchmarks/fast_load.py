"""Compares the time from starting llama-server until it is healthy with llama.cpp's own ggml-rpc and with the collection's patch (llama_build_fast_load).

Writes a known-answer model. Then starts the two builds of each release alternately: llama-server alone, and with a worker on loopback that has no cache,
an empty cache, and the same cache again. After each start the model must answer with its sentence. Files are in the machine's memory, so this measures
the programs' own work, not a disk or a network.

Needs the Python packages gguf and numpy, twice the size of the model in the folder, and as much memory, but not Ansible. Prints each start and one JSON
object; the figures in docs/performance.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/fast_load.py --plain releases/A/bin --fast releases/B/bin --work /dev/shm
"""

from __future__ import annotations

import argparse
import http.client
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

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file

PORT = 41200
"""llama-server's; workers get the next ones."""
SECONDS_TO_START = 300
CASES = ("alone", "no cache", "cold", "warm")
WORKER_PROGRAMS = ("ggml-rpc-server", "rpc-server")


def health(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def listens(port: int) -> bool:
    """Without a connection, which would be the worker's first client."""
    wanted = f"0100007F:{port:04X}"
    return any(
        fields[1] == wanted and fields[3] == "0A"
        for fields in (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    )


@contextmanager
def running(argv: list[str], environment: dict[str, str], ready, log: Path) -> Iterator[float]:
    """A program, from its start on; gives the seconds until it was ready."""
    started = time.monotonic()
    with log.open("ab") as stream:
        process = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
    try:
        while not ready():
            if process.poll() is not None or time.monotonic() > started + SECONDS_TO_START:
                sys.exit(f"{argv!r} did not start: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.02)
        yield time.monotonic() - started
    finally:
        process.terminate()
        process.wait(60)


def sentence(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    question = {"prompt": "", "n_predict": len(known_answer.pieces()), "temperature": 0}
    connection.request("POST", "/completion", json.dumps(question), {"Content-Type": "application/json"})
    return json.load(connection.getresponse())["content"].strip()


def seconds_to_health(
    programs: tuple[Path, Path], model: Path, options: argparse.Namespace, cache: Path | bool | None
) -> float:
    """One start of llama-server; the answer has to be right.

    :param programs: folders of llama-server and of the worker.
    :param cache: folder of the worker's cache, None for a worker without one, False for llama-server alone.
    """
    head, worker = programs
    argv = [str(head / "llama-server"), "-m", str(model), "-c", "512", "-np", "1", "-ngl", "99", "--host", "127.0.0.1"]
    argv += ["--port", str(PORT), "-fa", "off", *options.head_argument]
    environment = {"LD_LIBRARY_PATH": str(head)}
    log = model.with_name("log")
    log.unlink(missing_ok=True)
    with ExitStack() as stack:
        if cache is False:
            argv += ["--device", "none" if options.device == "CPU" else options.device]
        else:
            for index in range(options.workers):
                program = next(worker / name for name in WORKER_PROGRAMS if (worker / name).exists())
                lent = [str(program), "-H", "127.0.0.1", "-p", str(PORT + 1 + index), "-d", options.device]
                own = {"LD_LIBRARY_PATH": str(worker)}
                if cache is not None:
                    lent, own = [*lent, "-c"], {**own, "LLAMA_CACHE": f"{cache}{index}"}
                stack.enter_context(running(lent, own, lambda port=PORT + 1 + index: listens(port), log))
            endpoints = ",".join(f"127.0.0.1:{PORT + 1 + index}" for index in range(options.workers))
            devices = ",".join(f"RPC{index}" for index in range(options.workers))
            argv += ["--rpc", endpoints, "--device", devices]
        seconds = stack.enter_context(running(argv, environment, lambda: health(PORT), log))
        said = sentence(PORT)
        if said != known_answer.SENTENCE:
            sys.exit(f"The model gives a wrong answer, {said!r}: {log.read_text(errors='replace')[-3000:]}")
    return seconds


def measured(
    name: str, programs: Path, model: Path, options: argparse.Namespace, found: dict[str, list[float]]
) -> None:
    """One round of a build."""
    cache = model.with_name(f"cache-{name}-")
    for case in options.cases:
        kept = {"alone": False, "no cache": None}.get(case, cache)
        seconds = seconds_to_health((programs, programs), model, options, kept)
        found.setdefault(f"{name}, {case}", []).append(seconds)
        print(f"{name}, {case}: {seconds:.1f} s", file=sys.stderr, flush=True)
    for index in range(options.workers):
        shutil.rmtree(f"{cache}{index}", ignore_errors=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", type=Path, nargs="+", required=True, help="folders of programs without the patch")
    parser.add_argument("--fast", type=Path, nargs="+", required=True, help="folders of programs with the patch")
    parser.add_argument("--work", type=Path, help="folder for the model and the caches")
    parser.add_argument("--model", type=Path, help="existing model to use instead of a generated model")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--device", default="CPU", help="device of the worker, and of llama-server alone")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--head-argument", action="append", default=[], help="argument of llama-server; repeatable")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        model = Path(folder) / "model.gguf"
        if options.model:
            shutil.copyfile(options.model, model)
        else:
            known_answer_file.write_model(model, options.layers, options.width, "f16")
        for _round in range(options.rounds):
            for index, pair in enumerate(zip(options.plain, options.fast)):
                for kind, programs in zip(("plain", "fast"), pair):
                    measured(f"{kind}-{index}", programs.resolve(), model, options, found)
        size = model.stat().st_size
    figures = {
        name: {
            "median": round(statistics.median(seconds), 2),
            "least": round(min(seconds), 2),
            "most": round(max(seconds), 2),
        }
        for name, seconds in found.items()
    }
    print(
        json.dumps(
            {"gb": round(size / 1e9, 2), "workers": options.workers, "device": options.device, "seconds": figures}
        )
    )


if __name__ == "__main__":
    main()

"""llama-bench on one and on two accelerators of this machine, by playbooks/benchmark.yml and by hand, in turns, and seconds to load over RPC.

llama-server drives the first accelerator itself, and the second is behind a worker. The benchmark has a split that gives the worker nothing, and
one that gives both the same, so one and two devices are loads of one matrix. By hand, the command lines that the collection measured with are started
by this script, with a worker of its own on another port.

Each result is written to --out as soon as it is there. After --until seconds no phase begins any more. Arguments that are not known here are
handed to ansible-playbook, as in: gpu_benchmark.py --device CUDA --out results -e @release.json
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import fast_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache, sources
from first_run import ROOT, machine

PORT, WORKER_PORT = 41300, 41301
LOADED = "loads.gguf"
FURTHER = 30
"""What is added to the ports of workers that are started by hand."""
MICRO_BATCH = 512
STARTS = 3
"""Of llama-bench in a round of the collection, after the first one: micro-batches that differ by one token are loads of their own."""
REPETITIONS = 10
PLAY_SECONDS = 120
NEEDED = {"load": 15, "hand": 15, "collection": 50}
"""Seconds that a phase is given at least."""
NEEDED_FIRST = ("models", "site.yml")
SPEEDS = {"n_prompt": "pp", "n_gen": "tg"}


class Results:
    """What is known so far, and when there is no time for more."""

    def __init__(self, folder: Path, until: float) -> None:
        self.folder, self._until, self._began = folder, until, time.monotonic()
        self.record: dict = {"machine": machine(), "collection": [], "by_hand": [], "load_s": {}, "phases": []}
        folder.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return self._until - (time.monotonic() - self._began)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:.1f} s] {text}", file=sys.stderr, flush=True)

    def keep(self) -> None:
        (self.folder / "table.md").write_text(table(self.record))
        (self.folder / "gpu.json").write_text(json.dumps({**self.record, "compared": compared(self.record)}, indent=1))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What ends with an error costs its own result alone; without a cluster nothing is measured."""
        began = time.monotonic()
        try:
            yield
        except (SystemExit, subprocess.SubprocessError, OSError, ValueError, KeyError, IndexError) as error:
            self.say(f"{name}: {type(error).__name__}: {error}")
            self.record["phases"].append([name, round(time.monotonic() - began, 1), str(error)[-300:]])
            if name in NEEDED_FIRST:
                self.keep()
                raise SystemExit(f"{name} failed") from error
        else:
            self.say(f"{name}: {time.monotonic() - began:.1f} s")
            self.record["phases"].append([name, round(time.monotonic() - began, 1), None])
        self.keep()


# -------------------------------------------------------------------------------------------------------------- cluster


def endpoints(device: str) -> list[dict]:
    """What the machine lends: the second accelerator, or its processor twice where this script is tried without accelerators."""
    second = {"name": "second", "port": WORKER_PORT}
    if device != "CPU":
        return [{**second, "device": f"{device}1"}]
    return [{"name": "first", "port": WORKER_PORT + 5}, second]


def write_inventory(work: Path, options: argparse.Namespace) -> Path:
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "ansible_remote_tmp": str(work / "tmp"),
        "ansible_async_dir": str(work / "async"),
        "llama_host_scope": "user",
        "llama_placement": "all",
        "llama_model_known_answer": {"layers": options.layers, "width": options.width, "type": "f16"},
        "llama_worker_endpoints": endpoints(options.device),
        "llama_server_port": PORT,
        "llama_server_parallel": 4,
        "llama_server_context": 8192,
        "llama_benchmark_programs": True,
        "llama_benchmark_repetitions": REPETITIONS,
        "llama_benchmark_vary": varied(options.device, [MICRO_BATCH]),
    }
    hosts = {"hosts": {"localhost": {}}}
    children = {"llama_head": hosts, "llama_workers": hosts}
    path = work / "inventory.yml"
    path.write_text(json.dumps({"llama_cluster": {"children": children, "vars": variables}}, indent=1))
    return path


def varied(device: str, micro_batches: list[int]) -> dict[str, list]:
    """Workers come first in a split, then the devices that llama-server drives."""
    return {
        "llama_server_tensor_split": [[1, 0] if device == "CPU" else [0, 1], [1, 1]],
        "llama_server_micro_batch": micro_batches,
    }


class Cluster:
    def __init__(self, work: Path, options: argparse.Namespace, results: Results) -> None:
        self.work, self.results, self._options = work, results, options
        self.own_devices = 0 if options.device == "CPU" else 1
        self._inventory = write_inventory(work, options)
        os.environ.setdefault("XDG_CACHE_HOME", str(work / "cache"))
        self.environment = {
            **os.environ,
            "XDG_DATA_HOME": str(work / "data"),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        }

    def play(self, playbook: str, **variables: object) -> None:
        """:raises ValueError: it failed."""
        settings = self.work / "settings.json"
        settings.write_text(json.dumps({"llama_plan_path": str(self.work / "plan.json"), **variables}))
        command = [str(Path(sys.executable).with_name("ansible-playbook")), playbook, "-i", str(self._inventory)]
        command += [*self._options.others, "-e", f"@{settings}"]
        log = self.results.folder / "playbooks.log"
        with log.open("a") as stream:
            process = subprocess.run(
                command, cwd=ROOT, env=self.environment, stdout=stream, stderr=stream, check=False, timeout=3600
            )
        if process.returncode:
            raise ValueError(f"{playbook} failed: {log.read_text()[-1500:]}")

    def install(self) -> None:
        self.play("site.yml")
        plan = self.plan()
        shutil.copyfile(self.work / "plan.json", self.results.folder / "plan.json")
        self.results.record["model"], self.results.record["release"] = plan["model"]["name"], plan["release"]["id"]

    def plan(self) -> dict:
        return json.loads((self.work / "plan.json").read_text())

    def benchmark(self, **variables: object) -> list[dict]:
        """The cells of llama-bench."""
        folder = self.work / "benchmark"
        self.play("playbooks/benchmark.yml", llama_benchmark_path=str(folder), **variables)
        record = json.loads((folder / "benchmark.json").read_text())
        cells = record["cells"]
        if not all(cell["measured"] for cell in cells):
            raise ValueError(f"not measured: {[cell['skipped'] for cell in cells if not cell['measured']]}")
        return cells

    def first_benchmark(self) -> None:
        page = self.work / "report.html"
        cells = self.benchmark(llama_report_path=str(page))
        for path in (*(self.work / "benchmark").iterdir(), page):
            shutil.copyfile(path, self.results.folder / path.name)
        self.results.record["collection"].append(starts_of(cells))
        self.results.record["argv"] = list({tuple(cell["argv"]): list(cell["argv"]) for cell in cells}.values())

    def further_benchmark(self) -> None:
        batches = [MICRO_BATCH + number for number in range(STARTS)]
        cells = self.benchmark(llama_benchmark_vary=varied(self._options.device, batches))
        self.results.record["collection"].append(starts_of(cells))


def starts_of(cells: list[dict]) -> list[dict]:
    """What each start of llama-bench measured, from the collection's cells."""
    return [
        {
            "devices": 2 - json.loads(cell["settings"]["llama_server_tensor_split"]).count(0),
            "test": cell["test"],
            "samples": cell["measured"]["samples"],
        }
        for cell in cells
    ]


# -------------------------------------------------------------------------------------------------------------- by hand


def by_hand(cluster: Cluster, micro_batch: int) -> list[dict]:
    """One start of llama-bench for each number of devices; the second device is behind a worker that is started for it."""
    head, record = cluster.plan()["head"], cluster.results.record
    workers = cluster.plan()["hosts"]["localhost"]["workers"]
    found = []
    for argv in record["argv"]:
        changed = elsewhere(argv)
        changed[changed.index("-ub") + 1] = str(micro_batch)
        with ExitStack() as stack:
            used = [worker for worker in workers if worker["endpoint"] in " ".join(argv)]
            for worker in used:
                port = int(worker["endpoint"].rsplit(":", 1)[1]) + FURTHER
                ready = functools.partial(fast_load.listens, port)
                log = cluster.work / "worker.log"
                stack.enter_context(fast_load.running(elsewhere(worker["argv"]), worker["environment"], ready, log))
            found += bench(changed, head["environment"], len(used) + cluster.own_devices)
    return found


def elsewhere(argv: list[str]) -> list[str]:
    """The same command line with the workers on other ports."""
    return [
        re.sub(rf"\b({WORKER_PORT}|{WORKER_PORT + 5})\b", lambda found: str(int(found[0]) + FURTHER), word)
        for word in argv
    ]


def bench(argv: list[str], environment: dict[str, str], devices: int) -> list[dict]:
    """What llama-bench says of each test."""
    process = subprocess.run(
        argv, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=PLAY_SECONDS
    )
    rows = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return [
        {"devices": devices, "test": f"{name}{row[key]}", "samples": row["samples_ts"]}
        for row in rows
        for key, name in SPEEDS.items()
        if row[key]
    ]


def compared(record: dict) -> list[dict]:
    """A row for each number of devices and test: tokens per second as the median of the starts, each with the mean of its samples."""
    rows = []
    keys = {(start["devices"], start["test"]): None for starts in record["collection"] for start in starts}
    for devices, test in keys:
        means = {
            who: [
                statistics.mean(start["samples"])
                for starts in record[who]
                for start in starts
                if (start["devices"], start["test"]) == (devices, test)
            ]
            for who in ("collection", "by_hand")
        }
        row = {"devices": devices, "test": test}
        for who, figures in means.items():
            if figures:
                row[who] = {"median": statistics.median(figures), "least": min(figures), "most": max(figures)}
                row[who]["starts"] = len(figures)
        if all(means.values()):
            row["ratio"] = row["collection"]["median"] / row["by_hand"]["median"]
        rows.append(row)
    return rows


def table(record: dict) -> str:
    lines = ["| devices | test | by the collection | by hand | ratio |", "|---|---|---|---|---|"]
    for row in compared(record):
        shown = [
            "{median:.1f} ({least:.1f} to {most:.1f}, {starts} starts)".format(**row[who]) if who in row else ""
            for who in ("collection", "by_hand")
        ]
        ratio = f"{row['ratio']:.4f}" if "ratio" in row else ""
        lines.append(f"| {row['devices']} | {row['test']} | {shown[0]} | {shown[1]} | {ratio} |")
    lines += ["", "| llama-server, from start to health | seconds |", "|---|---|"]
    lines += [
        f"| {case} | {', '.join(f'{second:.1f}' for second in seconds)} |" for case, seconds in record["load_s"].items()
    ]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------------------- main


def write_served(options: argparse.Namespace) -> None:
    """Writes the model that is served; the playbooks find it in the cache."""
    size = (options.layers, options.width, "f16")
    path = cache.folder("models", sources.KNOWN_ANSWER) / f"{known_answer.FORM}-{known_answer.file_name(*size)}"
    known_answer_file.write(path, *size)
    path.with_name(path.name + ".sha256").write_text(sources.sha256(path) + "\n")


def measure_loads(cluster: Cluster, options: argparse.Namespace) -> None:
    """Starts of llama-server, alone with the second device and with a worker for it, by the programs of the release."""
    programs = Path(cluster.plan()["head"]["argv"][0]).parent
    device = "CPU" if options.device == "CPU" else f"{options.device}1"
    given = argparse.Namespace(device=device, workers=1, head_argument=[], release=programs, cases=())
    found: dict[str, list[float]] = {}
    for case in fast_load.CASES:
        if cluster.results.left() > NEEDED["load"]:
            given.cases = (case,)
            fast_load.measured("release", cluster.work / LOADED, given, found)
            cluster.results.record["load_s"].update(found)
            cluster.results.keep()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="CUDA", help="CUDA, or CPU to try this script without accelerators")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    parser.add_argument("--work", type=Path, help="folder for installations and models")
    parser.add_argument("--until", type=float, default=3600, help="seconds after which no phase begins")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--load-layers", type=int, default=38, help="of the model whose load is measured")
    options, others = parser.parse_known_args()
    options.others = others
    return options


def in_turns(cluster: Cluster, results: Results) -> None:
    """By hand and by the collection as long as there is time."""
    while "argv" in results.record:
        for number in range(STARTS):
            if results.left() < NEEDED["hand"]:
                return
            with results.phase("by hand"):
                results.record["by_hand"].append(by_hand(cluster, MICRO_BATCH + number))
        if results.left() < NEEDED["collection"]:
            return
        with results.phase("by the collection"):
            cluster.further_benchmark()


def main() -> None:
    options = arguments()
    results = Results(options.out, options.until)
    work = Path(tempfile.mkdtemp(prefix="llamacpp-benchmark-", dir=options.work))
    cluster = Cluster(work, options, results)
    try:
        with results.phase("models"):
            write_served(options)
        with results.phase("site.yml"), ThreadPoolExecutor(1) as pool:
            size = (options.load_layers, options.width, "f16")
            written = pool.submit(known_answer_file.write, work / LOADED, *size) if options.load_layers else None
            cluster.install()
            if written:
                written.result()
        with results.phase("benchmark.yml"):
            cluster.first_benchmark()
        if "argv" in results.record:
            with results.phase("by hand"):
                results.record["by_hand"].append(by_hand(cluster, MICRO_BATCH))
        if options.load_layers:
            with results.phase("loads"):
                measure_loads(cluster, options)
        in_turns(cluster, results)
    finally:
        print(table(results.record), flush=True)
        with results.phase("teardown"):
            cluster.play("playbooks/teardown.yml")
            shutil.rmtree(work)


if __name__ == "__main__":
    main()

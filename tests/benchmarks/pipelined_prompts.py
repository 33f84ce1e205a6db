"""Measures prompts through one worker and two, without llama.cpp's pipeline and with several batch sizes, and compares them with the plan's predictions.

Writes a known-answer model. llama-server puts all layers on workers of this machine, each on its own cores, and is restarted for each case. The cases
alternate: `one` worker, two workers with the pipeline `off` (an override that matches no tensor), two with -b 512 -ub 512, and two with BATCH/MICRO-BATCH.
The plan assumes the device speed that `one` showed, and a link without cost.

Does not need Ansible. Prints one JSON object; the table in docs/performance.md comes from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/pipelined_prompts.py --programs releases/A/bin --cores 0-7 8-15
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, prompts
from fast_load import PORT, WORKER_PROGRAMS, health, listens, running
from first_run import machine

LENGTHS = (2048, 4096)
ONE, OFF, BASE = "one", "off", "512/512"
CONTEXT = "llama.context_length=int:8192"


def pinned(cores: str, argv: list[str]) -> list[str]:
    return ["taskset", "-c", cores, *argv] if cores else argv


def prompt_s(tokens: int) -> float:
    """Seconds that llama-server took for such a prompt."""
    words = [known_answer.first_piece_token() + index % len(known_answer.pieces()) for index in range(tokens)]
    question = {"prompt": words, "n_predict": 1, "cache_prompt": False}
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=600)
    connection.request("POST", "/completion", json.dumps(question), {"Content-Type": "application/json"})
    timings = json.load(connection.getresponse())["timings"]
    assert timings["prompt_n"] == tokens, timings
    return timings["prompt_ms"] / 1000


def measured(options: argparse.Namespace, model: Path, cell: str, flash: str) -> dict[int, list[float]]:
    """Length of a prompt → seconds, in one start."""
    log = model.with_name("log")
    log.unlink(missing_ok=True)
    own = {"LD_LIBRARY_PATH": str(options.programs), "GOMP_SPINCOUNT": "1000"}
    with ExitStack() as stack:
        endpoints = []
        for index, (cores, device) in enumerate(list(zip(options.cores, options.devices))[: 1 if cell == ONE else 2]):
            port = PORT + 1 + index
            program = next(options.programs / name for name in WORKER_PROGRAMS if (options.programs / name).exists())
            argv = [str(program), "-H", "127.0.0.1", "-p", str(port), "-d", device, "-t", str(options.threads)]
            stack.enter_context(running(pinned(cores, argv), own, lambda port=port: listens(port), log))
            endpoints.append(f"127.0.0.1:{port}")
        batch, micro = (BASE if cell in (ONE, OFF) else cell).split("/")
        argv = [str(options.programs / "llama-server"), "-m", str(model), "-c", "4352", "-np", "1", "-ngl", "99"]
        argv += ["--rpc", ",".join(endpoints), "--device", ",".join(f"RPC{index}" for index in range(len(endpoints)))]
        argv += ["-ts", f"{options.layers // 2},{options.layers // 2 + 1}"] if cell != ONE else []
        argv += ["-b", str(batch), "-ub", str(micro), "-fa", flash, "-t", "1", "-tb", "1", "--override-kv", CONTEXT]
        argv += ["--host", "127.0.0.1", "--port", str(PORT), "--no-warmup", "-fit", "off", "-lv", "4"]
        argv += ["-ot", "nothing=CPU"] if cell == OFF else []
        stack.enter_context(running(pinned(options.head_cores, argv), own, lambda: health(PORT), log))
        found = {length: [prompt_s(length) for _run in range(options.runs + 1)][1:] for length in options.lengths}
    on = "pipeline parallelism enabled" in log.read_text(errors="replace")
    assert on == (cell not in (ONE, OFF)), f"{cell}: pipeline is {on}"
    return found


def planned_s(tokens: int, cell: str, one_s: float) -> float:
    """Seconds that the plan predicts, where each device is as fast as it was alone."""
    cost_model.VISIT_MS = 0
    rate = device_rates.Rate(1e9, 1.0, device_rates.TABLE_SOURCE, 0.0)
    link = cost_model.ASSUMED_LINKS["loopback"]._replace(gbit=1e9)
    count = 1 if cell == ONE else 2
    half = one_s / tokens * 1e9 / 2 / count
    works = [cost_model.ModelPart("", str(index), rate, 0, 0, half, 0, link) for index in range(count)]
    micro = (BASE if cell in (ONE, OFF) else cell).split("/")[1]
    return prompts.prompt_s(works, tokens, int(micro), cell != ONE)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--work", type=Path, help="folder for the model")
    parser.add_argument("--cores", nargs=2, default=("", ""), help="cores of each worker, in taskset's format")
    parser.add_argument("--head-cores", default="")
    parser.add_argument("--devices", nargs=2, default=("CPU", "CPU"))
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--type", default="f16")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--cells", nargs="+", default=[ONE, OFF, BASE, "2048/512", "2048/256", "2048/128"])
    parser.add_argument("--flash", nargs="+", default=["on", "off"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    seconds: dict[tuple[str, str, int], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        model = Path(folder) / "model.gguf"
        known_answer_file.write_model(model, options.layers, options.width, options.type)
        turns = [(flash, cell) for flash in options.flash for cell in options.cells]
        for turn in range(options.rounds):
            for flash, cell in turns if turn % 2 == 0 else reversed(turns):
                for length, found in measured(options, model, cell, flash).items():
                    seconds.setdefault((flash, cell, length), []).extend(found)
                    print(turn, flash, cell, length, [round(one, 3) for one in found], file=sys.stderr, flush=True)
    medians = {key: statistics.median(found) for key, found in seconds.items()}
    rows = []
    for (flash, cell, length), median in medians.items():
        base, one_s = medians[flash, BASE, length], medians[flash, ONE, length]
        row = {"flash": flash, "pieces": cell, "tokens": length, "seconds": round(median, 3)}
        ratios = {"to_base": base / median, "to_one": one_s / median}
        planned = planned_s(length, cell, one_s)
        ratios |= {"planned_to_base": planned_s(length, BASE, one_s) / planned, "planned_to_one": one_s / planned}
        rows.append({**row, **{name: round(ratio, 3) for name, ratio in ratios.items()}})
    print(
        json.dumps({"machine": machine(), "model": f"{options.layers} x {options.width} {options.type}", "rows": rows})
    )


if __name__ == "__main__":
    main()

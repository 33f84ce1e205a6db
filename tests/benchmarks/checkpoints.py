"""Measures prompts and generation for models with windows, states and compressed caches, in llama-server alone and over two workers, with and without
checkpoints of the context.

Writes models with published shapes, cut to a few layers. Starts llama-server anew for each row. llama-server splits a prompt where it makes checkpoints,
and fetches them from the devices.

Needs two accelerators and 10 GB in its folder, but not Ansible. Prints each start and one JSON object; the table in docs/performance.md comes from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/checkpoints.py --programs releases/A/bin --work /dev/shm
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import shapes
from fast_load import PORT, WORKER_PROGRAMS, health, listens, running
from first_run import machine

SHAPES = {
    "Gemma 3 27B, 12 layers": shapes.models.windowed(12, 5376, 32, 16, 128, 21504, 1024),
    "Qwen3 Next, 8 layers of 256 experts": shapes.next_hybrid(8, count=256),
    "MLA of 2048, 12 layers of 64 experts": shapes._latent(2048, 20, 768, 1536, 64, 4, 12),
    "MLA of 7168, 4 layers of 32 experts": shapes._latent(7168, 128, 1536, 2048, 32, 8, 4),
    "Llama 3 8B, 16 layers": shapes.models.dense(16, 4096, 32, 8, 128, 14336),
}
WITH = 32
LENGTHS = {512: 7, 2048: 5, 4096: 4}
TOKENS, RUNS = 96, 4
CONTEXT = 8192


def answer(question: dict) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    connection.request("POST", "/completion", json.dumps(question), {"Content-Type": "application/json"})
    return json.load(connection.getresponse())["timings"]


def figures() -> dict[str, list[float]]:
    """What is measured → tokens per second."""
    found = {}
    for length, runs in LENGTHS.items():
        speeds = []
        for run in range(runs):
            words = [300 + (7 * index + 131 * run) % 1500 for index in range(length)]
            timings = answer({"prompt": words, "n_predict": 1, "cache_prompt": False})
            assert timings["prompt_n"] == length, timings
            speeds.append(round(timings["prompt_per_second"], 1))
        found[f"prompt {length}"] = speeds[1:]
    question = {"prompt": [1, 300], "n_predict": TOKENS, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    found["generation"] = [round(answer(question)["predicted_per_second"], 1) for _run in range(RUNS)][1:]
    return found


def measured(options: argparse.Namespace, model: Path, devices: list[str], alone: bool, checkpoints: int) -> dict:
    log = model.with_name("log")
    log.unlink(missing_ok=True)
    own = {"LD_LIBRARY_PATH": str(options.programs)}
    with ExitStack() as stack:
        argv = [str(options.programs / "llama-server"), "-m", str(model), "-c", str(CONTEXT), "-np", "1", "-ngl", "99"]
        if alone:
            argv += ["--device", devices[0]]
        else:
            program = next(options.programs / name for name in WORKER_PROGRAMS if (options.programs / name).exists())
            for index, device in enumerate(devices):
                port = PORT + 1 + index
                lent = [str(program), "-H", "127.0.0.1", "-p", str(port), "-d", device]
                stack.enter_context(running(lent, own, lambda port=port: listens(port), log))
            argv += ["--rpc", f"127.0.0.1:{PORT + 1},127.0.0.1:{PORT + 2}", "--device", "RPC0,RPC1"]
        argv += ["--host", "127.0.0.1", "--port", str(PORT), "-fit", "off", "-lv", "5", "--cache-ram", "0"]
        argv += ["--ctx-checkpoints", str(checkpoints)]
        loaded = stack.enter_context(running(argv, own, lambda: health(PORT), log))
        found = figures()
    text = log.read_text(errors="replace")
    made = re.findall(r"created context checkpoint.*n_tokens = (\d+), size = ([0-9.]+) MiB", text)
    buffers = re.findall(r"(\S+) +compute buffer size = +([0-9.]+) MiB", text)
    return {"load_s": round(loaded, 1), "checkpoints": made[:12], "buffers": buffers[-4:], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--devices", nargs=2, default=["CUDA0", "CUDA1"])
    parser.add_argument("--work", type=Path, help="folder for the models")
    parser.add_argument("--models", type=Path, help="folder with models from --only-write")
    parser.add_argument("--only-write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        rows = []
        for index, (name, shape) in enumerate(SHAPES.items()):
            path = Path(options.models or folder, f"shape{index}.gguf")
            if not path.exists():
                shapes.write(path, shape, "q8_0", filled=True)
            if options.only_write:
                continue
            kept = name.startswith(("Gemma", "Qwen3 Next"))
            for alone in (True, False):
                for checkpoints in (WITH, 0) if kept else (WITH,):
                    began = time.monotonic()
                    row = {"model": name, "alone": alone, "checkpoints": checkpoints}
                    row["measured"] = measured(options, path, options.devices, alone, checkpoints)
                    row["seconds"] = round(time.monotonic() - began, 1)
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    rows.append(row)
            if not options.models:
                path.unlink()
    print(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()

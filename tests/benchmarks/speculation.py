"""Measures tokens per second without speculation, with n-grams and with a draft model, on two workers with ``-ts`` over loopback, for text that
repeats itself and for random text, and the share of predicted tokens that were accepted.

Requests alternate. Prints one JSON object; the figures in docs/performance.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/speculation.py --programs releases/A/bin
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from fast_load import WORKER_PROGRAMS
from first_run import machine
from gpu_speed import asked
from worker_speed import process

PORT = 53380
DRAFT = ["--model-draft", "{draft}", "--device-draft", "none", "--spec-type", "draft-simple"]
KINDS = {"none": [], "ngram-mod": ["--spec-type", "ngram-mod"], "draft-simple": DRAFT}
TEXTS = {
    "repeats": {"temperature": 0, "ignore_eos": True},
    "random": {"temperature": 100.0, "samplers": ["temperature"], "ignore_eos": True},
}


def measured(options: argparse.Namespace, folder: Path, kind: str) -> dict[str, dict]:
    """Text → tokens per second of each answer, and the share that was accepted."""
    own = {"LD_LIBRARY_PATH": str(options.programs), "GOMP_SPINCOUNT": "1000"}
    program = next(options.programs / name for name in WORKER_PROGRAMS if (options.programs / name).exists())
    ends = [f"127.0.0.1:{PORT + 1 + index}" for index in range(2)]
    argv = [str(options.programs / "llama-server"), "-m", str(folder / "model.gguf"), "-c", "4096", "-np", "1"]
    argv += ["--rpc", ",".join(ends), "--device", "RPC0,RPC1", "-ngl", "99", "-ts", "9,8", "--no-warmup", "-t", "1"]
    argv += ["--host", "127.0.0.1", "--port", str(PORT), "-fit", "off", "--cache-ram", "0"]
    argv += [word.format(draft=folder / "draft.gguf") for word in (*KINDS[kind], *options.more.split())]
    sentence = [known_answer.first_piece_token() + index for index in range(len(known_answer.pieces()))]
    found = {}
    with ExitStack() as stack:
        for end in ends:
            lent = [str(program), "-H", "127.0.0.1", "-p", end.split(":")[1], "-d", "CPU", "-t", "1"]
            stack.enter_context(process(lent, own, end, None, folder / "log"))
        stack.enter_context(process(argv, own, f"127.0.0.1:{PORT}", "/health", folder / "log"))
        for text, how in TEXTS.items():
            told = []
            for seed in range(options.runs + 1):  # the first one makes graphs and buffers
                question = {"prompt": 4 * sentence, "n_predict": options.tokens, "cache_prompt": False, "seed": seed}
                told.append(asked(PORT, {**question, **how})["timings"])
            drafted = sum(one.get("draft_n", 0) for one in told)
            share = sum(one.get("draft_n_accepted", 0) for one in told) / drafted if drafted else None
            speeds = [one["predicted_per_second"] for one in told[1:]]
            found[text] = {"speeds": speeds, "accepted": share, "drafted": drafted}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--more", default="", help="additional arguments of llama-server")
    options = parser.parse_args()
    rows: dict[tuple[str, str], dict] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known_answer_file.write_model(folder / "model.gguf", options.layers, options.width, "f16")
        known_answer_file.write_model(folder / "draft.gguf", 2, 128, "f16")
        for kind in options.rounds * list(KINDS):
            for text, found in measured(options, folder, kind).items():
                row = rows.setdefault((text, kind), {**found, "speeds": []})
                row["speeds"] += found["speeds"]
                print(text, kind, found, file=sys.stderr, flush=True)
    figures = [
        {
            **{"text": text, "kind": kind, "accepted": row["accepted"]},
            **{
                "median": round(statistics.median(row["speeds"]), 1),
                "spread": [min(row["speeds"]), max(row["speeds"])],
            },
        }
        for (text, kind), row in rows.items()
    ]
    print(json.dumps({"machine": machine(), "more": options.more, "rows": figures}))


if __name__ == "__main__":
    main()

"""Measures how long two conversations that alternate in one slot wait for an answer, with and without llama-server's prompt cache, over loopback and over
a link that ``tc tbf`` limits. Compares this with the plan's predictions.

Needs root for the network namespace, but not Ansible. Prints one JSON object; the figures in docs/performance.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/alternating.py --programs releases/A/bin
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from fast_load import WORKER_PROGRAMS
from first_run import machine
from gpu_speed import asked
from worker_speed import BRIDGE, NETWORK, RATE, WORKERS, network, process

PORT = 53370
LINKS = {"loopback": ("127.0.0.1", []), RATE: (f"{NETWORK}.11", ["ip", "netns", "exec", f"{BRIDGE}-{WORKERS[0]}"])}
MORE = 16
"""Tokens that each turn adds to its conversation."""


def answered_s(options: argparse.Namespace, model: Path, link: str, cache_mib: int) -> dict[str, float]:
    """Median seconds of a turn after the first of each conversation, and of those first ones."""
    address, inside = LINKS[link]
    own = {"LD_LIBRARY_PATH": str(options.programs), "GOMP_SPINCOUNT": "1000"}
    worker = next(options.programs / name for name in WORKER_PROGRAMS if (options.programs / name).exists())
    log, endpoint = model.with_name("log"), f"{address}:{PORT + 1}"
    lent = [*inside, str(worker), "-H", address, "-p", str(PORT + 1), "-d", "CPU"]
    argv = [str(options.programs / "llama-server"), "-m", str(model), "-c", str(2 * options.tokens), "-np", "1"]
    argv += ["--rpc", endpoint, "--device", "RPC0", "-ngl", "99", "--cache-ram", str(cache_mib), "--no-warmup"]
    argv += ["--host", "127.0.0.1", "--port", str(PORT), "-fit", "off"]
    pieces, first = len(known_answer.pieces()), known_answer.first_piece_token()
    talks = [[first + (index * step) % pieces for index in range(options.tokens)] for step in (1, 5)]
    seconds: list[float] = []
    with ExitStack() as stack:
        stack.enter_context(process(lent, own, endpoint, None, log))
        stack.enter_context(process(argv, own, f"127.0.0.1:{PORT}", "/health", log))
        for _turn in range(options.turns):
            for words in talks:
                began = time.monotonic()
                asked(PORT, {"prompt": words, "n_predict": 1, "cache_prompt": True})
                seconds.append(time.monotonic() - began)
                words += words[:MORE]
    return {"first": statistics.median(seconds[:2]), "later": statistics.median(seconds[2:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024, help="initial tokens of each conversation")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, network():
        model = Path(folder) / "model.gguf"
        known_answer_file.write_model(model, options.layers, options.width, "f16")
        for link in LINKS:
            for cache_mib in (0, 8192):
                found = answered_s(options, model, link, cache_mib)
                rows.append({"link": link, "cache_mib": cache_mib, **{name: round(s, 2) for name, s in found.items()}})
                print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({"machine": machine(), "tokens": options.tokens, "rows": rows}))


if __name__ == "__main__":
    main()

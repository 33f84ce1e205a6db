"""Measures tokens per second and load times over two workers with ``llama_transport`` plain and stunnel alternately, over links that ``tc tbf`` limits.

The workers have no cache, so a load sends them the whole model. Needs stunnel and root for network namespaces, but not Ansible. Prints one JSON object; the
figures in docs/performance.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/tunnel_speed.py --programs releases/A/bin
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import worker_speed
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import tunnel_keys
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import tunnel
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from fast_load import WORKER_PROGRAMS
from first_run import machine
from gpu_speed import several, spread
from worker_speed import BRIDGE, NETWORK, WORKERS, network, process

PORT, BEHIND = 53380, 53390
PROMPT = 512


def measured(options: argparse.Namespace, model: Path, stunnel: bool) -> dict[str, float]:
    """Of a cluster that is started anew."""
    own = {"LD_LIBRARY_PATH": str(options.programs), "GOMP_SPINCOUNT": "1000"}
    program = next(options.programs / name for name in WORKER_PROGRAMS if (options.programs / name).exists())
    log, keys, endpoints = model.with_name("log"), model.with_name("keys"), []
    ends: list[tuple[list[str], tunnel.Tunnel]] = []
    with ExitStack() as stack:
        for index, name in enumerate(WORKERS):
            inside, host = ["ip", "netns", "exec", f"{BRIDGE}-{name}"], f"{NETWORK}.{11 + index}"
            far, near = f"{host}:{PORT}", f"127.0.0.1:{PORT + 1 + index}"
            port = BEHIND if stunnel else PORT
            argv = [*inside, str(program), "-H", "0.0.0.0", "-p", str(port), "-d", "CPU", "-t", str(options.threads)]
            stack.enter_context(process(argv, own, f"{host}:{port}", None, log))
            endpoints.append(near if stunnel else far)
            ends += [(inside, tunnel.Tunnel(far, f"127.0.0.1:{BEHIND}", keys, False))]
            ends += [([], tunnel.Tunnel(near, far, keys, True))]
        for number, (inside, end) in enumerate(ends if stunnel else []):
            configuration = model.with_name(f"stunnel{number}.conf")
            configuration.write_text(tunnel.stunnel_configuration([end]))
            argv = [*inside, str(tunnel.stunnel_path()), str(configuration)]
            stack.enter_context(process(argv, {}, end.listen_endpoint, None, log))
        argv = [str(options.programs / "llama-server"), "-m", str(model), "-c", "2048", "-np", "1", "-ngl", "99"]
        argv += ["--rpc", ",".join(endpoints), "--device", "RPC0,RPC1", "-fit", "off", "--no-warmup"]
        argv += ["--host", "127.0.0.1", "--port", str(PORT)]
        load_s = stack.enter_context(process(argv, own, f"127.0.0.1:{PORT}", "/health", log))
        words = [known_answer.first_piece_token()] * PROMPT
        return {
            "load_s": load_s,
            "generation_tokens_per_s": statistics.median(several(PORT, "", options.tokens, "predicted_per_second")),
            "prompt_tokens_per_s": statistics.median(several(PORT, words, 1, "prompt_per_second")),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2, help="threads of each worker")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default=worker_speed.RATE, help="rate of each link, in tc's format")
    options = parser.parse_args()
    worker_speed.TBF = ("tbf", "rate", options.rate, *worker_speed.TBF[3:])
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, network():
        model = Path(folder) / "model.gguf"
        known_answer_file.write_model(model, options.layers, options.width, "f16")
        model.with_name("keys").write_text(tunnel_keys.line_of("0" * 64))
        model.with_name("keys").chmod(0o600)
        size = model.stat().st_size
        for _round in range(options.rounds):
            for stunnel, figures in found.items():
                figures.append(measured(options, model, stunnel))
                print("stunnel" if stunnel else "plain", figures[-1], file=sys.stderr, flush=True)
    figures = {
        name: {
            "plain": spread([row[name] for row in found[False]]),
            "stunnel": spread([row[name] for row in found[True]]),
            "ratio": spread([row[name] / plain[name] for plain, row in zip(found[False], found[True])]),
        }
        for name in found[False][0]
    }
    print(
        json.dumps({"machine": machine(), "rate": options.rate, "model_gb": round(size / 1e9, 2), "figures": figures})
    )


if __name__ == "__main__":
    main()

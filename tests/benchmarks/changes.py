"""Measures the time from a request for another of several models to its first word, and compares it with a start of the same command line without the router.

Run this as root on the head of a cluster with two or more known-answer models in ``llama_models`` and all workers on that host. The two measurements
alternate. If other programs compete for the processors, first put this program and the services into one ``cpu`` control group: Linux gives each session
(autogroup) its own share, which makes bare starts faster. Prints one JSON object; the figures in docs/performance.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/changes.py plan.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from first_run import machine

PORT = 18090
LIMIT_S = 600


def posted(url: str, said: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(said).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return answer.read()


def asked_s(url: str, name: str) -> float:
    began = time.monotonic()
    said = json.loads(posted(f"{url}/v1/completions", {"model": name, "prompt": "", "temperature": 0, "max_tokens": 1}))
    seconds = time.monotonic() - began
    if said["choices"][0]["text"].split() != known_answer.SENTENCE.split()[:1]:
        sys.exit(f"{name} gives a wrong answer: {said['choices'][0]['text']!r}")
    return seconds


def unload(plan: dict[str, Any], url: str, name: str) -> None:
    """Returns when no worker has a client."""
    posted(f"{url}/models/unload", {"model": name})
    ports = [entry["endpoint"].rsplit(":", 1)[1] for model in plan["head"]["models"] for entry in model["placement"]]
    held = " or ".join(f"sport = :{port}" for port in sorted(set(ports)))
    while subprocess.run(
        ["ss", "-Htn", "state", "established", f"( {held} )"], capture_output=True, check=True
    ).stdout.strip():
        time.sleep(0.1)


def bare_s(plan: dict[str, Any], model: dict[str, Any]) -> float:
    host = plan["hosts"][plan["head"]["host"]]
    argv = [*model["argv"], "--host", "127.0.0.1", "--port", str(PORT), "--alias", model["name"]]
    url, environment = f"http://127.0.0.1:{PORT}", {**os.environ, **plan["head"]["environment"]}
    began = time.monotonic()
    with subprocess.Popen(
        argv, env=environment, user=host["account"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        ready = False
        while not ready and process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                ready = answer.status == 200
            time.sleep(0.02)
        asked_s(url, model["name"])
        seconds = time.monotonic() - began
        process.terminate()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=argparse.FileType(), help="plan of the cluster, as written to llama_plan_path")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    plan = json.load(options.plan)
    url, models = f"http://127.0.0.1:{plan['head']['port']}", plan["head"]["models"]
    changes: dict[str, list[float]] = {model["name"]: [] for model in models}
    bare: dict[str, list[float]] = {model["name"]: [] for model in models}
    for _round in range(options.rounds):
        asked_s(url, models[-1]["name"])
        for model in models:
            changes[model["name"]].append(round(asked_s(url, model["name"]), 2))
        unload(plan, url, models[-1]["name"])
        for model in models:
            bare[model["name"]].append(round(bare_s(plan, model), 2))
        print(changes, bare, file=sys.stderr, flush=True)
    ratios = {name: round(statistics.median(changes[name]) / statistics.median(bare[name]), 2) for name in changes}
    print(json.dumps({"machine": machine(), "change_s": changes, "bare_start_s": bare, "ratio": ratios}))


if __name__ == "__main__":
    main()

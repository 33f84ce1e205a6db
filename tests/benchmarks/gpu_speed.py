"""Planned beside measured speed with one or two accelerators and the processor of one machine.

The collection builds, starts and verifies one cluster after the other with a known-answer model of 7.5 GB, each of other devices. Of each,
the estimate of its plan is put beside what llama-server tells of completions and prompts, and beside the seconds that a restart takes.

Installs in a temporary folder, as the current user, and needs 16 GB there and twice the model on the devices. Where XDG_CACHE_HOME
is set, model and sources are kept there. Takes the arguments of gpu_workers.py. Tells each cluster, and prints one JSON object; the
figures in docs/hardware.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/gpu_speed.py
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import statistics
import sys
import time
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model
from first_run import PORTS, machine
from gpu_workers import MODEL, arguments, begin, begin_anew, names_of_devices, play

ROUNDS = 2
RUNS = 12
SECONDS = 8
"""No further run of a kind begins in a round after so many, once there are FEWEST."""
FEWEST = 3
TOKENS = 128


def clusters(backend: str, second: str | None) -> dict[str, dict]:
    """Name of a cluster → its variables.

    :param backend: of the accelerators.
    :param second: name of the second one.
    """
    ports = [endpoint["port"] for endpoint in PORTS["llama_worker_endpoints"]]
    other = {"device": second, "port": ports[0]}
    processor = {"device": "CPU", "backend": "cpu", "port": ports[1]}
    if not second:
        alone = {"llama_backend": [backend, "cpu"], "llama_worker_endpoints": [processor]}
        return {
            "processor by a worker": alone,
            "eight layers on the processor": {**alone, "llama_server_tensor_split": [8, 25]},
        }
    both = {"llama_backend": [backend, "cpu"], "llama_worker_endpoints": [other, processor]}
    smaller = {"llama_model_known_answer": {**MODEL, "type": "q8_0"}}
    return {
        "fastest": {**both, "llama_placement": "fastest"},
        "second by a worker": {**both, "llama_worker_endpoints": [other]},
        "second and processor by workers": both,
        "the same, eight layers on the processor": {**both, "llama_server_tensor_split": [12, 8, 13]},
        "processor by a worker": {**both, "llama_worker_endpoints": [processor]},
        "fastest, q8_0": {**both, **smaller, "llama_placement": "fastest"},
        "second and processor by workers, q8_0": {**both, **smaller},
    }


def asked(port: int, question: dict) -> dict:
    """What llama-server answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/completion", json.dumps(question), {"Content-Type": "application/json"})
    return json.load(connection.getresponse())


def timings(port: int, prompt: str | list[int], tokens: int) -> dict[str, float]:
    """What llama-server tells of one completion."""
    question = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    return asked(port, question)["timings"]


def several(port: int, prompt: str | list[int], tokens: int, figure: str) -> list[float]:
    """A figure of several completions; the first is left out."""
    timings(port, prompt, tokens)
    until, found = time.monotonic() + SECONDS, []
    while len(found) < FEWEST or (len(found) < RUNS and time.monotonic() < until):
        found.append(timings(port, prompt, tokens)[figure])
    return found


def spread(figures: list[float]) -> dict[str, float]:
    return {
        name: float(f"{value:.4g}")
        for name, value in (("median", statistics.median(figures)), ("least", min(figures)), ("most", max(figures)))
    }


def measured(plan: dict) -> dict[str, dict[str, float]]:
    """What the estimate of the plan tells, measured in several rounds, each after a restart."""
    head = plan["head"]
    workers = [worker for worker in plan["hosts"]["localhost"]["workers"] if worker["used"]]
    words = [known_answer.first_piece_token()] * cost_model.PROMPT_TOKENS
    found: dict[str, list[float]] = {"generation_tokens_per_s": [], "prompt_tokens_per_s": [], "load_s": []}
    for _round in range(ROUNDS):
        started = time.monotonic()
        begin_anew(workers, head)
        found["load_s"].append(time.monotonic() - started)
        found["generation_tokens_per_s"] += several(head["port"], "", TOKENS, "predicted_per_second")
        found["prompt_tokens_per_s"] += several(head["port"], words, 1, "prompt_per_second")
    return {name: spread(figures) for name, figures in found.items()}


def of_cluster(work: Path, environment: dict[str, str], variables: dict) -> dict:
    """What the collection plans for these variables and verifies, and what is measured."""
    said = play("site.yml", work, environment, variables)
    assert "36 of 36 words correct" in said, said
    plan = json.loads((work / "plan.json").read_text())
    estimate, figures = plan["estimate"], measured(plan)
    planned = {name: estimate[name] for name in figures}
    return {
        "layers": {row["device"]: f"{row['layers']}{' + output' * row['output']}" for row in plan["placement"]},
        "rates": {row["device"]: f"{row['gb_per_s']:g} GB/s, {row['source']}" for row in estimate["devices"]},
        "planned": planned,
        "measured": figures,
        "ratio": {name: round(planned[name] / figures[name]["median"], 3) for name in figures},
        "network_ms_per_token": estimate["network_ms_per_token"],
        "verified": re.findall(r"^ *(?:ok|FAILED|not tested) .*(?:model|words|protocol).*$", said, re.MULTILINE),
    }


def main() -> None:
    work, environment, workers = begin(least=1)
    wanted = arguments()[0].cluster
    every = clusters(workers[0]["backend"], workers[1]["device"] if len(workers) > 1 else None)
    cases = {name: variables for name, variables in every.items() if not wanted or name in wanted}
    described, found = {}, {}
    try:
        for name, variables in cases.items():
            found[name] = of_cluster(work, environment, variables)
            plan = json.loads((work / "plan.json").read_text())
            described = {"machine": f"{machine()}, {names_of_devices(plan)}", "model": plan["model"]["name"]}
            print(json.dumps({name: found[name]}, indent=1), file=sys.stderr)
    finally:
        play("playbooks/teardown.yml", work, environment, variables)
    print(json.dumps({**described, "rounds": ROUNDS, "tokens": TOKENS, "clusters": found}))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()

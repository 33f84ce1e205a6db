"""What the plan says of models after a calibration, beside what is measured of them: by a GPU in llama-server, behind a worker, and with a quarter
of the layers on the processor's worker.

Measures as playbooks/calibrate.yml does, a minute each, then models of random weights in published shapes, with llama-bench. What is in --out is not
measured again, and nothing begins after --seconds, so that a part at a time can be run. Measuring needs no Ansible.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/calibrated_figures.py --programs releases/A/bin --out figures.jsonl --work /dev/shm
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import calibration, capabilities, random_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    gguf,
    header_summary,
    kv_cache,
    shapes,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import summary as summaries
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.shapes import Experts, Shape, Window
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator, Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, estimate, prompts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.device_load import Load, Placed
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device, Host, Release
from fast_load import PORT, WORKER_PROGRAMS, listens, running
from first_run import machine

GPU_PORT, CPU_PORT = PORT + 10, PORT + 11
ENDPOINT = "127.0.0.1:1"
DEPTH = 8192
CALIBRATION_S = 60


MODELS = {
    "dense 8B (Llama 3.1)": Shape("", "llama", 32, 4096, 32, 8, 128256, 32768, inner=14336),
    "experts 30B, 3B active (Qwen3)": Shape(
        *("", "qwen3moe", 48, 2048, 32, 4, 151936, 32768), experts=Experts(128, 8, 768)
    ),
    "experts with windows 20B, MXFP4 (gpt-oss)": Shape(
        *("", "gpt-oss", 24, 2880, 64, 8, 201088, 32768, "", 64),
        **{"experts": Experts(32, 4, 2880), "window": Window(128, 2), "only": "MXFP4_MOE"},
    ),
    "dense 4B (Qwen3)": Shape("", "qwen3", 36, 2560, 32, 8, 151936, 32768, inner=9728),
    "experts 14B, 2.7B active, 60 experts (Qwen1.5)": Shape(
        *("", "qwen2moe", 24, 2048, 16, 16, 151936, 32768), experts=Experts(60, 4, 1408, 5632)
    ),
    "experts with windows, MXFP4 (8 layers of gpt-oss 120B)": Shape(
        *("", "gpt-oss", 8, 2880, 64, 8, 201088, 32768, "", 64),
        **{"experts": Experts(128, 4, 2880), "window": Window(128, 2), "only": "MXFP4_MOE"},
    ),
    "dense 3B (Llama 3.2)": Shape("", "llama", 28, 3072, 24, 8, 128256, 32768, inner=8192),
    "experts 7B, 1B active (OLMoE)": Shape(
        *("", "olmoe", 16, 2048, 16, 16, 50304, 32768), experts=Experts(64, 8, 1024)
    ),
    "experts 3B, 0.8B active, 40 experts, MXFP4 (Granite 3.1)": Shape(
        *("", "granitemoe", 32, 1536, 24, 8, 49152, 32768, "", 64), experts=Experts(40, 8, 512), only="MXFP4_MOE"
    ),
}
NORMS = {"qwen3": (128, 128), "qwen3moe": (128, 128), "olmoe": (2048, 2048)}
"""Architecture → lengths of the norms of queries and keys."""


def further(shape: Shape) -> dict[str, tuple[int, ...]]:
    """What llama.cpp reads of each layer and shapes leaves out."""
    found: dict[str, tuple[int, ...]] = {
        f"attn_{name}_norm.weight": (size,) for name, size in zip("qk", NORMS.get(shape.architecture, ()))
    }
    experts = shape.experts
    if experts and experts.shared:
        found["ffn_gate_inp_shexp.weight"] = (shape.width,)
    if experts and shape.architecture == "gpt-oss":
        keys, wide = (shape.kv_heads * shape.head,), (experts.inner, experts.number)
        biases = {"attn_q": (shape.heads * shape.head,), "attn_k": keys, "attn_v": keys, "attn_output": (shape.width,)}
        biases |= {"ffn_gate_inp": (experts.number,), "ffn_gate_exps": wide, "ffn_up_exps": wide}
        biases["ffn_down_exps"] = (shape.width, experts.number)
        found |= {"attn_sinks.weight": (shape.heads,), **{f"{name}.bias": size for name, size in biases.items()}}
    return found


def tensors(shape: Shape) -> list[summaries.TensorGroup]:
    found = [
        (
            name.replace("ffn_norm", "post_attention_norm") if shape.architecture == "gpt-oss" else name,
            each.type,
            each.shape,
        )
        for name, each in shapes.tensors(shape, shape.only or "Q4_K_M").items()
    ]
    found += [(f"blk.{i}.{name}", "F32", size) for i in range(shape.layers) for name, size in further(shape).items()]
    return [calibration.group(name, kind, tuple(reversed(size)), None) for name, kind, size in found]


def metadata(shape: Shape) -> list[tuple[str, str, Any]]:
    numbers = {**shapes.keys(shape), "feed_forward_length": shape.inner, "rope.dimension_count": shape.head}
    if shape.experts:
        numbers["feed_forward_length"] = numbers["expert_feed_forward_length"] = shape.experts.inner
        numbers["expert_shared_feed_forward_length"] = shape.experts.shared
    scales = {"attention.layer_norm_rms_epsilon": 1e-5}
    if shape.architecture == "granitemoe":
        scales |= {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 1 / 64, "logit_scale": 6.0}
    return [
        ("general.architecture", "STRING", shape.architecture),
        ("general.name", "STRING", "random"),
        *((f"{shape.architecture}.{name}", "UINT32", number) for name, number in numbers.items() if number),
        *((f"{shape.architecture}.{name}", "FLOAT32", number) for name, number in scales.items()),
        ("tokenizer.ggml.model", "STRING", "none"),
    ]


class Place(NamedTuple):
    """A device, and how llama-bench reaches it."""

    key: str
    """In the results."""
    words: tuple[str, ...]
    gflops: float
    """That it is taken to reach in prompts, as the plan's table would say."""


def facts_of(device: str, processor: dict[str, Any]) -> Facts:
    accelerator = Accelerator("cuda", device, "", 1 << 17, unified=False)
    return Facts("Linux", "x86_64", None, processor, 1 << 17, (accelerator,), {}, "user", "systemd", "/", "/", "/")


def places(device: str) -> list[Place]:
    facts = facts_of(device, {"cores": os.cpu_count()})
    lent = [(f"{device} lent", GPU_PORT, 1e5), ("CPU lent", CPU_PORT, cost_model.processor_rate(facts).prompt_gflops)]
    workers = [
        Place(key, ("-rpc", f"127.0.0.1:{port}", "-dev", "RPC0", "-ngl", "99"), rate) for key, port, rate in lent
    ]
    return [Place(device, ("-dev", device, "-ngl", "99"), 1e5), *workers]


class Results:
    """What was measured so far, each with the key by which it is not measured again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: dict[tuple, dict] = {tuple(row["key"]): row for row in map(json.loads, lines)}

    def keep(self, *key: Any, **row: Any) -> None:
        self.rows[key] = {"key": key, **row}
        with self._path.open("a") as stream:
            stream.write(json.dumps(self.rows[key]) + "\n")
        print(json.dumps(self.rows[key])[:250], file=sys.stderr, flush=True)


def bench(programs: Path, path: Path, words: tuple[str, ...], repetitions: int, **tests: Any) -> dict[str, list[float]]:
    """Test, with its depth unless that is 0 → tokens per second."""
    argv = [str(programs / "llama-bench"), "-m", str(path), "-o", "jsonl", "-r", str(repetitions), *words]
    argv += [word for name, value in tests.items() for word in (f"-{name}", str(value))]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(programs)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        print(f"{argv}: {done.stderr[-2000:]}", file=sys.stderr)
    return {f"{'pp' if row['n_prompt'] else 'tg'}{row['n_depth'] or ''}": row["samples_ts"] for row in rows}


def measure(options: argparse.Namespace, results: Results, folder: Path) -> None:
    ends = time.monotonic() + options.seconds
    spent: dict[str, float] = {}
    for place in places(options.device)[: len(options.cases)]:
        lent = place.key != options.device
        is_known = lent and place.key.startswith(options.device)
        for number, trial in enumerate(
            calibration.trials(options.types, options.experts, place.gflops, lent, is_known)
        ):
            key = ("calibration", place.key, *trial)
            needed = number < len(calibration.NEEDED)
            if key in results.rows or time.monotonic() > ends:
                spent[place.key] = spent.get(place.key, 0.0) + results.rows.get(key, {}).get("seconds", 0.0)
                continue
            if spent.get(place.key, 0.0) > CALIBRATION_S and not needed:
                continue
            path, began = folder / f"{trial.name}.gguf", time.monotonic()
            if not path.exists():
                random_file.write(path, trial)
            began = time.monotonic()
            depths = ",".join(map(str, trial.depths))
            found = bench(
                options.programs, path, place.words, trial.repetitions, p=trial.tests[0], n=trial.tests[1], d=depths
            )
            spent[place.key] = spent.get(place.key, 0.0) + time.monotonic() - began
            results.keep(*key, found=found, seconds=round(time.monotonic() - began, 2))
    for file in folder.glob("calibration-*"):
        file.unlink()
    for name in options.models:
        shape, path = MODELS[name], folder / "model.gguf"
        left = [case for case in options.cases if ("model", name, case) not in results.rows]
        if not left or time.monotonic() > ends:
            continue
        random_file.write_model(path, metadata(shape), tensors(shape))
        if ("summary", name) not in results.rows:
            results.keep("summary", name, summary=header_summary.summarize(gguf.read_path(str(path))))
        for case in left:
            words = words_of(case, options.device, shape.layers)
            depths = f"0,{DEPTH}" if case == ALONE else "0"
            if time.monotonic() < ends:
                found = bench(options.programs, path, words, 3 if case == MIXED_DEVICES else 5, p=512, n=64, d=depths)
                results.keep("model", name, case, found=found)


ALONE, LENT, MIXED_DEVICES = CASES = ("in llama-server", "behind a worker", "quarter on the processor's worker")


def quarter(layers: int) -> int:
    return round((layers + 1) / 4)


def words_of(case: str, device: str, layers: int) -> tuple[str, ...]:
    own, lent, _cpu = places(device)
    if case != MIXED_DEVICES:
        return (own if case == ALONE else lent).words
    split = f"{quarter(layers)}/{layers + 1 - quarter(layers)}"
    return ("-rpc", f"127.0.0.1:{CPU_PORT}", "-dev", f"RPC0/{device}", "-ts", split, "-ngl", "99")


def speeds_of(results: Results, device: str, but: Sequence[str] | None = None) -> dict[calibration.Trial, Any]:
    """What a device was measured to do, as calibration.fit takes it.

    :param but: kinds of models that are left out.
    """
    of_device = {key: row["found"] for key, row in results.rows.items() if key[:2] == ("calibration", device)}
    trials = {calibration.Trial(*key[2:]): found for key, found in of_device.items() if found}
    return {trial: found for trial, found in trials.items() if trial.kind not in (but or ())}


def planned(results: Results, name: str, case: str, device: str, build: int) -> dict[str, float]:
    """Tokens per second of the plan, by the same names."""
    what = calibration.Measured(device, "today", f"b{build}", build)
    speeds = {place.key: speeds_of(results, place.key) for place in places(device)}
    ways = {place.key: None if place.key == device else ENDPOINT for place in places(device)}
    fitted = {key: calibration.fit(what, found) for key, found in speeds.items() if found}
    if f"{device} lent" in fitted:
        lent = f"{device} lent"
        fitted[lent] = calibration.behind_worker(fitted[device], speeds[device], fitted[lent], speeds[lent])
    rates = {calibration.key(key.split()[0], ways[key]): found for key, found in fitted.items()}
    summary = summaries.parse(results.rows["summary", name]["summary"])
    host = Host("host", True, True, "127.0.0.1", facts_of(device, {"model": device})._replace(calibrated=rates))
    host = cost_model.with_calibration(host, summary)
    able = capabilities.of_build(build)
    release = Release("", "git", f"b{build}", build, "", build, capabilities.MAINLINE, able.protocol, {}, (), able)
    gpu = Device("host", "cuda", device, device, 1 << 20, {})
    lent = gpu._replace(buffer="RPC0", worker=SimpleNamespace(endpoint=ENDPOINT, wire=ENDPOINT))
    processor = lent._replace(backend="cpu", name="CPU")
    devices = {ALONE: (gpu,), LENT: (lent,), MIXED_DEVICES: (processor, gpu)}[case]
    split = (quarter(summary.layers), summary.layers + 1 - quarter(summary.layers)) if len(devices) > 1 else (1.0,)
    settings = kv_cache.Settings(DEPTH, flash_attention="on")
    load = Load(summary, settings, build)
    placed = Placed(devices, tuple(map(float, split)), load, summary.layers + 1)
    server: Any = SimpleNamespace(batch=None, micro_batch=None)
    case_of = estimate.Case(release, placed, summary, "host", {"host": host}, {"host": host}, True, {}, server)
    works = estimate.works_of(case_of)
    found = {}
    for depth, these in (("", works), (str(DEPTH), prompts.at_depth(case_of, works, settings, DEPTH))):
        speed = estimate.speeds_of(case_of, these)
        found |= {f"tg{depth}": speed.generation, f"pp{depth}": speed.prompt}
    return found


def table(results: Results, device: str, build: int) -> str:
    tests = {
        "tg": "generation",
        "pp": "prompts",
        f"tg{DEPTH}": f"generation at {DEPTH}",
        f"pp{DEPTH}": f"prompts at {DEPTH}",
    }
    lines = [["model", "GPU", *(f"{name}: planned / measured" for name in tests.values())], ["---"] * (2 + len(tests))]
    for key, row in results.rows.items():
        if key[0] != "model" or not row["found"]:
            continue
        says, cells = planned(results, key[1], key[2], device, build), []
        for test in tests:
            samples = row["found"].get(test, [])
            median = statistics.median(samples[1:]) if samples else 0.0
            cells.append(f"{says[test]:.4g} / {median:.4g} ({says[test] / median - 1:+.0%})" if samples else "")
        lines.append([key[1], key[2], *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, help="folder of the programs; left out, only the table is printed")
    parser.add_argument("--out", type=Path, required=True, help="file with what was measured")
    parser.add_argument("--work", type=Path, help="folder for the models")
    parser.add_argument("--device", default="CUDA0", help="as llama.cpp calls it")
    parser.add_argument("--build", type=int, default=11063)
    parser.add_argument("--types", nargs="+", default=["Q4_K", "Q6_K"], help="of the served model, but for experts")
    parser.add_argument("--experts", nargs="+", default=["Q4_K"], help="types of its experts")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS)[:3])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--seconds", type=float, default=540, help="after which nothing begins any more")
    options = parser.parse_args()
    results = Results(options.out)
    if options.programs:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.work)))
            program = next(options.programs / name for name in WORKER_PROGRAMS if (options.programs / name).exists())
            own = {"LD_LIBRARY_PATH": str(options.programs), "GOMP_SPINCOUNT": "10000"}
            for port, device in ((GPU_PORT, options.device), (CPU_PORT, "CPU")):
                argv = [str(program), "-H", "127.0.0.1", "-p", str(port), "-d", device]
                stack.enter_context(running(argv, own, lambda port=port: listens(port), folder / "log"))
            measure(options, results, folder)
    print(machine())
    print(table(results, options.device, options.build))


if __name__ == "__main__":
    main()

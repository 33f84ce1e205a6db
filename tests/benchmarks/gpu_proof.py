"""How far an accelerator's likeliest tokens are from the processor's, with right kernels and with wrong ones.

Models with the widths of published ones and weights of noise are written, one after the other. llama-server gets the questions of the proof
(plugins/module_utils/proof/questions.py) of each, with several types of KV cache: on the processor alone, on an accelerator (`right`), on one
behind a worker (`rpc`), and on one with a wrong kernel. Every answer is kept, a line of JSON for each run; without --programs such files are only summarised.

A wrong kernel needs a llama.cpp of which ggml-cuda was changed by hand, so that the environment LLAMA_WRONG names what is wrong:
  rope_none       rope.cu: freq_scale = 0, no token has a position
  rope            rope.cu: freq_scale *= 1.05
  rms_norm        norm.cu and rope.cu, where both are fused: 1.05 times as much
  attention       fattn-common.cuh, softmax.cu, gated_delta_net.cu: scale *= 1.05
  attention_long  the same of the first two where there are more than 1024 columns
  tail            quantize.cu: the last 32 values of a row longer than 64 are left out of products

Tells each run, and prints one JSON object: for each kind and group, in how many runs it is beyond FAR; `differs` is any of them. The figures
in docs/operating.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/gpu_proof.py --programs releases/A/bin --raw answers.jsonl.gz
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import math
import operator
import os
import sys
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import gguf
import gpu_workers
import numpy
import shapes
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import questions, run
from first_run import PORTS, machine
from gpu_speed import asked
from gpu_workers import by_hand

VOCABULARY = 32768
CONTEXT = 4608
LONGEST = max(questions.STEPS)
SPREAD = 3.0
"""Standard deviation of the logits."""
CACHES = (("f16", "on"), ("q8_0", "on"), ("f16", "off"))
WRONG = ("rope_none", "rope", "rms_norm", "attention", "attention_long", "tail")
ENDS = "DeepSeek"
"""With tiles of AMX."""
SERVER, WORKER = PORTS["llama_server_port"], PORTS["llama_worker_endpoints"][0]["port"]
PART = 1 << 16
"""Blocks that are written at once."""
SCALES = {"Q4_0": {0: 4.64}, "Q8_0": {0: 73.9}, "Q4_K": {0: 258.3, 2: 34.44}}
SCALES |= {"Q6_K": {208: 1365}, "IQ4_XS": {0: 1313.5}}
"""Type → place of a scale in a block → standard deviation of random weights for a scale of one."""

small, _used = shapes.models, shapes._used
LLAMA = functools.partial(small.dense, width=4096, heads=32, kv_heads=8, size=128, inner=14336)
LLAMA_LAYERS = {"q4_K": (1, 2, 3, 8), "q8_0": (3,), "q6_K": (3,), "iq4_xs": (3,), "q4_0": (3,), "f16": (2, 6)}
ATTENDS = (0, 0, 1, 0, 1, 0, 0, 1, 0, 1)
MODELS = {
    **{f"Llama 3 8B {kind}": (LLAMA, layers) for kind, layers in LLAMA_LAYERS.items()},
    "Qwen3 4B q8_0": (lambda layers: small.tied(layers, 2560, 32, 8, 128, 9728), (2, 4, 10)),
    "Qwen3 30B q4_K": (lambda layers: shapes._experts(2048, 32, 4, 768, 128, layers), (2, 4, 8)),
    "DeepSeek R1 q4_K": (lambda layers: shapes._latent(7168, 128, 1536, 2048, 32, 8, layers), (2, 3)),
    "Gemma 3 4B q4_0": (lambda layers: small.windowed(layers, 2560, 8, 4, 256, 10240, 1024), (6, 12)),
    "gpt-oss 20B mxfp4": (lambda layers: _used(small.sinks(layers, 2880, 64, 8, 64, 2880, 128, 32), 4), (4, 8)),
    "Qwen3 Next q4_K": (lambda layers: shapes.next_hybrid(layers, count=128), (4, 8)),
    "Mamba 2.8B q8_0": (lambda layers: small.recurrent(layers, 2560), (1, 4, 8)),
    "LFM2 2.6B q6_K": (lambda layers: small.mixed(ATTENDS[:layers], 2048, 32, 8, 10752), (3, 5, 10)),
    "GLM 4.6 iq4_xs": (lambda layers: _used(small.further_tokens(layers, 5120, 96, 8, 128, 6144, 32), 8), (3, 5)),
}
"""Name and type → its shape with so many layers, and the numbers of them."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--programs", type=Path, help="folder of llama-server and ggml-rpc-server; without, --raw is only read"
    )
    parser.add_argument("--raw", type=Path, nargs="+", required=True, help="answers; new ones are added to the first")
    parser.add_argument("--shapes", nargs="*", default=[*MODELS], choices=MODELS, metavar="SHAPE", help="of MODELS")
    parser.add_argument("--kinds", nargs="*", default=["right", "rpc"], choices=("right", "rpc", *WRONG))
    parser.add_argument("--fewest", action="store_true", help="each shape with its fewest layers only")
    parser.add_argument("--caches", type=int, default=len(CACHES), help="so many of CACHES")
    parser.add_argument("--further", type=int, default=gpu_workers.FURTHER, help="added to ports, for several at once")
    return parser.parse_args()


def stored_as(name: str, shape: tuple[int, ...], kind: str) -> gguf.GGMLQuantizationType:
    """Q8_0 for what a type does not fit, and beside experts of mxfp4."""
    stored = small._stored_as(name, shape, "q8_0" if kind == "mxfp4" and "_exps" not in name else kind)
    fits = kind == "f16" or stored != gguf.GGMLQuantizationType.F16
    return stored if fits else small._stored_as(name, shape, "q8_0")


def deviation(name: str, columns: int, vector: bool, tied: bool) -> float:
    """Standard deviation of a tensor's weights, so that states keep their size and logits have SPREAD."""
    if vector:
        return 1.0 if name.endswith("sinks.weight") else 0.1
    if name == "token_embd.weight":
        return SPREAD / math.sqrt(columns) if tied else 1.0
    return (SPREAD if name == "output.weight" else 1.0) / math.sqrt(columns)


def noise(random: numpy.random.Generator, stored: str, blocks: int, size: int, spread: float) -> numpy.ndarray:
    """Bytes of blocks of a type, as random as their format lets them be."""
    if stored in ("F32", "F16"):
        values = random.standard_normal(blocks, numpy.float32) * spread
        return values.astype("<f4" if stored == "F32" else "<f2").view(numpy.uint8)
    found = numpy.frombuffer(random.bytes(blocks * size), numpy.uint8).reshape(blocks, size).copy()
    signs = 1 - 2 * random.integers(0, 2, blocks).astype(numpy.float32)
    for place, factor in SCALES.get(stored, {}).items():
        found[:, place : place + 2] = (signs * (spread / factor)).astype("<f2").view(numpy.uint8).reshape(-1, 2)
    if stored == "MXFP4":
        found[:, 0] = 127 + round(math.log2(spread / 2.93))
    return found.reshape(-1)


def write(path: Path, shape: str, layers: int) -> None:
    shapes.write(path, MODELS[shape][0](layers), shape.split()[-1], False, VOCABULARY, stored_as)
    random = numpy.random.default_rng(zlib.crc32(f"{shape} {layers}".encode()))
    tensors = gguf.GGUFReader(path, "r+").tensors
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    for tensor in tensors:
        if tensor.name.endswith(("norm.weight", "rope_freqs.weight", "ssm_d", "ssm_a")):
            tensor.data[:] = -1.0 if tensor.name.endswith("ssm_a") else 1.0
            continue
        spread = deviation(tensor.name, int(tensor.shape[0]), len(tensor.shape) == 1, tied)
        size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
        data = tensor.data.view(numpy.uint8).reshape(-1)
        for start in range(0, len(data), PART * size):
            part = data[start : start + PART * size]
            part[:] = noise(random, tensor.tensor_type.name, len(part) // size, size, spread)


def answers(programs: Path, model: Path, options: list[str], kind: str, log: Path) -> dict[str, list]:
    """Length of a prompt → the likeliest tokens and their logarithms."""
    argv = [str(programs / "llama-server"), "-m", str(model), *options]
    argv += f"-c {CONTEXT} -np 1 -fit off --no-warmup --cache-ram 0 --port {SERVER}".split()
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if kind in ("processor", "rpc") else {}
    workers = []
    if kind == "rpc":
        worker = [str(programs / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(WORKER)]
        workers = [{"argv": worker, "environment": {}, "endpoint": f"127.0.0.1:{WORKER}"}]
        argv += ["--rpc", f"127.0.0.1:{WORKER}"]
    argv += ["--device", "none"] if kind == "processor" else ["-ngl", "99"]
    head = {"argv": argv, "environment": {**hidden, "LLAMA_WRONG": kind}, "port": SERVER}
    tokens, found = questions.tokens(VOCABULARY), {}
    with by_hand(workers, head, dict(os.environ), log) as port:
        for question in questions.questions(CONTEXT):
            body = {"prompt": question.prompt(tokens), "cache_prompt": question.goes_on, "n_predict": 1}
            body |= {"n_probs": questions.LISTED_TOKENS, "temperature": 0, "logit_bias": [[VOCABULARY - 1, 1e4]]}
            listed = asked(port, body)["completion_probabilities"][0]["top_logprobs"][: questions.LISTED_TOKENS]
            found[str(question.length)] = [(entry["id"], entry["logprob"]) for entry in listed]
    return found


def ask(given: argparse.Namespace) -> None:
    gpu_workers.FURTHER = given.further
    with tempfile.TemporaryDirectory(prefix="llamacpp-benchmark-") as folder:
        model, log = Path(folder, "model.gguf"), Path(folder, "log")
        for name, layers in [
            (one, layers) for one in given.shapes for layers in MODELS[one][1][: 1 if given.fewest else None]
        ]:
            write(model, name, layers)
            for cache, flash in CACHES[: 1 if name.startswith("Mamba") else given.caches]:
                for kind in ("processor", *given.kinds):
                    line = {"shape": f"{name} x{layers}", "cache": cache, "flash": flash, "kind": kind}
                    print(*line.values(), sep=", ", file=sys.stderr)
                    options = ["-fa", flash, "-ctk", cache, "-ctv", cache]
                    if kind == "processor" and name.startswith(ENDS):
                        options.append(run.PLAIN)
                    line["found"] = answers(given.programs, model, options, kind, log)
                    with gzip.open(given.raw[0], "at") as raw:
                        raw.write(json.dumps(line) + "\n")


def answer(listed: list) -> questions.Answer:
    return {} if any(value is None for _token, value in listed) else dict(listed)


def compared(right: dict[str, list], other: dict[str, list]) -> dict[str, float]:
    """Distance of each group, and the largest of them. stepN is N tokens after the longest prompt."""
    groups = {str(question.length): question.group for question in questions.questions(CONTEXT)}
    groups |= {f"step{step}": groups[str(LONGEST + step)] for step in range(1, questions.STEPS[LONGEST] + 1)}
    found = defaultdict(list)
    for position in right.keys() & other.keys() & groups.keys():
        if one := answer(right[position]):
            found[groups[position]].append(questions.distance(one, answer(other[position])))
    distances = {name: questions.distance_of(found[name]) for name in sorted(found)}
    return distances | {"differs": max(distances.values())}


def summary(paths: list[Path]) -> dict[str, dict]:
    found: dict = defaultdict(lambda: defaultdict(list))
    for path in paths:
        with gzip.open(path, "rt") as file:
            lines = [json.loads(line) for line in file]
        key = operator.itemgetter("shape", "cache", "flash")
        right = {key(line): line["found"] for line in lines if line["kind"] == "processor"}
        for line in lines:
            if line["kind"] != "processor":
                for name, distance in compared(right[key(line)], line["found"]).items():
                    found[line["kind"]][name].append(distance)
    return {kind: {name: told(values) for name, values in groups.items()} for kind, groups in found.items()}


def told(values: list[float]) -> dict[str, float]:
    beyond = sum(distance > questions.FAR for distance in values)
    return {"runs": len(values), "beyond": beyond, "largest": round(max(values), 3)}


def main() -> None:
    given = arguments()
    if given.programs:
        print(machine(), file=sys.stderr)
        ask(given)
    print(json.dumps(summary(given.raw), indent=1))


if __name__ == "__main__":
    main()

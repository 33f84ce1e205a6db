"""Shows how the proof judges workers that compute correctly and one that does not.

Proves the given files like site.yml, on two workers (plugins/module_utils/proof/run.py): two accelerators, or the processor with --processor. Without
--files, writes models with published widths and random weights, one after the other. The environment of the second worker names its fault, so llama.cpp
needs a ggml that reads LLAMA_FAULT: processor_faults.c and accelerator_faults.cu describe the changes. With --read, the model behind the second worker also
reads plain text, and `perplexity` is the ratio of the perplexities with and without the fault. Faults of ggml-cuda:
  tail            the last 32 values of a row longer than 64 are left out of products with quantised weights; tail_few: in up to 8 rows
  rope_5          freq_scale *= 1.05; rope_4096: positions from 4096 on are wrong
  attention_2048  scale *= 2 if there are more than 2048 columns
  expert          the first of the chosen experts is another one
  half            half of each row is 0 in products with 65 to 128 columns
With --processor, f32 is a worker that computes correctly with exact activations.
Faults of ggml-cpu: see FAULTS_OF_PROCESSORS; norm_skip-N leaves out the norms of layer N, window ignores sliding windows, softmax subtracts no
maximum and keeps half precision, cache_q8 damages a block of each row of a q8_0 cache, kv_head takes another KV head, heads swaps two heads, clamp
cuts activations above 4.

Prints a line of JSON for each run, then how many faults were named. The figures in docs/operating.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/proof_faults.py --programs releases/A/bin
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy
import shapes
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import device_rates
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf as headers
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import header_summary, layer_sample
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import proof_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import questions, run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, ProofWork, Side
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import speech
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import TextReading
from first_run import machine
from gpu_workers import answers

VOCABULARY = 32768
SPREAD = 3.0
"""Standard deviation of the logits."""
FAULTS = ("tail", "tail_few", "rope_5", "rope_4096", "attention_2048", "expert", "half")
FAULTS_OF_PROCESSORS = [
    "rope_none",
    "rope_base",
    "heads",
    "clamp",
    "norm_skip-1",
    "norm_skip-9",
    "softmax",
    "attention_0.8",
    "attention_1.05",
    "rms_1.05",
    "block_1.25",
    "block_drop",
    "kv_head",
    "cache_q8",
    "window",
    "epsilon",
    "rms_1.2",
    "mul_1.2",
    "glu_1.2",
]
EXACT = "f32"
"""Products with exact activations, as a device computes that quantises none: no fault."""
CACHE = ["--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--flash-attn", "on"]
PORTS = (29871, 29872)
PART = 1 << 16
"""Blocks that are written at once."""
SCALES = {"Q4_0": {0: 4.64}, "Q8_0": {0: 73.9}, "Q4_K": {0: 258.3, 2: 34.44}}
SCALES |= {"Q6_K": {208: 1365}, "IQ4_XS": {0: 1313.5}}
"""Type → place of a scale in a block → standard deviation of random weights for a scale of one."""

small, _used = shapes.models, shapes._used
LLAMA = functools.partial(small.dense, width=4096, heads=32, kv_heads=8, size=128, inner=14336)
MODELS = {
    "GLM 4.5 Air q4_K": lambda: _used(small.further_tokens(5, 4096, 96, 8, 128, 4 * 1408, 32), 8),
    "DeepSeek V3 q4_K": lambda: shapes._latent(7168, 128, 1536, 2048, 32, 8, 3),
    "Llama 3 8B q4_K": functools.partial(LLAMA, 4),
    "Llama 3 8B f16": functools.partial(LLAMA, 2),
    "Qwen3 30B q4_K": lambda: shapes._experts(2048, 32, 4, 768, 128, 4),
    "Gemma 3 4B q4_0": lambda: small.windowed(6, 2560, 8, 4, 256, 10240, 1024),
    "gpt-oss 20B mxfp4": lambda: _used(small.sinks(4, 2880, 64, 8, 64, 2880, 128, 32), 4),
    "Qwen3 Next q4_K": lambda: shapes.next_hybrid(4, count=128),
}
"""Name and type → its shape."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of llama-server and ggml-rpc-server")
    parser.add_argument("--shapes", nargs="*", default=[*MODELS], choices=MODELS, metavar="SHAPE", help="from MODELS")
    parser.add_argument("--files", nargs="*", type=Path, help="models instead of shapes")
    parser.add_argument("--processor", action="store_true", help="use workers on the processor, with one thread each")
    parser.add_argument(
        "--worker", type=Path, help="program of the second worker, with the faults; default: the program in --programs"
    )
    parser.add_argument("--options", type=str.split, default=[], help="extra arguments of llama-server, as one string")
    parser.add_argument("--faults", nargs="*", help="faults, or an empty string; default: none, and all of the kind")
    parser.add_argument("--read", action="store_true", help="measure the perplexity too")
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


def write(path: Path, shape: str) -> None:
    shapes.write(path, MODELS[shape](), shape.split()[-1], False, VOCABULARY, stored_as)
    random = numpy.random.default_rng(zlib.crc32(shape.encode()))
    tensors = gguf.GGUFReader(path, "r+").tensors
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    for tensor in tensors:
        if tensor.name.endswith(("norm.weight", "rope_freqs.weight", "ssm_d", "ssm_a")):
            # What a layer adds must outweigh a token's own embedding, or a tied output predicts only this token.
            is_added = tied and "post_" in tensor.name
            tensor.data[:] = -1.0 if tensor.name.endswith("ssm_a") else 20.0 if is_added else 1.0
            continue
        spread = deviation(tensor.name, int(tensor.shape[0]), len(tensor.shape) == 1, tied)
        size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
        data = tensor.data.view(numpy.uint8).reshape(-1)
        for start in range(0, len(data), PART * size):
            part = data[start : start + PART * size]
            part[:] = noise(random, tensor.tensor_type.name, len(part) // size, size, spread)


def work(given: argparse.Namespace, model: Path, folder: Path, further: Sequence[str]) -> ProofWork:
    """Return what proves two workers with all layers of a model."""
    summary = header_summary.parse(header_summary.summarize(headers.read_local_headers(str(model))))
    sample = layer_sample.choose_layers(summary, 1 << 40, 512)
    context = proof_plan.PROCESSOR_CONTEXT if given.processor else questions.CONTEXT_TOKENS
    argv = [
        str(given.programs / "llama-server"),
        *f"-c {context} -np 1 -fit off --no-warmup --cache-ram 0".split(),
        *further,
    ]
    sides = [
        Side(f"{port:016}", str(port), (*argv, "--rpc", f"127.0.0.1:{port}", "--device", "RPC0", "-ngl", "99"))
        for port in PORTS
    ]
    processor = Side("0" * 16, "processor", (*argv, "--device", "none", "--no-repack"))
    variants = (("--repack",), ("--flash-attn", "on" if "off" in further else "off"))
    if "q8_0" in further:
        variants = variants[:1]  # quantised values need flash attention
    elif summary.architecture == "deepseek2":
        variants = variants[1:]  # tiles of AMX: llama.cpp finds no place for latent attention
    environment = {"CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    return ProofWork(
        model=str(model),
        layers=sample.layers,
        bytes=sample.bytes,
        folder=str(folder),
        account=None,
        environment=environment,
        launcher=(sys.executable, "-m", runtime.__name__, "prove", "--", f"{folder}/{run.PROOF_SOCKET_FILE}"),
        sockets=True,
        context=context,
        micro_batch=512,
        limit_s=3600,
        timeout_s=300,
        processor=processor,
        variants=variants,
        devices=tuple(sides),
    )


@contextmanager
def workers(given: argparse.Namespace, fault: str) -> Iterator[None]:
    """Run two workers, the second of which has a fault."""
    unfused = ("GGML_CPU_DISABLE_FUSION", "GGML_CUDA_DISABLE_FUSION", "GGML_CUDA_DISABLE_GRAPHS")
    settings = {"LLAMA_FAULT": fault, **dict.fromkeys(unfused, "1")} if fault else {}
    device = ["-d", "CPU", "-t", "1"] if given.processor else []
    programs = (given.programs / "ggml-rpc-server", given.worker or given.programs / "ggml-rpc-server")
    running = [
        subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", str(port), *device],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(index), **(settings if index else {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for index, (port, program) in enumerate(zip(PORTS, programs))
    ]
    try:
        while not all(answers(port, None) for port in PORTS):
            time.sleep(0.1)
        yield
    finally:
        for worker in running:
            worker.kill()
            worker.wait()


def read(job: ProofWork, model: Path, folder: Path) -> TextReading | None:
    """Return how well the model reads plain text behind the second worker."""
    target = run._sample_path(job, folder)
    target.unlink(missing_ok=True)
    target.symlink_to(model)
    try:
        with run._run_launcher(job), run._run_server(job, folder, lambda _port: True, job.devices[1]) as server:
            return speech.take_reading(server._ask, "0" * 16, None)
    except run.ProofError:
        return None
    finally:
        target.unlink()


def measure(
    given: argparse.Namespace, model: Path, name: str, faults: Sequence[str], further: Sequence[str]
) -> Counter:
    """Prove a model with each fault, and print a line for each."""
    counts: Counter = Counter()
    with tempfile.TemporaryDirectory(prefix="llamacpp-benchmark-") as place:
        job, began = work(given, model, Path(place), further), time.monotonic()
        run.prepare_reference(job, lambda _port: True)
        line = {"model": name, "layers": len(job.layers), "reference_s": round(time.monotonic() - began, 1)}
        print(json.dumps({**line, "predicted_s": predicted(job, model)}), flush=True)
        right = None
        for fault in faults:
            with workers(given, fault):
                began = time.monotonic()
                proof = typed_json.parse(Proof, run.prove(job, lambda _port: True))
                seconds = round(time.monotonic() - began, 1)
                row = {"model": name, "fault": fault, "untested": proof.untested, "seconds": seconds}
            with workers(given, fault):
                reading = read(job, model, Path(place)) if given.read else None
            right = reading if not fault else right
            row["perplexity"] = round(reading.perplexity_ratio(right), 3) if reading and right else None
            row["bits_per_byte"] = round(reading.bits_per_byte, 3) if reading else None
            row["verdicts"] = [one.failure or [one.distance, one.bound, one.place] for one in proof.devices]
            print(json.dumps(row), flush=True)
            wrong = [not one.is_correct for one in proof.devices]
            right_count = 2 if fault in ("", EXACT) else 1
            counts.update(right=right_count, refused=sum(wrong[:right_count]))
            counts.update(faults=2 - right_count, named=right_count == 1 and wrong[1:] == [True])
    return counts


def predicted(job: ProofWork, model: Path) -> float:
    """Return the seconds that the plan predicts for the reference, on a processor that no table knows."""
    summary = header_summary.parse(header_summary.summarize(headers.read_local_headers(str(model))))
    asked = questions.list_questions(job.context)
    asked += questions.variant_questions(asked) * len(job.variants)
    cores = os.cpu_count() or 1
    gflops = cores * device_rates.CORE_GFLOPS["avx512f" in Path("/proc/cpuinfo").read_text()]
    computing = proof_plan._compute_s(summary, asked, summary.layers, min(50.0, 5.0 * cores), gflops)
    return round(computing + 3 * proof_plan.START_S, 1)


def main() -> None:
    given = arguments()
    print(machine(), file=sys.stderr)
    counts: Counter = Counter()
    default = ["", *(FAULTS_OF_PROCESSORS if given.processor else FAULTS)]
    faults = default if given.faults is None else given.faults
    for file in given.files or ():
        plain = [fault for fault in faults if not fault.startswith("cache")]
        counts += measure(given, file, file.name, plain, given.options)
        if plain != faults:
            counts += measure(given, file, f"{file.name}, q8_0 cache", ["", *sorted({*faults} - {*plain})], CACHE)
    with tempfile.TemporaryDirectory(prefix="llamacpp-benchmark-") as place:
        for shape in given.shapes if not given.files else ():
            model = Path(place, "model.gguf")
            write(model, shape)
            counts += measure(given, model, shape, faults, given.options)
            model.unlink()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()

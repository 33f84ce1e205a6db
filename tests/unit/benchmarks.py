"""Benchmarks that the tests of reports start from."""

import copy
import json
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import types

PATH = Path(__file__).parent / "data" / "benchmark.json"
MODELS = {
    "qwen3-30b-a3b-q4_k_m": 18.6e9,
    "gpt-oss-120b-mxfp4": 63.4e9,
    "glm-4.5-air-q4_k_m": 73.0e9,
    "qwen3-235b-a22b-q4_k_m": 142.2e9,
    "minimax-m2-q8_0": 243.0e9,
    "deepseek-r1-0528-iq4_k_r4": 367.8e9,
}
ROOM = 96e9
"""Bytes of a model that one host of ``large`` holds."""


def example():
    """The example of docs/benchmark.schema.json."""
    return json.loads(PATH.read_text())


def read(data):
    return types.read(data, "the test's data")


def large(hosts=12):
    """Invented figures of as many hosts and six models, with depths and latencies of some of them, as a benchmark.json."""
    data = example()
    template = next(cell for cell in data["cells"] if cell["measured"] and len(cell["hosts"]) == 2)
    names = [f"rack-node-{index:02}" for index in range(1, hosts + 1)]
    data["hosts"] = dict.fromkeys(names, next(iter(data["hosts"].values())))
    data["models"] = {name: f"/models/{name}.gguf" for name in MODELS}
    data["cells"] = [
        _cell(template, names[:count], model, size, test, depth, latency)
        for model, size in MODELS.items()
        for count in range(1, hosts + 1)
        for test, depth, latency in _tests(count)
    ]
    return data


def _tests(count):
    for test in ("pp512", "tg128"):
        for depth in (0, 4096, 32768) if count in (4, 12) else (0,):
            yield test, depth, None
    if count == 4:
        yield from (("tg128", 0, latency) for latency in (0, 0.2, 1, 5))


def _cell(template, names, model, size, test, depth, latency):
    count = len(names)
    seconds = size / 8 / 210e9 + 2 * (count - 1) * (0.0002 + (latency or 0) / 1000) + depth * 4e-8
    value = 2.1e13 / size / (1 + depth / 2e4) if test == "pp512" else 1 / seconds
    mib = size / count / 2**20
    memory = [
        {
            "device": f"RPC{index}[192.168.128.{11 + index}:50052]",
            "host": name,
            "planned_mib": mib + 900,
            "measured_mib": mib + 700,
        }
        for index, name in enumerate(names)
    ]
    cell = {
        **copy.deepcopy(template),
        "key": f"vulkan/{count}/{model}/{test}/d{depth}/{latency}ms",
        **{"hosts": names, "model": model, "test": test, "depth": depth, "latency_ms": latency, "memory_mib": memory},
        "measured": {"mean": value, "deviation": value / 60, "samples": [value * 0.99, value, value * 1.01]},
        **{"predicted": value * 1.06, "load_s": round(size / 2.4e9 + count, 1), "predicted_load_s": size / 2e9},
    }
    if size > ROOM * count:
        missing = int((size - ROOM * count) / 2**20)
        cell.update(dict.fromkeys(("measured", "predicted", "load_s", "predicted_load_s", "log")), argv=[])
        cell["skipped"] = f"it does not fit: {missing} MiB are missing on {names[-1]}"
    return cell

"""Benchmarks that the tests of reports start from."""

import copy
import json
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import measurements

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
    return measurements.benchmark(data, "the test's data")


def large(hosts=12, speed=1.0):
    """Invented figures of as many hosts and six models, with depths, latencies and requests at once of some of them, as a benchmark.json.

    :param speed: of every measurement, beside the one that is predicted.
    """
    data = example()
    template = next(cell for cell in data["cells"] if cell["measured"] and len(cell["hosts"]) == 2)
    names = [f"rack-node-{index:02}" for index in range(1, hosts + 1)]
    machine = next(iter(data["hosts"].values()))
    link = "thunderbolt, 0.21 ms, 9400 Mbit/s"
    data["hosts"] = {
        name: {**machine, "head": name == names[0], "link": link if name != names[0] else None} for name in names
    }
    file = next(iter(data["models"].values()))
    data["models"] = {
        name: {**file, "path": f"/models/{name}.gguf", "bytes": int(size)} for name, size in MODELS.items()
    }
    data["cells"], data["fits"] = [], []
    for model, size in MODELS.items():
        for count in range(1, hosts + 1):
            for test, depth, latency, parallel in _tests(model, count):
                data["cells"].append(_cell(template, names[:count], model, size, test, depth, latency, parallel, speed))
    return data


def _tests(model, count):
    for test in ("pp512", "tg128"):
        for depth in (0, 4096, 32768) if count in (4, 12) else (0,):
            yield test, depth, 0, 1
    if count == 4:
        yield from (("tg128", 0, latency, 1) for latency in (0.2, 1, 5))
        yield from ((test, 0, 0, parallel) for test in ("api-ttft512", "api-tg128") for parallel in (1, 2, 4, 8))


def _cell(template, names, model, size, test, depth, latency, parallel, speed):
    cell = copy.deepcopy(template)
    count, active = len(names), size / 8
    crossings = 2 * (count - 1)
    seconds = active / 210e9 + crossings * (0.0002 + latency / 1000) + depth * 4e-8
    value = {"pp512": 2.1e13 / size, "tg128": 1, "api-tg128": parallel**0.7, "api-ttft512": 0.02 * size / 1e9}[test]
    value = (
        value / (1 + depth / 2e4)
        if test == "pp512"
        else value * parallel**0.8
        if test == "api-ttft512"
        else value / seconds
    )
    unit = "s" if test == "api-ttft512" else "t/s"
    value *= speed
    key = f"vulkan/{count}/{model}/{test}/d{depth}/p{parallel}/{latency}ms/-/ub512/auto/f16/f16/-"
    cell.update(
        key=key, hosts=names, workers=[f"{name}:vulkan" for name in names[1:]], model=model, test=test, depth=depth
    )
    cell.update(
        latency_ms=latency,
        proxied=bool(latency),
        parallel=parallel,
        load_s=round(size / 2.4e9 + count, 1),
        skipped=None,
    )
    cell["memory_mib"] = [
        {
            "device": "Vulkan0" if index == 0 else f"RPC{index - 1}[192.168.128.{11 + index}:50052]",
            "host": name,
            "planned_mib": size / count / 2**20 + 900,
            "measured_mib": size / count / 2**20 + 700,
        }
        for index, name in enumerate(names)
    ]
    if size > ROOM * count:
        missing = int((size - ROOM * count) / 2**20)
        cell.update(
            measured=None,
            predicted=None,
            load_s=None,
            argv=[],
            log=None,
            skipped=f"it does not fit: {missing} MiB are missing on {names[-1]}",
        )
        for row in cell["memory_mib"]:
            row["measured_mib"] = None
        return cell
    cell["measured"] = {
        "mean": value,
        "deviation": value / 60,
        "samples": [value * 0.99, value, value * 1.01],
        "unit": unit,
    }
    known = not test.startswith("api")
    cell["predicted"] = {**template["predicted"], "mean": value / speed * 1.06 if known else None, "load_s": size / 2e9}
    return cell

"""Compares the compute buffers that llama.cpp reserves with the planned bound, for models with published shapes, cut to a few layers.

llama-fit-params reports what each device would reserve, without weights, for several contexts, batches, attention settings and layouts: `one` accelerator,
`two` accelerators, two `workers` (the first accelerator and the processor), `part` of the layers on the first, `moved` experts, and the `processor` alone.
Without an accelerator, only the last layout is measured. The vocabulary is small: llama-server has logits only for its slots.

Prints each row and one JSON object; the statements about the bound in docs/plan.md come from it.

PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/compute_bounds.py --programs releases/A/bin [--devices CUDA0 CUDA1]
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import shapes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary, kv_cache
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device
from fast_load import PORT, WORKER_PROGRAMS, listens, running
from first_run import machine

MIB = 1 << 20
PART = 2
"""Units on the accelerator."""
OWN = Device("", "cuda", "CUDA0", "CUDA0", 0, {})


class Setting(NamedTuple):
    context: int
    micro_batch: int
    flash: str = "auto"
    cache: str = "f16"
    parallel: int = 1


FEW = (Setting(32768, 512), Setting(32768, 512, "off"), Setting(4096, 2048))
MANY = (
    *FEW,
    *(Setting(4096, 512, flash) for flash in ("auto", "off")),
    *(Setting(131072, 512, flash) for flash in ("auto", "off")),
    Setting(32768, 2048),
    Setting(32768, 2048, "off"),
    Setting(4096, 512, parallel=4),
    *(Setting(context, 512, "on", "q8_0") for context in (32768, 131072)),
)
LAYOUTS = ("processor", "one", "two", "workers", "part", "moved")


def layout(name: str, devices: list[str], ports: list[int]) -> list[str]:
    return {
        "processor": ["-dev", "none"],
        "one": ["-dev", devices[0], "-ngl", "99"],
        "two": ["-dev", ",".join(devices), "-ngl", "99"],
        "workers": ["--rpc", ",".join(f"127.0.0.1:{port}" for port in ports), "-dev", "RPC0,RPC1", "-ngl", "99"],
        "part": ["-dev", devices[0], "-ngl", str(PART)],
        "moved": ["-dev", devices[0], "-ngl", "99", "-ot", "exps=CPU"],
    }[name]


def reserved(options: argparse.Namespace, path: Path, name: str, setting: Setting, ports: list[int]) -> dict[str, int]:
    """Device → MiB."""
    argv = [str(options.programs / "llama-fit-params"), "-m", str(path), "-fitp", "on", "-c", str(setting.context)]
    argv += ["-b", "2048", "-ub", str(setting.micro_batch), "-fa", setting.flash, "-np", str(setting.parallel)]
    argv += ["-ctk", setting.cache, "-ctv", setting.cache, *layout(name, options.devices or [""], ports)]
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if name in ("processor", "workers") else {}
    own = {**os.environ, "LD_LIBRARY_PATH": str(options.programs), **hidden}
    said = subprocess.run(argv, env=own, capture_output=True, text=True, check=False, timeout=120)
    rows = [line.split() for line in said.stdout.splitlines() if len(line.split()) == 4]
    if said.returncode or not rows:
        return {"failed": said.returncode, "why": said.stderr[-300:]}
    return {device: int(compute) for device, _model, _context, compute in rows}


def settings_of(setting: Setting) -> kv_cache.CacheSettings:
    return kv_cache.CacheSettings(
        setting.context,
        setting.parallel,
        type_k=setting.cache,
        type_v=setting.cache,
        micro_batch=setting.micro_batch,
        flash_attention=None if setting.flash == "auto" else setting.flash,
    )


def bound_mib(path: Path, setting: Setting, place: str) -> int:
    """Of the first device: in two layouts it is the head's own, and gets copies of what is in the head's memory."""
    summary = header_summary.parse(header_summary.summarize(gguf.read_local_headers(str(path))))
    overrides = (("exps", device_load.CPU_BUFFER),) if place == "moved" else ()
    load = device_load.Load(summary, settings_of(setting), capabilities.OLDEST_BUILDS["llama.cpp"], overrides)
    first = load.units - PART if place == "part" else 0
    return (load.compute_on(OWN, first) if place in ("moved", "part") else load.compute) // MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True, help="folder of the programs")
    parser.add_argument("--devices", nargs=2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=int, default=600)
    options = parser.parse_args()
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        paths = {name: Path(folder, f"{index}.gguf") for index, name in enumerate(shapes.SHAPES)}
        for name, path in paths.items():
            shapes.write(path, shapes.SHAPES[name], "q8_0", filled=False)
        pairs: queue.Queue[list[int]] = queue.Queue()
        for pair in range(8 if options.devices else 0):
            ports = [PORT + 10 + 2 * pair, PORT + 11 + 2 * pair]
            for port, device in zip(ports, (options.devices[pair % 2], "CPU")):
                program = next(
                    options.programs / name for name in WORKER_PROGRAMS if (options.programs / name).exists()
                )
                argv = [str(program), "-H", "127.0.0.1", "-p", str(port), "-d", device]
                own = {"LD_LIBRARY_PATH": str(options.programs)}
                stack.enter_context(running(argv, own, lambda port=port: listens(port), Path(folder, "log")))
            pairs.put(ports)

        def one(case: tuple[str, str, Setting]) -> None:
            name, place, setting = case
            if time.monotonic() > began + options.seconds:
                return
            ports = pairs.get() if place == "workers" else []
            try:
                found = reserved(options, paths[name], place, setting, ports)
            finally:
                if ports:
                    pairs.put(ports)
            row = {"shape": name, "layout": place, **setting._asdict(), "mib": found}
            rows.append({**row, "bound": bound_mib(paths[name], setting, place)})

        cases = [
            (name, place, setting)
            for name in shapes.SHAPES
            for place in (LAYOUTS if options.devices else LAYOUTS[:1])
            for setting in (MANY if place in ("processor", "one") else FEW)
        ]
        random.Random(1).shuffle(cases)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, cases))
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    told = [row for row in rows if "failed" not in row["mib"]]
    over = [row["bound"] / max(1, *row["mib"].values()) for row in told]
    below = [row for row in told if max(row["mib"].values()) > row["bound"] + 1]
    print(
        json.dumps(
            {
                "machine": machine(),
                "rows": len(told),
                "of": len(cases),
                "ratios": sorted(over)[:: max(1, len(over) // 10)],
                "below": below,
            }
        )
    )


if __name__ == "__main__":
    main()

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast devices are, where nothing was measured: by their architecture or name.

Bandwidths are the vendors' (GB/s, 1e9), of the usual memory where boards differ. What llama.cpp reaches of them, and what it takes for each
node of a graph besides reading, follows from published llama-bench figures of one model in several quantisations (FAMILIES).
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Family(NamedTuple):
    """What llama.cpp reaches on devices of one kind."""

    share: float
    """Of the bandwidth."""
    node_us: float
    """Microseconds for each node of the graph, besides reading weights."""
    source: str


FAMILIES = {
    "apple": Family(
        0.89, 4.6, "ggml-org/llama.cpp#4167: 7B in F16, Q8_0 and Q4_0 on M1 Max, M2 Ultra, M3 Max and M4 Max"
    ),
    "nvidia": Family(0.85, 1.5, "ggml-org/llama.cpp#15013, and the H200 of docs/hardware.md"),
    "pascal": Family(0.75, 2.9, "ggml-org/llama.cpp#4766: 7B on the P40"),
    "amd": Family(0.83, 2.5, "ggml-org/llama.cpp#15021 and #10879"),
    "strix": Family(0.85, 3.1, "field notes: gpt-oss and 405B on Strix Halo"),
    "intel": Family(0.6, 4.0, "ggml-org/llama.cpp#10879"),
    "processor": Family(0.75, 3.0, "STREAM on processors with all channels filled"),
}


class Known(NamedTuple):
    """A row of a table: what its architecture or name matches in full, bandwidth in GB/s, rate in prompts in GFLOPS, and its family."""

    pattern: str
    gb_per_s: float
    prompt_gflops: float
    family: str


AMD = (
    Known(r"gfx1151", 256, 4500, "strix"),
    Known(r"gfx115[023]", 120, 2000, "strix"),
    Known(r"gfx1103", 90, 1500, "strix"),
    Known(r"gfx103[356]|gfx90[29c]", 60, 700, "strix"),
    Known(r"gfx1013", 448, 4000, "amd"),
    Known(r"gfx1100", 864, 40000, "amd"),
    Known(r"gfx1101", 624, 24000, "amd"),
    Known(r"gfx1102", 288, 13000, "amd"),
    Known(r"gfx1200", 320, 25000, "amd"),
    Known(r"gfx1201", 640, 50000, "amd"),
    Known(r"gfx900", 484, 8000, "amd"),
    Known(r"gfx906", 1024, 12000, "amd"),
    Known(r"gfx908", 1229, 30000, "amd"),
    Known(r"gfx90a", 1638, 45000, "amd"),
    Known(r"gfx942", 5300, 130000, "amd"),
    Known(r"gfx1030", 512, 18000, "amd"),
    Known(r"gfx1031", 384, 11000, "amd"),
    Known(r"gfx1032", 224, 8000, "amd"),
)
"""By architecture."""

NVIDIA = (
    Known(r"(RTX )?5090", 1792, 200000, "nvidia"),
    Known(r"RTX 3090", 936, 70000, "nvidia"),
    Known(r"RTX 4090", 1008, 165000, "nvidia"),
    Known(r"Tesla P40", 347, 12000, "pascal"),
    Known(r"H200", 4800, 300000, "nvidia"),
    Known(r"H100", 3350, 300000, "nvidia"),
    Known(r"A100", 1555, 150000, "nvidia"),
    Known(r"GB10", 273, 50000, "nvidia"),
)
"""By a part of the name."""

APPLE = (
    Known(r"M4 Max", 546, 11900, "apple"),
    Known(r"M4 Pro", 273, 5900, "apple"),
    Known(r"M4", 120, 3000, "apple"),
)
INTEL = (Known(r"A770", 560, 15000, "intel"),)
NAMED = {"nvidia": NVIDIA, "apple": APPLE, "intel": INTEL}

PROCESSORS = (Known(r"Apple M4 Max", 230, 500, "processor"), Known(r"EPYC 7\d\d[23]", 204.8, 800, "processor"))
"""By a part of the model's name."""

ASSUMED = {
    "discrete": Known("", 400, 15000, "amd"),
    "unified": Known("", 80, 1000, "strix"),
    "processor": Known("", 60, 300, "processor"),
}
"""Where nothing is known."""


def of_accelerator(architecture: str, name: str) -> Known | None:
    """The row of a device, by its architecture if that tells the bandwidth, else by its name."""
    for row in AMD:
        if re.fullmatch(row.pattern, architecture):
            return row
    return next((row for row in (*NVIDIA, *APPLE, *INTEL) if re.search(rf"\b(?:{row.pattern})\b", name)), None)


def of_processor(model: str) -> Known | None:
    """The row of a processor, by its model's name."""
    return next((row for row in PROCESSORS if re.search(row.pattern, model)), None)

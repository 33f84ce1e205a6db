# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Speeds of devices that were not measured, by name and architecture.

Bandwidth (GB/s, 1e9) and 16-bit rate (TFLOPS with 32-bit accumulation, of matrix units if present) are the vendors' figures, for the most common
memory configuration if boards of the same name differ. The share of both that llama.cpp reaches, and its overhead for each node of a graph, belong to a
family. docs/performance.md compares predictions with measurements.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple


class Family(NamedTuple):
    """Performance of llama.cpp on devices of one kind."""

    generation_share: float
    """Share of the bandwidth that generation reaches."""
    node_us: float
    """Overhead in microseconds for each node of the graph."""
    prompt_share: float
    """Share of the 16-bit rate that prompts reach."""
    source: str
    uncertainty: float = 1.5
    """Uncertainty factor of the speed. Four in five measurements that were not used in a fit lie within it."""
    gweights_per_s: float = math.inf
    """Weights (1e9) that kernels for single tokens multiply per second, where that is a limit besides the bandwidth."""
    wake_ms: float = 0.0
    """Milliseconds that a worker with this device takes to wake up for a token."""


FITTED_SOURCE = "fitted to docs/performance.md"
FAMILIES = {
    "apple": Family(0.88, 3.0, 0.8, FITTED_SOURCE + "; 7B on M1 to M4 (ggml-org/llama.cpp#4167)", wake_ms=1.8),
    "apple deepseek4": Family(0.54, 3.0, 1.0, FITTED_SOURCE + ": M5 Max", wake_ms=1.8),
    "nvidia": Family(0.86, 1.2, 1.2, FITTED_SOURCE),
    "turing": Family(0.82, 2.0, 0.8, "one 2070 SUPER; 13B on a 2080 Ti (geerlingguy/ai-benchmarks#46)", 1.55),
    "nvidia-vulkan": Family(0.86, 1.4, 0.7, FITTED_SOURCE),
    "datacenter": Family(
        0.82, 1.65, 0.17, "docs/hardware.md: H200; 7B on A100 (ggml-org/llama.cpp#6017)", gweights_per_s=3600
    ),
    "volta": Family(0.72, 2.0, 0.5, "one V100", uncertainty=2.05),
    "pascal": Family(0.78, 2.0, 0.8, "7B and 27B on a P40 (ggml-org/llama.cpp#4766)", uncertainty=1.55),
    "spark": Family(0.83, 1.6, 0.75, FITTED_SOURCE + ": GB10", wake_ms=1.8),
    "jetson": Family(0.75, 6.0, 0.5, "assumed", uncertainty=2.0, wake_ms=1.8),
    "rdna": Family(0.82, 1.1, 0.42, FITTED_SOURCE + ": cards with matrix units"),
    "rdna-hip": Family(0.62, 2.3, 0.4, FITTED_SOURCE),
    "rdna2": Family(0.7, 2.0, 0.35, "one 6700 XT", uncertainty=2.05),
    "rdna2-hip": Family(0.7, 2.4, 0.55, "one 6700 XT", uncertainty=2.05),
    "gcn": Family(0.62, 1.8, 0.33, FITTED_SOURCE + ": BC-250, RX 580", uncertainty=2.05),
    "gcn-hip": Family(0.58, 2.5, 0.45, FITTED_SOURCE + ": MI50", uncertainty=2.05),
    "cdna": Family(0.6, 2.5, 0.2, "assumed", uncertainty=2.0),
    "strix": Family(0.86, 1.1, 0.3, FITTED_SOURCE, wake_ms=1.8),
    "strix-hip": Family(0.88, 2.1, 0.32, FITTED_SOURCE, wake_ms=1.8),
    "strix deepseek4": Family(0.6, 1.1, 0.2, FITTED_SOURCE, wake_ms=1.8),
    "strix-hip deepseek4": Family(0.6, 2.1, 0.12, "two hosts (ggml-org/llama.cpp#26746)", uncertainty=2.0, wake_ms=1.8),
    "igpu": Family(0.8, 2.5, 0.24, FITTED_SOURCE + ": 780M", uncertainty=1.55, wake_ms=1.8),
    "igpu-hip": Family(0.8, 3.0, 0.2, FITTED_SOURCE + ": 780M", uncertainty=1.55, wake_ms=1.8),
    "intel": Family(0.45, 4.5, 0.062, FITTED_SOURCE + ": A770", uncertainty=1.8),
    "processor": Family(0.7, 1.5, 0.74, FITTED_SOURCE, uncertainty=1.55),
    "server": Family(0.42, 2.0, 0.74, FITTED_SOURCE, uncertainty=1.8),
    "apple-processor": Family(0.33, 1.0, 0.5, "field notes: M4 Max, processor only"),
    "board": Family(0.72, 8.0, 1.0, FITTED_SOURCE + ": Raspberry Pi 5", uncertainty=1.55),
}
"""Performance by family. Keys with a backend or the architecture of a model take precedence."""


def family_key(name: str, backend: str, model_architecture: str = "") -> str:
    """Return the most specific key in FAMILIES for a family, a backend and the architecture of a model."""
    keys = (f"{name}-{backend} {model_architecture}", f"{name} {model_architecture}", f"{name}-{backend}")
    return next((key for key in keys if key in FAMILIES), name)


class TypeCost(NamedTuple):
    """Time factors of a type's weights against 16-bit weights, for the same number of bytes."""

    generation_factor: float
    """Factor in generation."""
    prompt_factor: float
    """Factor in prompts."""


TYPE_COSTS = (
    (r"MXFP4|NVFP4", TypeCost(1.1, 1.05)),
    (r"IQ[123]|TQ", TypeCost(1.25, 1.4)),
    (r"Q[23]_K", TypeCost(1.22, 1.3)),
    (r"Q[456]_K|IQ4_XS", TypeCost(1.06, 1.13)),
)
DEFAULT_TYPE_COST = TypeCost(1.0, 1.0)


@functools.lru_cache(maxsize=64)
def cost_of_type(name: str) -> TypeCost:
    return next((cost for pattern, cost in TYPE_COSTS if re.match(pattern, name)), DEFAULT_TYPE_COST)


class RateRow(NamedTuple):
    """Figures of a device: pattern for its name or architecture, bandwidth, 16-bit rate, and family."""

    pattern: str
    gb_per_s: float
    tflops: float
    family: str
    min_memory_mib: int = 0
    """Minimum memory of the device, if boards of one name differ."""
    min_uncertainty: float = 1.0
    """Minimum uncertainty factor of the speed."""


AMD_ROWS = (
    RateRow(r"gfx1151|80[56]0S|Strix Halo", 256, 59, "strix"),
    RateRow(r"gfx115[023]|8[89]0M", 120, 24, "igpu"),
    RateRow(r"gfx1103|7[48]0M", 90, 17, "igpu"),
    RateRow(r"gfx103[56]|680M|610M", 75, 7, "igpu"),
    RateRow(r"gfx1033|VANGOGH", 88, 3, "igpu"),
    RateRow(r"gfx90[29c]|RAVEN2?|RENOIR", 51, 3.5, "igpu"),
    RateRow(r"gfx1013|BC-?250", 448, 19, "gcn"),
    RateRow(r"7900 XTX", 960, 123, "rdna"),
    RateRow(r"7900 XT", 800, 103, "rdna"),
    RateRow(r"7900 GRE", 576, 92, "rdna"),
    RateRow(r"W7900", 864, 123, "rdna"),
    RateRow(r"W7800(?! 48GB)", 576, 90, "rdna"),
    RateRow(r"gfx1100", 864, 110, "rdna"),
    RateRow(r"7700 XT", 432, 70, "rdna"),
    RateRow(r"gfx1101|7800 XT", 624, 75, "rdna"),
    RateRow(r"gfx1102|7600", 288, 43, "rdna"),
    RateRow(r"gfx1200|9060 XT", 320, 103, "rdna"),
    RateRow(r"gfx1201|9070|R9700", 640, 195, "rdna"),
    RateRow(r"gfx900|Vega (?:56|64)|MI25", 484, 25, "gcn"),
    RateRow(r"gfx906|MI[56]0|Radeon VII", 1024, 27, "gcn"),
    RateRow(r"gfx908|MI100", 1229, 185, "cdna"),
    RateRow(r"gfx90a|MI2[15]0", 1638, 181, "cdna"),
    RateRow(r"gfx942|MI300", 5300, 1307, "cdna"),
    RateRow(r"gfx950|MI35[05]", 8000, 2300, "cdna"),
    RateRow(r"gfx1030|6[89][05]0", 512, 41, "rdna2"),
    RateRow(r"gfx1031|67[05]0", 384, 26, "rdna2"),
    RateRow(r"gfx1032|66[05]0", 256, 18, "rdna2"),
    RateRow(r"gfx1010|5700", 448, 20, "gcn"),
    RateRow(r"RX 5[78]0|gfx803", 256, 6, "gcn"),
)
NVIDIA_ROWS = (
    RateRow(r"GB10", 273, 62, "spark"),
    RateRow(r"GH200", 4000, 989, "datacenter"),
    RateRow(r"G?B[23]00", 8000, 2250, "datacenter"),
    RateRow(r"H200", 4800, 989, "datacenter"),
    RateRow(r"H100 PCIe", 2000, 756, "datacenter"),
    RateRow(r"H[18]00", 3350, 989, "datacenter"),
    RateRow(r"H20", 4000, 148, "datacenter"),
    RateRow(r"A[18]00-SXM4-80GB", 2039, 312, "datacenter"),
    RateRow(r"A[18]00.* 80GB", 1935, 312, "datacenter"),
    RateRow(r"A[18]00", 1555, 312, "datacenter"),
    RateRow(r"A40", 696, 75, "nvidia"),
    RateRow(r"A30", 933, 165, "nvidia"),
    RateRow(r"A10G?", 600, 62, "nvidia"),
    RateRow(r"A2", 200, 9, "nvidia"),
    RateRow(r"L40S?", 864, 181, "nvidia"),
    RateRow(r"L4", 300, 60, "nvidia"),
    RateRow(r"T4", 320, 24, "turing"),
    RateRow(r"V100", 900, 112, "volta"),
    RateRow(r"TITAN V", 653, 110, "volta"),
    RateRow(r"TITAN RTX", 672, 65, "turing"),
    RateRow(r"TITAN Xp", 547, 12, "pascal"),
    RateRow(r"P100", 732, 21, "pascal"),
    RateRow(r"P40", 347, 12, "pascal"),
    RateRow(r"P4", 192, 5.5, "pascal"),
    RateRow(r"M40", 288, 7, "pascal"),
    RateRow(r"P6000", 432, 12, "pascal"),
    RateRow(r"PRO 6000 Blackwell", 1792, 250, "nvidia"),
    RateRow(r"PRO 5000 Blackwell", 1344, 150, "nvidia"),
    RateRow(r"PRO 4500 Blackwell", 896, 110, "nvidia"),
    RateRow(r"PRO 4000 Blackwell", 672, 95, "nvidia"),
    RateRow(r"RTX 6000 Ada", 960, 182, "nvidia"),
    RateRow(r"RTX 5000 Ada", 576, 130, "nvidia"),
    RateRow(r"RTX 4500 Ada", 432, 79, "nvidia"),
    RateRow(r"RTX 4000 (?:SFF )?Ada", 360, 53, "nvidia"),
    RateRow(r"RTX 2000 Ada", 224, 24, "nvidia"),
    RateRow(r"RTX A6000", 768, 77, "nvidia"),
    RateRow(r"RTX A5000", 768, 56, "nvidia"),
    RateRow(r"RTX A4500", 640, 47, "nvidia"),
    RateRow(r"RTX A4000", 448, 38, "nvidia"),
    RateRow(r"RTX A2000", 288, 16, "nvidia"),
    RateRow(r"Quadro RTX [68]000", 672, 65, "turing"),
    RateRow(r"Quadro RTX 5000", 448, 45, "turing"),
    RateRow(r"Quadro RTX 4000", 416, 29, "turing"),
    RateRow(r"5090 Laptop", 896, 120, "nvidia"),
    RateRow(r"5080 Laptop", 896, 90, "nvidia"),
    RateRow(r"5070 Ti Laptop", 672, 70, "nvidia"),
    RateRow(r"50[67]0 Laptop", 384, 50, "nvidia"),
    RateRow(r"4090 Laptop", 576, 80, "nvidia"),
    RateRow(r"4080 Laptop", 432, 60, "nvidia"),
    RateRow(r"40[5-7]0 Laptop", 256, 35, "nvidia"),
    RateRow(r"30[78]0(?: Ti)? Laptop", 448, 35, "nvidia"),
    RateRow(r"3060 Laptop", 336, 22, "nvidia"),
    RateRow(r"RTX 5090", 1792, 209, "nvidia"),
    RateRow(r"RTX 5080", 960, 112, "nvidia"),
    RateRow(r"RTX 5070 Ti", 896, 88, "nvidia"),
    RateRow(r"RTX 5070", 672, 62, "nvidia"),
    RateRow(r"RTX 5060(?: Ti)?", 448, 47, "nvidia"),
    RateRow(r"RTX 5050", 320, 26, "nvidia"),
    RateRow(r"RTX 4090", 1008, 165, "nvidia"),
    RateRow(r"RTX 4080(?: SUPER)?", 730, 100, "nvidia"),
    RateRow(r"RTX 4070 Ti SUPER", 672, 88, "nvidia"),
    RateRow(r"RTX 4070(?: Ti| SUPER)?", 504, 72, "nvidia"),
    RateRow(r"RTX 4060(?: Ti)?", 280, 37, "nvidia"),
    RateRow(r"RTX 3090(?: Ti)?", 936, 71, "nvidia"),
    RateRow(r"RTX 3080 Ti", 912, 68, "nvidia"),
    RateRow(r"RTX 3080", 760, 60, "nvidia"),
    RateRow(r"RTX 3070 Ti", 608, 43, "nvidia"),
    RateRow(r"RTX 3070|RTX 3060 Ti", 448, 37, "nvidia"),
    RateRow(r"RTX 3060", 360, 25, "nvidia"),
    RateRow(r"RTX 3050", 224, 18, "nvidia", 7000),
    RateRow(r"RTX 3050", 168, 14, "nvidia"),
    RateRow(r"RTX 2080 Ti", 616, 54, "turing"),
    RateRow(r"RTX 2080 SUPER", 496, 40, "turing"),
    RateRow(r"RTX 20[678]0.* Max-Q", 384, 22, "turing"),
    RateRow(r"RTX 20[78]0(?: SUPER)?|RTX 2060 SUPER", 448, 33, "turing"),
    RateRow(r"RTX 2060", 336, 26, "turing"),
    RateRow(r"GTX 1660 SUPER", 336, 10, "pascal"),
    RateRow(r"GTX 1660 Ti", 288, 11, "pascal"),
    RateRow(r"GTX 16[56]0", 192, 9, "pascal"),
    RateRow(r"T1200|T1000", 192, 3.8, "pascal"),
    RateRow(r"T[56]00", 160, 3, "pascal"),
    RateRow(r"GTX 9[78]0 Ti|GTX TITAN X", 336, 6, "pascal"),
    RateRow(r"GTX 9[78]0", 224, 4.5, "pascal"),
    RateRow(r"GTX 1050(?: Ti)?", 112, 2.1, "pascal"),
    RateRow(r"GTX 1080 Ti", 484, 11, "pascal"),
    RateRow(r"GTX 1080", 320, 9, "pascal"),
    RateRow(r"GTX 1070", 256, 6.5, "pascal"),
    RateRow(r"GTX 1060", 192, 4.4, "pascal"),
    RateRow(r"Thor", 273, 125, "jetson"),
    RateRow(r"AGX Orin", 205, 43, "jetson"),
    RateRow(r"Orin NX", 102, 25, "jetson"),
    RateRow(r"Orin", 205, 43, "jetson", 20000),
    RateRow(r"Orin", 102, 25, "jetson", 10000),
    RateRow(r"Orin(?: Nano)?", 68, 17, "jetson"),
    RateRow(r"AGX Xavier", 137, 11, "jetson"),
    RateRow(r"Xavier", 137, 11, "jetson", 20000),
    RateRow(r"Xavier", 60, 7, "jetson"),
    RateRow(r"Tegra X1|Jetson Nano", 25.6, 0.5, "jetson"),
)
APPLE_ROWS = (
    RateRow(r"M1 Ultra", 800, 21, "apple"),
    RateRow(r"M1 Max", 400, 10.6, "apple"),
    RateRow(r"M1 Pro", 200, 5.3, "apple"),
    RateRow(r"M1", 68, 2.0, "apple"),
    RateRow(r"M2 Ultra", 800, 27.2, "apple"),
    RateRow(r"M2 Max", 400, 13.6, "apple"),
    RateRow(r"M2 Pro", 200, 6.8, "apple"),
    RateRow(r"M2", 100, 3.6, "apple"),
    RateRow(r"M3 Ultra", 819, 28, "apple"),
    RateRow(r"M3 Max", 400, 14.2, "apple"),
    RateRow(r"M3 Pro", 150, 6.4, "apple"),
    RateRow(r"M3", 100, 3.6, "apple"),
    RateRow(r"M4 Max", 546, 18.4, "apple"),
    RateRow(r"M4 Pro", 273, 8.2, "apple"),
    RateRow(r"M4", 120, 4.3, "apple"),
    RateRow(r"M5 Max", 614, 56, "apple"),
    RateRow(r"M5 Pro", 307, 28, "apple"),
    RateRow(r"M5", 153, 14, "apple"),
)
INTEL_ROWS = (
    RateRow(r"A770|8086:56a0", 560, 138, "intel"),
    RateRow(r"A750|8086:56a1", 512, 120, "intel"),
    RateRow(r"A380|8086:56a5", 186, 32, "intel"),
    RateRow(r"B580|8086:e20b", 456, 98, "intel"),
    RateRow(r"B570|8086:e20c", 380, 80, "intel"),
    RateRow(r"B60|8086:e211", 456, 98, "intel"),
    RateRow(r"B50|8086:e212", 224, 71, "intel"),
)
ACCELERATOR_ROWS = (*AMD_ROWS, *NVIDIA_ROWS, *APPLE_ROWS, *INTEL_ROWS)
"""The first matching row counts, so longer names come before shorter ones."""

PROCESSOR_ROWS = (
    *(row._replace(tflops=3.0, family="apple-processor") for row in APPLE_ROWS),
    RateRow(r"RYZEN AI MAX|Strix Halo", 128, 2.0, "processor"),
    RateRow(r"Ryzen AI", 120, 1.0, "processor"),
    RateRow(r"Ryzen Threadripper PRO [35]9\d5WX", 205, 3.0, "processor"),
    RateRow(r"Ryzen Threadripper PRO [79]9\d5WX", 333, 4.0, "processor"),
    RateRow(r"Ryzen Threadripper [79]", 166, 3.0, "processor"),
    RateRow(r"Ryzen Threadripper", 102, 4.0, "processor"),
    RateRow(r"EPYC 7\d\d1", 171, 1.5, "server"),
    RateRow(r"EPYC 7\w{3}", 205, 3.0, "server"),
    RateRow(r"EPYC 8\w{3}", 230, 3.0, "server"),
    RateRow(r"EPYC 9\w\w4", 461, 4.5, "server"),
    RateRow(r"EPYC 9\w\w5", 576, 6.0, "server"),
    RateRow(r"Ryzen \d (?:PRO )?[789]\d{3}", 83, 1.0, "processor"),
    RateRow(r"Ryzen \d (?:PRO )?[1-5]\d{3}", 51, 0.8, "processor"),
    RateRow(r"Xeon.* (?:Gold|Platinum|Silver) [4-8]1\d\d", 128, 1.5, "server"),
    RateRow(r"Xeon.* (?:Gold|Platinum|Silver) [4-8]2\d\d", 141, 1.5, "server"),
    RateRow(r"Xeon.* (?:Gold|Platinum|Silver) [4-8]3\d\d", 205, 2.5, "server"),
    RateRow(r"Xeon.* (?:Gold|Platinum|Silver|Bronze) [3-8][45]\d\d", 307, 4.0, "server"),
    RateRow(r"Xeon.* 69\d\d", 614, 8.0, "server"),
    RateRow(r"Core\(TM\) Ultra|(?:1[2-5])th Gen", 83, 1.0, "processor"),
    RateRow(r"Core\(TM\) i\d-1[2-5]\d{3}", 83, 1.0, "processor"),
    RateRow(r"Core\(TM\) i\d-(?:[6-9]|1[01])\d{3}", 43, 0.9, "processor"),
    RateRow(r"Xeon.* E5-\d{4} v[34]", 68, 0.9, "processor"),
    RateRow(r"Neoverse-V2|Neoverse-V3", 537, 8.0, "server"),
    RateRow(r"Neoverse-V1", 307, 4.0, "server"),
    RateRow(r"Neoverse-N2", 300, 4.0, "server"),
    RateRow(r"Neoverse-N1", 205, 3.0, "server"),
    RateRow(r"AmpereOne", 333, 6.0, "server"),
    RateRow(r"RK3588|Orange Pi 5|ROCK 5", 30, 0.15, "board"),
    RateRow(r"Cortex-X925", 200, 2.0, "processor"),
    RateRow(r"Raspberry Pi (?:5|Compute Module 5)|Cortex-A76$", 17, 0.1, "board"),
    RateRow(r"Raspberry Pi (?:4|Compute Module 4)|Cortex-A72$", 3.6, 0.012, "board", min_uncertainty=1.8),
    RateRow(r"Cortex-A720|Oryon", 50, 1.0, "processor"),
)
"""Processors with known memory channels. All channels are assumed to have the fastest memory that the vendor specifies."""

ASSUMED_RATES = {
    "discrete": RateRow("", 400, 25, "rdna2"),
    "unified": RateRow("", 80, 8, "igpu"),
    "processor": RateRow("", 50, 0.8, "processor"),
    "board": RateRow("", 17, 0.1, "board"),
    "nvidia": RateRow("", 566, 61.5, "nvidia", min_uncertainty=2.6),
    "turing": RateRow("", 465, 37.4, "turing", min_uncertainty=1.8),
    "volta": RateRow("", 767, 111, "volta", min_uncertainty=1.5),
    "pascal": RateRow("", 281, 7.2, "pascal", min_uncertainty=2.2),
    "datacenter": RateRow("", 3084, 580, "datacenter", min_uncertainty=2.9),
}
"""Kind of an unlisted device, or family of an unlisted NVIDIA card → assumed rates. For a family these are the mean and the spread of its rows."""

FAMILY_CAPABILITIES = ((8.0, "nvidia"), (7.5, "turing"), (7.0, "volta"), (0.0, "pascal"))
HBM_CAPABILITIES = ("8.0", "9.0", "10.0", "10.3")
"""Lowest compute capability of each family, and compute capabilities of cards with HBM."""


def assumed_card_row(architecture: str) -> RateRow:
    """Return the assumed rates of an unlisted card."""
    if not re.fullmatch(r"\d+\.\d+", architecture):
        return ASSUMED_RATES["discrete"]
    family = next(name for capability, name in FAMILY_CAPABILITIES if float(architecture) >= capability)
    return ASSUMED_RATES["datacenter" if architecture in HBM_CAPABILITIES else family]


CORE_GB_PER_S = 5.0
"""Bandwidth of one hardware thread: 4 to 6 GB/s on processors with 4 to 24 cores."""
CORE_GFLOPS = {True: 110.0, False: 48.0, None: 37.0}
"""Whether a processor has AVX-512 (None for ARM) → GFLOPS of one core in prompts. Measurements on 2 cores of EPYCs gave 153 and 64 with f16
(docs/performance.md); quantised weights take a third longer."""
MAX_BOARD_MIB = 17 * 1024
"""Largest memory of an ARM host with Linux that counts as a small board."""


@functools.lru_cache(maxsize=256)
def accelerator_row(architecture: str, name: str, memory_mib: int = 0) -> RateRow | None:
    """Return the row of a device by its name, which identifies the memory best, or else by its architecture."""
    for text in (name, architecture):
        for row in ACCELERATOR_ROWS:
            if memory_mib >= row.min_memory_mib and re.search(rf"\b(?:{row.pattern})\b", text, re.IGNORECASE):
                return row
    return None


@functools.lru_cache(maxsize=256)
def processor_row(name: str) -> RateRow | None:
    return next((row for row in PROCESSOR_ROWS if re.search(row.pattern, name, re.IGNORECASE)), None)


def is_board(system: str, architecture: str, memory_mib: int, processor_name: str) -> bool:
    """Return whether a host counts as a small board, on which a worker's overhead is larger."""
    row = processor_row(processor_name)
    if row:
        return row.family == "board"
    return system == "Linux" and architecture in ("aarch64", "armv7l") and memory_mib <= MAX_BOARD_MIB


TABLE_SOURCE, ASSUMED_SOURCE = "table", "assumed"
"""Sources of a rate, the most reliable first."""


class Rate(NamedTuple):
    gb_per_s: float
    """Gigabytes (1e9) of weights and KV cache that it reads per second in generation."""
    prompt_gflops: float
    """GFLOPS that prompts reach."""
    source: str
    """TABLE_SOURCE or ASSUMED_SOURCE."""
    node_us: float = 2.0
    """Microseconds that each node of the graph takes besides reading."""
    uncertainty: float = 1.3
    """Factor by which generation may be faster or slower; see Family."""
    gweights_per_s: float = math.inf
    """Weights (1e9) that its kernels for single tokens multiply per second; see Family."""
    wake_ms: float = 0.0
    """Milliseconds that a worker with this device takes to wake up for a token."""


UNLISTED_UNCERTAINTY = 2.0
"""Uncertainty factor of a device that no table lists."""


def rate_of_row(row: RateRow, source: str, backend: str = "cpu", model_architecture: str = "") -> Rate:
    """Return the rate that llama.cpp reaches on a device with these figures."""
    family = FAMILIES[family_key(row.family, backend, model_architecture)]
    uncertainty = max(UNLISTED_UNCERTAINTY if source == ASSUMED_SOURCE else family.uncertainty, row.min_uncertainty)
    gb_per_s = round(row.gb_per_s * family.generation_share, 1)
    prompt_gflops = round(1000 * row.tflops * family.prompt_share, 1)
    return Rate(
        gb_per_s, prompt_gflops, source, round(family.node_us, 2), uncertainty, family.gweights_per_s, family.wake_ms
    )


def accelerator_rate(
    backend: str, name: str, architecture: str, memory_mib: int, has_unified_memory: bool, model_architecture: str
) -> Rate:
    """Return the rate of an accelerator by its name or architecture, or the assumed rate of its kind."""
    row = accelerator_row(architecture, name, memory_mib or 0)
    assumed_row = ASSUMED_RATES["unified"] if has_unified_memory else assumed_card_row(architecture)
    return rate_of_row(row or assumed_row, TABLE_SOURCE if row else ASSUMED_SOURCE, backend, model_architecture)

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How fast devices are, where nothing was measured: by their names and architectures.

Bandwidth (GB/s, 1e9) and 16-bit rate (TFLOPS, of matrix units where there are some, accumulated in 32 bits) are the vendors', of the usual
memory where boards of a name differ. What llama.cpp reaches of both, and what it takes for each node of a graph besides reading, is
the same for a whole family. docs/performance.md has predictions beside measured figures.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class Family(NamedTuple):
    """What llama.cpp reaches on devices of one kind."""

    share: float
    """Of the bandwidth, in generation."""
    node_us: float
    """Microseconds for each node of the graph besides reading."""
    prompt_share: float
    """Of the 16-bit rate, in prompts."""
    source: str
    quantised: float = 1.0
    """So many times as long takes a multiplication in prompts with weights of less than 16 bits."""


FAMILIES = {
    "apple": Family(
        0.89,
        2.7,
        0.62,
        "7B in F16, Q8_0 and Q4_0 on M1 Max to M4 Max (ggml-org/llama.cpp#4167) and on M5 (#16634), field notes",
    ),
    "nvidia": Family(0.85, 1.5, 0.7, "docs/hardware.md: H200"),
    "datacenter": Family(0.85, 1.5, 0.25, "docs/hardware.md: H200; 7B on A100 (ggml-org/llama.cpp#6017)", 1.85),
    "pascal": Family(0.75, 2.9, 1.0, "7B in six quantisations on a P40 (ggml-org/llama.cpp#4766)"),
    "jetson": Family(0.75, 6.0, 0.5, "assumed"),
    "amd": Family(0.8, 2.7, 0.3, "assumed like those of graphics inside processors"),
    "strix": Family(0.85, 2.7, 0.08, "field notes: Vulkan and HIP on gfx1151"),
    "intel": Family(0.6, 4.0, 0.2, "assumed"),
    "processor": Family(0.75, 2.0, 1.0, "assumed; prompts with q8_0 and f16 in docs/performance.md", 1.35),
    "apple-processor": Family(0.33, 1.0, 0.5, "field notes: processor of an M4 Max"),
    "board": Family(0.75, 10.0, 0.5, "assumed"),
}


class Known(NamedTuple):
    """A row of a table: expression for the name or the architecture, bandwidth, 16-bit rate, family."""

    pattern: str
    gb_per_s: float
    tflops: float
    family: str
    least_mib: int = 0
    """Of the device's memory, where boards of one name differ in it."""


AMD = (
    Known(r"gfx1151|80[56]0S|Strix Halo", 256, 59, "strix"),
    Known(r"gfx115[023]|8[89]0M", 120, 24, "strix"),
    Known(r"gfx1103|7[48]0M", 90, 17, "strix"),
    Known(r"gfx103[56]|680M|610M", 75, 7, "strix"),
    Known(r"gfx1033|VANGOGH", 88, 3, "strix"),
    Known(r"gfx90[29c]|RAVEN2?|RENOIR", 51, 3.5, "strix"),
    Known(r"gfx1013|BC-?250", 448, 19, "amd"),
    Known(r"7900 XTX", 960, 123, "amd"),
    Known(r"7900 XT", 800, 103, "amd"),
    Known(r"7900 GRE", 576, 92, "amd"),
    Known(r"W7900", 864, 123, "amd"),
    Known(r"W7800(?! 48GB)", 576, 90, "amd"),
    Known(r"gfx1100", 864, 110, "amd"),
    Known(r"7700 XT", 432, 70, "amd"),
    Known(r"gfx1101|7800 XT", 624, 75, "amd"),
    Known(r"gfx1102|7600", 288, 43, "amd"),
    Known(r"gfx1200|9060 XT", 320, 103, "amd"),
    Known(r"gfx1201|9070|R9700", 640, 195, "amd"),
    Known(r"gfx900|Vega (?:56|64)|MI25", 484, 25, "amd"),
    Known(r"gfx906|MI[56]0|Radeon VII", 1024, 27, "amd"),
    Known(r"gfx908|MI100", 1229, 185, "amd"),
    Known(r"gfx90a|MI2[15]0", 1638, 181, "amd"),
    Known(r"gfx942|MI300", 5300, 1307, "amd"),
    Known(r"gfx950|MI35[05]", 8000, 2300, "amd"),
    Known(r"gfx1030|6[89][05]0", 512, 41, "amd"),
    Known(r"gfx1031|67[05]0", 384, 26, "amd"),
    Known(r"gfx1032|66[05]0", 256, 18, "amd"),
    Known(r"gfx1010|5700", 448, 20, "amd"),
    Known(r"RX 5[78]0|gfx803", 256, 6, "amd"),
)
NVIDIA = (
    Known(r"GB10", 273, 62, "nvidia"),
    Known(r"GH200", 4000, 989, "datacenter"),
    Known(r"G?B[23]00", 8000, 2250, "datacenter"),
    Known(r"H200", 4800, 989, "datacenter"),
    Known(r"H100 PCIe", 2000, 756, "datacenter"),
    Known(r"H[18]00", 3350, 989, "datacenter"),
    Known(r"H20", 4000, 148, "datacenter"),
    Known(r"A[18]00-SXM4-80GB", 2039, 312, "datacenter"),
    Known(r"A[18]00.* 80GB", 1935, 312, "datacenter"),
    Known(r"A[18]00", 1555, 312, "datacenter"),
    Known(r"A40", 696, 75, "nvidia"),
    Known(r"A30", 933, 165, "nvidia"),
    Known(r"A10G?", 600, 62, "nvidia"),
    Known(r"L40S?", 864, 181, "nvidia"),
    Known(r"L4", 300, 60, "nvidia"),
    Known(r"T4", 320, 65, "nvidia"),
    Known(r"V100", 900, 112, "nvidia"),
    Known(r"TITAN V", 653, 110, "nvidia"),
    Known(r"TITAN RTX", 672, 65, "nvidia"),
    Known(r"TITAN Xp", 547, 12, "pascal"),
    Known(r"P100", 732, 21, "pascal"),
    Known(r"P40", 347, 12, "pascal"),
    Known(r"P4", 192, 5.5, "pascal"),
    Known(r"M40", 288, 7, "pascal"),
    Known(r"P6000", 432, 12, "pascal"),
    Known(r"PRO 6000 Blackwell", 1792, 250, "nvidia"),
    Known(r"PRO 5000 Blackwell", 1344, 150, "nvidia"),
    Known(r"PRO 4000 Blackwell", 672, 95, "nvidia"),
    Known(r"RTX 6000 Ada", 960, 182, "nvidia"),
    Known(r"RTX 5000 Ada", 576, 130, "nvidia"),
    Known(r"RTX 4500 Ada", 432, 79, "nvidia"),
    Known(r"RTX 4000 (?:SFF )?Ada", 360, 53, "nvidia"),
    Known(r"RTX 2000 Ada", 224, 24, "nvidia"),
    Known(r"RTX A6000", 768, 77, "nvidia"),
    Known(r"RTX A5000", 768, 56, "nvidia"),
    Known(r"RTX A4500", 640, 47, "nvidia"),
    Known(r"RTX A4000", 448, 38, "nvidia"),
    Known(r"RTX A2000", 288, 16, "nvidia"),
    Known(r"Quadro RTX [68]000", 672, 65, "nvidia"),
    Known(r"Quadro RTX 5000", 448, 45, "nvidia"),
    Known(r"Quadro RTX 4000", 416, 29, "nvidia"),
    Known(r"5090 Laptop", 896, 120, "nvidia"),
    Known(r"5080 Laptop", 896, 90, "nvidia"),
    Known(r"5070 Ti Laptop", 672, 70, "nvidia"),
    Known(r"50[67]0 Laptop", 384, 50, "nvidia"),
    Known(r"4090 Laptop", 576, 80, "nvidia"),
    Known(r"4080 Laptop", 432, 60, "nvidia"),
    Known(r"40[5-7]0 Laptop", 256, 35, "nvidia"),
    Known(r"30[78]0(?: Ti)? Laptop", 448, 35, "nvidia"),
    Known(r"3060 Laptop", 336, 22, "nvidia"),
    Known(r"RTX 5090", 1792, 209, "nvidia"),
    Known(r"RTX 5080", 960, 112, "nvidia"),
    Known(r"RTX 5070 Ti", 896, 88, "nvidia"),
    Known(r"RTX 5070", 672, 62, "nvidia"),
    Known(r"RTX 5060(?: Ti)?", 448, 43, "nvidia"),
    Known(r"RTX 5050", 320, 26, "nvidia"),
    Known(r"RTX 4090", 1008, 165, "nvidia"),
    Known(r"RTX 4080(?: SUPER)?", 730, 100, "nvidia"),
    Known(r"RTX 4070 Ti SUPER", 672, 88, "nvidia"),
    Known(r"RTX 4070(?: Ti| SUPER)?", 504, 68, "nvidia"),
    Known(r"RTX 4060(?: Ti)?", 280, 37, "nvidia"),
    Known(r"RTX 3090(?: Ti)?", 936, 71, "nvidia"),
    Known(r"RTX 3080 Ti", 912, 68, "nvidia"),
    Known(r"RTX 3080", 760, 60, "nvidia"),
    Known(r"RTX 3070 Ti", 608, 43, "nvidia"),
    Known(r"RTX 3070|RTX 3060 Ti", 448, 37, "nvidia"),
    Known(r"RTX 3060", 360, 25, "nvidia"),
    Known(r"RTX 3050", 224, 18, "nvidia"),
    Known(r"RTX 2080 Ti", 616, 54, "nvidia"),
    Known(r"RTX 20[78]0(?: SUPER)?", 448, 35, "nvidia"),
    Known(r"RTX 2060", 336, 26, "nvidia"),
    Known(r"GTX 1660 SUPER", 336, 10, "pascal"),
    Known(r"GTX 1660 Ti", 288, 11, "pascal"),
    Known(r"GTX 16[56]0", 192, 9, "pascal"),
    Known(r"GTX 1080 Ti", 484, 11, "pascal"),
    Known(r"GTX 1080", 320, 9, "pascal"),
    Known(r"GTX 1070", 256, 6.5, "pascal"),
    Known(r"GTX 1060", 192, 4.4, "pascal"),
    Known(r"Thor", 273, 125, "jetson"),
    Known(r"AGX Orin", 205, 43, "jetson"),
    Known(r"Orin NX", 102, 25, "jetson"),
    Known(r"Orin", 205, 43, "jetson", 20000),
    Known(r"Orin", 102, 25, "jetson", 10000),
    Known(r"Orin(?: Nano)?", 68, 17, "jetson"),
    Known(r"AGX Xavier", 137, 11, "jetson"),
    Known(r"Xavier", 137, 11, "jetson", 20000),
    Known(r"Xavier", 60, 7, "jetson"),
    Known(r"Tegra X1|Jetson Nano", 25.6, 0.5, "jetson"),
)
APPLE = (
    Known(r"M1 Ultra", 800, 21, "apple"),
    Known(r"M1 Max", 400, 10.6, "apple"),
    Known(r"M1 Pro", 200, 5.3, "apple"),
    Known(r"M1", 68, 2.6, "apple"),
    Known(r"M2 Ultra", 800, 27.2, "apple"),
    Known(r"M2 Max", 400, 13.6, "apple"),
    Known(r"M2 Pro", 200, 6.8, "apple"),
    Known(r"M2", 100, 3.6, "apple"),
    Known(r"M3 Ultra", 819, 28, "apple"),
    Known(r"M3 Max", 400, 14.2, "apple"),
    Known(r"M3 Pro", 150, 6.4, "apple"),
    Known(r"M3", 100, 3.6, "apple"),
    Known(r"M4 Max", 546, 18.4, "apple"),
    Known(r"M4 Pro", 273, 9.3, "apple"),
    Known(r"M4", 120, 4.3, "apple"),
    Known(r"M5 Max", 614, 56, "apple"),
    Known(r"M5 Pro", 307, 28, "apple"),
    Known(r"M5", 153, 14, "apple"),
)
INTEL = (
    Known(r"A770|8086:56a0", 560, 138, "intel"),
    Known(r"A750|8086:56a1", 512, 120, "intel"),
    Known(r"A380|8086:56a5", 186, 32, "intel"),
    Known(r"B580|8086:e20b", 456, 98, "intel"),
    Known(r"B570|8086:e20c", 380, 80, "intel"),
    Known(r"B60|8086:e211", 456, 98, "intel"),
    Known(r"B50|8086:e212", 224, 71, "intel"),
)
ACCELERATORS = (*AMD, *NVIDIA, *APPLE, *INTEL)
"""The first row that fits counts, so longer names stand before shorter ones."""

PROCESSORS = (
    *(row._replace(tflops=3.0, family="apple-processor") for row in APPLE),
    Known(r"RYZEN AI MAX|Strix Halo", 128, 2.0, "processor"),
    Known(r"Ryzen AI", 120, 1.0, "processor"),
    Known(r"Ryzen Threadripper PRO [35]9\d5WX", 205, 3.0, "processor"),
    Known(r"Ryzen Threadripper PRO [79]9\d5WX", 333, 4.0, "processor"),
    Known(r"Ryzen Threadripper [79]", 166, 3.0, "processor"),
    Known(r"Ryzen Threadripper", 85, 2.0, "processor"),
    Known(r"EPYC 7\d\d1", 171, 1.5, "processor"),
    Known(r"EPYC 7\w{3}", 205, 3.0, "processor"),
    Known(r"EPYC 8\w{3}", 230, 3.0, "processor"),
    Known(r"EPYC 9\w\w4", 461, 6.0, "processor"),
    Known(r"EPYC 9\w\w5", 576, 8.0, "processor"),
    Known(r"Ryzen \d (?:PRO )?[789]\d{3}", 83, 1.0, "processor"),
    Known(r"Ryzen \d (?:PRO )?[1-5]\d{3}", 51, 0.8, "processor"),
    Known(r"Xeon.* (?:Gold|Platinum|Silver) [4-8]1\d\d", 128, 1.5, "processor"),
    Known(r"Xeon.* (?:Gold|Platinum|Silver) [4-8]2\d\d", 141, 1.5, "processor"),
    Known(r"Xeon.* (?:Gold|Platinum|Silver) [4-8]3\d\d", 205, 2.5, "processor"),
    Known(r"Xeon.* (?:Gold|Platinum|Silver|Bronze) [3-8][45]\d\d", 307, 4.0, "processor"),
    Known(r"Xeon.* 69\d\d", 614, 8.0, "processor"),
    Known(r"Core\(TM\) Ultra|(?:1[2-5])th Gen", 83, 1.0, "processor"),
    Known(r"Core\(TM\) i\d-1[2-5]\d{3}", 83, 1.0, "processor"),
    Known(r"Core\(TM\) i\d-(?:[6-9]|1[01])\d{3}", 45, 0.6, "processor"),
    Known(r"Xeon.* E5-\d{4} v[34]", 68, 0.9, "processor"),
    Known(r"Raspberry Pi 5|Cortex-A76", 17, 0.1, "board"),
    Known(r"Raspberry Pi 4|Cortex-A72", 6, 0.03, "board"),
)
"""Those of models whose memory channels are known, all filled with the fastest memory that the vendor names."""

ASSUMED = {
    "discrete": Known("", 400, 25, "amd"),
    "unified": Known("", 80, 8, "strix"),
    "processor": Known("", 50, 0.8, "processor"),
    "board": Known("", 17, 0.1, "board"),
}
"""Kind of a device that no table has → what is assumed of it."""

CORE_GB_PER_S = 8.0
"""So much one core reads per second, threads counted each: assumed."""
CORE_GFLOPS = {True: 150.0, False: 65.0}
"""Whether it has AVX-512 → so much one core computes in prompts: 153 and 64 were measured with 2 cores of EPYCs with f16
(docs/performance.md). Where that is not known, the plan takes it to have them."""
PROCESSORS_PART = 0.5
"""Of the bandwidth of memory that it shares with graphics, what a processor is taken to have: it was half on Strix Halo and Apple's."""

LEAST_GB_PER_S = 0.01
"""Of a memory that was measured: what is less says how much other programs compute, and nothing of memory."""

BOARD_MIB = 17 * 1024
"""An ARM host with Linux and no more memory than this is taken for a small board."""


@functools.lru_cache(maxsize=256)
def of_accelerator(architecture: str, name: str, memory_mib: int = 0) -> Known | None:
    """The row of a device, by its name first, since that says more of the memory than the architecture does."""
    for text in (name, architecture):
        for row in ACCELERATORS:
            if memory_mib >= row.least_mib and re.search(rf"\b(?:{row.pattern})\b", text, re.IGNORECASE):
                return row
    return None


@functools.lru_cache(maxsize=256)
def of_processor(model: str) -> Known | None:
    """The row of a processor, by its model's name."""
    return next((row for row in PROCESSORS if re.search(row.pattern, model, re.IGNORECASE)), None)


def is_board(system: str, architecture: str, memory_mib: int) -> bool:
    """Whether a host is taken for a small board: its own part of the work for a worker takes longer."""
    return system == "Linux" and architecture in ("aarch64", "armv7l") and memory_mib <= BOARD_MIB

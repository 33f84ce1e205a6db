# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Buffer sizes in the log of a start of llama-server."""

from __future__ import annotations

import re

MAX_DEVICES = 256
"""Maximum number of devices in a log."""
BUFFER_LINE_PATTERN = r": +(\S{1,200})(?: +(model|KV|RS|compute|rotation|layer input|DSV4 \w{1,20} state))? buffer size =\s*([0-9]{1,12}(?:\.[0-9]{1,6})?) MiB"


def parse_buffers(log: str) -> dict[str, dict[str, float]]:
    """Return the MiB of each kind on each device, from the log of one start.

    Kinds are model, KV (including recurrent states), compute, and in newer builds rotation and layer input. ik_llama.cpp does not print the kind model.
    A processor has several devices: CPU, AMX, CPU_REPACK and the like."""
    buffers: dict[str, dict[str, float]] = {}
    for name, kind, size in re.findall(BUFFER_LINE_PATTERN, log):
        if name not in buffers and len(buffers) >= MAX_DEVICES:
            continue
        sizes = buffers.setdefault(name.removesuffix("_Mapped"), {})
        kind = "KV" if kind == "RS" or kind.startswith("DSV4") else kind or "model"
        sizes[kind] = round(sizes.get(kind, 0.0) + float(size), 2)
    return buffers

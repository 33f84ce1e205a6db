# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What llama-server logs when it starts: sizes of buffers."""

from __future__ import annotations

import re

DEVICES = 256
"""Of a log, at most."""
BUFFER = r": +(\S{1,200})(?: +(model|KV|RS|compute|rotation|layer input|DSV4 \w{1,20} state))? buffer size =\s*([0-9]{1,12}(?:\.[0-9]{1,6})?) MiB"


def buffers(log: str) -> dict[str, dict[str, float]]:
    """Device → kind (model; KV, with the states of layers; compute; of newer builds rotation and layer input) → MiB that the log of one start
    reports. ik_llama.cpp does not name the kind model. A processor has several: CPU, AMX, CPU_REPACK and the like."""
    devices: dict[str, dict[str, float]] = {}
    for name, kind, size in re.findall(BUFFER, log):
        if name not in devices and len(devices) >= DEVICES:
            continue
        sizes = devices.setdefault(name.removesuffix("_Mapped"), {})
        kind = "KV" if kind == "RS" or kind.startswith("DSV4") else kind or "model"
        sizes[kind] = round(sizes.get(kind, 0.0) + float(size), 2)
    return devices

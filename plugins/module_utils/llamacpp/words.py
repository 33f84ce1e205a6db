# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of forks and backends. What is sent to a host knows them without all that is known of each."""

from __future__ import annotations

import re

MAINLINE = "llama.cpp"
IK_LLAMA = "ik_llama.cpp"
CPU, VULKAN, HIP, CUDA, METAL, SYCL = BACKENDS = ("cpu", "vulkan", "hip", "cuda", "metal", "sycl")
"""As the table of backends has them."""
AMDGPU = "amdgpu"
"""Kernel driver of AMD's devices."""


def backend_of(identity: str) -> str | None:
    """The backend that the id of a build names; None of a name that is no such id."""
    match = re.fullmatch(rf".+-({'|'.join(BACKENDS)})-[0-9a-f]{{8}}", identity)
    return match.group(1) if match else None

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of forks and backends, and words of builds, for hosts; a copy is installed beside the launcher."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

MAINLINE = "llama.cpp"
IK_LLAMA = "ik_llama.cpp"
CPU, VULKAN, HIP, CUDA, METAL, SYCL = BACKENDS = ("cpu", "vulkan", "hip", "cuda", "metal", "sycl")
"""As the table of backends has them."""
AMDGPU = "amdgpu"
"""Kernel driver of AMD's devices."""
WORDS_INSTEAD = "words-instead.json"
"""In the folder of a build: option that its llama-server lacks → what it is told, empty for nothing."""


def backend_of(identity: str) -> str | None:
    """The backend that the id of a build names; None of a name that is no such id."""
    match = re.fullmatch(rf".+-({'|'.join(BACKENDS)})-[0-9a-f]{{8}}", identity)
    return match.group(1) if match else None


def said_to_build(argv: Sequence[str]) -> list[str]:
    """A planned command line of llama-server in the words of its build."""
    path = Path(argv[0]).parent.parent / WORDS_INSTEAD
    instead = json.loads(path.read_text()) if path.is_file() else {}
    said, says = [], True
    for word in argv:
        if re.match("--?[A-Za-z]", word):
            says = bool(instead.get(word, word))
        said += [instead.get(word, word)] * says
    return said

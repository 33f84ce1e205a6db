# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of forks and backends, and command lines of builds, for hosts. A copy is installed next to the launcher."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

MAINLINE = "llama.cpp"
IK_LLAMA = "ik_llama.cpp"
CPU, VULKAN, HIP, CUDA, METAL, SYCL = BACKENDS = ("cpu", "vulkan", "hip", "cuda", "metal", "sycl")
"""Names in the table of backends."""
AMDGPU = "amdgpu"
"""Kernel driver of AMD's devices."""
REPLACEMENTS_FILE = "words-instead.json"
"""File in a build's folder with a replacement for each option that its llama-server lacks; an empty one drops the option."""


def backend_of(build_id: str) -> str | None:
    """Return the backend in the id of a build; None if the text is not such an id."""
    match = re.fullmatch(rf".+-({'|'.join(BACKENDS)})-[0-9a-f]{{8}}", build_id)
    return match.group(1) if match else None


def adapt_argv(argv: Sequence[str]) -> list[str]:
    """Return a planned command line of llama-server with the options of its build."""
    path = Path(argv[0]).parent.parent / REPLACEMENTS_FILE
    replacements = json.loads(path.read_text()) if path.is_file() else {}
    words, is_kept = [], True
    for word in argv:
        if re.match("--?[A-Za-z]", word):
            is_kept = bool(replacements.get(word, word))
        words += [replacements.get(word, word)] * is_kept
    return words

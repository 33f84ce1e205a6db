# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection's patches to ggml-rpc for faster loading (``llama_build_fast_load``)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PATCH_FOLDER = Path(__file__).resolve().parents[3] / "roles" / "llama_build" / "files"
"""Folder of the patches on the controller."""
PATCHED_FILE = "ggml/src/ggml-rpc/ggml-rpc.cpp"
PATCH_PREFIX = "fast_load-"
CACHE_SUFFIX = "-fast"
"""Suffix of a patched worker's cache folder, whose file names contain a different hash than llama.cpp's."""


class FastLoadPatch(NamedTuple):
    name: str
    sha256: str

    @property
    def path(self) -> str:
        return str(PATCH_FOLDER / self.name)


PATCHES = {
    "7.0.0": FastLoadPatch(f"{PATCH_PREFIX}7.patch", "8d5a99d59b51382e8848b1e5c0385eff61beacf7ab49b3f49055977dc25fee47")
}
"""Patch for each RPC protocol of llama.cpp. The patch for protocol 7 applies to llama-cpp-python 0.3.36 (0c1e570) and to b11434."""
EXAMPLE_RELEASE = "llama-cpp-python 0.3.36"


def patch_of(protocol: str | None, is_mainline: bool) -> FastLoadPatch | None:
    """Return the patch for a release, or None if there is none."""
    return PATCHES.get(protocol or "") if is_mainline else None


def is_fast_load_patch(sha256: str) -> bool:
    return any(sha256 == patch.sha256 for patch in PATCHES.values())

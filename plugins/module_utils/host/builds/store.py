# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where releases and builds of a host are, which builds run or never ended, and their removal."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import words

PACKED, PARTIAL, UNPACKED = ".tar.gz", ".new", ".unpacked"
UNFINISHED = (UNPACKED, PACKED + PARTIAL)
"""Endings of files beside the folder of a build that has not ended."""


def log_path(cache: str, identity: str) -> str:
    return f"{cache}/builds/{identity}.log"


def packed_path(cache: str, identity: str) -> str:
    """Where an installed release is packed to be sent to other hosts."""
    return f"{cache}/builds/{identity}{PACKED}"


def lock_path(cache: str | Path) -> Path:
    """The lock of a host's builds."""
    return Path(cache, names.BUILDS_LOCK)


def unfinished_builds(cache: str, exceptions: Collection[str]) -> list[str]:
    """Ids of builds that never ended; none while a build runs.

    :param exceptions: ids that are planned or installed, and left out.
    """
    if locks.is_held(lock_path(cache)):
        return []
    builds = Path(cache) / "builds"
    identities = {path.name for path in builds.glob("*") if path.is_dir()}
    for ending in UNFINISHED:
        identities.update(path.name[: -len(ending)] for path in builds.glob("*" + ending))
    return sorted(identity for identity in identities - set(exceptions) if words.backend_of(identity))


def clear_build(cache: str, identity: str) -> None:
    """Removes what a build left, apart from sources and ccache. Of what has no such id nothing: the cache has no mark, and an operator may have put
    it there."""
    if words.backend_of(identity):
        builds = Path(cache) / "builds"
        shutil.rmtree(builds / identity, ignore_errors=True)
        for ending in (".log", PACKED, *UNFINISHED):
            (builds / (identity + ending)).unlink(missing_ok=True)


def remove_release(prefix: str, cache: str, identity: str) -> None:
    """Removes a release and what its build left, apart from sources and ccache."""
    clear_build(cache, identity)
    shutil.rmtree(Path(prefix) / "releases" / identity)

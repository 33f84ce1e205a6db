# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where releases and builds of a host are, which builds run or never ended, and their removal."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

PACKED, PARTIAL, UNPACKED, CONFIGURED, LOCK = ".tar.gz", ".new", ".unpacked", ".configured", ".lock"
UNFINISHED = (UNPACKED, CONFIGURED, PACKED + PARTIAL, LOCK)
"""Endings of files beside the folder of a build that has not ended. The lock goes last."""


def log_path(cache: str, identity: str) -> str:
    return f"{cache}/builds/{identity}.log"


def packed_path(cache: str, identity: str) -> str:
    """Where an installed release is packed to be sent to other hosts."""
    return f"{cache}/builds/{identity}{PACKED}"


def lock_path(cache: str | Path, identity: str) -> Path:
    """The lock of a build."""
    return Path(cache) / "builds" / (identity + LOCK)


def under_way(cache: str, identity: str) -> bool:
    """Whether a build runs on this host now, perhaps one that a killed playbook has left."""
    path = lock_path(cache, identity)
    if not path.exists():
        return False
    try:
        with locks.hold(path):
            return False
    except locks.BusyError:
        return True


def builds_under_way(cache: str) -> list[str]:
    """Ids of the builds that run on this host now."""
    identities = (path.name[: -len(LOCK)] for path in Path(cache, "builds").glob("*" + LOCK))
    return [identity for identity in identities if under_way(cache, identity)]


def unfinished_builds(cache: str, exceptions: Collection[str]) -> list[str]:
    """Ids of builds that never ended and do not run now.

    :param exceptions: ids that are planned or installed, and left out.
    """
    builds = Path(cache) / "builds"
    identities = {path.name for path in builds.glob("*") if path.is_dir()}
    for ending in UNFINISHED:
        identities.update(path.name[: -len(ending)] for path in builds.glob("*" + ending))
    identities = {identity for identity in identities - set(exceptions) if backends.backend_of(identity)}
    return sorted(identity for identity in identities if not under_way(cache, identity))


def clear_build(cache: str, identity: str) -> bool:
    """Removes what a build left, apart from sources and ccache; returns False where it runs, or where no build has such an id: the cache has no mark,
    and an operator may have put that there."""
    if not backends.backend_of(identity):
        return False
    builds = Path(cache) / "builds"
    if builds.is_dir():
        try:
            with locks.hold(lock_path(cache, identity)):
                shutil.rmtree(builds / identity, ignore_errors=True)
                for ending in (".log", PACKED, *UNFINISHED):
                    (builds / (identity + ending)).unlink(missing_ok=True)
        except locks.BusyError:
            return False
    return True


def remove_release(prefix: str, cache: str, identity: str) -> None:
    """Removes a release and what its build left, apart from sources and ccache."""
    clear_build(cache, identity)
    release = Path(prefix) / "releases" / identity
    removed = release.with_name(f".{identity}")
    shutil.rmtree(removed, ignore_errors=True)
    if release.exists():
        release.rename(removed)
        shutil.rmtree(removed)

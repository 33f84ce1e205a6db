# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths, unfinished builds and removal of a host's releases and builds."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import words

PACKED_SUFFIX, PARTIAL_SUFFIX, UNPACKED_SUFFIX = ".tar.gz", ".new", ".unpacked"
BUILD_FILE_SUFFIXES = (UNPACKED_SUFFIX, PACKED_SUFFIX + PARTIAL_SUFFIX)
"""Suffixes of files in the folder of builds that belong to an unfinished build."""


def log_path(cache: str, identity: str) -> str:
    return f"{cache}/builds/{identity}.log"


def packed_path(cache: str, identity: str) -> str:
    return f"{cache}/builds/{identity}{PACKED_SUFFIX}"


def lock_path(cache: str | Path) -> Path:
    return Path(cache, names.BUILDS_LOCK)


def unfinished_builds(cache: str, exceptions: Collection[str]) -> list[str]:
    """Return the ids of unfinished builds; none while a build runs.

    :param exceptions: planned or installed ids, which are skipped.
    """
    if locks.is_held(lock_path(cache)):
        return []
    builds_folder = Path(cache) / "builds"
    identities = {path.name for path in builds_folder.glob("*") if path.is_dir()}
    for suffix in BUILD_FILE_SUFFIXES:
        identities.update(path.name[: -len(suffix)] for path in builds_folder.glob("*" + suffix))
    return sorted(identity for identity in identities - set(exceptions) if words.backend_of(identity))


def clear_build(cache: str, identity: str) -> None:
    """Remove the files of a build, except sources and ccache. Other files stay: the cache has no mark, and an operator may have put them there."""
    if words.backend_of(identity):
        builds_folder = Path(cache) / "builds"
        shutil.rmtree(builds_folder / identity, ignore_errors=True)
        for suffix in (".log", PACKED_SUFFIX, *BUILD_FILE_SUFFIXES):
            (builds_folder / (identity + suffix)).unlink(missing_ok=True)


def remove_release(prefix: str, cache: str, identity: str) -> None:
    """Remove a release and the files of its build, except sources and ccache."""
    clear_build(cache, identity)
    shutil.rmtree(Path(prefix) / "releases" / identity)

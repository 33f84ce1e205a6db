# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names the files of a host's releases and builds, finds unfinished builds, and removes both."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import words

PACKED_SUFFIX, PARTIAL_SUFFIX, UNPACKED_SUFFIX = ".tar.gz", ".new", ".unpacked"
BUILD_FILE_SUFFIXES = (UNPACKED_SUFFIX, PACKED_SUFFIX + PARTIAL_SUFFIX)
"""Suffixes of files in the folder of builds that belong to an unfinished build."""


def log_path(cache: str, build_id: str) -> str:
    return f"{cache}/builds/{build_id}.log"


def packed_path(cache: str, build_id: str) -> str:
    return f"{cache}/builds/{build_id}{PACKED_SUFFIX}"


def lock_path(cache: str | Path) -> Path:
    return Path(cache, names.BUILDS_LOCK_FILE)


def unfinished_build_ids(cache: str, excluded_ids: Collection[str]) -> list[str]:
    """Return the ids of unfinished builds; none while a build runs.

    :param excluded_ids: ids of planned or installed builds, which are skipped.
    """
    if files.is_locked(lock_path(cache)):
        return []
    builds_folder = Path(cache) / "builds"
    build_ids = {path.name for path in builds_folder.glob("*") if path.is_dir()}
    for suffix in BUILD_FILE_SUFFIXES:
        build_ids.update(path.name[: -len(suffix)] for path in builds_folder.glob("*" + suffix))
    return sorted(build_id for build_id in build_ids - set(excluded_ids) if words.backend_of(build_id))


def clear_build(cache: str, build_id: str) -> None:
    """Remove the files of a build, except sources and ccache. Other files stay: the cache has no mark, so an operator may have put them there."""
    if words.backend_of(build_id):
        builds_folder = Path(cache) / "builds"
        shutil.rmtree(builds_folder / build_id, ignore_errors=True)
        for suffix in (".log", PACKED_SUFFIX, *BUILD_FILE_SUFFIXES):
            (builds_folder / (build_id + suffix)).unlink(missing_ok=True)


def remove_release(prefix: str, cache: str, build_id: str) -> None:
    """Remove a release and the files of its build, except sources and ccache."""
    clear_build(cache, build_id)
    shutil.rmtree(Path(prefix) / "releases" / build_id)

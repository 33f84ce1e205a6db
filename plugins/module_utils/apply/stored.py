# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Releases and builds as a host stores them: which are whole, which run or never ended, and how they go."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import IO

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

MANIFEST = "manifest.json"
PACKED, PARTIAL, UNPACKED, CONFIGURED, LOCK = ".tar.gz", ".new", ".unpacked", ".configured", ".lock"
UNFINISHED = (UNPACKED, CONFIGURED, PACKED + PARTIAL, LOCK)
"""Endings of files beside the folder of a build by which one is found that has not ended. The lock goes last."""


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def installed(release: Path) -> dict | None:
    """The manifest of an installed release whose files are what it says, or None."""
    try:
        manifest = json.loads((release / MANIFEST).read_text())
        intact = all(sha256(release / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return manifest if intact else None


def log_path(cache: str, identity: str) -> str:
    return f"{cache}/builds/{identity}.log"


def packed_path(cache: str, identity: str) -> str:
    """Where an installed release is packed to be sent to other hosts."""
    return f"{cache}/builds/{identity}{PACKED}"


def lock(path: Path, wait: bool) -> IO[str] | None:
    """Locks a build until the returned file is closed. Without wait it is None where another process has the lock."""
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass
        file.close()


def under_way(cache: str, identity: str) -> bool:
    """Whether a build runs on this host now, perhaps one that a killed playbook has left."""
    path = Path(cache) / "builds" / (identity + LOCK)
    if not path.exists():
        return False
    held = lock(path, wait=False)
    if held:
        held.close()
    return held is None


def unfinished_builds(cache: str, kept: set[str]) -> list[str]:
    """Ids of builds that never ended and do not run now, and of releases that were copied here to be installed and were not.

    :param kept: ids that are planned or installed, and left out.
    """
    builds, sources = Path(cache) / "builds", Path(cache) / "sources"
    identities = {path.name for path in builds.glob("*") if path.is_dir()}
    for ending in UNFINISHED:
        identities.update(path.name[: -len(ending)] for path in builds.glob("*" + ending))
    brought = {path.name[: -len(PACKED)] for path in sources.glob("*" + PACKED)}
    identities |= {identity for identity in brought if backends.backend_of(identity)}
    return sorted(identity for identity in identities - kept if not under_way(cache, identity))


def clear_build(cache: str, identity: str) -> bool:
    """Removes what a build left, apart from sources and ccache; returns False where it runs."""
    builds = Path(cache) / "builds"
    if builds.is_dir():
        held = lock(builds / (identity + LOCK), wait=False)
        if not held:
            return False
        with held:
            shutil.rmtree(builds / identity, ignore_errors=True)
            for ending in (".log", PACKED, *UNFINISHED):
                (builds / (identity + ending)).unlink(missing_ok=True)
    (Path(cache) / "sources" / (identity + PACKED)).unlink(missing_ok=True)
    return True


def remove_release(prefix: str, cache: str, identity: str) -> None:
    """Removes a release and what its build left, apart from sources and ccache."""
    clear_build(cache, identity)
    release = Path(prefix) / "releases" / identity
    gone = release.with_name(f".{identity}")
    shutil.rmtree(gone, ignore_errors=True)
    if release.exists():
        release.rename(gone)
        shutil.rmtree(gone)

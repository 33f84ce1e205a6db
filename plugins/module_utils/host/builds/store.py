# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Releases and builds as a host stores them: which are whole, which run or never ended, and how they go."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends

MANIFEST = "manifest.json"
PACKED, PARTIAL, UNPACKED, CONFIGURED, LOCK = ".tar.gz", ".new", ".unpacked", ".configured", ".lock"
UNFINISHED = (UNPACKED, CONFIGURED, PACKED + PARTIAL, LOCK)
"""Endings of files beside the folder of a build by which one is found that has not ended. The lock goes last."""


MANIFEST_BYTES = 16 << 20
FILE_OF_A_RELEASE = r"bin/\w[\w.+-]*"


def hashes(given: Any) -> dict[str, str]:
    """File of a release → sha256, as a manifest or a record names them; empty where it is anything else."""
    if not isinstance(given, dict):
        return {}
    good = all(
        isinstance(digest, str)
        and re.fullmatch(FILE_OF_A_RELEASE, name, re.ASCII)
        and re.fullmatch(r"[0-9a-f]{64}", digest)
        for name, digest in given.items()
    )
    return given if good else {}


def installed(
    release: Path,
    targets: Iterable[str] = (),
    recorded: Mapping[str, str] | None = None,
    builder: str | None = None,
) -> dict | None:
    """The manifest of an installed release whose files are what it says, or None.

    :param targets: programs that it must have.
    :param recorded: what the controller saw when the release was built: file → sha256. Empty or None where it saw nothing.
    :param builder: the host that has to compile it: without ``recorded``, what another one compiled does not count.
    """
    try:
        with reading.open_file(release / MANIFEST, follow=True) as stream:
            text = stream.read(MANIFEST_BYTES + 1)
        manifest = json.loads(text[:MANIFEST_BYTES])
        files = hashes(manifest["files"])
        whole = bool(files) and all(f"bin/{target}" in files for target in targets)
        if not whole or (recorded and files != recorded):
            return None
        if builder and not recorded and manifest.get("received") not in (None, builder):
            return None
        for name, digest in files.items():
            with reading.open_file(release / name, follow=True) as stream:
                if sha256_of(stream) != digest:
                    return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return manifest


def packed_files(archive: Path, expected: Collection[str]) -> dict[str, str]:
    """File → sha256 of what a packed release holds beside its manifest; empty where it cannot be read to its end, or holds anything else.

    :param expected: names of its files.
    """
    try:
        with archives.open_archive(archive, of_host=True) as packed:
            found: dict[str, str] = {}
            size, left = 0, {MANIFEST, *expected}
            for member in packed:
                size += member.size
                if size > archives.LIMIT_BYTES or not member.isfile() or member.name not in left:
                    return {}
                left.remove(member.name)
                found[member.name] = sha256_of(cast(IO[bytes], packed.extractfile(member)))
            found.pop(MANIFEST, None)
            return found
    except (*archives.DAMAGED, OSError):
        return {}


def log_path(cache: str, identity: str) -> str:
    return f"{cache}/builds/{identity}.log"


def packed_path(cache: str, identity: str) -> str:
    """Where an installed release is packed to be sent to other hosts."""
    return f"{cache}/builds/{identity}{PACKED}"


def lock(path: Path) -> IO[str] | None:
    """Locks a build until the returned file is closed, here and in the processes that inherit it; None where others have the lock."""
    while True:
        file = os.fdopen(locks.open_file(path), "w")
        if not locks.take(file.fileno()):
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def under_way(cache: str, identity: str) -> bool:
    """Whether a build runs on this host now, perhaps one that a killed playbook has left."""
    path = Path(cache) / "builds" / (identity + LOCK)
    if not path.exists():
        return False
    held = lock(path)
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
        held = lock(builds / (identity + LOCK))
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

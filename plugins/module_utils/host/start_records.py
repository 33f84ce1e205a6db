# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records of the definition and files with which each service was last started."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.reading import run_disk_work
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import read_json

LARGE_FILE_BYTES = 64 * 1024 * 1024
"""Size above which a service's file is compared by size and modification time."""


def digest_of(definition: str, paths: Iterable[str]) -> str:
    """Return a digest of a service's definition and its files; of large files, such as a model, it covers size and modification time.

    :raises Refusal: a disk does not answer.
    """
    digest = hashlib.sha256(definition.encode())
    for path in paths:
        digest.update(run_disk_work(path, functools.partial(_state_of, Path(path))).encode())
    return digest.hexdigest()


def _state_of(path: Path) -> str:
    try:
        status = path.stat()
        is_large = status.st_size > LARGE_FILE_BYTES
        return f"{path} {status.st_size} {status.st_mtime_ns if is_large else sha256(path)}\n"
    except OSError:
        return f"{path} is missing\n"


def is_current(prefix: str, name: str, definition: str, paths: Iterable[str]) -> bool:
    """Return whether a service was started with this definition and the present files."""
    return read_json(prefix, names.START_DIGESTS_FILE).get(name) == digest_of(definition, paths)


def write_digests(prefix: str, digests: Mapping[str, str]) -> None:
    """Record the digests of started services.

    :param digests: service → digest from before its start. A file that changes during the start causes another restart.
    :raises OSError: the file cannot be written; the exception names it.
    """
    if digests:
        replace_file(
            Path(prefix, names.START_DIGESTS_FILE),
            json.dumps({**read_json(prefix, names.START_DIGESTS_FILE), **digests}) + "\n",
            0o600,
        )

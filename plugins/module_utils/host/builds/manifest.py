# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Manifest of an installed release: its origin, files and features."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import stream_sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
PROGRAM_PATTERN = r"bin/\w[\w.+-]*"


class Manifest(NamedTuple):
    """A manifest. Its types are checked, because hosts do not trust the manifests of releases that other hosts built."""

    id: str
    cmake_options: Mapping[str, str]
    files: Mapping[str, Annotated[str, Text(r"[0-9a-f]{64}")]]
    """File → sha256."""
    source: Mapping[str, Any]
    seconds: float
    """Duration of the build."""
    received_from: Optional[str] = None
    """Host that compiled the release, if another host did."""
    page: Optional[bool] = None
    """Whether llama-server has its chat page; None without llama-server."""


def read_manifest(folder: Path) -> Optional[Manifest]:
    """Return the manifest of a folder; None without a valid one."""
    manifest = typed_json.read_file(Manifest, folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    names = manifest.files if manifest else ()
    return manifest if all(re.fullmatch(PROGRAM_PATTERN, name, re.ASCII) for name in names) else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_FILE).write_text(json.dumps(typed_json.dump(manifest), indent=2, sort_keys=True) + "\n")


def installed_manifest(folder: Path, targets: Iterable[str] = (), builders: Iterable[str] = ()) -> Optional[Manifest]:
    """Return the manifest of an installed release if its files match it, or None.

    :param builders: other hosts whose builds are accepted; if empty, any host's.
    """
    manifest = read_manifest(folder)
    if manifest is None or any(f"bin/{target}" not in manifest.files for target in targets):
        return None
    if builders and manifest.received_from not in (None, *builders):
        return None
    try:
        for name, digest in manifest.files.items():
            with reading.open_file(folder / name, follows_links=True) as stream:
                if stream_sha256(stream) != digest:
                    return None
    except OSError:
        return None
    return manifest

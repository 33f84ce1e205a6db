# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The manifest of an installed release: where it comes from, its files, and what its programs can do."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text

NAME = "manifest.json"
LIMIT_BYTES = 16 << 20
FILE = r"bin/\w[\w.+-]*"


class Manifest(NamedTuple):
    """A host that installs the release of another one reads it: it may hold anything, and is checked against these types."""

    id: str
    cmake_options: Mapping[str, str]
    files: Mapping[str, Annotated[str, Text(r"[0-9a-f]{64}")]]
    """File → sha256."""
    source: Mapping[str, Any]
    seconds: float
    """Of the build."""
    received: Optional[str] = None
    """The host that compiled it, of a release that came from another one."""


def read(release: Path) -> Optional[Manifest]:
    """The manifest of a folder; None where it has none of this form."""
    try:
        manifest = typed_json.parse(Manifest, reading.read_object(release / NAME, LIMIT_BYTES))
    except (OSError, ValueError):
        return None
    return manifest if all(re.fullmatch(FILE, name, re.ASCII) for name in manifest.files) else None


def write(release: Path, manifest: Manifest) -> None:
    (release / NAME).write_text(json.dumps(typed_json.dump(manifest), indent=2, sort_keys=True) + "\n")


def installed(release: Path, targets: Iterable[str] = (), builder: Optional[str] = None) -> Optional[Manifest]:
    """The manifest of an installed release whose files are as it says, or None.

    :param targets: programs that it must have.
    :param builder: the planned host that compiles it: what another one compiled does not count.
    """
    manifest = read(release)
    if manifest is None or any(f"bin/{target}" not in manifest.files for target in targets):
        return None
    if builder and manifest.received not in (None, builder):
        return None
    try:
        for name, digest in manifest.files.items():
            with reading.open_file(release / name, follow=True) as stream:
                if sha256_of(stream) != digest:
                    return None
    except OSError:
        return None
    return manifest

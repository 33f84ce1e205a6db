# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads the RPC protocol from an archive of llama.cpp's source."""

from __future__ import annotations

import re
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives

HEADER = "/ggml/include/ggml-rpc.h"
MEMBER_BYTES = 1 << 20
"""Of a file that is read; the header has 1 kB."""
DEPTH = 8
"""Parts of its path at most: other files of that name belong to something else."""


def protocol_of(archive: Path) -> str | None:
    """As 7.0.0; None where the archive does not say it.

    :raises OSError, archives.DamagedError: it cannot be read, or is not a whole archive.
    """
    for member in archives.members(archive):
        near = str(member.path).endswith(HEADER) and len(member.path.parts) <= DEPTH
        content = member.open() if near and not member.link else None
        if content:
            return protocol(content.read(MEMBER_BYTES).decode("utf-8", "replace"))
    return None


def protocol(header: str) -> str | None:
    """From the text of ggml-rpc.h."""
    numbers = dict(re.findall(r"#define\s+RPC_PROTO_(MAJOR|MINOR|PATCH)_VERSION\s+(\d{1,4})\b", header))
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH")) if len(numbers) == 3 else None

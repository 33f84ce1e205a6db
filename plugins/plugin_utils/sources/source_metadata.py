# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads from an archive of llama.cpp's source its RPC protocol, and from one of llama-cpp-python also commit and day."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives

HEADER, CLONE = "ggml/include/ggml-rpc.h", ".git/modules/vendor/llama.cpp/"
MEMBER_BYTES = 1 << 20
"""Of a file that is read; the header has 1 kB."""
DEPTH = 6
"""Folders above it at most: other files of that name belong to something else."""


class SourceMetadata(NamedTuple):
    """None for what the archive does not say."""

    commit: str | None
    day: str | None
    """UTC, as 2026-06-01: when llama-cpp-python's release checked the commit out, hours after it was made."""
    protocol: str | None
    """Of RPC, as 7.0.0."""


def read(archive: Path) -> SourceMetadata:
    """:raises OSError, archives.DamagedError: it cannot be read, or is not a whole archive."""
    texts: dict[str, str] = {}
    with archives.opened(archive) as members:
        for member in members:
            kind = next((end for end in (HEADER, CLONE + "HEAD", CLONE + "logs/HEAD") if _ends(member.name, end)), None)
            if kind and kind not in texts and member.isfile() and member.size <= MEMBER_BYTES:
                texts[kind] = members.open(member).read().decode("utf-8", "replace")
    commit = re.match(r"[0-9a-f]{40}\s*$", texts.get(CLONE + "HEAD", ""))
    seconds = re.findall(r"> ([0-9]{9,11}) [+-][0-9]{4}\t", texts.get(CLONE + "logs/HEAD", ""))
    day = datetime.fromtimestamp(int(seconds[-1]), timezone.utc).strftime("%Y-%m-%d") if seconds else None
    return SourceMetadata(commit[0].strip() if commit else None, day, protocol(texts.get(HEADER, "")))


def _ends(name: str, end: str) -> bool:
    return name.endswith("/" + end) and name.count("/") - end.count("/") <= DEPTH


def protocol(header: str) -> str | None:
    """From the text of ggml-rpc.h."""
    numbers = dict(re.findall(r"#define\s+RPC_PROTO_(MAJOR|MINOR|PATCH)_VERSION\s+(\d{1,4})\b", header))
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH")) if len(numbers) == 3 else None


def cached(archive: Path) -> SourceMetadata:
    """The same, read once: it lies beside the archive, which is named by its content."""
    path = archive.with_name(archive.name.split(".", maxsplit=1)[0] + ".tree")
    with suppress(OSError, ValueError, TypeError):
        return SourceMetadata(**json.loads(path.read_text()))
    metadata = read(archive)
    with suppress(OSError):
        path.write_text(json.dumps(metadata._asdict()) + "\n")
    return metadata

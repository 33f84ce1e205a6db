# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an archive of llama.cpp's source says of itself: protocol, and of llama-cpp-python's also commit and day."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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


class Source(NamedTuple):
    """None for what the archive does not say.

    :param day: UTC, as 2026-06-01: when llama-cpp-python's release checked the commit out, hours after it was made.
    :param protocol: of RPC, as 7.0.0.
    """

    commit: str | None
    day: str | None
    protocol: str | None


def read(archive: Path) -> Source:
    """:raises OSError, prebuilt.DAMAGED: it is not a whole archive."""
    parts: dict[str, str] = {}
    with archives.open_archive(archive) as members:
        for member in members:
            kind = next((end for end in (HEADER, CLONE + "HEAD", CLONE + "logs/HEAD") if _ends(member.name, end)), None)
            if kind and member.isfile() and member.size <= MEMBER_BYTES:
                stream = members.extractfile(member)
                parts.setdefault(kind, stream.read().decode("utf-8", "replace") if stream else "")
    commit = re.match(r"[0-9a-f]{40}\s*$", parts.get(CLONE + "HEAD", ""))
    seconds = re.findall(r"> ([0-9]{9,11}) [+-][0-9]{4}\t", parts.get(CLONE + "logs/HEAD", ""))
    day = datetime.fromtimestamp(int(seconds[-1]), timezone.utc).strftime("%Y-%m-%d") if seconds else None
    return Source(commit[0].strip() if commit else None, day, protocol(parts.get(HEADER, "")))


def _ends(name: str, end: str) -> bool:
    return name.endswith("/" + end) and name.count("/") - end.count("/") <= DEPTH


def protocol(header: str) -> str | None:
    """From the text of ggml-rpc.h."""
    numbers = dict(re.findall(r"#define\s+RPC_PROTO_(MAJOR|MINOR|PATCH)_VERSION\s+(\d{1,4})\b", header))
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH")) if len(numbers) == 3 else None


def recorded(archive: Path, read: Callable[[Path], Source] = read) -> Source:
    """The same, read once: the record lies beside the archive, which is named by its content."""
    record = archive.with_name(archive.name.split(".", maxsplit=1)[0] + ".tree")
    with suppress(OSError, ValueError, TypeError):
        known = Source(**json.loads(record.read_text()))
        if all(value is None or isinstance(value, str) for value in known):
            return known
    known = read(archive)
    with suppress(OSError):
        record.write_text(json.dumps(known._asdict()) + "\n")
    return known

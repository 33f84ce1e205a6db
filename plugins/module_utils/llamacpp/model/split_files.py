# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""File names of split models (gguf-split)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

FIRST_PART_PATTERN = re.compile(r"(.*)-00001-of-([0-9]{5})\.gguf", re.DOTALL)


class ModelFiles(NamedTuple):
    """Files of one model: a single file, or the parts of a split model in order."""

    names: tuple[str, ...]
    is_complete: bool


RAW_PART_PATTERN = re.compile(
    r"(?i).*[.-](part[-_.]?(\d+|[a-z]{1,2})([-_]?of[-_]?\d+)?|split-[a-z]{1,2}|(?<=gguf\.)(\d{2,3}|[a-z]{2}))(\.gguf)?"
)
"""Pattern for the name of a part of a file that was split without regard to its format."""
PART_PATTERN = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the split model that a file belongs to; for other files, only the name itself."""
    match = PART_PATTERN.fullmatch(name)
    if not match or not 0 < int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{index:05d}-of-{match[3]}.gguf" for index in range(1, int(match[3]) + 1)]


def group_files(names: Iterable[str]) -> list[ModelFiles]:
    """Group files into models, in the order of each model's first file."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        match = PART_PATTERN.fullmatch(name)
        key = (match[1], match[3]) if match and "00000" < match[2] <= match[3] else (name, "1")
        groups.setdefault(key, []).append(name)
    return [ModelFiles(tuple(sorted(files)), len(files) == int(count)) for (_name, count), files in groups.items()]

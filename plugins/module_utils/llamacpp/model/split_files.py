# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of the files of a model that has several (gguf-split)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

FIRST = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.DOTALL)
"""Name of the first one."""


class ModelFiles(NamedTuple):
    """Files that are one model: a single one, or those of a split model in their order."""

    names: tuple[str, ...]
    missing: tuple[str, ...] = ()
    """Files of the split model that are not there."""


RAW_PART = re.compile(
    r"(?i).*[.-](part[-_.]?(\d+|[a-z]{1,2})([-_]?of[-_]?\d+)?|split-[a-z]{1,2}|(?<=gguf\.)(\d{2,3}|[a-z]{2}))(\.gguf)?"
)
"""Name of a part of a file that was cut at any byte."""
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def siblings(name: str) -> list[str]:
    """Names of all files of the split model that a file belongs to; of another model, its own."""
    match = PART.fullmatch(name)
    if not match or not 0 < int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{index:05d}-of-{match[3]}.gguf" for index in range(1, int(match[3]) + 1)]


def group(names: Iterable[str]) -> list[ModelFiles]:
    """The models that files make up, in the order of their first names."""
    unique = dict.fromkeys(names)
    groups: dict[tuple[str, ...], ModelFiles] = {}
    for name in unique:
        files = tuple(siblings(name))
        present = tuple(file for file in files if file in unique)
        groups[files] = ModelFiles(present, tuple(file for file in files if file not in unique))
    return list(groups.values())

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Version numbers in the output of programs."""

from __future__ import annotations

import re


def parse(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d{1,18}", version)))


def first_version(text: str) -> str | None:
    """Return the first version number in a text, or a line that consists of a number."""
    match = re.search(r"\d{1,18}(\.\d{1,18})+|^\d{1,18}$", text, re.MULTILINE)
    return match.group(0) if match else None

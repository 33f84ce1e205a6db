# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables and paragraphs for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

MAX_LINE_LENGTH = 100
"""In columns."""


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows with aligned columns; the last column is not padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip() for row in rows
    )


def wrap(indent: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        MAX_LINE_LENGTH,
        initial_indent=indent,
        subsequent_indent=" " * (len(indent) - len(indent.lstrip()) + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )

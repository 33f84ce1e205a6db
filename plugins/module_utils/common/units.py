# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Readable sizes and durations, and whole numbers in the output of programs. A copy is installed next to the launcher."""

from __future__ import annotations

MIB = 1024 * 1024
GB, MB = 1_000_000_000, 1_000_000
TIME_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def size_text(size_bytes: float) -> str:
    """Return a size in bytes as text: '1.2 GB', '80 MB', '1.5 MB'."""
    if size_bytes >= GB:
        return f"{size_bytes / GB:.1f} GB"
    return f"{size_bytes / MB:.{0 if size_bytes >= 10 * MB else 1}f} MB"


def parse_count(text: str) -> int | None:
    """Return a whole number of at most 18 digits; None for any other text."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None


def duration_text(seconds: float | None) -> str:
    """Return a duration as text in at most two units: '3 d 4 h', '12 min', '45 s'."""
    if seconds is None:
        return ""
    whole_seconds = int(seconds)
    for index, (unit_seconds, unit) in enumerate(TIME_UNITS):
        if whole_seconds >= unit_seconds:
            remainder = whole_seconds % unit_seconds // TIME_UNITS[index + 1][0] if index + 1 < len(TIME_UNITS) else 0
            remainder_text = f" {remainder} {TIME_UNITS[index + 1][1]}" if remainder and unit != "min" else ""
            return f"{whole_seconds // unit_seconds} {unit}{remainder_text}"
    return "0 s"

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of what operators and hosts say: texts without control characters, finite numbers, and a largest size."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, NamedTuple

CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that end a line, control a terminal, change the order of what is shown, or are half a character."""
LONGEST = 65536
"""Characters of a text."""
LONGEST_NAME = 255
"""Characters of a host's name, and of a text where nothing else is said."""
LARGEST = 1 << 53
"""Whole numbers up to here are the same in JSON everywhere."""
SHOWN = 60
"""Characters of a value in a message."""
OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
PORT = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
IPV4 = rf"{OCTET}(\.{OCTET}){{3}}"
"""Any IPv4 address, as ``ipaddress`` reads one."""
PREFIX = "/(3[0-2]|[12]?[0-9])"
NETWORK = f"{IPV4}({PREFIX})?"
ENDPOINT = f"{IPV4}:{PORT}"
ONE_HOST = rf"(?!0\.|22[4-9]\.|2[345][0-9]\.){IPV4}"
"""An address that one host has: not every address, and none of many hosts."""
INTERFACE = f"{ONE_HOST}{PREFIX}"
"""Such an address with the length of its network's prefix."""


def show(value: Any) -> str:
    """A value for a message: on one line, not long, without control characters."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length()} bits"
    if value is not None and not isinstance(value, (str, int, float)):
        return f"a {type(value).__name__}"
    text = repr(value[:SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def is_plain(text: str) -> bool:
    """Whether a text can stand in a definition, a command, a file and on a screen: one line, without control characters."""
    return text.isprintable() or not any(map(_is_control, text))


def _is_control(character: str) -> bool:
    """Also of what Unicode keeps from ever being a character, like U+FFFE, which YAML does not take."""
    number = ord(character)
    return unicodedata.category(character) in CONTROL or number & 0xFFFE == 0xFFFE or 0xFDD0 <= number <= 0xFDEF


MOST_SHOWN = 2000
"""Characters of a text on a screen."""


def printable(text: Any, limit: int | None = MOST_SHOWN) -> str:
    """One line for messages, results and screens: what cannot be shown is escaped, so that different texts stay different.

    :param limit: characters of the result; None for all of them.
    """
    whole = str(text)[:limit]
    if whole.isprintable():
        return whole
    escaped = (
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in whole
    )
    return "".join(escaped)[:limit]


def limit(value: float | None, least: int, most: int) -> str:
    """What to use instead of a number that is too small or too large; nothing where it is neither."""
    if value is None or least <= value <= most:
        return ""
    return f"use {least} or more" if value < least else f"use {most} or less"


class Text(NamedTuple):
    """A text of which this expression matches all: one line without control characters, unless it begins with ``(?s)``."""

    expression: str = ".*"
    longest: int = LONGEST_NAME


class Number(NamedTuple):
    """A whole number; with ``real``, any finite one."""

    least: float = 0
    most: int = LARGEST
    real: bool = False


Address = Annotated[str, Text(ONE_HOST)]
"""Of a host."""
Size = Annotated[int, Number()]
"""In bytes."""

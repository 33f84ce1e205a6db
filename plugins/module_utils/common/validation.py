# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of input from operators and hosts: printable texts, finite numbers, and maximum sizes."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, NamedTuple

CONTROL_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that end a line, control a terminal, change the text direction, or are surrogates."""
TEXT_LIMIT = 65536
"""Maximum length of a text."""
NAME_LIMIT = 255
"""Maximum length of a host's name, and by default of other texts."""
MAX_INT = 1 << 53
"""Largest integer that every JSON parser represents exactly."""
MAX_VALUE_LENGTH = 60
"""Maximum length of a value in a message."""
OCTET_PATTERN = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
PORT_PATTERN = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
IPV4_PATTERN = rf"{OCTET_PATTERN}(\.{OCTET_PATTERN}){{3}}"
"""Pattern for any IPv4 address that ``ipaddress`` accepts."""
PREFIX_LENGTH_PATTERN = "/(3[0-2]|[12]?[0-9])"
NETWORK_PATTERN = f"{IPV4_PATTERN}({PREFIX_LENGTH_PATTERN})?"
ENDPOINT_PATTERN = f"{IPV4_PATTERN}:{PORT_PATTERN}"
HOST_IP_PATTERN = rf"(?!0\.|22[4-9]\.|2[345][0-9]\.){IPV4_PATTERN}"
"""Pattern for the address of a single host: neither 0.x nor multicast nor reserved."""
HOST_CIDR_PATTERN = f"{HOST_IP_PATTERN}{PREFIX_LENGTH_PATTERN}"
"""Pattern for the address of a single host with its prefix length."""


def quote(value: Any) -> str:
    """Return a value as text for a message: a single short line without control characters."""
    if isinstance(value, int) and abs(value) > MAX_INT:
        return f"a {value.bit_length()}-bit number"
    if value is not None and not isinstance(value, (str, int, float)):
        return f"a {type(value).__name__}"
    text = repr(value[:MAX_VALUE_LENGTH] if isinstance(value, str) else value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + "..."


def is_plain(text: str) -> bool:
    """Return whether a text is a single line without control characters, safe in definitions, commands, files and on screens."""
    return text.isprintable() or not any(map(_is_control_character, text))


def _is_control_character(character: str) -> bool:
    """Return whether a character is a control character or a noncharacter, like U+FFFE, which YAML refuses."""
    code = ord(character)
    return unicodedata.category(character) in CONTROL_CATEGORIES or code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF


MAX_LINE_LENGTH = 2000
"""Maximum length of a line on a screen."""


def printable(text: Any, max_length: int | None = MAX_LINE_LENGTH) -> str:
    """Return a single line for messages, results and screens. Unprintable characters are escaped, so that different texts remain different.

    :param max_length: maximum length of the result; None for no limit.
    """
    short_text = str(text)[:max_length]
    if short_text.isprintable():
        return short_text
    escaped_text = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in short_text)
    return "".join(escaped_text)[:max_length]


def range_remedy(value: float | None, minimum: int, maximum: int) -> str:
    """Return the remedy for a number outside its range; empty within it."""
    if value is None or minimum <= value <= maximum:
        return ""
    return f"use {minimum} or more" if value < minimum else f"use {maximum} or less"


class Text(NamedTuple):
    """A text that matches an expression: a single line without control characters, unless the expression begins with ``(?s)``."""

    expression: str = ".*"
    max_length: int = NAME_LIMIT


class Number(NamedTuple):
    """An integer, or any finite number with ``allows_fractions``."""

    minimum: float = 0
    maximum: int = MAX_INT
    allows_fractions: bool = False


Address = Annotated[str, Text(HOST_IP_PATTERN)]
"""Address of a host."""
Size = Annotated[int, Number()]
"""Size in bytes."""

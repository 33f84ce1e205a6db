# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of what operators and hosts say: texts without control characters, finite numbers, and a largest size."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that end a line, control a terminal, change the order of what is shown, or are half a character."""
LONGEST, DEEPEST = 65536, 32
"""Characters of a text, and levels of a value."""
LONGEST_NAME = 255
"""Characters of a host's name, and of a text where nothing else is said."""
LARGEST = 1 << 53
"""Whole numbers up to here are the same in JSON everywhere."""
SHOWN = 60
"""Characters of a value in a message."""
SECRET_USER = re.compile(r"https?://[^/\s]*@|://[^/@\s:]*:[^/@\s]*@", re.IGNORECASE)
SECRET_ADDRESS = re.compile(
    r"(?:^|=)[^/@:=]{1,255}:[^/]{0,255}@(?:[\w.-]{1,255}|\[[\da-fA-F:.]{2,45}\]):\d{1,5}(?:/|$)"
)
"""``user:password@proxy:3128``, as proxies are given without a scheme. Without a port it may be a name, like ``model:7b@q4``."""
SECRET_PARAMETER = re.compile(
    r"[?&;#](?:[\w.-]*(?:token|secret|password|passwd|passphrase|signature|credential)s?\d*"
    r"|(?:[\w.-]*(?:[_.-]|api|access|account|app|auth|client|private|secret|subscription))?key(?:id)?\d*"
    r"|sig|auth|authorization|bearer|code|jwt|pass|pat|pwd)=",
    re.IGNORECASE,
)


def has_secret(text: str) -> bool:
    """Whether a URL or an address in a text has a password or a token."""
    if "://" not in text and "@" not in text:
        return False
    words = [word for word in text.split() if "://" in word or "@" in word]
    return any(
        SECRET_USER.search(word) or SECRET_PARAMETER.search(word) if "://" in word else SECRET_ADDRESS.search(word)
        for word in words
    )


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
    return text.isprintable() or not any(unicodedata.category(character) in CONTROL for character in text)


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


class Problem(NamedTuple):
    """What no plan can hold: where it is, and what is wrong there, as the end of a sentence."""

    where: str
    why: str


def problem(where: str, value: Any, level: int = 0) -> Problem | None:
    """The first part of a value that cannot be planned with, however the value is nested; None where there is none.

    :param where: the variable.
    """
    why = _why(value) if level <= DEEPEST else f"has more than {DEEPEST} levels: shorten it"
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        why = why or next(filter(None, map(_why_name, value)), "")
        parts = ((f"{where}.{name}", part) for name, part in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((f"{where}[{index}]", part) for index, part in enumerate(value))
    if why:
        return Problem(where, why)
    return next(filter(None, (problem(place, part, level + 1) for place, part in parts)), None)


def _why_name(name: Any) -> str:
    """What is wrong with a name in a mapping; nothing where it is right."""
    if isinstance(name, str) and len(name) > LONGEST_NAME:
        return f"has a name of {len(name)} characters: use {LONGEST_NAME} or fewer"
    if isinstance(name, str) and not _why(name):
        return ""
    shown = show(name) if isinstance(name, str) else repr(show(name))
    return f"has the name {shown}: use letters, digits and _, and quotes around a number"


def _why(value: Any) -> str:
    """What is wrong with a value, whatever it contains; nothing where it is right."""
    if isinstance(value, str):
        if len(value) > LONGEST:
            return f"has {len(value)} characters: use {LONGEST} or fewer"
        if not is_plain(value):
            return f"is {show(value)}, which has a line break or another control character: remove it"
        if has_secret(value):
            return (
                "has a password or a token in its URL or address, which plans and logs would show: remove it. git takes it from its credential store on "
                "the controller; fetch any other file yourself, and give its path"
            )
        return ""
    if isinstance(value, (int, float)):
        return "" if -LARGEST <= value <= LARGEST else f"is {show(value)}: use a finite number up to {LARGEST}"
    if value is None or isinstance(value, (Mapping, list, tuple)):
        return ""
    return f"is {show(value)}: write it as a text, in quotes"


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


Size = Annotated[int, Number()]
"""In bytes."""

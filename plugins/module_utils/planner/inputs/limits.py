# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of the values of variables, whatever they mean: no control characters, no secrets, numbers that JSON can hold, and a limited depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import redaction, validation

MAX_LEVELS = 32
"""Levels of a value."""


class Problem(NamedTuple):
    """A value that no plan can hold: its place, and what is wrong, as the end of a sentence."""

    place: str
    text: str


def find_problem(variable: str, value: Any, level: int = 0) -> Problem | None:
    """The first part of a value that cannot be planned with, however the value is nested; None where there is none."""
    text = _value_problem(value) if level <= MAX_LEVELS else f"is nested more than {MAX_LEVELS} levels deep: flatten it"
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        text = text or next(filter(None, map(_name_problem, value)), "")
        parts = ((f"{variable}.{name}", part) for name, part in value.items())
    elif isinstance(value, (list, tuple)):
        parts = ((f"{variable}[{index}]", part) for index, part in enumerate(value))
    if text:
        return Problem(variable, text)
    return next(filter(None, (find_problem(place, part, level + 1) for place, part in parts)), None)


def _name_problem(name: Any) -> str:
    """Return what is wrong with a name in a mapping; nothing if it is right."""
    if isinstance(name, str) and len(name) > validation.NAME_LIMIT:
        return f"has a name of {len(name)} characters: use {validation.NAME_LIMIT} or fewer"
    if isinstance(name, str) and not _value_problem(name):
        return ""
    text = validation.quote(name) if isinstance(name, str) else repr(validation.quote(name))
    return f"has the name {text}: use letters, digits and _, and quotes around a number"


def _value_problem(value: Any) -> str:
    """Return what is wrong with a value, whatever it contains; nothing if it is right."""
    if isinstance(value, str):
        if len(value) > validation.TEXT_LIMIT:
            return f"has {len(value)} characters: use {validation.TEXT_LIMIT} or fewer"
        if not validation.is_plain(value):
            return f"is {validation.quote(value)}, which has a line break or another control character: remove it"
        if redaction.has_secret(value):
            return (
                "has a password or token in a URL, which plans and logs would show: remove it. For git, use the credential store on the controller; "
                "download any other file yourself, and set its path"
            )
        return ""
    if isinstance(value, (int, float)):
        return (
            ""
            if -validation.MAX_INT <= value <= validation.MAX_INT
            else f"is {validation.quote(value)}: use a finite number up to {validation.MAX_INT}"
        )
    if value is None or isinstance(value, (Mapping, list, tuple)):
        return ""
    return f"is {validation.quote(value)}: write it as text in quotes"

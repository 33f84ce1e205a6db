# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits for the values of all variables: no control characters, no secrets, numbers that JSON can represent, and a limited depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import redaction, validation

MAX_DEPTH = 32
"""Maximum number of nested levels in a value."""


class ValueProblem(NamedTuple):
    """A value that no plan can contain: its place, and the problem as the end of a sentence."""

    place: str
    text: str


def find_problem(place: str, value: Any, depth: int = 0) -> ValueProblem | None:
    """Return the first problem in a value, however deep the value is nested; None without a problem."""
    text = _value_problem(value) if depth <= MAX_DEPTH else f"is nested more than {MAX_DEPTH} levels deep: flatten it"
    children: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        text = text or next(filter(None, map(_key_problem, value)), "")
        children = ((f"{place}.{key}", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        children = ((f"{place}[{index}]", child) for index, child in enumerate(value))
    if text:
        return ValueProblem(place, text)
    return next(filter(None, (find_problem(child_place, child, depth + 1) for child_place, child in children)), None)


def _key_problem(key: Any) -> str:
    """Return the problem of a key in a mapping; empty for a valid key."""
    if isinstance(key, str) and len(key) > validation.NAME_LIMIT:
        return f"has a key of {len(key)} characters: use {validation.NAME_LIMIT} or fewer"
    if isinstance(key, str) and not _value_problem(key):
        return ""
    text = validation.quote(key) if isinstance(key, str) else repr(validation.quote(key))
    return f"has the key {text}: use letters, digits and _, and put a number in quotes"


def _value_problem(value: Any) -> str:
    """Return the problem of a value itself, not of its children; empty for a valid value."""
    if isinstance(value, str):
        if len(value) > validation.TEXT_LIMIT:
            return f"has {len(value)} characters: use {validation.TEXT_LIMIT} or fewer"
        if not validation.is_plain(value):
            return f"is {validation.quote(value)}, which has a line break or another control character: remove it"
        if redaction.has_secret(value):
            return (
                "has a password or token in a URL, which plans and logs would show: remove it. For git, use the credential store on the controller; "
                "download any other file yourself and set its path"
            )
        return ""
    if isinstance(value, (int, float)):
        return (
            ""
            if -validation.MAX_INT <= value <= validation.MAX_INT
            else f"is {validation.quote(value)}: use a finite number from -{validation.MAX_INT} to {validation.MAX_INT}"
        )
    if value is None or isinstance(value, (Mapping, list, tuple)):
        return ""
    return f"is {validation.quote(value)}: put it in quotes"

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Regular expressions of operators that take too long: Python and llama.cpp (std::regex) try all ways in which one may match."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
"""The standard library's own, which has no public name."""

MOST_REPEATS = 4
"""That may match several lengths: names have up to 64 characters, so one more takes up to 64 times as long."""
REPEATS = frozenset(("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"))


def may_explode(pattern: str) -> bool:
    """Whether an expression that can be compiled may take very long.

    :raises re.error: it is not valid.
    """
    found = list(_repeats(parser.parse(pattern), False))
    return len(found) > MOST_REPEATS or any(found)


def _repeats(node: Any, repeated: bool) -> Iterator[bool]:
    """Of each part of a parsed expression that may match several lengths, whether it is inside of one that is repeated. A choice counts there
    alone.

    :param repeated: whether the node is.
    """
    if isinstance(node, tuple) and node and str(node[0]) in REPEATS:
        least, most, body = node[1]
        if least != most:
            yield repeated
        yield from _repeats(body, repeated or most > 1)
        return
    if repeated and isinstance(node, tuple) and node and str(node[0]) == "BRANCH":
        yield True
    if isinstance(node, (tuple, list, parser.SubPattern)):
        for part in node:
            yield from _repeats(part, repeated)

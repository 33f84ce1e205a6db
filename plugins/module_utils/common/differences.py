# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What differs between a host and its part of the plan, as data: programs decide by the kind, people read the text."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kind = Literal[
    "account",
    "folder",
    "release",
    "file",
    "model",
    "definition",
    "boot",
    "manager",
    "firewall",
    "link",
    "tuning",
    "service",
    "stale",
    "unneeded",
    "kept",
]
KINDS: tuple[str, ...] = get_args(Kind)


class Difference(NamedTuple):
    """``subject`` is the name or path of what differs, ``text`` a sentence without its full stop."""

    kind: Kind
    subject: str
    text: str

    def as_dict(self) -> dict[str, str]:
        """As host_info reports it: ``{"kind", "subject", "text"}``."""
        return self._asdict()

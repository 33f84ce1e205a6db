# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What differs between a host and its part of the plan, as data: programs decide by the kind, people read the text."""

from typing import Annotated, Literal, NamedTuple, get_args

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text

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
    "record",
]
KINDS: tuple[str, ...] = get_args(Kind)


class Difference(NamedTuple):
    """A difference from the plan."""

    kind: Kind
    """by which programs decide"""
    subject: Annotated[str, Text(longest=4096)]
    """name or path of what differs"""
    text: Annotated[str, Text(longest=8192)]
    """for people: a sentence without its full stop"""

    def as_dict(self) -> dict[str, str]:
        """As host_info reports it: ``{"kind", "subject", "text"}``."""
        return self._asdict()

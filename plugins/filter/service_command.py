# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Quotes command lines and environments the way each service manager reads them."""

from __future__ import annotations

DOCUMENTATION = r"""
name: service_command
short_description: Quotes a command line for a service manager
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description: Joins words so that the service manager splits them again into the same words, whatever they contain.
options:
  _input:
    description: The words.
    type: list
    elements: str
    required: true
  manager:
    description: Whose rules apply.
    type: str
    choices: [systemd, supervisor]
    required: true
positional: manager
"""

EXAMPLES = r"""
ExecStart: "{{ ['/opt/llamacpp/a', '50 % of $HOME'] | llamacpp.cluster.service_command('systemd') }}"
# => "/opt/llamacpp/a" "50 %% of $$HOME"
"""

RETURN = r"""
_value:
  description: The words in one line.
  type: str
"""

import shlex


def _systemd(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _supervisor(word: str) -> str:
    return shlex.quote(word).replace("%", "%%")


def service_command(words, manager):
    quote = {"systemd": _systemd, "supervisor": _supervisor}[manager]
    for word in words:
        if "\n" in word or "\0" in word:
            raise ValueError(f"{word!r} holds a line break, which no service definition can express")
    return " ".join(quote(word) for word in words)


class FilterModule:
    """Filters of the collection."""

    def filters(self):
        return {"service_command": service_command}

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Quotes environments the way each service manager reads them."""

from __future__ import annotations

DOCUMENTATION = r"""
name: service_environment
short_description: Quotes an environment for a service manager
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description: Writes variables so that the service manager reads the same values again, whatever they contain.
options:
  _input:
    description: Names and values.
    type: dict
    required: true
  manager:
    description: Whose rules apply.
    type: str
    choices: [systemd, supervisor]
    required: true
positional: manager
"""

EXAMPLES = r"""
Environment: "{{ {'LLAMA_CACHE': '/opt/llamacpp/state/cache'} | llamacpp.cluster.service_environment('systemd') }}"
# => "LLAMA_CACHE=/opt/llamacpp/state/cache"
"""

RETURN = r"""
_value:
  description: The variables in one line.
  type: str
"""


def _systemd(name, value):
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{name}={escaped}"'


def _supervisor(name, value):
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'{name}="{escaped}"'


def service_environment(variables, manager):
    for name, value in variables.items():
        if "\n" in value or "\0" in value:
            raise ValueError(f"the value of {name} holds a line break, which no service definition can express")
    quote, separator = {"systemd": (_systemd, " "), "supervisor": (_supervisor, ",")}[manager]
    return separator.join(quote(name, value) for name, value in sorted(variables.items()))


class FilterModule:
    """Filters of the collection."""

    def filters(self):
        return {"service_environment": service_environment}

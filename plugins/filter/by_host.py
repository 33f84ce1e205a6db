# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gathers the values of one variable from many hosts."""

from collections.abc import Iterable, Mapping
from typing import Any

DOCUMENTATION = r"""
name: by_host
short_description: Gathers the values of one variable from many hosts
description:
  - Returns a mapping of each host's name to the variable's value on that host, or to an empty mapping if the variable is not defined.
  - A registered variable is defined on each host that ran or skipped its task.
positional: hostvars, variable
options:
  _input:
    description: Names of the hosts, like V(ansible_play_hosts_all).
    type: list
    elements: str
    required: true
  hostvars:
    description: The variables of all hosts, V(hostvars).
    type: dict
    required: true
  variable:
    description: Name of the variable.
    type: str
    required: true
author: the llamacpp.cluster contributors
"""

EXAMPLES = r"""
- name: Gather facts of the host
  llamacpp.cluster.host_info:
  register: result

- name: Compute the plan
  llamacpp.cluster.plan:
    facts: "{{ ansible_play_hosts_all | llamacpp.cluster.by_host(hostvars, 'result') }}"
  run_once: true
"""

RETURN = r"""
_value:
  description: Value of the variable by host.
  type: dict
"""


def by_host(hosts: Iterable[str], hostvars: Mapping[str, Mapping[str, Any]], variable: str) -> dict[str, Any]:
    return {name: hostvars[name].get(variable, {}) for name in hosts}


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"by_host": by_host}

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a plan for the staging ports cannot be carried out."""

from __future__ import annotations

DOCUMENTATION = r"""
name: obstacles
short_description: Why a release cannot be proven on the staging ports now
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
positional: hostvars, reached
description:
  - Holds a plan for the staging ports against what each host said of itself just before, in the registered variable C(llama_room).
options:
  _input:
    description: The plan that P(llamacpp.cluster.plan#module) returned with O(llamacpp.cluster.plan#module:staging=true).
    type: dict
    required: true
  hostvars:
    description: Variables of all hosts.
    type: dict
    required: true
  reached:
    description: Hosts that answered so far. Another one has said nothing.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
llama_staging_obstacles: "{{ llama_staging.plan | llamacpp.cluster.obstacles(hostvars, ansible_play_hosts) }}"
# => ["head has 900 MiB free on CPU, and 1024 MiB are needed"]
"""

RETURN = r"""
_value:
  description: A sentence each. None where the instances can be started.
  type: list
  elements: str
"""

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import staging


def obstacles(plan, hostvars, reached):
    found = {name: hostvars[name].get("llama_room") or {} for name in plan.get("hosts", {})}
    return staging.obstacles(plan, {name: said if name in reached else {} for name, said in found.items()})


class FilterModule:
    """Filters of the collection."""

    def filters(self):
        return {"obstacles": obstacles}

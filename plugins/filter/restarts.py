# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides what has to be started anew."""

from __future__ import annotations

DOCUMENTATION = r"""
name: restarts
short_description: Names the services of a cluster that have to be started anew
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - A service that does not run as planned is started anew.
  - llama-server does not reconnect, so the head is started anew with any of the workers that it uses.
options:
  _input:
    description: The plan.
    type: dict
    required: true
  hostvars:
    description: Variables of all hosts, of which C(llama_compared) holds what P(llamacpp.cluster.host_info#module) returned.
    type: dict
    required: true
positional: hostvars
"""

EXAMPLES = r"""
restarts: "{{ llama_planned.plan | llamacpp.cluster.restarts(hostvars) }}"
# => {"localhost": ["llamacpp-worker-two", "llamacpp-server"]}
"""

RETURN = r"""
_value:
  description: Host and the names of its services that have to be started anew.
  type: dict
"""

from ansible_collections.llamacpp.cluster.plugins.module_utils import planning


def restarts(plan, hostvars):
    compared = {name: hostvars[name].get("llama_compared") or {} for name in plan["hosts"]}
    return planning.restarts(plan, {name: found["drift"] for name, found in compared.items() if "drift" in found})


class FilterModule:
    """Filters of the collection."""

    def filters(self):
        return {"restarts": restarts}

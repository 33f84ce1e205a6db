# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tells what an apply would do."""

from __future__ import annotations

DOCUMENTATION = r"""
name: changes
short_description: Tells on which hosts something differs from the plan, and what has to be started anew
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - A service that does not run as planned is started anew.
  - llama-server does not reconnect, so the head is started anew with any of the workers that it uses.
  - Of several hosts of one kind that lack a release, one builds it.
options:
  _input:
    description: The plan.
    type: dict
    required: true
  reached:
    description: Names of the hosts that are still in the play.
    type: list
    elements: str
    required: true
  hostvars:
    description: Variables of all hosts, of which C(llama_compared) holds what P(llamacpp.cluster.host_info#module) returned.
    type: dict
    required: true
positional: hostvars, reached
"""

EXAMPLES = r"""
llama_changes: "{{ llama_planned.plan | llamacpp.cluster.changes(hostvars, ansible_play_hosts) }}"
# => {"restarts": {"localhost": ["llamacpp-worker-two", "llamacpp-server"]}, "behind": ["localhost"], "unreached": [],
#     "builders": {}, "shared": [], "sources": [], "lacking": {"localhost": {"required": {}, "optional": {}}}}
"""

RETURN = r"""
_value:
  description:
    - C(restarts), host and names of services that have to be started anew; C(behind), hosts on which anything differs;
      C(unreached), hosts that did not answer; C(builders), build and the host that builds or has it; C(shared), builds that other hosts
      get from it; C(sources), releases of builds that no host has yet; C(lacking), host and what it lacks, C(required), and C(optional)
      where it builds, each tool and its package.
  type: dict
"""

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import changes as decisions


def changes(plan, hostvars, reached):
    compared = {name: hostvars[name].get("llama_compared") or {} for name in plan["hosts"]}
    changed = decisions.decide(
        plan, {name: found.get("drift") if name in reached else None for name, found in compared.items()}
    )
    tools = {name: hostvars[name]["llama_facts"]["facts"]["tools"] for name in plan["hosts"] if name in reached}
    return {**changed, "lacking": decisions.lacking(plan, tools, changed["builders"].values())}


class FilterModule:
    """Filters of the collection."""

    def filters(self):
        return {"changes": changes}

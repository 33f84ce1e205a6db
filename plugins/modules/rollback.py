#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: rollback
short_description: Decides how a cluster returns to the previous plan
description:
  - Bases the decision on the hosts' kept plans, and changes nothing. The playbooks of this collection carry out the decision.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
options:
  answers:
    description: Result of M(llamacpp.cluster.host_info) by host.
    type: dict
    required: true
  heads:
    description: Heads in the inventory.
    type: list
    elements: str
    required: true
  failed_plan_id:
    description: ID of the plan that was just applied but does not serve.
    type: str
    default: ""
  lost_hosts:
    description: Hosts that this run lost. The other hosts return to the previous plan without them.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Decide how to return to the previous plan
  llamacpp.cluster.rollback:
    answers: "{{ ansible_play_hosts | llamacpp.cluster.by_host(hostvars, '__llama_kept_plans') }}"
    heads: [strix0]
  run_once: true
"""

RETURN = r"""
target:
  description: The plan to return to, its head and its release. C(uninvolved_hosts) lists hosts that have no part in this plan, and that are not changed.
    C(differing_variables) lists the variables that differ, with their current values and their values in this plan.
  returned: success
  type: dict
plan:
  description: The part of the plan that is needed to verify that it serves.
  returned: success
  type: dict
hosts:
  description: For each host, its part of the plan and the services to stop, to restart and to remove.
  returned: success
  type: dict
heads:
  description: For each head without a part in that plan, its part of its current plan and the services to remove.
  returned: success
  type: dict
"""

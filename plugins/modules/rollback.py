#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: rollback
short_description: Decides how a cluster returns to the previous plan
description:
  - Decides from the plans that the hosts keep, and changes nothing. The collection's playbooks carry out the decision.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
options:
  answers:
    description: Result of M(llamacpp.cluster.host_info) with O(llamacpp.cluster.host_info#module:only_kept_plans), by host.
    type: dict
    required: true
  heads:
    description: Names of the heads in the inventory.
    type: list
    elements: str
    required: true
  failed_plan_id:
    description: ID of the plan that this run applied, and that does not serve.
    type: str
    default: ""
  lost_hosts:
    description: Hosts that failed or became unreachable in this run. The other hosts return to the previous plan without them.
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
  description: C(id), C(head) and C(release) of the plan to return to. C(uninvolved_hosts) lists hosts that are not in this plan, and that do not change.
    C(differing_variables) lists the variables whose values in this plan differ from the current ones, with both values.
  returned: success
  type: dict
plan:
  description: The part of the plan to return to that M(llamacpp.cluster.verify) needs with O(llamacpp.cluster.verify#module:gate).
  returned: success
  type: dict
hosts:
  description: For each host of the plan to return to, its C(part) of this plan, and the services to C(stop), C(restart) and C(remove).
  returned: success
  type: dict
heads:
  description: For each host outside the plan to return to that runs llama-server, its C(part) of the newest plan that it keeps, and the services to C(remove).
  returned: success
  type: dict
"""

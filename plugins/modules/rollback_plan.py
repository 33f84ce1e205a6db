#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rollback_plan
short_description: Chooses the plan that a cluster goes back to
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Chooses a plan from what the hosts have recorded, and decides from their records of it what is done on each host. It changes nothing.
extends_documentation_fragment:
  - llamacpp.cluster.attributes
  - llamacpp.cluster.attributes.controller
  - llamacpp.cluster.attributes.info
options:
  state:
    description:
      - V(chosen) chooses the plan from O(answers).
      - V(accepted) fails unless all hosts can go back to O(target), and returns what is done on each.
    type: str
    choices: [chosen, accepted]
    required: true
  cluster:
    description: Name of the cluster's group.
    type: str
    required: true
  answers:
    description: Host, and what M(llamacpp.cluster.plan_history_info) returned there, for V(accepted) with the id of the target.
    type: dict
    required: true
  heads:
    description: Hosts that the inventory has as heads, for V(chosen).
    type: list
    elements: str
    default: []
  wanted:
    description: Id of a plan, or id, ref or build of a release, to go back to. Without it, the plan before the one that served last.
    type: str
    default: ""
  failed:
    description: Id of the plan that was just applied and does not serve.
    type: str
    default: ""
  lost:
    description: Hosts that were lost meanwhile. The others go back without them.
    type: list
    elements: str
    default: []
  away:
    description: Hosts that did not answer at all. The others go back without them where the head of that plan serves without them.
    type: list
    elements: str
    default: []
  target:
    description: What V(chosen) returned, for V(accepted).
    type: dict
  facts:
    description: Host, and what M(llamacpp.cluster.host_info) returned there. Its record has to be one of the installation that it has now, for V(accepted).
    type: dict
    default: {}
seealso:
  - module: llamacpp.cluster.plan_history_info
  - module: llamacpp.cluster.rollback_report
"""

EXAMPLES = r"""
- name: Choose the plan to go back to
  llamacpp.cluster.rollback_plan:
    state: chosen
    cluster: llama_cluster
    heads: "{{ groups.llama_head }}"
    answers: "{{ histories }}"
  run_once: true
  register: rollback
"""

RETURN = r"""
target:
  description: The plan to go back to. C(id), C(release), C(head), C(hosts), C(left), hosts that have no part in it, C(away), hosts of it that do not answer,
    and C(declared), what llama_release has to be for it.
  returned: for V(chosen)
  type: dict
plan:
  description: What M(llamacpp.cluster.verify) needs to prove that the head serves.
  returned: for V(accepted)
  type: dict
hosts:
  description: Host, and C(part), C(stop), C(restart) and C(remove).
  returned: for V(accepted)
  type: dict
"""

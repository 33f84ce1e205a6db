#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rollback
short_description: Decides how a cluster goes back to an earlier plan, and reports how that ended
description:
  - Decides from what the hosts have recorded, and changes nothing. The playbooks of this collection carry it out.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
options:
  state:
    description:
      - V(chosen) chooses the plan from O(answers).
      - V(accepted) fails unless all hosts can go back to O(target), and returns what is done on each.
      - V(served) warns that the inventory may name another release than O(target), which serves now.
      - V(failed) fails with a sentence. With O(id), a change did not serve, and O(target) serves again if it is given. Without O(id), the rollback to
        O(target) did not end.
    type: str
    choices: [chosen, accepted, served, failed]
    required: true
  cluster:
    description: Name of the cluster's group, for V(chosen) and V(accepted).
    type: str
    default: ""
  answers:
    description: Host, and what M(llamacpp.cluster.plan_history_info) returned there, for V(accepted) with the id of the target.
    type: dict
    default: {}
  heads:
    description: Hosts that the inventory has as heads, for V(chosen).
    type: list
    elements: str
    default: []
  wanted:
    description: Id of a plan, or id, ref or build of a release, to go back to. Without it, the plan before the one that served last.
    type: str
    default: ""
  id:
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
    description: What V(chosen) returned. V(accepted) and V(served) need it.
    type: dict
  facts:
    description: Host, and what M(llamacpp.cluster.host_info) returned there. Its record has to be one of the installation that it has now, for V(accepted).
    type: dict
    default: {}
  release:
    description: The release of the plan O(id), or with V(served) the inventory's as JSON.
    type: str
    default: ""
  reasons:
    description: Host, and what failed there.
    type: dict
    default: {}
  why_not:
    description: Why the cluster did not go back.
    type: str
    default: ""
seealso:
  - module: llamacpp.cluster.plan_history_info
"""

EXAMPLES = r"""
- name: Choose the plan to go back to
  llamacpp.cluster.rollback:
    state: chosen
    cluster: llama_cluster
    heads: "{{ groups.llama_head }}"
    answers: "{{ histories }}"
  run_once: true
  register: rollback
"""

RETURN = r"""
target:
  description: The plan to go back to.
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

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: plan
short_description: Computes the whole intended state of the cluster
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - From the inventory, the hosts' facts and the model's summary it computes builds, workers, placement and command lines, and changes nothing.
  - An action plugin carries it out on the controller. It takes the cluster from C(llama_cluster_group) and the facts from the registered
    variable C(llama_facts) of each host.
  - It fails when the plan is refused. The plan is written in either case.
attributes:
  check_mode:
    support: full
    description: Changes nothing in either mode, apart from writing O(path).
options:
  model:
    description: What P(llamacpp.cluster.gguf_info#module) returned for C(llama_model_path). Without it, C(llama_model_gguf_summary) is used.
    type: dict
  path:
    description: File on the controller for the plan as JSON.
    type: path
  staging:
    description:
      - Plans the instances that prove the release with the known-answer model on the staging ports, beside those that serve.
      - A refused plan does not make the module fail then.
    type: bool
    default: false
  page:
    description:
      - Whether a person is shown the whole plan as a page in place of a table with the memory of each device.
      - A plan that is not refused is left for a later call with O(shown), when the hosts have been compared with it.
    type: bool
    default: false
  html:
    description: File on the controller for the page as HTML. It needs nothing else to be read.
    type: path
  shown:
    description:
      - A plan that was made before. It is shown as a page, with what an apply would change on each host; nothing is planned.
      - Compared is what P(llamacpp.cluster.host_info#module) returned as registered variable C(llama_compared) of each host.
    type: dict
"""

EXAMPLES = r"""
- name: Compute the plan
  llamacpp.cluster.plan:
    path: plan.json
  run_once: true
  register: llama_planned
"""

RETURN = r"""
plan:
  description: The plan. Its form is described in docs/plan.md.
  returned: when it is not refused; O(path) gets it in either case
  type: dict
  sample: {"schema": 1, "refused": false, "fits": true}
changes:
  description: What an apply would do, as P(llamacpp.cluster.changes#filter) tells it.
  returned: when O(shown) is given
  type: dict
  sample: {"restarts": {"localhost": []}, "behind": [], "unreached": [], "builders": {}, "shared": [], "sources": []}
"""

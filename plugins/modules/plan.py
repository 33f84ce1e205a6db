#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: plan
short_description: Computes the whole intended state of the cluster
description:
  - Computes builds, workers, placement and command lines from the inventory, the hosts' facts and the model's summary. Changes no host.
  - Takes the cluster and the variables of its hosts from the inventory group C(llama_cluster_group).
  - Unless O(show) is false, writes the plan to O(path), shows it, and fails if the plan is refused.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
attributes:
  check_mode:
    details: Changes nothing in either mode, apart from writing O(path) and O(report).
options:
  facts:
    description:
      - Result of P(llamacpp.cluster.host_info#module) by host.
      - For a host without a result, the module uses the facts that the last run cached on the head, and C(llama_hardware).
    type: dict
    default: {}
  model:
    description: Result of P(llamacpp.cluster.model_info#module). Without it, C(llama_model_gguf_summary) is used.
    type: dict
    default: {}
  path:
    description: File on the controller for the plan as JSON.
    type: path
  empty:
    description:
      - Whether to compute the empty plan instead, which removes everything from the hosts in O(facts) that answered.
      - For the empty plan, the module reads no variable except C(llama_cluster_group).
    type: bool
    default: false
  what_fits:
    description: Whether to show, instead of the plan, which models the cluster could serve. C(llama_what_fits) sets context and speed.
    type: bool
    default: false
  page:
    description:
      - Whether to show the whole plan instead of a table with the memory of each device.
      - If V(true), this module shows the plan only if it is refused. Otherwise, P(llamacpp.cluster.plan_diff#module) shows it, with the hosts' differences.
    type: bool
    default: false
  show:
    description: Whether to write and show the plan and its advisories, and to fail if the plan is refused.
    type: bool
    default: true
  report:
    description:
      - File on the controller for the self-contained HTML report of a refused plan. Used only if O(page) is true.
      - P(llamacpp.cluster.plan_diff#module) writes the report of any other plan, and M(llamacpp.cluster.verify) adds its checks to that report.
    type: path
"""

EXAMPLES = r"""
- name: Compute the plan
  llamacpp.cluster.plan:
    facts: "{{ ansible_play_hosts | llamacpp.cluster.by_host(hostvars, '__llama_facts') }}"
    path: plan.json
  run_once: true
  register: __llama_plan_result
"""

RETURN = r"""
models:
  description: A row for each model, in the order of the displayed table. Also written to O(path).
  returned: when O(what_fits) is true
  type: list
  elements: dict
plan:
  description: The plan. Its format is described in docs/plan.md.
  returned: when O(what_fits) is false, and either the plan is not refused or O(show) is false
  type: dict
"""

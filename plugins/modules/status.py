#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: status
short_description: Shows the status of a cluster, and fails if it is not healthy
description:
  - Determines the status from the plan and each host's result of M(llamacpp.cluster.host_status). Changes no host.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
attributes:
  check_mode:
    details: Changes nothing in either mode, apart from writing O(path).
options:
  plan:
    description: The plan that P(llamacpp.cluster.plan#module) returned. It may be a refused plan.
    type: dict
    required: true
  heads:
    description: Hosts of the group C(llama_head). If the plan is refused, the first of them counts as the head.
    type: list
    elements: str
    required: true
  answers:
    description: Result of M(llamacpp.cluster.host_status) by host, for every host of the cluster.
    type: dict
    required: true
  facts:
    description: Results of M(llamacpp.cluster.host_info) by host, for hosts without an answer. If a host could not be reached, its result contains the reason.
    type: dict
    default: {}
  path:
    description: File on the controller for the status as JSON. C(docs/status.schema.json) describes the format.
    type: path
  fail:
    description: Whether to fail if the cluster is not healthy.
    type: bool
    default: true
  balancer:
    description: Status of the replica as M(llamacpp.cluster.balancer) returns it. Omit this option if there is no balancer.
    type: str
"""

EXAMPLES = r"""
- name: Show the status of the cluster
  llamacpp.cluster.status:
    plan: "{{ __llama_plan }}"
    heads: "{{ groups.llama_head }}"
    answers: "{{ ansible_play_hosts_all | llamacpp.cluster.by_host(hostvars, '__llama_host_status') }}"
  run_once: true
"""

RETURN = r"""
status:
  description: Status of the cluster, as in O(path).
  returned: when the cluster is healthy, or O(fail) is false
  type: dict
"""

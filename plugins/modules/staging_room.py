#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: staging_room
short_description: Decides whether instances can be started on the staging ports
description:
  - Compares what the instances need with the memory, ports and releases that the hosts report. It changes nothing.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
options:
  plan:
    description: The plan for the staging ports, as P(llamacpp.cluster.plan#module) returned it.
    type: dict
    required: true
  answers:
    description: Host, and what M(llamacpp.cluster.host_info) returned there for its part of the plan, with O(llamacpp.cluster.host_info#module:free).
    type: dict
    required: true
seealso:
  - module: llamacpp.cluster.release_proof
  - module: llamacpp.cluster.host_info
"""

EXAMPLES = r"""
- name: Decide whether the instances can be started
  llamacpp.cluster.staging_room:
    plan: "{{ staging.plan }}"
    answers: "{{ answers }}"
  run_once: true
"""

RETURN = r"""
workers:
  description: Those that the instances use, each as C(HOST:WORKER).
  returned: success
  type: list
  elements: str
obstacles:
  description: Why they cannot be started, a sentence each. Empty where they can.
  returned: success
  type: list
  elements: str
"""

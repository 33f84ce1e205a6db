#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: calibrate
short_description: Measures the devices of a cluster, for the plan
description:
  - Measures each device with models of random weights, on the head in place of its server.
  - That takes about a minute each, slow processors longer.
  - What follows is kept on the head, and each later plan uses it.
extends_documentation_fragment: [llamacpp.cluster.attributes, llamacpp.cluster.attributes.measures]
attributes:
  check_mode:
    details: Shows how much would be measured.
  idempotent:
    support: none
seealso:
  - module: llamacpp.cluster.benchmark
"""

EXAMPLES = r"""
- name: Measure the devices
  llamacpp.cluster.calibrate:
    plan: "{{ __llama_plan }}"
    facts: "{{ ansible_play_hosts | llamacpp.cluster.by_host(hostvars, '__llama_facts') }}"
    model: "{{ __llama_model_found }}"
  when: inventory_hostname == __llama_plan.head.host
"""

RETURN = r"""
rates:
  description: Host, device, and what was measured of it.
  returned: success
  type: dict
problem:
  description: What could not be measured, and why. The task does not fail.
  returned: where something went wrong after the beginning
  type: str
"""

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: discover
short_description: Proposes an inventory from the hosts' reports, and shows its plan
description:
  - Chooses a head, links and a model, writes an inventory with the reasons as comments, and shows the inventory's plan. Changes no host.
  - Runs as an action plugin on the controller.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
options:
  facts:
    description: Result of M(llamacpp.cluster.host_info) by host.
    type: dict
    required: true
  found:
    description: Result of M(llamacpp.cluster.discovery_info) by host.
    type: dict
    required: true
  path:
    description: File on the controller for the inventory. An existing file is never overwritten.
    type: path
    required: true
  report:
    description: File on the controller for the HTML report of the plan.
    type: path
"""

EXAMPLES = r"""
- name: Write an inventory, and show its plan
  llamacpp.cluster.discover:
    facts: "{{ facts }}"
    found: "{{ found }}"
    path: cluster/hosts.yml
"""

RETURN = r"""
plan:
  description: The plan for the proposed inventory.
  returned: success
  type: dict
"""

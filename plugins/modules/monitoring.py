#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: monitoring
short_description: Writes files for monitoring a cluster with Prometheus and Grafana
description:
  - From a plan, generates targets, scrape configuration and alerts for Prometheus, and dashboards for Grafana.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
attributes:
  check_mode:
    details: Writes the files in either mode.
options:
  plan:
    description: The plan that P(llamacpp.cluster.plan#module) returned. The module fails if the plan is refused, or if a host exports no metrics.
    type: dict
    required: true
  facts:
    description: Result of P(llamacpp.cluster.host_info#module) by host, for every host of the cluster.
    type: dict
    required: true
  path:
    description: Folder on the controller for the files. It is created if it is missing.
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Write the monitoring files
  llamacpp.cluster.monitoring:
    plan: "{{ __llama_plan }}"
    facts: "{{ ansible_play_hosts_all | llamacpp.cluster.by_host(hostvars, '__llama_facts') }}"
    path: monitoring
  run_once: true
"""

RETURN = r""" # """

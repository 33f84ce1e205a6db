#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: monitoring
short_description: Says what monitoring writes on hosts, and writes the same for those who have Prometheus and Grafana already
description:
  - Takes a plan, and makes targets, scrape configuration and alerts for Prometheus, and dashboards for Grafana.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
attributes:
  check_mode:
    details: Writes O(path) in either mode.
options:
  plan:
    description: The plan that P(llamacpp.cluster.plan#module) returned. The module fails where it is refused, or where a host writes no metrics.
    type: dict
    required: true
  facts:
    description: Host of the cluster, and what P(llamacpp.cluster.host_info#module) returned there.
    type: dict
    required: true
  monitors:
    description: The same of the hosts with Prometheus.
    type: dict
    default: {}
  path:
    description: Folder on the controller that gets the files. It is made where it is missing.
    type: path
seealso:
  - module: llamacpp.cluster.plan
  - module: llamacpp.cluster.firewall
"""

EXAMPLES = r"""
- name: Write what a Prometheus needs
  llamacpp.cluster.monitoring:
    plan: "{{ __llama_plan }}"
    facts: "{{ ansible_play_hosts_all | llamacpp.cluster.by_host(hostvars, '__llama_facts') }}"
    path: monitoring
  run_once: true
"""

RETURN = r"""
hosts:
  description: Host of the cluster, and its C(packages), C(files) and C(rules) of the firewall. Hosts on which nothing can be installed are left out.
  returned: success
  type: dict
  sample: {"strix1": {"packages": ["prometheus-node-exporter"], "files": [], "rules": []}}
monitors:
  description: The same of the hosts with Prometheus.
  returned: success
  type: dict
"""

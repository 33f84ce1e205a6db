#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: reboot_targets
short_description: Chooses the hosts that playbooks/reboot.yml may reboot
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Compares the names that an operator gives with the hosts of the cluster. It reboots nothing and contacts no host.
extends_documentation_fragment:
  - llamacpp.cluster.attributes
  - llamacpp.cluster.attributes.controller
  - llamacpp.cluster.attributes.info
options:
  hosts:
    description: Names of hosts, all of the cluster where this is left out. An empty list is refused.
    type: list
    elements: str
seealso:
  - module: llamacpp.cluster.service
  - module: llamacpp.cluster.verify
"""

EXAMPLES = r"""
- name: Look for the hosts to reboot
  llamacpp.cluster.reboot_targets:
    hosts: "{{ llama_reboot_hosts | default(omit) }}"
  run_once: true
  register: __llama_reboot_chosen
"""

RETURN = r"""
hosts:
  description: Names of the hosts to reboot.
  type: list
  elements: str
  returned: success
  sample: [strix1]
"""

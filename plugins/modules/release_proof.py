#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: release_proof
short_description: Fails unless a release has proven itself on the staging ports
description:
  - Judges what became of the instances on the staging ports, in one sentence for all hosts. It changes nothing.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
options:
  plan:
    description: The plan for the staging ports.
    type: dict
    required: true
  errors:
    description: Host, and the error of its instances, empty where there was none.
    type: dict
    required: true
  report:
    description: The report that M(llamacpp.cluster.verify) returned on the instances. Leave it out where no llama-server was started.
    type: dict
seealso:
  - module: llamacpp.cluster.staging_room
  - module: llamacpp.cluster.verify
"""

EXAMPLES = r"""
- name: Stop where the release has not proven itself
  llamacpp.cluster.release_proof:
    plan: "{{ staging.plan }}"
    errors: "{{ errors }}"
    report: "{{ verified.report }}"
  run_once: true
"""

RETURN = r""" # """

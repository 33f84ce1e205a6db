#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rollback_report
short_description: Reports how a rollback ended
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Warns after a rollback that the inventory may name another release, or fails with a sentence that says what failed, what serves now and what to do.
extends_documentation_fragment:
  - llamacpp.cluster.attributes
  - llamacpp.cluster.attributes.controller
  - llamacpp.cluster.attributes.info
options:
  state:
    description:
      - V(served) warns of the release in the inventory, now that O(target) serves.
      - V(failed) fails. With O(id), a change did not serve, and O(target) serves again if it is given. Without O(id), the rollback to O(target) did not end.
    type: str
    choices: [served, failed]
    required: true
  target:
    description: What M(llamacpp.cluster.rollback_plan) has chosen. Empty where nothing was chosen, or where it does not serve.
    type: dict
    default: {}
  release:
    description: The release of the inventory, as JSON with V(served).
    type: str
    default: ""
  id:
    description: Id of the plan that was applied and does not serve.
    type: str
    default: ""
  reasons:
    description: Host, and what failed there.
    type: dict
    default: {}
  lost:
    description: Hosts that were lost meanwhile.
    type: list
    elements: str
    default: []
  why_not:
    description: Why the cluster did not go back.
    type: str
    default: ""
seealso:
  - module: llamacpp.cluster.rollback_plan
"""

EXAMPLES = r"""
- name: Report what serves now, and what the inventory has
  llamacpp.cluster.rollback_report:
    state: served
    target: "{{ rollback.target }}"
    release: "{{ llama_release | default('') | to_json }}"
  run_once: true
"""

RETURN = r""" # """

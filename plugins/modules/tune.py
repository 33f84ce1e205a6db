#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: tune
short_description: Searches for faster settings of a cluster's server
description:
  - Measures changes of the plan's settings from the head, as M(llamacpp.cluster.benchmark) does, and changes none.
extends_documentation_fragment: llamacpp.cluster.attributes
attributes:
  check_mode:
    details: Says how many settings would be measured.
  idempotent:
    support: none
options:
  plan:
    description: The plan that serves.
    type: dict
    required: true
  facts:
    description: Host, and what M(llamacpp.cluster.host_info) returned there.
    type: dict
    required: true
  model:
    description: What M(llamacpp.cluster.model_info) returned of the model that is served.
    type: dict
    default: {}
  path:
    description: Folder on the controller that gets V(tuned.yml).
    type: path
"""

EXAMPLES = r"""
- name: Search for faster settings
  llamacpp.cluster.tune:
    plan: "{{ __llama_plan }}"
    facts: "{{ ansible_play_hosts | llamacpp.cluster.by_host(hostvars, '__llama_facts') }}"
"""

RETURN = r"""
settings:
  description: Variables of the best settings. Empty where those of the plan are.
  returned: success, not in check mode
  type: dict
"""

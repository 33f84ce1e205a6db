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
extends_documentation_fragment: [llamacpp.cluster.attributes, llamacpp.cluster.attributes.measures]
attributes:
  check_mode:
    details: Says how many settings would be measured.
  idempotent:
    support: none
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

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: benchmark
short_description: Measures a cluster
description:
  - Plans a load of the model for each part of the matrix of C(llama_benchmark_...), and measures them on the head, which this task runs for.
  - It calls M(llamacpp.cluster.benchmark_job) on the head, which keeps what was measured.
extends_documentation_fragment: [llamacpp.cluster.attributes, llamacpp.cluster.attributes.measures]
attributes:
  check_mode:
    details: Shows how much would be measured.
  idempotent:
    support: none
seealso:
  - module: llamacpp.cluster.verify
  - module: llamacpp.cluster.report
"""

EXAMPLES = r"""
- name: Measure the cluster
  llamacpp.cluster.benchmark:
    plan: "{{ __llama_plan }}"
    facts: "{{ ansible_play_hosts | llamacpp.cluster.by_host(hostvars, '__llama_facts') }}"
  when: inventory_hostname == __llama_plan.head.host
"""

RETURN = r"""
record:
  description: What was measured, as docs/benchmark.schema.json describes it.
  returned: success
  type: dict
problem:
  description: Why the rest could not be measured. The task does not fail, so that C(record) can be used.
  returned: where something went wrong after the beginning
  type: str
"""

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: report
short_description: Writes an HTML report of a plan, its verification and its benchmark, or a bug bundle
description:
  - Reads files that other playbooks have written on the controller, and writes a single self-contained HTML file.
  - With O(bundle), writes a file with other tasks' results for a bug report. Secrets are replaced by markers, and the task shows the number of
    secrets of each kind.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
attributes:
  check_mode:
    details: Writes a report in either mode, but does not write a bundle in check mode.
options:
  path:
    description: File on the controller for the report, or for the bundle. Only its owner can read a bundle.
    type: path
    required: true
  plan:
    description: The plan as JSON, written by playbooks/plan.yml.
    type: path
  verified:
    description: The result of a verification as JSON, written by playbooks/verify.yml.
    type: path
  benchmark:
    description: The folder written by playbooks/benchmark.yml, or its C(benchmark.json).
    type: path
  bundle:
    description:
      - C(plan), the plan; C(status), the result of M(llamacpp.cluster.status); C(reports), by host the result of M(llamacpp.cluster.host_status) with
        O(llamacpp.cluster.host_status#module:report); C(facts), by host its facts.
      - If set, O(path) is the bundle, and the other files are not read.
    type: dict
"""

EXAMPLES = r"""
- name: Write the HTML report for a benchmark
  llamacpp.cluster.report:
    path: report.html
    benchmark: results
"""

RETURN = ""

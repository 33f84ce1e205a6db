#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: benchmark_info
short_description: Reads how far a benchmark is, and what was measured before
description:
  - Reads the log of a program that measures, and records of benchmarks that the head keeps.
extends_documentation_fragment: [llamacpp.cluster.attributes.info, llamacpp.cluster.attributes.host]
seealso:
  - module: llamacpp.cluster.benchmark_job
options:
  log:
    description: File that a program of the job writes.
    type: path
  same:
    description: The end of the ids of all benchmarks that measure the same.
    type: str
"""

EXAMPLES = r"""
- name: See whether a benchmark runs
  llamacpp.cluster.benchmark_info:
    host: "{{ __llama_plan.hosts[inventory_hostname] }}"
"""

RETURN = r"""
running:
  description: Whether the job runs.
  returned: success
  type: bool
lines:
  description: What matters of O(log). Empty without it.
  returned: success
  type: str
record:
  description: The last benchmark that measures the same, or null.
  returned: where O(same) is given
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import history, job
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json


def main():
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "dict", "required": True},
            "log": {"type": "path"},
            "same": {"type": "str"},
        },
        supports_check_mode=True,
    )
    host, log, same = (module.params[name] for name in ("host", "log", "same"))
    with errors.reported(module):
        # First of all: what a job writes that has ended is complete.
        result = {
            "running": job.Job(typed_json.parse(job.Head, host)).runs(),
            "lines": history.lines_of(log) if log else "",
        }
        if same:
            result["record"] = history.find(host["prefix"], same)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()

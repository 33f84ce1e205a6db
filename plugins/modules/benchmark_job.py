#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: benchmark_job
short_description: Measures on the head in place of the server
description:
  - Runs programs that measure one after the other, as a service that takes the place of the server.
  - On systemd that service starts the server again by itself, however it ends. Beside supervisor O(state=absent) does.
extends_documentation_fragment: [llamacpp.cluster.attributes, llamacpp.cluster.attributes.host]
attributes:
  check_mode:
    details: Says what would change.
  idempotent:
    support: none
seealso:
  - module: llamacpp.cluster.benchmark
options:
  state:
    description:
      - With V(started) the server is stopped and O(job) runs. It fails where a job is there already.
      - With V(absent) there is no job, and the server runs.
      - Left out, the module only looks.
    type: str
    choices: [started, absent]
  job:
    description: C(timeout), seconds of each program, and C(loads), each with C(argv), C(environment), C(log), C(workers) and C(latency_ms).
    type: dict
  definition:
    description: Of the service.
    type: str
  runner:
    description: Text of the program that runs O(job).
    type: str
  record:
    description: What was measured so far, which is kept beside the installation.
    type: dict
  log:
    description: File that a program of the job writes.
    type: path
"""

EXAMPLES = r"""
- name: Start the server where a benchmark that was killed has left it stopped
  llamacpp.cluster.benchmark_job:
    host: "{{ __llama_plan.hosts[inventory_hostname] }}"
    state: absent
  when: inventory_hostname == __llama_plan.head.host
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
"""

import json

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import history, job, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock


def apply(service, params, check):
    """Brings the job to its state; whether that changes something."""
    started, exists = params["state"] == "started", service.exists()
    if started and exists:
        raise Refusal(f"{service.name} is there already: run playbooks/benchmark.yml again, which ends it first")
    if check:
        return started or exists
    if params["record"]:
        history.write(params["host"]["prefix"], typed_json.parse(types.Benchmark, params["record"]))
    if started:
        service.start(params["definition"], params["runner"], json.dumps(params["job"], indent=1) + "\n")
    elif exists:
        service.end()
    return started or exists


def main():
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "dict", "required": True},
            "state": {"type": "str", "choices": ["started", "absent"]},
            **{name: {"type": "dict"} for name in ("job", "record")},
            **{name: {"type": "str"} for name in ("definition", "runner")},
            "log": {"type": "path"},
        },
        required_if=[("state", "started", ("job", "definition", "runner", "record"))],
        supports_check_mode=True,
    )
    host, state, log = (module.params[name] for name in ("host", "state", "log"))
    lock = host_lock.hold(host["prefix"], exclusive=bool(state) and not module.check_mode)
    with errors.reported(module), lock:
        service = job.Job(typed_json.parse(job.Head, host))
        changed = apply(service, module.params, module.check_mode) if state else False
        running = service.runs()  # before the log is read: what a job writes that has ended is complete
        lines = history.lines_of(log) if log else ""
    module.exit_json(changed=changed, running=running, lines=lines)


if __name__ == "__main__":
    main()

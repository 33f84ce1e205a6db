#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: benchmark
short_description: Measures a cluster
description:
  - Plans a load of the model for each part of the matrix of C(llama_benchmark_...), and measures them on the head, which this task runs for, by a service
    that takes the place of the server. Used by C(playbooks/benchmark.yml).
  - On systemd that service starts the server again by itself, however it ends. Beside supervisor O(state=absent) does.
extends_documentation_fragment: llamacpp.cluster.attributes
attributes:
  check_mode:
    details: Shows how much would be measured.
  idempotent:
    support: none
options:
  plan:
    description: The plan that serves.
    type: dict
  facts:
    description: Host, and what M(llamacpp.cluster.host_info) returned there.
    type: dict
  model:
    description: What M(llamacpp.cluster.model_info) returned of the model that is served.
    type: dict
  path:
    description: Folder on the controller that gets the results, V(benchmark.json) and V(benchmark.md).
    type: path
  state:
    description:
      - With V(absent) no benchmark runs or is left from a run that was killed, and the server runs.
      - V(started), the service measures; the action plugin sets it, as O(host) and all others that C(benchmark.yml) does not.
    type: str
    choices: [started, absent]
  host:
    description: The head's part of the plan.
    type: dict
    required: true
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
running:
  description: Whether the service runs.
  returned: to the action plugin
  type: bool
lines:
  description: What matters of O(log). Empty without it.
  returned: to the action plugin
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
            **{name: {"type": "dict"} for name in ("plan", "facts", "model", "job", "record")},
            **{name: {"type": "str"} for name in ("definition", "runner")},
            **{name: {"type": "path"} for name in ("path", "log")},
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

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
  definition:
    description: Of the service.
    type: str
  programs:
    description: How many programs the service runs, whose results are read.
    type: int
    default: 0
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
running:
  description: Whether the service runs.
  returned: to the action plugin
  type: bool
programs:
  description: What each program has measured so far, its status, and the end of its log.
  returned: to the action plugin
  type: list
  elements: dict
"""

from contextlib import nullcontext
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import job, results
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, locks, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.place import InstallationPaths


def main():
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "dict", "required": True},
            "state": {"type": "str", "choices": ["started", "absent"]},
            **{name: {"type": "dict"} for name in ("plan", "facts", "model")},
            "definition": {"type": "str"},
            "programs": {"type": "int", "default": 0},
            "path": {"type": "path"},
        },
        required_if=[("state", "started", ("definition",))],
        supports_check_mode=True,
    )
    params, check = module.params, module.check_mode
    place = typed_json.parse(InstallationPaths, params["host"])
    lock = locks.hold_host(place.prefix) if params["state"] and not check else nullcontext()
    with errors.reported(module), lock:
        service = job.BenchmarkJob(place)
        changed = params["state"] == "started" or bool(params["state"] and service.exists())
        if changed and not check:
            service.start(params["definition"]) if params["state"] == "started" else service.end()
        running = service.runs()  # before the results are read: what a job writes that has ended is complete
        programs = [results.read_results(Path(place.prefix, "state"), number) for number in range(params["programs"])]
    module.exit_json(changed=changed, running=running, programs=typed_json.dump(programs))


if __name__ == "__main__":
    main()

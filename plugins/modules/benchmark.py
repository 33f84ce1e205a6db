#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: benchmark
short_description: Measures the speed of a cluster
description:
  - For each host count in C(llama_benchmark_hosts), plans how that many hosts load the model, and measures its speed with C(llama-bench), which runs in
    a service on the head while the server is stopped. Run the task on the head. Used by C(playbooks/benchmark.yml).
  - With systemd, the server always starts again after the measurements. With supervisor, O(state=absent) starts it.
extends_documentation_fragment: llamacpp.cluster.attributes
attributes:
  check_mode:
    details: Only shows the number of measurements.
  idempotent:
    support: none
options:
  plan:
    description: The plan that is serving.
    type: dict
  facts:
    description: Result of M(llamacpp.cluster.host_info) by host.
    type: dict
  model:
    description: Result of M(llamacpp.cluster.model_info) for the model that is served.
    type: dict
  path:
    description: Folder on the controller for the results, C(benchmark.json) and C(benchmark.md).
    type: path
  state:
    description:
      - V(absent) removes the benchmark of a killed run, and starts the server.
      - V(started) starts the service that runs the benchmark. Only the action plugin sets V(started), O(host), O(definition) and O(programs).
        Playbooks do not set them.
    type: str
    choices: [started, absent]
  host:
    description: The head's part of the plan.
    type: dict
    required: true
  definition:
    description: Definition of the service.
    type: str
  programs:
    description: Number of C(llama-bench) runs in the service. The module reads their results.
    type: int
    default: 0
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
  description: Measurements, described by docs/benchmark.schema.json.
  returned: success
  type: dict
"""

from contextlib import nullcontext
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import job, results
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, locks, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths


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
    params, check_mode = module.params, module.check_mode
    paths = typed_json.parse(InstallationPaths, params["host"])
    lock = locks.hold_host_lock(paths.prefix) if params["state"] and not check_mode else nullcontext()
    with errors.report_errors(module), lock:
        benchmark_job = job.BenchmarkJob(paths)
        is_changed = params["state"] == "started" or bool(params["state"] and benchmark_job.exists())
        if is_changed and not check_mode:
            benchmark_job.start(params["definition"]) if params["state"] == "started" else benchmark_job.end()
        # Checked before reading the results: the files of a finished job are complete.
        is_running = benchmark_job.is_running()
        programs = [results.read_progress(Path(paths.prefix, "state"), number) for number in range(params["programs"])]
    module.exit_json(changed=is_changed, running=is_running, programs=typed_json.dump(programs))


if __name__ == "__main__":
    main()

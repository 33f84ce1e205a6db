#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: benchmark
short_description: Measures the speed of a cluster
description:
  - Plans a load of the model for each number in C(llama_benchmark_hosts), and measures it on the head in a service that temporarily replaces the
    server. Run the task on the head. Used by C(playbooks/benchmark.yml).
  - With systemd, that service always starts the server again. With supervisor, O(state=absent) starts the server.
extends_documentation_fragment: llamacpp.cluster.attributes
attributes:
  check_mode:
    details: Shows how many measurements would be made.
  idempotent:
    support: none
options:
  plan:
    description: The serving plan.
    type: dict
  facts:
    description: Result of M(llamacpp.cluster.host_info) by host.
    type: dict
  model:
    description: Result of M(llamacpp.cluster.model_info) for the model that is served.
    type: dict
  path:
    description: Folder on the controller for the results, V(benchmark.json) and V(benchmark.md).
    type: path
  state:
    description:
      - V(absent) removes the benchmark of a killed run, and starts the server.
      - V(started) starts the service that runs the benchmark. Only the action plugin uses it, and also sets O(host) and all options that
        C(benchmark.yml) does not set.
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
    description: Number of programs in the service whose results the module reads.
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
    params, check = module.params, module.check_mode
    paths = typed_json.parse(InstallationPaths, params["host"])
    lock = locks.hold_host_lock(paths.prefix) if params["state"] and not check else nullcontext()
    with errors.report_errors(module), lock:
        benchmark_job = job.BenchmarkJob(paths)
        is_changed = params["state"] == "started" or bool(params["state"] and benchmark_job.exists())
        if is_changed and not check:
            benchmark_job.start(params["definition"]) if params["state"] == "started" else benchmark_job.end()
        running = (
            benchmark_job.is_running()
        )  # checked before reading the results: the files of a finished job are complete
        programs = [results.read_results(Path(paths.prefix, "state"), number) for number in range(params["programs"])]
    module.exit_json(changed=is_changed, running=running, programs=typed_json.dump(programs))


if __name__ == "__main__":
    main()

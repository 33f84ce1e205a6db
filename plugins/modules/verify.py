#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: verify
short_description: Compares a running cluster with its plan
description:
  - Runs on the head, queries the server, and reads the server's start log and the recorded handshakes with its workers.
  - The action plugin waits for the server, adds the other hosts' reports, judges each check, and shows a table. The task fails if a check fails.
  - To check that each worker's port is closed, the controller tries to connect to the port, but sends nothing. The worker's host (from another of its
    addresses) and other hosts try the same when M(llamacpp.cluster.host_info) compares them with the plan. Apart from these attempts, no worker is contacted.
extends_documentation_fragment: llamacpp.cluster.attributes.info
attributes:
  check_mode:
    details: Changes nothing in either mode, apart from writing O(path) and O(report). Outside check mode, the result is recorded on the head.
options:
  plan:
    description: The plan.
    type: dict
    required: true
  answers:
    description: Last result of P(llamacpp.cluster.host_info#module) by host. The C(release) check fails for a host without a result.
    type: dict
    default: {}
  changed:
    description: Names of the hosts that this run changed. Older reports about the ports of these hosts do not count.
    type: list
    elements: str
    default: []
  path:
    description: File on the controller for the report as JSON.
    type: path
  report:
    description: File on the controller for a self-contained HTML report of plan, checks and O(benchmark).
    type: path
  benchmark:
    description: Measurements from M(llamacpp.cluster.benchmark), for O(report).
    type: dict
  gate:
    description: Whether to only wait until the server is healthy and has answered one question. This needs only the head's part of O(plan).
    type: bool
    default: false
  fallback_wait:
    description: Seconds to wait until a head that serves on a fallback returns to the full plan.
    type: int
    default: 0
  wake:
    description:
      - Whether to wake a sleeping server with the test question. Otherwise a sleeping server's answers are not tested.
      - The action plugin always wakes the server if O(gate) is set, or if O(changed) names a host.
    type: bool
    default: false
  lacks_proof:
    description: Whether the operator requested a proof (M(llamacpp.cluster.proof)) that this run did not carry out.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Verify the cluster
  llamacpp.cluster.verify:
    plan: "{{ __llama_plan }}"
    answers: "{{ ansible_play_hosts | llamacpp.cluster.by_host(hostvars, '__llama_comparison') }}"
    path: "{{ llama_verify_path | default(omit) }}"
"""

RETURN = r"""
report:
  description: C(passed), and C(checks) with C(name), C(subject), C(status) (V(passed), V(failed) or V(not tested)) and C(evidence).
  returned: when no check failed; O(path) is written in either case
  type: dict
failing:
  description: Names of the failed checks, each once.
  returned: when a check failed
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import evidence
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Subject, VerifyArguments

WAIT_SECONDS = 5.0
"""Time to wait for the server in a single call."""


def main():
    module = AnsibleModule(
        argument_spec=typed_json.specification(VerifyArguments), supports_check_mode=True, no_log=True
    )
    with errors.report_errors(module):
        subject = typed_json.parse(Subject, module.params["plan"])
        collected_evidence = evidence.collect(subject, WAIT_SECONDS, module.params["wake"])
    module.exit_json(changed=False, evidence=typed_json.dump(collected_evidence))


if __name__ == "__main__":
    main()

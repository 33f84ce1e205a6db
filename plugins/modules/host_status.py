#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: host_status
short_description: Reports the current state of a host and its services
description:
  - Compares a host with its part of the plan as M(llamacpp.cluster.host_info) does, and adds values that change with time. These are uptimes, restarts,
    free memory and disk space, and on the head what its launcher, llama-server and the last verification reported.
  - Never connects to a worker. A worker's clients are read from the sockets of the worker's host.
extends_documentation_fragment: [llamacpp.cluster.attributes.info, llamacpp.cluster.attributes.installation]
options:
  plan:
    description: The host's part of the plan. Without this option, nothing is compared, and O(scope) selects the installation.
    type: dict
  head:
    description: C(head) of the plan. Set it on the head only.
    type: dict
  report:
    description:
      - Whether to also report logs, kernel and drivers for a bug bundle. The module removes API keys of O(head), and everything that
        looks like a secret.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Read the state of the host
  llamacpp.cluster.host_status:
    plan: "{{ __llama_host_plan }}"
    head: "{{ __llama_plan.head if inventory_hostname == __llama_plan.head.host else omit }}"
  register: __llama_host_status
"""

RETURN = r"""
drift:
  description: Differences as M(llamacpp.cluster.host_info) returns them, without C(port_probes).
  returned: when O(plan) is set
  type: dict
report:
  description: Texts by name, without secrets.
  returned: when O(report) is true
  type: dict
condition:
  description: Values that change with time. Sizes are in MiB, times in seconds. Unknown values are null.
  returned: success
  type: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import host_report, host_status
from ansible_collections.llamacpp.cluster.plugins.module_utils.status.types import HostStatusArguments


def report_status(arguments):
    result: dict[str, Any] = {}
    drift, condition = host_status.examine_host(arguments.scope, arguments.plan, arguments.head)
    if arguments.report:
        key_file = arguments.head.api_key_file if arguments.head else None
        result["report"] = host_report.read_report(arguments.scope, key_file)
    return {**result, **({"drift": typed_json.dump(drift)} if drift else {}), "condition": typed_json.dump(condition)}


def main():
    module = AnsibleModule(
        argument_spec=typed_json.specification(HostStatusArguments), supports_check_mode=True, no_log=True
    )
    with errors.report_errors(module):
        result = report_status(typed_json.parse(HostStatusArguments, module.params))
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()

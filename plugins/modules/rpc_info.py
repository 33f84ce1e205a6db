#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: rpc_info
short_description: Asks an RPC worker for its protocol, devices and memory
description:
  - Shakes hands with a llama.cpp RPC worker, asks for its devices, and closes the connection.
  - The module does not fail where the state is not V(ok).
notes:
  - A worker serves one client at a time. Do not probe one that a head uses. It does not answer, and a worker that does not ignore the signal
    C(SIGPIPE) ends when it comes to the connection that was closed meanwhile.
extends_documentation_fragment: llamacpp.cluster.attributes.info
options:
  address:
    description: Numeric IPv4 address of the worker, as seen from the host on which the module runs.
    type: str
    required: true
  port:
    description: TCP port of the worker.
    type: int
    required: true
  protocol:
    description: Protocol that the head speaks. A worker that it would not accept is reported as V(protocol_mismatch).
    type: str
  timeout:
    description: Seconds for the whole conversation.
    type: float
    default: 5.0
  wait:
    description: Seconds for which it asks again while the state is V(refused), V(unreachable) or V(silent), as where a worker starts.
    type: float
    default: 0.0
seealso:
  - module: llamacpp.cluster.verify
"""

EXAMPLES = r"""
- name: Ask a worker before the head starts
  llamacpp.cluster.rpc_info:
    address: 192.168.128.12
    port: 50052
    protocol: 7.0.0
    wait: 30
  register: answer
  failed_when: answer.state != 'ok'
"""

RETURN = r"""
state:
  description:
    - V(ok), a worker that a head can use; V(protocol_mismatch), a worker of another generation; V(no_device), a worker that lends nothing;
      V(refused), nothing listens on the port; V(unreachable), no route, a closed port or a lost connection; V(not_rpc), something else answers.
    - V(silent), the connection is accepted but not answered. The worker serves another client or hangs, or something else listens there.
  returned: always
  type: str
  sample: ok
detail:
  description: More about a state other than V(ok).
  returned: always
  type: str
msg:
  description: The state in a sentence.
  returned: always
  type: str
protocol:
  description: The worker's version of the protocol.
  returned: always
  type: str
  sample: 7.0.0
devices:
  description: Memory of each device.
  returned: always
  type: list
  elements: dict
  sample: [{"free_mib": 24105, "total_mib": 24105}]
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc

PAUSE_SECONDS = 0.5
PASSING = ("refused", "unreachable", "silent")


def ask(params):
    """The first answer that time does not change, or else the last in the time that there is."""
    deadline = time.monotonic() + params["wait"]
    while True:
        answer = rpc.probe(params["address"], params["port"], params["timeout"], params["protocol"])
        if answer.state not in PASSING or time.monotonic() + PAUSE_SECONDS >= deadline:
            return answer
        time.sleep(PAUSE_SECONDS)


def main():
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "protocol": {"type": "str"},
            "timeout": {"type": "float", "default": 5.0},
            "wait": {"type": "float", "default": 0.0},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        with errors.reported(module):
            answer = ask(params)
    except ValueError as error:
        module.fail_json(
            msg=f"{params['address']}:{params['port']} is not the endpoint of a worker: {error}. Give a numeric IPv4 address and a port."
        )
    text = f"The worker at {params['address']}:{params['port']} is {answer.state}"
    if answer.detail:
        text += f": {answer.detail}. Check its service and its log"
    module.exit_json(changed=False, msg=text + ".", **typed_json.dump(answer))


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: link_speed
short_description: Measures a link to another host
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Sends for a few seconds to an C(iperf3) server on the other host and pings it. The tasks C(measure) of the role P(llamacpp.cluster.llama_link#role)
    start that server.
  - The module does not fail where a link cannot be measured. RV(detail) says why.
attributes:
  check_mode:
    support: full
    description: Changes nothing in either mode. Measures nothing in check mode.
options:
  address:
    description: Numeric IPv4 address of the other host on the link.
    type: str
    required: true
  port:
    description: TCP port on which C(iperf3) listens there. Without it, only the round trip is measured.
    type: int
  seconds:
    description: How long to send.
    type: int
    default: 3
  lacking:
    description: Names of the hosts on which C(iperf3) is not installed, for RV(detail).
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Measure the link to a worker
  llamacpp.cluster.link_speed:
    address: 10.99.0.12
    port: 50152
"""

RETURN = r"""
mbit_per_second:
  description: What the other host received, or null.
  returned: always
  type: int
  sample: 9412
round_trip_ms:
  description: Mean of ten pings in milliseconds, or null.
  returned: always
  type: float
  sample: 0.213
detail:
  description: What was not measured and why, or an empty text.
  returned: always
  type: str
  sample: "not measured: iperf3 is not installed on strix0"
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.apply import links
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import failures


def main():
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "port": {"type": "int"},
            "seconds": {"type": "int", "default": 3},
            "lacking": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(
            changed=False, mbit_per_second=None, round_trip_ms=None, detail="not measured: this is check mode"
        )
    with failures.reported(module, ValueError):
        measured = links.measure(**module.params)
    module.exit_json(changed=False, **measured)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: link_throughput
short_description: Measures a link to another host
description:
  - Sends for a few seconds to an C(iperf3) server on the other host and pings it. With O(listen_for) it is that server, for one measurement.
  - The module does not fail where a link cannot be measured. RV(detail) says why.
extends_documentation_fragment: llamacpp.cluster.attributes.info
attributes:
  check_mode:
    details: Changes nothing in either mode. Measures nothing in check mode.
options:
  address:
    description: Numeric IPv4 address of the other host on the link, or with O(listen_for) of this one.
    type: str
    required: true
  port:
    description: TCP port on which C(iperf3) listens there. Without it, only the round trip is measured.
    type: int
  seconds:
    description: How long to send, or with O(listen_for) to listen at most.
    type: int
    default: 3
  listen_for:
    description: Numeric IPv4 address of the host that measures. Then this module only lets C(iperf3) listen, and returns when that has ended.
    type: str
  account:
    description: Account as which root runs C(iperf3).
    type: str
  unit:
    description: Whether C(iperf3) listens in a unit of systemd, which lets in O(listen_for) alone.
    type: bool
    default: false
  lacking:
    description: Names of the hosts on which C(iperf3) is not installed, for RV(detail).
    type: list
    elements: str
    default: []
seealso:
  - module: llamacpp.cluster.link
  - module: llamacpp.cluster.verify
"""

EXAMPLES = r"""
- name: Measure the link to a worker
  llamacpp.cluster.link_throughput:
    address: 10.99.0.12
    port: 50152

- name: Let iperf3 listen on that host
  llamacpp.cluster.link_throughput:
    address: 10.99.0.12
    port: 50152
    listen_for: 10.99.0.11
    account: llamacpp
    unit: true
    seconds: 60
"""

RETURN = r"""
mbit_per_second:
  description: What the other host received, or null.
  returned: when O(listen_for) is not given
  type: int
round_trip_ms:
  description: Mean of ten pings in milliseconds, or null.
  returned: when O(listen_for) is not given
  type: float
detail:
  description: What was not measured and why, or an empty text.
  returned: when O(listen_for) is not given
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import throughput


def main():
    module = AnsibleModule(
        argument_spec={
            "address": {"type": "str", "required": True},
            "port": {"type": "int"},
            "seconds": {"type": "int", "default": 3},
            "lacking": {"type": "list", "elements": "str", "default": []},
            "listen_for": {"type": "str"},
            "account": {"type": "str"},
            "unit": {"type": "bool", "default": False},
        },
        required_by={"listen_for": ["port"]},
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(
            changed=False, mbit_per_second=None, round_trip_ms=None, detail="not measured: this is check mode"
        )
    address, port, seconds, client, account = (
        module.params[name] for name in ("address", "port", "seconds", "listen_for", "account")
    )
    with errors.reported(module):
        if client:
            throughput.listen(address, port, client, seconds, account, module.params["unit"])
            module.exit_json(changed=False)
        measured = throughput.measure(address, port, seconds, module.params["lacking"], account)
    module.exit_json(changed=False, **measured._asdict())


if __name__ == "__main__":
    main()

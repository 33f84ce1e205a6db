#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: firewall
short_description: Compares the host's firewall with the plan
description:
  - Compares the cluster's rules with the planned rules, and returns the changes for P(ansible.posix.firewalld#module), P(community.general.ufw#module) or
    C(nft). The role C(llama_firewall) makes these changes.
  - Foreign rules are never changed. If a foreign ufw rule lets a planned client reach a port, the module adds no rule that closes this port.
extends_documentation_fragment: llamacpp.cluster.attributes.changes
attributes:
  check_mode:
    details: Changes nothing in either mode. In check mode it reports what the role would change.
options:
  keep_obsolete_rules:
    description: Whether to keep the cluster's rules that are not in O(rules), because programs may still listen on their ports. When these programs have
      stopped, run the module again without this option.
    type: bool
    default: false
  manager:
    description: The host's active firewall manager. Without this option, no port is opened or closed.
    type: str
    choices: [firewalld, ufw, nftables]
  rules:
    description:
      - Ports and their clients, from C(hosts.HOST.firewall) of the plan. C(port) is a TCP port. C(address) is the host's IPv4 address,
        V(0.0.0.0) for all of its addresses. C(sources) are the clients' IPv4 addresses and networks, V(0.0.0.0/0) for everyone.
    type: list
    elements: dict
    required: true
"""

EXAMPLES = r"""
- name: Compare the rules for a worker's port
  llamacpp.cluster.firewall:
    manager: ufw
    rules:
      - port: 50052
        address: 192.168.128.12
        sources: [192.168.128.11]
"""

RETURN = r"""
rules_to_add:
  description: Arguments for the firewalld or ufw module, one entry per call, in the order of the calls.
  returned: success
  type: list
  elements: dict
rules_to_remove:
  description: Arguments for the firewalld or ufw module, one entry per rule to remove. Remove these rules after the calls in RV(rules_to_add).
  returned: success
  type: list
  elements: dict
text:
  description: Content of the nftables file. Empty if the file is not needed.
  returned: success
  type: str
differs:
  description: Whether anything has to change.
  returned: success
  type: bool
"""

from typing import Annotated, NamedTuple, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.steps import steps_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule


class FirewallArguments(NamedTuple):
    rules: tuple[FirewallRule, ...]
    keep_obsolete_rules: bool = False
    manager: Optional[Annotated[str, names.FIREWALLS]] = None


def main():
    module = AnsibleModule(argument_spec=typed_json.specification(FirewallArguments), supports_check_mode=True)
    arguments = typed_json.parse(FirewallArguments, module.params)
    with errors.report_errors(module):
        steps = steps_of(arguments.manager, arguments.rules, arguments.keep_obsolete_rules, System())
    for chain in steps.drop_chains:
        module.warn(
            f"The nftables chain {chain} drops packets by default, and this run does not change that chain. Add these rules to it: "
            f"{', '.join(steps.rules_after)}."
        )
    diff = {side: "".join(f"{line}\n" for line in getattr(steps, f"rules_{side}")) for side in ("before", "after")}
    module.exit_json(
        changed=steps.differs and module.check_mode,
        diff=diff,
        differs=steps.differs,
        rules_to_add=steps.rules_to_add,
        rules_to_remove=steps.rules_to_remove,
        text=steps.text,
    )


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: firewall
short_description: Opens the ports of llama.cpp's workers and server to those who are planned to connect
description:
  - Lets the given sources connect to the given ports and nobody else, with the firewall manager that is active on the host.
  - Rules of others stay as they are, whether they are permanent or belong to the running firewall only.
    A manager that is not active is never enabled or started.
  - It removes rules that it made before and that are not wanted any more, from the active manager and from every other installed one.
    Without O(manager) or without O(rules) it does nothing else.
notes:
  - With ufw, the rules carry a comment and stand before all others. A rule that somebody else made before is left as it is.
    Then this module does not close the port to others.
  - With firewalld, the rules stand in the policy C(llamacpp), or C(llamacpp-CLUSTER), which takes effect when firewalld is next reloaded or started.
    Until then rich rules in the running zones do the same, because a reload would drop the run-time rules of others.
    When the rules are removed, the running policy is emptied and has no effect. Its name is listed until the next reload.
  - With nftables, the rules stand in the table C(inet llamacpp), or C(inet llamacpp-CLUSTER).
    Chains of others that could drop the connection get a rule that accepts it.
    The unit C(firewall-llamacpp.service), or C(firewall-llamacpp-CLUSTER.service), restores all of them when C(nftables.service) is started or reloaded.
extends_documentation_fragment: [llamacpp.cluster.attributes.changes, llamacpp.cluster.attributes.settings]
options:
  keep:
    description:
      - Leaves the rules for ports that O(rules) does not name, since something may still listen there. Run the module again without it when that has stopped.
    type: bool
    default: false
  manager:
    description: The host's active firewall manager. Without it nothing is opened or closed, and the rules of this module are removed.
    type: str
    choices: [firewalld, ufw, nftables]
  rules:
    description:
      - The ports, and for whom they are open, as the plan has them in C(hosts.HOST.firewall). C(port) and C(protocol) are on the numeric IPv4
        C(address), V(0.0.0.0) for all of them. C(sources) are numeric IPv4 addresses and networks, V(0.0.0.0/0) for everybody.
    type: list
    elements: dict
    required: true
seealso:
  - module: llamacpp.cluster.link
  - module: llamacpp.cluster.service
"""

EXAMPLES = r"""
- name: Open a worker's port to its head
  llamacpp.cluster.firewall:
    manager: nftables
    rules:
      - port: 50052
        protocol: tcp
        address: 192.168.128.12
        sources: [192.168.128.11]

- name: Remove every rule that this module has made
  llamacpp.cluster.firewall:
    rules: []
"""

RETURN = r"""
rules:
  description: Rules of this module afterwards, or as they would be in check mode, as the host's manager names them.
  returned: success
  type: list
  elements: str
  sample:
    - ufw allow from 192.168.128.11 to 192.168.128.12 port 50052 proto tcp
    - ufw deny to 192.168.128.12 port 50052 proto tcp
"""

from typing import Annotated, NamedTuple, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall import managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule


class Arguments(NamedTuple):
    rules: tuple[FirewallRule, ...]
    cluster: str = names.DEFAULT_CLUSTER
    prefix: Optional[str] = None
    keep: bool = False
    manager: Optional[Annotated[str, names.FIREWALLS]] = None


def main():
    module = AnsibleModule(argument_spec=typed_json.specification(Arguments), supports_check_mode=True)
    arguments = typed_json.parse(Arguments, module.params)
    waiting = host_lock.hold(arguments.prefix, exclusive=not module.check_mode)
    with errors.reported(module), waiting:
        system = System(names.of(arguments.cluster))
        before, after = managers.apply(arguments.manager, arguments.rules, module.check_mode, system, arguments.keep)
    shown = {side: "".join(f"{line}\n" for line in lines) for side, lines in (("before", before), ("after", after))}
    module.exit_json(changed=before != after, diff=shown, rules=after)


if __name__ == "__main__":
    main()

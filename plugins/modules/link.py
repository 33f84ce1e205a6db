#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: link
short_description: Configures the interfaces of direct links
description:
  - Sets a static address and the MTU of interfaces that are cabled directly to another host, through NetworkManager or systemd-networkd,
    whichever runs on the host. Both settings survive a restart of the host.
  - These interfaces get no gateway, name server or additional address, and do not delay the boot.
  - Removes this collection's configuration of links that are not listed. An empty list removes the configuration of all links.
  - Changes nothing and fails if an interface is missing, has another address, or carries Ansible's connection or the default route,
    or if its address is in the network of another interface. Foreign files are not changed.
notes:
  - Requires root on the host if any link is managed.
  - NetworkManager assigns the address when the other end is connected; systemd-networkd assigns it at once.
extends_documentation_fragment: [llamacpp.cluster.attributes.changes, llamacpp.cluster.attributes.settings]
options:
  links:
    description:
      - The links of this host, from C(hosts.HOST.links) in the plan. Links with C(manage) are configured. Each link needs its own network. Without
        C(mtu), the interface keeps its MTU.
    type: list
    elements: dict
    required: true
"""

EXAMPLES = r"""
- name: Configure the direct link to the head
  llamacpp.cluster.link:
    links:
      - interface: thunderbolt0
        address: 10.99.0.12/24
        mtu: 65520
        peer: strix0
        manage: true
"""

RETURN = r"""
msg:
  description: The address of each configured link.
  returned: always
  type: str
"""

from contextlib import nullcontext
from typing import NamedTuple, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, locks, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import applying, configuration
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan


class LinkArguments(NamedTuple):
    links: tuple[LinkPlan, ...]
    prefix: Optional[str] = None


def main():
    module = AnsibleModule(argument_spec=typed_json.specification(LinkArguments), supports_check_mode=True)
    arguments = typed_json.parse(LinkArguments, module.params)
    system, check_mode = System(), module.check_mode
    lock = locks.hold_host_lock(arguments.prefix) if arguments.prefix and not check_mode else nullcontext()
    with errors.report_errors(module), lock:
        old_text, new_text = applying.apply_links(arguments.links, check_mode, system)
    sentences = [f"{link.interface} has {link.address}." for link in configuration.links_to_manage(arguments.links)]
    module.exit_json(
        changed=old_text != new_text,
        diff={"before": old_text, "after": new_text},
        msg=" ".join(sentences) or "There is no link to configure.",
    )


if __name__ == "__main__":
    main()

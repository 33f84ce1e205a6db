#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: discovery_info
short_description: Reports links to other hosts, and models on the host
description:
  - Sends an empty datagram to each of O(addresses) that is in one of the host's networks, and reports the neighbours that each interface then sees. Linux only.
  - Searches the usual folders, including those of Ollama, for GGUF files, and reads their headers.
extends_documentation_fragment: llamacpp.cluster.attributes.info
options:
  addresses:
    description: IPv4 addresses of the other hosts.
    type: list
    elements: str
    default: []
  folders:
    description: Additional folders with models.
    type: list
    elements: path
    default: []
  account:
    description: Account that reads the models when they are served. Defaults to the connecting account.
    type: str
"""

EXAMPLES = r"""
- name: Find links and models
  llamacpp.cluster.discovery_info:
    addresses: [10.99.0.2]
  register: found
"""

RETURN = r"""
discovered:
  description: Name of the host, its interfaces (with the hardware addresses that each interface sees), and its models (each with its summary, and with the
    folder or file that O(account) cannot read, if any).
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import discovery


def main():
    module = AnsibleModule(
        argument_spec={
            "addresses": {"type": "list", "elements": "str", "default": []},
            "folders": {"type": "list", "elements": "path", "default": []},
            "account": {"type": "str"},
        },
        supports_check_mode=True,
    )
    params = module.params
    folders = [*params["folders"], *discovery.MODEL_FOLDERS]
    with errors.report_errors(module):
        discovered = discovery.discover(params["addresses"], folders, params["account"])
    module.exit_json(changed=False, discovered=typed_json.dump(discovered))


if __name__ == "__main__":
    main()

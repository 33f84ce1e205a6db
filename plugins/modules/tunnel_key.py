#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: tunnel_key
short_description: Installs a key at one end of a tunnel
description:
  - Writes a key into the file that stunnel reads at one end of the tunnel between a head and its workers' host. Connections stay open.
  - To renew a key without interruption, install a new key on the workers' host with O(keep_other_keys), then on the head, and then on the workers' host
    without O(keep_other_keys).
extends_documentation_fragment: llamacpp.cluster.attributes.changes
attributes:
  diff_mode:
    support: none
    details: Keys are never shown.
options:
  path:
    description: Key file of the tunnel, one of C(tunnel_keys) in the host's part of the plan.
    type: path
    required: true
  key:
    description: The key, 64 hexadecimal digits.
    type: str
    required: true
  keep_other_keys:
    description: Whether keys that are already in the file stay valid. An interrupted run may leave several keys, and the head may use any of them.
    type: bool
    default: false
  account:
    description: Account that runs the services and owns the file. Defaults to the account that runs the module.
    type: str
"""

EXAMPLES = r"""
- name: Add a new key on the host of the workers
  llamacpp.cluster.tunnel_key:
    path: "{{ __llama_host_plan.tunnel_keys | first }}"
    key: "{{ __llama_tunnel_key }}"
    keep_other_keys: true
  no_log: true
"""

RETURN = r""" # """

import os
import re
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import tunnel_keys

RELOAD_SECONDS = 3
"""Seconds after which stunnel has reloaded a file: the launcher checks it every second."""


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "key": {"type": "str", "required": True, "no_log": True},
            "keep_other_keys": {"type": "bool", "default": False},
            "account": {"type": "str"},
        },
        supports_check_mode=True,
    )
    path, key = Path(module.params["path"]), module.params["key"]
    if not re.fullmatch("[0-9a-f]{64}", key):
        module.fail_json(msg="key does not consist of 64 hexadecimal digits: generate a key from 32 random bytes")
    was_present = os.path.lexists(path)
    with errors.report_errors(module):
        account, keep_other_keys = module.params["account"], module.params["keep_other_keys"]
        is_changed = tunnel_keys.put_key_first(path, key, account, keep_other_keys, module.check_mode)
    if is_changed and was_present and not module.check_mode:
        time.sleep(RELOAD_SECONDS)
    module.exit_json(changed=is_changed)


if __name__ == "__main__":
    main()

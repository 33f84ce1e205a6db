#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cache_prefill_info
short_description: Reads which tensors the caches of workers have to have
description:
  - Reads from each model on the head which large tensors it has, and what identifies each.
  - It does not fail where the model cannot be read, but says why. The head then sends everything when it loads.
extends_documentation_fragment: [llamacpp.cluster.attributes.info, llamacpp.cluster.attributes.prefill]
options:
  plan:
    description: The plan. An action plugin takes O(path), O(account) and O(names) from it.
    type: dict
  names:
    description: Names of the tensors, and their bytes.
    type: dict
    default: {}
seealso:
  - module: llamacpp.cluster.cache_prefill
  - module: llamacpp.cluster.cache_upload
"""

EXAMPLES = r"""
- name: Read which tensors the caches of workers have to have
  llamacpp.cluster.cache_prefill_info:
    plan: "{{ plan }}"
  register: model
"""

RETURN = r"""
tensors:
  description: The tensors that workers cache, of each model.
  returned: success
  type: list
  elements: dict
  sample: [{"path": "/srv/model.gguf", "name": "blk.0.ffn_up.weight", "bytes": 58720256, "fingerprint": "3b0a7c2c2f1f4f6a8f1a5d2b7e9c0d1e"}]
why:
  description: Why the tensors could not be read, a sentence each.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill


def described(params):
    try:
        tensors = cache_prefill.describe(params["path"], params["names"])
    except cache_prefill.PrefillError as error:
        return {"tensors": [], "why": [f"No cache is filled before the head loads: {error}."]}
    return {"tensors": [tensor._asdict() for tensor in tensors], "why": []}


def main():
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict"},
            "path": {"type": "str"},
            "account": {"type": "str"},
            "names": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **cache_prefill.run(module, lambda: described(module.params)))


if __name__ == "__main__":
    main()

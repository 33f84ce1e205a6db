#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cache_upload
short_description: Sends tensors from the head into the caches of workers
description:
  - Sends what the caches of workers lack to instances of them on their staging ports, all at once. While it loads, a head sends to one after the other.
  - It does not fail where a cache cannot be filled, but says why. The head then sends what is missing when it loads.
  - An action plugin runs the module again and again until all is done, and shows the progress every 10 seconds.
extends_documentation_fragment: [llamacpp.cluster.attributes, llamacpp.cluster.attributes.prefill]
attributes:
  check_mode:
    support: none
    details: The instances on the staging ports do not run in check mode.
options:
  plan:
    description: The plan. An action plugin takes O(path), O(account) and O(targets) from it.
    type: dict
  staging:
    description: The plan of the instances that run on the staging ports.
    type: dict
  answers:
    description: Host → what M(llamacpp.cluster.cache_prefill) returned there.
    type: dict
  tensors:
    description: What M(llamacpp.cluster.cache_prefill_info) returned on the head.
    type: list
    elements: dict
    default: []
  targets:
    description: Workers on their staging ports with C(endpoint), C(fork), and C(names) of the tensors that they lack.
    type: list
    elements: dict
    default: []
  tunnels:
    description: The head's ends of tunnels to them, C(ADDRESS:PORT=ADDRESS:PORT) each.
    type: list
    elements: str
    default: []
  keys:
    description: Folder of the tunnels' keys.
    type: path
seealso:
  - module: llamacpp.cluster.cache_prefill
"""

EXAMPLES = r"""
- name: Send what is missing to all workers at once
  llamacpp.cluster.cache_upload:
    plan: "{{ plan }}"
    staging: "{{ staging.plan }}"
    tensors: "{{ model.tensors }}"
    answers: "{{ answers }}"
"""

RETURN = r"""
why:
  description: Why caches could not be filled, a sentence each.
  returned: success
  type: list
  elements: str
"""

import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import tunnel


def sent(params):
    """Sends until the time is over."""
    known = cache_prefill.by_name(params["tensors"])
    targets = [
        (target["endpoint"], target["fork"], [known[name] for name in target["names"] if name in known])
        for target in params["targets"]
    ]
    ends = tunnel.of_words(params["tunnels"], Path(params["keys"] or ""), client=True)
    with tunnel.Tunnels(ends):
        done = cache_prefill.send(params["path"], targets, time.monotonic() + cache_prefill.STEP_SECONDS)
    failed = {endpoint: given for endpoint, given in done.items() if isinstance(given, cache_prefill.PrefillError)}
    return {
        "given": {
            endpoint: [] if endpoint in failed else [tensor.name for tensor in given]
            for endpoint, given in done.items()
        },
        "why": [f"The head does not fill a cache: {error}." for error in failed.values()],
    }


def main():
    module = AnsibleModule(
        argument_spec={
            **{key: {"type": "dict"} for key in ("plan", "staging", "answers")},
            "path": {"type": "str"},
            "account": {"type": "str"},
            "tensors": {"type": "list", "elements": "dict", "default": []},
            "targets": {"type": "list", "elements": "dict", "default": []},
            "tunnels": {"type": "list", "elements": "str", "default": []},
            "keys": {"type": "path", "no_log": False},
        },
    )
    answer = cache_prefill.run(module, lambda: sent(module.params))
    module.exit_json(changed=any(answer["given"].values()), **answer)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cache_prefill
short_description: Fills the caches of a host's workers from what the host has
description:
  - Puts tensors of the model into the caches of workers before the head asks for them, from a copy of the model on their host or from another cache there.
  - A worker of the same release is given the tensors over its protocol, and writes its cache itself. It uses the processor and listens on loopback.
    What serves goes on serving.
  - It does not fail where a cache cannot be filled, but says why. The head then sends what is missing when it loads.
  - An action plugin runs the module again and again until all is done, and shows the progress every 10 seconds.
extends_documentation_fragment: [llamacpp.cluster.attributes, llamacpp.cluster.attributes.prefill]
options:
  plan:
    description: The plan. An action plugin takes O(path), O(account) and O(workers) from it.
    type: dict
  tensors:
    description: What M(llamacpp.cluster.cache_prefill_info) returned on the head.
    type: list
    elements: dict
    default: []
  local:
    description: Whether to fill the caches. Otherwise the module only looks at them.
    type: bool
    default: true
  workers:
    description: Workers of this host with C(name), C(environment), C(seed) as in the plan, and C(names) of their tensors.
    type: list
    elements: dict
    default: []
seealso:
  - module: llamacpp.cluster.cache_prefill_info
  - module: llamacpp.cluster.cache_upload
"""

EXAMPLES = r"""
- name: Fill the caches from what the host has
  llamacpp.cluster.cache_prefill:
    plan: "{{ plan }}"
    tensors: "{{ model.tensors }}"
"""

RETURN = r"""
missing:
  description: Path of each model → worker → names of the tensors that are not in its cache.
  returned: success
  type: dict
why:
  description: Why caches could not be filled, and what they lack, a sentence each.
  returned: success
  type: list
  elements: str
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import worker as launcher


def filled(params, check_mode):
    """Looks at the caches, and fills them until the time is over."""
    until = time.monotonic() + cache_prefill.STEP_SECONDS
    known = cache_prefill.by_name(params["tensors"])
    workers = [cache_prefill.worker_of(planned) for planned in params["workers"]]
    answer: dict[str, Any] = {"missing": {}, "linked_mib": 0, "copied_mib": 0, "left_mib": 0, "why": []}
    for worker, planned in zip(workers, params["workers"]):
        wanted = [known[name] for name in planned["names"] if name in known]
        beside = [other.folder for other in workers if other.folder != worker.folder]
        try:
            if not check_mode:
                # The launcher that watches the cache may serve another model, and removes files of sizes that it does not know.
                launcher.known_sizes(worker.folder, {tensor.bytes for tensor in wanted})
            step(answer, worker, wanted, beside, params, check_mode, until)
        except (cache_prefill.PrefillError, OSError) as error:
            answer["why"].append(f"The cache of the worker {worker.name} is not filled from this host: {error}.")
        lacking = answer["missing"].setdefault(worker.name, [])
        if not check_mode:
            lacking[:] = [tensor.name for tensor in cache_prefill.missing(worker, wanted)]
    return answer


def step(answer, worker, wanted, beside, params, check_mode, until):
    """One worker's part of it."""
    lacking = cache_prefill.missing(worker, wanted)
    answer["missing"][worker.name] = [tensor.name for tensor in lacking]
    if check_mode or not params["local"] or not lacking:
        return
    linked = cache_prefill.link(worker, lacking, beside)
    answer["linked_mib"] += sum(tensor.bytes for tensor in linked) // MIB
    lacking = [tensor for tensor in lacking if tensor not in linked]
    present = cache_prefill.copies(params["path"], lacking)
    if present and time.monotonic() < until:
        cache_prefill.check_room(worker.folder, present)
        given = cache_prefill.give_here(worker, params["path"], present, until)
        answer["copied_mib"] += sum(tensor.bytes for tensor in given) // MIB
        present = [tensor for tensor in present if tensor not in given]
    answer["left_mib"] += -(-sum(tensor.bytes for tensor in present) // MIB)


def main():
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict"},
            "path": {"type": "str"},
            "account": {"type": "str"},
            "tensors": {"type": "list", "elements": "dict", "default": []},
            "workers": {"type": "list", "elements": "dict", "default": []},
            "local": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    answer = cache_prefill.run(module, lambda: filled(module.params, module.check_mode))
    module.exit_json(changed=bool(answer["linked_mib"] or answer["copied_mib"]), **answer)


if __name__ == "__main__":
    main()

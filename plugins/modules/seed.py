#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: seed
short_description: Fills the caches of workers with their tensors before the head asks for them
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Reads which tensors the planned model has, puts them into the caches of workers, and sends what their hosts do not have.
  - A worker of the same release is given the tensors over its protocol, and writes its cache itself. It uses the processor and listens on loopback.
    What serves goes on serving.
  - It does not fail where a cache cannot be filled, but says why. The head then sends what is missing when it loads.
  - An action plugin of the same name takes O(plan), O(answers) and O(staging), runs the module on the host with what that needs of them, again and again
    until all is done, and shows the progress every 10 seconds.
attributes:
  check_mode:
    support: full
    description: Reports what would be put into the caches.
  diff_mode:
    support: none
    description: Tensors are not shown.
options:
  state:
    description:
      - V(described) reads the tensors from the model. It runs on the head.
      - V(filled) fills the caches of the host's workers from what the host has.
      - V(decided) returns whether the head sends what their hosts do not have. The action plugin does that on the controller.
      - V(sent) sends what is still missing from the head to workers on their staging ports.
    type: str
    choices: [described, filled, decided, sent]
    required: true
  plan:
    description: The plan.
    type: dict
    default: {}
  tensors:
    description: What V(described) returned.
    type: list
    elements: dict
    default: []
  local:
    description: Whether V(filled) takes tensors from a copy of the model on the host, and from caches of other workers there. Otherwise it only looks.
    type: bool
    default: true
  answers:
    description: Host → what V(filled) returned there, for V(decided) and V(sent).
    type: dict
    default: {}
  defined:
    description: Names of the services that the head's host has, for V(decided).
    type: list
    elements: str
    default: []
  staging:
    description: Plan of the instances that run on the staging ports, for V(sent).
    type: dict
    default: {}
  path:
    description: Path of the model on the host.
    type: str
  account:
    description: Account that reads the model and runs workers. Left out, the one that runs the module.
    type: str
  names:
    description: Names of the tensors that V(described) reads, and their bytes.
    type: dict
    default: {}
  workers:
    description: Workers of this host with C(name), C(environment), C(seed) as in the plan, and C(names) of their tensors, for V(filled).
    type: list
    elements: dict
    default: []
  targets:
    description: Workers on their staging ports with C(endpoint), C(fork), and C(names) of the tensors that they lack, for V(sent).
    type: list
    elements: dict
    default: []
  seconds:
    description: Time after which the module returns with what is done so far.
    type: float
    default: 10.0
"""

EXAMPLES = r"""
- name: Read which tensors workers keep
  llamacpp.cluster.seed:
    state: described
    plan: "{{ __llama_planned.plan }}"
  register: __llama_tensors

- name: Fill the caches from what the host has
  llamacpp.cluster.seed:
    state: filled
    plan: "{{ __llama_planned.plan }}"
    tensors: "{{ __llama_tensors.tensors }}"
"""

RETURN = r"""
tensors:
  description: The tensors that workers keep.
  returned: state is described
  type: list
  elements: dict
  sample: [{"name": "blk.0.ffn_up.weight", "bytes": 58720256, "fingerprint": "3b0a7c2c2f1f4f6a8f1a5d2b7e9c0d1e"}]
missing:
  description: Worker → names of the tensors that are not in its cache.
  returned: state is filled
  type: dict
  sample: {"cuda0": ["blk.0.ffn_up.weight"]}
sends:
  description: Whether the head sends before it loads, since something serves meanwhile, or several workers lack tensors.
  returned: state is decided
  type: bool
  sample: true
why:
  description: Why caches could not be filled, a sentence each.
  returned: always
  type: list
  elements: str
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, errors, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cache_prefill
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import worker as launcher

MOST_SECONDS = 3600.0
"""For one call: a large tensor may take half an hour."""


def tensors_of(values):
    return [cache_prefill.Tensor(value["name"], value["bytes"], value["fingerprint"]) for value in values]


def described(params):
    try:
        return {
            "tensors": [tensor._asdict() for tensor in cache_prefill.describe(params["path"], params["names"])],
            "why": [],
        }
    except cache_prefill.SeedError as error:
        return {"tensors": [], "why": [f"No cache is filled before the head loads: {error}."]}


def filled(params, check_mode):
    """Looks at the caches, and fills them until the time is over."""
    until = time.monotonic() + params["seconds"]
    known = {tensor.name: tensor for tensor in tensors_of(params["tensors"])}
    workers = [cache_prefill.worker_of(given) for given in params["workers"]]
    answer = {"missing": {}, "linked_mib": 0, "copied_mib": 0, "left_mib": 0, "why": []}
    for worker, given in zip(workers, params["workers"]):
        wanted = [known[name] for name in given["names"] if name in known]
        beside = [other.folder for other in workers if other.folder != worker.folder]
        try:
            if not check_mode:
                # The launcher that watches the cache may serve another model, and removes files of sizes that it does not know.
                launcher.known_sizes(worker.folder, {tensor.bytes for tensor in wanted})
            step(answer, worker, wanted, beside, params, check_mode, until)
        except (cache_prefill.SeedError, OSError) as error:
            answer["why"].append(f"The cache of the worker {worker.name} is not filled from this host: {error}.")
        lacking = answer["missing"].setdefault(worker.name, [])
        if not check_mode:
            lacking[:] = [tensor.name for tensor in cache_prefill.missing(worker, wanted)]
    return answer


def step(answer, worker, wanted, beside, params, check_mode, until):
    """One worker's part of ``filled``."""
    lacking = cache_prefill.missing(worker, wanted)
    answer["missing"][worker.name] = [tensor.name for tensor in lacking]
    if check_mode or not params["local"] or not lacking:
        return
    linked = cache_prefill.link(worker, lacking, beside)
    answer["linked_mib"] += sum(tensor.bytes for tensor in linked) // MIB
    lacking = [tensor for tensor in lacking if tensor not in linked]
    own = cache_prefill.copies(params["path"], lacking)
    if own and time.monotonic() < until:
        cache_prefill.check_room(worker.folder, own)
        given = cache_prefill.give_here(worker, params["path"], own, until)
        answer["copied_mib"] += sum(tensor.bytes for tensor in given) // MIB
        own = [tensor for tensor in own if tensor not in given]
    answer["left_mib"] += -(-sum(tensor.bytes for tensor in own) // MIB)


def sent(params):
    """Sends until the time is over."""
    known = {tensor.name: tensor for tensor in tensors_of(params["tensors"])}
    targets = [
        (
            target["endpoint"],
            target["fork"],
            [known[name] for name in target["names"] if name in known],
        )
        for target in params["targets"]
    ]
    done = cache_prefill.send(params["path"], targets, time.monotonic() + params["seconds"])
    answer = {"given": {}, "why": []}
    for endpoint, given in done.items():
        failed = isinstance(given, cache_prefill.SeedError)
        answer["given"][endpoint] = [] if failed else [tensor.name for tensor in given]
        if failed:
            answer["why"].append(f"The head does not fill a cache: {given}.")
    return answer


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["described", "filled", "decided", "sent"], "required": True},
            "defined": {"type": "list", "elements": "str", "default": []},
            **{key: {"type": "dict", "default": {}} for key in ("plan", "answers", "staging")},
            "path": {"type": "str"},
            "account": {"type": "str"},
            "names": {"type": "dict", "default": {}},
            "tensors": {"type": "list", "elements": "dict", "default": []},
            "workers": {"type": "list", "elements": "dict", "default": []},
            "targets": {"type": "list", "elements": "dict", "default": []},
            "local": {"type": "bool", "default": True},
            "seconds": {"type": "float", "default": 10.0},
        },
        required_if=[("state", state, ["path"]) for state in ("described", "filled", "sent")],
        supports_check_mode=True,
    )
    params = module.params
    if params["state"] == "decided":
        module.fail_json(msg="state: decided runs on the controller, in the action plugin llamacpp.cluster.seed.")
    work = {
        "described": lambda: described(params),
        "filled": lambda: filled(params, module.check_mode),
        "sent": lambda: sent(params),
    }[params["state"]]
    try:
        with errors.reported(module):
            answer = commands.work_as(params["account"], lambda: reading.from_disk(params["path"], work, MOST_SECONDS))
    except (RuntimeError, KeyError) as error:
        module.fail_json(msg=f"the caches of workers are not filled: {error}")
    changed = any(answer.get(key) for key in ("linked_mib", "copied_mib", "given"))
    module.exit_json(changed=changed, **answer)


if __name__ == "__main__":
    main()

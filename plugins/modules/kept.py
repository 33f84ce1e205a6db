#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kept
short_description: Keeps the host's part of the last plans, and goes back to one of them
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Writes the host's own part of a plan below the installation before services change, and notes afterwards that it served.
  - At most five are kept. The newest two that served are never removed, and neither are their builds.
  - With V(chosen), V(accepted), V(returned) and V(failed) it runs on the controller alone, and decides from what the hosts report how the cluster goes back.
attributes:
  check_mode:
    support: full
    description: Changes nothing and reports whether it would.
options:
  state:
    description:
      - V(applying) notes the host's part of O(plan), unless it is the one that served last.
      - V(served) notes that the plan O(id) serves.
      - V(listed) reports which plans the host keeps.
      - V(read) reports the part with O(id), and how the host differs from it.
      - V(chosen) chooses from O(answers) the plan to go back to. V(accepted) judges the hosts' parts of it, and decides what is done.
      - V(returned) warns that the inventory may name another release. V(failed) fails with a sentence on a change that did not serve, or without O(id)
        on a rollback that did not end.
    type: str
    choices: [applying, served, listed, read, chosen, accepted, returned, failed]
    required: true
  prefix:
    description: Folder of the installation.
    type: path
  plan:
    description: The whole plan. On each host its own part is kept.
    type: dict
  record:
    description: What is kept. The action plugin makes it from O(plan).
    type: dict
  id:
    description: Of a plan.
    type: str
  cluster:
    description: Name of the cluster's group.
    type: str
  heads:
    description: Hosts that the inventory has as heads.
    type: list
    elements: str
    default: []
  answers:
    description: Host, and what this module returned there for V(listed) or V(read).
    type: dict
    default: {}
  target:
    description: What V(chosen) returned.
    type: dict
  places:
    description: Host, and its facts, of which C(prefix) and C(units) are compared with its part.
    type: dict
    default: {}
  wanted:
    description: Id of a plan, or id, ref or build of a release, to go back to. With V(failed) and V(returned), the release that the inventory names.
    type: str
    default: ""
  failed:
    description: Id of the plan that was just applied and does not serve.
    type: str
    default: ""
  reasons:
    description: Host, and what failed there.
    type: dict
    default: {}
  lost:
    description: Hosts that were lost meanwhile.
    type: list
    elements: str
    default: []
  away:
    description: Hosts that did not answer at all. V(chosen) goes back without them where the head of that plan serves without them.
    type: list
    elements: str
    default: []
  why_not:
    description: Why the cluster did not go back.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Note what is applied
  llamacpp.cluster.kept:
    state: applying
    prefix: "{{ __llama_planned.plan.hosts[inventory_hostname].prefix }}"
    plan: "{{ __llama_planned.plan }}"
"""

RETURN = r"""
plans:
  description: Plans that the host keeps, the newest first.
  returned: for V(listed)
  type: list
  elements: dict
  sample: [{"id": "0123456789abcdef", "time": 1700000000, "state": "served", "release": "b8600"}]
unreadable:
  description: A sentence for each file among them that cannot be used.
  returned: for V(listed)
  type: list
  elements: str
record:
  description: What the host keeps of the plan.
  returned: for V(read)
  type: dict
drift:
  description: As P(llamacpp.cluster.host_info#module) reports it for that part.
  returned: for V(read)
  type: dict
missing:
  description: Files that the services read and that are not there.
  returned: for V(read)
  type: list
  elements: str
target:
  description: The plan to go back to. C(id), C(release), C(head), C(hosts), C(left), hosts that have no part in it, C(away), hosts of it that do not answer,
    and C(declared), what llama_release has to be for it.
  returned: for V(chosen)
  type: dict
plan:
  description: What M(llamacpp.cluster.verify) needs to prove that the head serves.
  returned: for V(accepted)
  type: dict
hosts:
  description: Host, and C(part), C(stop), C(restart) and C(remove).
  returned: for V(accepted)
  type: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import plan_history
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.history import ON_THE_CONTROLLER

ON_THE_HOST = {"applying": ("record",), "served": ("id",), "listed": (), "read": ("id",)}
"""State → what it needs beside the prefix."""


def read(prefix, identity):
    """The host's part of a plan, how the host differs from it, and files that its services read and that are missing."""
    record = plan_history.read(prefix, identity)
    wanted = {path for service in record["host"]["services"] for path in service["reads"]}
    made = {file["path"] for file in record["host"]["files"] if "content" not in file}
    drift = state.drift(record["host"])
    missing = {path for path in wanted if not os.path.isfile(path)} | made.intersection(drift["changed_files"])
    missing.update(drift.get("changed_models", ()))
    return {"record": record, "drift": drift, "missing": sorted(missing)}


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": [*ON_THE_HOST, *ON_THE_CONTROLLER], "required": True},
            "prefix": {"type": "path"},
            **{key: {"type": "dict"} for key in ("plan", "record", "target")},
            **{key: {"type": "str"} for key in ("id", "cluster")},
            **{key: {"type": "dict", "default": {}} for key in ("answers", "places", "reasons")},
            **{key: {"type": "list", "elements": "str", "default": []} for key in ("heads", "lost", "away")},
            **{key: {"type": "str", "default": ""} for key in ("wanted", "failed", "why_not")},
        },
        required_if=[("state", kind, ("prefix", *needed)) for kind, needed in ON_THE_HOST.items()],
        supports_check_mode=True,
        no_log=True,
    )
    params, wanted = module.params, module.params["state"]
    if wanted in ON_THE_CONTROLLER:
        module.fail_json(msg=f"state: {wanted} runs on the controller, in the action plugin llamacpp.cluster.kept.")
    with errors.reported(module, *state.ERRORS):
        if wanted == "listed":
            found = plan_history.read_all(params["prefix"])
            listed = [plan_history.summary(record) for record in found.records]
            module.exit_json(changed=False, plans=listed, unreadable=found.unreadable)
        if wanted == "read":
            module.exit_json(changed=False, **read(params["prefix"], params["id"]))
        if wanted == "applying":
            changed = plan_history.begin(params["prefix"], params["record"], module.check_mode)
        else:
            changed = plan_history.confirm(params["prefix"], params["id"], module.check_mode)
    module.exit_json(changed=changed)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: prune
short_description: Removes models, parts, caches and releases that nothing uses
description:
  - Looks into the folders of an installation alone, and follows no symbolic link but that of C(models). A folder without C(.llamacpp.cluster) is refused.
  - What an operator put there, or has elsewhere, is left alone.
  - Used is what the plan names, a plan that any cluster keeps on the host, the definition of a service or a process, and what a process has open.
  - M(llamacpp.cluster.host_status) lists the same.
extends_documentation_fragment: [llamacpp.cluster.attributes.changes, llamacpp.cluster.attributes.installation]
options:
  plan:
    description: The host's part of the plan. One that has the installation somewhere else than this host is refused.
    type: dict
    required: true
  model:
    description: Of the plan, what it says of the model.
    type: dict
    required: true
  kinds:
    description:
      - What is removed.
      - V(models) are whole models that were fetched or generated, V(parts) what downloads left that did not end, V(caches) tensors that workers keep,
        V(releases) installed releases of llama.cpp.
    type: list
    elements: str
    choices: [models, parts, caches, releases]
    required: true
seealso:
  - module: llamacpp.cluster.host_status
  - module: llamacpp.cluster.release
"""

EXAMPLES = r"""
- name: Remove what downloads left
  llamacpp.cluster.prune:
    plan: "{{ __llama_host_plan }}"
    model: "{{ __llama_plan.model }}"
    kinds: [parts]
    cluster: "{{ llama_cluster_group | default('llama_cluster') }}"
"""

RETURN = r"""
removed:
  description: What was removed, with C(kind), C(path), C(bytes), C(age_s) (seconds since it was last written or read) and C(why), the largest first.
  returned: success
  type: list
  elements: dict
lines:
  description: The same for people.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    errors,
    names,
    typed_json,
    units,
    validation,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock, prune
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ModelPlan


def main():
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "model": {"type": "dict", "required": True},
            "kinds": {"type": "list", "elements": "str", "choices": list(prune.KINDS), "required": True},
            "cluster": {"type": "str", "default": names.DEFAULT_CLUSTER},
            "scope": {"type": "str", "choices": ["auto", "system", "user"], "default": "auto"},
        },
        supports_check_mode=True,
        no_log=True,
    )
    kinds = module.params["kinds"]
    planned = typed_json.parse(HostPlan, module.params["plan"])
    model = typed_json.parse(ModelPlan, module.params["model"])
    if not kinds:
        module.fail_json(
            msg=f"llama_clean names nothing: use {', '.join(prune.KINDS)}, one or several. playbooks/status.yml lists what nothing uses."
        )
    with errors.reported(module):
        here = host.place_of(module.params["scope"], module.params["cluster"])
        host.check_place(host.place_in(planned), here)
        with host_lock.hold(planned.prefix, exclusive=not module.check_mode):
            removed = prune.remove(planned, model, kinds, module.check_mode)
    shown = removed[: prune.MOST]
    lines = [f"{each.kind} {validation.printable(each.path)}, {units.amount(each.bytes)}: {each.why}" for each in shown]
    diff = {"before": "".join(f"{line}\n" for line in lines), "after": ""}
    module.exit_json(changed=bool(removed), removed=typed_json.dump(shown), lines=lines, diff=diff)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: proof
short_description: Proves with the model's own first layers that the planned devices compute it right
description:
  - Runs on the head while its server is stopped. Makes a file of the model's first layers, has llama-server compute with it on the planned devices and on
    the head's processor alone, and compares the likeliest tokens of both. Where they differ, each device is asked alone.
  - The head keeps the result. An action plugin of the same name shows it, and returns what is wrong.
extends_documentation_fragment: llamacpp.cluster.attributes.info
attributes:
  check_mode:
    details: Proves nothing in check mode.
options:
  plan:
    description: The plan. The action plugin makes O(work) of it, for each model.
    type: dict
  prove:
    description:
      - V(once) leaves out what the head has a record of, for the same release, model, devices and command line. V(never) proves nothing.
      - V(search) is like V(once), and tries other settings on devices that compute wrong.
    type: str
    choices: [once, always, never, search]
    default: once
  prefix:
    description: Folder of the installation, where the record is.
    type: path
  work:
    description: What is to be run.
    type: dict
"""

EXAMPLES = r"""
- name: Prove that each device computes the model right
  llamacpp.cluster.proof:
    plan: "{{ __llama_plan }}"
    prove: always
"""

RETURN = r"""
proofs:
  description: Of each model what was compared, C(together) and C(devices), or C(untested), which says why nothing was.
  returned: success
  type: list
  elements: dict
wrong:
  description: Which devices compute wrong or end. Empty where none.
  returned: success
  type: str
fix:
  description: What to do where some do.
  returned: success
  type: str
ended:
  description: Of each worker that ended its C(host), and the C(command) that shows its log there.
  returned: success
  type: list
  elements: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import accounts
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, Work


def main():
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict"},
            "prove": {"type": "str", "choices": ["once", "always", "never", "search"], "default": "once"},
            "prefix": {"type": "path"},
            "work": {"type": "dict"},
        },
        supports_check_mode=True,
        no_log=True,
    )
    with errors.reported(module):
        work = typed_json.parse(Work, module.params["work"])
        path = Path(module.params["prefix"], names.PROOF)
        known = run.known(path).get(work.id)
        if known and known.right and module.params["prove"] != "always":
            module.exit_json(changed=False, known=True, proof=typed_json.dump(known))
        proof = typed_json.reported("this host", "the proof", Proof, accounts.work_as(work.account, run.prove, work))
        run.keep(path, proof)
    module.exit_json(changed=False, known=False, proof=typed_json.dump(proof))


if __name__ == "__main__":
    main()

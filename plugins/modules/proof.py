#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: proof
short_description: Proves that the planned devices compute layers of the model correctly
description:
  - Runs on the head. Writes a small model of the planned layers, lets llama-server compute it on each planned device and on the head's processor alone, and
    compares the likeliest tokens. The bound follows from correct variants of the processor.
  - The head keeps the verdicts. An action plugin of the same name shows them and returns what is wrong.
extends_documentation_fragment: llamacpp.cluster.attributes.info
attributes:
  check_mode:
    details: Proves nothing in check mode.
options:
  plan:
    description: The plan. The action plugin derives O(work) from it, for each model.
    type: dict
  prove:
    description:
      - V(once) skips devices for which the head has a verdict with the same release, model, device and command line. V(never) proves nothing.
      - V(search) is like V(once), and tries other settings on devices that compute incorrectly.
    type: str
    choices: [once, always, never, search]
    default: once
  stage:
    description:
      - V(reference) lets the head's processor compute, which needs no device, so that the server can run meanwhile. It does nothing if memory is short.
      - V(devices) lets the devices compute, and first the processor if it has not done so. The server must be stopped.
    type: str
    choices: [reference, devices]
    default: devices
  prefix:
    description: Installation folder, which has the record.
    type: path
  work:
    description: What to run.
    type: dict
"""

EXAMPLES = r"""
- name: Prove that each device computes the model correctly
  llamacpp.cluster.proof:
    plan: "{{ __llama_plan }}"
    prove: always
"""

RETURN = r"""
proofs:
  description: For each model, C(devices) with a verdict on each device, or C(untested), which says why nothing was compared.
  returned: success
  type: list
  elements: dict
wrong:
  description: Which devices compute incorrectly or crash. Empty if none does.
  returned: success
  type: str
fix:
  description: Remedy for these devices.
  returned: success
  type: str
crashed:
  description: For each worker that crashed, its C(host) and the C(command) that shows its log there.
  returned: success
  type: list
  elements: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import accounts
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, ProofWork


def main():
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict"},
            "prove": {"type": "str", "choices": ["once", "always", "never", "search"], "default": "once"},
            "stage": {"type": "str", "choices": ["reference", "devices"], "default": "devices"},
            "prefix": {"type": "path"},
            "work": {"type": "dict"},
        },
        supports_check_mode=True,
        no_log=True,
    )
    with errors.reported(module):
        work = typed_json.parse(ProofWork, module.params["work"])
        path = Path(module.params["prefix"], names.PROOF)
        valid = run.read_record(path).valid_verdicts(work) if module.params["prove"] != "always" else {}
        remaining = work._replace(devices=tuple(side for side in work.devices if side.id not in valid))
        proof, unrecorded = Proof(0), ""
        if remaining.devices and module.params["stage"] == "reference":
            accounts.run_as(work.account, run.prepare, remaining, processes.is_served)
        elif remaining.devices:
            result = accounts.run_as(work.account, run.prove, remaining, processes.is_served)
            proof = typed_json.parse_report("this host", "the proof", Proof, result)
            try:
                run.keep(path, proof)
            except OSError as error:
                unrecorded = errors.sentence(error)
        devices = {**valid, **{verdict.id: verdict for verdict in proof.devices}}
        verdicts = tuple(devices[side.id] for side in work.devices if side.id in devices)
    module.exit_json(
        changed=False,
        unrecorded=unrecorded,
        remaining=len(remaining.devices),
        proof=typed_json.dump(proof._replace(devices=verdicts)),
    )


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: proof
short_description: Tests whether the planned devices compute layers of the model correctly
description:
  - Runs on the head. Writes a small model with the planned layers. Runs llama-server with this model on each planned device, and on the head's
    processor alone. Compares the probabilities of the most likely tokens. Variants of the computation on the processor determine the tolerance.
  - The head keeps the verdicts. The action plugin shows the verdicts, and returns the failures.
extends_documentation_fragment: llamacpp.cluster.attributes.info
attributes:
  check_mode:
    details: Tests no device in check mode.
options:
  plan:
    description: The plan, from which the action plugin derives O(work) for each model.
    type: dict
  prove:
    description:
      - V(once) skips devices for which the head has a verdict with the same release, model, device and command line. V(never) tests no device.
      - V(search) is like V(once), and tries other settings on devices that compute incorrectly.
    type: str
    choices: [once, always, never, search]
    default: once
  stage:
    description:
      - V(reference) computes on the head's processor while the server keeps running. If too little memory is available, it computes nothing.
      - V(devices) computes on the devices, and first on the processor if there is no reference yet. The server must be stopped.
    type: str
    choices: [reference, devices]
    default: devices
  host:
    description: Paths of the installation, and the service manager. The action plugin sets O(host), O(definition) and O(work).
    type: dict
  definition:
    description: Definition of the service in whose sandbox llama-server runs. Used with systemd only.
    type: str
  work:
    description: The proof to run, with its model and command lines.
    type: dict
"""

EXAMPLES = r"""
- name: Test each device, even if the head already has a verdict on it
  llamacpp.cluster.proof:
    plan: "{{ __llama_plan }}"
    prove: always
"""

RETURN = r"""
proofs:
  description: For each model, C(devices) with a verdict on each device, or C(untested), the reason why no device was tested.
  returned: success
  type: list
  elements: dict
failure_text:
  description: The devices that compute incorrectly or crash. Empty if there are none.
  returned: success
  type: str
remedy:
  description: Remedy for the devices in RV(failure_text).
  returned: success
  type: str
crashed_workers:
  description: For each crashed worker, its C(host) and the C(command) that shows its log on that host.
  returned: success
  type: list
  elements: dict
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, locks, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import accounts, services
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import listeners
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import run
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Proof, ProofWork

SERVICE_NAME = names.service_name("proof")
LOCK_WAIT_SECONDS = 600
"""Seconds to wait until the proof of a killed run has exited."""
UNIT_SETTINGS = "\n[Service]\nNice=10\nOOMPolicy=continue\n"
"""Additions for systemd: a low priority, and a unit that survives if one llama-server runs out of memory."""


@contextmanager
def run_launcher(paths: InstallationPaths, work: ProofWork, definition: str) -> Iterator[ProofWork]:
    """Run the launcher of the proof in a sandbox under systemd; under other managers the proof starts its launcher."""
    if paths.service_manager not in services.SYSTEMD_MANAGERS:
        yield work
        return
    manager = services.job_manager(paths)
    service = services.Service(SERVICE_NAME, definition + UNIT_SETTINGS, temporary=True)
    services.apply_request(manager, services.ServiceRequest(run=[service], restart=[SERVICE_NAME]), check_mode=False)
    try:
        yield work._replace(launcher=())
    finally:
        services.apply_request(manager, services.ServiceRequest(remove=[SERVICE_NAME]), check_mode=False)


def main():
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict"},
            "prove": {"type": "str", "choices": ["once", "always", "never", "search"], "default": "once"},
            "stage": {"type": "str", "choices": ["reference", "devices"], "default": "devices"},
            "host": {"type": "dict"},
            "definition": {"type": "str"},
            "work": {"type": "dict"},
        },
        supports_check_mode=True,
        no_log=True,
    )
    with errors.report_errors(module):
        work = typed_json.parse(ProofWork, module.params["work"])
        paths = typed_json.parse(InstallationPaths, module.params["host"])
        record_path = Path(paths.prefix, names.PROOFS_FILE)
        valid_verdicts = run.read_record(record_path).valid_verdicts(work) if module.params["prove"] != "always" else {}
        remaining_work = work._replace(devices=tuple(side for side in work.devices if side.id not in valid_verdicts))
        proof, record_error = Proof(0), ""
        if remaining_work.devices:
            stage_function = run.prepare_reference if module.params["stage"] == "reference" else run.prove
            lock = locks.hold(Path(paths.prefix, names.PROOF_LOCK_FILE), LOCK_WAIT_SECONDS)
            with lock, run_launcher(paths, remaining_work, module.params["definition"]) as prepared_work:
                result = accounts.run_as(work.account, stage_function, prepared_work, listeners.is_listening_alone)
            if stage_function is run.prove:
                proof = typed_json.parse_report("this host", "the proof", Proof, result)
                try:
                    run.record_verdicts(record_path, proof)
                except OSError as error:
                    record_error = errors.message_of(error)
        verdicts_by_id = {**valid_verdicts, **{verdict.id: verdict for verdict in proof.devices}}
        verdicts = tuple(verdicts_by_id[side.id] for side in work.devices if side.id in verdicts_by_id)
    module.exit_json(
        changed=False,
        record_error=record_error,
        remaining=len(remaining_work.devices),
        proof=typed_json.dump(proof._replace(devices=verdicts)),
    )


if __name__ == "__main__":
    main()

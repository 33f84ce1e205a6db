#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: calibration
short_description: Writes the models of a calibration on the head, and what it measured
description:
  - Writes models of random weights beside the benchmarks of the head, and removes others that it wrote.
extends_documentation_fragment: [llamacpp.cluster.attributes, llamacpp.cluster.attributes.host]
options:
  models:
    description: Kind, type and layers of each model that is to be there.
    type: list
    elements: list
    default: []
  rates:
    description: Host, device and what was measured of it. Left out, the file stays as it is.
    type: dict
seealso:
  - module: llamacpp.cluster.calibrate
"""

EXAMPLES = r"""
- name: Remove the models of a calibration
  llamacpp.cluster.calibration:
    host: "{{ __llama_plan.hosts[inventory_hostname] }}"
"""

RETURN = r"""
"""

import json
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, files, names, units
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock, removal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import calibration, random_file


def apply(prefix, models, rates, check):
    """Writes and removes; whether that changes something."""
    folder = Path(prefix, names.BENCHMARKS)
    wanted = {f"{trial.name}.gguf": trial for trial in (calibration.Trial(*model) for model in models)}
    there = {path.name for path in folder.glob(f"{calibration.NAME}*")}
    record = Path(prefix, names.CALIBRATION)
    text = "" if rates is None else json.dumps(rates, indent=1, sort_keys=True) + "\n"
    new = bool(text) and not (record.exists() and record.read_text() == text)
    if not check:
        for name in there - set(wanted):
            removal.remove_below(prefix, names.BENCHMARKS, name)
        folder.mkdir(mode=0o755, exist_ok=True)
        sizes = [row.number * row.bytes for name in set(wanted) - there for row in wanted[name].tensors()]
        free = shutil.disk_usage(folder).free
        if sum(sizes) > free:
            raise errors.Refusal(
                f"the models of the calibration need {units.amount(sum(sizes))} on {errors.file_system(str(folder))}, which has {units.amount(free)} "
                "left: free some space there and run the playbook again. None was written"
            )
        for name in set(wanted) - there:
            part = folder / f"{name}.part"
            random_file.write(part, wanted[name])
            part.chmod(0o644)
            part.replace(folder / name)
        if new:
            files.replace_file(record, text, 0o644)
    return new or there != set(wanted)


def main():
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "dict", "required": True},
            "models": {"type": "list", "elements": "list", "default": []},
            "rates": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    prefix, models, rates = module.params["host"]["prefix"], module.params["models"], module.params["rates"]
    with errors.reported(module), host_lock.hold(prefix, exclusive=not module.check_mode):
        changed = apply(prefix, models, rates, module.check_mode)
    module.exit_json(changed=changed)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_parameters
short_description: Sets options of kernel modules, and the profile of tuned
description:
  - Writes options of kernel modules to C(/etc/modprobe.d/llamacpp.conf), or C(/etc/modprobe.d/llamacpp-CLUSTER.conf), and makes the initramfs again
    with C(update-initramfs), C(dracut) or C(mkinitcpio), whichever is installed.
  - The file holds the given options and no others, and is removed where none is given. What others have set stays as it is.
  - Never restarts the host.
  - Changes nothing and fails if another file for modprobe or the kernel's command line gives a parameter another value, or if the initramfs comes
    with the image of the host (ostree).
notes:
  - Needs root on the host.
  - A module that is built into the kernel does not read files for modprobe. RV(reboot_needed) stays true then.
extends_documentation_fragment: [llamacpp.cluster.attributes.changes, llamacpp.cluster.attributes.settings]
options:
  parameters:
    description: Name (C(module.option)) and value of each parameter.
    type: dict
    required: true
  profile:
    description: Profile that C(tuned) is to have, where it runs. Without it, C(tuned) stays as it is.
    type: str
    default: ''
seealso:
  - module: llamacpp.cluster.host_info
"""

EXAMPLES = r"""
- name: Lend 124 GiB to the graphics
  llamacpp.cluster.kernel_parameters:
    parameters:
      amdgpu.gttsize: "126976"
      ttm.pages_limit: "32505856"
    profile: accelerator-performance

- name: Remove what was set
  llamacpp.cluster.kernel_parameters:
    parameters: {}
"""

RETURN = r"""
reboot_needed:
  description: Whether a running module lacks a parameter, or still has one that was removed.
  returned: success
  type: bool
msg:
  description: Whether a reboot is needed, and for what.
  returned: always
  type: str
  sample: reboot needed for amdgpu.gttsize=126976 ttm.pages_limit=32505856
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock, kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import KernelTuning


def main():
    module = AnsibleModule(
        argument_spec={
            "cluster": {"type": "str", "default": names.DEFAULT_CLUSTER},
            "prefix": {"type": "str"},
            "parameters": {"type": "dict", "required": True},
            "profile": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    parameters = {name: str(value) for name, value in module.params["parameters"].items()}
    tuning = KernelTuning(parameters, module.params["profile"], reboot=False)
    waiting = host_lock.hold(module.params["prefix"], exclusive=not module.check_mode)
    with errors.reported(module), waiting:
        change = kernel_parameters.apply(tuning, module.check_mode, System(names.of(module.params["cluster"])))
    causes = [f"for {' '.join(change.missing)}"] * bool(change.missing)
    causes += [f"to remove {' '.join(change.removed)}"] * bool(change.removed)
    module.exit_json(
        changed=change.before != change.after,
        diff={"before": change.before, "after": change.after},
        reboot_needed=bool(causes),
        msg=f"reboot needed {' and '.join(causes)}" if causes else "The kernel runs with what is set.",
    )


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: tuning
short_description: Sets parameters on the kernel's command line, and the profile of tuned
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Sets kernel parameters by the distribution's own mechanism. That is C(grubby) where it is installed, C(/etc/kernel/cmdline) with
    C(reinstall-kernels), C(mkinitcpio) or C(kernel-install), or a file in C(/etc/default/grub.d) with C(update-grub).
  - It removes parameters that it set before and that are no longer given, so an empty dict leaves nothing behind. What others have set stays as it is.
  - Never restarts the host.
  - Changes nothing and fails if the mechanism is not known, or if a file of the operator gives a parameter another value, for the command
    line or for modprobe.
notes:
  - Needs root on the host.
  - What is ours is recorded in C(/var/lib/llamacpp-kernel-parameters), or C(/var/lib/llamacpp-CLUSTER-kernel-parameters),
    or is the file in C(/etc/default/grub.d).
attributes:
  check_mode:
    support: full
    description: Reports what would be changed.
  diff_mode:
    support: full
    description: Shows the record, the command lines that are edited, and the profile if it changes.
options:
  cluster:
    description: The cluster, by the name of its group, whose parameters these are. What others have set is left alone.
    type: str
    default: llama_cluster
  prefix:
    description: The installation, as the plan names it. While a task of another run changes the same installation on this host, this one waits.
    type: str
  parameters:
    description: Name and value of each parameter.
    type: dict
    required: true
  profile:
    description: Profile that C(tuned) is to have, where it runs. Without it, C(tuned) stays as it is.
    type: str
    default: ''
"""

EXAMPLES = r"""
- name: Lend 124 GiB to the graphics
  llamacpp.cluster.tuning:
    parameters:
      amdgpu.gttsize: "126976"
      ttm.pages_limit: "32505856"
    profile: accelerator-performance

- name: Remove what was set
  llamacpp.cluster.tuning:
    parameters: {}
"""

RETURN = r"""
mechanism:
  description: What makes the command line, V(grubby), V(kernel-install) or V(grub); null where that was not needed.
  returned: success
  type: str
  sample: grub
reboot_needed:
  description: Whether the running kernel lacks a parameter, or still has one that was removed.
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock, kernel_parameters


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
    wanted = {name: str(value) for name, value in module.params["parameters"].items()}
    waiting = host_lock.hold(module.params["prefix"], exclusive=not module.check_mode)
    with errors.reported(module, kernel_parameters.TuningError, Refusal), waiting:
        done = kernel_parameters.apply(
            wanted,
            module.params["profile"],
            module.check_mode,
            kernel_parameters.System(own=names.of(module.params["cluster"])),
        )
    waiting = done["waiting"]
    new = [pair for pair in waiting if wanted.get(pair.split("=")[0]) == pair.split("=", 1)[1]]
    gone = [pair for pair in waiting if pair not in new]
    texts = [f"for {' '.join(new)}"] * bool(new) + [f"to remove {' '.join(gone)}"] * bool(gone)
    module.exit_json(
        changed=done["before"] != done["after"],
        diff={"before": done["before"], "after": done["after"]},
        mechanism=done["mechanism"],
        reboot_needed=bool(waiting),
        msg=f"reboot needed {' and '.join(texts)}" if texts else "The kernel runs with what is set.",
    )


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: cluster_lock
short_description: Locks a cluster for one run at a time
description:
  - The lock is the file C(cluster.lock) in the head's installation. It names the run that is changing hosts. A second run fails at once, and
    its error names the first run.
  - A run takes over the lock of an earlier run that died on the same controller. It takes over the lock of any other run only with O(take_over).
  - O(state=absent) releases the lock, and removes the files that a killed proof left.
  - If the head cannot be reached, the module warns and takes no lock.
extends_documentation_fragment: llamacpp.cluster.attributes
options:
  prefix:
    description: Installation folder of the head.
    type: path
    required: true
  create:
    description:
      - Whether to create a missing O(prefix), and to mark it as this collection's. If false, a folder without this mark is not locked.
    type: bool
    default: false
  state:
    description: Whether this run takes or releases the lock.
    type: str
    choices: [present, absent]
    default: present
  take_over:
    description: Whether to take the lock from any run that holds it.
    type: bool
    default: false
  run:
    description: Identity of this run. The action plugin sets it.
    type: dict
  ended:
    description: An earlier run of this controller that has ended. The action plugin sets it.
    type: dict
"""

EXAMPLES = r"""
- name: Lock the cluster
  llamacpp.cluster.cluster_lock:
    prefix: /opt/llamacpp
"""

RETURN = r"""
taken_from:
  description: The run from which the lock was taken over. Empty if the lock was free.
  returned: success
  type: str
holder:
  description: The run that holds the lock.
  returned: when another run holds it
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, files, locks, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cluster_lock
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.leftovers import remove_leftovers


def main():
    module = AnsibleModule(argument_spec=typed_json.specification(cluster_lock.LockArguments), supports_check_mode=True)
    params = module.params
    prefix, replaced_run = Path(params["prefix"]), None
    if module.check_mode:
        module.exit_json(changed=False, taken_from="")
    with errors.report_errors(module):
        if params["create"]:
            prefix.mkdir(mode=0o755, parents=True, exist_ok=True)
            (prefix / names.MARKER_FOLDER).mkdir(mode=0o755, exist_ok=True)
        if not files.is_marked(prefix):
            module.exit_json(changed=False, taken_from="")
        run = typed_json.parse(cluster_lock.Run, params["run"])
        ended_run = typed_json.parse(cluster_lock.Run, params["ended"]) if params["ended"] else None
        try:
            if params["state"] == "present":
                with locks.ignore_read_only():
                    replaced_run = cluster_lock.take_lock(prefix, run, params["take_over"], ended_run)
            else:
                holder = cluster_lock.release_lock(prefix, ended_run or run)
                remove_leftovers(prefix)
                if holder:
                    module.exit_json(changed=False, taken_from="", holder=typed_json.dump(holder))
        except cluster_lock.LockHeldError as error:
            module.fail_json(msg=str(error), holder=typed_json.dump(error.holder))
    module.exit_json(changed=False, taken_from=replaced_run.describe() if replaced_run else "")


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: plan_history_info
short_description: Reads the plans that a host has recorded
description:
  - Lists what M(llamacpp.cluster.plan_history) has recorded, or reads one plan of it and compares the host with that.
extends_documentation_fragment: llamacpp.cluster.attributes.info
options:
  prefix:
    description: Folder of the installation.
    type: path
    required: true
  id:
    description: Id of the plan to read. Without it, all are listed.
    type: str
seealso:
  - module: llamacpp.cluster.plan_history
  - module: llamacpp.cluster.rollback
"""

EXAMPLES = r"""
- name: List the plans of the host
  llamacpp.cluster.plan_history_info:
    prefix: /opt/llamacpp
"""

RETURN = r"""
plans:
  description: Recorded plans, the newest first.
  returned: without O(id)
  type: list
  elements: dict
  sample: [{"id": "0123456789abcdef", "time": 1700000000, "state": "served", "release": "b8600"}]
unreadable:
  description: A sentence for each record that cannot be used.
  returned: without O(id)
  type: list
  elements: str
record:
  description: The record of the plan.
  returned: with O(id)
  type: dict
drift:
  description: As P(llamacpp.cluster.host_info#module) reports it for that part.
  returned: with O(id)
  type: dict
missing:
  description: Files that the services read and that are not there.
  returned: with O(id)
  type: list
  elements: str
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import plan_history
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history


def compared(prefix, identity):
    """A record, how the host differs from it, and files that its services read and that are missing."""
    record = plan_history.read(prefix, identity)
    wanted = {path for service in record.host.services for path in service.reads}
    made = {file.path for file in record.host.files if file.content is None}
    drift = state.drift(record.host)
    missing = {path for path in wanted if not os.path.isfile(path)} | made.intersection(drift.changed_files)
    missing.update(drift.changed_models)
    return {"record": typed_json.dump(record), "drift": typed_json.dump(drift), "missing": sorted(missing)}


def main():
    module = AnsibleModule(
        argument_spec={"prefix": {"type": "path", "required": True}, "id": {"type": "str"}},
        supports_check_mode=True,
        no_log=True,
    )
    prefix, identity = module.params["prefix"], module.params["id"]
    with errors.reported(module):
        if identity is not None:
            module.exit_json(changed=False, **compared(prefix, identity))
        found = plan_history.read_all(prefix)
    plans = typed_json.dump([history.summary(record) for record in found.records])
    module.exit_json(changed=False, plans=plans, unreadable=found.unreadable)


if __name__ == "__main__":
    main()

#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: cache_prefill
short_description: Fills the caches of a host's workers from a copy of the model on the host
description:
  - If the workers' host has a copy of the model, puts the model's tensors into the workers' caches so that the head does not have to send them.
  - A temporary worker of the same release receives the tensors over RPC and writes them to the cache. It uses the processor and listens on loopback.
    Running services are not interrupted.
  - If a cache cannot be filled, the module warns and does not fail. The head then sends the missing tensors when it loads the model.
extends_documentation_fragment: llamacpp.cluster.attributes
attributes:
  check_mode:
    support: full
options:
  workers:
    description: Workers of this host, from the plan; C(name), C(environment) and C(prefill) are read.
    type: list
    elements: dict
    required: true
  account:
    description: Account that reads the model. Defaults to the account that runs the module.
    type: str
"""

EXAMPLES = r"""
- name: Fill the workers' caches from local copies of the model
  llamacpp.cluster.cache_prefill:
    workers: "{{ plan.hosts.worker1.workers | selectattr('prefill') }}"
    account: llamacpp
"""

RETURN = r"""
bytes:
  description: Number of bytes that were added to the caches; in check mode, that would be added.
  returned: success
  type: int
"""

import pwd

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import accounts, cache_prefill


def fill_caches(workers, check_mode):
    """Return the number of bytes added to the workers' caches, and a warning for each cache that was not filled."""
    added_bytes, warnings = 0, []
    for worker in workers:
        try:
            added_bytes += cache_prefill.fill_cache(worker, check_mode)
        except (Refusal, OSError) as error:
            warnings.append(f"The cache of worker {worker.name} was not filled from the local model: {error}.")
    return added_bytes, warnings


def main():
    module = AnsibleModule(
        argument_spec={"workers": {"type": "list", "elements": "dict", "required": True}, "account": {"type": "str"}},
        supports_check_mode=True,
    )
    fields = cache_prefill.WorkerCache._fields
    worker_fields = [{key: worker.get(key) for key in fields} for worker in module.params["workers"]]
    with errors.report_errors(module):
        workers = [typed_json.parse(cache_prefill.WorkerCache, worker) for worker in worker_fields]
        account = module.params["account"]
        if module.check_mode and account not in (user.pw_name for user in pwd.getpwall()):
            account = None  # the run would create this account
        added_bytes, warnings = accounts.run_as(account, fill_caches, workers, module.check_mode)
    for warning in warnings:
        module.warn(warning)
    module.exit_json(changed=added_bytes > 0, bytes=added_bytes)


if __name__ == "__main__":
    main()

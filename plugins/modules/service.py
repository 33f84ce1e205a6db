#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: service
short_description: Defines, starts, stops and removes the services of a host
version_added: 0.1.0
author: llamacpp.cluster contributors (@llamacpp-cluster)
description:
  - Uses the service manager of the host. That is systemd (of the system or of a user), launchd, or the installation's own supervisor.
  - Services are defined, started, stopped and removed in one call. The head stops before workers, and workers start before the head.
  - A service whose definition changes is restarted.
  - The error of a service that does not start shows the last lines of its log.
extends_documentation_fragment:
  - llamacpp.cluster.attributes
attributes:
  check_mode:
    support: full
    details: Changes nothing and shows definitions and states in the difference.
  diff_mode:
    support: full
    details: Shows each definition before and after, and which services run.
  idempotent:
    support: full
options:
  host:
    description: The host's part of the plan, or its facts, of which C(service_manager), C(scope), C(prefix) and C(units) are read.
    type: dict
    required: true
  services:
    description:
      - Services as the plan holds them, of which C(name), C(definition) and C(temporary) are read.
      - They are defined and run afterwards, and start at boot unless they are temporary.
    type: list
    elements: dict
    default: []
  restart:
    description: Names of those of O(services) that are restarted even if they run as defined. Others are ignored.
    type: list
    elements: str
    default: []
  start:
    description: Names of services that are defined, and run afterwards.
    type: list
    elements: str
    default: []
  stop:
    description: Names of services that are stopped and stay defined.
    type: list
    elements: str
    default: []
  remove:
    description: Names of services that are stopped, and whose definitions are removed.
    type: list
    elements: str
    default: []
  read_ahead:
    description:
      - Services as the plan holds them, of which C(process) and C(reads) are read.
      - Their programs and files are read into the page cache, as far as memory is free, so that they start faster. Nothing else happens to them.
    type: list
    elements: dict
    default: []
seealso:
  - module: llamacpp.cluster.host_info
  - module: llamacpp.cluster.firewall
"""

EXAMPLES = r"""
- name: Run the workers, and remove what is not planned any more
  llamacpp.cluster.service:
    host: "{{ __llama_host_plan }}"
    services: "{{ __llama_host_plan.services | selectattr('kind', 'eq', 'worker') }}"
    remove: [llamacpp-worker-old]

- name: Stop the head
  llamacpp.cluster.service:
    host: "{{ __llama_facts.facts }}"
    stop: [llamacpp-server]
"""

RETURN = r"""
changes:
  description: Services that were changed, or would be in check mode, and how each stands before and after.
  returned: success
  type: list
  elements: dict
  sample: [{"service": "llamacpp-server", "before": "running", "after": "running, restarted"}]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import job
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import host_lock, services


def differences(manager, changes):
    """Of definitions that change, and of states, as Ansible shows them."""
    texts = [
        {
            "before": change.text_before,
            "after": change.text_after,
            "before_header": str(manager.path(change.service)),
            "after_header": str(manager.path(change.service)),
        }
        for change in changes
        if change.text_before != change.text_after
    ]
    states = {
        side: "".join(f"{change.service}: {getattr(change, side)}\n" for change in changes)
        for side in ("before", "after")
    }
    return [*texts, {**states, "before_header": "services", "after_header": "services"}] if changes else []


def main():
    names = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "dict", "required": True},
            "services": {"type": "list", "elements": "dict", "default": []},
            "read_ahead": {"type": "list", "elements": "dict", "default": []},
            **dict.fromkeys(("restart", "start", "stop", "remove"), names),
        },
        supports_check_mode=True,
    )
    wanted = services.Wanted(
        run=[
            services.Service(service["name"], service["definition"], not service["temporary"])
            for service in module.params["services"]
        ],
        **{name: module.params[name] for name in ("restart", "start", "stop", "remove")},
    )
    with errors.reported(module, services.ServiceError):
        services.read_ahead([] if module.check_mode else module.params["read_ahead"])
        manager = services.manager_of(module.params["host"])
        touched = [*(service.name for service in wanted.run), *wanted.start, *wanted.stop, *wanted.remove]
        with host_lock.hold(module.params["host"]["prefix"], exclusive=not module.check_mode):
            read = {
                service["name"]: services.versions(service.get("reads", ())) for service in module.params["services"]
            }
            changes = job.cancel(module.params["host"], touched, module.check_mode)
            changes += services.apply(manager, wanted, module.check_mode)
            if not module.check_mode:
                services.record_reads(module.params["host"]["prefix"], read, changes)
    module.exit_json(
        changed=bool(changes),
        diff=differences(manager, changes),
        changes=[{key: getattr(change, key) for key in ("service", "before", "after")} for change in changes],
    )


if __name__ == "__main__":
    main()

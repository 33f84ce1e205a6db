#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: service
short_description: Defines, starts, stops and removes the services of a host
description:
  - Uses the host's service manager, which is systemd (for the system or for a user), launchd, or the installation's own supervisor.
  - Stops the head before workers, and starts workers before the head.
  - A service whose definition changes is restarted.
extends_documentation_fragment: llamacpp.cluster.attributes.changes
options:
  host:
    description: The host's part of the plan, or the host's facts. The module reads C(service_manager), C(scope), C(prefix) and C(units).
    type: dict
    required: true
  state:
    description:
      - V(started) defines and starts O(services), and starts O(names).
      - V(stopped) stops O(names) without removing their definitions.
      - V(absent) stops O(names) and removes their definitions.
    type: str
    choices: [started, stopped, absent]
    default: started
  names:
    description: Names of services that are already defined.
    type: list
    elements: str
    default: []
  services:
    description:
      - Services from the plan; C(name), C(definition), C(temporary) and C(reads) are used. Only with O(state=started).
      - Services start at boot unless they are temporary.
    type: list
    elements: dict
    default: []
  restart:
    description: Names of O(services) to restart even if they run as defined. Other names are ignored.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Run the workers
  llamacpp.cluster.service:
    host: "{{ __llama_host_plan }}"
    services: "{{ __llama_host_plan.services | selectattr('kind', 'eq', 'worker') }}"
"""

RETURN = r"""
changes:
  description: Changed services, with their states before and after. In check mode, the services that would change.
  returned: success
  type: list
  elements: dict
"""

from contextlib import nullcontext

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import job
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, locks, redaction, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import InstallationPaths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services, start_records


def diff_of(changes):
    """Return states and definitions before and after the changes for Ansible's diff mode, without secrets."""
    return {
        side: "".join(
            f"{change.service}: {getattr(change, side)}\n{redaction.redact(getattr(change, f'text_{side}'))}"
            for change in changes
        )
        for side in ("before", "after")
    }


def main():
    name_list_option = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "dict", "required": True},
            "state": {"type": "str", "choices": ["started", "stopped", "absent"], "default": "started"},
            "names": name_list_option,
            "services": {"type": "list", "elements": "dict", "default": []},
            "restart": name_list_option,
        },
        supports_check_mode=True,
    )
    host, state = module.params["host"], module.params["state"]
    planned_services = [typed_json.parse(services.Service, service) for service in module.params["services"]]
    verb = {"started": "start", "stopped": "stop", "absent": "remove"}[state]
    services_to_run = planned_services if state == "started" else []
    request = services.ServiceRequest(services_to_run, module.params["restart"], **{verb: module.params["names"]})
    with errors.report_errors(module):
        paths = typed_json.parse(InstallationPaths, host)
        manager = services.manager_of(paths)
        service_names = [*(service.name for service in services_to_run), *module.params["names"]]
        with nullcontext() if module.check_mode else locks.hold_host_lock(paths.prefix):
            digests = {entry.name: start_records.digest_of(entry.definition, entry.reads) for entry in planned_services}
            changes = job.cancel_benchmark(paths, service_names, module.check_mode)
            changes += services.apply_request(manager, request, module.check_mode)
            if not module.check_mode:
                started_services = services.started_services(changes)
                start_records.write_digests(
                    paths.prefix, {name: digests[name] for name in digests if name in started_services}
                )
    module.exit_json(
        changed=bool(changes),
        diff=diff_of(changes),
        changes=[{key: getattr(change, key) for key in ("service", "before", "after")} for change in changes],
    )


if __name__ == "__main__":
    main()

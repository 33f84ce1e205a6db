#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: read_ahead
short_description: Reads what services are going to read into the page cache
description:
  - Reads programs and files of services, as far as memory is free, so that they start faster. Nothing else happens to them.
extends_documentation_fragment: llamacpp.cluster.attributes.info
options:
  services:
    description: Services as the plan holds them, of which C(process) and C(reads) are read.
    type: list
    elements: dict
    required: true
seealso:
  - module: llamacpp.cluster.service
"""

EXAMPLES = r"""
- name: Read the model before the head is stopped
  llamacpp.cluster.read_ahead:
    services: "{{ __llama_host_plan.services | selectattr('name', 'in', __llama_restart) }}"
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan


def main():
    module = AnsibleModule(
        argument_spec={"services": {"type": "list", "elements": "dict", "required": True}}, supports_check_mode=True
    )
    with errors.reported(module):
        planned = [typed_json.parse(ServicePlan, service) for service in module.params["services"]]
        services.read_ahead([] if module.check_mode else planned)
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()

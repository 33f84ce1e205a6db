# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adds to a lease what the controller knows of its run, and takes over the lease of a run of this controller that has ended."""

from __future__ import annotations

from ansible.errors import AnsibleConnectionFailure
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import lease
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LeaseArguments
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import run_identity
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action

display = Display()


class ActionModule(Action):
    ARGUMENTS = LeaseArguments

    def perform(self, arguments: LeaseArguments) -> dict:
        try:
            if arguments.state == "located":
                return self.module("llamacpp.cluster.host_info", scope=arguments.scope, cluster=arguments.cluster)
            return self._lease(arguments)
        except AnsibleConnectionFailure:  # ignore_unreachable has no effect with run_once
            display.warning(
                "The head cannot be reached: nothing keeps another run from changing this cluster at the same time."
            )
            return {"changed": False}

    def _lease(self, arguments: LeaseArguments) -> dict:
        arguments = arguments._replace(run=self.playbook_run)
        result = self.module(**arguments._asdict())
        holder = result.get("holder")
        if arguments.state == "acquired" and holder and not typed_json.problem("", holder, lease.Holder):
            other = typed_json.parse(lease.Holder, holder)
            if run_identity.has_ended(other):
                result = self.module(**arguments._replace(ended=other.run)._asdict())
        if result.get("taken_from"):
            display.display(f"  [{self.host}] took over from {validation.printable(result['taken_from'])}")
        return result

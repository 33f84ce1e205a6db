# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes what clients of a cluster need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import clients, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath


class Arguments(NamedTuple):
    plan: Mapping[str, Any]
    path: ControllerPath
    url: str = ""


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        if arguments.plan["refused"]:
            raise Refusal(
                f"The plan is refused, so there is nothing to connect to: {' '.join(arguments.plan['reasons'])}"
            )
        texts = clients.files_of(typed_json.parse(Plan, arguments.plan), arguments.url)
        output.write_folder("llama_clients_path", arguments.path, texts)
        Display().display(f"Open {arguments.path.rstrip('/')}/{clients.PAGE}")
        return {"changed": False}

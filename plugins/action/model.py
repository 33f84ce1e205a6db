# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Delivers the files of a model to the host."""

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.download import ModelArguments
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import delivery


class ActionModule(Action):
    ARGUMENTS = ModelArguments

    def perform(self, arguments: ModelArguments) -> dict:
        if arguments.known_answer:
            return self.run_module(**typed_json.dump(arguments))
        return delivery.deliver(self, arguments)

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings the files of a model onto the host."""

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.download import ModelArguments
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import delivery


class ActionModule(Action):
    ARGUMENTS = ModelArguments

    def perform(self, arguments: ModelArguments) -> dict:
        return (
            self.module(**typed_json.dump(arguments)) if arguments.known_answer else delivery.deliver(self, arguments)
        )

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the known-answer model into the controller's cache and copies it to the host."""

from __future__ import annotations

from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, why
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources


class ActionModule(Action):
    SPEC = {
        "path": {"type": "path", "required": True},
        "layers": {"type": "int", "required": True},
        "width": {"type": "int", "required": True},
        "type": {"type": "str", "choices": list(known_answer.BLOCKS), "required": True},
    }

    def perform(self, wanted: dict) -> dict:
        size = (wanted["layers"], wanted["width"], wanted["type"])
        problem = known_answer.problem(*size)
        if problem:
            raise AnsibleActionFail(f"The known-answer model cannot be made: {problem}.")
        model, record = sources.known_answer_model(*size)
        copied = [
            self._copy(source, target)
            for source, target in ((model, wanted["path"]), (record, known_answer.record_of(wanted["path"])))
        ]
        diff = {"diff": copied[0]["diff"]} if "diff" in copied[0] else {}
        return {
            "sentence": known_answer.SENTENCE,
            "changed": any(result.get("changed") for result in copied),
            **diff,
        }

    def _copy(self, source: Path, target: str) -> dict:
        result = self.copy(str(source), target)
        if result.get("failed"):
            raise AnsibleActionFail(
                f"The known-answer model could not be copied to {target}: {why(result)}. Make room there, or choose a smaller one "
                "with llama_model_known_answer, and run the playbook again"
            )
        return result

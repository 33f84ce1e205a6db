# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the known-answer model into the controller's cache and copies it to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, why
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources


class Arguments(NamedTuple):
    path: str
    layers: int
    width: int
    type: Annotated[str, tuple(known_answer.BLOCKS)]


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        size = arguments[1:]
        problem = known_answer.problem(*size)
        if problem:
            raise AnsibleActionFail(f"The known-answer model cannot be made: {problem}.")
        if self._is_there(arguments):
            return {"changed": False, "sentence": known_answer.SENTENCE}
        model, record = sources.known_answer_model(*size)
        copied = [
            self._copy(source, target)
            for source, target in ((model, arguments.path), (record, known_answer.record_of(arguments.path)))
        ]
        diff = {"diff": copied[0]["diff"]} if "diff" in copied[0] else {}
        return {
            "sentence": known_answer.SENTENCE,
            "changed": any(result.get("changed") for result in copied),
            **diff,
        }

    def _is_there(self, arguments: Arguments) -> bool:
        """Whether the host has a model that is too large to be read in each run, as the comparison with the plan judges it: by its size."""
        size = known_answer_file.file_bytes(*arguments[1:])
        if size <= state.HASHED_BYTES:
            return False
        stats = [
            self.module("ansible.builtin.stat", path=path, get_checksum=False).get("stat") or {}
            for path in (arguments.path, known_answer.record_of(arguments.path))
        ]
        return stats[0].get("size") == size and bool(stats[1].get("exists"))

    def _copy(self, source: Path, target: str) -> dict:
        result = self.copy(str(source), target)
        if result.get("failed"):
            raise AnsibleActionFail(
                f"The known-answer model could not be copied to {target}: {why(result)}. Make room there, or choose a smaller one "
                "with llama_model_known_answer, and run the playbook again"
            )
        return result

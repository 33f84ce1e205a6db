# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the known-answer model into the controller's cache and copies it to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelArguments
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, why
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources


class Size(NamedTuple):
    layers: int
    width: int
    type: Annotated[str, tuple(known_answer.BLOCKS)]


def run(action: Action, arguments: ModelArguments) -> dict:
    """The result of the module ``model`` for a known-answer model.

    :raises Refusal: there is no model of this size.
    """
    path, given = str(arguments.path), arguments.known_answer or {}
    wrong = typed_json.problem("known_answer", given, Size)
    if wrong:
        raise Refusal(f"{wrong.where} {wrong.why}")
    size = typed_json.parse(Size, given)
    problem = known_answer.problem(*size)
    if problem:
        raise Refusal(f"The known-answer model cannot be made: {problem}.")
    if _is_there(action, path, size):
        return {"changed": False}
    made = sources.known_answer_model(*size)
    copied = [
        _copy(action, source, target) for source, target in zip(made, (path, known_answer.record_of(path)), strict=True)
    ]
    diff = {"diff": copied[0]["diff"]} if "diff" in copied[0] else {}
    return {"changed": any(result.get("changed") for result in copied), **diff}


def _is_there(action: Action, path: str, size: Size) -> bool:
    """Whether the host has a model that is too large to be read in each run, as the comparison with the plan judges it: by its size."""
    expected = known_answer_file.file_bytes(*size)
    if expected <= state.HASHED_BYTES:
        return False
    stats = [
        action.module("ansible.builtin.stat", path=one, get_checksum=False).get("stat") or {}
        for one in (path, known_answer.record_of(path))
    ]
    return stats[0].get("size") == expected and bool(stats[1].get("exists"))


def _copy(action: Action, source: Path, target: str) -> dict:
    result = action.copy(str(source), target)
    if result.get("failed"):
        raise AnsibleActionFail(
            f"The known-answer model could not be copied to {target}: {why(result)}. Make room there, or choose a smaller one "
            "with llama_model_known_answer, and run the playbook again"
        )
    return result

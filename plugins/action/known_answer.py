# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the known-answer model into the controller's cache and copies it to the host."""

from __future__ import annotations

import sys

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils import known_answer
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import known_answer_file, sources
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.copying import copy


class ActionModule(ActionBase):
    _supports_check_mode = True

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _checked, wanted = self.validate_argument_spec(
            argument_spec={
                "path": {"type": "path", "required": True},
                "layers": {"type": "int", "required": True},
                "width": {"type": "int", "required": True},
                "type": {"type": "str", "choices": list(known_answer.BLOCKS), "required": True},
            }
        )
        size = (wanted["layers"], wanted["width"], wanted["type"])
        problem = known_answer.problem(*size)
        if problem:
            raise AnsibleActionFail(f"The known-answer model cannot be made: {problem}.")
        if not known_answer_file.HAS_GGUF:
            raise AnsibleActionFail(
                f"The known-answer model is written with the Python package gguf, which {sys.executable} on the controller lacks: "
                "install the collection's requirements.txt there."
            )
        written = sources.cache_folder() / "models" / known_answer_file.versioned_name(*size)
        if not written.exists():
            written.parent.mkdir(parents=True, exist_ok=True)
            known_answer_file.write(written, *size)
        result = copy(self, task_vars, str(written), wanted["path"])
        return {
            "sentence": known_answer.SENTENCE,
            **{key: result[key] for key in ("changed", "failed", "msg", "diff") if key in result},
        }

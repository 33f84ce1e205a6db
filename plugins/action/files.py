# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sends a host all files of its plan, including files on the controller, in a single call."""

from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FilePlan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action


class FilesArguments(NamedTuple):
    files: tuple[FilePlan, ...]


class ActionModule(Action):
    ARGUMENTS = FilesArguments

    def perform(self, arguments: FilesArguments) -> dict:
        files = [typed_json.dump(embed_text(file)) for file in arguments.files if file.mode]
        return self.run_module(files=files) if files else {"changed": False}


def embed_text(file: FilePlan) -> FilePlan:
    """Return a file with its text instead of its path on the controller."""
    return file._replace(source=None, content=Path(file.source).read_text("utf-8")) if file.source else file

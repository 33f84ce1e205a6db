# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds a model on the controller and reads its headers, wherever it is."""

import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_inputs, turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import ModelRequest
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import resolver

FILE = re.compile(r"--(?!log-)[a-z_-]+[-_]file(=|$)|-jf$|--lora(=|$)|--control-vector(=|$)")
"""Options of llama-server that name a file to read."""


class ActionModule(Action):
    ARGUMENTS = resolver.Options

    def perform(self, arguments: resolver.Options) -> dict:
        try:
            variables = inventory.variables_of(self.variables)
            entries = turns.overlays(variables)
        except Refusal:
            return {"changed": False}  # planning refuses it, and says so in the plan
        requests = {entry.name: _request(entry.variables) for entry in entries} or {"": _request(variables)}
        server = resolver.token_server(filter(None, requests.values()))
        reports = {name: _resolve(self, request, arguments, server) for name, request in requests.items()}
        missing = _missing_file(self, variables, arguments) if arguments.prefix else ""
        if missing:
            reports = {name: {**report, "refused": missing} for name, report in reports.items()}
        return {"changed": False, "models": reports} if entries else reports[""]


def _request(variables: Mapping[str, Any]) -> ModelRequest | None:
    try:
        return model_inputs.request_of(variables)
    except Refusal:
        return None  # the same


def _missing_file(action: Action, variables: Mapping[str, Any], options: resolver.Options) -> str:
    """Return a sentence about a file that the head lacks and llama-server needs; empty if there is none, or on a host on paper."""
    words = variables["llama_server_extra_args"] or []
    values = [
        word.partition("=")[2] or following for word, following in zip(words, [*words[1:], ""]) if FILE.match(word)
    ]
    files = {path: "llama_server_extra_args has" for path in values if path.startswith("/")}
    for name in services.CREDENTIALS.values():
        files[str(variables[f"llama_server_{name}"])] = f"llama_server_{name} is"
    paths = [path for path in files if path.startswith("/")]
    if not paths or variables["llama_hardware"]:
        return ""
    found = action.module(resolver.MODULE, paths=paths, timeout=options.timeout).get("paths", {})
    missing = next((path for path in paths if found.get(path, {}).get("error") == "does not exist"), None)
    return (
        f"{files[missing]} {missing!r}, which does not exist on the head: create it there, or correct the path"
        if missing
        else ""
    )


def _resolve(action: Action, request: ModelRequest | None, options: resolver.Options, server: str | None) -> dict:
    if request is None:
        return {"changed": False}
    if options.summary_is_enough and request.summary is not None:
        return {"changed": False}
    try:
        return resolver.resolve(action, request, options, server)
    except Refusal as refusal:
        return {"changed": False, "refused": str(refusal)}  # in the plan as well, where a program reads it

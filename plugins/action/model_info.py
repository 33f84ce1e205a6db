# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds the files of a model, and reads their headers on the host, on the controller or on a server."""

import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_inputs, turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import ModelRequest
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import resolver

FILE_OPTION_PATTERN = re.compile(r"--(?!log-)[a-z_-]+[-_]file(=|$)|-jf$|--lora(=|$)|--control-vector(=|$)")
"""Pattern for options of llama-server that name a file to read."""


class ActionModule(Action):
    ARGUMENTS = resolver.LookupOptions

    def perform(self, arguments: resolver.LookupOptions) -> dict:
        try:
            variables = inventory.variables_of(self.variables)
            model_entries = turns.read_entries(variables)
        except Refusal:
            return {"changed": False}  # planning refuses these variables with a reason
        requests = {entry.name: _request_of(entry.variables) for entry in model_entries} or {"": _request_of(variables)}
        token_server = resolver.token_server_url(filter(None, requests.values()))
        reports = {name: _resolve(self, request, arguments, token_server) for name, request in requests.items()}
        problem = _file_problem(self, variables, arguments) if arguments.prefix else ""
        if problem:
            reports = {name: {**report, "refused": problem} for name, report in reports.items()}
        return {"changed": False, "models": reports} if model_entries else reports[""]


def _request_of(variables: Mapping[str, Any]) -> ModelRequest | None:
    try:
        return model_inputs.request_of(variables)
    except Refusal:
        return None  # planning refuses these variables with a reason


def _file_problem(action: Action, variables: Mapping[str, Any], options: resolver.LookupOptions) -> str:
    """Return a sentence about a file that llama-server needs, but that is missing on the head or unreadable for its account; empty otherwise."""
    extra_args = variables["llama_server_extra_args"] or []
    option_values = [
        argument.partition("=")[2] or next_argument
        for argument, next_argument in zip(extra_args, [*extra_args[1:], ""])
        if FILE_OPTION_PATTERN.match(argument)
    ]
    sentence_starts = {path: "llama_server_extra_args has" for path in option_values if path.startswith("/")}
    credential_by_path = {str(variables[f"llama_server_{name}"]): name for name in services.CREDENTIALS.values()}
    sentence_starts.update({path: f"llama_server_{name} is" for path, name in credential_by_path.items()})
    paths = [path for path in sentence_starts if path.startswith("/")]
    if not paths or variables["llama_hardware"]:  # a host declared in llama_hardware has no files
        return ""
    argument = {"account": options.account} if options.account else {}
    reports = action.run_module(resolver.MODULE_NAME, paths=paths, timeout=options.timeout, **argument).get("paths", {})
    manager = service_managers.MANAGERS.get(options.service_manager or "")
    unchecked_paths = credential_by_path if not manager or manager.passes_credentials else {}
    for path in paths:
        report = reports.get(path, {})
        if report.get("error") == "does not exist":
            return f"{sentence_starts[path]} {path!r}, which does not exist on the head: create the file there, or correct the path"
        unreadable_path = validation.printable(report.get("unreadable_path") or "")
        if unreadable_path and path not in unchecked_paths:
            return (
                f"{sentence_starts[path]} {path!r}, but the service account {options.account} cannot read {unreadable_path}: let the account's group read it, "
                "with chgrp and chmod g+rX. If that account does not exist yet, run site.yml once without this variable"
            )
    return ""


def _resolve(action: Action, request: ModelRequest | None, options: resolver.LookupOptions, server: str | None) -> dict:
    if request is None or (options.summary_is_enough and request.summary is not None):
        return {"changed": False}
    try:
        return resolver.resolve(action, request, options, server)
    except Refusal as refusal:
        return {"changed": False, "refused": str(refusal)}  # programs read the reason in the plan

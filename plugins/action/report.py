# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the page of what other playbooks left on the controller, or a bug bundle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import bundle, html_page
from jinja2 import TemplateError

INPUTS = {
    "plan": "llama_plan_path",
    "verified": "llama_verify_path",
    "benchmark": "llama_benchmark_path",
}
LARGEST_FILE = 64 << 20
"""Bytes of a file; a cell takes 3 kB of a benchmark."""


class Arguments(NamedTuple):
    path: ControllerPath
    plan: ControllerPath | None = None
    verified: ControllerPath | None = None
    benchmark: ControllerPath | None = None
    bundle: Mapping[str, Any] | None = None
    """A bundle.Found."""


def _object(variable: str, path: str) -> dict[str, Any]:
    """The JSON object in a file of the controller that a variable names.

    :raises Refusal: it cannot be read, or holds something else.
    """
    shown = f"{variable} is {validation.show(path)}"
    try:
        text = reading.read(Path(os.path.expanduser(path)), LARGEST_FILE + 1, follow=True)
        if len(text) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE} bytes")
        return reading.parse(text)
    except OSError as error:
        raise Refusal(
            f"{shown}, which cannot be read on the controller: {error.strerror}. Use the path of a file that a playbook wrote there."
        ) from None
    except ValueError as error:
        raise Refusal(
            f"{shown}, and the file holds no JSON that can be read: {validation.printable(error)}. Use a file that a playbook wrote there."
        ) from None


def _read(arguments: Arguments) -> dict[str, Any]:
    """What the page shows, by the name of its part, without what is not asked for.

    :raises Refusal: a file cannot be read, or has another form.
    """
    named = {name: path for name, path in arguments._asdict().items() if name in INPUTS and path}
    if not named:
        raise Refusal(
            "There is nothing to report: set llama_plan_path, llama_verify_path or llama_benchmark_path to what a playbook wrote there."
        )
    if "benchmark" in named and Path(os.path.expanduser(named["benchmark"])).is_dir():
        named["benchmark"] += "/benchmark.json"
    read: dict[str, Any] = {name: _object(INPUTS[name], path) for name, path in named.items()}
    if "benchmark" in read:
        path = validation.show(arguments.benchmark)
        read["benchmark"] = types.read(read["benchmark"], f"llama_benchmark_path is {path}, and the file")
    if "verified" in read:
        problem = typed_json.problem("", read["verified"], Report)
        if problem:
            raise Refusal(
                f"llama_verify_path names no result of a verification: {problem.where} {problem.why}. Use a file that verify.yml wrote."
            )
        read["verified"] = typed_json.parse(Report, read["verified"])
    if "plan" in read:
        record = Plan if "hosts" in read["plan"] else Refused
        problem = typed_json.problem("", read["plan"], record)
        if problem:
            raise Refusal(
                f"llama_plan_path is {validation.show(arguments.plan)}, and the file holds no plan that this collection can read ({problem.where} "
                f"{problem.why}). Use a file that plan.yml of this version wrote."
            )
        read["plan"] = typed_json.parse(record, read["plan"])
    return read


def write(arguments: Arguments) -> None:
    """Writes the page of the files that arguments name.

    :raises AnsibleActionFail: there is nothing to show, a file cannot be read or has another form, or the page cannot be written.
    """
    try:
        read = _read(arguments)
    except Refusal as refusal:
        raise AnsibleActionFail(str(refusal)) from None
    try:
        page = html_page.page(read.get("plan"), (), read.get("verified"), read.get("benchmark"))
    except (ArithmeticError, LookupError, TypeError, AttributeError, ValueError, TemplateError):
        name = "plan" if arguments.plan else "benchmark"
        raise AnsibleActionFail(
            f"{INPUTS[name]} is {validation.show(getattr(arguments, name))}, and the file holds no {name} that this collection can read. Use a "
            f"file that {name}.yml of this version wrote."
        ) from None
    output.write("llama_report_path", arguments.path, page)


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        if arguments.bundle is not None:
            return self._bundle(arguments.path, arguments.bundle)
        write(arguments)
        return {"changed": False}

    def _bundle(self, path: str, found: Mapping[str, Any]) -> dict:
        text = bundle.make(found, self._secrets([*found["reports"]]))
        if not self.check_mode:
            output.write("llama_report_bundle", path, text, 0o600)
        return {"changed": False}

    def _secrets(self, hosts: list[str]) -> dict[str, str]:
        """Secret → its kind: of variables, and those that the operator typed."""
        typed = (self._play_context.password, self._play_context.become_pass)
        found = {str(word): "Ansible password" for word in typed if word}
        for name in hosts:
            own, variables = self.variables["hostvars"][name], {}
            for variable in own:
                if variable.startswith("llama_") or bundle.SECRET_NAME.search(variable):
                    with suppress(AnsibleError):
                        variables[variable] = own[variable]
            found.update(bundle.secrets_of(variables))
        return found

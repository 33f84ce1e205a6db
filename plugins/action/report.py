# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the page of what other playbooks left on the controller, or a bug bundle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ansible import constants
from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import bundle

LARGEST_FILE = 64 << 20
"""Bytes of a file; a cell takes 3 kB of a benchmark."""

display = Display()


class Arguments(NamedTuple):
    path: ControllerPath
    plan: ControllerPath | None = None
    verified: ControllerPath | None = None
    benchmark: ControllerPath | None = None
    bundle: Mapping[str, Any] | None = None
    """As bundle.make takes it."""


def _read(variable: str, path: str | None, record: type, without_hosts: type | None = None) -> Any:
    """What the file of a variable holds; None without a path.

    :param without_hosts: what a file without ``hosts`` holds, where that is something else.
    :raises Refusal: it cannot be read, or has another form.
    """
    if not path:
        return None
    shown = f"{variable} is {validation.show(path)}"
    try:
        text = reading.read_start(Path(os.path.expanduser(path)), LARGEST_FILE + 1, follow=True)
        if len(text) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE} bytes")
        data = reading.parse(text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else validation.printable(error)
        raise Refusal(
            f"{shown}, which cannot be read on the controller: {why}. Use a file that a playbook wrote there."
        ) from None
    record = without_hosts if without_hosts and "hosts" not in data else record
    try:
        return typed_json.parse(record, data)
    except typed_json.Mismatch as error:
        raise Refusal(
            f"{shown}, and the file has not the form that it has in this version: {error}. Use one that a playbook of this version wrote."
        ) from None


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        if arguments.bundle is not None:
            return self._bundle(arguments.path, arguments.bundle)
        measured = arguments.benchmark
        if measured and Path(os.path.expanduser(measured)).is_dir():
            measured += "/benchmark.json"
        found = (
            _read("llama_plan_path", arguments.plan, Plan, Refused),
            _read("llama_verify_path", arguments.verified, Report),
            _read("llama_benchmark_path", measured, Benchmark),
        )
        if not any(found):
            raise Refusal(
                "There is nothing to report: set llama_plan_path, llama_verify_path or llama_benchmark_path to what a playbook wrote there."
            )
        output.write_report(arguments.path, *found)
        return {"changed": False}

    def _bundle(self, path: str, found: Mapping[str, Any]) -> dict:
        shown = json.dumps([found["plan"], found["facts"]], ensure_ascii=False)
        text = bundle.make(found, self._secrets([*found["reports"]], shown))
        if not self.check_mode:
            output.write("llama_report_bundle", path, text, 0o600)
            display.display(f"  The bundle is {validation.printable(path)}. {bundle.BEFORE_SENDING}")
        return {"changed": False}

    def _secrets(self, hosts: list[str], shown: str) -> dict[str, str]:
        """Secret → its kind: of variables, and those that the operator typed.

        :param shown: as bundle.secrets_of takes it.
        """
        known = {*inventory.specification(), *inventory.run_variables(), *constants.INTERNAL_STATIC_VARS}
        typed = (self._play_context.password, self._play_context.become_pass)
        found = {str(word): "Ansible password" for word in typed if word}
        for name in hosts:
            own, variables = self.variables["hostvars"][name], {}
            for variable in own:
                if variable not in known:
                    with suppress(AnsibleError):
                        variables[variable] = own[variable]
            found.update(bundle.secrets_of(variables, known, shown))
        return found

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the page of what other playbooks left on the controller."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import html_page, measurements, plots
from jinja2 import TemplateError

INPUTS = {
    "plan": "llama_plan_path",
    "verified": "llama_verify_path",
    "benchmark": "llama_benchmark_path",
    "compare": "llama_report_compare",
}
CHECKED = {
    "cluster": Text(),
    "passed": bool,
    "checks": [dict.fromkeys(("name", "subject", "status", "evidence"), Text(longest=validation.LONGEST))],
}
"""The form of llama_verify_path."""


def _read(arguments: dict[str, str]) -> dict[str, Any]:
    """What the page shows, by the name of its part; None of what is not asked for.

    :raises Refusal: a file cannot be read, or has another form.
    """
    if not any(arguments[name] for name in ("plan", "verified", "benchmark")):
        raise Refusal(
            "There is nothing to report: set llama_plan_path, llama_verify_path or llama_benchmark_path to what a playbook wrote there."
        )
    if arguments["compare"] and not arguments["benchmark"]:
        raise Refusal("llama_report_compare needs llama_benchmark_path, with which it is compared: set that too.")
    read: dict[str, Any] = {}
    for name, variable in INPUTS.items():
        reader = measurements.read_object if name in ("plan", "verified") else measurements.read
        read[name] = reader(variable, arguments[name]) if arguments[name] else None
    problem = validation.mismatch("", read["verified"], CHECKED) if read["verified"] else None
    if problem:
        raise Refusal(
            f"llama_verify_path names no result of a verification: {problem.where} {problem.why}. Use a file that verify.yml wrote."
        )
    if read["plan"] is not None:
        record = Plan if "hosts" in read["plan"] else Refused
        problem = typed_json.problem("", read["plan"], record)
        if problem:
            raise Refusal(
                f"llama_plan_path is {validation.show(arguments['plan'])}, and the file holds no plan that this collection can read ({problem.where} "
                f"{problem.why}). Use a file that plan.yml of this version wrote."
            )
        read["plan"] = typed_json.parse(record, read["plan"])
    return read


def write(arguments: dict[str, str]) -> None:
    """Writes the page of the files that arguments name.

    :raises AnsibleActionFail: there is nothing to show, a file cannot be read or has another form, or the page cannot be written.
    """
    try:
        read = _read(arguments)
    except Refusal as refusal:
        raise AnsibleActionFail(str(refusal)) from None
    try:
        page = html_page.page(read["plan"], (), read["verified"], read["benchmark"], read["compare"])
    except (ArithmeticError, LookupError, TypeError, AttributeError, ValueError, TemplateError):
        name, what = ("plan", "plan") if arguments["plan"] else ("benchmark", "benchmark")
        raise AnsibleActionFail(
            f"{INPUTS[name]} is {validation.show(arguments[name])}, and the file holds no {what} that this collection can read. Use a "
            f"file that {what}.yml of this version wrote."
        ) from None
    output.write("llama_report_path", arguments["path"], page)


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _checked, arguments = self.validate_argument_spec(
            argument_spec={"path": {"type": "path", "required": True}, **{name: {"type": "path"} for name in INPUTS}}
        )
        write(arguments)
        return {
            "changed": False,
            **({"warnings": [plots.MISSING]} if arguments["benchmark"] and plots.missing() else {}),
        }

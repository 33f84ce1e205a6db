# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run shows its operator, and the files that it leaves on the controller."""

from __future__ import annotations

from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.check import report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import html_page


def write(variable: str, path: str, text: str) -> None:
    """Writes what the operator asked for at the path that a variable names.

    :raises AnsibleActionFail: it cannot be written there.
    """
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise AnsibleActionFail(
            f"{variable} is {path}, which cannot be written on the controller: {error.strerror}. Use a path in a folder that exists and is "
            "writable."
        ) from error


def show_plan(plan: dict, changed: list[str] | None, html: str | None) -> None:
    """Shows the page of a plan, and writes it where a path is given.

    :param changed: of report.changes_of; None where no host was compared with the plan.
    """
    Display().display(report.plan_page(plan, changed))
    if html:
        write("llama_plan_html_path", html, html_page.page(plan, changed))

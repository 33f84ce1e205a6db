# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run shows its operator, and the files that it leaves on the controller."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import html_page, plan_text


def write(variable: str, path: str, content: str, mode: int | None = None) -> None:
    """Writes what the operator asked for at the path that a variable names. A file there has the old text or the new one, whole.

    :param mode: of the file; None for that which it has, or as this account makes files.
    :raises AnsibleActionFail: it cannot be written there.
    """
    try:
        target = Path(os.path.expanduser(path))
        if target.exists() and not target.is_file():
            target.write_text(content)  # a terminal, a pipe
        else:
            target = target.resolve()
            files.replace_file(target, content, _mode(target) if mode is None else mode)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AnsibleActionFail(
            f"{variable} is {path!r}, which cannot be written on the controller: {reason}. Use a path in a folder that exists, is "
            "writable and has space."
        ) from None


def write_folder(variable: str, path: str, texts: Mapping[str, str]) -> None:
    """Writes files into the folder that a variable names, which is made.

    :param texts: name of a file, perhaps in a folder below → its content.
    :raises AnsibleActionFail: they cannot be written there.
    """
    folder = Path(os.path.expanduser(path))
    try:
        for name in texts:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AnsibleActionFail(
            f"{variable} is {path!r}, which cannot be made on the controller: {error.strerror}. Use a folder that is writable."
        ) from None
    for name, text in texts.items():
        write(variable, str(folder / name), text)


def _mode(target: Path) -> int:
    """Of a file as it is, or as this account makes files."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    os.umask(mask := os.umask(0o077))
    return 0o666 & ~mask


def show_plan(
    plan: Plan | Refused,
    changes: Sequence[str],
    report_path: str | None,
) -> None:
    """Shows the page of a plan, and writes it where a path is given.

    :param changes: what site.yml would change.
    """
    Display().display(plan_text.plan_page(plan, changes))
    if report_path:
        write("llama_report_path", report_path, html_page.page(plan, changes))


def write_report(path: str, plan: Plan | Refused | None, verified: Report | None, measured: Benchmark | None) -> None:
    """Writes the page of what is served, how it was verified and what was measured of it.

    :raises AnsibleActionFail: the page cannot be written.
    """
    write("llama_report_path", path, html_page.page(plan, (), verified, measured))

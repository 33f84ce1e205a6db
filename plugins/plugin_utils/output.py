# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Output of a run for its operator, and the files that it writes on the controller."""

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
    """Write content to the path that the operator set in a variable. Replace the file atomically.

    :param mode: mode of the file; None keeps the mode of an existing file, or uses the account's default.
    """
    try:
        target_path = Path(os.path.expanduser(path))
        if target_path.exists() and not target_path.is_file():
            target_path.write_text(content)  # a terminal or a pipe
        else:
            target_path = target_path.resolve()
            files.replace_file(target_path, content, _file_mode(target_path) if mode is None else mode)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AnsibleActionFail(
            f"{variable} is {path!r}, which cannot be written on the controller: {reason}. Use a path in a folder that exists, is writable and has space."
        ) from None


def write_folder(variable: str, path: str, texts: Mapping[str, str]) -> None:
    """Write files into the folder that the operator set in a variable, and create the folder if it is missing.

    :param texts: content of each file by its path inside the folder.
    """
    folder = Path(os.path.expanduser(path))
    try:
        for name in texts:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AnsibleActionFail(
            f"{variable} is {path!r}, which cannot be created on the controller: {error.strerror}. Use a writable folder."
        ) from None
    for name, text in texts.items():
        write(variable, str(folder / name), text)


def _file_mode(target_path: Path) -> int:
    """Return the mode of an existing file, or the default mode of this account's new files."""
    if target_path.exists():
        return stat.S_IMODE(target_path.stat().st_mode)
    os.umask(mask := os.umask(0o077))
    return 0o666 & ~mask


def show_plan(plan: Plan | Refused, changes: Sequence[str], report_path: str | None) -> None:
    """Show the page of a plan, and write it if a path is set."""
    Display().display(plan_text.plan_page(plan, changes))
    if report_path:
        write("llama_report_path", report_path, html_page.page(plan, changes))


def write_report(
    path: str, plan: Plan | Refused | None, verification: Report | None, benchmark: Benchmark | None
) -> None:
    """Write the page of the serving plan, its verification and its benchmark."""
    write("llama_report_path", path, html_page.page(plan, (), verification, benchmark))

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that a run leaves on the controller for its operator."""

from __future__ import annotations

from pathlib import Path

from ansible.errors import AnsibleActionFail


def write(variable: str, path: str, text: str) -> None:
    """Writes what the operator asked for at the path that a variable names.

    :raises AnsibleActionFail: it cannot be written there.
    """
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise AnsibleActionFail(
            f"{variable} is {path}, which cannot be written on the controller: {error.strerror}. Give a path in a folder that is there and may be "
            "written to."
        ) from error

# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs of the host, found also where a login that is not interactive does not look."""

from __future__ import annotations

import os
import shutil
import subprocess

SEARCH = os.pathsep.join(
    [
        os.environ.get("PATH", ""),
        "/usr/local/bin",
        "/opt/homebrew/bin",
        "/usr/local/cuda/bin",
        "/opt/rocm/bin",
        "/usr/sbin",
        "/sbin",
    ]
)
COMMAND_SECONDS = 20


def output(argv: list[str]) -> str:
    """What a command prints, or nothing if it is not there or fails."""
    program = shutil.which(argv[0], path=SEARCH)
    if not program:
        return ""
    try:
        return subprocess.run(
            [program, *argv[1:]],
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=True,
            env={**os.environ, "LC_ALL": "C"},
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""

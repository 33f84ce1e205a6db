# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Identity of a run of ansible-playbook, and whether another run of this controller has ended."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.host.lease import Holder

PROCESSES = Path("/proc")
ENDED = ("Z", "X", "x")
"""States of a process that has ended before its parent asked for its status (proc(5))."""
LONGEST_NAME = 120


def _start_of(process: int) -> str | None:
    """When a process started; None where it has ended, empty where another account hides it."""
    if platform.system() != "Linux":
        listed = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(process)], capture_output=True, text=True, check=False
        )
        return listed.stdout.strip() or None
    try:
        os.kill(process, 0)
    except PermissionError:
        pass
    except (ProcessLookupError, OverflowError):
        return None
    try:
        fields = (PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if fields[0] in ENDED else fields[19]


def _identity(process: int, start: str) -> str:
    return hashlib.sha256(f"{socket.gethostname()} {process} {start}".encode()).hexdigest()[:32]


def current(process: int, playbooks: Sequence[str]) -> dict[str, Any]:
    """A run, as the module lease takes it: a Holder without ``since``.

    :param process: of ansible-playbook.
    :param playbooks: as its command line names them.
    """
    return {
        "run": _identity(process, _start_of(process) or ""),
        "user": getpass.getuser()[:LONGEST_NAME],
        "controller": socket.gethostname()[:LONGEST_NAME],
        "process": process,
        "playbook": ", ".join(Path(name).name for name in playbooks)[:LONGEST_NAME],
    }


def has_ended(holder: Holder) -> bool:
    """Whether a run was one of this controller, and has ended. False where that cannot be known."""
    if holder.controller != socket.gethostname()[:LONGEST_NAME]:
        return False
    start = _start_of(holder.process)
    return start is None or (start != "" and _identity(holder.process, start) != holder.run)

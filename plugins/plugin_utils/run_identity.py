# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which run this is, and whether another one of this controller still goes on."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENDED = ("Z", "X", "x")
"""States of a process that has ended and whose parent does not know yet (proc(5))."""
PROCESSES = Path("/proc")
SHOWN = 120
"""Characters of a name that a lease holds."""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _machine() -> str:
    """The same for all processes that see each other, and for no others: the machine, and the container in it."""
    identity = _text(Path("/etc/machine-id")) or f"{uuid.getnode():x}"
    try:
        container = os.readlink(PROCESSES / "self" / "ns" / "pid")
    except OSError:
        container = ""
    return hashlib.sha256(f"{identity} {container}".encode()).hexdigest()[:32]


def start_of(process: int) -> str | None:
    """When a process started, as a text to compare; None where it has ended, empty where that cannot be read."""
    if platform.system() != "Linux":
        said = subprocess.run(["ps", "-o", "lstart=", "-p", str(process)], capture_output=True, text=True, check=False)
        return said.stdout.strip() or None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except OverflowError:
        return None
    except PermissionError:
        pass
    fields = _text(PROCESSES / str(process) / "stat").rpartition(")")[2].split()
    if not fields:
        return ""
    return None if fields[0] in ENDED else fields[19]


def run(process: int, playbooks: Sequence[str]) -> dict[str, Any]:
    """This run, as module_utils/host/lease.py has it in HOLDER, without ``since``.

    :param process: ansible-playbook's.
    :param playbooks: as its command line names them.
    """
    known = {
        "user": getpass.getuser()[:SHOWN],
        "controller": socket.gethostname()[:SHOWN],
        "machine": _machine(),
        "boot": _text(Path("/proc/sys/kernel/random/boot_id")),
        "process": process,
        "started": start_of(process) or "",
    }
    identity = hashlib.sha256(repr(sorted(known.items())).encode()).hexdigest()[:32]
    return {**known, "playbook": ", ".join(Path(name).name for name in playbooks)[:SHOWN], "run": identity}


def has_ended(holder: Mapping[str, Any]) -> bool:
    """Whether a run was one of this controller, and has ended. False where that cannot be known.

    :param holder: what the head says of it, as HOLDER.
    """
    here = run(os.getpid(), [])
    if (holder["controller"], holder["machine"]) != (here["controller"], here["machine"]):
        return False
    if holder["boot"] != here["boot"]:
        return True
    started = start_of(holder["process"])
    return started is None or bool(started and holder["started"] and started != holder["started"])

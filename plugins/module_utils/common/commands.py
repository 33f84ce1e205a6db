# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs of the host, including programs outside the PATH of a non-interactive login."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

SEARCH_PATH = os.pathsep.join(
    [
        *filter(os.path.isabs, os.environ.get("PATH", "").split(os.pathsep)),
        *("/usr/local/bin", "/opt/homebrew/bin", "/usr/local/cuda/bin", "/opt/rocm/bin"),
        *("/usr/sbin", "/sbin", "/usr/bin", "/bin"),
    ]
)
"""Search path of absolute folders only: an empty entry means the current folder, and modules run as root."""
COMMAND_TIMEOUT_SECONDS = 20
ROOT = Path("/")
Ask = Callable[[list], str]
"""Function that runs a command and returns its output, like ``output``."""


class CommandError(Refusal):
    """Failure of a command; ``status`` is None if the command did not start or did not finish."""

    def __init__(self, argv: list[str], reason: str, status: int | None) -> None:
        super().__init__(f"{shlex.join(argv)} failed: {reason}. Fix this on the host and run the playbook again.")
        self.reason = reason
        self.status = status


def find(program: str) -> str | None:
    return shutil.which(program, path=SEARCH_PATH)


def set_runtime_directory() -> None:
    """Set XDG_RUNTIME_DIR, which systemctl --user needs, if the login did not set it."""
    runtime_folder = f"/run/user/{os.geteuid()}"
    if os.path.exists(runtime_folder + "/bus"):
        os.environ.setdefault("XDG_RUNTIME_DIR", runtime_folder)


def run_as_options(account: str | None) -> dict[str, Any]:
    """Return ``user``, ``group`` and ``extra_groups`` for running a command as an account with subprocess; empty unless this process runs as root.

    :raises Refusal: the account does not exist.
    """
    if account is None or os.geteuid() != 0:
        return {}
    try:
        user = pwd.getpwnam(account)
    except KeyError:
        raise Refusal(f"the account {account} is missing on this host: run site.yml to create it") from None
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": os.getgrouplist(account, user.pw_gid)}


def run(argv: list[str], seconds: float, text: str = "", may_fail: bool = False, account: str | None = None) -> str:
    """Run a command in the C locale with ``text`` as input, and return its output.

    :param may_fail: whether to accept exit statuses other than 0.
    :param account: account that runs the command, if this process runs as root.
    """
    program = find(argv[0])
    if not program:
        raise CommandError(argv, f"{argv[0]} is not installed", None)
    try:
        completed = subprocess.run(
            [program, *argv[1:]],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env={**os.environ, "PATH": SEARCH_PATH, "LC_ALL": "C"},
            **run_as_options(account),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(argv, str(error), None) from error
    if completed.returncode and not may_fail:
        reason = (completed.stderr or completed.stdout).strip() or f"status {completed.returncode}"
        raise CommandError(argv, reason, completed.returncode)
    return completed.stdout


def output(argv: list[str]) -> str:
    """Return the output of a command; empty if it is missing or fails."""
    try:
        return run(argv, COMMAND_TIMEOUT_SECONDS)
    except CommandError:
        return ""

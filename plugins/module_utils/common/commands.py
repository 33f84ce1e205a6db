# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs of the host, including those outside the PATH of a non-interactive login."""

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

SEARCH = os.pathsep.join(
    [
        *filter(os.path.isabs, os.environ.get("PATH", "").split(os.pathsep)),
        "/usr/local/bin",
        "/opt/homebrew/bin",
        "/usr/local/cuda/bin",
        "/opt/rocm/bin",
        "/usr/sbin",
        "/sbin",
        "/usr/bin",
        "/bin",
    ]
)
"""Search path of absolute folders only: an empty entry means the current folder, and modules run as root."""
COMMAND_SECONDS = 20
ROOT = Path("/")
Ask = Callable[[list], str]
"""Function that runs a command and returns its output, like ``output``."""


class CommandError(Refusal):
    """A command failed for ``reason``; ``status`` is None if it did not start or did not finish."""

    def __init__(self, argv: list[str], reason: str, status: int | None) -> None:
        super().__init__(f"«{shlex.join(argv)}» failed: {reason}. Fix this on the host, and run the playbook again.")
        self.reason = reason
        self.status = status


def find(program: str) -> str | None:
    """Return the path of a program, or None."""
    return shutil.which(program, path=SEARCH)


def find_user_session() -> None:
    """Set XDG_RUNTIME_DIR, which systemctl --user needs, if the login did not."""
    runtime = f"/run/user/{os.geteuid()}"
    if os.path.exists(runtime + "/bus"):
        os.environ.setdefault("XDG_RUNTIME_DIR", runtime)


def account_options(account: str | None) -> dict[str, Any]:
    """Return ``user``, ``group`` and ``extra_groups`` with which subprocess runs a command as an account; empty unless this process is root's.

    :raises Refusal: there is no such account.
    """
    if account is None or os.geteuid() != 0:
        return {}
    try:
        entry = pwd.getpwnam(account)
    except KeyError:
        raise Refusal(f"the account {account} is missing on this host: run site.yml to create it") from None
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": os.getgrouplist(account, entry.pw_gid)}


def run(argv: list[str], seconds: float, text: str = "", may_fail: bool = False, account: str | None = None) -> str:
    """Run a command with ``text`` as input, in English, and return its output.

    :param may_fail: whether another status than 0 is no failure.
    :param account: account as which root runs it.
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
            env={**os.environ, "PATH": SEARCH, "LC_ALL": "C"},
            **account_options(account),
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
        return run(argv, COMMAND_SECONDS)
    except CommandError:
        return ""

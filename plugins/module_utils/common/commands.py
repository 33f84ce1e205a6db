# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs of the host, also in folders that are not in the PATH of a non-interactive login."""

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
"""Absolute folders alone: an empty entry is the current folder, and modules run as root."""
COMMAND_SECONDS = 20
ROOT = Path("/")
Ask = Callable[[list], str]
"""Runs a command and returns what it prints, as commands.output does."""


class CommandError(Refusal):
    """A command failed. ``reason`` is why; ``status`` is None if it could not be run, or not to its end."""

    def __init__(self, argv: list[str], reason: str, status: int | None) -> None:
        super().__init__(
            f"«{shlex.join(argv)}» failed: {reason}. Fix what it names on the host, and run the playbook again."
        )
        self.reason = reason
        self.status = status


def find(program: str) -> str | None:
    """Path of a program that is installed."""
    return shutil.which(program, path=SEARCH)


def find_user_session() -> None:
    """Lets systemctl --user reach the user's systemd also after a login that does not set XDG_RUNTIME_DIR."""
    runtime = f"/run/user/{os.geteuid()}"
    if os.path.exists(runtime + "/bus"):
        os.environ.setdefault("XDG_RUNTIME_DIR", runtime)


def as_account(account: str | None) -> dict[str, Any]:
    """How subprocess runs a command as an account: ``user``, ``group`` and ``extra_groups``; empty where this process is not root's.

    :raises Refusal: there is no such account.
    """
    if account is None or os.geteuid() != 0:
        return {}
    try:
        entry = pwd.getpwnam(account)
    except KeyError:
        raise Refusal(f"the account {account} is missing on this host: run site.yml, which makes it") from None
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": os.getgrouplist(account, entry.pw_gid)}


def run(argv: list[str], seconds: float, text: str = "", may_fail: bool = False, account: str | None = None) -> str:
    """What a command prints, given ``text``. It speaks no other language, since what it prints is read.

    :param seconds: how long it may take.
    :param may_fail: whether its status says something else than that it failed.
    :param account: as which root runs it.
    """
    program = find(argv[0])
    if not program:
        raise CommandError(argv, f"{argv[0]} is not installed", None)
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env={**os.environ, "PATH": SEARCH, "LC_ALL": "C"},
            **as_account(account),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(argv, str(error), None) from error
    if done.returncode and not may_fail:
        reason = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise CommandError(argv, reason, done.returncode)
    return done.stdout


def output(argv: list[str]) -> str:
    """Output of a command; empty if it is missing or fails."""
    try:
        return run(argv, COMMAND_SECONDS)
    except CommandError:
        return ""

# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tunnel keys, which exist only on their hosts."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import stat
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file

KEY_FILE_MODE = 0o600
IDENTITY_DIGITS = 16
KEY_LINE_PATTERN = re.compile(rf"[0-9a-f]{{{IDENTITY_DIGITS}}}:[0-9a-f]{{64}}\n")
MAX_KEY_FILE_BYTES = 64 * 1024


def identity_of(key: str) -> str:
    """Return the public identity of a key: a digest that is safe to send and to log."""
    return hashlib.sha256(key.encode()).hexdigest()[:IDENTITY_DIGITS]


def line_of(key: str) -> str:
    return f"{identity_of(key)}:{key}\n"


def identities(path: Path, account: str | None) -> tuple[str, ...]:
    """Return the identities of the keys in a file, the head's key first. Return none if the file is missing, or if anyone but the services may read it.

    :param account: account of the services; None for the account of this process.
    """
    return tuple(line.split(":", 1)[0] for line in _key_lines(path, account))


def put_key_first(path: Path, key: str, account: str | None, keep_other_keys: bool, check_mode: bool) -> bool:
    """Make a key the first in a file, before its present keys if they are kept; return whether the file changes.

    :raises OSError: the file cannot be written, or the account does not exist.
    """
    lines_before = _key_lines(path, account)
    first_line = line_of(key)
    lines_after = [first_line, *(line for line in lines_before if keep_other_keys and line != first_line)]
    if lines_after == lines_before:
        return False
    if not check_mode:
        replace_file(path, "".join(lines_after), KEY_FILE_MODE, None if account is None else _uid(account))
    return True


def _key_lines(path: Path, account: str | None) -> list[str]:
    try:
        owner_uid = os.geteuid() if account is None else _uid(account)
        with reading.open_file(path) as stream:
            status = os.fstat(stream.fileno())
            if stat.S_IMODE(status.st_mode) != KEY_FILE_MODE or status.st_uid != owner_uid:
                return []
            lines = stream.read(MAX_KEY_FILE_BYTES).decode("ascii", "replace").splitlines(keepends=True)
    except OSError:
        return []
    return [line for line in lines if KEY_LINE_PATTERN.fullmatch(line)]


def _uid(account: str) -> int:
    try:
        return pwd.getpwnam(account).pw_uid
    except KeyError:
        raise OSError(f"the account {account} does not exist") from None

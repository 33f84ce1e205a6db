# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's cache: folders that its account alone can use, one run at a time in each, and files that appear when they are whole."""

from __future__ import annotations

import errno
import math
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks

LOCK = ".lock"
WORK = ".work-"
"""How names of folders begin that hold what is not whole yet."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class CacheError(AnsibleError):
    """The cache cannot be used; the message names the folder, why, and what to do."""


def root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "llamacpp"


def folder(name: str, variable: str) -> Path:
    """A folder of the cache, made where it is missing.

    :param name: may have several parts, ``releases/one``.
    :param variable: what the operator has set, for messages.
    :raises CacheError: the cache belongs to another account, or the folder cannot be made.
    """
    path = root()
    with _sentence(variable, path / name):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path)
        (path / name).mkdir(parents=True, exist_ok=True)
    return path / name


def _check_owner(path: Path) -> None:
    owner = path.stat().st_uid
    if owner != os.geteuid():
        name, account = _name_of(owner), _name_of(os.geteuid())
        raise CacheError(
            f"The controller's cache {path} belongs to {name}, and this run to {account}: what it holds is installed on hosts, so that only "
            f"{account} may change it. Run as {name}, or set XDG_CACHE_HOME to a folder of {account}"
        )


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


@contextmanager
def exclusive_folder(name: str, variable: str, purpose: str) -> Iterator[Path]:
    """A folder of the cache that no other run uses meanwhile, without what killed runs left there.

    :param name: see folder.
    :param purpose: what this run does there, for one that waits: «fetches b11434».
    :raises CacheError: see folder; also in place of every OSError of the body.
    """
    path = folder(name, variable)
    with _sentence(variable, path):
        lock = locks.open_file(path / LOCK)
        try:
            _wait(lock, path)
            with suppress(OSError):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"process {os.getpid()}, which {purpose}".encode(), 0)
            for left in path.glob(WORK + "*"):
                shutil.rmtree(left, ignore_errors=True)
            yield path
        finally:
            os.close(lock)


def _wait(lock: int, path: Path) -> None:
    if not locks.take(lock):
        holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
        Display().display(f"  [controller] {path} is in use: waiting for {holder}")
        locks.take(lock, math.inf)


def work(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder inside one that this process has alone, for what is not whole yet."""
    return tempfile.TemporaryDirectory(dir=path, prefix=WORK)


@contextmanager
def _sentence(variable: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise CacheError(
                f"{variable} does not fit on the controller: the disk of {path} is full. Free some space and run it again"
            ) from None
        raise CacheError(
            f"{variable} needs {path} on the controller, which cannot be used ({error.strerror or error}): make it a folder that "
            f"{_name_of(os.geteuid())} can write, or set XDG_CACHE_HOME to one"
        ) from None

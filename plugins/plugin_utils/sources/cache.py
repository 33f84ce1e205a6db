# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's cache: folders that its account alone can use, one run at a time in each, and files that appear when they are whole."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks

LOCK = ".lock"
WORK = ".work-"
"""How names of folders begin that hold what is not whole yet."""


def root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "llamacpp"


def folder(name: str, variable: str) -> Path:
    """A folder of the cache, made where it is missing.

    :param name: may have several parts, ``releases/one``.
    :param variable: what the operator has set, for messages.
    :raises AnsibleError: the cache belongs to another account, or the folder cannot be made.
    """
    path = root()
    with _sentence(variable, path / name):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner, own = path.stat().st_uid, os.geteuid()
        if owner != own:
            raise AnsibleError(
                f"The controller's cache {path} belongs to uid {owner}, and this run to uid {own}: what it holds is installed on hosts, so that only one "
                f"account may change it. Run as uid {owner}, or set XDG_CACHE_HOME to a folder of uid {own}"
            )
        (path / name).mkdir(parents=True, exist_ok=True)
    return path / name


@contextmanager
def exclusive_folder(name: str, variable: str) -> Iterator[Path]:
    """A folder of the cache that no other run uses meanwhile, without what killed runs left there.

    :param name: see folder.
    :raises AnsibleError: see folder; also in place of every OSError of the body.
    """
    path = folder(name, variable)
    with _sentence(variable, path):
        lock = locks.open_file(path / LOCK)
        try:
            if not locks.take(lock):
                Display().display(f"  [controller] {path} is in use: waiting for {locks.shown_holders(path / LOCK)}")
                locks.take(lock, math.inf)
            for left in path.glob(WORK + "*"):
                shutil.rmtree(left, ignore_errors=True)
            yield path
        finally:
            os.close(lock)


def work(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder inside one that this process has alone, for what is not whole yet."""
    return tempfile.TemporaryDirectory(dir=path, prefix=WORK)


@contextmanager
def _sentence(variable: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AnsibleError(
            f"{variable} needs {path} on the controller, which cannot be used ({error.strerror or error}): make room there, make it a folder that uid "
            f"{os.geteuid()} can write, or set XDG_CACHE_HOME to one"
        ) from None

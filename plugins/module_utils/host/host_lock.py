# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One process at a time changes a host, and nobody compares it meanwhile: a run that is killed leaves its last task at work."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, locks, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

WAIT_SECONDS = 600


@contextmanager
def alone(prefix: str | None, changes: bool) -> Iterator[None]:
    """
    :param prefix: of the installation; without one, nobody is waited for. Nothing is written into a folder without our mark.
    :param changes: whether the host is changed. What only compares it writes nothing, and waits for nobody who compares it too.
    :raises Refusal: others have the lock for too long.
    """
    path = Path(prefix or os.devnull, names.CHANGES_LOCK)
    if not files.is_marked(path.parent):  # nothing is installed there, or it is somebody else's
        yield
        return
    try:
        lock = locks.open_file(path, os.O_RDWR | os.O_CREAT if changes else os.O_RDONLY)
    except locks.ForeignError:
        raise
    except OSError:  # nothing is installed there, or nothing can be written: what changes the host says why
        yield
        return
    try:
        if not locks.take(lock, WAIT_SECONDS, fcntl.LOCK_EX if changes else fcntl.LOCK_SH):
            raise Refusal(
                f"{locks.shown_holders(path)} on this host, a task of another run, has been changing it for more than {WAIT_SECONDS // 60} minutes "
                f"(it holds {path}): end it, and run the playbook again"
            )
        yield
    finally:
        os.close(lock)
